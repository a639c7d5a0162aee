"""Attribution as tables: ops, kernels, stages, copies, modules, memory. Times in microseconds.

invariants.py checks every table before it is shown.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import pandas

from attnscope.profile.analysis.sums import Row, Rows, Stage
from attnscope.profile.attribution.owners import Attribution
from attnscope.profile.trace.events import CpuEvent, GpuEvent, Trace

if TYPE_CHECKING:
    from attnscope.common.hardware.devices import Device
    from attnscope.profile.analysis.flops import FlopCounts, Rate

NO_OP = "(not owned by an op)"
REPLAY = "(CUDA graph replay)"
NO_RANGE = "(in no range)"
SPEED = ("flops", "tflops", "mfu", "mfu_at_clock", "flops_rule", "peak", "flops_reason")


def operator_table(
    attribution: Attribution,
    counts: FlopCounts,
    device: Device | None,
    device_reason: str | None,
    sm_clock_mhz: float | None = None,
) -> pandas.DataFrame:
    """One row for each op name, longest GPU time first. Rows for work without an op come last.

    Columns: name, calls (launches, in the rows without an op), cpu_us, self_cpu_us, gpu_us (kernels
    of the op and of ops inside it), self_gpu_us (kernels it launched itself), kernels (number of
    kernels in gpu_us), gpu_mean_us (per call), gpu_share (of all kernels), copy_us (copies and
    fills, in no other column), backward_gpu_us (kernels of its backward; if an
    autograd.Function has one op in it, this op gets them too), and the SPEED columns.
    Two rows may count the same time at two depths; only self_gpu_us may be summed.
    """
    trace, rows = attribution.trace, Rows()
    outer = trace.outer_ops
    names = _names(trace, outer)
    inner = _ops_of_functions(trace, outer)
    rows[NO_OP]  # create the row even if it stays empty
    until = [0] * len(trace.cpu)  # where the ops inside each op, so far, end
    for event in trace.cpu:
        if event.kind == "op":
            row = rows[event.name]
            if event.index in counts.known:
                row.events.append(event)
            row.self_cpu += event.duration
            above = outer[event.index]
            if above >= 0:
                begin = max(event.start, until[above])
                if event.end > begin:
                    rows[trace.cpu[above].name].self_cpu -= event.end - begin
                    until[above] = event.end
            if above < 0 or event.name not in names[above]:
                row.cpu += event.duration
                row.calls += 1  # autocast calls an op of the same name inside
    for work in trace.gpu:
        op = attribution.op(work) or attribution.captured_op(work)
        if op is None:
            if work.kind == "kernel":
                row = rows[REPLAY if attribution.replay(work) else NO_OP]
                row.launches.add(work.launch if work.launch >= 0 else ~work.index)
                row.add(work)
                row.self_gpu += work.duration
            continue
        for name in names[op.index]:
            rows[name].add(work)
        if work.kind == "kernel":
            rows[op.name].self_gpu += work.duration
            if attribution.replay(work) and not attribution.op(work):
                for name in names[op.index]:
                    rows[name].replayed = True
            forward = attribution.forward_op(op)
            if forward is not None:
                for name in names[inner.get(forward.index, forward.index)]:
                    rows[name].backward += work.duration
    rates = {
        name: counts.rate(row.events, row.gpu, device, device_reason, sm_clock_mhz)
        for name, row in rows.items()
    }
    table = pandas.DataFrame(
        [row.columns(attribution.total_ns) | speed(rates[name]) for name, row in rows.items()],
        columns=[*Row("").columns(0), *SPEED],
    )
    last = table["name"].isin([REPLAY, NO_OP])
    table = pandas.concat(
        [
            table[~last].sort_values(["gpu_us", "cpu_us"], ascending=False, kind="stable"),
            table[last].sort_values("name"),
        ]
    )
    return table.reset_index(drop=True)


def kernel_table(attribution: Attribution) -> pandas.DataFrame:
    """One row for each kernel symbol, longest first.

    Columns: kernel (short name), symbol, calls, total_us, mean_us, min_us, max_us, share, op and
    range (the ops and ranges that launched it, longest time first).
    """
    from attnscope.profile.analysis.kernel_names import short_name

    groups: dict[str, list[GpuEvent]] = defaultdict(list)
    for kernel in attribution.trace.kernels:
        groups[kernel.name].append(kernel)
    rows = []
    for symbol, kernels in groups.items():
        times = [kernel.duration / 1e3 for kernel in kernels]
        ops: Counter[str] = Counter()
        ranges: Counter[str] = Counter()
        for kernel in kernels:
            ops[owner_name(attribution, kernel)] += kernel.duration
            around = attribution.ranges(kernel)
            inner = attribution.captured_ranges(kernel)
            ranges[path_of((*around, *inner)) or NO_RANGE] += kernel.duration
        rows.append(
            {
                "kernel": short_name(symbol),
                "symbol": symbol,
                "calls": len(times),
                "total_us": sum(times),
                "mean_us": sum(times) / len(times),
                "min_us": min(times),
                "max_us": max(times),
                "share": sum(k.duration for k in kernels) / (attribution.total_ns or 1),
                "op": _longest_first(ops),
                "range": _longest_first(ranges),
            }
        )
    columns = "kernel symbol calls total_us mean_us min_us max_us share op range".split()
    table = pandas.DataFrame(rows, columns=columns)
    return table.sort_values("total_us", ascending=False, ignore_index=True)


def stage_table(
    attribution: Attribution,
    counts: FlopCounts,
    device: Device | None,
    device_reason: str | None,
    sm_clock_mhz: float | None = None,
) -> pandas.DataFrame:
    """One row for each path of named ranges, in the order in which they were first entered.

    Columns: range, path ("forward/attention"), depth, calls, wall_us (on the CPU), gpu_us (kernels
    inside, nested ranges included), gpu_self_us (kernels in no nested range), gpu_busy_us (time in
    which any kernel, copy or fill of the range ran: a union, so streams do not add up), gpu_span_us
    (from the first to the last of them, summed over calls), idle_us (span minus busy time in it),
    kernels, and the SPEED columns, over gpu_busy_us. The last row has the kernels in no range.
    """
    trace = attribution.trace
    stages: dict[tuple[str, ...], Stage] = {}
    by_range: dict[int, Stage] = {}
    for event in trace.cpu:
        if event.kind == "range":
            path = tuple(one.name for one in (*attribution.ranges(event), event))
            stage = stages.setdefault(path, Stage(path))
            stage.walls.append(event)
            by_range[event.index] = stage
    outside = Stage((NO_RANGE,))
    for work in trace.gpu:
        around = attribution.ranges(work)
        # Overlapping ranges may share a path: the work counts once, for the outermost.
        for path, one in {by_range[one.index].path: one for one in reversed(around)}.items():
            stages[path].work[one.index].append(work)
        inner = _captured_stages(attribution, work, around, by_range, stages)
        for stage in inner:
            stage.work[work.launch].append(work)
        if work.kind == "kernel":
            innermost = by_range[around[-1].index] if around else outside
            (inner[-1] if inner else innermost).own.append(work)
        if not around:
            outside.work[-1].append(work)
    rows = []
    for stage in [
        *(stages[path] for path in depth_first(stages)),
        *([outside] if outside.own else []),
    ]:
        row = stage.columns()
        rate = counts.rate(stage.walls, stage.busy, device, device_reason, sm_clock_mhz)
        rows.append(row | speed(rate))
    return pandas.DataFrame(rows, columns=[*Stage(("",)).columns(), *SPEED])


def _captured_stages(
    attribution: Attribution,
    work: GpuEvent,
    around: Sequence[CpuEvent],
    by_range: dict[int, Stage],
    stages: dict[tuple[str, ...], Stage],
) -> list[Stage]:
    """The stages of a replayed kernel inside those around its replay, outermost first: the ranges
    of its capture, then its annotation."""
    names = [event.name for event in attribution.captured_ranges(work)]
    names += [work.annotation] if work.annotation else []
    if not names:
        return []
    path = by_range[around[-1].index].path if around else ()
    found = []
    for name in names:
        path = (*path, name)
        found.append(stages.setdefault(path, Stage(path)))
    return found


def copies_table(attribution: Attribution) -> pandas.DataFrame:
    """Copies and fills by kind: name, calls, total_us, mean_us, bytes, gbs (1e9 bytes/s), op."""
    groups: dict[str, list[GpuEvent]] = defaultdict(list)
    for copy in attribution.trace.copies:
        groups[copy.name].append(copy)
    rows = []
    for name, copies in groups.items():
        total = sum(copy.duration for copy in copies)
        known = [copy.bytes for copy in copies if copy.bytes is not None]
        moved = sum(known) if len(known) == len(copies) else None
        ops: Counter[str] = Counter()
        for copy in copies:
            ops[owner_name(attribution, copy)] += copy.duration
        rows.append(
            {
                "name": name,
                "calls": len(copies),
                "total_us": total / 1e3,
                "mean_us": total / 1e3 / len(copies),
                "bytes": moved,
                "gbs": moved / total if moved is not None and total else None,
                "op": _longest_first(ops),
            }
        )
    columns = "name calls total_us mean_us bytes gbs op".split()
    table = pandas.DataFrame(rows, columns=columns)
    return table.sort_values("total_us", ascending=False, ignore_index=True)


def module_table(attribution: Attribution) -> pandas.DataFrame:
    """GPU time of nn.Modules, submodules included; backward counts for the forward's module.

    Columns: module (path), depth, gpu_us, forward_gpu_us, backward_gpu_us, kernels. Empty if
    modules were not recorded.
    """
    forward: Counter[tuple[str, ...]] = Counter()
    backward: Counter[tuple[str, ...]] = Counter()
    kernels: Counter[tuple[str, ...]] = Counter()
    for kernel in attribution.trace.kernels if attribution.has_frames else ():
        op = attribution.op(kernel)
        side = backward if op and attribution.forward_op(op) else forward
        path = attribution.module(kernel)
        for depth in range(1, len(path) + 1):
            side[path[:depth]] += kernel.duration
            kernels[path[:depth]] += 1
    rows = [
        {
            "module": "/".join(path),
            "depth": len(path) - 1,
            "gpu_us": (forward[path] + backward[path]) / 1e3,
            "forward_gpu_us": forward[path] / 1e3,
            "backward_gpu_us": backward[path] / 1e3,
            "kernels": count,
        }
        for path, count in ((path, kernels[path]) for path in depth_first(kernels))
    ]
    columns = "module depth gpu_us forward_gpu_us backward_gpu_us kernels".split()
    return pandas.DataFrame(rows, columns=columns)


def memory_table(attribution: Attribution) -> pandas.DataFrame:
    """Allocations by the innermost op that made them, on each device; empty if not recorded.

    Columns: op, device ("cpu" or "cuda:N"), allocations, allocated_bytes, released_bytes.
    """
    rows: dict[tuple[str, str], dict[str, int]] = defaultdict(Counter)
    for one in attribution.trace.memory:
        op = attribution.op_at(one.thread, one.time)
        device = "cpu" if one.device < 0 else f"cuda:{one.device}"
        row = rows[op.name if op else NO_OP, device]
        row["allocations"] += one.bytes > 0
        row["allocated_bytes"] += max(one.bytes, 0)
        row["released_bytes"] += max(-one.bytes, 0)
    columns = "op device allocations allocated_bytes released_bytes".split()
    found = [{"op": op, "device": device} | row for (op, device), row in rows.items()]
    table = pandas.DataFrame(found, columns=columns).fillna(0)
    return table.sort_values("allocated_bytes", ascending=False, ignore_index=True)


def allocation_table(attribution: Attribution) -> pandas.DataFrame:
    """Each allocation and release in order.

    Columns: time_us, op, device ("cpu" or "cuda:N"), bytes (negative for a release),
    allocated_bytes and reserved_bytes (totals after it).
    """
    rows = []
    for one in attribution.trace.memory:
        op = attribution.op_at(one.thread, one.time)
        device = "cpu" if one.device < 0 else f"cuda:{one.device}"
        about = (one.time / 1e3, op.name if op else None, device)
        rows.append((*about, one.bytes, one.allocated, one.reserved))
    columns = "time_us op device bytes allocated_bytes reserved_bytes".split()
    return pandas.DataFrame(rows, columns=columns)


# Parts


def speed(rate: Rate) -> dict[str, float | str | None]:
    """A rate as the SPEED columns."""
    return {
        "flops": rate.flops,
        "tflops": rate.tflops,
        "mfu": rate.mfu,
        "mfu_at_clock": rate.mfu_at_clock,
        "flops_rule": rate.rule,
        "peak": rate.peak,
        "flops_reason": rate.reason,
    }


def owner_name(attribution: Attribution, work: GpuEvent) -> str:
    """The op that launched GPU work, or the row for work without an op."""
    op = attribution.op(work) or attribution.captured_op(work)
    return op.name if op else REPLAY if attribution.replay(work) else NO_OP


def depth_first(paths: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Paths in depth-first order; siblings keep the given order."""
    rank: dict[tuple[str, ...], int] = {}
    found = list(paths)
    for path in found:
        for depth in range(1, len(path) + 1):
            rank.setdefault(path[:depth], len(rank))
    return sorted(found, key=lambda path: [rank[path[: i + 1]] for i in range(len(path))])


