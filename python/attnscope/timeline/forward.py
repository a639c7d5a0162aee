"""The marks of csrc/kernels/sm90_forward/marks.cuh."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.timeline.layout import (
    COMPUTE,
    EXPONENTIALS,
    ISSUE,
    LOAD_WAIT,
    OUTPUT,
    SLOT_WAIT,
    TENSOR_FLOPS,
    TENSOR_WAIT,
    TILE_WAIT,
    WORDS,
    Counts,
    Facts,
    Layout,
    Places,
    Rows,
    State,
)

ROWS = 64  # query rows of a consumer
SCHEDULER, PRODUCER, QUERIES, CONSUMER = range(4)  # lanes; consumers have all from the last on

SCHEDULER_TILE = (
    State("AwaitRequest", "wait for the request", TILE_WAIT),
    State("Take", "take the next tile", ISSUE),
    State("AwaitSlot", "wait for a slot", SLOT_WAIT),
    State("Hand", "work it out, hand it out", ISSUE),
)
PRODUCER_TILE = (State("AwaitTile", "wait for a tile", TILE_WAIT),)
PRODUCER_STEP = (
    State("AwaitKSlot", "wait for a K slot", SLOT_WAIT),
    State("IssueK", "load K", ISSUE),
    State("AwaitVSlot", "wait for a V slot", SLOT_WAIT),
    State("IssueV", "load V", ISSUE),
)
QUERIES_TILE = (
    State("AwaitTile", "wait for a tile", TILE_WAIT),
    State("AwaitSlot", "wait for a Q slot", SLOT_WAIT),
    State("Issue", "load Q as slots come free", ISSUE),
)
S, PV = "S", "P V"
CONSUMER_TILE = (
    State("AwaitTile", "wait for a tile", TILE_WAIT),
    State("Prepare", "clear O", OUTPUT),
    State("AwaitQ", "wait for Q", LOAD_WAIT),
    State("SkipFirst", "skip others' first blocks", SLOT_WAIT),
    State("AwaitK", "wait for first K", LOAD_WAIT),
    State("IssueScores", "issue first S", ISSUE, (S,), S),
    State("AwaitScores", "wait for first S", TENSOR_WAIT, (S,)),
    State("Softmax", "first softmax", COMPUTE),
    State("AwaitNextK", "wait for second K", LOAD_WAIT),
    State("AwaitLastV", "wait for last V", LOAD_WAIT),
    State("IssueOutput", "issue last P V", ISSUE, (PV,), PV),
    State("AwaitOutput", "wait for last P V", TENSOR_WAIT, (PV,)),
    State("SkipLast", "skip others' last blocks", SLOT_WAIT),
    State("Epilogue", "epilogue", OUTPUT),
)
CONSUMER_STEP = (
    State("IssueScores", "issue S", ISSUE, (S,), S),
    State("AwaitV", "wait for V", LOAD_WAIT, (S,)),
    State("IssueOutput", "issue P V", ISSUE, (S, PV), PV),
    State("AwaitScores", "wait for S", TENSOR_WAIT, (S, PV)),
    State("Softmax", "softmax", COMPUTE, (PV,)),
    State("RaiseMaximum", "softmax by a new maximum", COMPUTE, (PV,)),
    State("AwaitK", "wait for K", LOAD_WAIT, (PV,)),
    State("AwaitOutput", "wait for P V", TENSOR_WAIT, (PV,)),
    State("Rescale", "rescale O, pack P", OUTPUT),
)
TILE_NOTES = (
    "head", "batch", "first_unit", "begin", "end", "full_begin", "full_end", "end_unit",
)  # fmt: skip

# Optional marks; and the words of CONSUMER_TILE for a consumer's own key blocks: for the first one,
# which the steps follow, and for all of them.
_SCHEDULER_MARKS = [state.mark for state in SCHEDULER_TILE]
# The first tile of a thread block is described at its start.
NOT_FIRST = [_SCHEDULER_MARKS.index(mark) for mark in ("Take", "AwaitSlot")]
_STEP_MARKS = [state.mark for state in CONSUMER_STEP]
# A tile that looks at its sums late has the first after the second.
RAISE_MAXIMUM, AWAIT_K = (_STEP_MARKS.index(mark) for mark in ("RaiseMaximum", "AwaitK"))
_CONSUMER_MARKS = [state.mark for state in CONSUMER_TILE]
FIRST_BLOCK = range(_CONSUMER_MARKS.index("AwaitK"), _CONSUMER_MARKS.index("AwaitLastV"))
OWN_BLOCKS = range(_CONSUMER_MARKS.index("AwaitK"), _CONSUMER_MARKS.index("SkipLast"))


def heads_together(facts: Facts) -> int:
    """Query heads whose units of 64 rows share tiles; `heads_together` of config.cuh."""
    work, tile = facts["workload"], facts["tile"]
    alone = tile["heads"] > 1 or tile.get("heads_per_tile", 1) > 1
    return 1 if alone else int(work["heads_q"] // work["heads_kv"])


class Forward(Layout):
    """Steps are blocks of keys, from high keys to low."""

    mode = "forward"
    title = "Hopper forward"
    compute = "softmax"
    notes = TILE_NOTES
    tile_states = {  # noqa: RUF012 (a constant)
        "scheduler": SCHEDULER_TILE,
        "producer": PRODUCER_TILE,
        "queries": QUERIES_TILE,
        "consumer": CONSUMER_TILE,
    }
    step_states = {"producer": PRODUCER_STEP, "consumer": CONSUMER_STEP}  # noqa: RUF012
    costs_are = {  # noqa: RUF012
        "step": "a step, S to S",
        "step_raised": "a step with a new maximum",
        "begin": "a tile until its first step",
        "end": "a tile's last P V",
        "epilogue": "epilogue",
        "between": "wait for the next tile",
    }

    def steps_of_tiles(self, notes: NDArray[np.int32], facts: Facts) -> Counts:
        return np.maximum(self.note(notes, "end") - self.note(notes, "begin"), 0)

    def own_steps(self, notes: NDArray[np.int32], facts: Facts) -> Counts:
        # There is no window, so they are the last that the tile visits.
        work, tile = facts["workload"], facts["tile"]
        head, first_unit, end_unit = (
            self.note(notes, name)[:, None] for name in ("head", "first_unit", "end_unit")
        )
        parts = tile.get("key_parts", 1)
        number, part = np.divmod(np.arange(tile["consumers"]), parts)  # of the units of a tile
        of_head = number.size // parts // tile.get("heads_per_tile", 1)
        unit = first_unit + number % of_head
        first = ROWS * (unit // heads_together(facts))
        end = np.minimum(first + ROWS, work["seqlen_q"] * tile["heads"])
        head = head + number // of_head  # the last tile may lack a head
        end = np.where((unit < end_unit) & (head < work["heads_q"]), end, first)
        keys = work["seqlen_k"]
        if work["causal"]:
            queries = -(-end // tile["heads"])
            keys = np.clip(queries + work["seqlen_k"] - work["seqlen_q"], 0, keys)
        blocks = np.where(first < end, -(-keys // tile["block_n"]), 0)
        return (blocks + parts - 1 - part) // parts

    def _own(self, lane: int, notes: NDArray[np.int32], facts: Facts) -> tuple[Counts, Counts]:
        """Key blocks of each tile, and how many of them a consumer does not see."""
        blocks = self.steps_of_tiles(notes, facts)
        return blocks, blocks - self.own_steps(notes, facts)[:, lane - CONSUMER]

    def place_tiles(
        self, found: Places, lane: int, rows: Rows, notes: NDArray[np.int32], facts: Facts
    ) -> None:
        word, number, _, marks = rows
        handed = number < len(notes)
        if lane == SCHEDULER:
            due = ~np.isin(word, NOT_FIRST) | (number > 0)
            found.add(marks, due, number, 0, 0, word, word, -1)
        elif lane < CONSUMER:
            found.add(marks, handed | (word == 0), number, 0, 0, word, word, -1)
        else:
            blocks, skipped = self._own(lane, notes, facts)
            has_own = np.append(blocks > skipped, False)[number]
            due = np.where(np.isin(word, OWN_BLOCKS), has_own, handed | (word == 0))
            shown = np.where(np.isin(word, FIRST_BLOCK), np.append(skipped, 0)[number], -1)
            phase = np.where(word < FIRST_BLOCK.stop, 0, 2)
            found.add(marks, due, number, phase, 0, word, word, shown)

    def place_steps(
        self, found: Places, lane: int, rows: Rows, notes: NDArray[np.int32], facts: Facts
    ) -> None:
        word, tile, inside, marks = rows
        if lane == PRODUCER:  # V of a block comes in the round of the next block's K
            late = word >= 2
            order = np.where(late, 8, 0) + word
            found.add(marks, True, tile, 1, inside + late, order, WORDS + word, inside)
            return
        # The first block is marked as part of the tile.
        due = inside > self._own(lane, notes, facts)[1][tile]
        due = due & ((word != RAISE_MAXIMUM) | (marks != 0))
        place = np.broadcast_to(2 * word, marks.shape).copy()
        since = np.subtract(marks[:, RAISE_MAXIMUM], marks[:, AWAIT_K], dtype=np.uint32)
        place[since.view(np.int32) > 0, RAISE_MAXIMUM] = 2 * AWAIT_K + 1
        found.add(marks, due, tile, 1, inside, place, WORDS + word, inside)

    def costs(self, consumer: Any) -> dict[str, Counts]:
        """step: from issuing S to issuing the next S of the tile; step_raised: the same where the
        softmax was done by a new maximum (masked blocks always are). begin: from taking a tile to
        its first step; end: its last P V; epilogue: all three of tiles in which the consumer has
        key blocks of its own; between: from the end of one tile to taking the next.
        """
        step, step_raised = self.steps_took(consumer, "step.RaiseMaximum")
        own = np.isin(consumer.tile, consumer.tile[consumer.of("tile.IssueScores")])

        def by_tile(*marks: str) -> Counts:
            return self.summed(consumer, consumer.of(*marks) & own, consumer.tile)

        begins = [f"tile.{state.mark}" for state in CONSUMER_TILE[1 : FIRST_BLOCK.stop]]
        return {
            "step": step,
            "step_raised": step_raised,
            "begin": by_tile(*begins),
            "end": by_tile("tile.AwaitLastV", "tile.IssueOutput", "tile.AwaitOutput"),
            "epilogue": by_tile("tile.Epilogue"),
            "between": consumer.cycles[consumer.of("tile.AwaitTile")],
        }

    def step_floors(self, tile: Facts) -> dict[str, float]:
        scores = tile["consumers"] * ROWS * tile["block_n"]
        return {
            "tensor_cores": 4 * scores * tile["head_dim"] / TENSOR_FLOPS,
            "exponentials": scores / EXPONENTIALS,
        }

    def tile_facts(self, note: NDArray[np.int32], facts: Facts) -> dict[str, int]:
        head, batch, unit, *_ = note.tolist()
        return {"batch": batch, "head": head, "first_row": ROWS * (unit // heads_together(facts))}

    def step_facts(self, note: NDArray[np.int32], step: int, facts: Facts) -> dict[str, int]:
        return {"key_block": int(note[TILE_NOTES.index("end")]) - 1 - int(step)}


FORWARD = Forward()
