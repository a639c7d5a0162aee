"""The command `compare`: two result files, or two impls, workload by workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from attnscope.bench.aliases import ALIASES
from attnscope.bench.compare import (
    Pair,
    differences,
    failures,
    means,
    means_table,
    pair_rows,
    pairs_table,
)
from attnscope.bench.consistency import contradictions
from attnscope.bench.statistics import geometric_mean
from attnscope.bench.workloads import Workload
from attnscope.common.console import say, show_table
from attnscope.common.forms import TERMINAL, AsJson, Form, form_of, printed
from attnscope.common.options import bad_input
from attnscope.common.results import read_results

Row = Mapping[str, Any]


def compare_command(
    a: Annotated[Path, typer.Argument(help="Result file A, the baseline.")],
    b: Annotated[Path | None, typer.Argument(help="Result file B; left out, A again.")] = None,
    impl_a: Annotated[str | None, typer.Option(help="Of A, take this impl alone.")] = None,
    impl_b: Annotated[
        str | None, typer.Option(help="Of B, take this impl alone; left out, the same as of A.")
    ] = None,
    fail_below: Annotated[
        float | None,
        typer.Option(help="Gate: exit with 1 where B has less than this share of A's speed."),
    ] = None,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Gate: B need not have every row of A.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Compare though cards, clocks or L2 modes differ.")
    ] = False,
    form: Form = TERMINAL,
    as_json: AsJson = False,
) -> None:
    """Compare two result files, or two impls, workload by workload.

    A ratio is the speed of B over the speed of A: above 1, B is faster. The gate fails on a ratio
    below the limit whose interval excludes 1, on a geometric mean below the limit, and on a row
    that has a time in A but is wrong, failed, skipped or missing in B. Exit codes: 1 the gate
    failed, 2 bad input.
    """
    with bad_input("compare"):
        form = form_of(form, as_json)
        if fail_below is not None and not 0 < fail_below <= 1:
            raise ValueError(f"fail-below must be above 0 and at most 1, got {fail_below}")
        pairs, refused, notes = _load(a, b or a, impl_a, impl_b or impl_a)
    for line in refused:
        say(f"not the same conditions: {line}", "red", stderr=True)
    if refused and not force:
        say("compare: refused; --force compares all the same", stderr=True)
        raise typer.Exit(2)
    notes = [
        f"A: {a}" + (f", {impl_a}" if impl_a else ""),
        f"B: {b or a}" + (f", {impl_b or impl_a}" if impl_a else ""),
        *notes,
    ]
    found = [] if fail_below is None else failures(pairs, fail_below, allow_missing)
    with printed(form, "compare") as facts:
        facts |= _facts(pairs, fail_below) | {"notes": [*refused, *notes], "regressions": found}
        _print(pairs, fail_below, notes, found)
    if found:
        raise typer.Exit(1)


def _print(
    pairs: Sequence[Pair], limit: float | None, notes: Sequence[str], regressions: Sequence[str]
) -> None:
    show_table(pairs_table(pairs, limit))
    show_table(means_table(pairs))
    for line in notes:
        say(line)
    for side, count in (("A", sum(not p.a for p in pairs)), ("B", sum(not p.b for p in pairs))):
        if count:
            say(f"missing: {count} of {len(pairs)} rows are not in {side}", "yellow")
    for line in regressions:
        say(f"regression: {line}", "red")
    if limit is not None:
        say(f"gate at {limit:g}: {'failed' if regressions else 'passed'}")


def _facts(pairs: Sequence[Pair], limit: float | None) -> dict[str, Any]:
    """The pairs and the geometric means for JSON."""
    rows = [
        {
            "impl": pair.impl, "workload": pair.work.id, "ratio": pair.ratio,
            "low": pair.low, "high": pair.high, "verdict": pair.verdict(limit),
            "a_ms": pair.a and pair.a["median_ms"], "b_ms": pair.b and pair.b["median_ms"],
            "why": pair.why() or None,
        }
        for pair in pairs
    ]  # fmt: skip
    return {
        "pairs": rows,
        "means": {
            impl: {group: geometric_mean(ratios) for group, ratios in groups.items()}
            for impl, groups in means(pairs).items()
        },
    }


def _load(
    a: Path, b: Path, impl_a: str | None, impl_b: str | None
) -> tuple[list[Pair], list[str], list[str]]:
    impl_a, impl_b = (ALIASES.get(str(impl), impl) for impl in (impl_a, impl_b))
    if a == b and impl_a == impl_b:
        raise ValueError(
            f"impl-a and impl-b must be two impls of one file, got {impl_a} twice. Give both, or a "
            "second file"
        )
    if impl_b is not None and impl_a is None:
        raise ValueError("impl-a must be given with --impl-b, got none")
    files = read_results(a), read_results(b)
    _refuse_contradictions(files[0]["rows"], a)
    if b != a:
        _refuse_contradictions(files[1]["rows"], b)
    rows_a = _select(files[0]["rows"], impl_a, a)
    rows_b = _select(files[1]["rows"], impl_b, b)
    pairs = pair_rows(rows_a, rows_b, across_impls=impl_a is not None)
    return pairs, *differences(files[0]["env"], files[1]["env"], pairs)


def _refuse_contradictions(rows: Sequence[Row], path: Path) -> None:
    found = [
        f"{row['impl']} on {Workload.from_dict(row).id}: {'; '.join(wrong)}"
        for row in rows
        if (wrong := contradictions(row))
    ]
    if found:
        more = f" (and {len(found) - 1} rows more)" if len(found) > 1 else ""
        raise ValueError(f"{path} must hold rows that agree with themselves, got {found[0]}{more}")


def _select(rows: Sequence[Row], impl: str | None, path: Path) -> list[Row]:
    chosen = [row for row in rows if impl in (None, row["impl"])]
    if not chosen:
        there = ", ".join(sorted({str(row["impl"]) for row in rows})) or "none"
        raise ValueError(f"{path} must have rows of {impl or 'an impl'}, got rows of {there}")
    return chosen
