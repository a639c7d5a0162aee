"""Whether the tables of a trace can be trusted: every kind of fault in it, counted.

`lint` is the first part of every report and the whole of `attnscope profile --check`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from attnscope.profile.attribution.audit import LAUNCH, Audit
from attnscope.profile.attribution.owners import Attribution
from attnscope.profile.trace.markers import GRAPH_LAUNCHES

# Share of the GPU work (events or time) that may be faulty in a trace that is trusted: less does
# not change what the tables show.
FEW = 0.01
LOST = "lost launches"


@dataclass(frozen=True)
class Fault:
    """A kind of fault in a trace.

    Attributes:
        kind: what is wrong, in a few words.
        count: how many events have it.
        effect: what was done about it, as a clause.
        distrust: whether the tables cannot be trusted because of it.
    """

    kind: str
    count: int
    effect: str
    distrust: bool

    def __str__(self) -> str:
        return f"{self.kind}: {self.count:,} ({self.effect})"


@dataclass(frozen=True)
class Lint:
    """The faults of a trace and its size.

    Attributes:
        faults: the kinds of faults found, those that forbid trust first.
        events: how many CPU and GPU events the tables are made of.
    """

    faults: tuple[Fault, ...]
    events: str

    @property
    def trusted(self) -> bool:
        """Whether the tables can be trusted."""
        return not any(fault.distrust for fault in self.faults)

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.trusted:
            rest = "" if self.faults else ", no fault"
            return f"the tables can be trusted: {self.events}{rest}"
        reasons = ", ".join(fault.kind for fault in self.faults if fault.distrust)
        return f"DO NOT TRUST the tables: {reasons}"


def lint(attribution: Attribution, audit: Audit) -> Lint:
    """The faults of a trace, from what its reader counted and from its ids."""
    trace = attribution.trace
    checks: tuple[Callable[[Attribution, Audit], Iterator[Fault]], ...] = (
        _unread, _processes, _left_out, _times, _ids, _launches,
    )  # fmt: skip
    found = [fault for check in checks for fault in check(attribution, audit) if fault.count]
    found.sort(key=lambda fault: not fault.distrust)
    processes = len(trace.faults.pids)
    events = f"{len(trace.gpu):,} GPU and {len(trace.cpu):,} CPU events"
    if processes > 1:
        events += f" of {processes} processes"
    return Lint(tuple(found), events)


def _unread(attribution: Attribution, audit: Audit) -> Iterator[Fault]:
    for (category, phase), count in attribution.trace.faults.unread.most_common():
        kind = f"unknown events {category!r}"
        if phase != "X":
            kind += f" in phase {phase!r}"
        effect = "not read: PyTorch 2 does not write them. Record with PyTorch 2 on an NVIDIA GPU"
        yield Fault(kind, count, effect, True)


def _processes(attribution: Attribution, audit: Audit) -> Iterator[Fault]:
    pids = attribution.trace.faults.pids
    if len(pids) > 1:
        names = ", ".join(pid for pid, _ in pids.most_common(4))
        effect = f"pids {names}: ids are unique in one process only. Export each process by itself"
        yield Fault("processes in one trace", len(pids), effect, True)


def _left_out(attribution: Attribution, audit: Audit) -> Iterator[Fault]:
    faults, many = attribution.trace.faults, _is_much(attribution)
    yield Fault("repeated events", faults.duplicates, "counted once", False)
    first = f"left out; the first: {faults.first_malformed}"
    malformed = faults.malformed
    yield Fault("events with a missing or bad value", malformed, first, many(malformed))
    yield Fault("negative durations", faults.negative, "left out", many(faults.negative))
    yield Fault(
        "times of 0, or half a day or more from the others",
        faults.far,
        "left out",
        many(faults.far),
    )


def _times(attribution: Attribution, audit: Audit) -> Iterator[Fault]:
    faults, many = attribution.trace.faults, _is_much(attribution)
    by = f"by up to {faults.earliest_ns / 1e3:,.1f} us"
    if faults.clocks_differ:
        effect = f"{by}: the clocks of CPU and GPU differ, only GPU times can be right"
        yield Fault("GPU work before its launch", faults.early, effect, True)
    else:
        yield Fault("GPU work before its launch", faults.early, f"{by}; left out", False)
    effect = f"cut where that work starts, {faults.clipped_ns / 1e6:,.3f} ms less"
    kind = "GPU work that outlasts later work of its stream"
    yield Fault(kind, faults.clipped, effect, many(faults.clipped))
    yield Fault("kernels without a duration", faults.instant, "count 0 us", many(faults.instant))


def _is_much(attribution: Attribution) -> Callable[[int], bool]:
    trace = attribution.trace
    events = len(trace.gpu) or len(trace.cpu)
    return lambda count: count > max(1, FEW * events)


def _ids(attribution: Attribution, audit: Audit) -> Iterator[Fault]:
    total = attribution.total_ns or 1
    closed = attribution.unfit
    disputed = sum(kernel.duration for kernel in attribution.disagreements)
    yield Fault(
        "external ids of an op that is not open at the launch",
        len(closed),
        "not used: the launch time names the op",
        disputed > FEW * total,
    )
    inside = len(attribution.disagreements) - sum(
        1 for kernel in closed if kernel.kind == "kernel" and kernel.launch >= 0
    )
    effect = "the id decides"
    kind = "external ids of another op than the innermost at the launch"
    yield Fault(kind, inside, effect, disputed > FEW * total)


def _launches(attribution: Attribution, audit: Audit) -> Iterator[Fault]:
    trace = attribution.trace
    lost = len(audit.lost) + audit.sentinels.count(0)
    yield Fault(LOST, lost, audit.problem or "", audit.problem is not None)
    shared = _shared_launches(attribution)
    effect = "a launch starts one kernel: ids of several processes are mixed, or were reused"
    yield Fault("kernels that share a launch", shared, effect, shared > FEW * len(trace.kernels))
    orphans = sum(kernel.duration for kernel in audit.orphans)
    effect = f"{orphans / (attribution.total_ns or 1):.2%} of GPU time, owned by an id or by no op"
    yield Fault("kernels without a launch call in the trace", len(audit.orphans), effect, False)


def _shared_launches(attribution: Attribution) -> int:
    trace = attribution.trace
    seen: set[int] = set()
    shared = 0
    for kernel in trace.kernels:
        name = trace.cpu[kernel.launch].name if kernel.launch >= 0 else ""
        if LAUNCH.match(name) and not name.startswith(GRAPH_LAUNCHES):
            shared += kernel.launch in seen
            seen.add(kernel.launch)
    return shared
