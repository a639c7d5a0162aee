"""A buffer of marks as the kernel writes it, made state by state with known durations."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnscope.timeline import forward, layout
from attnscope.timeline.forward import CONSUMER, FORWARD, PRODUCER, QUERIES, ROWS, SCHEDULER
from attnscope.timeline.layout import WORDS
from attnscope.timeline.recording import Recording, rows_of_block

TILE = {
    "head_dim": 128, "block_m": 128, "block_n": 128, "q_stages": 1, "stages": 2, "blocks_per_sm": 1,
    "consumers": 2, "scores_live": 1, "heads": 1,
}  # fmt: skip
FACTS: dict[str, Any] = {
    "workload": {
        "batch": 1, "seqlen_q": 8448, "seqlen_k": 8192, "heads_q": 4, "heads_kv": 4,
        "head_dim": 128, "head_dim_v": 128, "dtype": "bfloat16", "causal": True,
        "window": [-1, -1],
        "softcap": 0.0, "mode": "forward", "seqlens": None,
    },
    "tile": TILE,
    "env": {"gpu": "made up"},
    "disturbance": {
        "normal_ms": 1.0, "instrumented_ms": 1.05, "slowdown": 1.05, "same_output": True,
        "registers": 168, "spill_bytes": 12, "compile_s": 0.0,
    },
}  # fmt: skip
ORIGIN = 2**32 - 700  # so that the clock's low word wraps
# Cycles of each state; any other state takes 10.
CYCLES = {
    "Softmax": 500, "AwaitScores": 300, "AwaitOutput": 40, "Epilogue": 400, "Rescale": 20,
    "AwaitKSlot": 500, "AwaitVSlot": 300, "AwaitRequest": 900,
}  # fmt: skip
UNSEEING = 256  # first rows that see no key: more queries than keys
RAISED = 3  # the step of each tile whose row max increases, after a short softmax
TIMER, NS_PER_CYCLE = 5_000_000_000, 0.5


class Buffer:
    """One block's part of the buffer, with a clock for each lane."""

    def __init__(
        self, rows: np.ndarray, tile_rows: int, step_rows: int, lag: int,
        kernel: layout.Layout = FORWARD, known: dict[str, int] = CYCLES,
    ) -> None:  # fmt: skip
        self.kernel, self.known = kernel, known
        self.rows, self.tile_rows, self.step_rows = rows, tile_rows, step_rows
        self.lane_rows = tile_rows + step_rows + 3
        self.cycles = dict.fromkeys(range(CONSUMER + 4), lag)

    def clocks(self, row: int, cycles: int) -> None:
        clock, timer = ORIGIN + cycles, TIMER + int(cycles * NS_PER_CYCLE)
        for word, value in ((layout.CLOCK, clock), (layout.TIMER, timer)):
            self.rows[row, word : word + 2] = value & 0xFFFFFFFF, value >> 32

    def put(self, lane: int, part: str, number: int, mark: str, cycles: int | None = None) -> None:
        """The lane is in this state from now on, for `cycles`."""
        table = self.kernel.tile_states if part == "tile" else self.kernel.step_states
        word = [state.mark for state in table[self.kernel.role_of(lane)]].index(mark)
        self.rows[self.row(lane, part, number), word] = ORIGIN + self.cycles[lane] & 0xFFFFFFFF
        self.cycles[lane] += self.known.get(mark, 10) if cycles is None else cycles

    def row(self, lane: int, part: str, number: int) -> int:
        first = 1 + lane * self.lane_rows
        if part == "tile":
            return first + 1 + min(number, self.tile_rows)
        return first + 2 + self.tile_rows + min(number, self.step_rows)

    def finish(self, lane: int, tiles: int, steps: int) -> None:
        row = 1 + lane * self.lane_rows
        self.clocks(row, self.cycles[lane])
        self.rows[row, [layout.TILES, layout.STEPS]] = tiles, steps


# Marks of a consumer in a tile even if it has no key blocks; the last two come at the end.
ALWAYS = ("AwaitTile", "Prepare", "AwaitQ", "SkipFirst", "SkipLast", "Epilogue")
FIRST_BLOCK = ("AwaitK", "IssueScores", "AwaitScores", "Softmax", "AwaitNextK")
LAST_OUTPUT = ("AwaitLastV", "IssueOutput", "AwaitOutput")


