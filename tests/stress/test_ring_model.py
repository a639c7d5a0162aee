"""The rings of the Hopper forward kernel, explored state by state: see ring_model.py.

The model leaves open what the kernel decides by tiles and masks, so it covers every pattern: where
tiles end (separately for the producer and each consumer), and which uses a consumer reads. A role
stands for a consumer, or for one warp of a consumer, since warps arrive separately.
"""

from __future__ import annotations

import pytest
from ring_model import (
    Barrier,
    Buffer,
    Explorer,
    Model,
    Op,
    Role,
    Step,
    arrive,
    assert_sound,
    choose,
    copy,
    expect,
    explore,
    publish,
    send,
    slow,
    wait,
    wait_before,
    write,
)


def skip(full: Barrier, empty: Barrier, n: int, guarded: bool) -> tuple[Op, Op]:
    """Model Consumer::skip for one ring."""
    return (wait(full, n) if guarded else wait_before(empty, n)), arrive(empty, n)


def one_ring(stages: int, consumers: int, guarded: bool = True, readers: int = 0) -> Model:
    """K or V alone. `readers` consumers read every use, the others any."""
    data = Buffer("data", stages)
    full, empty = Barrier("full", stages), Barrier("empty", stages, consumers + readers)

    def producer(n: int, _: None) -> Step:
        yield wait_before(empty, n)
        yield copy(data, n, full)

    def reader(n: int, _: None) -> Step:
        yield wait(full, n, reads=data)
        yield arrive(empty, n, reads=data)

    def consumer(n: int, _: None) -> Step:
        if (yield choose()):
            yield from reader(n, None)
        else:
            yield from skip(full, empty, n, guarded)

    roles = [Role("producer", producer), Role("consumer", consumer, copies=consumers)]
    roles += [Role("reader", reader, copies=readers)] if readers else []
    return Model(tuple(roles), (data,), (full, empty))


class KeysAndValues:
    """Both rings: K one block ahead of V."""

    def __init__(self, stages: int, consumers: int, guarded: bool = True, readers: int = 0) -> None:
        self.guarded = guarded
        self.k, self.v = Buffer("K", stages), Buffer("V", stages)
        arrivals = consumers + readers
        self.k_full, self.v_full = Barrier("k_full", stages), Barrier("v_full", stages)
        self.k_empty = Barrier("k_empty", stages, arrivals)
        self.v_empty = Barrier("v_empty", stages, arrivals)
        roles = [Role("producer", self.produce, start=False)]
        roles += [Role("consumer", self.consume, start=False, copies=consumers)]
        roles += [Role("reader", self.read, start=False, copies=readers)] if readers else []
        barriers = (self.k_full, self.k_empty, self.v_full, self.v_empty)
        self.model = Model(tuple(roles), (self.k, self.v), barriers)

    def load_value(self, n: int) -> Step:
        yield wait_before(self.v_empty, n)
        yield copy(self.v, n, self.v_full)

    def produce(self, n: int, ahead: bool) -> Step:
        """`ahead`: V of use n - 1 belongs to the same tile and is not loaded yet."""
        yield wait_before(self.k_empty, n)
        yield copy(self.k, n, self.k_full)
        if ahead:
            yield from self.load_value(n - 1)
        if (yield choose()):
            return True
        yield from self.load_value(n)
        return False

    def consume(self, n: int, running: bool) -> Step:
        if not running and (yield choose()):
            yield from skip(self.k_full, self.k_empty, n, self.guarded)
            yield from skip(self.v_full, self.v_empty, n, self.guarded)
            return False
        return (yield from self.read(n, running))

    def read(self, n: int, running: bool) -> Step:
        """`running`: K of use n is awaited, V of use n - 1 is not yet released."""
        if not running:  # first_block
            yield wait(self.k_full, n, reads=self.k)
            yield arrive(self.k_empty, n, reads=self.k)
        else:  # step
            yield wait(self.v_full, n - 1, reads=self.v)
            yield arrive(self.k_empty, n, reads=self.k)
        more = yield choose()
        if more:
            yield wait(self.k_full, n + 1, reads=self.k)
        if running:
            yield arrive(self.v_empty, n - 1, reads=self.v)
        if not more:  # last_output
            yield wait(self.v_full, n, reads=self.v)
            yield arrive(self.v_empty, n, reads=self.v)
        return more


