"""Records of models in a result file, and the consistency checks on them.

A file may be truncated, edited or written by another version. Missing values and contradictions of
a record are reported before any of its numbers is used.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from attnscope.profile.analysis.invariants import SLACK_US
from attnscope.profile.analysis.kernel_names import CATEGORIES
from attnscope.profile.errors import ProfileError
from attnscope.studies.parts import FORWARD, OPTIMIZER, PARTS, PHASES

Record = dict[str, Any]
OUTSIDE = "(outside)"  # of the phases, or of the parts
ANY = "*"  # in a shape: every key

Leaf = Callable[[Any], bool]


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _count(value: Any) -> bool:
    return isinstance(value, int) and _number(value)


def _size(value: Any) -> bool:
    return _count(value) and value > 0


def _share(value: Any) -> bool:
    return _number(value) and value <= 1 + 1e-9


def _or_none(leaf: Leaf) -> Leaf:
    return lambda value: value is None or leaf(value)


def _one_of(*names: str) -> Leaf:
    return lambda value: value in names


_CONFIGURATION = {
    **dict.fromkeys(("model", "impl", "precision"), _text),
    **dict.fromkeys(("context", "batch", "parameters"), _size),
    **dict.fromkeys(("d_model", "d_ff", "layers", "heads", "vocabulary"), _size),
    "status": _one_of("ok", "skipped", "failed"),
    "reason": _or_none(_text),
}
_MEASURED = {
    "wall_ms": {ANY: [_number]},
    "no_backward": _or_none(_text),
    "no_kernels": _or_none(_text),
    "peak_memory_gib": _or_none(_number),
}
_PLACE = {"phase": _one_of(*PHASES, OUTSIDE), "part": _one_of(*PARTS, OUTSIDE)}
_TIMES = ("wall_us", "kernel_us", "busy_us", "span_us", "copy_us")
_KERNELS = {
    "total_us": _number,
    "owned": _share,
    "phases": {ANY: dict.fromkeys(_TIMES, _number) | {"kernels": _count}},
    "kernels": [
        _PLACE
        | {"kernel": _text, "category": _one_of(*CATEGORIES), "calls": _count}
        | {"total_us": _number}
    ],
    "flops": [_PLACE | {"flops": _or_none(_count), "reason": _or_none(_text)}],
    "softmax_flops": {ANY: _count},
    "efficiency": {
        "gpu_utilisation": _or_none(_share),
        "tensor_core_time_share": _or_none(_share),
    },
    "findings": [{"kind": _text, "title": _text}],
}


def check_configurations(rows: Sequence[Any]) -> None:
    """Raises ValueError if a row lacks its configuration or its status."""
    for number, row in enumerate(rows, 1):
        if wrong := _wrong(row, _CONFIGURATION, f"record {number}"):
            raise ValueError(f"not a file of models: {wrong}")


def checked(record: Record) -> Record:
    """The record; if it contradicts itself, with status "refused" and the reason."""
    if record["status"] != "ok":
        return record
    try:
        check_record(record)
    except ProfileError as error:
        return record | {"status": "refused", "reason": str(error)}
    return record


def check_record(record: Record) -> None:
    """Raises ProfileError for a record of status "ok" that is incomplete or contradicts itself."""
    name = f"{record['model']} {record['context']} {record['impl']}"
    if wrong := _wrong(record, _MEASURED, name):
        raise ProfileError(wrong)
    for phase in _phases(record):
        if not record["wall_ms"].get(phase) or min(record["wall_ms"][phase]) <= 0:
            raise ProfileError(f"{name}: {phase} has no wall time")
    if record["no_kernels"] is not None:
        return
    if wrong := _wrong(record, _KERNELS, name):
        raise ProfileError(wrong)
    _check_kernels(name, record)


def _check_kernels(name: str, record: Record) -> None:
    """Check that sums and parts of kernel time are consistent."""
    phases, rows = record["phases"], record["kernels"]

    def same(what: str, value: float, whole: float) -> None:
        if abs(value - whole) > SLACK_US:
            raise ProfileError(f"{name}: {what} is {value:.3f} us, it must be {whole:.3f} us")

    def within(what: str, part: float, whole: float) -> None:
        if part > whole + SLACK_US:
            raise ProfileError(f"{name}: {what}: {part:.3f} us of {whole:.3f} us")

    if not set(_phases(record)) <= set(phases):
        raise ProfileError(f"{name}: its phases are {', '.join(phases) or 'none'}")
    same("the sum of kernels", sum(row["total_us"] for row in rows), record["total_us"])
    kernel_us = sum(phase["kernel_us"] for phase in phases.values())
    within("the sum of the phases", kernel_us, record["total_us"])
    for key, phase in phases.items():
        mine = [row for row in rows if row["phase"] == key]
        same(f"the sum of {key} kernels", sum(row["total_us"] for row in mine), phase["kernel_us"])
        calls = sum(row["calls"] for row in mine)
        if calls != phase["kernels"]:
            raise ProfileError(f"{name}: {calls} {key} kernels in rows, {phase['kernels']} ran")
        if not phase["kernel_us"] or not all(row["calls"] for row in mine):
            raise ProfileError(f"{name}: {key} has kernels that did not run")
        within(f"{key}: busy of kernel time", phase["busy_us"], phase["kernel_us"])
        within(f"{key}: busy of span", phase["busy_us"], phase["span_us"])
        within(f"{key}: busy of its range", phase["busy_us"], phase["wall_us"])


def _phases(record: Record) -> tuple[str, ...]:
    return PHASES if record["no_backward"] is None else (FORWARD,)


def _wrong(value: Any, shape: Any, at: str) -> str | None:
    """Where a value does not match a shape, and the value there; None if it matches.

    A shape is a dict (these keys at least, or ANY), a list of one shape, or a Leaf.
    """
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return f"{at} is {value!r:.40}"
        each = dict.fromkeys(value, shape[ANY]) if ANY in shape else shape
        if lost := next((key for key in each if key not in value), None):
            return f"{at} lacks {lost!r}"
        parts = [_wrong(value[key], part, f"{at}: {key}") for key, part in each.items()]
    elif isinstance(shape, list):
        if not isinstance(value, list):
            return f"{at} is {value!r:.40}"
        parts = [_wrong(one, shape[0], f"{at} {i}") for i, one in enumerate(value)]
    else:
        return None if shape(value) else f"{at} is {value!r:.40}"
    return next(filter(None, parts), None)


def by_category(record: Record, phase: str | None = None) -> Counter[str]:
    """Microseconds of kernels by category, in a phase or in the whole step."""
    times: Counter[str] = Counter()
    for row in record["kernels"]:
        if phase in (None, row["phase"]):
            times[row["category"]] += row["total_us"]
    return times


def part_times(record: Record) -> Counter[str]:
    """Microseconds of forward and backward kernels by part; the optimizer is a part of its own."""
    times: Counter[str] = Counter()
    for row in record["kernels"]:
        part = OPTIMIZER if row["phase"] == OPTIMIZER else row["part"]
        times[part] += row["total_us"]
    return times
