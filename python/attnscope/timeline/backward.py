"""The marks of csrc/kernels/sm90_backward/marks.cuh: head dims up to 128."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.timeline.layout import (
    COMPUTE,
    EXPONENTIALS,
    ISSUE,
    LOAD_WAIT,
    OTHERS_WAIT,
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

KEYS = 64  # of a consumer
SCHEDULER, PRODUCER, WRITER = range(3)  # the first lanes of roles
WRITERS = 2
CONSUMER = WRITER + WRITERS

SCHEDULER_TILE = (
    State("AwaitSlot", "wait for a slot", SLOT_WAIT),
    State("Hand", "work it out, hand it out", ISSUE),
    State("AwaitRequest", "wait for the request", TILE_WAIT),
    State("Take", "take the next tile", ISSUE),
)
PRODUCER_TILE = (
    State("AwaitTile", "wait for a tile", TILE_WAIT),
    State("AwaitKSlot", "wait for a K slot", SLOT_WAIT),
    State("IssueK", "load K", ISSUE),
    State("AwaitVSlot", "wait for a V slot", SLOT_WAIT),
    State("IssueV", "load V", ISSUE),
)
PRODUCER_STEP = (
    State("AwaitSlot", "wait for a Q slot", SLOT_WAIT),
    State("IssueQ", "load Q", ISSUE),
    State("IssueDout", "load dO", ISSUE),
    State("AwaitKSlot", "wait for the K slot", SLOT_WAIT),
    State("IssueK", "load K late", ISSUE),
)
WRITER_TILE = (State("AwaitTile", "wait for a tile", TILE_WAIT),)
WRITER_STEP = (
    State("AwaitGradient", "wait for dQ", TILE_WAIT),
    State("Claim", "claim, wait for the first part", OTHERS_WAIT),
    State("Issue", "add or store dQ", ISSUE),
    State("AwaitRead", "wait until TMA has read", SLOT_WAIT),
    State("Publish", "publish the first part", OUTPUT),
)
SCORES, KEY_GRADIENTS, DQ = "S, dP", "dV, dK", "dQ"
CONSUMER_TILE = (
    State("AwaitTile", "wait for a tile", TILE_WAIT),
    State("AwaitK", "wait for K", LOAD_WAIT),
    State("AwaitScoreSlot", "wait for a dS slot", SLOT_WAIT),
    State("Store", "store dV, dK", OUTPUT),
    State("Sync", "meet the other warps", OTHERS_WAIT),
)


def consumer_step(early_values: bool) -> tuple[State, ...]:
    """The states of a step."""
    early = (KEY_GRADIENTS,) if early_values else ()
    return (
        State("AwaitOperands", "wait for Q, dO", LOAD_WAIT),
        State("IssueScores", "issue S, dP", ISSUE, (SCORES,), SCORES),
        State("AwaitScores", "wait for S", TENSOR_WAIT, (SCORES,)),
        State("Probabilities", "P", COMPUTE, (SCORES,)),
        State("IssueValues", "issue dV", ISSUE, (SCORES, KEY_GRADIENTS), KEY_GRADIENTS),
        State("AwaitDp", "wait for dP", TENSOR_WAIT, (SCORES, *early)),
        State("ScoreGradients", "dS", COMPUTE, early),
        State(
            "IssueKeys", "issue dK" if early else "issue dV, dK", ISSUE, (KEY_GRADIENTS,),
            "" if early else KEY_GRADIENTS,
        ),
        State("AwaitProducts", "wait for dV, dK", TENSOR_WAIT, (KEY_GRADIENTS,)),
        State("PassOver", "pass the step over", OUTPUT),
        State("AwaitOthers", "wait for dS of all", OTHERS_WAIT),
        State("IssueGradient", "issue dQ", ISSUE, (DQ,), DQ),
        State("AwaitGradientSlot", "wait for a dQ slot", SLOT_WAIT, (DQ,)),
        State("AwaitGradient", "wait for dQ", TENSOR_WAIT, (DQ,)),
        State("StageGradient", "stage dQ", OUTPUT),
    )  # fmt: skip


CONSUMER_STEP = consumer_step(True)
TILE_NOTES = ("first_head", "end_head", "batch", "first_key", "begin", "end", "start", "rows")

_STEP_MARKS = [state.mark for state in CONSUMER_STEP]
ISSUE_VALUES, PASS_OVER = (_STEP_MARKS.index(mark) for mark in ("IssueValues", "PassOver"))
TURN = range(_STEP_MARKS.index("AwaitOthers"), len(_STEP_MARKS))  # of the consumer at dQ
PUBLISH = [state.mark for state in WRITER_STEP].index("Publish")
LATE_K = [i for i, state in enumerate(PRODUCER_STEP) if state.mark in ("AwaitKSlot", "IssueK")]
EARLY_K = [i for i, state in enumerate(PRODUCER_TILE) if state.mark in ("AwaitKSlot", "IssueK")]
BESIDE_STORE = [i for i, s in enumerate(CONSUMER_TILE) if s.mark in ("AwaitScoreSlot", "Sync")]


def loads_k_late(tile: Facts) -> bool:
    """K has one buffer, and is loaded in the first step; `key_stages` of config.cuh."""
    return bool(tile["block_m"] % 64)


def has_early_values(tile: Facts) -> bool:
    """dV is issued before dS is computed; `early_values` of config.cuh."""
    return bool(tile["head_dim"] == 128 and tile["block_m"] == 64)


def stores_by_tma(tile: Facts) -> bool:
    """The end of a tile is one state, the store of dV and dK; `kStoresByTma` of shared.cuh."""
    return bool(tile["head_dim"] == 64)


class Backward(Layout):
    """Steps are blocks of queries, of each query head of the tile in turn."""

    mode = "backward"
    title = "Hopper backward"
    compute = "P, dS"
    notes = TILE_NOTES
    tile_states = {  # noqa: RUF012 (a constant)
        "scheduler": SCHEDULER_TILE,
        "producer": PRODUCER_TILE,
        "writer": WRITER_TILE,
        "consumer": CONSUMER_TILE,
    }
    costs_are = {  # noqa: RUF012
        "step": "a step without a turn at dQ, S to S",
        "step_turn": "a step with a turn at dQ",
        "turn": "the turn",
        "end": "the end of a tile: dV, dK",
        "between": "wait for the next tile",
    }

    def __init__(self, early_values: bool) -> None:
        self.early_values = early_values
        consumer = consumer_step(early_values)
        self.step_states = {"producer": PRODUCER_STEP, "writer": WRITER_STEP, "consumer": consumer}

    @cached_property
    def lanes(self) -> tuple[str, ...]:
        return ("scheduler", "producer", *["writer"] * WRITERS, "consumer")

    def steps_of_tiles(self, notes: NDArray[np.int32], facts: Facts) -> Counts:
        blocks = np.maximum(self.note(notes, "end") - self.note(notes, "begin"), 0)
        return blocks * self._heads(notes)

    def _heads(self, notes: NDArray[np.int32]) -> Counts:
        return self.note(notes, "end_head") - self.note(notes, "first_head")

    def _first_blocks(self, notes: NDArray[np.int32], facts: Facts) -> Counts:
        """The first block of queries that sees a key of each consumer, or one past the last."""
        work, tile = facts["workload"], facts["tile"]
        key = self.note(notes, "first_key")[:, None] + KEYS * np.arange(tile["consumers"])
        end = self.note(notes, "end")[:, None]
        if not work["causal"]:
            return np.where(key < work["seqlen_k"], self.note(notes, "begin")[:, None], end)
        query = np.maximum(key - (work["seqlen_k"] - work["seqlen_q"]), 0)
        return np.where(key < work["seqlen_k"], np.minimum(query // tile["block_m"], end), end)

    def own_steps(self, notes: NDArray[np.int32], facts: Facts) -> Counts:
        first = np.maximum(self._first_blocks(notes, facts), self.note(notes, "begin")[:, None])
        return np.maximum(self.note(notes, "end")[:, None] - first, 0) * self._heads(notes)[:, None]

    def _blocks(self, notes: NDArray[np.int32], tile: Any, inside: Any) -> Any:
        """The block of queries of step `inside` of a tile."""
        begin, end, start = (self.note(notes, name)[tile] for name in ("begin", "end", "start"))
        return begin + (start - begin + inside) % np.maximum(end - begin, 1)

    def place_tiles(
        self, found: Places, lane: int, rows: Rows, notes: NDArray[np.int32], facts: Facts
    ) -> None:
        word, number, _, marks = rows
        handed = number < len(notes)
        if lane == SCHEDULER:  # the request for no more tiles is not followed by one
            due = handed | (word < len(SCHEDULER_TILE) - 1)
        elif lane < CONSUMER:
            due = (handed & ~(np.isin(word, EARLY_K) & loads_k_late(facts["tile"]))) | (word == 0)
        else:
            one_state = stores_by_tma(facts["tile"])
            due = (handed & ~(np.isin(word, BESIDE_STORE) & one_state)) | (word == 0)
        phase = np.where(word < 2, 0, 2) if lane >= CONSUMER else 0
        found.add(marks, due, number, phase, 0, word, word, -1)

    def place_steps(
        self, found: Places, lane: int, rows: Rows, notes: NDArray[np.int32], facts: Facts
    ) -> None:
        word, tile, inside, marks = rows
        number = np.arange(len(tile))[:, None]  # of the step, in the thread block
        if lane == PRODUCER:
            due = ~np.isin(word, LATE_K) | ((inside == 0) & loads_k_late(facts["tile"]))
        elif lane < CONSUMER:
            due = (word != PUBLISH) | (marks != 0)
            due &= number % WRITERS == lane - WRITER
        else:
            consumer, consumers = lane - CONSUMER, facts["tile"]["consumers"]
            block = self._blocks(notes, tile, inside)
            sees = block >= self._first_blocks(notes, facts)[tile[:, 0], consumer][:, None]
            due = np.where(word == PASS_OVER, ~sees, sees)
            due &= (word != ISSUE_VALUES) | self.early_values
            due = np.where(np.isin(word, TURN), number % consumers == consumer, due)
        found.add(marks, due, tile, 1, inside, word, WORDS + word, inside)

    def costs(self, consumer: Any) -> dict[str, Counts]:
        """step, step_turn: from issuing S to issuing the next S of the tile, without and with a
        turn at dQ; turn: from waiting for the others to dQ in shared memory. end: from the last
        step of a tile until dV and dK are stored, or until TMA stores them. between: from there
        to taking the next tile.
        """
        step, step_turn = self.steps_took(consumer, "step.AwaitOthers")
        in_turn = consumer.of(*(f"step.{_STEP_MARKS[i]}" for i in TURN))
        number = np.cumsum(consumer.of("step.AwaitOthers"))
        ends = consumer.of("tile.AwaitScoreSlot", "tile.Store", "tile.Sync")
        return {
            "step": step,
            "step_turn": step_turn,
            "turn": self.summed(consumer, in_turn, number),
            "end": self.summed(consumer, ends, consumer.tile),
            "between": consumer.cycles[consumer.of("tile.AwaitTile")],
        }

    def step_floors(self, tile: Facts) -> dict[str, float]:
        scores = tile["consumers"] * KEYS * tile["block_m"]
        return {
            "tensor_cores": 10 * scores * tile["head_dim"] / TENSOR_FLOPS,
            "exponentials": scores / EXPONENTIALS,
        }

    def tile_facts(self, note: NDArray[np.int32], facts: Facts) -> dict[str, int]:
        first_head, _, batch, first_key, *_ = note.tolist()
        group = facts["workload"]["heads_q"] // facts["workload"]["heads_kv"]
        return {"batch": batch, "head_kv": first_head // group, "first_key": first_key}

    def step_facts(self, note: NDArray[np.int32], step: int, facts: Facts) -> dict[str, int]:
        notes = note[None]
        blocks = int(self.note(notes, "end")[0] - self.note(notes, "begin")[0])
        head = int(note[0]) + int(step) // max(blocks, 1)
        return {"head": head, "query_block": int(self._blocks(notes, 0, int(step)))}


EARLY, LATE = Backward(True), Backward(False)
