"""What a trace consists of: CPU and GPU events, allocations, overhead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple


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
    correlation: int = 0  # of calls; the GPU work it started has the same
    external_id: int = 0
    sequence: int = -1  # autograd's number: a backward op has that of its forward op
    forward_thread: int = 0  # of backward ops; 0 in forward
    shapes: tuple[Any, ...] | None = None
    dtypes: tuple[Any, ...] | None = None
    concrete: tuple[Any, ...] | None = None

    @property
    def duration(self) -> int:
        return self.end - self.start


@dataclass(slots=True)
class GpuEvent:
    """Something a GPU did: a kernel, a copy or a fill. Times as in CpuEvent.

    `launch` is the index in Trace.cpu of the call that started it, -1 where the trace has none.
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
    occupancy: float | None = None  # percent, the profiler's estimate; None where it says 0
    bytes: int | None = None  # of copies and fills

    @property
    def duration(self) -> int:
        return self.end - self.start


class Allocation(NamedTuple):
    """One allocation (or, with negative bytes, one release) of PyTorch's allocators."""

    time: int
    thread: int
    device: int  # -1 is the CPU
    bytes: int
    allocated: int  # in all, after it
    reserved: int


class Overhead(NamedTuple):
    """Time the profiler or the driver took for itself; never GPU work."""

    name: str
    start: int
    end: int


@dataclass
class Trace:
    """The events of one profiled window, each list sorted by start.

    `arrows` leads from thread and start of a backward op to the thread of its forward op.
    `start` and `end` are the window: between the sentinels, or the waits, where there are two, else
    the whole recording. `sentinels` has the kernels found in each sentinel; nothing else has them.
    `waits` counts the profiler's own waits for the device: one at each end of a region, and
    `thread` is the one that ended it. `steps` has the number of each step that was told to begin,
    and when; `steps_end` is when the last of them ended, None where the program ended first.
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
    start: int = 0
    end: int = 0

    @property
    def kernels(self) -> list[GpuEvent]:
        return [event for event in self.gpu if event.kind == "kernel"]

    @property
    def copies(self) -> list[GpuEvent]:
        """Copies and fills."""
        return [event for event in self.gpu if event.kind != "kernel"]

    def ancestors(self, event: CpuEvent | GpuEvent) -> Iterator[CpuEvent]:
        """What encloses an event, innermost first; of GPU work, its launch call first."""
        at = event.launch if isinstance(event, GpuEvent) else event.parent
        while at >= 0:
            yield self.cpu[at]
            at = self.cpu[at].parent
