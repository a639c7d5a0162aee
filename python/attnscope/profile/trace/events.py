"""The parts of a trace: CPU and GPU events, allocations, overhead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from attnscope.profile.trace.collectives import Collective

CLOCKS_NS = 2000  # maximum difference between CUPTI's and PyTorch's clocks


@dataclass(slots=True)
class CpuEvent:
    """Something a CPU thread did: an op, a named range, a Python frame or a CUDA API call.

    Times are nanoseconds from the start of the trace. `parent` is the index in Trace.cpu of the
    innermost op, range or Python frame of the same thread that encloses it, -1 for none.
    """

    kind: str  # "op", "range", "python" or "call"
    name: str
    thread: int
    start: int
    end: int
    index: int = -1
    parent: int = -1
    correlation: int = 0  # calls only; equals the correlation id of the GPU work
    external_id: int = 0
    sequence: int = -1  # autograd's number, shared by a forward and a backward op
    forward_thread: int = 0  # backward ops only; 0 in forward
    shapes: tuple[Any, ...] | None = None
    dtypes: tuple[Any, ...] | None = None
    concrete: tuple[Any, ...] | None = None

    @property
    def duration(self) -> int:
        return self.end - self.start


@dataclass(slots=True)
class GpuEvent:
    """Something a GPU did: a kernel, a copy or a fill. Times as in CpuEvent.

    `launch` is the index in Trace.cpu of its launch call, -1 if the trace has none.
    """

    kind: str  # "kernel", "memcpy" or "memset"
    name: str
    start: int
    end: int
    device: int
    stream: int
    index: int = -1
    correlation: int = 0
    external_id: int = 0
    launch: int = -1
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    registers: int | None = None
    shared_bytes: int | None = None
    blocks_per_sm: float | None = None
    warps_per_sm: float | None = None
    occupancy: float | None = None  # percent, the profiler's estimate; None if it is 0
    bytes: int | None = None  # copies and fills only
    context: int = 0
    node: int = 0  # in a CUDA graph, 0 if the trace does not show it
    annotation: str | None = None  # of its node in a CUDA graph (torch.cuda's mark_kernels)

    @property
    def duration(self) -> int:
        return self.end - self.start


# Nesting order of events that start and end together: a range is entered before the op in it.
_RANKS = {"range": 0, "python": 1, "op": 2, "call": 3}


def entry_order(event: CpuEvent) -> tuple[int, int, int]:
    """Sort key: by start, outer events first."""
    return event.start, -event.end, _RANKS[event.kind]


def is_open(event: CpuEvent, call_start: int) -> bool:
    """Whether an event was open when a CUDA call began, as far as their two clocks agree."""
    return event.start - CLOCKS_NS <= call_start < event.end + CLOCKS_NS


class Allocation(NamedTuple):
    """One allocation (or, with negative bytes, one release) of PyTorch's allocators."""

    time: int
    thread: int
    device: int  # -1 is the CPU
    bytes: int
    allocated: int  # total after this allocation
    reserved: int


class Overhead(NamedTuple):
    """Overhead of the profiler or the driver; never GPU work."""

    name: str
    start: int
    end: int


@dataclass
class Faults:
    """What the reader left out, clipped or did not know, counted.

    Attributes:
        unread: (category, phase) of events that may be work and were not read.
        malformed: events with a missing or bad value, left out; `first_malformed` names the first.
        negative: events with a duration below 0, left out.
        far: events half a day or more from the others, left out.
        duplicates: repeated events, left out.
        early: GPU work that starts before its launch by more than CLOCKS_NS, left out; kept if
            there is too much of it (`clocks_differ`). `earliest_ns` is the largest difference.
        clipped: GPU work that outlasted later work of its stream, cut where that work starts.
        clipped_ns: the time that was cut off.
        instant: kernels that end when they start.
        pids: events of each process with ops or CUDA calls.
        left_out: correlation ids of GPU work that is in no table although it was launched.
    """

    unread: Counter[tuple[str, str]] = field(default_factory=Counter)
    malformed: int = 0
    first_malformed: str = ""
    negative: int = 0
    far: int = 0
    duplicates: int = 0
    early: int = 0
    earliest_ns: int = 0
    clocks_differ: bool = False
    clipped: int = 0
    clipped_ns: int = 0
    instant: int = 0
    pids: Counter[str] = field(default_factory=Counter)
    left_out: set[int] = field(default_factory=set)


