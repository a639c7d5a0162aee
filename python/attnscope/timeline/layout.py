"""What the marks of a kernel mean: the states of its roles, in the order of its marks.cuh."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

WORDS = 16  # uint32 of a row; see csrc/attn/timeline.cuh
SCHEDULER = 0  # its lane in every kernel
# Per SM and cycle, compute capability 9.0: dense 16-bit FLOPs of the tensor cores (Hopper
# whitepaper), base-2 exponentials (CUDA programming guide, arithmetic throughput).
TENSOR_FLOPS = 4096
EXPONENTIALS = 16

# What a state is, for pictures and sums.
COMPUTE = "softmax"  # exponentials, and what is computed beside them
ISSUE = "issue"
TENSOR_WAIT = "wait for tensor cores"
LOAD_WAIT = "wait for loads"
TILE_WAIT = "wait for a tile"
SLOT_WAIT = "wait for a free slot"
OTHERS_WAIT = "wait for other consumers"
OUTPUT = "rescale, stage, store results"
KINDS = (COMPUTE, OUTPUT, ISSUE, TENSOR_WAIT, LOAD_WAIT, OTHERS_WAIT, TILE_WAIT, SLOT_WAIT)

# The scheduler's notes on a tile, from word NOTES on.
NOTES = 8
# Words of a block's row and of the end row of a lane.
SM, CLOCK, TIMER, TILES, STEPS = 0, 1, 3, 5, 6
BEGAN = TILES  # 1 in the row of a block that ran

Words = NDArray[np.uint32]
Counts = NDArray[np.int64]
Facts = Mapping[str, Any]


@dataclass(frozen=True)
class State:
    """What a role does from one mark to its next.

    `mark` is the name in marks.cuh without its k. `flying` names the products of this consumer that
    have been issued and not yet been waited for; `begins` the one whose issue begins here.
    """

    mark: str
    label: str
    kind: str
    flying: tuple[str, ...] = ()
    begins: str = ""


class Marks(NamedTuple):
    """Places for marks: code, tile, step as in a track; whether a mark is due; the mark, or 0."""

    code: NDArray[np.int8]
    tile: NDArray[np.int32]
    step: NDArray[np.int32]
    due: NDArray[np.bool_]
    mark: Words


class Rows(NamedTuple):
    """The rows of a lane's tiles or steps: word of each mark, tile, number of the step in it."""

    word: NDArray[np.int64]
    tile: NDArray[np.int64]
    inside: NDArray[np.int64]
    marks: Words


class Places:
    """Collects the places for marks of a lane, and orders them as the program does."""

    def __init__(self) -> None:
        self._parts: list[tuple[Any, ...]] = []

    def add(self, mark: Words, due: Any, *columns: Any) -> None:
        """Columns: tile, phase, step in the phase, order in the step, code, shown step."""
        row = (*columns, due, mark)
        self._parts.append(tuple(np.broadcast_to(column, mark.shape).ravel() for column in row))

    def in_order(self) -> Marks:
        columns = [np.concatenate(column) for column in zip(*self._parts, strict=True)]
        order = np.lexsort(columns[3::-1])
        tile, *_, code, step, due, mark = (column[order] for column in columns)
        codes, tiles, steps = code.astype(np.int8), tile.astype(np.int32), step.astype(np.int32)
        return Marks(codes, tiles, steps, due, mark)


