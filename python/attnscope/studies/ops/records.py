"""Records of calls of ops: what the operator table has, and what other tools measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attnscope.studies.records import Count, Number, Row, Share, Status, load


@dataclass(frozen=True, kw_only=True)
class Op:
    """A row of the operator table, in microseconds, and PyTorch's own figure with the reason why it
    differs."""

    name: str
    calls: Count
    kernels: Count
    gpu_us: Number
    copy_us: Number
    kineto_us: Number | None
    explanation: str | None


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A tool's time of a call; see `reconcile.compare`."""

    tool: str
    median_us: Number | None
    p20_us: Number | None
    p80_us: Number | None
    samples: Count
    difference_us: float | None
    least_us: float | None
    most_us: float | None
    agrees: bool | None
    reason: str | None


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A criterion: its value, its limits, and whether it is met."""

    bar: str
    value: float | None
    least: float | None
    most: float | None
    met: bool


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A call, warm or the first of its process, and what became of it."""

    call: str
    start: str
    status: Status
    reason: str | None

    @property
    def key(self) -> Row:
        return {"call": self.call, "start": self.start}


@dataclass(frozen=True, kw_only=True)
class Measured(Attempt):
    """With its numbers, in microseconds of all `calls`; see `run.summarise`."""

    calls: Count
    rows: list[Op]
    row_us: Number
    copy_us: Number
    raw_us: Number
    raw_kernels: Count
    share: Share | None
    tools: list[Tool]
    bars: list[Bar]


def read_attempts(rows: Sequence[Row]) -> list[Attempt]:
    """The rows of a file. Raises ValueError for one that lacks a value."""
    return [
        load(Measured if row.get("status") == "ok" else Attempt, row, f"record {number}")
        for number, row in enumerate(rows, 1)
    ]
