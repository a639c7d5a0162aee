"""Plots of a profile: kernel time by category, activity over time, parts of each step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope.profile.analysis.kernel_names import CATEGORIES, category
from attnscope.profile.analysis.steps import PARTS
from attnscope.profile.analysis.tables import NO_RANGE
from attnscope.profile.attribution.owners import Attribution
from attnscope.profile.render.document import INK
from attnscope.profile.render.table import unit_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from attnscope.profile.analysis.result import Result

# Okabe and Ito's colours, safe for colour-blind readers, and a violet for communication.
CATEGORY_COLOURS = dict(
    zip(
        CATEGORIES,
        (
            "#0072B2",
            "#D55E00",
            "#E69F00",
            "#56B4E9",
            "#CC79A7",
            "#009E73",
            "#B8A800",
            "#7F4FC9",
            "#8C8C8C",
        ),
        strict=True,
    )
)
_PART_COLOURS = ("#0072B2", "#B8A800", "#CC79A7", "#D55E00", "#E69F00", "#8C8C8C")
PART_COLOURS = dict(zip(PARTS, _PART_COLOURS, strict=True))
BINS = 240
MOST_STAGES = 12
MOST_STEPS = 24
LEGEND_COLUMNS = 6  # as many of the longest labels fit the width


def categories(attribution: Attribution) -> Figure | None:
    """One bar of kernel time by category per outermost range; None if there are no kernels."""
    times: dict[str, Counter[str]] = defaultdict(Counter)
    for kernel in attribution.trace.kernels:
        around = attribution.ranges(kernel)
        times[around[0].name if around else NO_RANGE][category(kernel.name)] += kernel.duration
    if not times:
        return None
    longest = sorted(times, key=lambda stage: -times[stage].total())[:MOST_STAGES]
    bars = {stage: {c: ns / 1e3 for c, ns in times[stage].items()} for stage in longest}
    return stacked_bars(*_with_unit(bars, CATEGORY_COLOURS, "kernel time"))


def activity(attribution: Attribution) -> Figure | None:
    """Share of time in which kernels of each category ran on the busiest GPU, over time.

    Streams add up: if kernels overlap, the sum exceeds 1. None if no kernel took any time.
    """
    kernels = attribution.trace.kernels
    if not kernels:
        return None
    by_gpu = Counter({k.device: 0 for k in kernels})
    for kernel in kernels:
        by_gpu[kernel.device] += kernel.duration
    gpu = by_gpu.most_common(1)[0][0]
    kernels = [kernel for kernel in kernels if kernel.device == gpu]
    start, end = kernels[0].start, max(kernel.end for kernel in kernels)
    edges = np.linspace(start, max(end, start + 1), BINS + 1)
    spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for kernel in kernels:
        if kernel.duration:
            spans[category(kernel.name)].append((kernel.start - start, kernel.end - start))
    filled = {name: _time_in_bins(np.array(span), edges - start) for name, span in spans.items()}
    used = [name for name in CATEGORIES if name in filled]
    if not used:
        return None
    figure, axis = _figure(2.4)
    scale, unit = unit_for((edges[-1] - start) / 1e3)
    axis.stackplot(
        (edges[:-1] - start) / (1e3 * scale),
        [filled[name] / np.diff(edges) for name in used],
        colors=[CATEGORY_COLOURS[name] for name in used],
        labels=used,
        step="post",
        linewidth=0,
    )
    axis.set_xlabel(f"{unit} after the first kernel, GPU {gpu}")
    axis.set_ylabel("share of time")
    axis.margins(x=0)
    _legend(figure, axis)
    return figure


def _time_in_bins(spans: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The time of all spans [n, 2] in each bin between `edges`."""
    spent = np.zeros(len(edges))  # up to each edge
    for times, sign in ((spans[:, 0], 1), (spans[:, 1], -1)):
        times = np.sort(times)
        before = np.searchsorted(times, edges, side="right")
        spent += sign * (before * edges - np.concatenate([[0], np.cumsum(times)])[before])
    return np.maximum(np.diff(spent), 0)


def step_parts(profile: Result) -> Figure | None:
    """One bar of wall time by part per step; None if there are no events."""
    if not profile.has_ops:
        return None
    steps = profile.steps().head(MOST_STEPS)
    bars = {row["step"]: {part: row[f"{part}_us"] for part in PARTS} for _, row in steps.iterrows()}
    return stacked_bars(*_with_unit(bars, PART_COLOURS, "wall time"))


def _with_unit(
    bars: Mapping[str, Mapping[str, float]], colours: Mapping[str, str], label: str
) -> tuple[Mapping[str, Mapping[str, float]], Mapping[str, str], str]:
    """Bars of microseconds in the unit that fits the longest, with their colours and label."""
    scale, unit = unit_for(max((sum(bar.values()) for bar in bars.values()), default=0.0))
    scaled = {name: {part: us / scale for part, us in bar.items()} for name, bar in bars.items()}
    return scaled, colours, f"{label}, {unit}"


def stacked_bars(
    bars: Mapping[str, Mapping[str, float]], colours: Mapping[str, str], label: str
) -> Figure:
    """Horizontal stacked bars, with parts in the order of `colours`."""
    figure, axis = _figure(0.9 + 0.28 * len(bars))
    left = np.zeros(len(bars))
    for part, colour in colours.items():
        widths = np.array([bar.get(part, 0.0) for bar in bars.values()])
        if widths.any():
            axis.barh(range(len(bars)), widths, 0.72, left, color=colour, label=part)
        left += widths
    # Names may contain "$", which must not start a formula.
    axis.set_yticks(range(len(bars)), [_cut(name) for name in bars], parse_math=False)
    axis.set_ylim(len(bars) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)
    axis.grid(visible=False, axis="y")
    axis.set_xlabel(label)
    _legend(figure, axis)
    return figure


def _cut(name: str) -> str:
    return name if len(name) <= 32 else f"{name[:31]}…"


def _figure(height: float) -> tuple[Figure, Axes]:
    import matplotlib
    from matplotlib.figure import Figure

    from attnscope.common.plotting import RC

    with matplotlib.rc_context(RC | _ink()):
        figure = Figure((9.0, height), layout="constrained")
        axis = figure.subplots()
    return figure, axis


def _ink() -> dict[str, Any]:
    keys = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    return dict.fromkeys(keys, INK) | {"grid.color": "#8886"}


def _legend(figure: Figure, axis: Axes) -> None:
    handles, labels = axis.get_legend_handles_labels()
    columns = min(len(labels), LEGEND_COLUMNS)
    figure.legend(
        handles, labels, loc="outside upper left", ncols=columns, labelcolor=INK, frameon=False
    )
