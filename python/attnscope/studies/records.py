"""What a report reads: the rows of a result file as typed records.

A file may be truncated, edited or written by another version. `load` reports a missing or wrong
value with its place; the numbers of GPU work must also agree with each other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from attnscope.profile.analysis.invariants import SLACK_US
from attnscope.profile.analysis.kernel_names import CATEGORIES
from attnscope.studies.parts import OPTIMIZER, OUTSIDE, PARTS, PHASES

Row = dict[str, Any]  # a record as it stands in the JSON file, or a row of a report's table
K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True)
class Bounds:
    """The numbers from `low` to `high`."""

    low: float
    high: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"at least {self.low:g}" + (
            f" and at most {self.high:g}" if math.isfinite(self.high) else ""
        )


@dataclass(frozen=True)
class OneOf:
    """Some words."""

    words: tuple[str, ...]

    def __contains__(self, value: str) -> bool:
        return value in self.words

    def __str__(self) -> str:
        return f"one of {', '.join(self.words)}"


Number = Annotated[float, Bounds(0)]
Count = Annotated[int, Bounds(0)]
Size = Annotated[int, Bounds(1)]
Share = Annotated[float, Bounds(0, 1 + 1e-9)]
Status = Annotated[str, OneOf(("ok", "wrong", "skipped", "failed"))]
Phase = Annotated[str, OneOf((*PHASES, OUTSIDE))]
Part = Annotated[str, OneOf((*PARTS, OUTSIDE))]
Category = Annotated[str, OneOf(CATEGORIES)]
_NAMES = {
    float: "a number",
    int: "an integer",
    str: "a text",
    bool: "true or false",
    list: "a list",
}


def load(kind: type[T], value: object, at: str) -> T:
    """A JSON value as a `kind`: a dataclass (other keys are ignored), list, dict, union with None,
    `Annotated` with bounds, float, int, str, bool or Any.

    Raises ValueError with the place, which begins with `at`.
    """
    found: T = _load(kind, value, at)
    return found


def _load(kind: Any, value: Any, at: str) -> Any:
    origin, of = get_origin(kind), get_args(kind)
    if origin is Annotated:
        found = _load(of[0], value, at)
        if found not in of[1]:
            raise ValueError(f"{at} must be {of[1]}, got {value!r:.40}")
        return found
    if origin in (Union, UnionType):
        return None if value is None else _load(of[0], value, at)
    if origin is list and isinstance(value, list):
        return [_load(of[0], item, f"{at} {number}") for number, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {key: _load(of[1], item, f"{at}: {key}") for key, item in value.items()}
    if is_dataclass(kind) and isinstance(value, dict):
        return _load_fields(kind, value, at)
    number = kind is float and type(value) in (int, float) and math.isfinite(value)
    if number or kind is Any or (kind in _NAMES and type(value) is kind):
        return value
    raise ValueError(f"{at} must be {_NAMES.get(origin or kind, 'an object')}, got {value!r:.40}")


def _load_fields(kind: Any, value: Mapping[str, Any], at: str) -> Any:
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        if field.name not in value and field.default is MISSING:
            raise ValueError(f"{at} must have the key {field.name}, got none")
    known = [field.name for field in fields(kind) if field.name in value]
    return kind(**{name: _load(hints[name], value[name], f"{at}: {name}") for name in known})


def total_by(pairs: Iterable[tuple[K, float]]) -> Counter[K]:
    """The sum of the numbers of each key."""
    total: Any = Counter()
    for key, number in pairs:
        total[key] += number
    return total


@dataclass(frozen=True, kw_only=True)
class PhaseTimes:
    """A phase, in microseconds: the range on the CPU (the wait for the device included), kernels,
    time with a kernel, first to last work, copies. `kernels`: how many ran."""

    wall_us: Number
    kernel_us: Number
    busy_us: Number
    span_us: Number
    copy_us: Number
    kernels: Count


@dataclass(frozen=True, kw_only=True)
class KernelTimes:
    """Kernels of one name in one place."""

    phase: Phase
    part: Part
    kernel: str
    category: Category
    tensor_cores: bool
    calls: Count
    total_us: Number


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs of one place; None with the reason."""

    phase: Phase
    part: Part
    flops: Count | None
    reason: str | None


@dataclass(frozen=True, kw_only=True)
class Use:
    """How well the GPU was used."""

    gpu_utilisation: Share | None
    tensor_core_time_share: Share | None


@dataclass(frozen=True, kw_only=True)
class Found:
    """A finding of the profiler."""

    kind: str
    title: str


@dataclass(frozen=True, kw_only=True)
class GpuWork:
    """The GPU side of one profiled region. Each kernel is in one row of `kernels`.

    Attributes:
        total_us: time of all kernels; `owned` is the share that ops own.
        phases: times of each phase.
        kernels: the longest first.
        softmax_flops: of the attention core, by phase.
    """

    total_us: Number
    owned: Share
    phases: dict[str, PhaseTimes]
    kernels: list[KernelTimes]
    flops: list[Flops]
    softmax_flops: dict[str, Count]
    efficiency: Use
    findings: list[Found]

    def by_category(self, phase: str | None = None) -> Counter[str]:
        """Microseconds of kernels by category, in a phase or in the whole step."""
        rows = [row for row in self.kernels if phase in (None, row.phase)]
        return total_by((row.category, row.total_us) for row in rows)

    def part_times(self) -> Counter[str]:
        """Microseconds of forward and backward kernels by part; the optimizer is its own part."""
        return total_by(
            (OPTIMIZER if row.phase == OPTIMIZER else row.part, row.total_us)
            for row in self.kernels
        )

    def check(self, at: str) -> None:
        """Raises ValueError if sums and parts of kernel time contradict each other."""
        _same(f"{at}: the sum of kernels", sum(k.total_us for k in self.kernels), self.total_us)
        kernel_us = sum(phase.kernel_us for phase in self.phases.values())
        _at_most(f"{at}: the sum of the phases", kernel_us, self.total_us)
        for name, phase in self.phases.items():
            own = [row for row in self.kernels if row.phase == name]
            here = f"{at}: {name}"
            _same(f"{here}: the sum of kernels", sum(k.total_us for k in own), phase.kernel_us)
            calls = sum(row.calls for row in own)
            if calls != phase.kernels:
                raise ValueError(
                    f"{here}: kernels must be {calls}, as in rows, got {phase.kernels}"
                )
            if not phase.kernel_us or not all(row.calls for row in own):
                raise ValueError(f"{here}: kernels must have run, got some without time or calls")
            limits = {"kernel": phase.kernel_us, "span": phase.span_us, "wall": phase.wall_us}
            for limit, whole_us in limits.items():
                _at_most(f"{here}: busy_us of {limit}_us", phase.busy_us, whole_us)


def _same(what: str, value: float, whole: float) -> None:
    if abs(value - whole) > SLACK_US:
        raise ValueError(f"{what} must be {whole:.3f} us, got {value:.3f} us")


def _at_most(what: str, part: float, whole: float) -> None:
    if part > whole + SLACK_US:
        raise ValueError(f"{what} must be at most {whole:.3f} us, got {part:.3f} us")
