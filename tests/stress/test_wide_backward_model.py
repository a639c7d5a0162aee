"""The barriers of wide_backward_kernel, explored state by state: see ring_model.py."""

from __future__ import annotations

from functools import partial

import pytest
from ring_model import (
    Barrier,
    Buffer,
    Model,
    Op,
    Role,
    Step,
    Uses,
    arrive,
    assert_sound,
    copy,
    expect,
    explore,
    finish,
    publish,
    read,
    send,
    slow,
    together,
    wait,
    wait_before,
    write,
)

RANKS = (0, 1)  # thread blocks of a cluster

# Clocks: tile descriptions, steps, parts of dO, indices.
TILE, STEP, PART, INDEX = range(4)
WIDE_CLOCKS = (STEP, PART, TILE)


class Wide:
    """wide_backward_kernel: two ranks, each with a producer and three consumer warpgroups.

    `rings` are those that the model has, of Q, dO, P and dS. Each rank loads half of Q and dO, for
    both; `halves` 1 leaves out the half that a rank loads for itself, since the other rank's half
    comes in more orders. dO of a step comes in `parts`, one use of its ring each.

    With a `pattern` there are tiles, and a scheduler: as Narrow's, but 0 is an index without a
    tile. That needs P and dS, which keep the consumers together. Otherwise one tile goes on without
    an end. A single rank, of `ranks`, loads all of Q and dO. With the ring "index" rank 0 takes the
    indices for both ranks: then both have a scheduler at least. `missing` is what a mutant lacks:
    waits by the name of their barrier; the last product before dS is released ("last read"); the
    arrival that k_full was seen; that k_empty counts no arrival but of "query alone".
    """

    def __init__(
        self, q: int, dout: int, scores: int, parts: int, rings: str = "Q dO P dS",
        halves: int = 1, pattern: tuple[int, ...] = (), ranks: int = 2, missing: str = "",
    ) -> None:  # fmt: skip
        self.parts, self.rings, self.halves, self.pattern = parts, rings.split(), halves, pattern
        self.ranks, self.missing = RANKS[:ranks], missing
        self.rings += ["tiles"] if pattern else []
        # Whether a step is the first of its tile, and the last.
        self.steps = [(i == 0, i + 1 == count) for count in pattern for i in range(count)]
        self.steps = self.steps or [(True, False), (False, False)]
        self.again = 0 if pattern else 1  # the step after the last of these
        self.buffers: list[Buffer] = []
        self.barriers: list[Barrier] = []
        self.q, self.q_full, self.q_empty = self.ring("Q", q, halves, ranks)
        self.dout, self.dout_full, self.dout_empty = self.ring("dO", dout, halves, 2 * ranks, PART)
        self.p, self.p_full, self.p_empty = self.ring("P", 1, 1, 1)
        self.ds, self.ds_full, self.ds_empty = self.ring("dS", scores, ranks, ranks)

        self.tile = self.buffer("tiles", "tile", 2)
        self.tile_full = self.barrier("tiles", "tile_full", 2)
        self.tile_empty = self.barrier("tiles", "tile_empty", 2, 4)
        self.tile_wanted = self.barrier("tiles", "tile_wanted", 1)
        # V of a tile is where K of the tile before was, and K where V was: see `swap`.
        self.k, self.v = self.buffer("tiles", "K", 2), self.buffer("tiles", "V", 2)
        self.peer = self.buffer("tiles", "peer", 1)
        self.k_full = self.barrier("tiles", "k_full", 1)
        self.v_full = self.barrier("tiles", "v_full", 1)
        self.peer_full = self.barrier("tiles", "peer_full", 1)
        self.k_empty = self.barrier("tiles", "k_empty", 1, 1 + self.lacks("query alone"))
        self.v_empty = self.barrier("tiles", "v_empty", 1, 2 - self.lacks("k_full seen"))
        # Rank 0 has the first two, rank 1 the others.
        self.taken = Buffer("taken", 1, INDEX)
        self.index_empty = Barrier("index_empty", 1, clock=INDEX)
        self.index = Buffer("index", 1, INDEX)
        self.index_full = Barrier("index_full", 1, clock=INDEX)
        if "index" in self.rings:
            self.buffers += [self.taken, self.index]
            self.barriers += [self.index_full, self.index_empty]

        steps = {"producer": self.produce, "value": self.value, "key": self.key}
        steps["query"] = self.query
        roles = [
            Role(f"{name} {r}", partial(step, r), 0, clocks=WIDE_CLOCKS)
            for r in self.ranks
            for name, step in steps.items()
        ]
        ops = [next(role.step((0, 0, 0), role.start), None) for role in roles]
        roles = [role for role, op in zip(roles, ops, strict=True) if op]
        for r in RANKS if "index" in self.rings else self.ranks if pattern else ():
            step = partial(self.schedule, r)
            roles += [Role(f"scheduler {r}", step, 0, clocks=(TILE, INDEX))]
        self.model = Model(tuple(roles), tuple(self.buffers), tuple(self.barriers))

    def buffer(self, ring: str, name: str, stages: int) -> list[Buffer]:
        """Each rank's."""
        made = [Buffer(f"{name} {r}", stages, TILE) for r in self.ranks]
        self.buffers += made if ring in self.rings else []
        return made

    def barrier(
        self, ring: str, name: str, stages: int, count: int = 1, clock: int = TILE
    ) -> list[Barrier]:
        made = [Barrier(f"{name} {r}", stages, count, clock=clock) for r in self.ranks]
        self.barriers += made if ring in self.rings else []
        return made

    def ring(
        self, name: str, stages: int, halves: int, readers: int, clock: int = STEP
    ) -> tuple[list[tuple[Buffer, ...]], list[Barrier], list[Barrier]]:
        """Each rank's buffers, `full` and `empty`."""
        data = [
            tuple(Buffer(f"{name} {r}.{i}", stages, clock) for i in range(halves))
            for r in self.ranks
        ]
        self.buffers += [half for halves in data for half in halves if name in self.rings]
        full = self.barrier(name, f"{name} full", stages, clock=clock)
        empty = self.barrier(name, f"{name} empty", stages, readers, clock)
        return data, full, empty

    def lacks(self, name: str) -> bool:
        return name == self.missing

    def when(self, ring: str, *ops: Op) -> Step:
        """The operations as one, if the model has the ring."""
        if ring in self.rings:
            yield together(*ops)

    def before(self, empty: Barrier, n: int) -> list[Op]:
        """Waits until use n may begin; a mutant does not."""
        return [] if self.lacks(empty.name.rstrip(" 01")) else [wait_before(empty, n)]

    def released(self, ring: str, empty: list[Barrier], n: int) -> list[Op]:
        """release_ranks."""
        return [arrive(barrier, n) for barrier in empty] if ring in self.rings else []

    def advanced(self, at: int) -> tuple[tuple[int, ...], int]:
        """What a step returns."""
        following = at + 1 if at + 1 < len(self.steps) else self.again
        return (1, self.parts, int(self.steps[at][1])), following

    def schedule(self, r: int, n: tuple[int, int], at: int) -> Step:
        tile, index = n
        has_tile = self.pattern[at] > 0
        if r in self.ranks:
            yield together(*self.before(self.tile_empty[r], tile))
        yield from self.take_index(r, index)
        if r in self.ranks:
            full = publish(self.tile_full[r], tile, self.tile[r])
            described = full if has_tile else finish(self.tile[r], tile)
            yield together(write(self.tile[r], tile), described)
            if has_tile:
                yield wait(self.tile_wanted[r], tile)
        return (int(has_tile), 1), (at + 1) % len(self.pattern)

    def take_index(self, r: int, n: int) -> Step:
        if r == 0:
            taken = [write(self.taken, n), finish(self.taken, n)]
            sent = send(self.index, n, self.index_full, self.taken)
            yield from self.when("index", *self.before(self.index_empty, n), *taken, sent)
        else:
            yield from self.when("index", expect(self.index_full, n, 1))
            yield from self.when("index", wait(self.index_full, n, reads=self.index))
            yield from self.when("index", arrive(self.index_empty, n, reads=self.index))

    def take_tile(self, r: int, tile: int) -> Step:
        yield from self.when("tiles", wait(self.tile_full[r], tile, reads=self.tile[r]))

    def release_tile(self, r: int, tile: int, *ops: Op) -> Step:
        released = arrive(self.tile_empty[r], tile, reads=self.tile[r])
        yield from self.when("tiles", *ops, released)

    def produce(self, r: int, n: Uses, at: int) -> Step:
        step, part, tile = n
        first, last = self.steps[at]
        if first:
            yield from self.take_tile(r, tile)
            loads = [*self.swap(self.v[r], tile), copy(self.k[r], tile, self.k_full[r])]
            yield from self.when("tiles", *self.before(self.v_empty[r], tile), *loads)
        yield from self.load("Q", self.q, self.q_full, self.q_empty, r, step)
        for i in range(part, part + self.parts):
            yield from self.load("dO", self.dout, self.dout_full, self.dout_empty, r, i)
        if first:
            loads = [*self.swap(self.k[r], tile), copy(self.v[r], tile, self.v_full[r])]
            loads += [copy(self.peer[r], tile, self.peer_full[r])]
            yield from self.when("tiles", *self.before(self.k_empty[r], tile), *loads)
        if last:
            yield from self.release_tile(r, tile, arrive(self.tile_wanted[r], tile))
        return self.advanced(at)

    def swap(self, other: Buffer, tile: int) -> list[Op]:
        """A load of this tile takes the place of `other` of the tile before, which is lost."""
        lost = tile - 1 - other.stages
        return [write(other, lost), finish(other, lost)]

    def load(
        self, ring: str, data: list[tuple[Buffer, ...]], full: list[Barrier], empty: list[Barrier],
        r: int, n: int,
    ) -> Step:  # fmt: skip
        to_ranks = (1 - r, r)[: self.halves] if len(self.ranks) > 1 else (r,)
        sends = [send(data[to][r % self.halves], n, full[to]) for to in to_ranks]
        waits = self.before(empty[r], n)
        yield from self.when(ring, *waits, expect(full[r], n, self.halves), *sends)

    def value(self, r: int, n: Uses, at: int) -> Step:
        step, part, tile = n
        first, last = self.steps[at]
        if first:
            yield from self.take_tile(r, tile)
            yield from self.when("tiles", wait(self.k_full[r], tile, reads=self.k[r]))
            yield from self.when("Q", wait(self.q_full[r], step, reads=self.q[r]))
        # S of this step is complete.
        reads = [read(self.q[r], step)] if "Q" in self.rings else []
        reads += [read(self.k[r], tile)] if "tiles" in self.rings else []
        if self.lacks("query alone") and last:
            reads += [arrive(self.k_empty[r], tile)]
        (p,) = self.p[r]
        passed = [write(p, step), publish(self.p_full[r], step, p)]
        yield from self.when("P", *self.before(self.p_empty[r], step), *reads, *passed)
        for i in range(part, part + self.parts):
            yield from self.when("dO", wait(self.dout_full[r], i, reads=self.dout[r]))
        last_part = part + self.parts - 1
        for i in range(part, last_part):
            yield from self.release_dout(r, i)
        if not last:
            yield from self.when("Q", wait(self.q_full[r], step + 1, reads=self.q[r]))
        yield from self.release_dout(r, last_part)
        if last:
            # dV leaves by way of the next step's P.
            yield from self.when("P", wait(self.p_empty[r], step), write(p, step + 1))
            yield from self.when("P", finish(p, step + 1))
            yield from self.release_tile(r, tile)
        return self.advanced(at)

    def release_dout(self, r: int, part: int) -> Step:
        released = self.released("dO", self.dout_empty, part)
        yield from self.when("dO", read(self.dout[r], part), *released)

    def key(self, r: int, n: Uses, at: int) -> Step:
        step, part, tile = n
        first, last = self.steps[at]
        following = part + self.parts
        if first:
            yield from self.take_tile(r, tile)
            yield from self.when("tiles", wait(self.v_full[r], tile, reads=self.v[r]))
            yield from self.when("dO", wait(self.dout_full[r], part, reads=self.dout[r]))
            yield from self.issue_rest(r, part)
        yield from self.release_dout(r, following - 1)
        yield from self.when("Q", wait(self.q_full[r], step, reads=self.q[r]))
        yield from self.when("P", wait(self.p_full[r], step, reads=self.p[r]))
        yield from self.when("P", arrive(self.p_empty[r], step, reads=self.p[r]))
        own, others = self.ds[r][r], [to for to in self.ranks if to != r]
        sends = [send(self.ds[to][r], step, self.ds_full[to], source=own) for to in others]
        full = expect(self.ds_full[r], step, len(sends), writes=own)
        waits = self.before(self.ds_empty[r], step)
        yield from self.when("dS", *waits, write(own, step), full, *sends)
        if last:
            yield from self.when("tiles", arrive(self.v_empty[r], tile, reads=self.v[r]))
        else:
            yield from self.when("dO", wait(self.dout_full[r], following, reads=self.dout[r]))
        released = self.released("Q", self.q_empty, step)
        yield from self.when("Q", read(self.q[r], step), *released)
        if last:
            yield from self.release_tile(r, tile)
        else:
            yield from self.issue_rest(r, following)
        return self.advanced(at)

    def issue_rest(self, r: int, part: int) -> Step:
        """dP of all parts from `part` on: the last one is released in its step."""
        for i in range(part + 1, part + self.parts):
            yield from self.when("dO", wait(self.dout_full[r], i, reads=self.dout[r]))
            yield from self.release_dout(r, i - 1)

    def query(self, r: int, n: Uses, at: int) -> Step:
        step, _, tile = n
        first, last = self.steps[at]
        if first:
            yield from self.take_tile(r, tile)
            yield from self.when("tiles", wait(self.k_full[r], tile, reads=self.k[r]))
            if not self.lacks("k_full seen"):
                yield from self.when("tiles", arrive(self.v_empty[r], tile))
            yield from self.when("tiles", wait(self.peer_full[r], tile, reads=self.peer[r]))
        yield from self.when("dS", wait(self.ds_full[r], step, reads=self.ds[r]))
        released = self.released("dS", self.ds_empty, step)
        if self.lacks("last read"):  # the build with -DATTNSCOPE_UNGUARDED_RING
            yield from self.when("dS", *released)
            released = []
        yield from self.when("dS", read(self.ds[r], step), *released)
        if last:
            keys = (self.k[r], self.peer[r])
            yield from self.when("tiles", arrive(self.k_empty[r], tile, reads=keys))
            yield from self.release_tile(r, tile)
        return self.advanced(at)


