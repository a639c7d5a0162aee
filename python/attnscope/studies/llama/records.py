"""Records of the Hugging Face model: an implementation in a mode, with times, with GPU work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from attnscope.studies.records import Count, GpuWork, Number, Row, Size, Status, load


@dataclass(frozen=True, kw_only=True)
class Logits:
    """The logits of an implementation, compared with fp64; see `run.check_logits`."""

    status: Status
    reason: str | None
    max_abs_err: Number | None = None
    baseline_err: Number | None = None
    margin: Number | None = None
    rms_ratio: Number | None = None


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """An implementation of attention in a mode, and what became of it."""

    impl: str
    mode: str
    layers: Size
    hidden: Size
    heads: Size
    kv_heads: Size
    vocabulary: Size
    batch: Size
    context: Size
    parameters: Size
    check: Logits
    status: Status
    reason: str | None

    @property
    def key(self) -> Row:
        return {"attention": self.impl, "pass": self.mode}

    @property
    def label(self) -> str:
        return f"{self.impl}, {self.mode}"


@dataclass(frozen=True, kw_only=True)
class Operator:
    """A row of the profile's table of operators, in microseconds of all passes."""

    name: str
    calls: Count
    self_gpu_us: Number
    gpu_us: Number
    tflops: Number | None


@dataclass(frozen=True, kw_only=True)
class Symbol:
    """A row of its table of kernels."""

    kernel: str
    symbol: str
    calls: Count
    total_us: Number
    mean_us: Number | None
    op: str | None


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A row of its table of stages."""

    range: str
    path: str
    depth: Count
    calls: Count
    wall_us: Number
    gpu_us: Number
    gpu_self_us: Number
    kernels: Count


@dataclass(frozen=True, kw_only=True)
class TimedAttempt(Attempt):
    """With the times of passes: `wall_ms` without the profiler, and tables of the profile.
    `no_kernels` is a reason."""

    wall_ms: list[Number]
    peak_memory_gib: Number | None
    profiled_ms: Number
    attribution: str
    no_kernels: str | None
    sm_clock_mhz: Number | None
    operators: list[Operator]
    symbols: list[Symbol]
    stages: list[Stage]

    @property
    def wall(self) -> float:
        """The median, in milliseconds."""
        return median(self.wall_ms)


@dataclass(frozen=True, kw_only=True)
class ProfiledAttempt(TimedAttempt, GpuWork):
    """With the GPU work of the profiled passes, all together."""


def read_attempts(rows: Sequence[Row]) -> list[Attempt]:
    """The rows of a file. Raises ValueError for one that lacks a value."""
    found = []
    for number, row in enumerate(rows, 1):
        kind: type[Attempt] = Attempt
        if row.get("status") == "ok":
            kind = ProfiledAttempt if row.get("no_kernels") is None else TimedAttempt
        found.append(load(kind, row, f"record {number}"))
    return found
