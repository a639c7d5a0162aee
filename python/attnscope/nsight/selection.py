"""The kernels that took the most time in a record, as a filter for ncu."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from attnscope.nsight.ncu_reader import Kernel

FUNCTION, MANGLED = "function", "mangled"  # ncu's kernel name bases


class Chosen(NamedTuple):
    """A kernel: its name in a base of ncu, its total time in us, its launches, a readable name.

    In the base "function" all instances of a template are one kernel.
    """

    name: str
    base: str
    total_us: float
    calls: int
    shown: str


def choose(path: Path, count: int, range_: str | None = None) -> list[Chosen]:
    """The `count` kernels with the most GPU time in a record, inside a range where given.

    `path`: a folder, .sqlite or .nsys-rep of `attnscope nsys`, or a folder or profile.json of
    `attnscope profile`, which has no mangled names. Raises ValueError for anything else, and where
    the record has no kernels.
    """
    if count < 1:
        raise ValueError(f"top must be 1 or more, got {count}")
    record = path / "profile.json" if path.is_dir() else path
    if record.suffix == ".json" and record.is_file():
        rows = _from_profile(record, range_)
    else:
        rows = _from_nsys(path, range_)
    totals: dict[str, Chosen] = {}
    for one in rows:
        before = totals.get(one.name, one._replace(total_us=0.0, calls=0))
        totals[one.name] = before._replace(
            total_us=before.total_us + one.total_us, calls=before.calls + one.calls
        )
    if not totals:
        inside = f" in the range {range_}" if range_ else ""
        raise ValueError(f"top must be of a record with kernels{inside}, got none in {path}")
    return sorted(totals.values(), key=lambda one: -one.total_us)[:count]


def _chosen(symbol: str, total_us: float, calls: int, mangled: str = "") -> Chosen:
    kernel = Kernel(0, symbol)
    if mangled:
        return Chosen(mangled, MANGLED, total_us, calls, kernel.name)
    return Chosen(kernel.function, FUNCTION, total_us, calls, kernel.function)


def _from_profile(path: Path, range_: str | None) -> list[Chosen]:
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_text())["tables"]["kernels"]
        return [
            _chosen(row["symbol"], float(row["total_us"]), int(row["calls"]))
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


def _from_nsys(path: Path, range_: str | None) -> list[Chosen]:
    from attnscope.nsight.analysis import Analysis
    from attnscope.nsight.nsys import import_report

    reports = [path / f"report{suffix}" for suffix in (".sqlite", ".nsys-rep")]
    report = next((one for one in reports if one.is_file()), path)
    of = Analysis(import_report(report), range_)
    raw = {symbol: of.recording.name(key) for key, symbol in of.names.items()}
    if any(re.search(r"[\s(<]", name) for name in raw.values()):  # of an nsys without mangled names
        raw = {}
    return [
        _chosen(row["symbol"], row["total ms"] * 1e3, row["count"], raw.get(row["symbol"], ""))
        for row in of.kernel_rows()
    ]


def pattern(chosen: list[Chosen]) -> str:
    """A regular expression that matches exactly the kernels chosen."""
    names = "|".join(re.escape(one.name) for one in chosen)
    return f"^({names})$"
