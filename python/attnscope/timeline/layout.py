"""The meaning of the marks of csrc/kernels/sm90_forward/marks.cuh, in their order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

WORDS = 16  # uint32 of a row; see csrc/attn/timeline.cuh
ROWS = 64  # query rows of a consumer
SCHEDULER, PRODUCER, QUERIES, CONSUMER = range(4)  # lanes; consumers have all from the last on

# What a state is, for pictures and sums.
SOFTMAX = "softmax"
ISSUE = "issue"
TENSOR_WAIT = "wait for tensor cores"
LOAD_WAIT = "wait for loads"
TILE_WAIT = "wait for a tile"
SLOT_WAIT = "wait for a free slot"
OUTPUT = "rescale O, epilogue"
KINDS = (SOFTMAX, OUTPUT, ISSUE, TENSOR_WAIT, LOAD_WAIT, TILE_WAIT, SLOT_WAIT)


@dataclass(frozen=True)
class State:
    """What a role does from one mark to its next.

    `mark` is the name in marks.cuh without its k. `scores` and `output` say whether a product S or
    P V of this consumer has been issued and not yet been waited for.
    """

    mark: str
    label: str
    kind: str
    scores: bool = False
    output: bool = False


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
CONSUMER_TILE = (
    State("AwaitTile", "wait for a tile", TILE_WAIT),
    State("Prepare", "clear O", OUTPUT),
    State("AwaitQ", "wait for Q", LOAD_WAIT),
    State("SkipFirst", "skip others' first blocks", SLOT_WAIT),
    State("AwaitK", "wait for first K", LOAD_WAIT),
    State("IssueScores", "issue first S", ISSUE, scores=True),
    State("AwaitScores", "wait for first S", TENSOR_WAIT, scores=True),
    State("Softmax", "first softmax", SOFTMAX),
    State("AwaitNextK", "wait for second K", LOAD_WAIT),
    State("AwaitLastV", "wait for last V", LOAD_WAIT),
    State("IssueOutput", "issue last P V", ISSUE, output=True),
    State("AwaitOutput", "wait for last P V", TENSOR_WAIT, output=True),
    State("SkipLast", "skip others' last blocks", SLOT_WAIT),
    State("Epilogue", "epilogue", OUTPUT),
)
CONSUMER_STEP = (
    State("IssueScores", "issue S", ISSUE, scores=True),
    State("AwaitV", "wait for V", LOAD_WAIT, scores=True),
    State("IssueOutput", "issue P V", ISSUE, scores=True, output=True),
    State("AwaitScores", "wait for S", TENSOR_WAIT, scores=True, output=True),
    State("Softmax", "softmax", SOFTMAX, output=True),
    State("RaiseMaximum", "softmax by a new maximum", SOFTMAX, output=True),
    State("AwaitK", "wait for K", LOAD_WAIT, output=True),
    State("AwaitOutput", "wait for P V", TENSOR_WAIT, output=True),
    State("Rescale", "rescale O, pack P", OUTPUT),
)
# The scheduler's notes on a tile, from word NOTES on.
NOTES = 8
TILE_NOTES = (
    "head", "batch", "first_unit", "begin", "end", "full_begin", "full_end", "end_unit",
)  # fmt: skip

# Words of a block's row and of the end row of a lane.
SM, CLOCK, TIMER, TILES, STEPS = 0, 1, 3, 5, 6
BEGAN = TILES  # 1 in the row of a block that ran

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


TILE_STATES = {
    "scheduler": SCHEDULER_TILE,
    "producer": PRODUCER_TILE,
    "queries": QUERIES_TILE,
    "consumer": CONSUMER_TILE,
}
STEP_STATES = {
    "scheduler": (),
    "producer": PRODUCER_STEP,
    "queries": (),
    "consumer": CONSUMER_STEP,
}


def _codes(tile: tuple[State, ...], step: tuple[State, ...]) -> tuple[State, ...]:
    """States of a role: of a tile as their word, of a step as WORDS + their word."""
    gap = tuple(State("", "", "") for _ in range(WORDS - len(tile)))
    return (*tile, *gap, *step)


# State of each code of a track, by role.
STATES = {role: _codes(tile, STEP_STATES[role]) for role, tile in TILE_STATES.items()}


def role_of(lane: int) -> str:
    return list(TILE_STATES)[min(lane, CONSUMER)]


def has_steps(lane: int) -> bool:
    """Whether a lane marks steps besides tiles."""
    return bool(STEP_STATES[role_of(lane)])


def lane_name(lane: int) -> str:
    role = role_of(lane)
    return f"consumer {lane - CONSUMER}" if role == "consumer" else role


def codes(role: str, *marks: str) -> NDArray[np.int8]:
    """Codes of the states of these names; a step's are written "step.Name", a tile's "tile.Name".

    Raises ValueError for a name that is none.
    """
    found = []
    for name in marks:
        part, _, mark = name.partition(".")
        low, high = (0, WORDS) if part == "tile" else (WORDS, 2 * WORDS)
        states = STATES[role]
        at = [c for c in range(low, min(high, len(states))) if states[c].mark == mark]
        if not at:
            raise ValueError(f"marks must be states of the {role}, got {name!r}")
        found += at
    return np.array(found, np.int8)


def flags(role: str, field: str, value: object = True) -> NDArray[np.bool_]:
    """For each code of a role: whether this field of its state has the value."""
    return np.array([getattr(state, field) == value for state in STATES[role]])