def consume(b: Buffer, lane: int, blocks: list[int], skipped: list[int]) -> None:
    done = 0
    for tile, (count, skip) in enumerate(zip(blocks, skipped, strict=True)):
        own = count > skip
        for name in (*ALWAYS[:4], *(FIRST_BLOCK if own else ())):
            b.put(lane, "tile", tile, name)
        for step in range(skip + 1, count):
            for state in forward.CONSUMER_STEP:
                if state.mark == "RaiseMaximum" and step != RAISED:
                    continue
                raised = state.mark == "Softmax" and step == RAISED
                b.put(lane, "step", done + step, state.mark, 30 if raised else None)
        for name in (*(LAST_OUTPUT if own else ()), *ALWAYS[4:]):
            b.put(lane, "tile", tile, name)
        done += count
    b.put(lane, "tile", len(blocks), "AwaitTile")
    b.finish(lane, len(blocks), done)


def produce(b: Buffer, blocks: list[int]) -> None:
    done = 0
    for tile, count in enumerate(blocks):
        b.put(PRODUCER, "tile", tile, "AwaitTile")
        for step in range(count + 1):
            if step < count:
                b.put(PRODUCER, "step", done + step, "AwaitKSlot")
                b.put(PRODUCER, "step", done + step, "IssueK")
            if step > 0:
                b.put(PRODUCER, "step", done + step - 1, "AwaitVSlot")
                b.put(PRODUCER, "step", done + step - 1, "IssueV")
        done += count
    b.put(PRODUCER, "tile", len(blocks), "AwaitTile")
    b.finish(PRODUCER, len(blocks), done)


def load_queries(b: Buffer, blocks: list[int]) -> None:
    for tile in range(len(blocks)):
        for state in forward.QUERIES_TILE:
            b.put(QUERIES, "tile", tile, state.mark)
    b.put(QUERIES, "tile", len(blocks), "AwaitTile")
    b.finish(QUERIES, len(blocks), 0)


def schedule(b: Buffer, blocks: list[int], tile_size: dict[str, int]) -> None:
    for tile in range(len(blocks) + 1):  # the last request finds no tile
        for state in forward.SCHEDULER_TILE:
            if state.mark not in ("Take", "AwaitSlot") or tile > 0:
                b.put(SCHEDULER, "tile", tile, state.mark)
    for tile, count in enumerate(blocks):
        last = UNSEEING + tile_size["block_n"] * count  # one past the tile's last row
        row = b.row(SCHEDULER, "tile", tile)
        first_unit, end_unit = (last - tile_size["block_m"]) // ROWS, last // ROWS
        notes = tile, 0, first_unit, 0, count, 0, 99, end_unit
        b.rows[row, layout.NOTES : layout.NOTES + len(notes)] = notes
    b.finish(SCHEDULER, len(blocks), 0)


def words(
    blocks: list[list[int] | None], tile: dict[str, int], tile_rows: int, step_rows: int
) -> np.ndarray:
    """The buffer of a launch, from the key blocks of each thread block's tiles (None: not run).

    The last row of a tile sees the last key of its last block, each row before it one key less.
    """
    consumers = tile["consumers"]
    lanes = CONSUMER + consumers
    shape = (len(blocks), rows_of_block(lanes, tile_rows, step_rows), WORDS)
    buffer = np.zeros(shape, np.uint32)
    for number, tiles in enumerate(blocks):
        if tiles is None:
            continue
        b = Buffer(buffer[number], tile_rows, step_rows, lag=5)
        b.clocks(0, 0)
        b.rows[0, [layout.SM, layout.BEGAN]] = 100 + number, 1
        schedule(b, tiles, tile)
        produce(b, tiles)
        load_queries(b, tiles)
        for consumer in range(consumers):
            b.cycles[CONSUMER + consumer] += 150 * consumer
            unseen = 64 * (consumers - 1 - consumer) // tile["block_n"]
            skipped = [min(unseen, count) for count in tiles]
            consume(b, CONSUMER + consumer, tiles, skipped)
    return buffer


def recording(
    blocks: list[list[int] | None],
    consumers: int = 2,
    block_n: int | None = None,
    tile_rows: int = 8,
    step_rows: int = 64,
) -> Recording:
    """Tiles of 64 rows per consumer. By default block_n equals block_m, so no block is skipped."""
    rows = 64 * consumers
    tile = TILE | {"consumers": consumers, "block_m": rows, "block_n": block_n or rows}
    buffer = words(blocks, tile, tile_rows, step_rows)
    return Recording.from_words(
        buffer, CONSUMER + consumers, tile_rows, step_rows, FACTS | {"tile": tile}
    )
