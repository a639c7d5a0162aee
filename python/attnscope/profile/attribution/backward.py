"""Who called backward(), and which forward op a backward op belongs to.

On a GPU the engine runs backward ops on a thread of its own while the caller waits:

    thread 1   [forward: mul #5]   [ range "step": loss.backward() waits ........ ]
    thread 9                           [evaluate_function: MulBackward0 #5][Accumulate]
                                        launch, launch, ...

The work of thread 9 is also inside "step", and belongs to "mul": both ops have the sequence number
5, and the backward op records the thread of its forward.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from functools import cached_property

from attnscope.profile.attribution.threads import Threads
from attnscope.profile.trace.events import CpuEvent, Trace

ENGINE = "autograd::engine::evaluate_function: "
# Parts of the names of Python frames that wait in backward().
ENGINE_CALLS = ("run_backward of torch._C._EngineBase", "): _engine_run_backward")


class Backward:
    """Backward work of a trace."""

    def __init__(self, trace: Trace, threads: Threads) -> None:
        self.trace, self._threads = trace, threads

    def caller(self, event: CpuEvent) -> int | None:
        """The thread that waits in backward() for an event of an autograd thread, else None.

        If stacks were recorded, candidates are threads whose Python frames are in a call of the
        engine. Otherwise they are all threads without frames. The forward op's thread is preferred,
        then a single candidate; with several candidates the result is None.
        """
        if event.thread not in self.autograd_threads:
            return None
        at = self._outermost[event.index]
        outer = self.trace.cpu[at] if at >= 0 else event
        around = {thread: self._threads.open_at(thread, outer.start) for thread in self._own_ops}
        called = [thread for thread, open_ in around.items() if any(map(_is_call, open_))]
        without_frames = [
            thread
            for thread, open_ in around.items()
            if not any(one.kind == "python" for one in open_)
        ]
        could = called or without_frames
        forward, since = self._origins.get(at, (None, 0))
        if forward in could and self._waits(forward, since, outer.end):
            return forward
        could = [thread for thread in could if self._waits(thread, outer.start, outer.end)]
        return could[0] if len(could) == 1 else None

    def _waits(self, thread: int, start: int, end: int) -> bool:
        """Whether a thread can have waited in backward() from `start` to `end`.

        It must have events after `end`, and must not have begun an op in between. Ops that the
        engine runs on the calling thread, for the CPU part of a graph, are ignored.
        """
        own = self._own_ops.get(thread, [])
        return self._last[thread] >= end and bisect_left(own, start) == bisect_left(own, end)

    @cached_property
    def _last(self) -> dict[int, int]:
        """Thread -> end of its last event."""
        return {t: max(e.end for e in events) for t, events in self._threads.events.items()}

    @cached_property
    def _outermost(self) -> list[int]:
        """For each CPU event, the index of its outermost op (perhaps itself), -1 for none."""
        outer: list[int] = []
        for event in self.trace.cpu:
            above = outer[event.parent] if event.parent >= 0 else -1
            outer.append(event.index if above < 0 and event.kind == "op" else above)
        return outer

    @cached_property
    def _own_ops(self) -> dict[int, list[int]]:
        """Thread -> start times of its ops, without ops inside the engine's backward ops.

        Contains every thread with ops or ranges that is not one of autograd's.
        """
        starts: dict[int, list[int]] = {}
        for event in self.trace.cpu:
            if event.kind in ("op", "range") and event.thread not in self.autograd_threads:
                own = starts.setdefault(event.thread, [])
                if event.kind == "op" and not self._in_engine[event.index]:
                    own.append(event.start)
        return starts

    @cached_property
    def _in_engine(self) -> list[bool]:
        """For each CPU event, whether it is a backward op of the engine or inside one."""
        found: list[bool] = []
        for event in self.trace.cpu:
            found.append(_is_engine(event) or event.parent >= 0 and found[event.parent])
        return found

    @cached_property
    def autograd_threads(self) -> set[int]:
        """Threads that the engine runs backward on while another thread waits.

        Such a thread begins with a backward op that has no caller. Its other ops are the end of a
        backward pass (DDP, FSDP); they need no gradients, so they have no sequence numbers.
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
        """Outermost op of an autograd thread -> thread of its forward, and start of its wait.

        A backward op without a forward op (AccumulateGrad) runs right after the op whose gradient
        it takes, and gets the same thread. A forward that ran inside backward (double backward)
        gets the thread of that backward.
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

    @cached_property
    def _forwards(self) -> dict[tuple[int, int], CpuEvent]:
        """(thread, sequence number) -> forward op.

        Ops carry the number of the next autograd node, so the last op with a number made the node.
        """
        found = {}
        for event in self.trace.cpu:
            if event.kind == "op" and event.sequence >= 0 and not event.forward_thread:
                found[event.thread, event.sequence] = event
        return found

    @cached_property
    def _forward_threads(self) -> dict[int, int]:
        """The profiler's number of a forward thread -> thread.

        Found by the profiler's arrows from forward to backward. Without arrows, the thread that
        shares most sequence numbers is taken, unless two threads share equally many.
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
        """The forward op of a backward op or of an op inside one.

        None for other events, and if the forward ran outside the window.
        """
        at = self._backward_ops[event.index]
        if at < 0:
            return None
        around = self.trace.cpu[at]
        thread = self._forward_threads.get(around.forward_thread)
        return None if thread is None else self._forwards.get((thread, around.sequence))

    @cached_property
    def _backward_ops(self) -> list[int]:
        """For each CPU event, the index of its innermost backward op (perhaps itself), or -1."""
        found: list[int] = []
        for event in self.trace.cpu:
            if event.forward_thread and event.sequence >= 0:
                found.append(event.index)
            else:
                found.append(found[event.parent] if event.parent >= 0 else -1)
        return found


def _is_engine(event: CpuEvent) -> bool:
    return event.kind == "op" and event.name.startswith(ENGINE)


def _is_call(event: CpuEvent) -> bool:
    return event.kind == "python" and any(call in event.name for call in ENGINE_CALLS)