class InTurns(KeysAndValues):
    """Two consumers that issue their products in turns: one at each block, read or skipped."""

    def __init__(self, stages: int) -> None:
        super().__init__(stages, 2)
        self.turn = [Barrier(f"turn of {i}", 1) for i in range(2)]
        roles = [
            Role(
                f"consumer {i}", lambda n, running, i=i: self.consume_in_turn(i, n, running), False
            )
            for i in range(2)
        ]
        barriers = (*self.model.barriers, *self.turn)
        self.model = Model((self.model.roles[0], *roles), self.model.buffers, barriers)

    def consume_in_turn(self, i: int, n: int, running: bool) -> Step:
        reads = running or (yield choose())
        if reads and not running:
            yield wait(self.k_full, n)
        yield wait(self.turn[1], n) if i else wait_before(self.turn[0], n)
        if running:
            yield wait(self.v_full, n - 1)
        yield arrive(self.turn[1 - i], n)
        if reads:
            return (yield from self.read(n, running))
        yield from skip(self.k_full, self.k_empty, n, self.guarded)
        yield from skip(self.v_full, self.v_empty, n, self.guarded)
        return False


class TilesAndQueries:
    """The rings of tile descriptions and Q. All lanes of a warp arrive as one.

    The scheduler hands out the first tile, then loads its Q. `waits`: the producer of Q waits for
    that tile's buffers nevertheless, which is wrong.
    """

    def __init__(
        self,
        consumers: int,
        q_stages: int,
        prefetch: bool = False,
        guarded: bool = True,
        waits: bool = False,
    ) -> None:
        self.consumers, self.prefetch, self.guarded = consumers, prefetch, guarded
        self.waits = waits
        self.tile = Buffer("tile", 2)
        self.tile_full = Barrier("tile_full", 2)
        self.tile_empty = Barrier("tile_empty", 2, consumers + 2)
        self.tile_wanted = Barrier("tile_wanted", 1)
        self.q = [Buffer(f"Q {i}", q_stages) for i in range(consumers)]
        self.q_full = [Barrier(f"q_full {i}", q_stages) for i in range(consumers)]
        self.q_empty = [Barrier(f"q_empty {i}", q_stages) for i in range(consumers)]

    def schedule(self, n: int, started: bool) -> Step:
        if started and not self.prefetch:
            yield wait(self.tile_wanted, n - 1)
        if self.guarded:
            yield wait_before(self.tile_empty, n)
        yield write(self.tile, n)
        yield publish(self.tile_full, n, writes=self.tile)
        if not started:
            yield from self.load_first(n)
        return True

    def load_first(self, n: int) -> Step:
        for i in range(len(self.q)):
            yield copy(self.q[i], n, self.q_full[i])

    def produce(self, n: int, started: bool) -> Step:
        yield wait(self.tile_full, n, reads=self.tile)
        yield arrive(self.tile_empty, n, reads=self.tile)
        yield arrive(self.tile_wanted, n)
        return True

    def produce_queries(self, n: int, started: bool) -> Step:
        yield wait(self.tile_full, n, reads=self.tile)
        for i in range(len(self.q)):
            if started or self.waits:
                yield wait_before(self.q_empty[i], n)
            if started:
                yield copy(self.q[i], n, self.q_full[i])
        yield arrive(self.tile_empty, n, reads=self.tile)
        return True

    def consume(self, i: int, n: int) -> Step:
        yield wait(self.tile_full, n, reads=self.tile)
        yield wait(self.q_full[i], n, reads=self.q[i])
        yield arrive(self.q_empty[i], n, reads=self.q[i])
        yield arrive(self.tile_empty, n, reads=self.tile)

    def model(self) -> Model:
        roles = [Role("scheduler", self.schedule, start=False)]
        roles += [Role("producer", self.produce, start=False)]
        roles += [Role("producer of Q", self.produce_queries, start=False)]
        roles += [
            Role(f"consumer {i}", lambda n, _, i=i: self.consume(i, n))
            for i in range(self.consumers)
        ]
        barriers = (self.tile_full, self.tile_empty, self.tile_wanted, *self.q_full, *self.q_empty)
        return Model(tuple(roles), (self.tile, *self.q), barriers)


