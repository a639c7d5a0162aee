"""Who owns GPU time: kernels joined to ops, ranges, modules and Python lines, each counted once.

A kernel is joined to its launch call by CUPTI's correlation id, and the call to the innermost op
open on its thread at that time. The external id that the profiler wrote on the kernel is the
cross-check. `key_averages()` is not used.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from math import inf

from attnscope.profile.attribution.backward import Backward
from attnscope.profile.attribution.graphs import Capture, captured_calls
from attnscope.profile.attribution.threads import Threads
from attnscope.profile.trace.events import CLOCKS_NS, CpuEvent, GpuEvent, Trace, is_open
from attnscope.profile.trace.markers import GRAPH_LAUNCHES

MODULE = "nn.Module: "
MOST_UNFIT = 0.01  # share of external ids that may name a wrong op where others are used


class Attribution:
    """The owners of every piece of GPU work of a trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._ops = {e.external_id: e for e in trace.cpu if e.kind == "op" and e.external_id}
        self._open = _open_ranges(trace.cpu)
        self._threads = Threads(trace)

    # Owners

    def op(self, work: GpuEvent) -> CpuEvent | None:
        """The innermost op that launched GPU work, None for work outside every op.

        An external id that names an op open at the launch takes precedence: it was on CUPTI's stack
        then, while times come from two clocks.
        """
        return self._owners[work.index]

    @cached_property
    def _owners(self) -> list[CpuEvent | None]:
        """The op of each piece of GPU work."""
        owners = []
        for work in self.trace.gpu:
            named = self._ops.get(work.external_id)
            found = named and self._was_open(named, work)
            owners.append(named if found else self._op_by_time(work))
        return owners

    def _was_open(self, op: CpuEvent, work: GpuEvent) -> bool:
        """Whether an op was open on the launching thread at the launch of GPU work.

        Where the trace has no launch, whether the op began before the work, in a trace whose other
        ids fit.
        """
        if work.launch < 0:
            return op.start - CLOCKS_NS <= work.start and self._ids_fit
        call = self.trace.cpu[work.launch]
        return call.thread == op.thread and is_open(op, call.start)

    @cached_property
    def _ids_fit(self) -> bool:
        """Whether nearly all external ids of work with a launch name an op open at that launch."""
        named = [(self._ops.get(w.external_id), w) for w in self.trace.gpu if w.launch >= 0]
        open_ = [self._was_open(op, work) for op, work in named if op]
        return open_.count(False) <= MOST_UNFIT * len(open_)

    @cached_property
    def unfit(self) -> list[GpuEvent]:
        """GPU work whose external id names an op that cannot have launched it."""
        named = ((self._ops.get(work.external_id), work) for work in self.trace.gpu)
        return [work for op, work in named if op and not self._was_open(op, work)]

    def _op_by_time(self, work: GpuEvent) -> CpuEvent | None:
        return next((e for e in self.trace.ancestors(work) if e.kind == "op"), None)

    def op_at(self, thread: int, time: int) -> CpuEvent | None:
        """The innermost op open on a thread at a time."""
        return next((e for e in self._threads.open_at(thread, time) if e.kind == "op"), None)

    @cached_property
    def disagreements(self) -> list[GpuEvent]:
        """Kernels whose external id names another op than the one open at their launch."""
        found = []
        for kernel in self.trace.kernels:
            named = self._ops.get(kernel.external_id)
            if named and kernel.launch >= 0 and named is not self._op_by_time(kernel):
                found.append(kernel)
        return found

    def replay(self, work: GpuEvent) -> CpuEvent | None:
        """The call that replayed the CUDA graph of GPU work; None for work outside graphs."""
        if work.launch < 0:
            return None
        launch = self.trace.cpu[work.launch]
        return launch if launch.name.startswith(GRAPH_LAUNCHES) else None

    @cached_property
    def _captured(self) -> dict[int, tuple[CpuEvent, Capture]]:
        return captured_calls(self.trace)

    def captured_op(self, work: GpuEvent) -> CpuEvent | None:
        """The innermost op that captured a replayed kernel; None for other work, and if the trace
        does not show the capture."""
        call = self._captured.get(work.index)
        return (
            next((e for e in self.trace.ancestors(call[0]) if e.kind == "op"), None)
            if call
            else None
        )

    def captured_ranges(self, work: GpuEvent) -> tuple[CpuEvent, ...]:
        """The ranges that began in the capture of a replayed kernel and were open at its launch."""
        if work.index not in self._captured:
            return ()
        call, capture = self._captured[work.index]
        return tuple(event for event in self.ranges(call) if event.start >= capture.start)

    # Ranges

    def ranges(self, event: CpuEvent | GpuEvent) -> tuple[CpuEvent, ...]:
        """The ranges around an event (around the launch, for GPU work), outermost first.

        Work of autograd's threads is also inside the ranges open on the thread that called
        backward.
        """
        if isinstance(event, GpuEvent):
            return self._ranges_of_work[event.index]
        own = tuple(self.trace.cpu[at] for at in self._open[event.index])
        caller = self._backward.caller(event)
        return own if caller is None else self._ranges_at(caller, event.start) + own

    @cached_property
    def _ranges_of_work(self) -> list[tuple[CpuEvent, ...]]:
        """The ranges around the launch of each piece of GPU work, or around its op."""
        found = []
        for work, op in zip(self.trace.gpu, self._owners, strict=True):
            launched = work.launch >= 0 and op is self._op_by_time(work)
            event = self.trace.cpu[work.launch] if launched else op
            found.append(self.ranges(event) if event else ())
        return found

    def _ranges_at(self, thread: int, time: int) -> tuple[CpuEvent, ...]:
        """The ranges open on a thread at a time."""
        last = self._threads.last_at(thread, time)
        if last is None:
            return ()
        around = [self.trace.cpu[i] for i in self._open[last.index]]
        around += [last] if last.kind == "range" else []
        return tuple(e for e in around if e.end > time)

    # Backward

    @cached_property
    def _backward(self) -> Backward:
        return Backward(self.trace, self._threads)

    @property
    def autograd_threads(self) -> set[int]:
        """Threads that the engine runs backward on while another thread waits."""
        return self._backward.autograd_threads

    def forward_op(self, event: CpuEvent) -> CpuEvent | None:
        """The forward op of a backward op or of an op inside one.

        None for other events, and if the forward ran outside the window.
        """
        return self._backward.forward_op(event)

    # Python

    def module(self, event: CpuEvent | GpuEvent) -> tuple[str, ...]:
        """The nn.Modules around an event, outermost first.

        Backward work gets the modules of its forward op. Empty if modules were not recorded.
        """
        frames = self._frames(event)
        return tuple(f.removeprefix(MODULE) for f in frames if f.startswith(MODULE))

    def stack(self, event: CpuEvent | GpuEvent) -> tuple[str, ...]:
        """The Python frames around an event, innermost last.

        Backward work gets the frames of its forward op. Empty if stacks were not recorded.
        """
        return tuple(f for f in self._frames(event) if not f.startswith(MODULE))

    @cached_property
    def has_frames(self) -> bool:
        """Whether Python frames or modules were recorded."""
        return any(event.kind == "python" for event in self.trace.cpu)

    def _frames(self, event: CpuEvent | GpuEvent) -> tuple[str, ...]:
        if not self.has_frames:
            return ()
        if isinstance(event, GpuEvent):
            owner = self.op(event) or (self.trace.cpu[event.launch] if event.launch >= 0 else None)
            if owner is None:
                return ()
            event = owner
        forward = self.forward_op(event)
        around = (event, *self.trace.ancestors(forward or event))
        return tuple(e.name for e in reversed(around) if e.kind == "python")

    # Sums over kernels, without copies

    @cached_property
    def total_ns(self) -> int:
        return sum(k.duration for k in self.trace.kernels)

    @cached_property
    def unowned(self) -> list[GpuEvent]:
        """Kernels that neither an op nor the replay of a graph launched."""
        return [k for k in self.trace.kernels if self.op(k) is None and self.replay(k) is None]

    @cached_property
    def owned_ns(self) -> int:
        """Time of the kernels launched by ops and by replays of CUDA graphs."""
        return self.total_ns - sum(k.duration for k in self.unowned)

    @cached_property
    def replayed_ns(self) -> int:
        """The part of owned_ns that belongs to replays: no op was open, and none captured it."""
        rest = (k for k in self.trace.kernels if self.replay(k) and self.op(k) is None)
        return sum(kernel.duration for kernel in rest if self.captured_op(kernel) is None)

    @cached_property
    def captured_ns(self) -> int:
        """The part of owned_ns that belongs to the ops that captured a replayed kernel."""
        rest = (k for k in self.trace.kernels if k.index in self._captured and self.op(k) is None)
        return sum(kernel.duration for kernel in rest if self.captured_op(kernel) is not None)

    @cached_property
    def busy_ns(self) -> int:
        """Time in which a kernel, a copy or a fill ran."""
        return busy_ns(self.trace.gpu)

    @property
    def share(self) -> float | None:
        """owned_ns / total_ns; None if no kernel ran."""
        return self.owned_ns / self.total_ns if self.total_ns else None


def busy_ns(events: Iterable[CpuEvent | GpuEvent]) -> int:
    """Nanoseconds in which at least one of the events ran: overlaps count once."""
    spans = [(event.start, event.end) for event in events]
    spans.sort()
    busy, until = 0, -1
    for start, end in spans:
        if end > until:
            busy += end - (start if start > until else until)
            until = end
    return busy


def _open_ranges(events: list[CpuEvent]) -> list[tuple[int, ...]]:
    """For each event, the indices of the other ranges open on its thread when it began.

    This is not the chain of parents: ranges may overlap without nesting.
    """
    now: dict[int, tuple[tuple[int, ...], float]] = {}  # thread -> ranges, the first end of them
    around = []
    for event in events:
        ranges, first_end = now.get(event.thread, ((), inf))
        if first_end <= event.start:
            ranges = tuple(at for at in ranges if events[at].end > event.start)
            first_end = min((events[at].end for at in ranges), default=inf)
            now[event.thread] = ranges, first_end
        around.append(ranges)
        if event.kind == "range":
            now[event.thread] = (*ranges, event.index), min(first_end, event.end)
    return around
