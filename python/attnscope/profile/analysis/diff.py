"""What changed between two profiles: stages, ops, kernels and categories that came, went or moved.

Two profiles of different lengths are compared step by step: all times are divided by the number of
steps, if both have steps and the numbers differ.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas

from attnscope.profile.analysis.kernel_names import category, short_name

if TYPE_CHECKING:
    from attnscope.profile.analysis.result import Result

SAME = 0.02  # relative change of a time up to which it is "same"
# Table of the difference -> table of a profile, its column of names, of time, of numbers.
SOURCES = {
    "stages": ("stages", "path", "gpu_self_us", "calls"),
    "operators": ("operators", "name", "self_gpu_us", "calls"),
    "kernels": ("kernels", "symbol", "total_us", "calls"),
}
TABLES = ("categories", *SOURCES)

Rows = dict[str, tuple[float, float]]  # name -> time in microseconds, calls


@dataclass(frozen=True)
class Side:
    """One of two profiles to compare.

    Attributes:
        name: how it is called in the output.
        steps: how many steps it has; 0 if it has none.
        tables: for each of TABLES, time and calls by name.
        faults: what forbids trust in its tables, None if nothing does.
    """

    name: str
    steps: int
    tables: Mapping[str, Rows]
    faults: str | None

    @property
    def total_us(self) -> float:
        return sum(us for us, _ in self.tables["kernels"].values())


@dataclass(frozen=True)
class Diff:
    """The change from `a` to `b`.

    Attributes:
        a, b: the two profiles.
        per_step: whether all times are divided by the number of steps.
        tables: for each of TABLES, a table with the columns name, a_us, b_us, change_us, ratio (b /
            a; missing if there is no time in a), share (of all changes of the table, growing and
            shrinking, in their sign), a_calls, b_calls, verdict ("came", "went", "more", "less",
            "same"). Largest change first.
    """

    a: Side
    b: Side
    per_step: bool
    tables: Mapping[str, pandas.DataFrame]

    @property
    def totals_us(self) -> tuple[float, float]:
        """The GPU times of the two, of one step if `per_step`."""
        a, b = (side.total_us / (side.steps if self.per_step else 1) for side in (self.a, self.b))
        return a, b


def side_of(result: Result, name: str) -> Side:
    """One side of a difference, from a profile."""
    records = {
        kind: result.table(table)[[key, time, calls]].to_dict("records")
        for kind, (table, key, time, calls) in SOURCES.items()
        if len(result.table(table))
    }
    steps = len(result.steps()) if result.has_ops else 0
    verdict = None if result.lint.trusted else result.lint.verdict
    return _side(name, records, steps, verdict)


def read_side(path: Path) -> Side:
    """One side of a difference, from a `profile.json` or the folder that contains it.

    Raises ValueError for a file that is not one.
    """
    file = path / "profile.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        tables = content["tables"]
        lint = content.get("lint") or {"trusted": content["incomplete"] is None}
        steps = len(tables.get("steps", ()))
        records = {kind: tables.get(table, []) for kind, (table, *_) in SOURCES.items()}
        why = lint.get("verdict", "INCOMPLETE")
        return _side(os.fspath(path), records, steps, None if lint["trusted"] else why)
    except OSError as error:
        raise ValueError(f"diff must name readable files, got {file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"diff must name traces or profile.json files, got {file}: {type(error).__name__}: "
            f"{error}"
        ) from None


def is_record(path: Path) -> bool:
    """Whether a path is a folder, or a file with the start of a `profile.json`."""
    if path.is_dir():
        return True
    with path.open("rb") as file:
        return b'"schema"' in file.read(64) and not path.name.endswith(".gz")


def _side(
    name: str, records: Mapping[str, Sequence[Mapping[str, Any]]], steps: int, faults: str | None
) -> Side:
    tables: dict[str, Rows] = {}
    for kind, (_, key, time, calls) in SOURCES.items():
        tables[kind] = {
            str(row[key]): (float(row[time]), float(row[calls])) for row in records.get(kind, ())
        }
    tables["categories"] = {}
    for symbol, (us, calls_) in tables["kernels"].items():
        before = tables["categories"].get(category(symbol), (0.0, 0.0))
        tables["categories"][category(symbol)] = (before[0] + us, before[1] + calls_)
    return Side(name, steps if steps > 1 else 0, tables, faults)


def difference(a: Side, b: Side) -> Diff:
    """The change from a to b."""
    per_step = bool(a.steps and b.steps and a.steps != b.steps)
    by = (a.steps, b.steps) if per_step else (1, 1)
    return Diff(a, b, per_step, {kind: _table(a, b, kind, by) for kind in TABLES})


def _table(a: Side, b: Side, kind: str, by: tuple[int, int]) -> pandas.DataFrame:
    one, two = a.tables[kind], b.tables[kind]
    rows = []
    for name in {**one, **two}:
        (us_a, calls_a), (us_b, calls_b) = one.get(name, (0.0, 0.0)), two.get(name, (0.0, 0.0))
        us_a, us_b = us_a / by[0], us_b / by[1]
        if not us_a and not us_b:
            continue
        rows.append(
            {
                "name": short_name(name) if kind == "kernels" else name,
                "a_us": us_a,
                "b_us": us_b,
                "change_us": us_b - us_a,
                "ratio": us_b / us_a if us_a else None,
                "a_calls": calls_a / by[0],
                "b_calls": calls_b / by[1],
                "verdict": _verdict(us_a, us_b),
            }
        )
    columns = "name a_us b_us change_us ratio share a_calls b_calls verdict".split()
    table = pandas.DataFrame(rows, columns=columns)
    moved = table["change_us"].abs().sum()
    table["share"] = table["change_us"] / moved if moved else 0.0
    order = table["change_us"].abs().sort_values(ascending=False, kind="stable").index
    return table.loc[order].reset_index(drop=True)


def _verdict(before: float, after: float) -> str:
    if not before or not after:
        return "went" if before else "came"
    if abs(after - before) <= SAME * before:
        return "same"
    return "more" if after > before else "less"