class Layout(ABC):
    """The roles of a kernel. Each lane has one; all consumers have the last one.

    A tile has steps: blocks of keys in the forward, of queries in the backward. `notes` has the
    scheduler's words of each tile of a block, [tiles, len(self.notes)].
    """

    mode: ClassVar[str]
    title: ClassVar[str]  # of pictures
    notes: ClassVar[tuple[str, ...]]
    tile_states: ClassVar[dict[str, tuple[State, ...]]]
    step_states: dict[str, tuple[State, ...]]
    compute: ClassVar[str]  # what COMPUTE is in this kernel
    costs_are: ClassVar[dict[str, str]]  # the names of `costs`, and what they are

    @cached_property
    def roles(self) -> tuple[str, ...]:
        return tuple(self.tile_states)

    @cached_property
    def lanes(self) -> tuple[str, ...]:
        """The role of each lane, up to the first consumer's."""
        return self.roles

    @cached_property
    def consumer(self) -> int:
        """The lane of the first consumer; the others follow it."""
        return len(self.lanes) - 1

    @cached_property
    def states(self) -> dict[str, tuple[State, ...]]:
        """State of each code of a track: of a tile its word, of a step WORDS + its word."""
        none = State("", "", "")
        return {
            role: (*tile, *(none,) * (WORDS - len(tile)), *self.step_states.get(role, ()))
            for role, tile in self.tile_states.items()
        }

    @cached_property
    def products(self) -> tuple[str, ...]:
        """The products of a consumer, in the order of their issue."""
        states = self.states[self.roles[-1]]
        return tuple(dict.fromkeys(state.begins for state in states if state.begins))

    def role_of(self, lane: int) -> str:
        return self.lanes[min(lane, self.consumer)]

    def has_steps(self, lane: int) -> bool:
        """Whether a lane marks steps besides tiles."""
        return self.role_of(lane) in self.step_states

    def lane_name(self, lane: int) -> str:
        role = self.role_of(lane)
        has_several = role == self.roles[-1] or self.lanes.count(role) > 1
        return f"{role} {lane - self.lanes.index(role)}" if has_several else role

    def note(self, notes: NDArray[np.int32], name: str) -> Counts:
        """One word of each tile."""
        return notes[:, self.notes.index(name)].astype(np.int64)

    def codes(self, role: str, *marks: str) -> NDArray[np.int8]:
        """Codes of the states of these names: a step's are "step.Name", a tile's "tile.Name".

        Raises ValueError for a name that is none.
        """
        found = []
        for name in marks:
            part, _, mark = name.partition(".")
            low, high = (0, WORDS) if part == "tile" else (WORDS, 2 * WORDS)
            states = self.states[role]
            at = [c for c in range(low, min(high, len(states))) if states[c].mark == mark]
            if not at:
                raise ValueError(f"marks must be states of the {role}, got {name!r}")
            found += at
        return np.array(found, np.int8)

    def which(self, role: str, of_state: Any) -> NDArray[np.bool_]:
        """For each code of a role: whether `of_state` is true of its state."""
        return np.array([bool(of_state(state)) for state in self.states[role]])

    @abstractmethod
    def steps_of_tiles(self, notes: NDArray[np.int32], facts: Facts) -> Counts:
        """Steps of each tile."""

    @abstractmethod
    def own_steps(self, notes: NDArray[np.int32], facts: Facts) -> Counts:
        """Steps in which each consumer has work, of each tile: [tiles, consumers].

        Computed from the workload, not from marks.
        """

    def places(
        self, lane: int, tiles: Words, steps: Words, notes: NDArray[np.int32], facts: Facts
    ) -> Marks:
        """All places for marks of a lane, in the order of the program.

        `notes` has the tiles that were recorded whole; `tiles` may have one more row, for the last
        request, which got no tile.
        """
        found, role = Places(), self.role_of(lane)
        counts = self.steps_of_tiles(notes, facts)
        word, number = np.arange(len(self.tile_states[role]))[None], np.arange(len(tiles))[:, None]
        rows = Rows(word, number, np.zeros_like(number), tiles[:, : word.size])
        self.place_tiles(found, lane, rows, notes, facts)
        if counts.size and role in self.step_states:
            owner = np.repeat(np.arange(counts.size), counts)[:, None]
            inside = np.arange(owner.size)[:, None] - (np.cumsum(counts) - counts)[owner]
            word = np.arange(len(self.step_states[role]))[None]
            rows = Rows(word, owner, inside, steps[: owner.size, : word.size])
            self.place_steps(found, lane, rows, notes, facts)
        return found.in_order()

    @abstractmethod
    def place_tiles(
        self, found: Places, lane: int, rows: Rows, notes: NDArray[np.int32], facts: Facts
    ) -> None:
        """Adds the places of a lane's tiles; their steps are phase 1."""

    @abstractmethod
    def place_steps(
        self, found: Places, lane: int, rows: Rows, notes: NDArray[np.int32], facts: Facts
    ) -> None:
        """Adds the places of a lane's steps."""

    def steps_took(self, consumer: Any, mark: str) -> tuple[Counts, Counts]:
        """Cycles from one S to the next S of a tile, of steps without and with a mark."""
        issue = np.flatnonzero(consumer.of("step.IssueScores"))
        took = np.diff(consumer.begin[issue])
        same = np.diff(consumer.tile[issue]) == 0
        has = np.zeros(len(issue), bool)
        before = np.searchsorted(issue, np.flatnonzero(consumer.of(mark)), side="right") - 1
        has[before[before >= 0]] = True
        return took[same & ~has[:-1]], took[same & has[:-1]]

    @staticmethod
    def summed(consumer: Any, at: NDArray[np.bool_], by: NDArray[Any]) -> Counts:
        """Cycles of the states at `at`, a sum for each number of `by` that is among them."""
        total = np.bincount(by[at], consumer.cycles[at])
        return np.asarray(total[np.unique(by[at])], np.int64)

    @abstractmethod
    def costs(self, consumer: Any) -> dict[str, Counts]:
        """Cycles that parts of a tile take in the track of a consumer, one number each time."""

    @abstractmethod
    def step_floors(self, tile: Facts) -> dict[str, float]:
        """Least cycles that a step of all consumers takes: by "tensor_cores", by "exponentials"."""

    @abstractmethod
    def tile_facts(self, note: NDArray[np.int32], facts: Facts) -> dict[str, int]:
        """What a tile is, for a trace."""

    @abstractmethod
    def step_facts(self, note: NDArray[np.int32], step: int, facts: Facts) -> dict[str, int]:
        """What a step of a tile is, for a trace; the last entry names it in pictures."""