class WideTurns:
    """Deterministic calls of the wide kernel, as Turns in test_backward_model.py.

    A rank of a key block has a role that awaits turns, `warps` that add their parts of dQ, and one
    that passes turns on: a ticket counts both ranks. A warp says that it has added beside the next
    product (`late`, by TMA), or at once. A part may come from the other rank in the next key block.
    """

    def __init__(
        self, key_blocks: int, ranks: int, warps: int, late: bool, missing: str = ""
    ) -> None:
        self.missing, self.key_blocks, self.ranks = missing, key_blocks, ranks
        self.warps, self.late = warps, late
        lead, every, both = 2, range(key_blocks), range(ranks)
        self.sums = {
            (i, r, w): Buffer(f"sum through {i} {r}.{w}", lead)
            for i in every for r in both for w in range(warps)
        }  # fmt: skip
        self.ticket = [Barrier(f"ticket {i}", lead, ranks, counts=True) for i in every]
        at = [(i, r) for i in every for r in both]
        self.full = {x: Barrier(f"turn_full {x}", 1) for x in at}
        self.added = {x: Barrier(f"turn_added {x}", 1, warps) for x in at}
        self.empty = {x: Barrier(f"turn_empty {x}", 1) for x in at}
        roles: list[Role] = []
        for x in at:
            roles += [Role(f"awaits {x}", lambda n, _, x=x: self.await_turn(*x, n))]
            roles += [Role(f"passes {x}", lambda n, _, x=x: self.pass_turn(*x, n))]
            for w in range(warps):
                step = partial(self.add, *x, w)
                roles += [Role(f"adds {x} {w}", step, False)]
        barriers = (*self.full.values(), *self.added.values(), *self.empty.values())
        self.model = Model(tuple(roles), tuple(self.sums.values()), (*self.ticket, *barriers))

    def await_turn(self, i: int, r: int, n: int) -> Step:
        if i and self.missing != "ticket":
            yield wait(self.ticket[i - 1], n)
        if i == 0 or self.missing != "turn_empty":
            yield wait_before(self.empty[i, r], n)
        yield arrive(self.full[i, r], n)

    def add(self, i: int, r: int, w: int, n: int, added: bool) -> Step:
        """`added`: the additions of use n - 1 may not be complete."""
        if added:
            yield from self.finish_turn(i, r, w, n - 1)
        if i + 1 < self.key_blocks:
            yield wait_before(self.ticket[i + 1], n)  # the end of the tile
        if self.missing != "turn_full":
            yield wait(self.full[i, r], n)
        before = tuple(self.sums[i - 1, other, w] for other in range(self.ranks) if i)
        yield together(read(before, n), write(self.sums[i, r, w], n))
        if self.late:
            return True
        yield from self.finish_turn(i, r, w, n)
        return False

    def finish_turn(self, i: int, r: int, w: int, n: int) -> Step:
        if self.missing == "complete":
            yield arrive(self.added[i, r], n)
            yield finish(self.sums[i, r, w], n)
        else:
            yield publish(self.added[i, r], n, writes=self.sums[i, r, w])

    def pass_turn(self, i: int, r: int, n: int) -> Step:
        if self.missing != "turn_added":
            yield wait(self.added[i, r], n)
        yield arrive(self.empty[i, r], n)
        yield arrive(self.ticket[i], n)


