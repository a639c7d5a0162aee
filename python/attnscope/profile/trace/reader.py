"""A chrome trace of PyTorch's profiler as lists of CPU and GPU events, joined by correlation id.

The file is read as a stream: each event is decoded into a slotted object and its JSON dropped. An
event in the layout in which PyTorch writes it is taken apart by one regular expression, and texts
that recur (inputs of an op, launch configurations) are decoded once; any other event is decoded as
JSON. GPU-side copies of user ranges ("gpu_user_annotation") and metadata events are dropped: they
are not work.
"""

from __future__ import annotations

import gzip
import math
import os
import re
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from decimal import Decimal
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from attnscope.common.child import Child
from attnscope.common.collector import collector_off
from attnscope.common.console import progress
from attnscope.profile.trace.collectives import collective_of
from attnscope.profile.trace.events import (
    Allocation,
    CpuEvent,
    GpuEvent,
    Overhead,
    Trace,
    entry_order,
)
from attnscope.profile.trace.faults import (
    correct_gpu_work,
    leave_out_duplicates,
    leave_out_far,
    note_unread,
)
from attnscope.profile.trace.json_stream import REMEDY, JsonText, decode, open_trace, plain
from attnscope.profile.trace.thread_ids import correct_ids
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
# A complete event as PyTorch writes it (2.11 on few lines, 2.13 one member a line), or an arrow
# from a launch to its kernel, which the correlation ids make redundant.
EVENT = re.compile(
    r'\s*\{\s*"ph": (?:"[sf]",\s*"id": \d+,\s*"pid": \d+,\s*"tid": \d+,\s*"ts": [\d.]+,'
    r'\s*"cat": "ac2g",[^{}]*\}|"X",'
    rf'\s*"cat": "({"|".join([*CPU_KINDS, *GPU_KINDS])})",\s*"name": "([^"\\\n]*)",'
    r'\s*"pid": (\d+),\s*"tid": (\d+),\s*"ts": (\d+)\.(\d{3}),\s*"dur": (\d+)\.(\d{3})'
    r'\s*(?:,\s*"args": \{\s*(?:"External id": (\d+),?)?([^}]*)\}\s*)?\})'
)
IDS = re.compile(r'"(correlation|Sequence number|Fwd thread id)": (\d+),?\s*')
# The numbers of a CPU event, in the order of CpuEvent's fields, and what they are if missing.
NUMBERS = (("correlation", 0), ("External id", 0), ("Sequence number", -1), ("Fwd thread id", 0))
REPEATED = 1 << 14  # decoded texts that are kept
NO_INPUTS = (None, None, None)
BAD = (AttributeError, KeyError, TypeError, ValueError, ArithmeticError)  # of a wrong event


@collector_off()
def read_trace(path: str | os.PathLike[str], writer: Child | None = None) -> Trace:
    """Read a `.json` or `.json.gz` that `export_chrome_trace` wrote, or that `writer` still writes.

    Events with missing or bad values are left out and counted. Raises ValueError, with the
    position, for a file that is truncated, not JSON or not a trace.
    """
    trace = Trace()
    builder = _Builder(trace, path)
    try:
        with open_trace(path, writer) as file, progress(f"reading {Path(path).name}") as report:

            def show() -> None:
                place = os.lseek(file.fileno(), 0, os.SEEK_CUR)
                report(place / (os.fstat(file.fileno()).st_size or 1))

            text = JsonText(file, Path(path), show)
            for key, value in text.members("traceEvents", EVENT, builder.add_known):
                if key == "traceEvents":
                    for item in value:
                        builder.add_checked(item)
                elif key == "deviceProperties":
                    trace.devices = plain(value) or []
                elif key == "distributedInfo" and isinstance(value, dict):
                    trace.distributed = value
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} must be a whole file, got {error}. {REMEDY}") from None
    except OSError as error:
        raise ValueError(f"trace must be a readable file, got {path}: {error.strerror}") from None
    trace.repaired = text.repaired
    if builder.error is not None and not trace.cpu and not trace.gpu:
        raise builder.error
    builder.finish()
    return trace


