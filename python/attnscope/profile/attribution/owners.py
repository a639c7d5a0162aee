"""Who owns GPU time: kernels joined to ops, ranges, modules and Python lines, each counted once.

The join is launch call -> innermost op open on its thread, by CUPTI's correlation id and time; the
external id that the profiler wrote on the kernel is the cross-check. `key_averages()` plays no
part.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cached_property

from attnscope.profile.trace.events import CpuEvent, GpuEvent, Trace

GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")
MODULE = "nn.Module: "
ENGINE = "autograd::engine::evaluate_function: "
# In the Python frames that wait in backward().
ENGINE_CALLS = ("run_backward of torch._C._EngineBase", "): _engine_run_backward")


class Attribution:
    """The owners of every piece of GPU work of a trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._ops = {e.external_id: e for e in trace.cpu if e.kind == "op" and e.external_id}
        self._open = _open_ranges(trace.cpu)
        self._by_thread: dict[int, list[CpuEvent]] = defaultdict(list)
        for event in trace.cpu:
            self._by_thread[event.thread].append(event)
        self._starts = {t: [e.start for e in events] for t, events in self._by_thread.items()}

    # Owners

    def op(self, work: GpuEvent) -> CpuEvent | None:
        """The innermost op that launched GPU work, None for work outside every op.

        The external id wins where it names an op of the launching thread: it was on CUPTI's stack
        at the launch, while times come from two clocks.
        """
        named = self._ops.get(work.external_id)
        if named and (work.launch < 0 or self.trace.cpu[work.launch].thread == named.thread):
            return named
        return self._op_by_time(work)

    def _op_by_time(self, work: GpuEvent) -> CpuEvent | None:
        return next((e for e in self.trace.ancestors(work) if e.kind == "op"), None)

    def op_at(self, thread: int, time: int) -> CpuEvent | None:
        """The innermost op that a thread was in at a time."""
        return next((e for e in self._open_at(thread, time) if e.kind == "op"), None)

    def _last_at(self, thread: int, time: int) -> CpuEvent | None:
        """The last event that a thread had begun at a time."""
        at = bisect_right(self._starts.get(thread, []), time) - 1
        return self._by_thread[thread][at] if at >= 0 else None

    def _open_at(self, thread: int, time: int) -> list[CpuEvent]:
        """What a thread was in at a time, innermost first."""
        last = self._last_at(thread, time)
        return [e for e in (last, *self.trace.ancestors(last)) if e.end > time] if last else []

    @cached_property
    def disagreements(self) -> list[GpuEvent]:
        """Kernels whose launch lies, by time, in another op than their external id says."""
        return [
            k for k in self.trace.kernels if k.launch >= 0 and self.op(k) is not self._op_by_time(k)
        ]

    def replay(self, work: GpuEvent) -> CpuEvent | None:
        """The call that replayed the CUDA graph which GPU work belongs to, None outside graphs."""
        if work.launch < 0:
            return None
        launch = self.trace.cpu[work.launch]
        return launch if launch.name.startswith(GRAPH_LAUNCHES) else None

    # Ranges

    def ranges(self, event: CpuEvent | GpuEvent) -> tuple[CpuEvent, ...]:
        """The ranges around an event (around the launch, for GPU work), outermost first.

        Work of autograd's threads is also inside the ranges that were open, meanwhile, on the
        thread that called backward.
        """
        if isinstance(event, GpuEvent):
            op = self.op(event)
            if event.launch < 0 or op is not self._op_by_time(event):
                return self.ranges(op) if op else ()
            event = self.trace.cpu[event.launch]
        own = tuple(self.trace.cpu[at] for at in self._open[event.index])
        caller = self._caller(event)
        return own if caller is None else self._ranges_at(caller, event.start) + own

    def _ranges_at(self, thread: int, time: int) -> tuple[CpuEvent, ...]:
        """The ranges open on a thread at a time."""
        last = self._last_at(thread, time)
        if last is None:
            return ()
        around = [self.trace.cpu[i] for i in self._open[last.index]]
        around += [last] if last.kind == "range" else []
        return tuple(e for e in around if e.end > time)

    # The caller of backward()

    def _caller(self, event: CpuEvent) -> int | None:
        """The thread that waits in backward() for an event of an autograd thread, else None.

        It is the thread of the forward, or the one in Python's call of the engine where stacks
        were recorded, or the only one that could wait. Of several none is guessed.
        """
        if event.thread not in self.autograd_threads:
            return None
        at = self._outermost[event.index]
        outer = self.trace.cpu[at] if at >= 0 else event
        inside, blind = [], []
        for thread in self._by_thread.keys() - self.autograd_threads:
            around = self._open_at(thread, outer.start)
            if any(map(_is_call, around)):
                inside.append(thread)
            elif not any(e.kind == "python" for e in around):
                blind.append(thread)
        origin = self._origins.get(at)
        if origin and origin[0] in (*inside, *blind) and self._waits(*origin, outer.end):
            return origin[0]
        could = inside or [t for t in blind if t in self._own_ops]
        could = [t for t in could if self._waits(t, outer.start, outer.end)]
        return could[0] if len(could) == 1 else None

    def _waits(self, thread: int, start: int, end: int) -> bool:
        """Could a thread have waited in backward() meanwhile: it goes on after it, and began no op
        but those that the engine runs on the calling thread, for the CPU's part of a graph."""
        own = self._own_ops.get(thread, [])
        return self._last[thread] >= end and bisect_left(own, start) == bisect_left(own, end)

    @cached_property
    def _last(self) -> dict[int, int]:
        """When the last event of a thread ended."""
        return {t: max(e.end for e in events) for t, events in self._by_thread.items()}

    @cached_property
    def _outermost(self) -> list[int]:
        """For each CPU event, the index of the outermost op around it or of itself, -1 for none."""
        outer: list[int] = []
        for event in self.trace.cpu:
            above = outer[event.parent] if event.parent >= 0 else -1
            outer.append(event.index if above < 0 and event.kind == "op" else above)
        return outer

    @cached_property
    def _own_ops(self) -> dict[int, list[int]]:
        """Of threads that are not autograd's and have ops or ranges: when their ops began, those
        inside backward ops of the engine apart."""
        starts: dict[int, list[int]] = {}
        for event in self.trace.cpu:
            if event.kind in ("op", "range") and event.thread not in self.autograd_threads:
                own = starts.setdefault(event.thread, [])
                if event.kind == "op" and not self._in_engine[event.index]:
                    own.append(event.start)
        return starts

    @cached_property
    def _in_engine(self) -> list[bool]:
        """For each CPU event, is it a backward op of the engine or inside one."""
        found: list[bool] = []
        for event in self.trace.cpu:
            found.append(_is_engine(event) or event.parent >= 0 and found[event.parent])
        return found

    @cached_property
    def autograd_threads(self) -> set[int]:
        """Threads that the engine runs backward on while another thread waits.

        Such a thread begins with a backward op that nothing called. What it runs outside them is
        the end of a backward pass (of DDP, FSDP), without gradients, so without sequence numbers.
        """
        first: dict[int, CpuEvent] = {}
        at_work = set()
        for event in self.trace.cpu:
            if event.kind in ("op", "range"):
                first.setdefault(event.thread, event)
            if event.kind == "op" and event.sequence >= 0 and not event.forward_thread:
                if not self._in_engine[event.index]:
                    at_work.add(event.thread)
        engine = {t for t, e in first.items() if _is_engine(e)}
        called = {t for t in engine if any(map(_is_call, self.trace.ancestors(first[t])))}
        return engine - called - at_work

    @cached_property
    def _origins(self) -> dict[int, tuple[int, int]]:
        """Outermost ops of autograd threads -> thread of their forward, and since when it must
        have waited.

        A backward op without a forward op (AccumulateGrad) runs right after the one that feeds it,
        and has its thread. A forward that ran inside backward (double backward) has the thread of
        that backward.
        """
        found: dict[int, tuple[int, int]] = {}
        before: dict[int, tuple[int, int]] = {}
        for event in self.trace.cpu:
            if event.thread not in self.autograd_threads:
                continue
            if self._outermost[event.index] != event.index:
                continue
            thread = self._forward_threads.get(event.forward_thread)
            if thread in self.autograd_threads:
                forward = self.forward_op(event)
                inner = found.get(self._outermost[forward.index]) if forward else None
                thread = inner[0] if inner else None
            if thread is not None:
                before[event.thread] = (thread, event.start)
            if event.thread in before:
                found[event.index] = before[event.thread]
        return found

    # Forward of backward

    @cached_property
    def _forwards(self) -> dict[tuple[int, int], CpuEvent]:
        """(thread, sequence number) -> forward op. The number is that of the next autograd node,
        so the last op that carries it is the one that made the node."""
        found = {}
        for event in self.trace.cpu:
            if event.kind == "op" and event.sequence >= 0 and not event.forward_thread:
                found[event.thread, event.sequence] = event
        return found

    @cached_property
    def _forward_threads(self) -> dict[int, int]:
        """The profiler's number of a forward thread -> thread: by the profiler's arrows from
        forward to backward, else by shared sequence numbers, where only one thread has the most.
        """
        arrows: dict[int, Counter[int]] = defaultdict(Counter)
        wanted: dict[int, set[int]] = defaultdict(set)
        for event in self.trace.cpu:
            if event.forward_thread and event.sequence >= 0:
                wanted[event.forward_thread].add(event.sequence)
                if thread := self.trace.arrows.get((event.thread, event.start)):
                    arrows[event.forward_thread][thread] += 1
        threads = {}
        for number, sequences in wanted.items():
            hits = arrows[number] or Counter(t for t, one in self._forwards if one in sequences)
            best = hits.most_common(2)
            if best and (len(best) == 1 or best[0][1] > best[1][1]):
                threads[number] = best[0][0]
        return threads

    def forward_op(self, event: CpuEvent) -> CpuEvent | None:
        """The forward op that a backward op, or an op inside one, belongs to; None for others and
        where the forward ran outside the window."""
        for around in (event, *self.trace.ancestors(event)):
            if around.forward_thread and around.sequence >= 0:
                thread = self._forward_threads.get(around.forward_thread)
                return None if thread is None else self._forwards.get((thread, around.sequence))
        return None

    # Python

    def module(self, event: CpuEvent | GpuEvent) -> tuple[str, ...]:
        """The nn.Modules around an event, outermost first, of the forward op for backward work.

        Empty where modules were not recorded.
        """
        frames = self._frames(event)
        return tuple(f.removeprefix(MODULE) for f in frames if f.startswith(MODULE))

    def stack(self, event: CpuEvent | GpuEvent) -> tuple[str, ...]:
        """The Python frames around an event, innermost last, of the forward op for backward work.

        Empty where stacks were not recorded.
        """
        return tuple(f for f in self._frames(event) if not f.startswith(MODULE))

    def _frames(self, event: CpuEvent | GpuEvent) -> tuple[str, ...]:
        if isinstance(event, GpuEvent):
            owner = self.op(event) or (self.trace.cpu[event.launch] if event.launch >= 0 else None)
            if owner is None:
                return ()
            event = owner
        forward = self.forward_op(event)
        around = (event, *self.trace.ancestors(forward or event))
        return tuple(e.name for e in reversed(around) if e.kind == "python")

    # Sums over kernels; copies are apart

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
        """The part of owned_ns that belongs to replays outside every op."""
        kernels = self.trace.kernels
        return sum(k.duration for k in kernels if self.replay(k) and self.op(k) is None)

    @property
    def share(self) -> float | None:
        """owned_ns of total_ns; None where no kernel ran."""
        return self.owned_ns / self.total_ns if self.total_ns else None


def busy_ns(events: Iterable[CpuEvent | GpuEvent]) -> int:
    """Nanoseconds in which at least one of the events ran: the union, whatever overlaps."""
    busy, until = 0, -1
    for start, end in sorted((e.start, e.end) for e in events):
        busy += max(0, end - max(start, until))
        until = max(until, end)
    return busy


def _is_engine(event: CpuEvent) -> bool:
    return event.kind == "op" and event.name.startswith(ENGINE)


def _is_call(event: CpuEvent) -> bool:
    return event.kind == "python" and any(call in event.name for call in ENGINE_CALLS)


def _open_ranges(events: list[CpuEvent]) -> list[tuple[int, ...]]:
    """For each event, the indices of the ranges open on its thread when it began, itself apart.

    Not the chain of parents: ranges may overlap without one being inside the other.
    """
    now: dict[int, tuple[int, ...]] = {}
    around = []
    for event in events:
        ranges = now.get(event.thread, ())
        if any(events[at].end <= event.start for at in ranges):
            ranges = tuple(at for at in ranges if events[at].end > event.start)
        around.append(ranges)
        now[event.thread] = (*ranges, event.index) if event.kind == "range" else ranges
    return around
