"""The terminal view of each table: its columns, their units and formats, the note under it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pandas
from pandas.api.types import is_float_dtype, is_integer_dtype

from attnscope.profile.analysis.rates import peaks_text
from attnscope.profile.analysis.steps import PARTS
from attnscope.profile.analysis.tables import NO_OP, REPLAY
from attnscope.profile.render.table import (
    Column,
    count,
    duration,
    mebibytes,
    percent,
    shown_name,
    unit_of,
)

if TYPE_CHECKING:
    from attnscope.profile.analysis.result import Result

COMMUNICATION_NOTE = (
    "exposed: its device ran nothing else; times include waiting for late ranks, which "
    "attnscope profile --merge takes apart"
)
LINES_NOTE = "with the line where the function begins; backward work is with its forward op"


@dataclass(frozen=True)
class How:
    """Display options: the attribution line, the sort column of operators, whether kernels ran, and
    whether their full symbols are shown."""

    line: str
    sort: str
    gpu: bool
    full_names: bool


@dataclass(frozen=True)
class View:
    """A table ready to print: rows that always come last (`pinned`), the note under it, and lines
    below that."""

    table: pandas.DataFrame
    columns: Sequence[Column]
    note: str = ""
    pinned: pandas.DataFrame | None = None
    below: Sequence[str] = field(default=())


def view_of(name: str, profile: Result, how: How) -> View | None:
    """The view of a table by its name in `analysis.catalog.TABLES`; None if it has no rows to show.

    A table without its own view is shown unchanged.
    """
    table = profile.table(name)
    return VIEWS.get(name, _unchanged)(profile, table, how) if len(table) else None


def _unchanged(profile: Result, table: pandas.DataFrame, how: How) -> View:
    columns: list[Column] = []
    for name in table.columns:
        write: Callable[[object], str] = str
        if is_integer_dtype(table[name]):
            write = count  # type: ignore[assignment]
        elif is_float_dtype(table[name]):
            write = "{:,.4g}".format
        columns.append((name.replace("_", " "), name, write))
    return View(table, columns)


def _stages(profile: Result, table: pandas.DataFrame, how: How) -> View:
    names = ["  " * d + shown_name(n) for d, n in zip(table.depth, table.range, strict=True)]
    return View(table.assign(range=names), _stage_columns(table, how.gpu), how.line)


def _operators(profile: Result, table: pandas.DataFrame, how: How) -> View:
    if not how.full_names:
        table["name"] = [shown_name(name) for name in table["name"]]
    apart = table["name"].isin((REPLAY, NO_OP))
    return View(
        table[~apart].sort_values(how.sort, ascending=how.sort == "name", kind="stable"),
        _operator_columns(table, how.gpu),
        how.line,
        table[apart & (table["kernels"] > 0)],
        speed_captions(profile),
    )


def _kernels(profile: Result, table: pandas.DataFrame, how: How) -> View:
    return View(table, _kernel_columns(table, how.full_names), how.line)


def _copies(profile: Result, table: pandas.DataFrame, how: How) -> View:
    note = f"copies and fills: {duration(table.total_us.sum())}, in no other table"
    return View(table, _copy_columns(table), note)


def _communication(profile: Result, table: pandas.DataFrame, how: How) -> View:
    unit, time = unit_of(table["total_us"])
    columns: list[Column] = [
        ("collective", "collective", str),
        ("group", "group", str),
        ("ranks", "size", count),
        ("dtype", "dtype", str),
        ("calls", "calls", count),
        ("MiB", "bytes", mebibytes),
        (f"total {unit}", "total_us", time),
        (f"mean {unit}", "mean_us", time),
        (f"exposed {unit}", "exposed_us", time),
        (f"overlapped {unit}", "overlapped_us", time),
        ("bus GB/s", "bus_gbs", "{:,.4g}".format),
    ]
    columns = [column for column in columns if table[column[1]].notna().any()]
    return View(table, columns, COMMUNICATION_NOTE)


def _modules(profile: Result, table: pandas.DataFrame, how: How) -> View:
    names = [
        "  " * depth + path.rpartition("/")[2]
        for depth, path in zip(table.depth, table.module, strict=True)
    ]
    return View(table.assign(module=names), _module_columns(table), how.line)


def _lines(profile: Result, table: pandas.DataFrame, how: How) -> View:
    return View(table, _line_columns(table), LINES_NOTE)


def _memory(profile: Result, table: pandas.DataFrame, how: How) -> View:
    return View(table, _memory_columns(), _peak(profile))


def _steps(profile: Result, table: pandas.DataFrame, how: How) -> View:
    columns: list[Column] = [("step", "step", str), ("wall", "wall_us", duration)]
    columns += [(part, f"{part}_us", duration) for part in PARTS if table[f"{part}_us"].any()]
    note = f"steps: {table.attrs['steps']}; each instant counts once, in the leftmost part"
    if table.attrs["setup_us"] is not None:
        note += f"; set-up in the first step: {duration(max(table.attrs['setup_us'], 0.0))}"
    return View(table, columns, note, _step_summary(table))


def _step_summary(table: pandas.DataFrame) -> pandas.DataFrame | None:
    """Rows with the mean and the standard deviation over the steps, without set-up."""
    counted = table.attrs["counted"]
    if counted < 2:
        return None
    steady = table.tail(counted)[["wall_us", *(f"{part}_us" for part in PARTS)]]
    mean, spread = steady.mean(), steady.std()
    rows = [{"step": f"mean of {counted}", **mean}, {"step": "standard deviation", **spread}]
    return pandas.DataFrame(rows)


VIEWS: dict[str, Callable[[Result, pandas.DataFrame, How], View]] = {
    "stages": _stages,
    "operators": _operators,
    "kernels": _kernels,
    "copies": _copies,
    "communication": _communication,
    "modules": _modules,
    "lines": _lines,
    "memory": _memory,
    "steps": _steps,
}


def speed_captions(profile: Result) -> list[str]:
    """How FLOPs were counted and which peak MFU refers to; empty if none were counted."""
    if not (rules := profile.flop_counts.rules()):
        return []
    lines = [f"FLOPs are counted as: {'; '.join(rules)}."]
    device, dtypes = profile.device, profile.flop_counts.dtypes()
    if device is not None and (peaks := peaks_text(device, dtypes)):
        lines.append(
            f"MFU is relative to the dense peak of {device.name}: {peaks} ({device.source})."
        )
    return lines


# Columns


def _stage_columns(table: pandas.DataFrame, gpu: bool) -> list[Column]:
    unit, time = unit_of(table["wall_us"])
    columns: list[Column] = [
        ("range", "range", str),
        ("calls", "calls", count),
        (f"wall {unit}", "wall_us", time),
    ]
    if gpu:
        columns += [
            (f"GPU {unit}", "gpu_us", time),
            (f"own {unit}", "gpu_self_us", time),
            (f"busy {unit}", "gpu_busy_us", time),
            (f"span {unit}", "gpu_span_us", time),
            (f"idle {unit}", "idle_us", time),
            ("kernels", "kernels", count),
        ]
    return columns + _speed_columns(table)


def _operator_columns(table: pandas.DataFrame, gpu: bool) -> list[Column]:
    unit, time = unit_of(table["gpu_us"] if gpu else table["cpu_us"])
    cpu_unit, cpu_time = unit_of(table["cpu_us"])
    columns: list[Column] = [("op", "name", str), ("calls", "calls", count)]
    if gpu:
        columns += [
            (f"GPU {unit}", "gpu_us", time),
            ("share", "gpu_share", percent),
            (f"self GPU {unit}", "self_gpu_us", time),
            (f"mean {unit}", "gpu_mean_us", time),
            ("kernels", "kernels", count),
        ]
        for label, key in ((f"copies {unit}", "copy_us"), (f"backward {unit}", "backward_gpu_us")):
            columns += [(label, key, time)] if table[key].any() else []
    columns += [
        (f"CPU {cpu_unit}", "cpu_us", cpu_time),
        (f"self CPU {cpu_unit}", "self_cpu_us", cpu_time),
    ]
    return columns + _speed_columns(table)


def _speed_columns(table: pandas.DataFrame) -> list[Column]:
    columns: list[Column] = [
        ("TFLOP/s", "tflops", lambda value: f"{value:.4g}"),
        ("MFU", "mfu", percent),
        ("at clock", "mfu_at_clock", percent),
    ]
    return [column for column in columns if table[column[1]].notna().any()]


def _kernel_columns(table: pandas.DataFrame, full_names: bool) -> list[Column]:
    unit, time = unit_of(table["total_us"])
    return [
        ("kernel", "symbol" if full_names else "kernel", str),
        ("calls", "calls", count),
        (f"total {unit}", "total_us", time),
        ("share", "share", percent),
        (f"mean {unit}", "mean_us", time),
        (f"min {unit}", "min_us", time),
        (f"max {unit}", "max_us", time),
        ("op", "op", str),
        ("range", "range", str),
    ]


def _copy_columns(table: pandas.DataFrame) -> list[Column]:
    unit, time = unit_of(table["total_us"])
    return [
        ("copy", "name", str),
        ("calls", "calls", count),
        (f"total {unit}", "total_us", time),
        (f"mean {unit}", "mean_us", time),
        ("bytes", "bytes", count),
        ("GB/s", "gbs", lambda value: f"{value:.4g}"),
        ("op", "op", str),
    ]


def _module_columns(table: pandas.DataFrame) -> list[Column]:
    unit, time = unit_of(table["gpu_us"])
    return [
        ("module", "module", str),
        (f"GPU {unit}", "gpu_us", time),
        (f"forward {unit}", "forward_gpu_us", time),
        (f"backward {unit}", "backward_gpu_us", time),
        ("kernels", "kernels", count),
    ]


def _line_columns(table: pandas.DataFrame) -> list[Column]:
    unit, time = unit_of(table["gpu_us"])
    return [
        ("function", "line", str),
        (f"GPU {unit}", "gpu_us", time),
        ("kernels", "kernels", count),
        ("names", "names", str),
    ]


def _memory_columns() -> list[Column]:
    return [
        ("op", "op", str),
        ("device", "device", str),
        ("allocations", "allocations", count),
        ("allocated MiB", "allocated_bytes", mebibytes),
        ("released MiB", "released_bytes", mebibytes),
    ]


def _peak(profile: Result) -> str:
    peaks: dict[str, int] = {}
    for one in profile.trace.memory:
        device = "the CPU" if one.device < 0 else f"cuda:{one.device}"
        peaks[device] = max(peaks.get(device, 0), one.allocated)
    return "most at once: " + ", ".join(f"{mebibytes(b)} MiB on {d}" for d, b in peaks.items())
