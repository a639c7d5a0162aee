"""What limits a program, as one line with its numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from attnscope.profile.analysis.findings import STARVED_SHARE
from attnscope.profile.analysis.gaps import Idle, idle_time
from attnscope.profile.analysis.kernel_names import category, short_name
from attnscope.profile.analysis.steps import program_window
from attnscope.profile.attribution.owners import Attribution

BUSY = 0.7  # share of the time with GPU work; from here on the GPU limits the program
EXPOSED = 0.3  # share of the time with communication that nothing overlaps
SHORT_SPAN = 0.5  # share of the program; less GPU work than that is said
SHOWN = 0.01  # categories with a smaller share are not shown


@dataclass(frozen=True)
class Verdict:
    """What limits a program: `title` is one line, `evidence` has the numbers behind it."""

    title: str
    evidence: tuple[str, ...]


def verdict(attribution: Attribution, unprofiled_wall_s: float | None = None) -> Verdict:
    """What limits the program.

    Args:
        attribution: the owners of the trace.
        unprofiled_wall_s: seconds that the region takes without the profiler, if known. A GPU that
            waits for launches under the profiler only is not reported as waiting.
    """
    trace = attribution.trace
    if not trace.gpu:
        return _of_cpu(attribution)
    idle = idle_time(attribution)
    span = max(idle.span, 1)
    without = idle.busy / (unprofiled_wall_s * 1e9) if unprofiled_wall_s else None
    where, shares = _limit(idle, without), _shares(attribution)
    parts = [f"{name} {share:.0%}" for name, share in shares.items()][:2]
    if "attention" in shares and shares["attention"] >= SHOWN:
        text = f"attention {shares['attention']:.0%}"
        parts += [text] if text not in parts else []
    title = f"{where}; {', '.join(parts)} of its work" if parts else where
    return Verdict(title, tuple(_evidence(attribution, idle, span, without, shares)))


def starves(idle: Idle, without: float | None) -> bool:
    """Whether the GPU waits for launches, not under the profiler only.

    `without` is the share of the time without the profiler that GPU work fills, if known.
    """
    under = idle.starved >= STARVED_SHARE * max(idle.span, 1)
    return under and (without is None or 1 - without >= STARVED_SHARE)


def _limit(idle: Idle, without: float | None) -> str:
    span = max(idle.span, 1)
    if starves(idle, without):
        return f"the GPU waited for launches {idle.starved / span:.0%} of the time"
    if idle.exposed >= EXPOSED * span:
        share = idle.exposed / span
        return f"communication that no other kernel overlaps took {share:.0%} of the time"
    if without is not None and without > idle.busy / span:
        return f"the GPU worked {min(without, 1):.0%} of the time without the profiler"
    if idle.busy >= BUSY * span:
        return f"the GPU worked {idle.busy / span:.0%} of the time"
    waiting = f", waiting for launches {idle.starved / span:.0%}"
    return f"the GPU worked {idle.busy / span:.0%} of the time{waiting}"


def _shares(attribution: Attribution) -> dict[str, float]:
    """The share of kernel time of each category, largest first."""
    times: Counter[str] = Counter()
    for kernel in attribution.trace.kernels:
        times[category(kernel.name)] += kernel.duration
    total = times.total()
    return {name: ns / total for name, ns in times.most_common() if ns} if total else {}


def _evidence(
    attribution: Attribution,
    idle: Idle,
    span: int,
    without: float | None,
    shares: dict[str, float],
) -> list[str]:
    trace = attribution.trace
    lines = [
        f"from the first GPU work to the last, {span / 1e6:,.3f} ms: busy {idle.busy / span:.1%}, "
        f"waiting for launches {idle.starved / span:.1%}, idle for other reasons "
        f"{idle.rest / span:.1%}"
    ]
    start, end = program_window(trace)
    if idle.span < SHORT_SPAN * (end - start):
        before = (trace.gpu[0].start - start) / 1e6
        lines.append(
            f"GPU work spans {idle.span / (end - start):.1%} of the program; {before:,.1f} ms are "
            "before it"
        )
    if without is not None:
        lines.append(f"without the profiler GPU work fills {min(without, 1):.1%} of the wall time")
    if shares:
        names = [f"{name} {share:.1%}" for name, share in shares.items() if share >= SHOWN]
        lines.append(f"kernel time: {', '.join(names)}")
        lines.append(_longest(attribution))
    if idle.exposed:
        lines.append(f"communication that no other kernel overlaps: {idle.exposed / 1e6:,.3f} ms")
    return lines


def _longest(attribution: Attribution) -> str:
    times: Counter[str] = Counter()
    for kernel in attribution.trace.kernels:
        times[kernel.name] += kernel.duration
    (symbol, ns), *_ = times.most_common(1)
    share = ns / attribution.total_ns
    return f"longest kernel: {short_name(symbol)}, {share:.1%} of kernel time"


def _of_cpu(attribution: Attribution) -> Verdict:
    """The op with most self CPU time, where no GPU work was recorded."""
    trace = attribution.trace
    own: Counter[str] = Counter()
    for event in trace.cpu:
        if event.kind == "op":
            own[event.name] += event.duration
            outer = next((e for e in trace.ancestors(event) if e.kind == "op"), None)
            if outer is not None:
                own[outer.name] -= event.duration
    if not own.total():
        return Verdict("no GPU work and no op was recorded", ())
    gpu = "no GPU work was read" if trace.faults.unread else "no GPU work"
    (name, ns), *_ = own.most_common(1)
    start, end = program_window(trace)
    share = own.total() / max(1, end - start)
    return Verdict(
        f"{gpu}; {name} takes {ns / own.total():.0%} of the ops' CPU time",
        (f"ops took {own.total() / 1e6:,.3f} ms of CPU time, {share:.0%} of the program's time",),
    )
