"""The kernels that took the most time in a record, as a filter for ncu."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from attnscope.nsight.ncu_reader import Kernel


class Chosen(NamedTuple):
    """A kernel function, its total time in us, and its launches."""

    function: str
    total_us: float
    calls: int


def choose(path: Path, count: int, range_: str | None = None) -> list[Chosen]:
    """The `count` functions with the most GPU time in a record, inside a range where given.

    `path`: a folder, .sqlite or .nsys-rep of `attnscope nsys`, or a folder or profile.json of
    `attnscope profile`. Raises ValueError for anything else, and where the record has no kernels.
    """
    if count < 1:
        raise ValueError(f"top must be 1 or more, got {count}")
    record = path / "profile.json" if path.is_dir() else path
    if record.suffix == ".json" and record.is_file():
        rows = _from_profile(record, range_)
    else:
        rows = _from_nsys(path, range_)
    totals: dict[str, list[float]] = {}
    for name, total, calls in rows:
        sums = totals.setdefault(name, [0.0, 0])
        sums[0] += total
        sums[1] += calls
    if not totals:
        inside = f" in the range {range_}" if range_ else ""
        raise ValueError(f"top must be of a record with kernels{inside}, got none in {path}")
    longest = sorted(totals, key=lambda name: -totals[name][0])[:count]
    return [Chosen(name, totals[name][0], int(totals[name][1])) for name in longest]


def _from_profile(path: Path, range_: str | None) -> list[tuple[str, float, int]]:
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_text())["tables"]["kernels"]
        return [
            (Kernel(0, row["symbol"]).function, float(row["total_us"]), int(row["calls"]))
            for row in rows
            if range_ is None or _inside(range_, row.get("range"))
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"top must be of a profile.json of attnscope profile, got {path}: {error!r}"
        ) from None


def _inside(range_: str, path: str | None) -> bool:
    """Whether a range is on the path of ranges that a profile gives for a kernel."""
    return range_.partition("@")[0] in re.split(r"\s*[/,]\s*", path or "")


def _from_nsys(path: Path, range_: str | None) -> list[tuple[str, float, int]]:
    from attnscope.nsight.analysis import Analysis
    from attnscope.nsight.nsys import import_report

    reports = [path / f"report{suffix}" for suffix in (".sqlite", ".nsys-rep")]
    report = next((one for one in reports if one.is_file()), path)
    rows = Analysis(import_report(report), range_).kernel_rows()
    return [
        (Kernel(0, row["symbol"]).function, row["total ms"] * 1e3, row["count"]) for row in rows
    ]


def pattern(chosen: list[Chosen]) -> str:
    """A regular expression that matches exactly the functions chosen."""
    names = "|".join(re.escape(one.function) for one in chosen)
    return f"^({names})$"
