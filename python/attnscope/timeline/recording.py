"""The marks of one launch, and their tracks: which role was in which state, and when."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.timeline import layout
from attnscope.timeline.layout import SCHEDULER, WORDS, Counts, Layout, Words
from attnscope.timeline.layouts import layout_of

REMEDY = "The reader and the kernel come from different sources: record again"
FORMAT = 4
ARRAYS = ("blocks", "head", "ends", "tiles", "steps")


@dataclass(frozen=True)
class Track:
    """States of one lane of one block, in program order; each ends where the next begins.

    codes: index into `layout.states[role]`. begin, end: SM cycles since the block began. tile:
    count of the tile in its block. step: number in the tile; -1 for states that belong to no step.
    """

    layout: Layout
    lane: int
    codes: NDArray[np.int8]
    begin: NDArray[np.int64]
    end: NDArray[np.int64]
    tile: NDArray[np.int32]
    step: NDArray[np.int32]

    @property
    def role(self) -> str:
        return self.layout.role_of(self.lane)

    @property
    def cycles(self) -> NDArray[np.int64]:
        return self.end - self.begin

    def of(self, *marks: str) -> NDArray[np.bool_]:
        """Where the state is one of these, written as "step.Softmax" or "tile.Epilogue"."""
        return np.isin(self.codes, self.layout.codes(self.role, *marks))

    def kind(self, kind: str) -> NDArray[np.bool_]:
        """Where the state has this kind."""
        return self.layout.which(self.role, lambda state: state.kind == kind)[self.codes]

    def flying(self, product: str = "") -> NDArray[np.bool_]:
        """Where this product is in flight; without a name any product."""
        return self.layout.which(
            self.role, lambda state: product in state.flying if product else state.flying
        )[self.codes]

    def begins(self, product: str) -> NDArray[np.bool_]:
        """Where the issue of this product begins."""
        return self.layout.which(self.role, lambda state: state.begins == product)[self.codes]


@dataclass(frozen=True)
class Recording:
    """Marks of the blocks of one launch; csrc/attn/timeline.cuh has the layout.

    blocks: the numbers of the blocks held. head [blocks, 16]; ends [blocks, lanes, 16]; tiles
    [blocks, lanes, tile_rows + 1, 16] and steps likewise, the last row of each being where the
    kernel puts what passes its capacity. facts: what was run, on what, JSON values.
    """

    blocks: NDArray[np.int32]
    head: Words
    ends: Words
    tiles: Words
    steps: Words
    facts: dict[str, Any]

    @classmethod
    def from_words(
        cls, words: Words, lanes: int, tile_rows: int, step_rows: int, facts: dict[str, Any]
    ) -> Recording:
        """From the kernel's buffer, uint32 [blocks, rows, 16] (`rows_of_block`)."""
        lane_rows = tile_rows + step_rows + 3
        ran = np.flatnonzero(words[:, 0, layout.BEGAN] == 1).astype(np.int32)
        words = words[ran]
        by_lane = words[:, 1:].reshape(len(ran), lanes, lane_rows, WORDS)
        tiles, steps = by_lane[:, :, 1 : tile_rows + 2], by_lane[:, :, tile_rows + 2 :]
        return cls(ran, words[:, 0], by_lane[:, :, 0], tiles, steps, facts)

    @property
    def layout(self) -> Layout:
        return layout_of(self.facts)

    @cached_property
    def tile_counts(self) -> NDArray[np.int64]:
        """Tiles that each lane of each block reports."""
        return self.ends[:, :, layout.TILES].astype(np.int64)

    @cached_property
    def step_counts(self) -> NDArray[np.int64]:
        """Steps that each lane of each block reports; the scheduler has none."""
        return self.ends[:, :, layout.STEPS].astype(np.int64)

    @property
    def lost_tiles(self) -> int:
        """Tiles of lanes that are incomplete because the buffer was full."""
        whole = [self._whole_tiles(at) for at in range(len(self.blocks))]
        return int((self.tile_counts - np.array(whole)).sum())

    @cached_property
    def clock_mhz(self) -> float | None:
        """SM clock during the launch; None if the device timer advanced too little."""
        cycles = nanoseconds = 0
        for block in range(len(self.blocks)):
            for lane in range(self.layout.consumer, self.ends.shape[1]):
                end, head = self.ends[block, lane], self.head[block]
                cycles += _wide(end, layout.CLOCK) - _wide(head, layout.CLOCK)
                nanoseconds += _wide(end, layout.TIMER) - _wide(head, layout.TIMER)
        return 1e3 * cycles / nanoseconds if nanoseconds > 0 else None

    @cached_property
    def begins_ns(self) -> NDArray[np.int64]:
        """When each block began, by the device timer, in ns since the first of them."""
        begins = np.array([_wide(row, layout.TIMER) for row in self.head], np.int64)
        return begins - begins.min()

    def place(self, block: int) -> int:
        """Index of block number `block`. Raises ValueError if it is not recorded."""
        (at,) = np.nonzero(self.blocks == block)
        if not len(at):
            raise ValueError(
                f"blocks must be among the {len(self.blocks)} recorded ones, "
                f"{self.blocks.min()} to {self.blocks.max()}, got {block}"
            )
        return int(at[0])

    def notes(self, at: int) -> NDArray[np.int32]:
        """What the scheduler noted of each recorded tile, [tiles, len(layout.notes)]."""
        count = min(int(self.tile_counts[at, SCHEDULER]), self.tiles.shape[2] - 1)
        notes = self.tiles[at, SCHEDULER, :count, layout.NOTES :].astype(np.int32)
        return notes[:, : len(self.layout.notes)]

    def steps_of_tiles(self, at: int) -> Counts:
        """Steps of each recorded tile."""
        return self.layout.steps_of_tiles(self.notes(at), self.facts)

    def own_steps(self, at: int) -> Counts:
        """Steps in which each consumer has work, of each recorded tile: [tiles, consumers]."""
        return self.layout.own_steps(self.notes(at), self.facts)

    def _whole_tiles(self, at: int) -> NDArray[np.int64]:
        """For each lane, the number of leading tiles that are recorded with all their steps."""
        fit = int((np.cumsum(self.steps_of_tiles(at)) <= self.steps.shape[2] - 1).sum())
        tiles = np.minimum(self.tile_counts[at], self.tiles.shape[2] - 1)
        steps = [self.layout.has_steps(lane) for lane in range(tiles.size)]
        tiles[steps] = np.minimum(tiles[steps], fit)
        return tiles

    def track(self, at: int, lane: int) -> Track:
        """The track of a lane of the block held at `at`, up to the last tile recorded whole.

        Raises ValueError where marks are missing, run backwards or disagree with the counts of the
        lane: then the reader and the kernel come from different sources.
        """
        whole, count = int(self._whole_tiles(at)[lane]), int(self.tile_counts[at, lane])
        stopped = whole == count
        name = f"{self.layout.lane_name(lane)} of block {self.blocks[at]}"
        expected = int(self.steps_of_tiles(at).sum())
        steps_done = self.step_counts[at, lane]
        if self.layout.has_steps(lane) and stopped and steps_done != expected:
            raise ValueError(
                f"recording: {name} must have the {expected} steps of its tiles, got "
                f"{steps_done}. {REMEDY}"
            )
        tiles, steps = self.tiles[at, lane, : whole + stopped], self.steps[at, lane]
        marks = self.layout.places(lane, tiles, steps, self.notes(at)[:whole], self.facts)
        wrong = np.flatnonzero(marks.due != (marks.mark != 0))
        if wrong.size:
            code, tile = marks.code[wrong[0]], marks.tile[wrong[0]]
            mark = self.layout.states[self.layout.role_of(lane)][code].mark
            rule, got = ("a", "none") if marks.due[wrong[0]] else ("no", "one")
            raise ValueError(
                f"recording: {name} must have {rule} mark {mark} in tile {tile}, got {got}. "
                f"{REMEDY}"
            )
        code, tile = marks.code[marks.due], marks.tile[marks.due]
        step, begin = marks.step[marks.due], self._cycles(at, marks.mark[marks.due])
        if stopped:
            end = np.append(begin[1:], self._cycles(at, self.ends[at, lane, layout.CLOCK]))
        elif whole < self.tiles.shape[2] - 1:
            end = np.append(begin[1:], self._cycles(at, self.tiles[at, lane, whole, 0]))
        else:  # when the last state ended is not known
            begin, end = begin[:-1], begin[1:]
            code, tile, step = code[:-1], tile[:-1], step[:-1]
        if (end < begin).any():
            raise ValueError(
                f"recording: marks of {name} must be in order, got earlier ones. {REMEDY}"
            )
        return Track(self.layout, lane, code, begin, end, tile, step)

    def tracks(self, at: int) -> list[Track]:
        return [self.track(at, lane) for lane in range(self.ends.shape[1])]

    def _cycles(self, at: int, marks: Any) -> NDArray[np.int64]:
        """32-bit clock readings as cycles since the block began."""
        origin = np.uint32(self.head[at, layout.CLOCK])
        return np.subtract(marks, origin, dtype=np.uint32).astype(np.int64)

    def select(self, blocks: Sequence[int]) -> Recording:
        """Only these blocks, and no more rows than they use."""
        at = [self.place(block) for block in blocks]
        rows = min(int(self.tile_counts[at].max()) + 1, self.tiles.shape[2] - 1)
        step_rows = min(int(self.step_counts[at].max()), self.steps.shape[2] - 1)
        tiles, steps = self.tiles[at, :, : rows + 1], self.steps[at, :, : step_rows + 1]
        return Recording(self.blocks[at], self.head[at], self.ends[at], tiles, steps, self.facts)

    def save(self, path: Path) -> None:
        arrays = {name: getattr(self, name) for name in ARRAYS}
        facts = json.dumps({"format": FORMAT, **self.facts}, allow_nan=False)
        np.savez_compressed(path, facts=np.array(facts), **arrays)

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Raises ValueError for a file that is no recording."""
        try:
            with np.load(path, allow_pickle=False) as held:
                facts = json.loads(str(held["facts"]))
                arrays = {name: held[name] for name in ARRAYS}
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise ValueError(
                f"recording must be a file of attnscope timeline, got {path}: {error}"
            ) from None
        if facts.pop("format", None) != FORMAT:
            raise ValueError(
                f"recording must be of format {FORMAT}, got another in {path}. Record again"
            )
        return cls(facts=facts, **arrays)


def rows_of_block(lanes: int, tile_rows: int, step_rows: int) -> int:
    """Rows of 16 words that the kernel's buffer has for each block."""
    return 1 + lanes * (tile_rows + step_rows + 3)


def _wide(row: Words, word: int) -> int:
    """The 64-bit number in two words."""
    return int(row[word]) | int(row[word + 1]) << 32
