"""The marks of one launch, and the tracks they make: which role was in which state, and when."""

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
from attnscope.timeline.layout import CONSUMER, PRODUCER, SCHEDULER, WORDS

Words = NDArray[np.uint32]
FORMAT = 1
ARRAYS = ("blocks", "head", "ends", "tiles", "steps")


@dataclass(frozen=True)
class Track:
    """States of one lane of one block, in program order; each ends where the next begins.

    codes: index into `layout.STATES[role]`. begin, end: SM cycles since the block began. tile:
    count of the tile in its block. step: key blocks of the tile before this one; -1 for states
    that belong to no key block.
    """

    lane: int
    codes: NDArray[np.int8]
    begin: NDArray[np.int64]
    end: NDArray[np.int64]
    tile: NDArray[np.int32]
    step: NDArray[np.int32]

    @property
    def role(self) -> str:
        return layout.role_of(self.lane)

    @property
    def cycles(self) -> NDArray[np.int64]:
        return self.end - self.begin

    def of(self, *marks: str) -> NDArray[np.bool_]:
        """Where the state is one of these, written as "step.Softmax" or "tile.Epilogue"."""
        return np.isin(self.codes, layout.codes(self.role, *marks))

    def flag(self, field: str, value: object = True) -> NDArray[np.bool_]:
        """Where a field of the state (`layout.State`) has this value."""
        return layout.flags(self.role, field, value)[self.codes]


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

    @cached_property
    def tile_counts(self) -> NDArray[np.int64]:
        """Tiles that each lane of each block says it did."""
        return self.ends[:, :, layout.TILES].astype(np.int64)

    @cached_property
    def step_counts(self) -> NDArray[np.int64]:
        """Key blocks that each lane of each block says it did; the scheduler has none."""
        return self.ends[:, :, layout.STEPS].astype(np.int64)

    @property
    def lost_tiles(self) -> int:
        """Tiles of lanes that were not recorded whole, for want of room in the buffer."""
        whole = [self._whole_tiles(at) for at in range(len(self.blocks))]
        return int((self.tile_counts - np.array(whole)).sum())

    @cached_property
    def clock_mhz(self) -> float | None:
        """SM clock during the launch; None where the device timer did not move enough to tell."""
        cycles = nanoseconds = 0
        for block in range(len(self.blocks)):
            for lane in range(CONSUMER, self.ends.shape[1]):
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
        """Where block number `block` is held. Raises ValueError if it is not."""
        (at,) = np.nonzero(self.blocks == block)
        if not len(at):
            raise ValueError(
                f"blocks: {block} is not recorded; there are {len(self.blocks)}, "
                f"{self.blocks.min()} to {self.blocks.max()}"
            )
        return int(at[0])

    def notes(self, at: int) -> NDArray[np.int32]:
        """What the scheduler noted of each recorded tile, [tiles, len(layout.TILE_NOTES)]."""
        count = min(int(self.tile_counts[at, SCHEDULER]), self.tiles.shape[2] - 1)
        notes = self.tiles[at, SCHEDULER, :count, layout.NOTES :].astype(np.int32)
        return notes[:, : len(layout.TILE_NOTES)]

    def key_blocks(self, at: int) -> NDArray[np.int64]:
        """Key blocks of each recorded tile."""
        begin, end = (layout.TILE_NOTES.index(name) for name in ("begin", "end"))
        notes = self.notes(at).astype(np.int64)
        return np.maximum(notes[:, end] - notes[:, begin], 0)

    def _whole_tiles(self, at: int) -> NDArray[np.int64]:
        """Of each lane, how many tiles from the first are recorded with all their steps."""
        fit = int((np.cumsum(self.key_blocks(at)) <= self.steps.shape[2] - 1).sum())
        tiles = np.minimum(self.tile_counts[at], self.tiles.shape[2] - 1)
        tiles[PRODUCER:] = np.minimum(tiles[PRODUCER:], fit)
        return tiles

    def track(self, at: int, lane: int) -> Track:
        """The track of a lane of the block held at `at`, up to the last tile recorded whole.

        Raises ValueError where marks run backwards or disagree with the counts of the lane: then
        the reader and the kernel are not of the same sources.
        """
        whole = int(self._whole_tiles(at)[lane])
        count = int(self.tile_counts[at, lane])
        blocks = self.key_blocks(at)
        if lane >= PRODUCER and whole == count and self.step_counts[at, lane] != blocks.sum():
            raise ValueError(
                f"recording: {layout.lane_name(lane)} of block {self.blocks[at]} did "
                f"{self.step_counts[at, lane]} steps, its tiles have {blocks.sum()}"
            )
        keys, codes, tile, step, marks = _in_order(
            layout.role_of(lane), self.tiles[at, lane], self.steps[at, lane], blocks[:whole], whole
        )
        order = np.lexsort(keys[::-1])
        order = order[marks[order] != 0]
        begin = self._cycles(at, marks[order])
        codes, tile, step = codes[order], tile[order], step[order]
        done = int(self._cycles(at, self.ends[at, lane, layout.CLOCK]))
        if whole < self.tiles.shape[2] - 1:
            following = self._cycles(at, self.tiles[at, lane, whole, 0])
            end = np.append(begin[1:], following)
            if whole == count:  # the wait for a tile that never came
                begin, end = np.append(begin, following), np.append(end, done)
                codes, tile, step = np.append(codes, 0), np.append(tile, whole), np.append(step, -1)
        elif whole == count:
            end = np.append(begin[1:], done)
        else:  # when the last state ended is not known
            begin, end = begin[:-1], begin[1:]
            codes, tile, step = codes[:-1], tile[:-1], step[:-1]
        if (end < begin).any():
            raise ValueError(
                f"recording: marks of {layout.lane_name(lane)} of block {self.blocks[at]} run "
                "backwards"
            )
        return Track(lane, codes.astype(np.int8), begin, end, tile, step)

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
            raise ValueError(f"recording: {path} is no recording: {error}") from None
        if facts.pop("format", None) != FORMAT:
            raise ValueError(f"recording: {path} has another format; this reads format {FORMAT}")
        return cls(facts=facts, **arrays)


