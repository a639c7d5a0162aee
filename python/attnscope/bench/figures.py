"""How figures are drawn: one look for each impl, panels of curves, dot plots of workloads."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope.bench.series import Family, Panel, Point, case_label
from attnscope.common.hardware.devices import Roof
from attnscope.common.plotting import INK, RC

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Style:
    """How an impl is drawn, everywhere. Ours are warm and heavy, others cool and light."""

    colour: str
    marker: str
    dash: str = "-"
    ours: bool = False


# Okabe and Ito's colours suit colour-blind readers; the markers distinguish curves in grey.
STYLES = {
    "cuda": Style("#D55E00", "o", ours=True),
    "cuda-sm80": Style("#E69F00", "s", ours=True),
    "triton": Style("#CC79A7", "D", ours=True),
    "cpu": Style("#D55E00", "o", ours=True),
    "sdpa-flash": Style("#0072B2", "v"),
    "fa2": Style("#0072B2", "P", "--"),
    "sdpa-cudnn": Style("#009E73", "^"),
    "fa3": Style("#000000", "X"),
    "fa3-metadata": Style("#000000", "h", ":"),
    "fa4": Style("#000000", "*", "--"),
    "sdpa-efficient": Style("#56B4E9", "<"),
    "flex": Style("#56B4E9", ">", "--"),
    "sdpa-math": Style("#7F7F7F", "p", ":"),
    "naive": Style("#7F7F7F", "d", "-."),
}
OTHER = Style("#B0B0B0", ".", ":")
MOST_TICKS = 12
ROOF: dict[str, Any] = {"color": "#B0B0B0", "linewidth": 3.0, "zorder": 2, "solid_capstyle": "butt"}
LINE: dict[str, Any] = {"color": INK, "linewidth": 0.8, "linestyle": (0, (4, 2)), "zorder": 1}

# Point -> (value, lower bound, upper bound), or None if the point has no value.
Value = Callable[[Point], tuple[float, float, float] | None]


@dataclass(frozen=True)
class Kind:
    """One kind of figure: the value that it shows for a point, and its axis."""

    name: str
    title: str
    axis: str
    value: Value
    bars: str = "p20 to p80 of the samples"
    ceiling: Callable[[Point], Roof | None] | None = None
    line: float | None = None
    log: bool = False


def draw(family: Family, kind: Kind, title: str, conditions: str, notes: Sequence[str]) -> Figure:
    """One figure: a panel for each head dim and mask, or a dot plot where lengths do not vary.

    Above it the title and the conditions, below it the notes, on the right the legend.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(RC):
        figure = Figure(layout="constrained")
        handles = (_draw_panels if family.panels else _draw_cases)(figure, family, kind)
        order = sorted(handles, key=lambda name: ([*STYLES, name].index(name), name))
        figure.legend([handles[name] for name in order], order, loc="outside right center")
        width = figure.get_figwidth()
        conditions = "\n".join(textwrap.wrap(conditions, int(width * 16)))
        # The title's extra lines reserve room for the conditions, which use another font.
        room = "\n" * (conditions.count("\n") + 1)
        head = figure.suptitle(title + room, x=0.01, ha="left", fontsize=11, weight="bold")
        foot = "\n".join(line for note in notes for line in textwrap.wrap(note, int(width * 19)))
        figure.supxlabel(foot, x=0.01, ha="left", fontsize=7, color=INK)
        # Compute the layout once: savefig would repeat it for each file.
        engine = figure.get_layout_engine()
        assert engine is not None
        engine.execute(figure)
        figure.set_layout_engine("none")
        box = head.get_window_extent().transformed(figure.transFigure.inverted())
        figure.text(0.01, box.y0, conditions, va="bottom", fontsize=8.5, color=INK)
    return figure


def _draw_panels(figure: Figure, family: Family, kind: Kind) -> dict[str, Any]:
    """Masks below each other, head dims side by side; masks side by side if there is one head dim.

    Panels without a value for this kind of figure are omitted.
    """
    panels = [p for p in family.panels if any(kind.value(q) for c in p.curves.values() for q in c)]
    columns = sorted({panel.column for panel in panels})
    masks = sorted({panel.work.causal for panel in panels})
    cells = {(masks.index(p.work.causal), columns.index(p.column)): p for p in panels}
    if len(columns) == 1:
        cells = {(column, row): panel for (row, column), panel in cells.items()}
    rows, cols = (max(place) + 1 for place in zip(*cells, strict=True))
    figure.set_size_inches(2.7 * max(cols, 2) + 1.8, 2.2 * rows + (1.3 if rows > 1 else 1.8))
    axes = figure.subplots(rows, cols, sharex=True, sharey=True, squeeze=False)
    handles: dict[str, Any] = {}
    for place, axis in np.ndenumerate(axes):
        axis.set_visible(place in cells)
    for (row, col), panel in cells.items():
        axis = axes[row, col]
        axis.set_title(panel.title)
        last, first = (row + 1, col) not in cells, (row, col - 1) not in cells
        axis.tick_params(labelbottom=last, labelleft=first)
        axis.set_xlabel("sequence length" if last else "")
        axis.set_ylabel(kind.axis if first else "")
        handles |= _draw_curves(axis, panel, kind)
    used = [axes[place] for place in cells]
    lengths = sorted({p.x for panel in panels for curve in panel.curves.values() for p in curve})
    used[0].set_xscale("log", base=2)
    ticks = _ticks(lengths)
    used[0].set_xticks(ticks, [_short(length) for length in ticks])
    used[0].set_xticks([], minor=True)
    used[0].set_xlim(lengths[0] / 1.25, lengths[-1] * 1.25)
    if kind.log:
        used[0].set_yscale("log")
        _plain_log_ticks(used[0].yaxis)
    else:
        used[0].set_ylim(0, 1.06 * max(axis.dataLim.y1 for axis in used))
    return handles


