"""The barriers of the Hopper backward kernels, explored state by state: see ring_model.py.

The models go on without an end, which covers every number of steps and of tiles.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial

import pytest
from ring_model import (
    Barrier,
    Buffer,
    Model,
    Op,
    Role,
    Step,
    arrive,
    assert_sound,
    choose,
    copy,
    explore,
    finish,
    publish,
    read,
    slow,
    together,
    wait,
    wait_before,
    write,
)

# Clocks: tile descriptions, steps, tiles with keys, rounds of the pattern.
TILE, STEP, KEYS, ROUND = range(4)
END = 0  # in a pattern: the description that says there is no tile


class Narrow:
    """backward_kernel: a scheduler, a producer, consumers and two writers.

    `pattern` is how many steps each tile has, again and again. It may finish with END: then all
    roles end there, and meet for the next thread block. With `heads` a round of the pattern is a
    key head, whose dQ the consumers store. A consumer is a warpgroup, or one of several warps of
    it, which arrive separately. The writers have every other step each; one in their place
    saves states. `values` are the buffers of V, and of dQ on its way out; with two, dV leaves
    by way of V, and TMA stores it and dK beside the next tile. `keys` are the buffers of K: a
    single one is loaded after the tile's first Q and dO. Before any tile the scheduler may pass
    over one that no query sees; more of them would leave the same state. `brief` leaves that
    out, and lets copies land at once. With `hidden` any step of a consumer may be one in which
    no query sees its keys. `missing` is what a mutant lacks: waits by the name of their
    barrier, arrivals or an order.

    An operation is a wait, and what follows until the next one: first the ends of reads, then
    writes, then arrivals.
    """

    def __init__(
        self, consumers: int, values: int, pattern: tuple[int, ...], warps: int = 1,
        tile_buffers: int = 2, heads: bool = False, brief: bool = False, hidden: bool = False,
        keys: int = 2, gradients: int = 0, writers: int = 2, missing: str = "",
    ) -> None:  # fmt: skip
        self.writers = writers
        gradients = gradients or values
        self.pattern, self.warps, self.heads, self.brief = pattern, warps, heads, brief
        self.consumers, self.hidden, self.by_tma = consumers, hidden, values > 1
        self.missing = missing.split("+")
        self.head_end = max(at for at, steps in enumerate(pattern) if steps != END)
        every = consumers * warps
        groups = range(consumers)
        readers = every + writers * self.has("writer") + self.has("producer")
        self.tile = Buffer("tile", tile_buffers)
        self.tile_full = Barrier("tile_full", tile_buffers)
        self.tile_empty = Barrier("tile_empty", tile_buffers, readers)
        self.tile_wanted = Barrier("tile_wanted", 1)
        self.k, self.v = Buffer("K", keys, KEYS), Buffer("V", values, KEYS)
        self.k_full = Barrier("k_full", keys, clock=KEYS)
        self.v_full = Barrier("v_full", values, clock=KEYS)
        self.k_empty = Barrier("k_empty", keys, every, clock=KEYS)
        self.v_empty = Barrier("v_empty", values, every, clock=KEYS)
        self.q, self.dout = Buffer("Q", 2, STEP), Buffer("dO", 2, STEP)
        self.q_full = Barrier("q_full", 2, clock=STEP)
        self.dout_full = Barrier("dout_full", 2, clock=STEP)
        self.empty = Barrier("empty", 2, every, clock=STEP)
        scores = 1 + self.has("second dS")
        self.ds = tuple(Buffer(f"dS {i}", scores, STEP) for i in range(every))
        self.ds_full = Barrier("ds_full", 2, every, clock=STEP)
        self.ds_empty = Barrier("ds_empty", 2, warps, clock=STEP)
        self.dq = tuple(Buffer(f"dQ {i}", gradients, STEP) for i in range(warps))
        self.dq_full = Barrier("dq_full", gradients, warps, clock=STEP)
        self.dq_empty = Barrier("dq_empty", gradients, clock=STEP)
        self.dq_taken = Barrier("dq_taken", 2, clock=STEP)
        # dK, dV on the way out, in a part of dS; a named barrier comes after it.
        self.out = [Buffer(f"rows {i}", 1, KEYS) for i in range(every)]
        self.stored = [Barrier(f"stored {i}", 1, warps, clock=KEYS) for i in groups]
        # Whole heads: dQ of a head in global memory, and the operation of a writer on it.
        self.place, self.sum = Buffer("place", 1, ROUND), Buffer("sum", 1, STEP)
        self.dq_done = Barrier("dq_done", 1, clock=ROUND)
        self.met = Barrier("met", 1, 2 + writers + every, clock=ROUND)

        clocks = (TILE, STEP, KEYS, ROUND)
        roles = [Role("scheduler", self.schedule, 0, clocks=(TILE, ROUND))]
        roles += [Role("producer", self.produce, 0, clocks=clocks)]
        for i in range(every):
            start = (0, i // warps, False)
            roles += [Role(f"consumer {i}", partial(self.consume, i), start, clocks=clocks)]
        roles += [Role(f"writer {i}", self.add, (0, i), clocks=clocks) for i in range(writers)]
        barriers = [self.tile_full, self.tile_empty, self.tile_wanted, self.k_full, self.k_empty]
        barriers += [self.v_full, self.v_empty, self.q_full, self.dout_full, self.empty]
        barriers += [self.ds_full, self.ds_empty, self.dq_full, self.dq_empty, self.dq_taken]
        barriers += self.stored if warps > 1 else []
        buffers = [self.tile, self.k, self.v, self.q, self.dout, *self.ds, *self.dq]
        buffers += self.out if warps > 1 else []
        buffers += [self.place, self.sum] if heads else []
        barriers += [self.dq_done] if heads else []
        barriers += [self.met] if any(map(self.ends, range(len(pattern)))) else []
        self.model = Model(tuple(roles), tuple(buffers), tuple(barriers))

    def has(self, name: str) -> bool:
        return name not in self.missing

    def load(self, buffer: Buffer, n: int, full: Barrier) -> list[Op]:
        if self.brief:
            return [write(buffer, n), publish(full, n, writes=buffer)]
        return [copy(buffer, n, full)]

    def after(self, wait: Op, *ops: Op) -> Op:
        """A wait and what follows it; a mutant has only what follows."""
        barrier = wait.barrier
        assert barrier is not None
        if not self.has(barrier.name.split()[0]):
            return together(read(wait.reads, wait.n), *ops)
        return together(wait, *ops)

    def ends(self, at: int) -> bool:
        return self.pattern[at] == END and self.has("only tiles with steps")

    def advanced(self, at: int, *clocks: int) -> tuple[tuple[int, ...], int]:
        """What a step returns: the advance of the clocks before ROUND, and the next place."""
        following = (at + 1) % len(self.pattern)
        return (*clocks, int(following == 0)), following

    def meet(self, n: int, *ops: Op) -> Step:
        """The role ends here; all have ended before the next thread block begins."""
        yield together(*ops, arrive(self.met, n))
        yield wait(self.met, n)

    def schedule(self, n: tuple[int, int], at: int) -> Step:
        tile, turn = n
        described = [write(self.tile, tile), publish(self.tile_full, tile, writes=self.tile)]
        if not self.brief and (yield choose()):  # no query sees this one: another takes its place
            yield self.after(wait_before(self.tile_empty, tile), write(self.tile, tile))
            described[:1] = []
        yield self.after(wait_before(self.tile_empty, tile), *described)
        if self.ends(at):
            yield from self.meet(turn)
        else:
            yield self.after(wait(self.tile_wanted, tile))
        return self.advanced(at, 1)

    def produce(self, n: tuple[int, ...], at: int) -> Step:
        tile, step, keys, turn = n
        steps = self.pattern[at]
        yield self.after(wait(self.tile_full, tile, reads=self.tile))
        done = [read(self.tile, tile), arrive(self.tile_wanted, tile)]
        if self.has("producer"):
            done += [arrive(self.tile_empty, tile)]
        if self.ends(at):
            yield from self.meet(turn, *done)
            return self.advanced(at, 1, 0, 0)
        load_k = self.after(wait_before(self.k_empty, keys), *self.load(self.k, keys, self.k_full))
        if self.k.stages > 1:
            yield load_k
        yield self.after(wait_before(self.v_empty, keys), *self.load(self.v, keys, self.v_full))
        for i in range(step, step + steps):
            loads = self.load(self.q, i, self.q_full) + self.load(self.dout, i, self.dout_full)
            yield self.after(wait_before(self.empty, i), *loads)
            if self.k.stages == 1 and i == step:
                yield load_k
        yield together(*done)
        return self.advanced(at, 1, steps, 1)

    def add(self, n: tuple[int, ...], local: tuple[int, int]) -> Step:
        """`local`: the place in the pattern, and how many steps until its own."""
        tile, step, keys, turn = n
        at, until = local
        steps = self.pattern[at]
        yield self.after(wait(self.tile_full, tile, reads=self.tile))
        done = [read(self.tile, tile)]
        if self.has("writer"):
            done += [arrive(self.tile_empty, tile)]
        if self.ends(at):
            yield from self.meet(turn, *done)
            advance, at = self.advanced(at, 1, 0, 0)
            return advance, (at, until)
        for j in range(step, step + steps):
            if until:
                until -= 1
                continue
            until = self.writers - 1
            yield self.after(wait(self.dq_taken, j - 1))
            taken = [arrive(self.dq_taken, j)]
            if self.heads:
                taken = [write(self.place, turn)] if at == 0 and j == step else []
                taken += [write(self.sum, j)]
            yield self.after(wait(self.dq_full, j, reads=self.dq), *taken)
            yield together(read(self.dq, j), arrive(self.dq_empty, j))
            if self.heads and self.has("sum"):
                yield publish(self.dq_taken, j, writes=self.sum)
            elif self.heads:  # only read from shared memory
                yield arrive(self.dq_taken, j)
                yield finish(self.sum, j)
        was_last = until == self.writers - 1
        if self.heads and at == self.head_end and was_last:
            if not self.has("complete"):  # only read from shared memory
                yield arrive(self.dq_done, turn)
                yield finish(self.place, turn)
            else:
                yield publish(self.dq_done, turn, writes=self.place)
        yield together(*done)
        advance, at = self.advanced(at, 1, steps, 1)
        return advance, (at, until)

    def consume(self, i: int, n: tuple[int, ...], local: tuple[int, int, bool]) -> Step:
        """`local`: the place in the pattern, how many steps until its turn to compute dQ, and
        whether TMA stores dK of the tile before."""
        tile, step, keys, turn = n
        at, until, leaving = local
        steps = self.pattern[at]
        group, last = i // self.warps, step + steps - 1
        fellows = tuple(self.out[group * self.warps : (group + 1) * self.warps])
        out = [self.out[i]] if self.warps > 1 else []
        stored = [publish(self.stored[group], keys - leaving, rows) for rows in out]
        gone = [finish(self.ds[i], step), *stored] if leaving else []  # TMA has read dK
        yield self.after(wait(self.tile_full, tile, reads=self.tile))
        if self.ends(at):
            yield from self.meet(turn, *gone, read(self.tile, tile), arrive(self.tile_empty, tile))
            advance, at = self.advanced(at, 1, 0, 0)
            return advance, (at, until, False)
        yield self.after(wait(self.k_full, keys, reads=self.k))
        if gone and self.has("dK read"):
            yield together(*gone)
            if self.warps > 1 and self.has("stored"):
                yield wait(self.stored[group], keys - 1)
        staged: list[Op] = []  # dQ of the step before, which is passed on in this one
        for j in range(step, step + steps):
            # No other warp may still store rows where dS comes.
            alone = [read(fellows, keys - 1)] if self.warps > 1 and j == step else []
            passed = [*alone, write(self.ds[i], j), publish(self.ds_full, j, self.ds[i])]
            release = [arrive(self.v_empty, keys)] if j == last and not self.by_tma else []
            if not self.has("last dQ"):
                release += [arrive(self.k_empty, keys)] if j == last else []
            if self.hidden and (yield choose()):
                yield from staged
                yield self.after(wait_before(self.ds_empty, j), *passed)
                yield self.after(wait(self.v_full, keys), *release)
                yield self.after(wait(self.q_full, j))
                yield self.after(wait(self.dout_full, j), arrive(self.empty, j))
            else:
                yield self.after(wait(self.q_full, j, reads=self.q))
                yield self.after(wait(self.v_full, keys, reads=self.v))
                yield self.after(wait(self.dout_full, j, reads=self.dout))
                yield from staged
                # S and dP of this step are complete.
                yield together(read((self.q, self.dout), j), read(self.v, keys), *release)
                yield self.after(wait_before(self.ds_empty, j), *passed)
                yield together(read((self.q, self.dout), j), arrive(self.empty, j))
            staged = [] if until else (yield from self.query_gradient(i, j, keys))
            until = until - 1 if until else self.consumers - 1
        yield from staged
        if self.has("last dQ"):
            yield arrive(self.k_empty, keys, reads=self.k)
        if self.has("next dS"):
            yield self.after(wait_before(self.ds_empty, last + 1))
        # dK and dV leave by way of the next step's dS, by TMA dV by way of V.
        yield together(write(self.ds[i], last + 1), *(write(rows, keys) for rows in out))
        if self.by_tma:
            read_dv = [read(self.v, keys), arrive(self.v_empty, keys)]
            yield from read_dv if self.has("dV read") else reversed(read_dv)
        if self.heads and at == self.head_end:
            yield self.after(wait(self.dq_done, turn, reads=self.place))
            yield read(self.place, turn)
        done = [] if self.by_tma else [finish(self.ds[i], last + 1)]
        if self.warps > 1 and not self.by_tma:
            yield together(*done, *stored)
            done = [wait(self.stored[group], keys)] if self.has("stored") else []
        yield together(*done, arrive(self.tile_empty, tile, reads=self.tile))
        advance, at = self.advanced(at, 1, steps, 1)
        return advance, (at, until, self.by_tma)

    def query_gradient(self, i: int, j: int, keys: int) -> Generator[Op, bool, list[Op]]:
        """dQ of step `j` by warp `i`. Returns what passes it on."""
        dq = self.dq[i % self.warps]
        yield self.after(wait(self.ds_full, j, reads=self.ds))
        yield self.after(wait_before(self.dq_empty, j))
        yield together(read(self.ds, j), read(self.k, keys), arrive(self.ds_empty, j), write(dq, j))
        return [publish(self.dq_full, j, writes=dq)]


class Turns:
    """Deterministic calls: key blocks add to the same blocks of queries, and take turns.

    Key block 0 is the last of the sequence, or where turns ascend the first: it adds first. Step n
    is a turn: a part of dQ in global memory, and its ticket. A key block has two writers, for every
    other step each. It is at most `lead` steps ahead of the next one, since a tile has an end; an
    even number, so that the steps of one ticket have one writer. `gradients` are the buffers of dQ.
    `missing` is what a mutant lacks.
    """

    def __init__(self, key_blocks: int, lead: int, gradients: int = 1, missing: str = "") -> None:
        self.missing, self.key_blocks = missing, key_blocks
        every = range(key_blocks)
        self.dq = [Buffer(f"dQ in shared memory {i}", gradients) for i in every]
        self.full = [Barrier(f"dq_full {i}", gradients) for i in every]
        self.empty = [Barrier(f"dq_empty {i}", gradients) for i in every]
        self.taken = [Barrier(f"dq_taken {i}", 2) for i in every]
        self.sums = [Buffer(f"sum through {i}", lead) for i in every]
        self.ticket = [Barrier(f"ticket {i}", lead, counts=True) for i in every]
        roles: list[Role] = []
        for i in every:
            roles += [Role(f"consumer {i}", lambda n, _, i=i: self.stage(i, n))]
            for w in range(2):
                roles += [Role(f"writer {i} {w}", partial(self.add, i, w), clocks=(0, 1))]
        barriers = (*self.full, *self.empty, *self.taken, *self.ticket)
        self.model = Model(tuple(roles), (*self.dq, *self.sums), barriers)

    def stage(self, i: int, n: int) -> Step:
        yield together(wait_before(self.empty[i], n), write(self.dq[i], n))
        yield publish(self.full[i], n, writes=self.dq[i])

    def add(self, i: int, writer: int, uses: tuple[int, int], _: None) -> Step:
        n = uses[0] + writer
        if i + 1 < self.key_blocks:
            yield wait_before(self.ticket[i + 1], n)  # the end of the tile
        if i and self.missing != "ticket":
            yield wait(self.ticket[i - 1], n)
        if self.missing != "dq_taken":
            yield wait(self.taken[i], n - 1)
        yield wait(self.full[i], n, reads=self.dq[i])
        yield arrive(self.taken[i], n)
        # The addition begins: the one before it must be complete.
        before = read(self.sums[i - 1], n) if i else read((), n)
        yield together(before, write(self.sums[i], n))
        yield arrive(self.empty[i], n, reads=self.dq[i])
        if self.missing == "complete":  # only read from shared memory
            yield arrive(self.ticket[i], n)
            yield finish(self.sums[i], n)
        else:
            yield publish(self.ticket[i], n, writes=self.sums[i])
        return (2, 0), None  # the steps of the other writer lie between; the second clock stands


@pytest.mark.parametrize(
    ("values", "pattern", "options"),
    [
        (1, (1, 2), {}),  # head dim 128
        (2, (1, 2), {"brief": True}),  # head dim 64
        (1, (1, 2, END), {"brief": True}),
        (1, (1, 2), {"hidden": True, "brief": True}),
        (1, (2, 1), {"heads": True, "brief": True}),
        (2, (1, 1, 2, 2), {"tile_buffers": 1, "brief": True}),
        (1, (1, 2), {"warps": 2, "brief": True}),
        (1, (1, 2), {"keys": 1, "brief": True}),  # blocks of 80 queries
        slow(2, (1, 2), {"warps": 2, "brief": True}),
        (2, (1, 2, END), {"brief": True}),
        (2, (1, 2), {"hidden": True, "brief": True}),
        (2, (2, 1), {"heads": True, "brief": True}),
        (2, (1, 2), {"gradients": 1, "brief": True}),  # head dim 64, blocks of 128 queries
        slow(2, (1, 2), {"gradients": 1, "warps": 2, "brief": True}),
        (2, (1, 2, END), {"gradients": 1, "brief": True}),
        slow(2, (1, 2), {}),
        slow(1, (1, 2, END), {"warps": 2, "heads": True, "brief": True}),
        slow(2, (1, 1, 2, 1, 3, 2, 2, 3, 3), {}),
    ],
)
def test_one_consumer_of_the_narrow_kernel_is_right_in_every_order(values, pattern, options):
    """Slow: 723,620 states (copies under way)."""
    assert_sound(Narrow(1, values, pattern, **options).model)


@pytest.mark.parametrize(
    ("consumers", "values", "pattern", "options"),
    [
        (2, 1, (1, 2), {}),
        slow(2, 2, (2, 1, END), {}),
        (2, 1, (1, 2), {"keys": 1}),
        (2, 2, (1, 2), {"gradients": 1}),
        slow(2, 2, (1,), {"gradients": 1, "hidden": True}),
        slow(2, 1, (1, 2), {"heads": True}),
        slow(2, 1, (1, 2), {"hidden": True}),
        slow(2, 1, (1, 1, 2, 1, 3, 2, 2, 3, 3), {}),
        slow(2, 1, (1, 1, 2, 1, 3, 2, 2, 3, 3), {"keys": 1}),
        slow(2, 1, (1, 2), {"keys": 1, "hidden": True}),
        slow(3, 2, (1, 2), {"writers": 1}),
    ],
)
def test_consumers_of_the_narrow_kernel_are_right_in_every_order(
    consumers, values, pattern, options
):
    """Slow: 1,241,803 states (steps passed over), 1,194,414 (three consumers)."""
    assert_sound(Narrow(consumers, values, pattern, brief=True, **options).model)


@pytest.mark.parametrize(
    ("missing", "wrong", "options"),
    [
        ("tile_full", "reads tile", {}),
        ("tile_empty", "reads tile", {}),
        ("writer", "reads tile", {}),
        ("producer+tile_wanted", "reads tile", {}),
        ("only tiles with steps", "deadlock", {"pattern": (1, 2, END)}),
        ("k_full", "reads K", {}),
        ("k_empty", "K", {"tile_buffers": 3}),
        ("last dQ", "K", {"tile_buffers": 3}),
        ("v_full", "reads V", {"brief": False}),
        ("v_empty", "V", {}),
        ("v_full", "deadlock", {"hidden": True}),
        ("q_full", "reads Q", {}),
        ("dout_full", "reads dO", {"brief": False}),
        ("empty", "Q", {}),
        ("dq_full", "reads dQ", {}),
        ("dq_empty", "dQ", {}),
        ("ds_full", "reads dS", {"consumers": 2}),
        ("ds_empty", "reads dS", {"consumers": 3}),
        ("second dS", "reads dS", {"consumers": 2}),  # the build with -DATTNSCOPE_UNGUARDED_RING
        slow("next dS", "reads dS", {"consumers": 3}),
        ("stored", "reads rows", {"warps": 2}),
        ("stored", "reads rows", {"warps": 2, "values": 2}),
        ("dV read", "reads V", {"values": 2, "tile_buffers": 3}),
        ("v_empty", "V", {"values": 2, "tile_buffers": 3}),
        ("dK read", "writes dS", {"values": 2}),
        ("dq_done", "reads place", {"heads": True}),
        ("complete", "reads place", {"heads": True}),
        ("k_empty", "K", {"keys": 1}),
        ("dq_empty", "dQ", {"values": 2, "gradients": 1}),
        ("last dQ", "K", {"keys": 1}),
        ("dq_taken", "reads dQ", {}),
        ("dq_taken", "writes sum", {"heads": True, "values": 2}),
        ("sum", "writes sum", {"heads": True}),
    ],
)
def test_the_narrow_kernel_needs_each_wait(missing, wrong, options):
    chosen = {"consumers": 1, "values": 1, "pattern": (1, 2), "brief": True} | options
    result = explore(Narrow(**chosen, missing=missing).model)
    print(result)
    assert wrong in result.failure


@pytest.mark.parametrize(
    ("missing", "values"), [("k_empty", 1), ("v_empty", 2), ("producer", 1), ("tile_wanted", 1)]
)
def test_two_tile_buffers_guard_two_buffers_of_keys_too(missing, values):
    """K and V of tile n + 2 are loaded after all consumers are done with tile n."""
    assert_sound(Narrow(1, values, (1, 2), brief=True, missing=missing).model)


@pytest.mark.parametrize(
    ("key_blocks", "lead", "gradients"), [(2, 2, 1), (2, 2, 2), (2, 4, 1), slow(3, 2, 1)]
)
def test_key_blocks_add_in_turn_in_every_order(key_blocks, lead, gradients):
    assert_sound(Turns(key_blocks, lead, gradients).model)


@pytest.mark.parametrize(
    ("missing", "wrong"),
    [
        ("ticket", "sum through 0"),
        ("complete", "sum through 0"),
        ("dq_taken", "reads dQ"),  # a wait for the phase after next passes at once
    ],
)
def test_turns_need_each_wait_and_the_complete_addition(missing, wrong):
    result = explore(Turns(2, 2, missing=missing).model)
    print(result)
    assert wrong in result.failure