# Buffers of Q, dO and dS, and parts of dO.
HEAD_DIM_192 = (2, 2, 2, 1)
HEAD_DIM_256 = (2, 3, 1, 2)


@pytest.mark.parametrize(
    ("rings", "config", "halves"),
    [
        ("Q P", HEAD_DIM_192, 1),
        ("dO", HEAD_DIM_192, 1),
        ("P dS", HEAD_DIM_192, 1),
        ("P dS", HEAD_DIM_256, 1),
        ("dO", HEAD_DIM_256, 1),
        ("Q P dS", HEAD_DIM_256, 1),
        ("Q P", HEAD_DIM_192, 2),
        ("dO", HEAD_DIM_192, 2),
        slow("dO", HEAD_DIM_256, 2),
        slow("Q P dS", HEAD_DIM_192, 1),
        slow("Q dO P", HEAD_DIM_192, 1),
        slow("Q dO P", HEAD_DIM_256, 1),
    ],
)
def test_the_wide_kernel_is_right_in_every_order(rings, config, halves):
    """37,686 states (Q P dS); slow: 536,847 (Q dO P of head dim 256)."""
    assert_sound(Wide(*config, rings, halves).model)


@pytest.mark.parametrize(
    ("rings", "config", "pattern"),
    [
        ("P dS", HEAD_DIM_192, (1, 2)),
        ("P dS", HEAD_DIM_256, (1, 2)),
        ("P dS", HEAD_DIM_256, (2, 1, 1, 2, 3)),
        slow("Q dO P dS", HEAD_DIM_192, (1, 2)),
        slow("Q dO P dS", HEAD_DIM_256, (1, 2)),
        slow("P dS index", HEAD_DIM_256, (1, 0, 2)),
    ],
)
def test_a_rank_of_the_wide_kernel_changes_tiles_in_every_order(rings, config, pattern):
    """23,749 states (five tiles); slow: 149,947 (all rings), 135,414 (index)."""
    assert_sound(Wide(*config, rings, pattern=pattern, ranks=1).model)


