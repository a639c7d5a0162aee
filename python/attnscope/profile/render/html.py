"""A profile as one self-contained HTML page: tables, plots, and a tree of kernel time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas

from attnscope.profile.analysis.catalog import TABLES
from attnscope.profile.analysis.kernel_names import category
from attnscope.profile.analysis.lint import LOST
from attnscope.profile.analysis.rates import NO_WORK
from attnscope.profile.analysis.tree import icicle
from attnscope.profile.render.document import Section, environment, rows_of
from attnscope.profile.render.figures import CATEGORY_COLOURS, activity, categories, step_parts
from attnscope.profile.render.table import shown_name, unit_for
from attnscope.profile.render.terminal import (
    FIGURES,
    attribution_line,
    completeness,
    duration,
    heading,
    notes,
    percent,
)
from attnscope.profile.render.views import speed_captions

if TYPE_CHECKING:
    from attnscope.profile.analysis.result import Result

# Column of a table -> heading on the page.
OPERATORS = {
    "name": "op", "calls": "calls", "gpu_us": "GPU us", "gpu_share": "share %",
    "self_gpu_us": "self GPU us", "gpu_mean_us": "a call us", "kernels": "kernels",
    "copy_us": "copies us", "backward_gpu_us": "backward us", "cpu_us": "CPU us",
    "self_cpu_us": "self CPU us", "tflops": "TFLOP/s", "mfu": "MFU %",
    "mfu_at_clock": "MFU at clock %", "flops_reason": "why missing",
}  # fmt: skip
KERNELS = {
    "kernel": "kernel", "symbol": "symbol", "category": "category", "calls": "calls",
    "total_us": "total us", "share": "share %", "mean_us": "mean us", "min_us": "min us",
    "max_us": "max us", "op": "op", "range": "range",
}  # fmt: skip
STAGES = {
    "range": "range", "path": "path", "calls": "calls", "wall_us": "wall us", "gpu_us": "GPU us",
    "gpu_self_us": "own GPU us", "gpu_busy_us": "busy us", "gpu_span_us": "span us",
    "idle_us": "idle us", "kernels": "kernels", "tflops": "TFLOP/s", "mfu": "MFU %",
    "mfu_at_clock": "MFU at clock %", "flops_reason": "why missing",
}  # fmt: skip


def write_html(profile: Result, path: str | os.PathLike[str]) -> None:
    """Write the page. Raises ProfileError for tables that contradict the trace."""
    tree = icicle(profile.attribution)
    page = environment().get_template("profile.html.j2")
    text = page.render(
        title=f"{profile.name}: where GPU time went",
        verdict=None if profile.empty else profile.verdict,
        heading=heading(profile),
        run=dict(profile.run)
        | {"completeness": completeness(profile), "lint": profile.lint.verdict},
        attribution=attribution_line(profile.attribution),
        warnings=list(_warnings(profile)),
        cards=list(_cards(profile)),
        tree=tree.as_dict() if tree.ns else None,
        colours=CATEGORY_COLOURS,
        plots=[
            (name, figure)
            for name, figure in (
                ("GPU time by stage and category", categories(profile.attribution)),
                ("GPU activity over time", activity(profile.attribution)),
                ("Parts of each step", step_parts(profile)),
            )
            if figure
        ],
        sections=list(_sections(profile)),
        findings=[
            (one, Section(one.title, "", [_flat(row) for row in one.evidence]))
            for one in profile.findings()
        ],
    )
    Path(path).write_text(text, encoding="utf-8")


def _warnings(profile: Result) -> Iterator[str]:
    if profile.incomplete:
        yield f"INCOMPLETE: {profile.incomplete}. Times below are too small."
    if not profile.lint.trusted:
        yield f"{profile.lint.verdict}."
    faults = [str(fault) for fault in profile.lint.faults if fault.kind != LOST]
    yield from (f"{note[0].upper()}{note[1:]}." for note in (*faults, *notes(profile)))


def _cards(profile: Result) -> Iterator[tuple[str, str, str]]:
    """Label, value and remark of each figure at the top of the page."""
    owners = profile.attribution
    if owners.share is None:
        return
    yield "GPU time", duration(owners.total_ns / 1e3), f"{len(profile.trace.kernels):,} kernels"
    yield "owned", percent(owners.share), "by ops and replays of graphs"
    found = profile.efficiency()
    for key, label in FIGURES.items():
        value = getattr(found, key)
        remark = found.reasons.get(key, f"GPU {found.gpu}")
        yield label, "-" if value is None else percent(value), remark


def _sections(profile: Result) -> Iterator[Section]:
    line = attribution_line(profile.attribution)
    for name, kind in TABLES.items():
        table = profile.table(name)
        if kind.title and len(table):
            section = SECTIONS.get(name, _unchanged)
            yield section(kind.title, table, line, profile)


def _unchanged(title: str, table: pandas.DataFrame, line: str, profile: Result) -> Section:
    return Section(title, "", _rows(table, {n: n.replace("_", " ") for n in table.columns}))


def _stages(title: str, table: pandas.DataFrame, line: str, profile: Result) -> Section:
    # Indent with no-break spaces; rows stay in program order.
    table["range"] = [
        "\N{NO-BREAK SPACE}" * 3 * depth + shown_name(name)
        for depth, name in zip(table["depth"], table["range"], strict=True)
    ]
    text = (
        "Named ranges. Busy: some kernel, copy or fill ran. Span: from the first to the last of "
        f"them. Idle: span less busy. {line}."
    )
    return Section(title, text, _rows(table, STAGES), hover={"range": "path"})


def _operators(title: str, table: pandas.DataFrame, line: str, profile: Result) -> Section:
    table["name"] = [shown_name(name) for name in table["name"]]
    table = table.sort_values(["self_gpu_us", "self_cpu_us"], ascending=False, kind="stable")
    text = (
        "GPU time of an op has its kernels and those of the ops inside; only self time may be "
        f"summed. {line}."
    )
    return Section(title, text, _rows(table, OPERATORS), notes=speed_captions(profile))


def _kernels(title: str, table: pandas.DataFrame, line: str, profile: Result) -> Section:
    table["category"] = table["symbol"].map(category)
    return Section(title, f"{line}.", _rows(table, KERNELS), hover={"kernel": "symbol"})


def _copies(title: str, table: pandas.DataFrame, line: str, profile: Result) -> Section:
    section = _unchanged(title, table, line, profile)
    return replace(section, text="Copies and fills, which are in no other table.")


def _lines(title: str, table: pandas.DataFrame, line: str, profile: Result) -> Section:
    text = "GPU time by line of Python: where the function begins that led to the kernel."
    headings = {"line": "line", "gpu_us": "GPU us", "kernels": "kernels", "names": "names"}
    return Section(title, text, _rows(table, headings))


def _steps(title: str, table: pandas.DataFrame, line: str, profile: Result) -> Section:
    text = f"Steps: {table.attrs['steps']}. Each instant counts once, in the leftmost part."
    return Section(title, text, _rows(table, {n: n.replace("_us", " us") for n in table.columns}))


# Tables with their own text or headings; other tables are shown unchanged.
SECTIONS: dict[str, Callable[[str, pandas.DataFrame, str, Result], Section]] = {
    "stages": _stages,
    "operators": _operators,
    "kernels": _kernels,
    "copies": _copies,
    "lines": _lines,
    "steps": _steps,
}


def _rows(table: pandas.DataFrame, headings: dict[str, str]) -> list[dict[str, Any]]:
    """Rows with the page's headings; shares become percentages, times get a unit that fits."""
    found, scales = [], {}
    for key, name in headings.items():
        if name.endswith(" us"):
            scale, unit = unit_for(table[key].max())
            headings = headings | {key: f"{name.removesuffix('us')}{unit}"}
            scales[key] = scale
    for row in rows_of(table):
        if row.get("flops_reason") == NO_WORK:
            row["flops_reason"] = None
        for key, name in headings.items():
            if name.endswith("%") and row.get(key) is not None:
                row[key] *= 100
            elif key in scales and row.get(key) is not None:
                row[key] /= scales[key]
        found.append({headings[key]: row.get(key) for key in headings})
    return found


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """A row of evidence; values other than numbers and text become JSON."""
    return {
        key: value if value is None or isinstance(value, int | float | str) else json.dumps(value)
        for key, value in row.items()
    }