class _Builder:
    """Converts the items of "traceEvents" to events and joins them at the end."""

    def __init__(self, trace: Trace, path: str | os.PathLike[str]) -> None:
        self.trace, self.path, self.count = trace, path, 0
        self.window: tuple[int, int] | None = None
        self.error: ValueError | None = None  # of the first event that was left out
        self.tails: dict[Any, int] = {}  # arrows from forward to backward: id -> thread
        self.heads: list[tuple[Any, int, int]] = []  # id, thread, time
        self.shared: dict[Any, Any] = {}  # one copy of each name, thread and tuple of shapes
        self.inputs_of = lru_cache(REPEATED)(lambda text: self.inputs(decode(f"{{{text}}}")))
        self.facts_of = lru_cache(REPEATED)(lambda text: self.facts(decode(f"{{{text}}}")))

    def add_checked(self, item: Any) -> None:
        """Add an object."""
        self.count += 1
        try:
            self.add(item)
        except BAD as error:
            self.leave_out(error, item)

    def leave_out(self, error: Exception, item: Any) -> None:
        """Count an object that is no event."""
        faults = self.trace.faults
        faults.malformed += 1
        if self.error is None:
            faults.first_malformed = f"event {self.count}, {type(error).__name__}: {error}"
            self.error = ValueError(
                f"{self.path} must be a trace of PyTorch's profiler, got event {self.count} with a "
                f"missing or bad value, {error}: {item!r:.200}. {REMEDY}"
            )
        self.not_lost(item)

    def not_lost(self, item: Any) -> None:
        """Note the launch of GPU work that is left out: it has its work in the trace."""
        with suppress(*BAD):
            if item["cat"] in GPU_KINDS:
                self.trace.faults.left_out.add(item["args"]["correlation"])

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
            self.not_lost(item)
            return
        about = item.get("args") or {}
        if "Collective name" in about:
            self.trace.collectives[about.get("External id", 0)] = collective_of(about)
        if category in CPU_KINDS:
            if category in OF_PROCESS:
                self.trace.faults.pids[str(item.get("pid"))] += 1
            span = (int(item["tid"]), start, end)
            correlation, external_id, sequence, forward_thread = (
                about.get(key, missing) for key, missing in NUMBERS
            )
            numbers = (correlation, external_id, sequence, forward_thread)
            self.cpu_event(category, str(item["name"]), *span, numbers, self.inputs(about))
        elif category in GPU_KINDS:
            facts = self.facts({"device": item["pid"], "stream": item["tid"], **about})
            ids = (about.get("correlation", 0), about.get("External id", 0))
            self.gpu_event(category, str(item["name"]), start, end, *ids, facts)
        elif category == "overhead":
            self.trace.overhead.append(Overhead(self.share(item["name"]), start, end))
        elif category == "Trace":
            self.window = (start, end)
        else:
            note_unread(self.trace.faults, category, phase)

    def add_known(self, match: re.Match[str]) -> bool:
        """Add the match of EVENT; parts that recur are decoded once.

        False if the match is not an event, since its arguments are nested, or has bad values.
        """
        category, name, process, thread, us, ns, long_us, long_ns, external, text = match.groups("")
        if "{" in text:  # a class with two characters in EVENT would be slower
            return False
        self.count += 1
        if not category:
            return True
        try:
            if '"Collective name"' in text or not external and '"External id"' in text:
                self.add(decode(match[0]))
                return True
            start = int(us + ns)
            end = start + int(long_us + long_ns)
            external_id, correlation, sequence, forward_thread = int(external or 0), 0, -1, 0
            if category != "cpu_op" or '"Sequence number"' in text:
                ids = dict(IDS.findall(text))
                correlation = int(ids.get("correlation", 0))
                sequence = int(ids.get("Sequence number", -1))
                forward_thread = int(ids.get("Fwd thread id", 0))
            if category in GPU_KINDS:
                rest = IDS.sub("", text).rstrip(", \n")
                facts = self.facts_of(f'"device": {process}, "stream": {thread}, {rest}')
                self.gpu_event(category, name, start, end, correlation, external_id, facts)
                return True
            if category in OF_PROCESS:
                self.trace.faults.pids[process] += 1
            inputs, begin = NO_INPUTS, text.find('"Concrete Inputs"')
            if begin >= 0:
                last = text.rfind(', "Ev Idx"')
                inputs = self.inputs_of(text[begin : last if last > begin else None])
            numbers = (correlation, external_id, sequence, forward_thread)
            self.cpu_event(category, name, int(thread), start, end, numbers, inputs)
        except BAD:
            self.count -= 1
            return False
        return True

    def share(self, value: Any) -> Any:
        return self.shared.setdefault(value, value)

    def inputs(self, arguments: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        """Shapes, dtypes and concrete values of the inputs of an op; None if not recorded."""
        shapes, dtypes, concrete = (
            None if value is None else self.share(_frozen(value))
            for value in map(arguments.get, ("Input Dims", "Input type", "Concrete Inputs"))
        )
        return shapes, dtypes, concrete

    def facts(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        """Device, stream and the launch configuration, in the order of GpuEvent's fields."""

        def real(key: str) -> float | None:
            value = arguments.get(key)
            number = math.nan if value is None else float(value)
            return number if math.isfinite(number) else None

        return (
            int(arguments["device"]),
            int(arguments["stream"]),
            self.share(_frozen(arguments.get("grid"))),
            self.share(_frozen(arguments.get("block"))),
            arguments.get("registers per thread"),
            arguments.get("shared memory"),
            real("blocks per SM"),
            real("warps per SM"),
            real("est. achieved occupancy %") or None,
            arguments.get("bytes"),
            arguments.get("context", 0),
            arguments.get("graph node id", 0),
            self.share(_annotation(arguments)),
        )

    def cpu_event(
        self,
        category: str,
        name: str,
        thread: int,
        start: int,
        end: int,
        numbers: tuple[int, int, int, int],
        inputs: tuple[Any, Any, Any],
    ) -> None:
        """`numbers` are those of NUMBERS."""
        share, kind = self.shared.setdefault, CPU_KINDS[category]
        event = CpuEvent(
            kind, share(name, name), share(thread, thread), start, end, -1, -1, *numbers, *inputs
        )
        self.trace.cpu.append(event)

    def gpu_event(
        self,
        category: str,
        name: str,
        start: int,
        end: int,
        correlation: int,
        external_id: int,
        facts: tuple[Any, ...],
    ) -> None:
        device, stream, *configuration = facts
        ids = (-1, correlation, external_id, -1)
        event = GpuEvent(
            GPU_KINDS[category], self.share(name), start, end, device, stream, *ids, *configuration
        )
        self.trace.gpu.append(event)

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
        del self.inputs_of, self.facts_of  # they refer to self, and would keep the trace
        trace = self.trace
        leave_out_far(trace)
        timed: list[CpuEvent | GpuEvent] = [*trace.cpu, *trace.gpu]
        begin, end = [], []
        if self.window and not trace.faults.far:
            begin, end = [self.window[0]], [self.window[1]]
        origin = min(chain((event.start for event in timed), begin), default=0)
        trace.origin, trace.start = origin, 0
        trace.end = max(chain((event.end for event in timed), end), default=0) - origin
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
        trace.cpu.sort(key=entry_order)
        trace.gpu.sort(key=lambda e: (e.start, e.end))
        leave_out_duplicates(trace)
        correct_ids(trace.cpu, trace.gpu)
        remove_own(trace)
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


def nest(events: list[CpuEvent]) -> None:
    """Number sorted events and find their parents, thread by thread.

    A call belongs to the event that was open when the call began. Its end is ignored, because
    CUPTI's and PyTorch's clocks differ by fractions of a microsecond. Every other event must lie
    wholly inside its parent. A Python frame that outlives its caller has lost its end (PyTorch 2.11
    loses the end of an autograd function's `apply`), so it ends with its caller.
    """
    stacks: dict[int, list[CpuEvent]] = {}
    for at, event in enumerate(events):
        event.index = at
        stack = stacks.setdefault(event.thread, [])
        while stack and stack[-1].end <= event.start:
            stack.pop()
        if event.kind == "call":
            event.parent = stack[-1].index if stack else -1
            continue
        if event.kind == "python":
            callers = (e.end for e in reversed(stack) if e.kind == "python" and e.end > event.start)
            event.end = min(event.end, next(callers, event.end))
        for outer in reversed(stack):
            if outer.end >= event.end:
                event.parent = outer.index
                break
        else:
            event.parent = -1
        stack.append(event)


def nanoseconds(microseconds: str | int | float) -> int:
    """A time of the trace, exactly; a float has a resolution of only about half a nanosecond."""
    return round(Decimal(microseconds) * 1000)


def _annotation(arguments: Mapping[str, Any]) -> str | None:
    """What a kernel's node in a CUDA graph was marked with, under PyTorch's names for it."""
    names = (arguments.get(key) for key in ("name", "str", "annotation"))
    return (
        next((str(name) for name in names if name), None) if "graph node id" in arguments else None
    )


def _frozen(value: Any) -> Any:
    """Lists converted to tuples, recursively."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
