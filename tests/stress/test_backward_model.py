"""The barriers of the Hopper backward kernels, explored state by state: see ring_model.py.

A thread block works on one tile. The models go on without an end, which covers every number of
steps; a consumer of the narrow kernel may end a tile at any step, and then begins another.
"""

from __future__ import annotations

import pytest
from ring_model import (
    Barrier,
    Buffer,
    Model,
    Op,
    Role,
    Step,
    arrive,
    choose,
    copy,
    expect,
    explore,
    publish,
    read,
    send,
    together,
    wait,
    wait_before,
    write,
)

RANKS = (0, 1)  # thread blocks of a cluster


class Narrow:
    """backward_kernel: a producer, consumers, and a writer for each of these.

    A consumer is a warpgroup, or one of several warps of it, which arrive separately. `missing` is
    the wait or the buffer that a mutant lacks.
    """

    def __init__(self, consumers: int, stages: int, warps: int = 1, missing: str = "") -> None:
        self.missing, self.warps = missing, warps
        every = consumers * warps
        self.q, self.dout = Buffer("Q", stages), Buffer("dO", stages)
        self.q_full, self.dout_full = Barrier("q_full", stages), Barrier("dout_full", stages)
        self.empty = Barrier("empty", stages, every)
        scores = 1 if missing == "second dS" else 2
        self.ds = tuple(Buffer(f"dS {i}", scores) for i in range(every))
        self.ds_full = Barrier("ds_full", 2, every)
        self.dq = [Buffer(f"dQ {i}", 1) for i in range(every)]
        self.dq_full = [Barrier(f"dq_full {i}", 1, warps) for i in range(consumers)]
        self.dq_empty = [Barrier(f"dq_empty {i}", 1) for i in range(consumers)]
        roles = [Role("producer", self.produce)]
        for i in range(every):
            roles += [Role(f"consumer {i}", lambda n, on, i=i: self.consume(i, n, on), False)]
        for i in range(consumers):
            roles += [Role(f"writer {i}", lambda n, _, i=i: self.add(i, n))]
        buffers = (self.q, self.dout, *self.ds, *self.dq)
        barriers = (self.q_full, self.dout_full, self.empty, self.ds_full)
        self.model = Model(tuple(roles), buffers, (*barriers, *self.dq_full, *self.dq_empty))

    def produce(self, n: int, _: None) -> Step:
        if self.missing != "empty":
            yield wait_before(self.empty, n)
        yield copy(self.q, n, self.q_full)
        yield copy(self.dout, n, self.dout_full)

    def add(self, i: int, n: int) -> Step:
        first = i * self.warps
        parts = tuple(self.dq[first : first + self.warps])
        yield wait(self.dq_full[i], n, reads=parts)
        yield arrive(self.dq_empty[i], n, reads=parts)

    def pass_query_gradient(self, i: int, n: int) -> Step:
        """stage_query_gradient; the caller passes it on."""
        if self.missing != "dq_empty":
            yield wait_before(self.dq_empty[i // self.warps], n)
        yield write(self.dq[i], n)

    def consume(self, i: int, n: int, running: bool) -> Step:
        """`running`: S of use n is computed, dQ of use n - 1 is in flight."""
        writer = i // self.warps
        if not running:
            yield wait(self.q_full, n, reads=self.q)
        yield wait(self.dout_full, n, reads=self.dout)
        if running:
            yield read(self.ds, n - 1)
            yield from self.pass_query_gradient(i, n - 1)
        yield write(self.ds[i], n)
        yield publish(self.ds_full, n, writes=self.ds[i])
        if running:
            yield publish(self.dq_full[writer], n - 1, writes=self.dq[i])
        last = yield choose()
        if not last:
            yield wait(self.q_full, n + 1, reads=self.q)
        yield arrive(self.empty, n, reads=(self.q, self.dout))
        if self.missing != "ds_full":
            yield wait(self.ds_full, n, reads=self.ds)
        else:
            yield read(self.ds, n)
        if last:
            yield read(self.ds, n)
            yield from self.pass_query_gradient(i, n)
            yield publish(self.dq_full[writer], n, writes=self.dq[i])
        return not last


class Wide:
    """wide_backward_kernel: two ranks, each with a producer and three consumer warpgroups.

    `rings` are those that the model has, of Q, dO, P and dS. Each rank loads half of Q and dO, for
    both; `halves` 1 leaves out the half that a rank loads for itself, since the other rank's half
    comes in more orders. `missing` is what a mutant lacks.
    """

    def __init__(
        self, q: int, dout: int, scores: int, rings: str = "Q dO P dS", halves: int = 1,
        missing: str = "",
    ) -> None:  # fmt: skip
        self.rings, self.halves, self.missing = rings.split(), halves, missing
        self.buffers: list[Buffer] = []
        self.barriers: list[Barrier] = []
        self.q, self.q_full, self.q_empty = self.ring("Q", q, halves, readers=2)
        self.dout, self.dout_full, self.dout_empty = self.ring("dO", dout, halves, readers=4)
        self.p, self.p_full, self.p_empty = self.ring("P", 1, 1, readers=1)
        self.ds, self.ds_full, self.ds_empty = self.ring("dS", scores, 2, readers=2)
        roles: list[Role] = []
        for r in RANKS:
            roles += [Role(f"producer {r}", lambda n, _, r=r: self.produce(r, n))]
            roles += [Role(f"value {r}", lambda n, on, r=r: self.value(r, n, on), False)]
            roles += [Role(f"key {r}", lambda n, on, r=r: self.key(r, n, on), False)]
            roles += [Role(f"query {r}", lambda n, _, r=r: self.query(r, n))]
        ops = [next(role.step(0, role.start), None) for role in roles]
        roles = [role for role, op in zip(roles, ops, strict=True) if op]
        self.model = Model(tuple(roles), tuple(self.buffers), tuple(self.barriers))

    def ring(
        self, name: str, stages: int, parts: int, readers: int
    ) -> tuple[list[tuple[Buffer, ...]], list[Barrier], list[Barrier]]:
        """Each rank's buffers, `full` and `empty`."""
        data = [tuple(Buffer(f"{name} {r}.{i}", stages) for i in range(parts)) for r in RANKS]
        full = [Barrier(f"{name} full {r}", stages) for r in RANKS]
        empty = [Barrier(f"{name} empty {r}", stages, readers) for r in RANKS]
        if name in self.rings:
            self.buffers += [part for parts in data for part in parts]
            self.barriers += [*full, *empty]
        return data, full, empty

    def when(self, ring: str, *ops: Op) -> Step:
        """The operations as one, if the model has the ring."""
        if ring in self.rings:
            yield together(*ops)

    def released(self, ring: str, empty: list[Barrier], n: int) -> list[Op]:
        """release_ranks."""
        return [arrive(barrier, n) for barrier in empty] if ring in self.rings else []

    def produce(self, r: int, n: int) -> Step:
        yield from self.load("Q", self.q, self.q_full, self.q_empty, r, n)
        yield from self.load("dO", self.dout, self.dout_full, self.dout_empty, r, n)

    def load(
        self, ring: str, data: list[tuple[Buffer, ...]], full: list[Barrier], empty: list[Barrier],
        r: int, n: int,
    ) -> Step:  # fmt: skip
        waits = [] if self.missing == f"{ring} empty" else [wait_before(empty[r], n)]
        ranks = (1 - r, r)[: self.halves]
        sends = [send(data[to][r % self.halves], n, full[to]) for to in ranks]
        yield from self.when(ring, *waits, expect(full[r], n, self.halves), *sends)

    def value(self, r: int, n: int, running: bool) -> Step:
        """`running`: S of use n is computed."""
        if not running:
            yield from self.when("Q", wait(self.q_full[r], n, reads=self.q[r]))
        waits = [] if self.missing == "P empty" else [wait_before(self.p_empty[r], n)]
        reads = [read(self.q[r], n)] if "Q" in self.rings else []
        (p,) = self.p[r]
        yield from self.when("P", *waits, *reads, write(p, n), publish(self.p_full[r], n, p))
        yield from self.when("dO", wait(self.dout_full[r], n, reads=self.dout[r]))
        yield from self.when("Q", wait(self.q_full[r], n + 1, reads=self.q[r]))
        reads = [read(self.dout[r], n)]
        yield from self.when("dO", *reads, *self.released("dO", self.dout_empty, n))
        return True

    def key(self, r: int, n: int, running: bool) -> Step:
        """`running`: dP of use n is computed."""
        if not running:
            yield from self.when("dO", wait(self.dout_full[r], n, reads=self.dout[r]))
        reads = [read(self.dout[r], n)]
        yield from self.when("dO", *reads, *self.released("dO", self.dout_empty, n))
        yield from self.when("Q", wait(self.q_full[r], n, reads=self.q[r]))
        yield from self.when("P", wait(self.p_full[r], n, reads=self.p[r]))
        yield from self.when("P", arrive(self.p_empty[r], n, reads=self.p[r]))
        waits = [] if self.missing == "dS empty" else [wait_before(self.ds_empty[r], n)]
        own, copy, to = self.ds[r][r], self.ds[1 - r][r], self.ds_full[1 - r]
        full = expect(self.ds_full[r], n, 1, writes=own)
        yield from self.when("dS", *waits, write(own, n), full, send(copy, n, to, source=own))
        yield from self.when("dO", wait(self.dout_full[r], n + 1, reads=self.dout[r]))
        released = self.released("Q", self.q_empty, n)
        yield from self.when("Q", read(self.q[r], n), *released)
        return True

    def query(self, r: int, n: int) -> Step:
        yield from self.when("dS", wait(self.ds_full[r], n, reads=self.ds[r]))
        released = self.released("dS", self.ds_empty, n)
        if self.missing == "last read":  # the build with -DATTNSCOPE_UNGUARDED_RING
            yield from self.when("dS", *released)
            released = []
        yield from self.when("dS", read(self.ds[r], n), *released)


class Turns:
    """Deterministic calls: key blocks add to the same blocks of queries, and take turns.

    Key block 0 is the last of the sequence: it adds first. Step n is a block of queries: a part of
    dQ in global memory, and its ticket. A key block is at most `lead` steps ahead of the next one,
    since a tile has an end. `missing` is what a mutant lacks.
    """

    def __init__(self, key_blocks: int, lead: int, missing: str = "") -> None:
        self.missing, self.key_blocks = missing, key_blocks
        every = range(key_blocks)
        self.dq = [Buffer(f"dQ in shared memory {i}", 1) for i in every]
        self.full = [Barrier(f"dq_full {i}", 1) for i in every]
        self.empty = [Barrier(f"dq_empty {i}", 1) for i in every]
        self.sums = [Buffer(f"sum through {i}", lead) for i in every]
        self.ticket = [Barrier(f"ticket {i}", lead, counts=True) for i in every]
        roles: list[Role] = []
        for i in every:
            roles += [Role(f"consumer {i}", lambda n, _, i=i: self.stage(i, n))]
            roles += [Role(f"writer {i}", lambda n, _, i=i: self.add(i, n))]
        barriers = (*self.full, *self.empty, *self.ticket)
        self.model = Model(tuple(roles), (*self.dq, *self.sums), barriers)

    def stage(self, i: int, n: int) -> Step:
        yield together(wait_before(self.empty[i], n), write(self.dq[i], n))
        yield publish(self.full[i], n, writes=self.dq[i])

    def add(self, i: int, n: int) -> Step:
        yield wait(self.full[i], n, reads=self.dq[i])
        if i and self.missing != "await":
            yield wait(self.ticket[i - 1], n)
        if i + 1 < self.key_blocks:
            yield wait_before(self.ticket[i + 1], n)  # the end of the tile
        # The addition begins: the one before it must be complete.
        before = read(self.sums[i - 1], n) if i else read((), n)
        yield together(before, write(self.sums[i], n))
        if self.missing == "complete":  # only read from shared memory
            yield arrive(self.ticket[i], n)
            yield publish(self.empty[i], n, writes=self.sums[i])
            return
        yield publish(self.ticket[i], n, writes=self.sums[i])
        yield arrive(self.empty[i], n, reads=self.dq[i])


def assert_sound(model: Model) -> None:
    result = explore(model)
    print(result)  # the number of states
    assert not result.failure, result


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("consumers", "stages", "warps"), [(1, 2, 1), (1, 3, 1), (2, 2, 1), (1, 2, 2), slow(2, 3, 1)]
)
def test_the_narrow_kernel_is_right_in_every_order(consumers, stages, warps):
    """1,346 states (1 consumer, 2 stages) to 76,068 (2, 2); slow: 344,528 (2, 3)."""
    assert_sound(Narrow(consumers, stages, warps).model)


@pytest.mark.parametrize(
    ("missing", "wrong"),
    [
        ("empty", "producer"),
        ("dq_empty", "dQ 0"),
        ("ds_full", "reads dS"),
        ("second dS", "reads dS"),  # the build with -DATTNSCOPE_UNGUARDED_RING
    ],
)
def test_the_narrow_kernel_needs_each_wait(missing, wrong):
    result = explore(Narrow(2, 2, missing=missing).model)
    print(result)
    assert wrong in result.failure


@pytest.mark.parametrize(
    ("q", "dout", "scores", "rings"),
    [
        (2, 2, 2, "Q P"),  # head dim 192
        (2, 2, 2, "dO"),
        (2, 2, 2, "P dS"),
        slow(2, 2, 2, "Q P dS"),
        slow(2, 2, 2, "Q dO P"),
        (2, 1, 1, "Q dO P"),  # head dim 256
        (2, 1, 1, "P dS"),
        slow(2, 1, 1, "Q dO P dS"),
    ],
)
def test_the_wide_kernel_is_right_in_every_order(q, dout, scores, rings):
    """11,905 states (head dim 256 without dS); slow: 65,784 (with dS), 150,463 (head dim 192)."""
    assert_sound(Wide(q, dout, scores, rings).model)


@pytest.mark.slow
def test_the_halves_of_both_ranks_are_right_in_every_order():
    """202,272 states."""
    assert_sound(Wide(2, 1, 1, halves=2).model)


@pytest.mark.parametrize(
    ("missing", "rings", "wrong"),
    [
        ("Q empty", "Q P", "Q"),
        ("dO empty", "dO", "dO"),
        ("P empty", "P", "P"),
        ("dS empty", "P dS", "dS"),
        ("last read", "P dS", "reads dS"),  # the build with -DATTNSCOPE_UNGUARDED_RING
    ],
)
def test_the_wide_kernel_needs_each_wait(missing, rings, wrong):
    result = explore(Wide(2, 1, 1, rings, missing=missing).model)
    print(result)
    assert wrong in result.failure


def test_one_buffer_of_q_would_deadlock_the_wide_kernel():
    """S of the next step is issued before this step's Q is released."""
    result = explore(Wide(1, 1, 1).model)
    print(result)
    assert result.failure.startswith("deadlock")


@pytest.mark.parametrize(("key_blocks", "lead"), [(2, 1), (2, 3), (3, 2)])
def test_key_blocks_add_in_turn_in_every_order(key_blocks, lead):
    assert_sound(Turns(key_blocks, lead).model)


@pytest.mark.parametrize("missing", ["await", "complete"])
def test_turns_need_the_wait_and_the_complete_addition(missing):
    result = explore(Turns(2, 2, missing).model)
    print(result)
    assert "sum through 0" in result.failure
