"""What a profile looks like in a terminal: each table with the attribution line under it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pandas

from attnscope.common.console import say
from attnscope.profile.analysis.rates import peaks_text
from attnscope.profile.analysis.steps import PARTS
from attnscope.profile.analysis.tables import NO_OP, REPLAY, path_of
from attnscope.profile.attribution.owners import ENGINE, Attribution
from attnscope.profile.render.table import (
    Column,
    count,
    duration,
    mebibytes,
    percent,
    plain,
    print_table,
    unit_of,
)

if TYPE_CHECKING:
    from attnscope.profile.analysis.result import Result

NO_GPU_TIME = "no GPU time: no kernel ran in the region"
SORTED = (
    "name", "calls", "cpu_us", "self_cpu_us", "gpu_us", "self_gpu_us", "kernels", "gpu_mean_us",
    "gpu_share", "copy_us", "backward_gpu_us", "flops", "tflops", "mfu", "mfu_at_clock",
)  # fmt: skip

LINES_NOTE = "with the line where the function begins; backward work is with its forward op"
KINETO_NOTE = "ours are kernels, each once; key_averages() is as PyTorch counts"

KINETO: list[Column] = [
    ("row", "name", str),
    ("of", "row", str),
    ("kineto us", "kineto_us", lambda value: f"{value:,.2f}"),
    ("ours us", "ours_us", lambda value: f"{value:,.2f}"),
    ("explanation", "explanation", str),
]


def check_sort(sort: str | None) -> None:
    """Raises ValueError for what is not None or a column that operators can be sorted by."""
    if sort is not None and sort not in SORTED:
        known = ", ".join(SORTED)
        raise ValueError(f"sort: {sort!r} is not a column of the operators; one of {known}")


def print_profile(
    profile: Result, top: int = 20, sort: str | None = None, full_names: bool = False
) -> None:
    """Print every table that has rows, `top` rows of each, 1 or more.

    `sort` is a column of the operator table, one of SORTED (the default is GPU time, CPU time
    without a GPU); rows without a value come last. Raises ValueError for another and for another
    `top`, ProfileError for tables that cannot be true.
    """
    if not isinstance(top, int) or top < 1:
        raise ValueError(f"top: {top!r} is not a number of rows; an int, 1 or more")
    check_sort(sort)
    operators, stages, kernels = profile.operators(), profile.stages(), profile.kernels()
    gpu = bool(profile.trace.kernels)
    line = attribution_line(profile.attribution) if gpu else ""  # it is said once, above
    say(heading(profile), "bold")
    _print_state(profile)
    if profile.empty:
        say("nothing was recorded: no op, no range, no GPU event")
        return
    if len(stages):
        shown = stages.assign(
            range=["  " * d + n for d, n in zip(stages.depth, stages.range, strict=True)]
        )
        print_table("Stages", shown, _stage_columns(stages, gpu), top, line)
    key = sort or ("gpu_us" if gpu else "cpu_us")
    if not full_names:
        operators["name"] = [n.replace(ENGINE, "engine: ") for n in operators["name"]]
    apart = operators["name"].isin((REPLAY, NO_OP))
    ops = operators[~apart].sort_values(key, ascending=key == "name", kind="stable")
    pinned = operators[apart & (operators["kernels"] > 0)]
    print_table("Operators", ops, _operator_columns(operators, gpu), top, line, pinned)
    for said in speed_captions(profile):
        say(plain(said), "dim")
    if gpu:
        print_table("Kernels", kernels, _kernel_columns(kernels, full_names), top, line)
    if len(copies := profile.copies()):
        note = f"copies and fills: {duration(copies.total_us.sum())}, in no other table"
        print_table("Copies and fills", copies, _copy_columns(copies), top, note)
    if len(modules := profile.modules()):
        names = [
            "  " * depth + path.rpartition("/")[2]
            for depth, path in zip(modules.depth, modules.module, strict=True)
        ]
        print_table("Modules", modules.assign(module=names), _module_columns(modules), top, line)
    if len(lines := profile.lines()):
        print_table("Python lines", lines, _line_columns(lines), top, LINES_NOTE)
    if len(memory := profile.memory()):
        print_table("Memory", memory, _memory_columns(), top, _peak(profile))
    if profile.kineto is not None and gpu:
        comparison = profile.kineto_comparison()
        print_table("Beside key_averages()", comparison, KINETO, top, KINETO_NOTE)


def heading(profile: Result) -> str:
    """Name, card, window, the time of it with GPU work, wall time with and without the profiler."""
    from attnscope.profile.attribution.owners import busy_ns

    device = profile.device
    names = sorted({str(d.get("name")) for d in profile.trace.devices})
    unknown = "a GPU without a name" if profile.trace.gpu else "no GPU"
    said = [device.name if device else ", ".join(names) or unknown]
    window = (profile.trace.end - profile.trace.start) / 1e3
    said.append(f"window {duration(window)}")
    if profile.trace.gpu:
        said.append(f"GPU work in {duration(busy_ns(profile.trace.gpu) / 1e3)} of it")
    if profile.sm_clock_mhz is not None:
        said.append(f"SM clock {profile.sm_clock_mhz:.0f} MHz right after")
    if profile.wall_s is not None:
        wall = f"wall {duration(profile.wall_s * 1e6)} with the profiler"
        if profile.unprofiled_wall_s is not None:
            without = profile.unprofiled_wall_s
            ratio = f" ({profile.wall_s / without:.2f}x)" if without else ""
            said.append(f"{wall}, {duration(without * 1e6)} without{ratio}")
        else:
            said.append(f"{wall}; without: not measured ({profile.unprofiled_reason})")
    return f"{profile.name}: " + "; ".join(said)


def attribution_line(attribution: Attribution) -> str:
    """How much of the GPU time has an owner, and what has none."""
    from attnscope.profile.analysis.kernel_names import short_name

    if attribution.share is None:
        return NO_GPU_TIME
    total, replayed = attribution.total_ns, attribution.replayed_ns
    said = f"{percent(attribution.share)} of {duration(total / 1e3)} GPU time owned"
    by_ops = attribution.owned_ns - replayed
    if not replayed:
        said += " by ops"
    else:
        said += f": {percent(by_ops / total)} by ops, " if by_ops else ": "
        said += f"{percent(replayed / total)} by replays of CUDA graphs (the trace does not say "
        said += "which op captured a kernel)"
    if not attribution.unowned:
        return said
    groups: Counter[tuple[str, str]] = Counter()
    times: Counter[tuple[str, str]] = Counter()
    for kernel in attribution.unowned:
        where = path_of(attribution.ranges(kernel))
        where = f"in range {where}" if where else "in no range"
        key = (short_name(kernel.name), where if kernel.launch >= 0 else "launch not in the trace")
        groups[key] += 1
        times[key] += kernel.duration
    rest = [
        f"{groups[key]} x {key[0]}, {duration(time / 1e3)}, {key[1]}"
        for key, time in times.most_common(5)
    ]
    more = f"; and {len(times) - 5} more kinds" if len(times) > 5 else ""
    return f"{said}; not owned: " + "; ".join(rest) + more


def speed_captions(profile: Result) -> list[str]:
    """How FLOPs were counted and what MFU is a share of; empty where none were counted."""
    if not (rules := profile.flop_counts.rules()):
        return []
    said = [f"FLOPs are counted as: {'; '.join(rules)}."]
    device, dtypes = profile.device, profile.flop_counts.dtypes()
    if device is not None and (peaks := peaks_text(device, dtypes)):
        said.append(f"MFU is of the dense peak of {device.name}: {peaks} ({device.source}).")
    return said


def _print_state(profile: Result) -> None:
    audit = profile.audit
    if profile.incomplete:
        say(f"INCOMPLETE: {profile.incomplete}. Times below are too small.", "bold red")
    elif audit.launches:
        said = f"complete: each of {audit.launches} launches has its work in the trace"
        said += f"; {audit.captured} more were captured into a graph" if audit.captured else ""
        say(said, "green")
    if audit.orphans:
        say(f"kernels without a launch call in the trace: {len(audit.orphans)}", "yellow")
    if wrong := profile.attribution.disagreements:
        say(f"kernels whose launch lies in another op than their id names: {len(wrong)}", "yellow")
    if profile.interrupted:
        say(f"ended by {profile.interrupted}; what ran before it is below", "yellow")
    if not profile.trace.kernels:
        say(NO_GPU_TIME, "yellow")
    elif profile.device is None:
        say(f"no MFU: {profile.device_reason}", "yellow")


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


FIGURES = {
    "gpu_utilisation": "GPU utilisation",
    "sm_efficiency": "SM efficiency (estimate)",
    "occupancy": "achieved occupancy (estimate)",
    "tensor_core_time_share": "time in kernels with tensor cores",
}
EVIDENCE = 3  # rows shown of a finding


def print_use(profile: Result, top: int) -> None:
    """Print the step breakdown, the efficiency figures and the findings. Nothing without events."""
    if profile.empty:
        return
    _print_steps(profile, top)
    if profile.trace.kernels:
        _print_efficiency(profile)
        _print_findings(profile)


def _print_steps(profile: Result, top: int) -> None:
    steps = profile.steps()
    columns: list[Column] = [("step", "step", str), ("wall", "wall_us", duration)]
    columns += [(part, f"{part}_us", duration) for part in PARTS if steps[f"{part}_us"].any()]
    note = f"steps: {steps.attrs['steps']}; each instant counts once, in the leftmost part"
    if steps.attrs["setup_us"] is not None:
        note += f"; set-up in the first step: {duration(max(steps.attrs['setup_us'], 0.0))}"
    print_table("Steps", steps, columns, top, note)


def _print_efficiency(profile: Result) -> None:
    found = profile.efficiency()
    for key, label in FIGURES.items():
        value = getattr(found, key)
        text = percent(value) if value is not None else f"missing: {found.reasons.get(key)}"
        if key == "occupancy" and found.occupancy_from:
            text += f" ({found.occupancy_from})"
        say(f"{label:34} {text}")


def _print_findings(profile: Result) -> None:
    for finding in profile.findings():
        say("")
        say(plain(f"{finding.kind}: {finding.title}"), "bold yellow")
        for row in finding.evidence[:EVIDENCE]:
            say("  " + ", ".join(_said(key, value) for key, value in row.items()))
        if len(finding.evidence) > EVIDENCE:
            say(f"  and {len(finding.evidence) - EVIDENCE} more", "dim")
        say(f"  try: {finding.advice}")


def _said(key: str, value: object) -> str:
    if key.endswith("_us") and isinstance(value, int | float):
        return f"{key.removesuffix('_us')} {duration(value)}"
    text = f"{value:.4g}" if isinstance(value, float) else plain(str(value))
    return f"{key} {text if len(text) <= 60 else text[:59] + '…'}"
