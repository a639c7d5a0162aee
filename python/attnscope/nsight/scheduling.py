"""How the GPU was kept busy: gaps and their causes, allocations, streams and devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from attnscope.nsight.analysis import OUTSIDE, Analysis, Row, once, union
from attnscope.nsight.nesting import NONE, busy_by, factorize, group_by, sums
from attnscope.nsight.recording import MEMORY_KINDS, PROCESS, Array
from attnscope.ranges import WARMUP

GAP_NS = 1_000  # shorter gaps are the hardware's own
LATE, WAITED, ALLOCATED, IN_TIME, UNSEEN = range(5)  # causes of a gap
CAUSES = (
    "late launch: the CPU was busy", "late launch: the CPU waited for the GPU",
    "late launch: memory was allocated", "launched in time: dependency or latency",
    "launch not in the report",
)  # fmt: skip


@once
def gap_rows(of: Analysis) -> list[Row]:
    """Times without GPU work between two pieces of it, by cause and range of the second."""
    rows = []
    for device in of.devices:
        gap, cause, path = _gaps(of, device)
        first, group = group_by(cause, path)
        time = sums(group, gap, len(first))
        count = np.bincount(group, minlength=len(first))
        longest = np.zeros(len(first), np.int64)
        np.maximum.at(longest, group, gap)
        window = of.spans[device][1]
        for at, one in enumerate(first.tolist()):
            ns, n = int(time[at]), int(count[at])
            rows.append(
                {"cause": CAUSES[cause[one]], "before work of": of.path_text(int(path[one]))}
                | {"GPU": device if len(of.devices) > 1 else None, "gaps": n}
                | {"total ms": ns / 1e6, "mean us": ns / n / 1e3}
                | {"longest us": int(longest[at]) / 1e3}
                | {"of the time %": 100 * ns / window}
            )
    return sorted(rows, key=lambda row: -row["total ms"])


def _gaps(of: Analysis, device: int) -> tuple[Array, Array, Array]:
    """Length, cause, and path of the work after it, of each gap that lies inside the mask."""
    work, projection = of.recording.work, of.projection
    here = np.flatnonzero(work["device"] == device)
    start, reached = work["start"][here][1:], np.maximum.accumulate(work["end"][here])[:-1]
    around = of.around[here]
    inside = (around[1:] == around[:-1]) & (around[1:] != NONE) & (start - reached >= GAP_NS)
    for pause in of.recording.breaks:  # captures of one run, joined
        inside &= ~((reached <= pause) & (start > pause))
    after, idle = here[1:][inside], reached[inside]
    call, launched = projection.call[after], projection.launched[after]
    late = (call != NONE) & (launched > idle)
    cause = np.where(call == NONE, UNSEEN, np.where(late, LATE, IN_TIME))
    for chosen, name in (
        (of.recording.synchronisations, WAITED),
        (of.recording.allocations, ALLOCATED),
    ):
        cause[late & _during(of, chosen, call, idle, launched)] = name
    return start[inside] - idle, cause, of.path_at(projection.inner[after])


def _during(of: Analysis, chosen: Array, call: Array, low: Array, high: Array) -> Array:
    """Whether the last chosen call before `high` on the thread of `call` ended after `low`."""
    calls = of.recording.calls
    found = np.zeros(len(call), bool)
    if not len(calls["start"]):
        return found
    tids = calls["tid"][call]
    for tid in np.unique(tids):
        ours = np.flatnonzero(chosen & (calls["tid"] == tid))
        if len(ours):
            mine = np.flatnonzero(tids == tid)
            at = np.searchsorted(calls["start"][ours], high[mine]) - 1
            found[mine] = (at >= 0) & (calls["end"][ours][at] > low[mine])
    return found


@once
def allocation_rows(of: Analysis) -> list[Row]:
    """Calls that allocate or free memory, by function and path of ranges."""
    calls, chosen = of.recording.calls, np.flatnonzero(of.recording.allocations)
    name, start, tid = (calls[key][chosen] for key in ("name", "start", "tid"))
    path = of.path_at(of.projection.innermost(tid, start))
    first, group = group_by(name, path)
    times = calls["end"][chosen] - start
    total = sums(group, times, len(first))
    count = np.bincount(group, minlength=len(first))
    longest = np.zeros(len(first), np.int64)
    np.maximum.at(longest, group, times)
    rows = [
        {"call": of.recording.call_name(name[one]), "range": of.path_text(int(path[one]))}
        | {"count": int(count[at]), "total ms": int(total[at]) / 1e6}
        | {"longest us": int(longest[at]) / 1e3}
        for at, one in enumerate(first.tolist())
        if of.is_within(of.projection.names_of(int(path[one])))
    ]
    return sorted(rows, key=lambda row: (row["range"] == OUTSIDE, -row["total ms"]))


@once
def memory_rows(of: Analysis) -> list[Row]:
    """Memory by device and kind, where nsys recorded it: allocated, released, and the peak of what
    was allocated since the recording began."""
    memory = of.recording.memory
    first, group = group_by(memory["device"], memory["kind"])
    rows = []
    for at, one in enumerate(first.tolist()):
        here = group == at
        released = memory["released"][here] == 1
        change = np.where(released, -memory["bytes"][here], memory["bytes"][here])
        rows.append(
            {"GPU": int(memory["device"][one]), "memory": MEMORY_KINDS[int(memory["kind"][one])]}
            | {"allocations": int((~released).sum()), "releases": int(released.sum())}
            | {"allocated MiB": int(change[~released].sum()) / 2**20}
            | {"released MiB": int(-change[released].sum()) / 2**20}
            | {"peak MiB": max(int(np.cumsum(change).max()), 0) / 2**20}
        )
    return sorted(rows, key=lambda row: -row["peak MiB"])


@once
def stream_rows(of: Analysis) -> list[Row]:
    """Kernels by device and stream. Overlap is time in which another stream had kernels too;
    turns are the times at which the next kernel of the device was on this stream again."""
    rows = []
    for device in of.devices:
        here = of.is_kernel & (of.work["device"] == device)
        streams, group = factorize(of.work["stream"][here])
        start, end = of.work["start"][here], of.work["end"][here]
        busy = busy_by(group, start, end, len(streams)).tolist()
        whole = union(start, end)
        turns = group[1:][group[1:] != group[:-1]]
        for at, stream in enumerate(streams.tolist()):
            others = group != at
            both = busy[at] + union(start[others], end[others]) - whole
            rows.append(
                {"GPU": device, "stream": stream, "kernels": int((~others).sum())}
                | {"turns": int((turns == at).sum()), "busy ms": busy[at] / 1e6}
                | {"overlapped ms": both / 1e6, "overlapped %": 100 * both / max(busy[at], 1)}
            )
    return rows


@once
def device_rows(of: Analysis) -> list[Row]:
    """Kernels by process and device."""
    pid, device = (of.work[key][of.is_kernel] for key in ("pid", "device"))
    first, group = group_by(pid, device)
    total = sums(group, of.duration[of.is_kernel], len(first)).tolist()
    count = np.bincount(group, minlength=len(first)).tolist()
    processes, devices = pid[first].tolist(), device[first].tolist()
    of_process: Counter[int] = Counter()
    for process, ns in zip(processes, total, strict=True):
        of_process[process] += ns
    return [
        {"process": process // PROCESS % PROCESS, "GPU": one}
        | {"name": of.recording.gpus.get(one), "kernels": n, "kernel ms": ns / 1e6}
        | {"of the process %": 100 * ns / of_process[process] if ns else None}
        for process, one, ns, n in zip(processes, devices, total, count, strict=True)
    ]


def in_measured_ranges(rows: Sequence[Row]) -> list[Row]:
    """The rows whose range is one, and no warm-up."""
    return [r for r in rows if r["range"] != OUTSIDE and WARMUP not in r["range"].split(" / ")]
