"""The report of an nsys recording: a verdict, what stands out with its numbers, and the tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from attnscope.nsight.analysis import OUTSIDE, Analysis, Row
from attnscope.nsight.scheduling import (
    ALLOCATED,
    CAUSES,
    LATE,
    WAITED,
    allocation_rows,
    device_rows,
    gap_rows,
    in_measured_ranges,
    memory_rows,
    stream_rows,
)
from attnscope.profile.analysis.kernel_names import CATEGORIES
from attnscope.profile.render.document import Document, Section
from attnscope.profile.render.table import duration, percent

# Shares of the time from the first to the last GPU work; below them a change does not pay.
LEAST_GAPS = 0.05
LEAST_COPIES = 0.05
LEAST_ALLOCATION = 0.01
LEAST_STREAM = 0.05  # of the busy time: a stream with less does not count as one of several
LEAST_OVERLAP = 0.02
LEAST_TURNS = 2  # fewer: one stream simply follows the other
STRAY_GPU = 0.05  # of a process' kernels: fewer on a second GPU look like a mistake


@dataclass(frozen=True)
class Finding:
    """Something that costs time: its kind, a sentence with numbers, and what to try."""

    kind: str
    title: str
    advice: str


def nsys_report(
    analysis: Analysis, notes: Sequence[str] = (), top: int = 20, gpu: int | None = None
) -> Document:
    """The report of a recording.

    `top` is the number of rows of a long table. `gpu` is the device that all kernels should run on;
    None: the device with most of the kernels of each process.
    """
    recording = analysis.recording
    devices = ", ".join(
        f"GPU {one} {recording.gpus.get(one, '')}".strip() for one in analysis.devices
    )
    found = findings(analysis, gpu)
    window = max(span for _, span in analysis.spans.values())
    where = "in the recording" if analysis.within is None else f"inside {analysis.within}"
    lead = [
        verdict(analysis),
        f"{devices}; {int(analysis.is_kernel.sum())} kernels {where}, {duration(window / 1e3)} "
        f"from the first to the last GPU work; {_owned(analysis)}",
        *(f"{one.kind}: {one.title}. Try: {one.advice}" for one in found),
        *notes,
        *(f"nsys: {message}" for message in recording.messages[:5]),
    ]
    return Document("nsys timeline", lead, _sections(analysis, top))


def verdict(analysis: Analysis) -> str:
    """What takes the time, in one line."""
    busy = sum(one for one, _ in analysis.spans.values())
    window = sum(one for _, one in analysis.spans.values())
    rows = analysis.kernel_rows()
    if not rows:
        return f"no kernel ran: the GPU copied or filled memory for {duration(busy / 1e3)}"
    whole = analysis.category_rows()[0]
    shares = sorted(((whole[f"{c} %"], c) for c in CATEGORIES), reverse=True)[:3]
    kinds = ", ".join(f"{name} {share:.1f} %" for share, name in shares if share >= 0.05)
    line = f"the GPU worked {percent(busy / window)} of the time: {kinds} of the kernel time"
    return f"{line}; longest kernel: {rows[0]['kernel']}, {rows[0]['share %']:.1f} %"


def _owned(analysis: Analysis) -> str:
    """How much of the kernel time is inside ranges, and how much has no launch."""
    inside = int(analysis.duration[analysis.is_kernel & (analysis.inner >= 0)].sum())
    if not analysis.kernel_ns:
        return "no kernel time"
    line = f"{percent(inside / analysis.kernel_ns)} of the kernel time is in NVTX ranges"
    unseen = int((analysis.projection.call[analysis.mask] < 0).sum())
    line += f"; {unseen} launches are not in the report" if unseen else ""
    adopted = int(analysis.projection.adopted[analysis.mask].sum())
    return line + (f"; {adopted} by other threads for the main thread" if adopted else "")


# Findings


def findings(analysis: Analysis, gpu: int | None = None) -> list[Finding]:
    """What stands out, from the numbers of the tables."""
    found = [detect(analysis) for detect in DETECTORS]
    return [one for one in [*found, _other_gpu(analysis, gpu)] if one]


def _launch_gaps(analysis: Analysis) -> Finding | None:
    rows = [r for r in gap_rows(analysis) if r["cause"] in (CAUSES[LATE], CAUSES[WAITED])]
    window = sum(span for _, span in analysis.spans.values()) / 1e6
    total = sum(row["total ms"] for row in rows)
    if not rows or total < LEAST_GAPS * window:
        return None
    worst = rows[0]
    title = f"the GPU waited {duration(total * 1e3)} ({percent(total / window)}) for launches, "
    title += f"most before work of {worst['before work of']} ({_number(worst['gaps'], 'gap')}; "
    title += f"{worst['cause']})"
    if worst["cause"] == CAUSES[WAITED]:
        return Finding("launch gaps", title, "remove the synchronisation, or do it less often")
    return Finding("launch gaps", title, "larger batches, torch.compile, or a CUDA graph")


def _allocations(analysis: Analysis) -> Finding | None:
    rows = in_measured_ranges(allocation_rows(analysis))
    window = sum(span for _, span in analysis.spans.values()) / 1e6
    stalls = [r["total ms"] for r in gap_rows(analysis) if r["cause"] == CAUSES[ALLOCATED]]
    total = sum(row["total ms"] for row in rows)
    if not rows or max(total, sum(stalls)) < LEAST_ALLOCATION * window:
        return None
    worst = rows[0]
    calls = sum(row["count"] for row in rows)
    title = f"{_number(calls, 'call')} to allocate or free memory inside ranges took "
    title += f"{duration(total * 1e3)}, most {worst['call']} in {worst['range']}"
    title += f"; the GPU waited {duration(sum(stalls) * 1e3)} for them" if stalls else ""
    advice = "warm up first; keep torch's allocator from returning memory (no empty_cache)"
    return Finding("allocation in a range", title, advice)


def _serialised_streams(analysis: Analysis) -> Finding | None:
    for device in analysis.devices:
        rows = [row for row in stream_rows(analysis) if row["GPU"] == device]
        busy = sum(row["busy ms"] for row in rows)
        used = [row for row in rows if row["busy ms"] >= LEAST_STREAM * busy]
        both = max((row["overlapped ms"] for row in used), default=0.0)
        turns = min((row["turns"] for row in used), default=0)
        if (
            len(used) > 1
            and turns >= LEAST_TURNS
            and both <= LEAST_OVERLAP * min(row["busy ms"] for row in used)
        ):
            names = ", ".join(str(row["stream"]) for row in used)
            title = f"streams {names} of GPU {device} have kernels, but never at the same time "
            title += f"(overlap {duration(both * 1e3)} of {duration(busy * 1e3)})"
            advice = "look for synchronisation between them: synchronize(), the default stream, "
            advice += "or kernels that fill the GPU by themselves"
            return Finding("serialised streams", title, advice)
    return None


def _copies(analysis: Analysis) -> Finding | None:
    rows = [row for row in analysis.copy_rows() if "host" in row["kind"]]
    window = sum(span for _, span in analysis.spans.values()) / 1e6
    total = sum(row["total ms"] for row in rows)
    if not rows or total < LEAST_COPIES * window:
        return None
    pageable = sum(row["total ms"] for row in rows if row["host memory"] == "pageable")
    title = f"copies between host and device took {duration(total * 1e3)} "
    title += f"({percent(min(total / window, 1.0))}), most in {rows[0]['range']}"
    if pageable > total / 2:
        return Finding("copies", title + "; from pageable memory", "pin_memory, non_blocking=True")
    return Finding("copies", title, "copy on a stream of its own, or keep the data on the device")


DETECTORS: tuple[Callable[[Analysis], Finding | None], ...] = (
    _launch_gaps,
    _allocations,
    _serialised_streams,
    _copies,
)


def _other_gpu(analysis: Analysis, gpu: int | None) -> Finding | None:
    """Kernels on another GPU than meant: than `gpu`, or a few on a second one of a process."""
    rows = device_rows(analysis)
    if gpu is not None:
        stray = [row for row in rows if row["GPU"] != gpu]
    else:
        stray = [row for row in rows if 100 * STRAY_GPU > (row["of the process %"] or 100)]
    if not stray:
        return None
    where = "; ".join(f"{_number(row['kernels'], 'kernel')} on GPU {row['GPU']}" for row in stray)
    meant = f"GPU {gpu}" if gpu is not None else "the GPU with most of the work"
    title = f"{where}, meant: {meant}"
    return Finding("another GPU", title, "check the device of inputs, and torch.cuda.set_device")


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


# Tables


def _sections(analysis: Analysis, top: int) -> list[Section]:
    stages = analysis.stage_rows()
    kernels = analysis.kernel_rows()
    short = [{k: v for k, v in row.items() if k != "symbol"} for row in kernels]
    sections = [
        _section(
            "Stages",
            "NVTX ranges projected on the GPU: work that was launched inside. own: in no narrower "
            "range. busy: with a kernel, copy or fill; span: from the first to the last, range by "
            "range; idle: span without busy.",
            stages,
            top,
        ),
        _section("Kernels", "By total time.", short, top),
        _section(
            "Categories",
            "Kernel time by the kind that the kernel's symbol shows.",
            analysis.category_rows(),
            top,
        ),
        _section(
            "Gaps",
            "Times of 1 us or more without GPU work, by their cause and the range of what follows.",
            gap_rows(analysis),
            top,
        ),
        _section("Copies and fills", "By kind, host memory and range.", analysis.copy_rows(), top),
        _section(
            "Allocations",
            "Calls that allocate or free memory: each may wait for the device.",
            [row for row in allocation_rows(analysis) if row["range"] != OUTSIDE],
            top,
        ),
    ]
    text = "Since the recording began; torch's allocator keeps what it has once taken."
    sections.append(_section("Memory", text, memory_rows(analysis), top))
    streams, devices = stream_rows(analysis), device_rows(analysis)
    if len(streams) > 1:
        text = "overlapped: another stream of the GPU had a kernel at the same time."
        sections.append(_section("Streams", text, streams, top))
    if len(devices) > 1:
        sections.append(_section("GPUs", "Kernels by process and GPU.", devices, top))
    return [one for one in sections if one.rows]


def _section(title: str, text: str, rows: Sequence[Row], top: int) -> Section:
    more = len(rows) - top
    notes = [f"{more} more rows: --top {len(rows)}"] if more > 0 else []
    return Section(title, text, rows[:top], notes=notes)


def as_tables(analysis: Analysis) -> dict[str, list[Row]]:
    """Every row of every table, with whole symbols."""
    tables: dict[str, Any] = {
        "stages": analysis.stage_rows(), "kernels": analysis.kernel_rows(),
        "categories": analysis.category_rows(), "gaps": gap_rows(analysis),
        "copies": analysis.copy_rows(), "allocations": allocation_rows(analysis),
        "memory": memory_rows(analysis), "streams": stream_rows(analysis),
        "devices": device_rows(analysis),
    }  # fmt: skip
    return tables