class WholeKernel(TilesAndQueries):
    """All rings together, with one key block per tile: covers waits across rings.

    `splits`: two consumers share rows and Q, and one gives its O to the other at the end of a tile.
    `parts`: it waits until that is read, which it must.
    """

    def __init__(
        self,
        consumers: int,
        q_stages: int,
        stages: int = 2,
        splits: bool = False,
        parts: bool = True,
    ) -> None:
        super().__init__(consumers, q_stages)
        self.splits, self.parts = splits, parts
        self.partial = Buffer("partial O", 1)
        self.met, self.parted = Barrier("met", 1, 2), Barrier("parted", 1, 2)
        if splits:
            self.q, self.q_full = self.q[:1], self.q_full[:1]
            self.q_empty = [Barrier("q_empty", q_stages, 2)]
        self.k, self.v = Buffer("K", stages), Buffer("V", stages)
        self.k_full, self.v_full = Barrier("k_full", stages), Barrier("v_full", stages)
        self.k_empty = Barrier("k_empty", stages, consumers)
        self.v_empty = Barrier("v_empty", stages, consumers)

    def load_first(self, n: int) -> Step:
        yield from super().load_first(n)
        yield copy(self.k, n, self.k_full)

    def produce(self, n: int, started: bool) -> Step:
        yield from super().produce(n, started)
        if started:
            yield wait_before(self.k_empty, n)
            yield copy(self.k, n, self.k_full)
        yield wait_before(self.v_empty, n)
        yield copy(self.v, n, self.v_full)
        return True

    def consume(self, i: int, n: int) -> Step:
        yield wait(self.tile_full, n, reads=self.tile)
        unit = 0 if self.splits else i
        yield wait(self.q_full[unit], n, reads=self.q[unit])
        reads = yield choose()
        yield wait(self.k_full, n, reads=self.k if reads else None)
        yield arrive(self.k_empty, n, reads=self.k if reads else None)
        if reads:
            yield arrive(self.q_empty[unit], n, reads=self.q[unit])
        yield wait(self.v_full, n, reads=self.v if reads else None)
        yield arrive(self.v_empty, n, reads=self.v if reads else None)
        if not reads:
            yield arrive(self.q_empty[unit], n)
        if self.splits:
            yield from (self.add_output(n) if i == 0 else self.give_output(n))
        yield arrive(self.tile_empty, n, reads=self.tile)

    def give_output(self, n: int) -> Step:
        yield write(self.partial, n)
        yield publish(self.met, n, writes=self.partial)
        yield wait(self.met, n)
        yield arrive(self.parted, n)
        if self.parts:
            yield wait(self.parted, n)

    def add_output(self, n: int) -> Step:
        yield arrive(self.met, n)
        yield wait(self.met, n, reads=self.partial)
        yield arrive(self.parted, n, reads=self.partial)
        yield wait(self.parted, n)

    def model(self) -> Model:
        rings = super().model()
        barriers = (self.k_full, self.k_empty, self.v_full, self.v_empty)
        buffers = (self.k, self.v)
        if self.splits:
            barriers, buffers = (*barriers, self.met, self.parted), (*buffers, self.partial)
        return Model(rings.roles, (*rings.buffers, *buffers), (*rings.barriers, *barriers))


@pytest.mark.parametrize("consumers", [1, 2, 3, 4])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_a_ring_is_right_in_every_order(stages, consumers):
    """10 states (1 stage, 1 consumer) to 13,706 (4 stages, 4 consumers)."""
    assert_sound(one_ring(stages, consumers))


@pytest.mark.parametrize(
    ("stages", "consumers"),
    [(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1), slow(3, 3), slow(4, 2)],
)
def test_k_and_v_are_right_in_every_order(stages, consumers):
    """1,060 states (2 stages, 1 consumer) to 72,982 (2, 3); slow: 454,914 (3, 3)."""
    assert_sound(KeysAndValues(stages, consumers).model)


