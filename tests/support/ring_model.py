"""Explores every interleaving of roles that share rings of buffers, guarded by mbarriers.

A model has buffers, barriers and roles. A role is a generator function `step(n, local)` for use
number n of the rings: it yields operations, and returns what it remembers for use n + 1.

    def consumer(n, local):
        yield wait(full, n, reads=data)
        yield arrive(empty, n, reads=data)

`explore` tries every order of operations and copy completions, breadth first. It finds
- a read of a buffer that contains another use than expected, at the start or end of the read;
- a write to a buffer that is still being written;
- an arrival in another phase than expected, and more arrivals in a phase than its count;
- a deadlock.
A wait passes as mbarrier.try_wait.parity does: if the current phase's parity differs from the
parity waited for. A phase two earlier or later has the same parity.

The number of uses has no bound: states that differ by a shift of all uses are one state. So a step
must do the same for every n, up to n itself. Copies of a role are interchangeable. A counterexample
is replayed without either reduction.

Rings may advance at different rates: then buffers and barriers name a clock, and a role the clocks
that it uses. `n` of a role with several clocks is a tuple, and its step also returns the advance of
each. States that differ by a shift of all uses of one clock are one state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest

# Buffer states; -1 - i: a copy in flight that signals barrier i, and reads a source, see `flight`.
WRITING, READY = 0, 1


@dataclass(frozen=True)
class Buffer:
    """One buffer per stage; use n is in stage n % stages."""

    name: str
    stages: int
    clock: int = 0


@dataclass(frozen=True)
class Barrier:
    """One mbarrier per stage, with an arrival count. Use n completes phase n // stages.

    `counts`: a wait compares the number of the phase and not its parity, as a ticket in global
    memory does.
    """

    name: str
    stages: int
    count: int = 1
    counts: bool = False
    clock: int = 0


@dataclass(frozen=True)
class Op:
    kind: str
    n: int = 0
    barrier: Barrier | None = None
    buffer: Buffer | None = None  # written
    reads: tuple[Buffer, ...] = ()
    before: int = 0
    options: int = 0
    copies: int = 0
    source: Buffer | None = None
    parts: tuple[Op, ...] = ()


Step = Generator[Op, Any, Any]
Uses = tuple[int, ...]  # of each clock of a role
Buffers = Buffer | tuple[Buffer, ...] | None


def wait(barrier: Barrier, n: int, reads: Buffers = None) -> Op:
    """Wait until use n has completed its phase; then begin to read the buffers of use n."""
    return Op("wait", n, barrier, reads=_several(reads))


def wait_before(barrier: Barrier, n: int) -> Op:
    """Wait until the use of the stage before use n has completed its phase."""
    return Op("wait", n, barrier, before=1)


def arrive(barrier: Barrier, n: int, reads: Buffers = None) -> Op:
    """End a read of the buffers, and arrive for use n."""
    return Op("arrive", n, barrier, reads=_several(reads))


def write(buffer: Buffer, n: int) -> Op:
    """Begin to write the buffer of use n by ordinary stores."""
    return Op("write", n, buffer=buffer)


def publish(barrier: Barrier, n: int, writes: Buffer) -> Op:
    """End a write of the buffer, and arrive for use n."""
    return Op("publish", n, barrier, writes)


def finish(buffer: Buffer, n: int) -> Op:
    """End a write of the buffer, without a barrier."""
    return Op("finish", n, buffer=buffer)


def copy(buffer: Buffer, n: int, barrier: Barrier) -> Op:
    """Arrive with the bytes to expect, and issue a copy that completes them when it lands."""
    return Op("copy", n, barrier, buffer)


def read(buffers: Buffers, n: int) -> Op:
    """Begin or end a read of the buffers of use n, without a barrier."""
    return Op("read", n, reads=_several(buffers))


def expect(barrier: Barrier, n: int, copies: int, writes: Buffer | None = None) -> Op:
    """Arrive with the bytes of copies that others send; end a write of the buffer."""
    return Op("expect", n, barrier, writes, copies=copies)


def send(buffer: Buffer, n: int, barrier: Barrier, source: Buffer | None = None) -> Op:
    """Issue a copy that completes bytes of the barrier, without an arrival, when it lands.

    Until then it reads `source` of use n.
    """
    return Op("send", n, barrier, buffer, source=source)


def together(*ops: Op) -> Op:
    """All operations as one step of the exploration. Only the first may wait.

    It saves states, and hides no fault where each operation has an effect that later ones cannot
    undo: ends of reads, writes and arrivals.
    """
    assert all(op.kind != "wait" for op in ops[1:]), "only the first operation may wait"
    return Op("together", parts=ops)


def choose(options: int = 2) -> Op:
    """Take any of the options: the yield returns its number."""
    return Op("choose", options=options)


def _several(buffers: Buffers) -> tuple[Buffer, ...]:
    return () if buffers is None else buffers if isinstance(buffers, tuple) else (buffers,)


@dataclass(frozen=True)
class Role:
    name: str
    step: Callable[[Any, Any], Step]
    start: Any = None
    copies: int = 1
    clocks: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Model:
    roles: tuple[Role, ...]
    buffers: tuple[Buffer, ...]
    barriers: tuple[Barrier, ...]


@dataclass(frozen=True)
class Result:
    states: int
    failure: str = ""
    trace: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{number:3} {line}" for number, line in enumerate(self.trace, 1)]
        return "\n".join([f"{self.states} states: {self.failure or 'nothing wrong'}", *lines])


# A state: a place of each role, (phase, pending, copies expected) of each barrier and
# (use, state) of each buffer.
State = tuple[tuple[int, ...], tuple[Any, ...], tuple[Any, ...]]


class Wrong(Exception):
    """A fault that a transition exposes."""


class Explorer:
    def __init__(self, model: Model) -> None:
        self.model = model
        self.instances = [role for role in model.roles for _ in range(role.copies)]
        self.names = [
            role.name + (f" {copy}" if role.copies > 1 else "")
            for role in model.roles
            for copy in range(role.copies)
        ]
        self.barrier_at = _offsets(model.barriers)
        self.buffer_at = _offsets(model.buffers)
        self.copies = []  # the ranges of interchangeable instances
        for role in model.roles:
            first = self.instances.index(role)
            self.copies += [(first, first + role.copies)] if role.copies > 1 else []
        self.counts = [b.count for b in model.barriers for _ in range(b.stages)]
        self.barrier_stages = [b.stages for b in model.barriers for _ in range(b.stages)]
        self.buffer_names = [b.name for b in model.buffers for _ in range(b.stages)]
        self.previous_barrier = _previous(model.barriers)
        self.previous_buffer = _previous(model.buffers)
        # Places: between two operations of a role's step.
        self.places: list[tuple[Role, Uses, Any, tuple[Any, ...]]] = []
        self.place_of: dict[tuple[str, Uses, Any, tuple[Any, ...]], int] = {}
        self.clocks = frozenset(clock for role in model.roles for clock in role.clocks)
        self.roles_of = {
            clock: [i for i, role in enumerate(self.instances) if clock in role.clocks]
            for clock in self.clocks
        }
        self.first_at: list[frozenset[int]] = []  # the clocks of which it is at use 0
        self.op_at: list[Op | None] = []
        self.after: list[Any] = []  # what the step returned, where op_at is None
        self.earlier: dict[tuple[int, int], int] = {}

    def place(self, role: Role, uses: Uses, local: Any, sent: tuple[Any, ...]) -> int:
        key = (role.name, uses, local, sent)
        if key not in self.place_of:
            steps = role.step(uses if len(uses) > 1 else uses[0], local)
            op, after = None, None
            try:
                op = next(steps)
                for value in sent:
                    op = steps.send(value)
            except StopIteration as end:
                op, after = None, end.value
            self.place_of[key] = len(self.places)
            self.places.append((role, uses, local, sent))
            clocks = zip(role.clocks, uses, strict=True)
            self.first_at.append(frozenset(clock for clock, use in clocks if use == 0))
            self.op_at.append(op)
            self.after.append(after)
        return self.place_of[key]

    def settle(self, place: int) -> Iterator[int]:
        """The places before an operation that choices alone can reach."""
        role, uses, local, sent = self.places[place]
        op = self.op_at[place]
        if op is None:
            after = self.after[place]
            advance, local = ((1,), after) if len(uses) == 1 else after
            uses = tuple(use + more for use, more in zip(uses, advance, strict=True))
            yield from self.settle(self.place(role, uses, local, ()))
        elif op.kind == "choose":
            for number in range(op.options):
                yield from self.settle(self.place(role, uses, local, (*sent, number)))
        else:
            yield place

    def starts(self) -> list[State]:
        barriers = tuple((0, b.count, 0) for b in self.model.barriers for _ in range(b.stages))
        buffers = tuple(
            (stage - b.stages, READY) for b in self.model.buffers for stage in range(b.stages)
        )
        options = [
            self.settle(self.place(role, (0,) * len(role.clocks), role.start, ()))
            for role in self.instances
        ]
        return [(places, barriers, buffers) for places in product(*options)]

    def complete(self, barriers: list[Any], at: int, count: int) -> None:
        phase, pending, expected = barriers[at]
        if pending == 0 and expected == 0:
            barriers[at] = (phase + 1, count, 0)

    def arrive(self, op: Op, barriers: list[Any], copies: int) -> None:
        barrier = op.barrier
        assert barrier is not None
        at = self.barrier_at[barrier.name] + op.n % barrier.stages
        phase, pending, expected = barriers[at]
        if phase != op.n // barrier.stages:
            use = phase * barrier.stages + op.n % barrier.stages
            raise Wrong(f"arrives on {barrier.name} for use {op.n} in the phase of use {use}")
        if pending == 0:
            raise Wrong(f"arrives on {barrier.name} more often than its count, {barrier.count}")
        barriers[at] = (phase, pending - 1, expected + copies)
        self.complete(barriers, at, barrier.count)

    def passes(self, op: Op, barriers: tuple[Any, ...]) -> bool:
        assert op.barrier is not None
        stages = op.barrier.stages
        phase = barriers[self.barrier_at[op.barrier.name] + op.n % stages][0]
        if op.barrier.counts:
            return phase > op.n // stages - op.before
        return (phase & 1) != (op.n // stages - op.before & 1)

    def check_reads(self, op: Op, buffers: Any) -> None:
        for buffer in op.reads:
            use, state = buffers[self.buffer_at[buffer.name] + op.n % buffer.stages]
            if (use, state) != (op.n, READY):
                has = "is being written with" if state < READY else "has"
                raise Wrong(f"reads {buffer.name} of use {op.n}; the buffer {has} use {use}")

    def apply(self, op: Op, state: State) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
        """Barriers and buffers after an operation; None if it waits."""
        _, old_barriers, old_buffers = state
        parts = op.parts or (op,)
        if parts[0].kind == "wait" and not self.passes(parts[0], old_barriers):
            return None
        barriers, buffers = list(old_barriers), list(old_buffers)
        for part in parts:
            self.perform(part, barriers, buffers)
        return tuple(barriers), tuple(buffers)

    def perform(self, op: Op, barriers: list[Any], buffers: list[Any]) -> None:
        if op.reads:
            self.check_reads(op, buffers)
        if op.buffer is not None:
            at = self.buffer_at[op.buffer.name] + op.n % op.buffer.stages
            if op.kind in ("write", "copy", "send"):
                if buffers[at][1] < READY:
                    raise Wrong(f"writes {op.buffer.name} of use {op.n} while it is being written")
                buffers[at] = (op.n, WRITING if op.kind == "write" else self.flight(op))
            else:
                if buffers[at] != (op.n, WRITING):
                    has = buffers[at][0]
                    raise Wrong(f"publishes {op.buffer.name} of use {op.n}: it has {has}")
                buffers[at] = (op.n, READY)
        if op.kind in ("arrive", "publish", "copy", "expect"):
            self.arrive(op, barriers, 1 if op.kind == "copy" else op.copies)

    def flight(self, op: Op) -> int:
        """The state of a buffer while a copy into it is in flight."""
        assert op.barrier is not None
        barrier = self.barrier_at[op.barrier.name] + op.n % op.barrier.stages
        if op.source is None:
            return -1 - barrier
        source = self.buffer_at[op.source.name] + op.n % op.source.stages
        return -1 - barrier - (source + 1) * len(self.counts)

    def land(self, at: int, state: State) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Barriers and buffers after the copy into buffer `at` has landed."""
        _, old_barriers, buffers = state
        use, flight = buffers[at]
        source, b = divmod(-1 - flight, len(self.counts))
        name, barriers = self.buffer_names[at], list(old_barriers)
        if source and buffers[source - 1] != (use, READY):
            other = buffers[source - 1][0]
            raise Wrong(f"{name} of use {use} lands; its source has use {other}")
        phase, pending, expected = barriers[b]
        if phase != use // self.barrier_stages[b]:
            raise Wrong(f"{name} of use {use} lands in another phase of its barrier")
        barriers[b] = (phase, pending, expected - 1)
        self.complete(barriers, b, self.counts[b])
        return tuple(barriers), (*buffers[:at], (use, READY), *buffers[at + 1 :])

    def successors(self, state: State) -> Iterator[tuple[int, Op | int, State | str]]:
        """Every next state, or the fault, after an operation of a role or a completed copy.

        The first two values are a role's number and operation, or a buffer's number and use.
        """
        roles, barriers, buffers = state
        for number, place in enumerate(roles):
            if place in roles[:number]:  # a copy of the role in the same place
                continue
            role, uses, local, sent = self.places[place]
            op = self.op_at[place]
            assert op is not None
            try:
                changed = self.apply(op, state)
            except Wrong as wrong:
                yield number, op, f"{self.names[number]} {wrong}"
                continue
            if changed is None:
                continue
            following = self.place(role, uses, local, (*sent, None))
            for next_place in self.settle(following):
                places = (*roles[:number], next_place, *roles[number + 1 :])
                yield number, op, (places, *changed)
        for at, (use, flight) in enumerate(buffers):
            if flight < 0:
                try:
                    yield at, use, (roles, *self.land(at, state))
                except Wrong as wrong:
                    yield at, use, str(wrong)

    def text(self, number: int, event: Op | int) -> str:
        if isinstance(event, int):
            return f"{self.buffer_names[number]} of use {event} lands"
        return f"{self.names[number]}: {describe(event)}"

    def place_before(self, place: int, clock: int) -> int:
        if (place, clock) not in self.earlier:
            role, uses, local, sent = self.places[place]
            moved = zip(role.clocks, uses, strict=True)
            before = tuple(use - 1 if of == clock else use for of, use in moved)
            self.earlier[place, clock] = self.place(role, before, local, sent)
        return self.earlier[place, clock]

    def canonical(self, state: State) -> State:
        """The state with its uses counted from the last role's, and copies of roles in order."""
        while later := self.clocks.difference(*[self.first_at[place] for place in state[0]]):
            for clock in later:
                state = self.shifted(state, clock)
        roles, barriers, buffers = state
        for first, last in self.copies:
            roles = (*roles[:first], *sorted(roles[first:last]), *roles[last:])
        return roles, barriers, buffers

    def shifted(self, state: State, clock: int) -> State:
        """The state with all uses of a clock counted from one later."""
        roles, barriers, buffers = state
        places = list(roles)
        for i in self.roles_of[clock]:
            places[i] = self.place_before(places[i], clock)
        moved_barriers, moved_buffers = list(barriers), list(buffers)
        for b in self.model.barriers:
            if b.clock == clock:
                at = self.barrier_at[b.name]
                first, *rest = barriers[at : at + b.stages]
                moved_barriers[at : at + b.stages] = [*rest, (first[0] - 1, *first[1:])]
        for buffer in self.model.buffers:
            if buffer.clock == clock:
                at = self.buffer_at[buffer.name]
                first, *rest = buffers[at : at + buffer.stages]
                moved = [(use - 1, self.rotated(s)) for use, s in (*rest, first)]
                moved_buffers[at : at + buffer.stages] = moved
        return tuple(places), tuple(moved_barriers), tuple(moved_buffers)

    def rotated(self, state: int) -> int:
        """A buffer's state after all of its clock have moved to the previous stage."""
        if state >= 0:
            return state
        source, barrier = divmod(-1 - state, len(self.counts))
        code = self.previous_barrier[barrier]
        return (
            -1 - code - (self.previous_buffer[source - 1] + 1 if source else 0) * len(self.counts)
        )

    def explore(self, max_states: int) -> Result:
        seen: dict[State, State | None] = {self.canonical(s): None for s in self.starts()}
        queue = deque(seen)
        while queue:
            state = queue.popleft()
            blocked = True
            for _, _, after in self.successors(state):
                blocked = False
                if isinstance(after, str):
                    return self.replay(seen, state)
                after = self.canonical(after)
                if after not in seen:
                    seen[after] = state
                    queue.append(after)
            if blocked:
                return self.replay(seen, state)
            if len(seen) > max_states:
                raise RuntimeError(f"max_states must be larger than the space, got {max_states}")
        return Result(len(seen))

    def replay(self, seen: dict[State, State | None], last: State) -> Result:
        """The path to a faulty state, with uses counted from the first use."""
        path = [last]
        while (before := seen[path[-1]]) is not None:
            path.append(before)
        *path, start = path
        state = next(s for s in self.starts() if self.canonical(s) == start)
        trace = []
        for target in reversed(path):
            number, event, state = next(
                (number, event, after)
                for number, event, after in self.successors(state)
                if not isinstance(after, str) and self.canonical(after) == target
            )
            trace.append(self.text(number, event))
        for number, event, after in self.successors(state):
            if isinstance(after, str):
                return Result(len(seen), after, [*trace, self.text(number, event)])
        ops = [self.op_at[place] for place in state[0]]
        waiting = [f"{name}: {describe(op)}" for name, op in zip(self.names, ops, strict=True)]
        return Result(len(seen), "deadlock: " + "; ".join(waiting), trace)