def test_both_ranks_receive_each_index_in_every_order():
    assert_sound(Wide(*HEAD_DIM_256, "index", pattern=(1,), ranks=0).model)


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
    result = explore(Wide(*HEAD_DIM_256, rings, missing=missing).model)
    print(result)
    assert wrong in result.failure


@pytest.mark.parametrize(
    ("missing", "ranks", "wrong"),
    [
        ("k_empty", 1, "writes peer"),
        ("v_empty", 1, "writes V"),
        ("k_full seen", 1, "query 0: waits for k_full"),  # K of the next tile completed it again
        ("query alone", 1, "value 0 arrives on k_empty"),  # a tile early
        ("tile_empty", 1, "reads tile"),
        ("index_empty", 0, "writes index"),
    ],
)
def test_the_change_of_tiles_needs_each_wait(missing, ranks, wrong):
    rings = "P dS" if ranks else "index"
    model = Wide(*HEAD_DIM_256, rings, pattern=(1, 2), ranks=ranks, missing=missing).model
    result = explore(model)
    print(result)
    assert wrong in result.failure


def test_one_buffer_of_q_would_deadlock_the_wide_kernel():
    """S of the next step is issued before this step's Q is released."""
    result = explore(Wide(1, *HEAD_DIM_256[1:]).model)
    print(result)
    assert result.failure.startswith("deadlock")


