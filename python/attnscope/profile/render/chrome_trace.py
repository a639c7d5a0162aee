"""PyTorch's chrome trace with attnscope's rows added, for Perfetto."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscope.profile.analysis.kernel_names import category
from attnscope.profile.analysis.tables import NO_RANGE, owner_name, path_of
from attnscope.profile.attribution.owners import Attribution
from attnscope.profile.render.files import open_output
from attnscope.profile.trace.events import CpuEvent, GpuEvent
from attnscope.profile.trace.json_stream import escape_names, open_trace, read_lines

if TYPE_CHECKING:
    from attnscope.profile.analysis.result import Result
PROCESS = 7_000_000  # process id of our rows in a trace viewer; above every real one
EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
CHUNK = 1 << 20  # characters
SORT_INDEX = 6_000_000  # sorts below PyTorch's GPU rows, which are at 5,000,000


def write_chrome_trace(profile: Result, path: str | os.PathLike[str]) -> None:
    """Write PyTorch's trace with a process `attnscope` added; it opens in Perfetto.

    The process has two tracks for each stream with kernels, aligned to GPU time: the stage and the
    op that own the running kernels. Neighbouring kernels of one call of an op, or of one entry of a
    range, are merged into one slice with their number and total duration. The file is copied in
    chunks, so memory does not grow with the trace. Raises ValueError if `path` is the trace that
    the profile was read from; that trace is not overwritten.
    """
    if Path(path).exists() and Path(path).samefile(profile.source):
        raise ValueError(
            f"path must not be the trace that was read, got {path}. Give another file name"
        )
    encode = json.JSONEncoder(allow_nan=False).encode
    with open_trace(profile.source) as file, open_output(path) as out:
        head = ""
        while not (begin := EVENTS.search(head)):
            if not (more := read_lines(file, CHUNK)):
                raise ValueError(f"{profile.source} must have a list traceEvents, got none")
            head += more
        # A trace with kernels has events, so ours can be inserted before them.
        out.write(head[: begin.end()])
        for row in _added(profile.attribution):
            out.write(f"\n  {{\n    {encode(row)[1:-1]}\n  }},")
        more = head[begin.end() :]
        while more:
            out.write(escape_names(more) if profile.trace.repaired else more)
            more = read_lines(file, CHUNK)


def _added(attribution: Attribution) -> Iterator[dict[str, Any]]:
    kernels, origin = attribution.trace.kernels, attribution.trace.origin
    if not kernels:
        return
    yield _meta("process_name", 0, name="attnscope")
    yield _meta("process_sort_index", 0, sort_index=SORT_INDEX)
    streams = sorted({(kernel.device, kernel.stream) for kernel in kernels})
    for number, stream in enumerate(streams):
        mine = [kernel for kernel in kernels if (kernel.device, kernel.stream) == stream]
        where = f"GPU {stream[0]} stream {stream[1]}"
        for track, kind in ((2 * number + 1, "stage"), (2 * number + 2, "op")):
            yield _meta("thread_name", track, name=f"{kind}, {where}")
            yield _meta("thread_sort_index", track, sort_index=track)
            groups = _neighbours(attribution, mine, kind)
            for at, (name, group) in enumerate(groups):
                # Kernels of one stream may overlap slightly; slices of one track must not.
                last = max(kernel.end for kernel in group)
                after = groups[at + 1][1][0].start if at + 1 < len(groups) else last
                start, end = group[0].start, min(last, after)
                yield {
                    "ph": "X",
                    "cat": f"attnscope_{kind}",
                    "name": name,
                    "pid": PROCESS,
                    "tid": track,
                    "ts": (origin + start) / 1e3,
                    "dur": max(0, end - start) / 1e3,
                    "args": _about(attribution, group, kind),
                }


def _neighbours(
    attribution: Attribution, kernels: list[GpuEvent], kind: str
) -> list[tuple[str, list[GpuEvent]]]:
    """Consecutive kernels with the same owner, with the owner's name."""
    groups: list[tuple[str, list[GpuEvent]]] = []
    before: Any = None
    for kernel in kernels:
        ranges, op = attribution.ranges(kernel), attribution.op(kernel)
        owner: CpuEvent | None = (ranges[-1] if ranges else None) if kind == "stage" else op
        key = owner.index if owner else -1
        if not groups or key != before:
            name = path_of(ranges) or NO_RANGE
            groups.append((name if kind == "stage" else owner_name(attribution, kernel), []))
        groups[-1][1].append(kernel)
        before = key
    return groups


def _about(attribution: Attribution, group: list[GpuEvent], kind: str) -> dict[str, Any]:
    about: dict[str, Any] = {
        "kernels": len(group),
        "kernel us": sum(kernel.duration for kernel in group) / 1e3,
        "categories": ", ".join(dict.fromkeys(category(kernel.name) for kernel in group)),
    }
    op = attribution.op(group[0])
    if kind == "op" and op:
        forward = attribution.forward_op(op)
        about["stage"] = path_of(attribution.ranges(group[0]))
        about["forward op"] = forward.name if forward else None
        about["module"] = ".".join(attribution.module(group[0]))
    return {key: value for key, value in about.items() if value}


def _meta(what: str, track: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": PROCESS, "tid": track, "args": arguments}