def test_k_and_v_are_right_where_consumers_take_turns():
    assert_sound(InTurns(stages=2).model)


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("q_stages", [1, 2])
@pytest.mark.parametrize("consumers", [1, 2])
def test_tiles_and_q_are_right_in_every_order(consumers, q_stages, prefetch):
    """521 states (1 consumer, 1 stage of Q) to 19,976 (2, 2, prefetch)."""
    assert_sound(TilesAndQueries(consumers, q_stages, prefetch).model())


@pytest.mark.parametrize(("consumers", "q_stages"), [(1, 1), (1, 2), (2, 1), slow(2, 2)])
def test_all_rings_together_are_right_in_every_order(consumers, q_stages):
    """8,114 states (1 consumer, 1 stage of Q) to 106,866 (2, 1); slow: 264,240 (2, 2)."""
    assert_sound(WholeKernel(consumers, q_stages).model())


def test_consumers_that_share_rows_are_right_in_every_order():
    assert_sound(WholeKernel(2, 1, stages=1, splits=True).model())


def test_an_output_must_be_read_before_the_next_is_given():
    result = explore(WholeKernel(2, 1, stages=1, splits=True, parts=False).model())
    print(result)
    assert "partial O" in result.failure


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_an_unguarded_skip_reads_a_buffer_too_early(stages):
    """The previous use was skipped without waiting for its copy."""
    for model in (
        one_ring(stages, 1, guarded=False, readers=1),
        KeysAndValues(stages, 1, guarded=False, readers=1).model,
    ):
        result = explore(model)
        print(result)
        assert f"of use {stages}; the buffer has use" in result.failure
        early = result.trace[-1]
        assert early.startswith("consumer: waits for") and f"full of use {stages}, reads" in early
        assert sum("arrives on" in line and "empty of use 0" in line for line in result.trace)
        assert not any("lands" in line and "use 0" in line for line in result.trace)


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_scheduler_that_does_not_wait_overwrites_a_tile(prefetch):
    """Model the build with -DATTNSCOPE_PLANTED_RACE."""
    result = explore(TilesAndQueries(2, 2, prefetch, guarded=False).model())
    print(result)
    assert "tile of use" in result.failure or "tile_full" in result.failure


@pytest.mark.parametrize("q_stages", [1, 2])
def test_a_wait_for_the_buffer_of_what_another_role_loads_is_a_deadlock(q_stages):
    """The consumer may have released that buffer before the wait begins."""
    result = explore(TilesAndQueries(1, q_stages, waits=True).model())
    print(result)
    assert result.failure.startswith("deadlock")


# Tests of the model checker.
DATA, FULL, EMPTY = Buffer("data", 1), Barrier("full", 1), Barrier("empty", 1)


def produce(n: int, _: None) -> Step:
    yield wait_before(EMPTY, n)
    yield copy(DATA, n, FULL)


def consume(n: int, _: None) -> Step:
    yield wait(FULL, n, reads=DATA)
    yield arrive(EMPTY, n, reads=DATA)


def wrong(*roles: Role) -> str:
    return explore(Model(roles, (DATA,), (FULL, EMPTY))).failure


def test_the_engine_finds_a_deadlock():
    def greedy(n: int, _: None) -> Step:
        yield wait(FULL, n, reads=DATA)
        yield wait(FULL, n + 1)
        yield arrive(EMPTY, n, reads=DATA)

    assert wrong(Role("producer", produce), Role("consumer", consume)) == ""
    failure = wrong(Role("producer", produce), Role("consumer", greedy))
    assert failure == (
        "deadlock: producer: waits for empty of use 0; consumer: waits for full of use 1"
    )


def test_the_engine_finds_a_choice_that_one_option_alone_ends():
    def sometimes(n: int, _: None) -> Step:
        yield wait(FULL, n, reads=DATA)
        if (yield choose()):
            yield wait(FULL, n + 1)
        yield arrive(EMPTY, n, reads=DATA)

    assert "deadlock" in wrong(Role("producer", produce), Role("consumer", sometimes))