def _offsets(arrays: tuple[Any, ...]) -> dict[str, int]:
    offsets, at = {}, 0
    for array in arrays:
        offsets[array.name] = at
        at += array.stages
    return offsets


def _previous(arrays: tuple[Any, ...]) -> list[int]:
    """For each stage of each array, the place of the stage before, wrapped round."""
    places: list[int] = []
    for array in arrays:
        first = len(places)
        places += [first + (stage - 1) % array.stages for stage in range(array.stages)]
    return places


VERBS = {
    "wait": "waits for",
    "arrive": "arrives on",
    "write": "writes",
    "publish": "publishes on",
    "finish": "ends its write of",
    "copy": "copies, to complete",
    "expect": "expects bytes on",
    "send": "sends, to complete",
}


def describe(op: Op | None) -> str:
    assert op is not None
    if op.kind == "together":
        return "; ".join(map(describe, op.parts))
    reads = "reads " + " and ".join(buffer.name for buffer in op.reads)
    if op.kind == "read":
        return f"{reads} of use {op.n}"
    array = op.barrier or op.buffer
    assert array is not None
    text = f"{VERBS[op.kind]} {array.name} of use {op.n - op.before * array.stages}"
    if op.kind in ("copy", "send"):
        assert op.buffer is not None
        return f"{text}, into {op.buffer.name}"
    return f"{text}, {reads}" if op.reads else text


def explore(model: Model, max_states: int = 2_000_000) -> Result:
    return Explorer(model).explore(max_states)


def slow(*values: object) -> object:
    """A parameter of a test with many states."""
    return pytest.param(*values, marks=pytest.mark.slow)


def assert_sound(model: Model) -> None:
    result = explore(model)
    print(result)  # the number of states
    assert not result.failure, result
