"""The report of several ranks: one document, as text, Markdown, HTML and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pandas

from attnscope.profile.analysis.ranks import (
    Rank,
    check_ranks,
    collective_table,
    rank_table,
    step_table,
    straggler,
    waiting,
)
from attnscope.profile.render.document import Document, Section, rows_of
from attnscope.profile.render.table import duration, percent

OWN = (
    "A collective's own time is its time on the rank that arrived last; what it took longer on the "
    "others is waiting. Exposed: the device ran nothing else. Times are sums over the ranks; bus "
    "GB/s is as nccl-tests counts it, over the own time."
)
RANKS = (
    "GPU: all kernels. Compute: kernels that are no communication. Waiting: the part of the "
    "communication in which the rank waited for a later one. Last: collectives in which others "
    "waited for this rank."
)


def merged(ranks: Sequence[Rank], name: str) -> tuple[Document, dict[str, Any]]:
    """The report of the ranks of one run, and the same as JSON.

    Raises ValueError for ranks of different runs.
    """
    notes = check_ranks(ranks)
    waits = waiting(ranks)
    tables = {
        "ranks": rank_table(ranks, waits),
        "communication": collective_table(ranks, waits),
        "steps": step_table(ranks),
    }
    verdict = _verdict(ranks, tables["ranks"], straggler(waits))
    document = Document(f"{name}: {verdict}", notes)
    texts = {
        "ranks": ("Ranks", RANKS),
        "communication": ("Communication", OWN),
        "steps": ("Steps", "Wall time of each step that every rank recorded."),
    }
    for key, (title, text) in texts.items():
        if len(tables[key]):
            document.sections.append(Section(title, text, _rows(tables[key])))
    content = {"schema": 1, "name": name, "verdict": verdict, "notes": notes}
    return document, content | {
        "tables": {key: rows_of(table) for key, table in tables.items() if len(table)}
    }


def as_json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _verdict(
    ranks: Sequence[Rank], table: pandas.DataFrame, late: tuple[int, int, float] | None
) -> str:
    """One line: how much of the time is communication, how much is waiting, and for whom."""
    total = float(table["communication_us"].sum())
    if not total:
        return f"{len(ranks)} ranks, no communication recorded"
    exposed, waited = float(table["exposed_us"].sum()), float(table["waiting_us"].sum())
    line = f"{len(ranks)} ranks; communication {duration(total)} in all, "
    gpu = float(table["gpu_us"].sum())
    on_gpu = gpu - float(table["compute_us"].sum())
    if on_gpu:
        line += f"{percent(on_gpu / gpu)} of the GPU time, "
    line += f"{percent(exposed / total)} of it exposed, {percent(waited / total)} of it waiting"
    if late is not None:
        number, count, time = late
        line += f"; most of it for rank {number}, last in {count} collectives ({duration(time)})"
    return line


_NAMES = {"late": "last", "bus_gbs": "bus GB/s", "gpu_us": "GPU ms", "bytes": "MiB"}


def _rows(table: pandas.DataFrame) -> list[dict[str, Any]]:
    """Rows with headings: milliseconds, MiB and percentages."""
    found = []
    for row in rows_of(table):
        shown: dict[str, Any] = {}
        for key, value in row.items():
            name = _NAMES.get(key, key.replace("_us", " ms"))
            if value is not None and key.endswith("_us"):
                value /= 1e3
            elif value is not None and key == "bytes":
                value /= 2**20
            elif key == "owned":
                name, value = "owned %", None if value is None else 100 * value
            shown[name] = value
        found.append(shown)
    return found
