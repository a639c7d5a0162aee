"""A picture of one block: its roles over time, in the steady state and from tile to tile."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnscope.common.plotting import INK, RC
from attnscope.timeline import layout
from attnscope.timeline.recording import Recording, Track
from attnscope.timeline.trace import in_flight

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours for work, greys for waits.
COLOURS = {
    layout.COMPUTE: "#D55E00",
    layout.OUTPUT: "#009E73",
    layout.ISSUE: "#000000",
    layout.TENSOR_WAIT: "#DDDDDD",
    layout.LOAD_WAIT: "#CC79A7",
    layout.OTHERS_WAIT: "#F0E442",
    layout.TILE_WAIT: "#9A9A9A",
    layout.SLOT_WAIT: "#EFEFEF",
}
PRODUCTS = ("#0072B2", "#56B4E9", "#E69F00")  # in flight
STEADY_STEPS = 4
STEPS_BEFORE, STEPS_AFTER = 3, 4  # the change of tiles
FEED_HEIGHT, PRODUCT_HEIGHT, STATE_HEIGHT, GAP = 0.45, 0.32, 0.75, 0.35


class Window(NamedTuple):
    """A span of SM cycles since the block began."""

    title: str
    begin: float
    end: float


def draw_block(recording: Recording, summary: Mapping[str, Any], block: int) -> Figure:
    """Draw the lanes of a block in two windows, with title and notes.

    `summary` is the result of `analysis.analyse`. Raises ValueError for a block that is not
    recorded.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    kernel, at = recording.layout, recording.place(block)
    tracks = recording.tracks(at)
    chosen = windows(max(tracks[kernel.consumer :], key=lambda track: len(_issues(track))))
    height = 0.5 * len(tracks) + 0.75
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(10, height * len(chosen) + 1.9), layout="constrained")
        axes = np.atleast_1d(figure.subplots(len(chosen), 1))
        for axis, window in zip(axes, chosen, strict=True):
            _draw_window(axis, recording, at, tracks, window)
        axes[-1].set_xlabel("SM cycles from the left edge")
        seen = {kind for t in tracks for kind in _kinds(t, chosen)}
        flying = [f"{product} in flight" for product in kernel.products]
        entries = list(zip(flying, PRODUCTS, strict=False))
        names = {layout.COMPUTE: kernel.compute}
        entries += [(names.get(k, k), COLOURS[k]) for k in layout.KINDS if k in seen]
        patches = [Patch(fc=colour, ec=INK, lw=0.3, label=name) for name, colour in entries]
        figure.legend(handles=patches, loc="outside lower center", ncols=5, fontsize=8)
        about = "\n".join(textwrap.wrap(_about(recording, summary), 165))
        title = f"{_title(recording)}: inside block {block}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, weight="bold")
        axes[0].set_title(f"{about}\n\n{chosen[0].title}", loc="left", fontsize=8, color=INK)
    return figure


