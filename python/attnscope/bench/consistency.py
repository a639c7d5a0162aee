"""Rows that contradict themselves, and remarks on rows that do not.

`contradictions` makes `compare` refuse a file; `remarks` are shown beside a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

Row = Mapping[str, Any]
DRIFT = 0.03  # from the first to the last third of the samples
_SAME = 1e-6  # relative; both numbers come from the same division or median
# The gate's rule for a whole result, for rows without a margin: C_FORWARD times the baseline's
# error plus ulps of the dtype. A row's magnitude is not in the file; no output reaches 16.
_ERROR_RATIO = 2.0
_ERROR_FLOOR = {
    "bfloat16": 16 * 2.0**-7,
    "float16": 16 * 2.0**-10,
    "float32": 16 * 64 * 2.0**-23,
    "float64": 16 * 512 * 2.0**-52,
}


def contradictions(row: Row) -> list[str]:
    """Contradictions in a row, as sentences; empty for a row without a time."""
    if row["status"] != "ok" or row.get("median_ms") is None:
        return []
    return [*_of_times(row), *_of_errors(row)]


def _of_times(row: Row) -> list[str]:
    median, samples = row["median_ms"], row.get("samples_ms") or []
    if not _is_number(median) or median <= 0:
        return [f"median_ms must be above 0, got {median!r}"]
    if not isinstance(samples, list) or not all(_is_number(ms) and ms > 0 for ms in samples):
        wrong = samples if not isinstance(samples, list) else _first_wrong(samples)
        return [f"samples_ms must be above 0, got {wrong!r}"]
    found = []
    middle = float(np.median(samples)) if samples else median
    if not _close(median, middle):
        found.append(f"median_ms must be the median of samples_ms ({middle:.6g}), got {median:.6g}")
    low, high = row.get("p20_ms"), row.get("p80_ms")
    if _is_number(low) and _is_number(high) and not low <= median <= high:
        found.append(f"median_ms must be between p20_ms and p80_ms, got {low}, {median}, {high}")
    flops, rate = row.get("flops"), row.get("tflops")
    if _is_number(flops) and _is_number(rate) and not _close(rate, flops / median * 1e-9):
        found.append(f"tflops must be flops / median_ms ({flops / median * 1e-9:.6g}), got {rate}")
    return found


def _of_errors(row: Row) -> list[str]:
    margin, ratio = row.get("margin"), row.get("err_ratio")
    worst, base = row.get("max_abs_err"), row.get("baseline_err")
    if _is_number(margin) and margin > 1:
        return [f"margin must be at most 1 where status is ok, got {margin:.6g}"]
    if not _is_number(ratio) or ratio <= _ERROR_RATIO:
        return []
    if row.get("mode", "forward") != "forward" and _is_number(margin):
        return []  # gradients may be larger than 16
    if not _is_number(worst) or not _is_number(base):
        return [f"err_ratio must be at most {_ERROR_RATIO:g} where status is ok, got {ratio:.6g}"]
    if not _close(ratio * base, worst):
        return [f"err_ratio must be max_abs_err / baseline_err, got {ratio:.6g}"]
    if worst > _ERROR_RATIO * base + _ERROR_FLOOR.get(row["dtype"], 0.0):
        return [f"max_abs_err must be within the gate where status is ok, got {worst:.6g}"]
    return []


def drift(samples: Sequence[float]) -> float:
    """Change of the median from the first to the last third of the samples, as a share."""
    third = len(samples) // 3
    if third < 1:
        return 0.0
    return float(np.median(samples[-third:]) / np.median(samples[:third])) - 1


def drifts(row: Row) -> bool:
    """Whether a row's samples change by more than DRIFT."""
    return abs(drift(row.get("samples_ms") or [])) > DRIFT


def remarks(row: Row | None) -> list[str]:
    """What casts doubt on a row's time, in a few words each."""
    if row is None or row["status"] != "ok":
        return []
    found = []
    if row.get("throttled"):
        found.append("throttled")
    if drifts(row):
        found.append(f"drifts {drift(row['samples_ms']):+.1%}")
    host, median = row.get("host_us"), row.get("median_ms")
    if _is_number(host) and _is_number(median) and host > median * 1e3:
        found.append(f"host late: {host:.0f} us to enqueue")
    return found


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _first_wrong(samples: Sequence[Any]) -> Any:
    return next(ms for ms in samples if not _is_number(ms) or ms <= 0)


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_SAME)