def _draw_curves(axis: Axes, panel: Panel, kind: Kind) -> dict[str, Any]:
    """A curve for each impl, broken where it has no time for a workload of the panel."""
    handles: dict[str, Any] = {}
    if kind.line is not None:
        axis.axhline(kind.line, **LINE)
    points = {point.x: point for curve in panel.curves.values() for point in curve}
    lengths = sorted(points)
    if kind.ceiling is not None:
        roofs = {x: roof for x in lengths if (roof := kind.ceiling(points[x]))}
        if roofs:
            style = ROOF if len(roofs) > 1 else ROOF | {"marker": "_", "markersize": 18, "mew": 3}
            (handles["roof"],) = axis.plot(*_roof_line(roofs), **style)
    for impl, curve in panel.curves.items():
        shown = {point.x: value for point in curve if (value := kind.value(point))}
        if shown:
            y, low, high = np.array([shown.get(x, [np.nan] * 3) for x in lengths]).T
            handles[impl] = axis.errorbar(lengths, y, (y - low, high - y), **_look(impl))
    return handles


def _roof_line(roofs: Mapping[int, Roof]) -> tuple[Any, Any]:
    """The roof at and between lengths; its memory part is a power of the length."""
    at = np.log(list(roofs))
    x = np.unique(np.concatenate([np.linspace(at[0], at[-1], 200), at]))
    memory = np.exp(np.interp(x, at, np.log([roof.memory for roof in roofs.values()])))
    return np.exp(x), np.minimum(memory, next(iter(roofs.values())).compute)


def _draw_cases(figure: Figure, family: Family, kind: Kind) -> dict[str, Any]:
    """Workloads one below the other, a dot for each impl, slightly apart.

    Workloads without a value for this kind of figure are omitted.
    """
    cases = {w: points for w, points in family.cases.items() if any(map(kind.value, points))}
    impls = sorted(family.impls, key=lambda impl: ([*STYLES, impl].index(impl), impl))
    step = 1.0 / (len(impls) + 1)
    figure.set_size_inches(7.5, 1.6 + len(cases) * max(0.18 / step, 0.5))
    axis = figure.subplots()
    handles: dict[str, Any] = {}
    if kind.line is not None:
        axis.axvline(kind.line, **LINE)
    for place, points in enumerate(cases.values()):
        axis.axhspan(place - 0.5, place + 0.5, color="#F6F6F6" if place % 2 else "white", zorder=0)
        for point in points:
            if value := kind.value(point):
                x, low, high = value
                y = place - 0.5 + (impls.index(point.impl) + 1) * step
                bars = ([x - low], [high - x])
                handles[point.impl] = axis.errorbar([x], [y], xerr=bars, **_look(point.impl))
        if kind.ceiling is not None and (roof := kind.ceiling(points[0])):
            ends = [place - 0.45, place + 0.45]
            (handles["roof"],) = axis.plot([roof.tflops] * 2, ends, **ROOF)
    axis.set_yticks(range(len(cases)), [case_label(work) for work in cases])
    axis.set_ylim(len(cases) - 0.5, -0.5)
    axis.tick_params(axis="y", length=0)
    axis.grid(visible=False, axis="y")
    axis.set_xlabel(kind.axis)
    if kind.log:
        axis.set_xscale("log")
        _plain_log_ticks(axis.xaxis)
    else:
        axis.set_xlim(0, 1.06 * axis.dataLim.x1)
    return handles


def _plain_log_ticks(axis: Axis) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def _look(impl: str) -> dict[str, Any]:
    style = STYLES.get(impl, OTHER)
    return {
        "color": style.colour,
        "marker": style.marker,
        "linestyle": style.dash,
        "linewidth": 2.2 if style.ours else 1.1,
        "markersize": 6 if style.ours else 5,
        "markeredgecolor": "white" if style.ours else style.colour,
        "markeredgewidth": 0.5 if style.ours else 0.0,
        "elinewidth": 0.8,
        "capsize": 2,
        "capthick": 0.8,
        "zorder": 4 if style.ours else 3,
    }


def _ticks(lengths: Sequence[int]) -> list[int]:
    """The lengths that get a label: all if they are few, otherwise only powers of two."""
    if len(lengths) <= MOST_TICKS:
        return list(lengths)
    powers = [length for length in lengths if length & (length - 1) == 0]
    chosen = powers if len(powers) > 2 else list(lengths)
    return chosen[:: -(-len(chosen) // MOST_TICKS)]


def _short(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)