def path_of(ranges: Iterable[CpuEvent]) -> str:
    return "/".join(event.name for event in ranges)


def _longest_first(times: Counter[str]) -> str:
    return ", ".join(name for name, _ in times.most_common())


def _names(trace: Trace, outer: Sequence[int]) -> list[frozenset[str]]:
    """For each CPU event, the names of the op and of its enclosing ops, each once."""
    shared: dict[tuple[frozenset[str], str], frozenset[str]] = {}
    nothing: frozenset[str] = frozenset()
    names: list[frozenset[str]] = []
    for event, above in zip(trace.cpu, outer, strict=True):
        around = names[above] if above >= 0 else nothing
        if event.kind != "op":
            names.append(around)
            continue
        key = (around, event.name)
        names.append(shared.get(key) or shared.setdefault(key, around | {event.name}))
    return names


def _ops_of_functions(trace: Trace, outer: Sequence[int]) -> dict[int, int]:
    """An autograd.Function with exactly one op directly in it -> that op, both as indices.

    Autograd numbers the Function, not the op that it calls.
    """
    found: dict[int, int] = {}
    for event in trace.cpu:
        at = outer[event.index]
        if event.kind == "op" and at >= 0 and "::" not in trace.cpu[at].name:
            found[at] = -1 if at in found else event.index
    return {function: op for function, op in found.items() if op >= 0}