def test_the_engine_finds_a_buffer_released_before_its_last_read():
    def hasty(n: int, _: None) -> Step:
        yield wait(FULL, n)
        yield arrive(EMPTY, n)
        yield wait(FULL, n, reads=DATA)

    assert "reads data of use 0; the buffer" in wrong(
        Role("producer", produce), Role("consumer", hasty)
    )


def test_the_engine_finds_a_second_arrival():
    def twice(n: int, _: None) -> Step:
        yield from consume(n, None)
        yield arrive(EMPTY, n)

    assert wrong(Role("producer", produce), Role("consumer", twice)) == (
        "consumer arrives on empty for use 0 in the phase of use 1"
    )


def test_the_engine_finds_a_copy_over_a_copy():
    def careless(n: int, _: None) -> Step:
        yield copy(DATA, n, FULL)

    failure = wrong(Role("producer", careless), Role("consumer", consume))
    assert failure.startswith("producer arrives on full") or "while it is being written" in failure


OTHER = Buffer("other", 1)


def test_the_engine_finds_a_source_that_changes_while_it_is_copied():
    def pass_on(n: int, _: None) -> Step:
        if careful:
            yield wait_before(EMPTY, n)
        yield write(OTHER, n)
        yield wait_before(EMPTY, n)
        yield expect(FULL, n, copies=1, writes=OTHER)
        yield send(DATA, n, FULL, source=OTHER)

    for careful in (True, False):
        roles = (Role("sender", pass_on), Role("consumer", consume))
        result = explore(Model(roles, (DATA, OTHER), (FULL, EMPTY)), max_states=10_000)
        assert ("its source has use" in result.failure) is not careful, result


def test_the_engine_finds_a_copy_that_lands_before_its_phase():
    """The copy is sent by one role, and its bytes are expected by another."""

    def sends(n: int, _: None) -> Step:
        if careful:
            yield wait_before(EMPTY, n)
        yield send(DATA, n, FULL)

    def expects(n: int, _: None) -> Step:
        yield wait_before(EMPTY, n)
        yield expect(FULL, n, copies=1)

    for careful in (True, False):
        roles = (Role("sender", sends), Role("owner", expects), Role("consumer", consume))
        failure = explore(Model(roles, (DATA,), (FULL, EMPTY)), max_states=10_000).failure
        assert (failure == "") is careful, failure
        assert careful or "lands in another phase" in failure or "while it is being" in failure


def test_a_count_is_compared_whole_where_a_parity_is_not():
    """A role may be two phases ahead of the role that waits for it."""
    done = Barrier("done", 1, counts=True)

    def ahead(n: int, _: None) -> Step:
        yield wait(done, n - 2)
        yield arrive(ticket, n)

    def behind(n: int, _: None) -> Step:
        yield wait(ticket, n)
        yield arrive(done, n)

    for counts in (True, False):
        ticket = Barrier("ticket", 1, counts=counts)
        result = explore(Model((Role("ahead", ahead), Role("behind", behind)), (), (ticket, done)))
        assert result.failure.startswith("deadlock") is not counts, result


@pytest.mark.parametrize(
    "model",
    [one_ring(2, 2), KeysAndValues(2, 1).model, TilesAndQueries(1, 1).model()],
    ids=["ring", "k-and-v", "tiles"],
)
def test_shifts_and_interchanged_roles_lose_no_state(model):
    """At each step, exploration with and without the reductions finds the same states."""
    explorer = Explorer(model)
    plain = set(explorer.starts())
    reduced = set(map(explorer.canonical, plain))
    all_plain, all_reduced = set(plain), set(reduced)
    for _ in range(45):
        plain = {after for state in plain for *_, after in explorer.successors(state)}
        moved = {after for state in reduced for *_, after in explorer.successors(state)}
        reduced = set(map(explorer.canonical, moved))
        assert reduced == set(map(explorer.canonical, plain))
        all_plain |= plain
        all_reduced |= reduced
    assert len(all_reduced) < len(all_plain)


def test_a_space_larger_than_allowed_is_an_error():
    with pytest.raises(RuntimeError, match="max_states must be"):
        explore(one_ring(4, 2), max_states=100)