def test_a_buffer_for_each_part_of_dout_is_needed():
    """Both consumers issue products of all parts of a step before they release one."""
    result = explore(Wide(2, 1, 1, 2, "dO").model)
    print(result)
    assert result.failure.startswith("deadlock")


@pytest.mark.parametrize(
    ("key_blocks", "ranks", "warps", "late"),
    [
        (2, 1, 2, True),
        (2, 1, 2, False),
        (2, 2, 1, True),
        (2, 2, 1, False),
        slow(3, 1, 2, True),
        slow(2, 2, 2, True),
    ],
)
def test_ranks_and_warps_add_in_turn_in_every_order(key_blocks, ranks, warps, late):
    assert_sound(WideTurns(key_blocks, ranks, warps, late).model)


@pytest.mark.parametrize(
    ("missing", "wrong"),
    [
        ("ticket", "reads sum through 0"),
        ("complete", "reads sum through 0"),
        ("turn_full", "reads sum through 0"),
        ("turn_added", "arrives on ticket 0"),
        ("turn_empty", "deadlock"),  # the next turn overtakes one that was not taken
    ],
)
def test_turns_of_the_wide_kernel_need_each_wait(missing, wrong):
    result = explore(WideTurns(2, 2, 1, True, missing).model)
    print(result)
    assert wrong in result.failure
