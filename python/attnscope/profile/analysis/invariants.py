"""Checks that every table must pass before it is shown.

They refuse negative or non-finite numbers, shares over 100 %, a part above its whole, and sums that
differ from the trace. Three cases look wrong but are valid. GPU work can outlast the range that
launched it, so GPU time is compared with GPU time, never with wall time. Streams overlap, so kernel
time may exceed busy time. An op may release memory that another op allocated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pandas

from attnscope.profile.analysis.efficiency import FIGURES, Efficiency
from attnscope.profile.analysis.steps import PARTS, program_window
from attnscope.profile.attribution.owners import Attribution
from attnscope.profile.errors import ProfileError
from attnscope.profile.trace.events import CpuEvent, GpuEvent, Trace

SLACK_US = 0.002  # floats that hold nanoseconds, and their sums
SHARES = ("gpu_share", "share", "mfu", "mfu_at_clock")
SLACK_SHARE = 1e-9
MAX_DISPUTED = 0.01  # of the GPU time
REMEDY = "Record again; if the error returns, report it with the trace"


def check_owners(attribution: Attribution) -> None:
    """Raises ProfileError if external ids and launch times name different ops for more than
    MAX_DISPUTED of the GPU time: one of the two is then wrong, and the trace does not show which.
    """
    disputed = sum(kernel.duration for kernel in attribution.disagreements)
    if disputed > MAX_DISPUTED * attribution.total_ns:
        raise _error(
            "trace: external ids",
            f"of the op open at the launch for {1 - MAX_DISPUTED:.0%} of the GPU time",
            f"others for {disputed / 1e6:.3f} of {attribution.total_ns / 1e6:.3f} ms",
        )


def check_operators(attribution: Attribution, table: pandas.DataFrame) -> None:
    """Raises ProfileError for an operator table that contradicts the trace.

    Self time sums to the time of all kernels. An op's self time and mean are at most its GPU time.
    Its GPU, backward and copy time are at most the trace's totals. CPU time is within the trace.
    """
    trace, total = attribution.trace, attribution.total_ns / 1e3
    _sum("operators", table, "self_gpu_us", total)
    for part, limit in (
        ("self_gpu_us", "gpu_us"),
        ("self_cpu_us", "cpu_us"),
        ("gpu_mean_us", "gpu_us"),
    ):
        _at_most("operators", table, part, table[limit], limit)
    for part in ("gpu_us", "backward_gpu_us"):
        _at_most("operators", table, part, total, "all kernels")
    _at_most("operators", table, "copy_us", _us(trace.copies), "all copies")
    _at_most("operators", table, "cpu_us", table["calls"] * _span_us(trace), "the whole trace")
    _at_most("operators", table, "kernels", len(trace.kernels), "all kernels")
    _possible("operators", table)
    _share_of("operators", table, "gpu_share", "gpu_us", total)


def check_kernels(attribution: Attribution, table: pandas.DataFrame) -> None:
    """Raises ProfileError for a kernel table that contradicts the trace.

    The sums must match the trace, and each symbol must have min <= mean <= max <= total.
    """
    total = attribution.total_ns / 1e3
    _sum("kernels", table, "total_us", total)
    for part, limit in (("min_us", "mean_us"), ("mean_us", "max_us"), ("max_us", "total_us")):
        _at_most("kernels", table, part, table[limit], limit)
    _possible("kernels", table)
    _sum("kernels", table, "calls", len(attribution.trace.kernels))
    _share_of("kernels", table, "share", "total_us", total)


def check_stages(attribution: Attribution, table: pandas.DataFrame) -> None:
    """Raises ProfileError for a stage table that contradicts the trace.

    Self time sums to the time of all kernels. A stage's self time is at most its GPU time; its busy
    and idle time are at most its span. Nothing exceeds the trace's totals, and the stages inside a
    stage take at most its time.
    """
    if not len(table):
        return
    trace, total = attribution.trace, attribution.total_ns / 1e3
    _sum("stages", table, "gpu_self_us", total)
    for part, limit in (
        ("gpu_self_us", "gpu_us"),
        ("gpu_busy_us", "gpu_span_us"),
        ("idle_us", "gpu_span_us"),
    ):
        _at_most("stages", table, part, table[limit], limit)
    _at_most("stages", table, "gpu_us", total, "all kernels")
    _at_most("stages", table, "gpu_busy_us", attribution.busy_ns / 1e3, "all GPU work")
    _at_most("stages", table, "wall_us", table["calls"] * _span_us(trace), "the whole trace")
    _at_most("stages", table, "kernels", len(trace.kernels), "all kernels")
    _possible("stages", table)
    _nested("stages", table, "gpu_self_us", _crossing(attribution))


def check_copies(attribution: Attribution, table: pandas.DataFrame) -> None:
    """Raises ProfileError for copies that differ from the trace."""
    copies = attribution.trace.copies
    _sum("copies", table, "total_us", _us(copies), "all copies")
    _sum("copies", table, "calls", len(copies), "all copies")
    _at_most("copies", table, "mean_us", table["total_us"], "total_us")
    _possible("copies", table)


def check_communication(attribution: Attribution, table: pandas.DataFrame) -> None:
    """Raises ProfileError if a collective is exposed for longer than it takes, or for negative
    time."""
    _at_most("communication", table, "exposed_us", table["total_us"], "total_us")
    _at_most("communication", table, "mean_us", table["total_us"], "total_us")
    _possible("communication", table)


def check_modules(attribution: Attribution, table: pandas.DataFrame) -> None:
    """Raises ProfileError if a module takes longer than its parent or than all kernels, or if its
    time is not the sum of its forward and backward time."""
    total = attribution.total_ns / 1e3
    _at_most("modules", table, "gpu_us", total, "all kernels")
    _at_most("modules", table, "kernels", len(attribution.trace.kernels), "all kernels")
    sides = table["forward_gpu_us"] + table["backward_gpu_us"]
    for whole, parts in ((sides, table["gpu_us"]), (table["gpu_us"], sides)):
        _at_most("modules", table.assign(gpu_us=parts), "gpu_us", whole, "forward and backward")
    _possible("modules", table)
    _nested("modules", table)


def check_memory(attribution: Attribution, table: pandas.DataFrame) -> None:
    """Raises ProfileError for allocations that differ from the trace."""
    events = attribution.trace.memory
    _sum("memory", table, "allocations", sum(e.bytes > 0 for e in events), "all")
    _sum("memory", table, "allocated_bytes", sum(max(e.bytes, 0) for e in events), "all")
    _sum("memory", table, "released_bytes", sum(max(-e.bytes, 0) for e in events), "all")
    _possible("memory", table)


def check_steps(attribution: Attribution, table: pandas.DataFrame) -> None:
    """Raises ProfileError if parts do not sum to their step, or steps outlast the program."""
    _possible("steps", table)
    parts = table[[f"{part}_us" for part in PARTS]].sum(axis=1)
    bad = table[(parts - table["wall_us"]).abs() > SLACK_US]
    for at, row in bad.head(1).iterrows():
        what, rule = f"steps: {row['step']}: the sum of the parts", f"{row['wall_us']:.3f} us"
        raise _error(what, rule, f"{parts[at]:.3f} us")
    start, end = program_window(attribution.trace)
    wall, window = table["wall_us"].sum(), (end - start) / 1e3
    if wall > window + SLACK_US:
        rule = f"at most the program, {window:.3f} us"
        raise _error("steps: the sum of wall_us", rule, f"{wall:.3f} us")


def check_links(attribution: Attribution, table: pandas.DataFrame) -> None:
    """Raises ProfileError unless there is exactly one link per kernel, copy and fill.

    CPU and GPU clocks differ slightly, so `wait_us` may be below 0.
    """
    work = attribution.trace.gpu
    if len(table) != len(work):
        raise _error("links: rows", f"{len(work)}, the kernels and copies", str(len(table)))
    _sum("links", table, "gpu_us", _us(work), "all kernels and copies")
    _possible("links", table[["kernel", "gpu_us"]])


def check_lines(attribution: Attribution, table: pandas.DataFrame) -> None:
    """Raises ProfileError unless the lines of Python contain every kernel exactly once."""
    _sum("lines", table, "gpu_us", attribution.total_ns / 1e3)
    _sum("lines", table, "kernels", len(attribution.trace.kernels))
    _possible("lines", table)


def check_figures(found: Efficiency) -> None:
    """Raises ProfileError for an efficiency figure outside 0 to 1."""
    for name in FIGURES:
        value = getattr(found, name)
        if value is not None and not -SLACK_SHARE <= value <= 1 + SLACK_SHARE:
            raise _error(f"efficiency: {name}", "between 0 and 100%", f"{value:.2%}")


def _error(what: str, rule: str, value: str) -> ProfileError:
    return ProfileError(f"{what} must be {rule}, got {value}. {REMEDY}")


def _span_us(trace: Trace) -> float:
    """Microseconds from the start of the first event to the end of the last."""
    events: list[CpuEvent | GpuEvent] = [*trace.cpu, *trace.gpu]
    return (max(e.end for e in events) - min(e.start for e in events)) / 1e3 if events else 0.0


def _us(events: Iterable[GpuEvent]) -> float:
    return sum(event.duration for event in events) / 1e3


def _sum(
    name: str, table: pandas.DataFrame, part: str, total: float, whole: str = "all kernels"
) -> None:
    parts, unit = table[part].sum(), " us" if part.endswith("_us") else ""
    if abs(parts - total) > SLACK_US:
        rule = f"{total:.3f}{unit}, {whole}"
        raise _error(f"{name}: the sum of {part}", rule, f"{parts:.3f}{unit}")


def _at_most(
    name: str, table: pandas.DataFrame, part: str, whole: pandas.Series | float, label: str
) -> None:
    values = table[part].astype(float)
    limits = pandas.Series(whole, index=table.index).astype(float)
    for at in table.index[values > limits + SLACK_US]:
        what, rule = (
            f"{name}: {table.loc[at].iloc[0]}: {part}",
            f"at most {limits[at]:.3f}, {label}",
        )
        raise _error(what, rule, f"{values[at]:.3f}")


def _possible(name: str, table: pandas.DataFrame) -> None:
    """Refuse shares over 1 and numbers that are negative or not finite."""
    for column in table.select_dtypes("number"):
        values = table[column]
        for at in table.index[(values < 0) | (values == float("inf"))]:
            what = f"{name}: {table.loc[at].iloc[0]}: {column}"
            raise _error(what, "finite and 0 or more", f"{values[at]:.3f}")
        if column in SHARES and values.max() > 1 + SLACK_SHARE:
            row = table.loc[values.idxmax()]
            what = f"{name}: {row.iloc[0]}: {column}"
            raise _error(what, "at most 100%", f"{values.max():.2%}")


def _share_of(name: str, table: pandas.DataFrame, share: str, part: str, total: float) -> None:
    for at in table.index[(table[share] * total - table[part]).abs() > SLACK_US]:
        row = table.loc[at]
        rule = f"{part} over all kernels, {row[part]:.3f} of {total:.3f}"
        raise _error(f"{name}: {row.iloc[0]}: {share}", rule, f"{row[share]:.2%}")


def _nested(
    name: str, table: pandas.DataFrame, own: str | None = None, apart: frozenset[str] = frozenset()
) -> None:
    """Refuse a row whose own part plus its child rows exceeds the row's total.

    Rows are in depth-first order. A row whose path is in `apart` is not contained in its parent.
    """
    last: dict[int, int] = {}  # depth -> the last row at that depth
    inside = defaultdict(float, enumerate(table[own]) if own else ())
    rows = table.to_dict("records")
    for at, row in enumerate(rows):
        last[row["depth"]] = at
        if not row["depth"] or row.get("path") in apart:
            continue
        around = last[row["depth"] - 1]
        inside[around] += row["gpu_us"]
        for part in ("gpu_us", "gpu_busy_us", "kernels"):
            if part in row and row[part] > rows[around][part] + SLACK_US:
                what = f"{name}: {next(iter(row.values()))}: {part}"
                outer = next(iter(rows[around].values()))
                rule = f"at most {rows[around][part]:.3f}, as in {outer} around it"
                raise _error(what, rule, f"{row[part]:.3f}")
    for at, parts in inside.items():
        if parts > rows[at]["gpu_us"] + SLACK_US:
            what = f"{name}: {next(iter(rows[at].values()))}: gpu_us"
            rule = f"at least {parts:.3f}, the sum of the parts inside"
            raise _error(what, rule, f"{rows[at]['gpu_us']:.3f}")


def _crossing(attribution: Attribution) -> frozenset[str]:
    """Paths with a range that is not wholly inside its outer range, or is on another thread."""
    inside: set[int] = set()  # ranges that are properly nested in all ranges around them
    found = set()
    for event in attribution.trace.cpu:
        if event.kind != "range":
            continue
        outer = attribution.ranges(event)
        if not outer or (
            outer[-1].index in inside
            and outer[-1].thread == event.thread
            and outer[-1].end >= event.end
            and attribution.ranges(outer[-1]) == outer[:-1]
        ):
            inside.add(event.index)
        else:
            found.add("/".join(one.name for one in (*outer, event)))
    return frozenset(found)
