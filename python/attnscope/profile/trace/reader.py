"""A chrome trace of PyTorch's profiler as lists of CPU and GPU events, joined by correlation id.

The file is read as a stream: each event is decoded into a slotted object and its JSON dropped, so a
trace needs about as much memory as its JSON has bytes (a test allows twice that). GPU-side copies
of user ranges ("gpu_user_annotation") and metadata events are dropped: they are not work.
"""

from __future__ import annotations

import gzip
import math
import os
import zlib
from bisect import bisect_right
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

from attnscope.profile.trace.events import Allocation, CpuEvent, GpuEvent, Overhead, Trace
from attnscope.profile.trace.faults import (
    correct_gpu_work,
    leave_out_duplicates,
    leave_out_far,
    note_unread,
)
from attnscope.profile.trace.json_stream import REMEDY, members, open_trace, plain
from attnscope.profile.trace.thread_ids import correct_threads, drop_copied_ids
from attnscope.profile.trace.window import remove_own

CPU_KINDS = {
    "cpu_op": "op",
    "user_annotation": "range",
    "python_function": "python",
    "cuda_runtime": "call",
    "cuda_driver": "call",
}
OF_PROCESS = ("cpu_op", "cuda_runtime", "cuda_driver")  # have the process as their pid
GPU_KINDS = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
# Nesting order of events that start and end together: a range is entered before the op in it.
RANKS = {"range": 0, "python": 1, "op": 2, "call": 3}


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a `.json` or `.json.gz` that `export_chrome_trace` wrote.

    Raises ValueError, with the position, for a file that is truncated, not JSON or not a trace.
    """
    trace = Trace()
    builder = _Builder(trace)
    try:
        with open_trace(path) as file:
            for key, value in members(file, Path(path), "traceEvents"):
                if key == "traceEvents":
                    builder.add_checked(value, path)
                elif key == "deviceProperties":
                    trace.devices = plain(value) or []
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} must be a whole file, got {error}. {REMEDY}") from None
    except OSError as error:
        raise ValueError(f"trace must be a readable file, got {path}: {error.strerror}") from None
    builder.finish()
    return trace


class _Builder:
    """Converts the objects of "traceEvents" to events and joins them at the end."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.events = 0
        self.window: tuple[int, int] | None = None
        self.tails: dict[Any, int] = {}  # arrows from forward to backward: id -> thread
        self.heads: list[tuple[Any, int, int]] = []  # id, thread, time
        self.shared: dict[Any, Any] = {}  # one copy of each name and each tuple of shapes

    def add_checked(self, item: Any, path: str | os.PathLike[str]) -> None:
        self.events += 1
        try:
            self.add(item)
        except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise ValueError(
                f"{path} must be a trace of PyTorch's profiler, got event {self.events} with a "
                f"missing or bad value, {error}: {item!r:.200}. {REMEDY}"
            ) from None

    def add(self, item: dict[str, Any]) -> None:
        category, phase = item.get("cat"), item.get("ph")
        if phase == "i" and item.get("name") == "[memory]":
            self.allocation(item)
        elif phase == "s" and category == "fwdbwd":
            self.tails[item["id"]] = int(item["tid"])
        elif phase == "f" and category == "fwdbwd":
            self.heads.append((item["id"], int(item["tid"]), nanoseconds(item["ts"])))
        if phase != "X":
            note_unread(self.trace.faults, category, phase)
            return
        start = nanoseconds(item["ts"])
        end = start + nanoseconds(item.get("dur", 0))
        if end < start:
            self.trace.faults.negative += 1
            return
        arguments = item.get("args", {})
        if category in CPU_KINDS:
            if category in OF_PROCESS:
                self.trace.faults.pids[str(item.get("pid"))] += 1
            self.trace.cpu.append(self.cpu_event(CPU_KINDS[category], item, start, end, arguments))
        elif category in GPU_KINDS:
            self.trace.gpu.append(self.gpu_event(GPU_KINDS[category], item, start, end, arguments))
        elif category == "overhead":
            self.trace.overhead.append(Overhead(self.share(item["name"]), start, end))
        elif category == "Trace":
            self.window = (start, end)
        else:
            note_unread(self.trace.faults, category, phase)

    def share(self, value: Any) -> Any:
        return self.shared.setdefault(value, value)

    def inputs(self, value: Any) -> tuple[Any, ...] | None:
        return None if value is None else self.share(_frozen(value))

    def cpu_event(
        self, kind: str, item: dict[str, Any], start: int, end: int, arguments: dict[str, Any]
    ) -> CpuEvent:
        return CpuEvent(
            kind,
            self.share(str(item["name"])),
            int(item["tid"]),
            start,
            end,
            correlation=arguments.get("correlation", 0),
            external_id=arguments.get("External id", 0),
            sequence=arguments.get("Sequence number", -1),
            forward_thread=arguments.get("Fwd thread id", 0),
            shapes=self.inputs(arguments.get("Input Dims")),
            dtypes=self.inputs(arguments.get("Input type")),
            concrete=self.inputs(arguments.get("Concrete Inputs")),
        )

    def gpu_event(
        self, kind: str, item: dict[str, Any], start: int, end: int, arguments: dict[str, Any]
    ) -> GpuEvent:
        def real(key: str) -> float | None:
            value = arguments.get(key)
            number = math.nan if value is None else float(value)
            return number if math.isfinite(number) else None

        return GpuEvent(
            kind,
            self.share(str(item["name"])),
            start,
            end,
            int(arguments.get("device", item["pid"])),
            int(arguments.get("stream", item["tid"])),
            correlation=arguments.get("correlation", 0),
            external_id=arguments.get("External id", 0),
            grid=self.inputs(arguments.get("grid")),
            block=self.inputs(arguments.get("block")),
            registers=arguments.get("registers per thread"),
            shared_bytes=arguments.get("shared memory"),
            blocks_per_sm=real("blocks per SM"),
            warps_per_sm=real("warps per SM"),
            occupancy=real("est. achieved occupancy %") or None,
            bytes=arguments.get("bytes"),
            context=arguments.get("context", 0),
        )

    def allocation(self, item: dict[str, Any]) -> None:
        about = item["args"]
        self.trace.memory.append(
            Allocation(
                nanoseconds(item["ts"]),
                int(item["tid"]),
                about["Device Id"] if about["Device Type"] else -1,
                about["Bytes"],
                about["Total Allocated"],
                about["Total Reserved"],
            )
        )

    def finish(self) -> None:
        """Make times relative, remove the sentinels, then sort, number, nest and join launches."""
        trace = self.trace
        leave_out_far(trace)
        timed: list[CpuEvent | GpuEvent] = [*trace.cpu, *trace.gpu]
        spans = [(e.start, e.end) for e in timed]
        if self.window and not trace.faults.far:
            spans.append(self.window)
        origin = min((start for start, _ in spans), default=0)
        trace.start, trace.end = 0, max((end for _, end in spans), default=0) - origin
        for event in timed:
            event.start -= origin
            event.end -= origin
        trace.overhead = [Overhead(n, a - origin, b - origin) for n, a, b in trace.overhead]
        trace.memory = sorted(m._replace(time=m.time - origin) for m in trace.memory)
        trace.arrows = {
            (thread, time - origin): self.tails[arrow]
            for arrow, thread, time in self.heads
            if arrow in self.tails
        }
        trace.cpu.sort(key=_order)
        trace.gpu.sort(key=lambda e: (e.start, e.end))
        leave_out_duplicates(trace)
        drop_copied_ids(trace.cpu, trace.gpu)
        correct_threads(trace.cpu, trace.gpu)
        remove_own(trace)
        trace.cpu.sort(key=_order)  # events that were cut now begin with the window
        nest(trace.cpu)
        calls: dict[int, list[CpuEvent]] = defaultdict(list)
        for event in trace.cpu:
            if event.kind == "call" and event.correlation:
                calls[event.correlation].append(event)
        for at, work in enumerate(trace.gpu):
            work.index = at
            if same := calls.get(work.correlation):
                # CUPTI's 32-bit ids repeat: take the last call before the work.
                before = bisect_right(same, work.start, key=lambda call: call.start)
                work.launch = same[max(0, before - 1)].index
        correct_gpu_work(trace)


def _order(event: CpuEvent) -> tuple[int, int, int]:
    """Sort key: by start, outer events first."""
    return event.start, -event.end, RANKS[event.kind]


def nest(events: list[CpuEvent]) -> None:
    """Number sorted events and find their parents, thread by thread.

    A call belongs to the event that was open when the call began. Its end is ignored, because
    CUPTI's and PyTorch's clocks differ by fractions of a microsecond. Every other event must lie
    wholly inside its parent.
    """
    stacks: dict[int, list[CpuEvent]] = {}
    for at, event in enumerate(events):
        event.index = at
        stack = stacks.setdefault(event.thread, [])
        while stack and stack[-1].end <= event.start:
            stack.pop()
        need = event.start + 1 if event.kind == "call" else event.end
        outer = next((other for other in reversed(stack) if other.end >= need), None)
        event.parent = outer.index if outer else -1
        if event.kind != "call":
            stack.append(event)


def nanoseconds(microseconds: str | int | float) -> int:
    """A time of the trace, exactly; a float has a resolution of only about half a nanosecond."""
    return round(Decimal(microseconds) * 1000)


def _frozen(value: Any) -> Any:
    """Lists converted to tuples, recursively."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
