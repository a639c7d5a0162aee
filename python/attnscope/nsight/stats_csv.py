"""Reads the CSV files of `nsys stats`: by the names of columns, which differ between versions."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Report -> the names that versions of nsys have had for it, the newest first.
REPORTS = {
    "kernels": ("cuda_gpu_kern_sum", "gpukernsum"),
    "copies": ("cuda_gpu_mem_time_sum", "gpumemtimesum"),
    "ranges": ("nvtx_gpu_proj_sum", "nvtxgpuprojsum", "nvtx_sum", "nvtxsum"),
    "calls": ("cuda_api_sum", "cudaapisum"),
}
NS_PER_UNIT = {"ns": 1.0, "us": 1e3, "μs": 1e3, "ms": 1e6, "s": 1e9, "sec": 1e9}
# What is read -> headings without their unit, in lower case and without spaces.
_TOTAL, _COUNT, _NAME = (
    ("totaltime", "total"),
    ("instances", "calls", "count"),
    ("name", "kernelname"),
)


@dataclass(frozen=True)
class Summary:
    """One row: a name, how often it ran, and its total time in nanoseconds."""

    name: str
    count: int
    total_ns: float


def reports_of(help_text: str) -> dict[str, str]:
    """The reports of REPORTS that `nsys stats --help-reports` lists, by the name it uses."""
    there = set(re.findall(r"^\s*([a-z][a-z0-9_]+)", help_text, re.MULTILINE))
    found = {}
    for report, names in REPORTS.items():
        if name := next((one for one in names if one in there), None):
            found[report] = name
    return found


def read_summary(path: Path) -> list[Summary]:
    """The rows of a summary report; none if the file has its heading only.

    Lines before the heading are skipped, unknown columns are ignored, numbers may have thousands
    separators. Raises ValueError for an empty file, and for a heading without the needed columns.
    """
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            rows = [row for row in csv.reader(file) if any(cell.strip() for cell in row)]
    except OSError as error:
        raise ValueError(f"report must be readable, got {path}: {error.strerror}") from None
    if not rows:
        raise ValueError(f"{path} must have a heading, got an empty file")
    for at, row in enumerate(rows):
        if (columns := _columns(row)) is not None:
            return [_summary(cells, columns, path) for cells in rows[at + 1 :]]
    longest = max(rows, key=len)
    raise ValueError(
        f"{path} must have columns for name, total time and instances, got {', '.join(longest)}"
    )


def _columns(row: Sequence[str]) -> tuple[int, int, int, float] | None:
    """Places of name, count and total, and nanoseconds of its unit; None if it is no heading."""
    heads = [re.fullmatch(r"\s*(.*?)\s*(?:\((.*?)\))?\s*", cell) for cell in row]
    names = [re.sub(r"\s+", "", head[1]).lower() if head else "" for head in heads]
    places = [
        next((at for at, name in enumerate(names) if name in wanted), None)
        for wanted in (_NAME, _COUNT, _TOTAL)
    ]
    if any(place is None for place in places):
        return None
    name, count, total = (place or 0 for place in places)
    head = heads[total]
    unit = (head[2] if head else None) or "ns"
    return (name, count, total, NS_PER_UNIT[unit]) if unit in NS_PER_UNIT else None


def _summary(row: Sequence[str], columns: tuple[int, int, int, float], path: Path) -> Summary:
    name, count, total, scale = columns
    try:
        return Summary(row[name], int(_number(row[count])), _number(row[total]) * scale)
    except (IndexError, ValueError):
        raise ValueError(f"{path} must have numbers in each row, got {', '.join(row)}") from None


def _number(text: str) -> float:
    return float(text.replace(",", "").strip())