def windows(consumer: Track) -> list[Window]:
    """A few steps in the middle of the longest tile, and the change to the tile after it.

    Where a block has one tile alone, its end is shown instead of a change; where no tile has two
    steps, there is only the change.
    """
    starts = _issues(consumer)
    if not len(starts):
        raise ValueError(
            "recording must have matrix products of the consumer, got none. Draw another block"
        )
    tiles, sizes = np.unique(consumer.tile[starts], return_counts=True)
    longest = tiles[sizes == sizes.max()]
    tile = int(longest[len(longest) // 2])
    issues = consumer.begin[starts[consumer.tile[starts] == tile]].astype(float)
    found = []
    if len(issues) > 2:
        count = min(STEADY_STEPS, len(issues) - 2)
        first = (len(issues) - count) // 2
        step = (issues[first + count] - issues[first]) / count
        margin = 0.25 * step
        found.append(
            Window("Inside a tile", issues[first] - margin, issues[first + count] + margin)
        )
    else:
        step = float(
            np.diff(consumer.begin[starts]).mean() if len(starts) > 1 else consumer.end[-1]
        )
    after = np.flatnonzero(consumer.of("tile.AwaitTile") & (consumer.tile == tile + 1))
    change = float(consumer.begin[after[0]] if len(after) else consumer.end[-1])
    begin = max(change - STEPS_BEFORE * step, 0.0)
    end = min(change + STEPS_AFTER * step, float(consumer.end[-1]))
    found.append(Window("From one tile to the next" if end > change else "The end", begin, end))
    return found


def _issues(consumer: Track) -> NDArray[np.intp]:
    """Where it issues its first product of a step: one for each step of its own."""
    return np.flatnonzero(consumer.begins(consumer.layout.products[0]))


def _draw_window(
    axis: Axes, recording: Recording, at: int, tracks: Sequence[Track], window: Window
) -> None:
    """Lanes from top to bottom: scheduler, producer, ..., then each consumer with its products."""
    kernel = recording.layout
    ticks, y = [], 0.0
    for track in tracks:
        top = y
        if track.lane >= kernel.consumer:
            for product, colour in zip(kernel.products, PRODUCTS, strict=False):
                y -= PRODUCT_HEIGHT
                spans = in_flight(track, product)
                _bars(axis, spans, [colour] * len(spans), window, y, PRODUCT_HEIGHT)
        tall = STATE_HEIGHT if track.lane >= kernel.consumer else FEED_HEIGHT
        y -= tall
        states = kernel.states[track.role]
        colours = [COLOURS[states[code].kind] for code in track.codes]
        _bars(axis, list(zip(track.begin, track.end, strict=True)), colours, window, y, tall)
        if track.lane >= kernel.consumer:
            _name_steps(axis, recording, at, track, window, y + tall / 2)
        ticks.append(((y + top) / 2, kernel.lane_name(track.lane)))
        y -= GAP
    axis.set_yticks(*map(list, zip(*ticks, strict=True)))
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(y + GAP / 2, GAP / 2)
    axis.set_xlim(0, window.end - window.begin)
    axis.spines["left"].set_visible(False)
    axis.grid(visible=False, axis="y")
    axis.set_title(window.title, loc="left", fontsize=8, color=INK)


def _bars(
    axis: Axes, spans: Sequence[tuple[Any, Any]], colours: Sequence[str], window: Window,
    y: float, height: float,
) -> None:  # fmt: skip
    inside = [
        (max(begin, window.begin) - window.begin, min(end, window.end) - window.begin, colour)
        for (begin, end), colour in zip(spans, colours, strict=True)
        if end > window.begin and begin < window.end
    ]
    shown = [(begin, end - begin) for begin, end, _ in inside]
    axis.broken_barh(shown, (y, height), facecolors=[c for *_, c in inside], edgecolor="none")
    axis.broken_barh(shown, (y, height), facecolors="none", edgecolor="white", linewidth=0.4)


def _name_steps(
    axis: Axes, recording: Recording, at: int, track: Track, window: Window, y: float
) -> None:
    """The number of the step's block, in the bar of what it computes, where there is room."""
    room = 0.02 * (window.end - window.begin)
    notes = recording.notes(at)
    for state in np.flatnonzero(track.kind(layout.COMPUTE)):
        begin, end = max(track.begin[state], window.begin), min(track.end[state], window.end)
        if end - begin > room:
            note, step = notes[track.tile[state]], int(track.step[state])
            *_, number = recording.layout.step_facts(note, step, recording.facts).values()
            centre = (begin + end) / 2 - window.begin
            axis.text(centre, y, str(number), ha="center", va="center", fontsize=7, color="white")


def _kinds(track: Track, chosen: Sequence[Window]) -> set[str]:
    """Kinds of states that can be seen in the windows."""
    states = track.layout.states[track.role]
    shown = np.zeros(len(track.codes), bool)
    for window in chosen:
        shown |= (track.end > window.begin) & (track.begin < window.end) & (track.cycles > 0)
    return {states[code].kind for code in np.unique(track.codes[shown])}


def _title(recording: Recording) -> str:
    work = recording.facts["workload"]
    mask = "causal" if work["causal"] else "no mask"
    return f"{recording.layout.title}, D {work['head_dim']}, S {work['seqlen_k']}, {mask}"


def _about(recording: Recording, summary: Mapping[str, Any]) -> str:
    """Card, shape and tile; how much the recording disturbs; how to read it; what it amounts to."""
    work, tile = recording.facts["workload"], recording.facts["tile"]
    disturbance, overlap = recording.facts["disturbance"], summary["overlap"]
    clock = summary["clock_mhz"]
    under = 1 - overlap["softmax_alone"] / overlap["softmax"] if overlap["softmax"] else 0.0
    parts = [
        f"{recording.facts['env']['gpu']}, {work['dtype']}, batch {work['batch']}, "
        f"{work['heads_q']} heads, tile {tile['block_m']} x {tile['block_n']}, "
        f"SM clock {'not known' if clock is None else f'{clock:.0f} MHz'}.",
        f"With its marks the kernel takes {disturbance['slowdown']:.3f} times its normal time.",
        "In flight: from the issue until the consumer has waited for it; the tensor cores may be "
        "done sooner.",
        f"Numbers are those of {'key' if work['mode'] == 'forward' else 'query'} blocks.",
        f"Of the blocks' time, {overlap['tensor']:.1%} has a product in flight;",
        f"of {recording.layout.compute}, {under:.1%} runs under one.",
    ]
    return " ".join(parts)
