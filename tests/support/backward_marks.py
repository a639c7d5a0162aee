"""A buffer of marks as the Hopper backward writes it, made state by state with known durations."""

from __future__ import annotations

from typing import Any

import numpy as np
import timeline_marks
from timeline_marks import Buffer

from attnscope.timeline import backward, layout
from attnscope.timeline.backward import CONSUMER, KEYS, PRODUCER, SCHEDULER, WRITER, WRITERS
from attnscope.timeline.layout import WORDS
from attnscope.timeline.layouts import layout_of
from attnscope.timeline.recording import Recording, rows_of_block

TILES = {
    "d128": {"row": 4, "head_dim": 128, "block_m": 64, "block_n": 128, "consumers": 2},
    "d128-long": {"row": 3, "head_dim": 128, "block_m": 80, "block_n": 128, "consumers": 2},
    "d64": {"row": 0, "head_dim": 64, "block_m": 64, "block_n": 192, "consumers": 3},
}
OWN_STEP = tuple(state.mark for state in backward.CONSUMER_STEP[: backward.PASS_OVER])
TURN = tuple(backward.CONSUMER_STEP[i].mark for i in backward.TURN)


# Cycles of each state; any other state takes 10.
CYCLES = {"Probabilities": 300, "ScoreGradients": 200, "AwaitScores": 100, "AwaitDp": 40}


def facts_of(name: str, causal: bool, seqlen_q: int, seqlen_k: int, group: int) -> dict[str, Any]:
    work = timeline_marks.FACTS["workload"] | {
        "mode": "backward", "causal": causal, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k,
        "heads_q": 2 * group, "heads_kv": 2, "head_dim": TILES[name]["head_dim"],
    }  # fmt: skip
    tile = TILES[name] | {"stages": 2, "blocks_per_sm": 1}
    return timeline_marks.FACTS | {"workload": work, "tile": tile}


def tiles_of(facts: dict[str, Any], group: int) -> list[tuple[int, ...]]:
    """The notes of all tiles of the first sequence's first key head, last keys first."""
    work, tile = facts["workload"], facts["tile"]
    blocks = -(-work["seqlen_q"] // tile["block_m"])
    notes = []
    for first in reversed(range(0, work["seqlen_k"], tile["block_n"])):
        begin = start = 0
        if work["causal"]:
            begin = max(first - (work["seqlen_k"] - work["seqlen_q"]), 0) // tile["block_m"]
            start = begin
        else:
            start = first // tile["block_m"] % blocks
        if begin < blocks:
            rows = min(tile["block_n"], work["seqlen_k"] - first)
            notes.append((0, group, 0, first, begin, blocks, start, rows))
    return notes


def recording(
    name: str = "d128", causal: bool = False, seqlen_q: int = 512, seqlen_k: int = 300,
    group: int = 1, tile_rows: int = 16, step_rows: int = 256,
) -> Recording:  # fmt: skip
    """One thread block that takes all tiles of a key head."""
    facts = facts_of(name, causal, seqlen_q, seqlen_k, group)
    kernel, tile = layout_of(facts), facts["tile"]
    notes = tiles_of(facts, group)
    lanes = CONSUMER + tile["consumers"]
    buffer = np.zeros((1, rows_of_block(lanes, tile_rows, step_rows), WORDS), np.uint32)
    b = Buffer(buffer[0], tile_rows, step_rows, 5, kernel, CYCLES)
    b.clocks(0, 0)
    b.rows[0, [layout.SM, layout.BEGAN]] = 100, 1
    steps = [(end - begin) * group for _, _, _, _, begin, end, *_ in notes]
    done = np.concatenate([[0], np.cumsum(steps)])
    for number in range(len(notes) + 1):
        for state in backward.SCHEDULER_TILE[: 4 if number < len(notes) else 3]:
            b.put(SCHEDULER, "tile", number, state.mark)
        if number < len(notes):
            row = b.row(SCHEDULER, "tile", number)
            b.rows[row, layout.NOTES : layout.NOTES + len(notes[number])] = notes[number]
    b.finish(SCHEDULER, len(notes), 0)
    _feed(b, notes, steps, done, backward.loads_k_late(tile))
    for consumer in range(tile["consumers"]):
        b.cycles[CONSUMER + consumer] += 50 * consumer
        _consume(b, consumer, notes, steps, done, facts, kernel.early_values)
    return Recording.from_words(buffer, lanes, tile_rows, step_rows, facts)


def _feed(b: Buffer, notes: list[Any], steps: list[int], done: Any, late: bool) -> None:
    for tile, count in enumerate(steps):
        for state in backward.PRODUCER_TILE:
            if not (late and state.mark in ("AwaitKSlot", "IssueK")):
                b.put(PRODUCER, "tile", tile, state.mark)
        for writer in range(WRITERS):
            b.put(WRITER + writer, "tile", tile, "AwaitTile")
        for step in range(count):
            for state in backward.PRODUCER_STEP[: 5 if late and step == 0 else 3]:
                b.put(PRODUCER, "step", done[tile] + step, state.mark)
            for state in backward.WRITER_STEP[: 5 if step % 3 == 0 else 4]:
                at = done[tile] + step
                b.put(WRITER + at % WRITERS, "step", at, state.mark)
    for lane in range(PRODUCER, CONSUMER):
        b.put(lane, "tile", len(notes), "AwaitTile")
        b.finish(lane, len(notes), int(done[-1]))


def _consume(
    b: Buffer, consumer: int, notes: list[Any], steps: list[int], done: Any, facts: dict[str, Any],
    early: bool,
) -> None:  # fmt: skip
    lane, work, tile = CONSUMER + consumer, facts["workload"], facts["tile"]
    for number, (_, _, _, first_key, begin, end, start, _) in enumerate(notes):
        b.put(lane, "tile", number, "AwaitTile")
        b.put(lane, "tile", number, "AwaitK")
        key = first_key + KEYS * consumer
        first_query = max(key - (work["seqlen_k"] - work["seqlen_q"]), 0) if work["causal"] else 0
        for step in range(steps[number]):
            block = begin + (start - begin + step) % (end - begin)
            at = int(done[number]) + step
            if key < work["seqlen_k"] and block >= first_query // tile["block_m"]:
                for mark in OWN_STEP:
                    if early or mark != "IssueValues":
                        b.put(lane, "step", at, mark)
            else:
                b.put(lane, "step", at, "PassOver")
            if at % tile["consumers"] == consumer:
                for mark in TURN:
                    b.put(lane, "step", at, mark)
        one_state = backward.stores_by_tma(tile)
        for mark in ("Store",) if one_state else ("AwaitScoreSlot", "Store", "Sync"):
            b.put(lane, "tile", number, mark)
    b.put(lane, "tile", len(notes), "AwaitTile")
    b.finish(lane, len(notes), int(done[-1]))
