"""Communication between ranks: each collective's time, bytes, and what ran beside it."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import pandas

from attnscope.profile.analysis.kernel_names import category
from attnscope.profile.attribution.owners import Attribution
from attnscope.profile.trace.collectives import Collective, bus_factor, element_bytes, kind_of
from attnscope.profile.trace.events import CpuEvent, GpuEvent

# Back ends that run collectives on threads of the CPU, as the prefix of their ranges.
CPU_BACK_ENDS = ("gloo:", "mpi:", "ucc:")
CATEGORY = "communication"
CALLS = (
    "collective", "group", "members", "size", "dtype", "bytes", "sequence", "gpu", "start_us",
    "time_us", "exposed_us",
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One collective of this rank: a kernel, or a range of a CPU back end (`gpu` is None).

    `exposed` is the time, in nanoseconds, in which its device ran nothing else.
    """

    what: Collective
    gpu: int | None
    start: int
    duration: int
    exposed: int


def collective_calls(attribution: Attribution) -> list[Call]:
    """The collectives of a trace in order of start."""
    found = [*_on_gpus(attribution), *_on_cpu(attribution)]
    return sorted(found, key=lambda call: call.start)


def _on_gpus(attribution: Attribution) -> list[Call]:
    trace = attribution.trace
    kernels = [kernel for kernel in trace.kernels if category(kernel.name) == CATEGORY]
    if not kernels:
        return []
    others: dict[int, list[GpuEvent]] = defaultdict(list)
    for kernel in trace.kernels:
        if category(kernel.name) != CATEGORY:
            others[kernel.device].append(kernel)
    busy = {device: _Busy(events) for device, events in others.items()}
    calls = []
    for kernel in kernels:
        op = attribution.op(kernel)
        ids = (kernel.external_id, op.external_id if op else 0)
        known = next((trace.collectives[i] for i in ids if i in trace.collectives), None)
        covered = busy[kernel.device].within(kernel) if kernel.device in busy else 0
        what = known or Collective(kind_of(kernel.name))
        span = (kernel.start, kernel.duration, kernel.duration - covered)
        calls.append(Call(what, kernel.device, *span))
    return calls


def _on_cpu(attribution: Attribution) -> list[Call]:
    trace = attribution.trace
    ranges = [
        event
        for event in trace.cpu
        if event.kind == "range" and event.name.startswith(CPU_BACK_ENDS)
    ]
    if not ranges:
        return []
    # Ops wait for no collective while they run, except c10d's own.
    busy = _Busy(e for e in trace.cpu if e.kind == "op" and not e.name.startswith("c10d::"))
    calls = []
    for event in ranges:
        dtype = (event.dtypes or (None,))[0]
        size = element_bytes(dtype)
        shape = (event.shapes or (None,))[0]
        bytes_ = prod(shape) * size if size and shape is not None else None
        what = Collective(kind_of(event.name), dtype=dtype, bytes=bytes_)
        span = (event.start, event.duration, event.duration - busy.within(event))
        calls.append(Call(what, None, *span))
    return calls


class _Busy:
    """The times in which any of some events ran; the events are sorted by start."""

    def __init__(self, events: Iterable[CpuEvent | GpuEvent]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for event in events:
            if self._ends and event.start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], event.end)
            else:
                self._starts.append(event.start)
                self._ends.append(event.end)
        lengths = (end - start for start, end in zip(self._starts, self._ends, strict=True))
        self._sums = list(accumulate(lengths, initial=0))

    def within(self, event: CpuEvent | GpuEvent) -> int:
        """Nanoseconds of an event in which any of the others ran."""
        return self._before(event.end) - self._before(event.start)

    def _before(self, time: int) -> int:
        at = bisect_right(self._starts, time)
        return self._sums[at] - max(0, self._ends[at - 1] - time) if at else 0


def communication_table(calls: Iterable[Call]) -> pandas.DataFrame:
    """One row for each kind of collective of a group, longest time first.

    Columns: collective, group, size (ranks of the group), dtype, calls, bytes, total_us, mean_us,
    exposed_us (its device ran nothing else), overlapped_us, bus_gbs (bytes over the busiest link in
    1e9 bytes/s, as nccl-tests counts them; the time includes waiting for late ranks).
    """
    groups: dict[tuple[Any, ...], list[Call]] = defaultdict(list)
    for call in calls:
        what = call.what
        groups[what.kind, what.group, what.size, what.dtype].append(call)
    rows = []
    for (kind, group, size, dtype), members in groups.items():
        total = sum(call.duration for call in members)
        exposed = sum(call.exposed for call in members)
        sizes = [call.what.bytes for call in members]
        moved = None if None in sizes else sum(size for size in sizes if size is not None)
        row: dict[str, Any] = {"collective": kind, "group": group, "size": size, "dtype": dtype}
        row |= {"calls": len(members), "bytes": moved, "total_us": total / 1e3}
        row |= {"mean_us": total / 1e3 / len(members), "exposed_us": exposed / 1e3}
        row |= {"overlapped_us": (total - exposed) / 1e3}
        rows.append(row | {"bus_gbs": bus_gbs(kind, size, moved, total)})
    columns = (
        "collective group size dtype calls bytes total_us mean_us exposed_us overlapped_us bus_gbs"
    )
    table = pandas.DataFrame(rows, columns=columns.split())
    return table.sort_values("total_us", ascending=False, ignore_index=True)


def bus_gbs(kind: str, size: int | None, moved: int | None, ns: float) -> float | None:
    """Bus bandwidth of a collective; None if its bytes or its group's size are unknown."""
    factor = bus_factor(kind, size)
    return moved * factor / ns if moved and factor and ns else None


def call_table(calls: Iterable[Call]) -> pandas.DataFrame:
    """One row for each collective, in order: the columns CALLS; `gpu` is missing on a CPU."""
    rows = []
    for call in calls:
        what = call.what
        facts = (what.kind, what.group, what.members, what.size, what.dtype, what.bytes)
        times = (call.start / 1e3, call.duration / 1e3, call.exposed / 1e3)
        rows.append((*facts, what.sequence, call.gpu, *times))
    return pandas.DataFrame(rows, columns=CALLS)