@dataclass
class Trace:
    """The events of one profiled window, each list sorted by start.

    `arrows` maps the thread and start of a backward op to the thread of its forward op.
    `start` and `end` bound the window: the time between two sentinels, or else between two waits,
    or else the whole recording. `sentinels` has the number of kernels found in each sentinel; these
    kernels are in no other list. `waits` counts the profiler's own waits for the device, one at
    each end of a region. `thread` is the thread that ended the region. `steps` has the number and
    start time of each recorded step. `steps_end` is the end of the last one, None if the program
    ended first. `step_range` is the name of the range that begins a step, "" for optimizer steps.
    `cut`: another step follows the last one in the file. `profiler_steps` has number, start and end
    of the steps that the program marked with `torch.profiler.profile.step()`. `faults` counts the
    events that cannot be true. `origin` is the file's time, in nanoseconds, that is 0 here.
    `repaired` is True for a file that is not JSON because PyTorch did not escape quotes in names.
    `collectives` maps the external id of a collective's op and kernels to what PyTorch recorded.
    `distributed` has what it recorded of the process group, such as `rank` and `world_size`.
    """

    cpu: list[CpuEvent] = field(default_factory=list)
    gpu: list[GpuEvent] = field(default_factory=list)
    overhead: list[Overhead] = field(default_factory=list)
    memory: list[Allocation] = field(default_factory=list)
    devices: list[dict[str, Any]] = field(default_factory=list)
    arrows: dict[tuple[int, int], int] = field(default_factory=dict)
    sentinels: list[int] = field(default_factory=list)
    waits: int = 0
    thread: int | None = None
    steps: list[tuple[int, int]] = field(default_factory=list)
    steps_end: int | None = None
    step_range: str = ""
    cut: bool = False
    profiler_steps: list[tuple[int, int, int]] = field(default_factory=list)
    start: int = 0
    end: int = 0
    origin: int = 0
    repaired: bool = False
    collectives: dict[int, Collective] = field(default_factory=dict)
    distributed: dict[str, Any] = field(default_factory=dict)
    faults: Faults = field(default_factory=Faults)

    @property
    def size(self) -> int:
        """The number of events."""
        return len(self.cpu) + len(self.gpu)

    @property
    def kernels(self) -> list[GpuEvent]:
        return [event for event in self.gpu if event.kind == "kernel"]

    @property
    def copies(self) -> list[GpuEvent]:
        """Copies and fills."""
        return [event for event in self.gpu if event.kind != "kernel"]

    @cached_property
    def program(self) -> tuple[int, int] | None:
        """From the start of the first op, range, GPU event or launch to the end of the last.

        None if there is none. Requested steps count as well.
        """
        launches = {work.launch for work in self.gpu if work.launch >= 0}
        mine = [
            event
            for event in self.cpu
            if event.kind == "op" or event.kind == "range" or event.index in launches
        ]
        starts = [at for _, at in self.steps[:1]]
        starts += [work.start for work in self.gpu[:1]] + [event.start for event in mine[:1]]
        ends = [work.end for work in self.gpu] + [event.end for event in mine]
        return (min(starts), max(max(ends), self.steps_end or 0)) if ends else None

    @cached_property
    def outer_ops(self) -> list[int]:
        """For each CPU event, the index of the nearest enclosing op, -1 for none."""
        outer: list[int] = []
        for event in self.cpu:
            at = event.parent
            outer.append(at if at < 0 or self.cpu[at].kind == "op" else outer[at])
        return outer

    def ops_from(self, op: CpuEvent) -> list[CpuEvent]:
        """An op and the ops around it, innermost first."""
        found, at = [op], self.outer_ops[op.index]
        while at >= 0:
            found.append(self.cpu[at])
            at = self.outer_ops[at]
        return found

    def ancestors(self, event: CpuEvent | GpuEvent) -> Iterator[CpuEvent]:
        """The events around an event, innermost first; for GPU work, its launch call first."""
        at = event.launch if isinstance(event, GpuEvent) else event.parent
        while at >= 0:
            yield self.cpu[at]
            at = self.cpu[at].parent
