"""The difference of two profiles: in the terminal, as Markdown, as JSON."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from attnscope.common.console import say
from attnscope.profile.analysis.diff import Diff
from attnscope.profile.render.document import rows_of
from attnscope.profile.render.table import (
    Column,
    count,
    duration,
    percent,
    plain,
    print_table,
    unit_of,
)

TITLES = {
    "categories": "Categories of kernels",
    "stages": "Stages, by their own GPU time",
    "operators": "Operators, by their own GPU time",
    "kernels": "Kernels",
}


def summary(diff: Diff) -> str:
    """The change of the GPU time, as one line."""
    a, b = diff.totals_us
    of = " a step" if diff.per_step else ""
    change = f"{(b - a) / a:+.1%}" if a else "from none"
    return f"GPU time{of}: {duration(a)} -> {duration(b)} ({change}); {_largest(diff)}"


def _largest(diff: Diff) -> str:
    table = diff.tables["operators"]
    if not len(table) or not table["change_us"].abs().max():
        return "no op changed"
    row = table.iloc[0]
    how = {"came": "came with", "went": "went with"}.get(row["verdict"], "changed by")
    us = row["change_us"] if how == "changed by" else abs(row["change_us"])
    return f"most: {row['name']} {how} {signed(us) if how == 'changed by' else duration(us)}"


def signed(microseconds: float) -> str:
    """A change of time with its sign."""
    return f"{'-' if microseconds < 0 else '+'}{duration(abs(microseconds))}"


def warnings(diff: Diff) -> list[str]:
    """What the reader must know about the two sides."""
    lines = [f"{side.name}: {side.faults}" for side in (diff.a, diff.b) if side.faults]
    if diff.per_step:
        lines.append(f"all times are per step: A has {diff.a.steps} steps, B has {diff.b.steps}")
    return lines


def print_diff(diff: Diff, top: int) -> None:
    """Print the summary and `top` rows of each table."""
    say(plain(summary(diff)), "bold")
    say(plain(f"A: {diff.a.name}; B: {diff.b.name}"))
    for line in warnings(diff):
        say(plain(line), "yellow")
    for kind, table in diff.tables.items():
        if not len(table):
            continue
        unit, time = unit_of(table[["a_us", "b_us"]].max(axis=1))
        columns: list[Column] = [
            ("name", "name", str),
            (f"A {unit}", "a_us", time),
            (f"B {unit}", "b_us", time),
            (f"change {unit}", "change_us", partial(_with_sign, write=time)),
            ("B / A", "ratio", "{:.3f}".format),
            ("share of changes", "share", _share),
            ("calls A", "a_calls", _calls),
            ("calls B", "b_calls", _calls),
            ("", "verdict", str),
        ]
        print_table(TITLES[kind], table, columns, top, _counts(table))


def _counts(table: Any) -> str:
    kinds = table["verdict"].value_counts()
    order = ("came", "went", "more", "less", "same")
    return ", ".join(f"{kinds[kind]} {kind}" for kind in order if kind in kinds)


def _with_sign(value: float, write: Any) -> str:
    return f"{'-' if value < 0 else '+'}{write(abs(value))}" if value else "0"


def _share(value: float) -> str:
    return f"{'-' if value < 0 else '+'}{percent(abs(value))}" if value else "0"


def _calls(value: float) -> str:
    return count(value) if value == int(value) else f"{value:,.1f}"


def as_markdown(diff: Diff, rows: int = 10) -> str:
    """The summary and the first rows of each table, at most 60 lines."""
    lines = [f"**{summary(diff)}**", "", f"A: `{diff.a.name}`, B: `{diff.b.name}`"]
    lines += [f"- {line}" for line in warnings(diff)]
    for kind, table in diff.tables.items():
        if len(table):
            lines += ["", f"{TITLES[kind]} ({_counts(table)})", ""]
            lines += [
                "| name | A | B | change | share of changes | |",
                "|---|---:|---:|---:|---:|---|",
            ]
            for row in rows_of(table.head(rows)):
                name = row["name"].replace("|", "\\|").replace("<", "\\<")
                cells = [name, duration(row["a_us"]), duration(row["b_us"])]
                cells += [signed(row["change_us"]), _share(row["share"]), row["verdict"]]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def as_json(diff: Diff) -> str:
    """The two sides and every table, as strict JSON."""
    a, b = diff.totals_us
    content = {
        "a": diff.a.name,
        "b": diff.b.name,
        "per_step": diff.per_step,
        "gpu_us": {"a": a, "b": b},
        "faults": {"a": diff.a.faults, "b": diff.b.faults},
        "tables": {kind: rows_of(table) for kind, table in diff.tables.items()},
    }
    return json.dumps(content, indent=1, allow_nan=False)
