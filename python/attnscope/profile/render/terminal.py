"""Prints a profile in a terminal: each table with the attribution line under it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from attnscope.common.console import say
from attnscope.profile.analysis.catalog import TABLES
from attnscope.profile.analysis.kernel_names import short_name
from attnscope.profile.analysis.lint import LOST, Lint
from attnscope.profile.analysis.tables import path_of
from attnscope.profile.attribution.owners import Attribution, busy_ns
from attnscope.profile.render.table import duration, percent, plain, print_table
from attnscope.profile.render.views import How, view_of

if TYPE_CHECKING:
    from attnscope.profile.analysis.result import Result

NO_GPU_TIME = "no GPU time: no kernel ran in the region"
SORTED = (
    "name", "calls", "cpu_us", "self_cpu_us", "gpu_us", "self_gpu_us", "kernels", "gpu_mean_us",
    "gpu_share", "copy_us", "backward_gpu_us", "flops", "tflops", "mfu", "mfu_at_clock",
)  # fmt: skip
FIGURES = {
    "gpu_utilisation": "GPU utilisation",
    "sm_efficiency": "SM efficiency (estimate)",
    "occupancy": "achieved occupancy (estimate)",
    "tensor_core_time_share": "time in kernels with tensor cores",
}
EVIDENCE = 3  # rows shown of a finding


def check_sort(sort: str | None) -> None:
    """Raises ValueError unless `sort` is None or a column that operators can be sorted by."""
    if sort is not None and sort not in SORTED:
        known = ", ".join(SORTED)
        raise ValueError(
            f"sort must be a column of the operators, got {sort!r}. Use one of {known}"
        )


def print_profile(
    profile: Result, top: int = 20, sort: str | None = None, full_names: bool = False
) -> None:
    """Print the first `top` rows of every table, the efficiency figures and the findings.

    `top` is at least 1. `sort` is a column of the operator table, one of SORTED (default: self GPU
    time, or self CPU time without a GPU); rows without a value come last. Raises ValueError for an
    invalid `sort` or `top`, ProfileError for tables that contradict the trace.
    """
    if not isinstance(top, int) or top < 1:
        raise ValueError(f"top must be an integer of at least 1, got {top!r}")
    check_sort(sort)
    gpu = bool(profile.trace.kernels)
    line = attribution_line(profile.attribution) if gpu else ""  # printed once, above
    how = How(line, sort or ("self_gpu_us" if gpu else "self_cpu_us"), gpu, full_names)
    titles = {name: kind.title for name, kind in TABLES.items() if kind.title}
    # Refuse a table that contradicts the trace before anything is printed.
    views = {name: view_of(name, profile, how) for name in titles}
    _print_verdict(profile)
    say(heading(profile), "bold")
    _print_state(profile)
    if profile.empty:
        what = "read" if profile.trace.faults.unread else "recorded"
        say(f"nothing was {what}: no op, no range, no GPU event")
        return
    for name, view in views.items():
        if view is None:
            continue
        print_table(str(titles[name]), view.table, view.columns, top, view.note, view.pinned)
        for text in view.below:
            say(plain(text), "dim")
    if gpu:
        _print_efficiency(profile)
        _print_findings(profile)


def _print_verdict(profile: Result) -> None:
    if profile.empty:
        return
    found = profile.verdict
    doubt = "" if profile.lint.trusted else " (from tables that cannot be trusted)"
    say(plain(f"{found.title}{doubt}"), "bold magenta" if profile.lint.trusted else "bold red")
    for line in found.evidence:
        say(plain(f"  {line}"), "dim")


def heading(profile: Result) -> str:
    """Name, card, window, its time with GPU work, wall time with and without the profiler."""
    device = profile.device
    names = sorted({str(d.get("name")) for d in profile.trace.devices})
    unknown = "a GPU without a name" if profile.trace.gpu else "no GPU"
    facts = [device.name if device else ", ".join(names) or unknown]
    window = (profile.trace.end - profile.trace.start) / 1e3
    facts.append(f"window {duration(window)}")
    if profile.trace.gpu:
        facts.append(f"GPU work in {duration(busy_ns(profile.trace.gpu) / 1e3)} of it")
    if profile.sm_clock_mhz is not None:
        facts.append(f"SM clock {profile.sm_clock_mhz:.0f} MHz right after")
    if profile.wall_s is not None:
        wall = f"wall {duration(profile.wall_s * 1e6)} with the profiler"
        if profile.unprofiled_wall_s is not None:
            without = profile.unprofiled_wall_s
            ratio = f" ({profile.wall_s / without:.2f}x)" if without else ""
            facts.append(f"{wall}, {duration(without * 1e6)} without{ratio}")
        else:
            facts.append(f"{wall}; without: not measured ({profile.unprofiled_reason})")
    return f"{profile.name}: " + "; ".join(facts)


def attribution_line(attribution: Attribution) -> str:
    """How much of the GPU time has an owner, and how much has none."""
    if attribution.share is None:
        return NO_GPU_TIME
    total, replayed = attribution.total_ns, attribution.replayed_ns
    line = f"{percent(attribution.share)} of {duration(total / 1e3)} GPU time owned"
    by_ops, captured = attribution.owned_ns - replayed, attribution.captured_ns
    if not replayed:
        line += " by ops"
    else:
        line += f": {percent(by_ops / total)} by ops, " if by_ops else ": "
        line += f"{percent(replayed / total)} by replays of CUDA graphs (the trace does not show "
        line += "which op captured a kernel)"
    if captured:
        line += f" ({percent(captured / total)} by ops that captured it into CUDA graphs)"
    if not attribution.unowned:
        return line
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
    return f"{line}; not owned: " + "; ".join(rest) + more


def completeness(profile: Result) -> str:
    """Whether every launch has its work in the trace; "" without launches."""
    audit = profile.audit
    if profile.incomplete:
        return f"INCOMPLETE: {profile.incomplete}. Times below are too small."
    if not audit.launches:
        return ""
    line = f"complete: each of {audit.launches} launches has its work in the trace"
    return line + (f"; {audit.captured} more were captured into a graph" if audit.captured else "")


def _print_state(profile: Result) -> None:
    if line := completeness(profile):
        say(line, "bold red" if profile.incomplete else "green")
    print_lint(profile.lint)
    for note in notes(profile):
        say(plain(note), "yellow")


def notes(profile: Result) -> list[str]:
    """What a reader of the tables must know besides the faults of the trace."""
    trace, found = profile.trace, []
    if profile.interrupted:
        found.append(f"ended by {profile.interrupted}; what ran before it is below")
    if not trace.kernels and not trace.faults.unread:
        found.append(NO_GPU_TIME)
        if any(event.kind == "python" for event in trace.cpu):
            found.append(
                "Python lines and modules are shown by GPU time: none ran, so none is shown"
            )
    elif trace.kernels and profile.device is None:
        found.append(f"no MFU: {profile.device_reason}")
    if trace.memory:
        found.append("with memory, PyTorch records no ops of threads that the program started")
    return found


def print_lint(lint: Lint, lost: bool = False) -> None:
    """Print the verdict on the trace and a line for each kind of fault; `lost` with lost launches,
    which the head of a report reports by itself."""
    say(plain(lint.verdict), "green" if lint.trusted else "bold red")
    for fault in lint.faults:
        if lost or fault.kind != LOST:
            say(plain(f"  {fault}"), "red" if fault.distrust else "yellow")


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
            facts = (_said(key, value) for key, value in row.items() if value is not None)
            say("  " + ", ".join(facts))
        if len(finding.evidence) > EVIDENCE:
            say(f"  and {len(finding.evidence) - EVIDENCE} more", "dim")
        say(f"  try: {finding.advice}")


def _said(key: str, value: object) -> str:
    if key.endswith("_us") and isinstance(value, int | float):
        return f"{key.removesuffix('_us')} {duration(value)}"
    text = f"{value:.4g}" if isinstance(value, float) else plain(str(value))
    return f"{key} {text if len(text) <= 60 else text[:59] + '…'}"
