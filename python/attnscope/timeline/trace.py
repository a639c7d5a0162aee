"""A recording as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.timeline import layout
from attnscope.timeline.recording import Recording, Track

Event = dict[str, Any]
# Threads of a process: the lanes, and what each consumer has in flight below it.
PER_LANE = 4


def write_trace(recording: Recording, path: Path) -> None:
    """Write a gzipped trace: a process for each block, a thread for each role.

    Under a consumer stand its products in flight, each from its issue until it was waited for.
    Times are microseconds since the first block began; within a block they are exact to a cycle,
    between blocks to a step of the device timer.
    """
    events = [e for at in range(len(recording.blocks)) for e in _block_events(recording, at)]
    content = {"traceEvents": events, "displayTimeUnit": "ns", "otherData": recording.facts}
    # The same bytes for the same recording: no name and no time in the header.
    with path.open("wb") as raw, gzip.GzipFile("", "wb", mtime=0, fileobj=raw) as packed:
        packed.write(json.dumps(content, allow_nan=False, separators=(",", ":")).encode())


def _block_events(recording: Recording, at: int) -> Iterator[Event]:
    block, mhz = int(recording.blocks[at]), recording.clock_mhz
    if mhz is None:
        raise ValueError("recording must have a running device timer, got one value. Record again")
    notes = recording.notes(at)
    name = f"block {block}, SM {recording.head[at, layout.SM]}"
    yield {"ph": "M", "pid": block, "name": "process_name", "args": {"name": name}}

    def times(cycles: NDArray[np.int64]) -> NDArray[np.int64]:
        return recording.begins_ns[at] + np.rint(cycles * 1e3 / mhz).astype(np.int64)

    kernel = recording.layout
    for track in recording.tracks(at):
        thread = PER_LANE * track.lane
        yield _thread(block, thread, kernel.lane_name(track.lane))
        yield from _spans(block, thread, track, notes, recording.facts, times)
        begins, ends = times(track.begin), times(track.end)
        states = kernel.states[track.role]
        for code, begin, end in zip(track.codes, begins, ends, strict=True):
            state = states[code]
            yield _span(block, thread, state.label, begin, end, cat=state.kind)
        if track.lane >= kernel.consumer:
            for row, product in enumerate(kernel.products, start=1):
                yield _thread(block, thread + row, f"{kernel.lane_name(track.lane)}: {product}")
                for begin, end in in_flight(track, product):
                    span = (*times(np.array([begin, end])),)
                    yield _span(block, thread + row, product, *span, cat="in flight")


def in_flight(track: Track, product: str) -> list[tuple[int, int]]:
    """(begin, end) in cycles of each time that a product of a consumer is in flight.

    Each begins with an issue; the state before it may be of another product of the same name.
    """
    on = track.flying(product)
    first = np.flatnonzero(on & (track.begins(product) | ~np.append(False, on[:-1])))
    after = np.append(first, len(on))[1:]
    spans = []
    for begin, limit in zip(first, after, strict=True):
        run = on[begin:limit]
        last = begin + (len(run) if run.all() else int(np.argmin(run))) - 1
        spans.append((int(track.begin[begin]), int(track.end[last])))
    return spans


def _spans(
    block: int, thread: int, track: Track, notes: NDArray[np.int32], facts: Any, times: Any
) -> Iterator[Event]:
    """What encloses the states: tiles, and the steps of each (of consumers: the forward's producer
    has K of one block and V of another in turn)."""
    kernel = track.layout
    for tile in np.unique(track.tile[track.tile < len(notes)]):
        of_tile = np.flatnonzero(track.tile == tile)
        what = kernel.tile_facts(notes[tile], facts)
        yield _between(block, thread, f"tile {tile}", track, of_tile, times, what)
        if track.lane < kernel.consumer:
            continue
        steps = track.step[of_tile]
        for step in np.unique(steps[steps >= 0]):
            what = kernel.step_facts(notes[tile], step, facts)
            name, number = list(what.items())[-1]
            at = of_tile[steps == step]
            name = f"{name.replace('_', ' ')} {number}"
            yield _between(block, thread, name, track, at, times, what)


def _between(
    block: int, thread: int, name: str, track: Track, at: NDArray, times: Any, args: Event
) -> Event:
    begin, end = times(np.array([track.begin[at[0]], track.end[at[-1]]]))
    return _span(block, thread, name, begin, end, args=args)


def _span(block: int, thread: int, name: str, begin: Any, end: Any, **more: Any) -> Event:
    span = {"ph": "X", "pid": block, "tid": thread, "name": name}
    return span | {"ts": int(begin) / 1e3, "dur": int(end - begin) / 1e3} | more


def _thread(block: int, thread: int, name: str) -> Event:
    return {"ph": "M", "pid": block, "tid": thread, "name": "thread_name", "args": {"name": name}}
