"""A profile as at most 60 lines of Markdown, for a pull request or for a program to read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attnscope.profile.analysis.kernel_names import category
from attnscope.profile.render.document import rows_of
from attnscope.profile.render.table import duration, percent, plain, shown_name
from attnscope.profile.render.terminal import completeness, heading, notes

if TYPE_CHECKING:
    from attnscope.profile.analysis.result import Result

MOST_LINES = 60
ROWS, STAGES, NOTES, FINDINGS = 8, 5, 5, 5


def as_markdown(profile: Result) -> str:
    """The verdict, the state of the trace, the first rows of the main tables, the findings.

    Raises ProfileError for tables that contradict the trace.
    """
    if profile.empty:
        return f"**{profile.name}: nothing was recorded: no op, no range, no GPU event**"
    verdict = profile.verdict
    lines = [f"**{_text(verdict.title)}**", "", *(f"- {_text(e)}" for e in verdict.evidence), ""]
    state = [heading(profile), completeness(profile), profile.lint.verdict]
    lines.append(" ".join(f"{_text(line).removesuffix('.')}." for line in state if line))
    remarks = [*map(str, profile.lint.faults), *notes(profile)][:NOTES]
    lines += [f"- {_text(remark)}" for remark in remarks]
    lines += _steps(profile)
    if profile.trace.kernels:
        lines += _categories(profile) + _stages(profile) + _operators(profile) + _kernels(profile)
    else:
        lines += _operators(profile)
    found = profile.findings()[:FINDINGS]
    lines += [""] * bool(found)
    lines += [f"- {one.kind}: {_text(one.title)}. Try: {_text(one.advice)}" for one in found]
    return "\n".join(lines[:MOST_LINES])


def _steps(profile: Result) -> list[str]:
    if not profile.has_ops:
        return []
    about = profile.steps().attrs
    if about["sd_us"] is None:
        return []
    line = f"Steps {about['steps']}: {duration(about['mean_us'])} ± {duration(about['sd_us'])}"
    return ["", f"{line}, mean and standard deviation of {about['counted']}."]


def _categories(profile: Result) -> list[str]:
    times: Counter[str] = Counter()
    for kernel in profile.trace.kernels:
        times[category(kernel.name)] += kernel.duration
    parts = [f"{name} {duration(ns / 1e3)}" for name, ns in times.most_common() if ns]
    return ["", f"GPU time {duration(times.total() / 1e3)}: {', '.join(parts)}."]


def _stages(profile: Result) -> list[str]:
    table = profile.stages().sort_values("gpu_us", ascending=False, kind="stable")
    rows = [
        (shown_name(r["path"]), r["calls"], duration(r["gpu_us"]), duration(r["idle_us"]))
        for r in rows_of(table.head(STAGES))
    ]
    return _table(("stage", "calls", "GPU", "idle inside"), rows) if rows else []


def _operators(profile: Result) -> list[str]:
    gpu = bool(profile.trace.kernels)
    key = "self_gpu_us" if gpu else "self_cpu_us"
    table = profile.operators().sort_values(key, ascending=False, kind="stable").head(ROWS)
    total = profile.attribution.total_ns / 1e3
    rows: list[tuple[Any, ...]] = []
    for row in rows_of(table[table[key] > 0]):
        cells: tuple[Any, ...] = (shown_name(row["name"]), row["calls"], duration(row[key]))
        rows.append((*cells, percent(row[key] / total), _mfu(row)) if gpu else cells)
    head: Sequence[str] = ("op", "calls", "self GPU", "share", "MFU")
    return _table(head if gpu else ("op", "calls", "self CPU"), rows)


def _mfu(row: dict[str, Any]) -> str:
    return "-" if row["mfu"] is None else percent(row["mfu"])


def _kernels(profile: Result) -> list[str]:
    rows = [
        (r["kernel"], r["calls"], duration(r["total_us"]), percent(r["share"]), shown_name(r["op"]))
        for r in rows_of(profile.kernels().head(ROWS))
    ]
    return _table(("kernel", "calls", "GPU", "share", "op"), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    lines = ["", f"| {' | '.join(head)} |", "|" + "---|" + "---:|" * (len(head) - 1)]
    for row in rows:
        cells = [f"{cell:,}" if isinstance(cell, int) else _text(str(cell)) for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _text(text: str) -> str:
    """Text on one line, of at most 200 characters, that Markdown shows unchanged."""
    text = plain(text)
    text = text if len(text) <= 200 else f"{text[:199]}…"
    return re.sub(r"([|<\\*`])", r"\\\1", text)