def rows_of_block(lanes: int, tile_rows: int, step_rows: int) -> int:
    """Rows of 16 words that the kernel's buffer has for each block."""
    return 1 + lanes * (tile_rows + step_rows + 3)


def _wide(row: Words, word: int) -> int:
    """The 64-bit number in two words."""
    return int(row[word]) | int(row[word + 1]) << 32


def _in_order(
    role: str, tiles: Words, steps: Words, blocks: NDArray[np.int64], whole: int
) -> tuple[tuple[NDArray, ...], NDArray, NDArray, NDArray, NDArray]:
    """Marks of a lane's first `whole` tiles, and keys that sort them in the order of the program.

    Returns the keys, most significant first, then codes, tiles, steps and marks.
    """
    parts: list[tuple[Any, ...]] = []  # tile, phase, step, word, code, shown step, mark

    def add(
        tile: Any, phase: Any, step: Any, word: Any, code: Any, shown: Any, mark: Words
    ) -> None:
        columns = (tile, phase, step, word, code, shown, mark)
        parts.append(tuple(np.broadcast_to(c, mark.shape).ravel() for c in columns))

    number = np.arange(whole)[:, None]
    if role == "scheduler":
        word = np.arange(len(layout.SCHEDULER_TILE))[None]
        add(number, 0, 0, word, word, -1, tiles[:whole, : word.size])
        blocks = blocks[:0]
    elif role == "producer":
        word = np.arange(len(layout.PRODUCER_TILE))[None]
        # Q is asked for after the first K.
        add(number, np.where(word > 0, 1, 0), 0, np.where(word > 0, 2, 0) + word, word, -1,
            tiles[:whole, : word.size])  # fmt: skip
    else:
        word = np.arange(len(layout.CONSUMER_TILE))[None]
        shown = np.where(blocks[:whole, None] > 0, 0, -1)
        first = (word >= 4) & (word <= layout.FIRST_STEPS)
        add(number, np.where(word > layout.FIRST_STEPS, 2, 0), 0, word, word,
            np.where(first, shown, -1), tiles[:whole, : word.size])  # fmt: skip

    if blocks.size:
        owner = np.repeat(np.arange(blocks.size), blocks)[:, None]
        inside = (
            np.arange(owner.size)[:, None] - np.repeat(np.cumsum(blocks) - blocks, blocks)[:, None]
        )
        held = steps[: owner.size]
        if role == "producer":
            word = np.arange(len(layout.PRODUCER_STEP))[None]
            late = word >= 2  # V of a block comes in the round of the next block's K
            add(owner, 1, inside + late, np.where(late, 8, 0) + word, WORDS + word, inside,
                held[:, : word.size])  # fmt: skip
        else:
            word = np.arange(len(layout.CONSUMER_STEP))[None]
            later = held[:, : word.size].copy()
            later[inside[:, 0] == 0] = 0  # the first block is marked as part of the tile
            add(owner, 1, inside, word, WORDS + word, inside, later)
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    *keys, code, shown, mark = columns
    return tuple(keys), code.astype(np.int8), keys[0].astype(np.int32), shown.astype(np.int32), mark
