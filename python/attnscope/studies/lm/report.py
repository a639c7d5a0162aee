"""The model-by-context report: where the time of a training step goes, from records of `lm.run`.

Every number is measured or computed from measured numbers; a configuration without numbers is a row
with the reason. A record that contradicts itself is refused, and its row has the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from attnscope.profile.analysis.invariants import SLACK_US
from attnscope.profile.analysis.kernel_names import CATEGORIES
from attnscope.profile.errors import ProfileError
from attnscope.profile.render.document import Document, Section
from attnscope.profile.render.figures import CATEGORY_COLOURS, PART_COLOURS, stacked_bars
from attnscope.studies.lm.records import Model, ProfiledModel, TimedModel, read_models
from attnscope.studies.lm.run import TIMED_STEPS
from attnscope.studies.outputs import origin
from attnscope.studies.parts import (
    ATTENTION,
    BACKWARD,
    CORE,
    FORWARD,
    OPTIMIZER,
    OUTSIDE,
    PARTS,
    PHASES,
)
from attnscope.studies.records import Row, total_by
from attnscope.studies.summary import SOFTMAX_OPS

TOP = 3  # kernels shown of each configuration, in the forward pass and in the step
# Wall time is taken without the profiler, kernel time with it; clocks differ by less than this.
BOTH_RUNS = 1.10
PHASE_COLOURS = dict(zip(PHASES, list(PART_COLOURS.values())[:3], strict=True))


def model_report(rows: Sequence[Row], env: Mapping[str, Any]) -> Document:
    """The report of the rows of a result file, from one device.

    Raises ProfileError where configurations have the same kernel time to the nanosecond: a table
    of constants is not measured.
    """
    records = read_models(rows)
    good = [one for one in records if isinstance(one, TimedModel)]
    kernels = [one for one in good if isinstance(one, ProfiledModel)]
    _refuse_constants(kernels)
    lead = [
        origin(env),
        "GPU time is the sum of kernel durations in one profiled step; copies are apart. The wall "
        f"clock is the median of {TIMED_STEPS} steps without the profiler. The device is waited "
        "for after each phase.",
        "Backward kernels belong to the part of the model whose forward op they are the backward "
        "of.",
    ]
    sections = [_configurations(records)]
    if good:
        sections.append(_wall_clock(good))
    if kernels:
        sections += [
            _forward_time(kernels),
            _top_kernels(kernels),
            _categories(kernels),
            _phases(kernels),
        ]
        sections += [_parts(kernels), _inside_attention(kernels)]
    return Document("Where the time of a training step goes", lead, sections)


def _refuse_constants(records: Sequence[ProfiledModel]) -> None:
    times = Counter(
        (one.total_us, *(phase.kernel_us for phase in one.phases.values())) for one in records
    )
    for (total, *_), count in times.items():
        if count > 1:
            raise ProfileError(
                f"kernel times must differ between configurations, got {total} us in {count} of "
                "them, to the nanosecond: that is not measured"
            )


# Sections


def _configurations(records: Sequence[Model]) -> Section:
    rows = [
        record.key
        | {
            "parameters, M": record.parameters / 1e6,
            "precision": record.precision,
            "batch": record.batch,
            "status": record.status,
            "peak GiB": record.peak_memory_gib if isinstance(record, TimedModel) else None,
            "owned by ops %": 100 * record.owned if isinstance(record, ProfiledModel) else None,
            "reason": _reasons(record),
        }
        for record in records
    ]
    counts = Counter(record.status for record in records)
    statuses = ", ".join(f"{count} {status}" for status, count in counts.items())
    return Section("Configurations", f"{len(records)} configurations: {statuses}.", rows)


def _reasons(record: Model) -> str | None:
    reasons = [record.reason]
    if isinstance(record, TimedModel):
        reasons += [record.no_backward, record.no_kernels]
    return "; ".join(filter(None, reasons)) or None


def _wall_clock(records: Sequence[TimedModel]) -> Section:
    rows = []
    for record in records:
        walls = {phase: record.wall(phase) for phase in record.phase_names}
        row = record.key | {f"{phase} ms": walls.get(phase) for phase in PHASES}
        if record.no_backward is None:
            step = sum(walls.values())
            row |= {"step ms": step, "tokens a second": record.tokens / step * 1e3}
        rows.append(row)
    return Section("Wall clock", "Phases of a step without the profiler.", rows)


def _forward_time(records: Sequence[ProfiledModel]) -> Section:
    rows, doubtful = [], []
    for record in records:
        wall, phase = record.wall(FORWARD), record.phases[FORWARD]
        row = record.key | {
            "wall clock ms": wall,
            "with the profiler ms": phase.wall_us / 1e3,
            "first to last kernel ms": phase.span_us / 1e3,
            "GPU busy ms": phase.busy_us / 1e3,
            "kernels": phase.kernels,
        }
        if phase.busy_us / 1e3 > BOTH_RUNS * wall:
            doubtful.append(record.label)
        else:
            row["GPU busy of wall %"] = min(100.0, 100 * phase.busy_us / 1e3 / wall)
        rows.append(row)
    text = (
        "The wall clock has what the CPU adds where the GPU waits for launches; the profiler adds "
        "to every launch, and nothing to a kernel."
    )
    notes = []
    if doubtful:
        notes.append(
            f"Kernels took longer in the profiled step than the wall clock of the others: "
            f"{', '.join(doubtful)}. No share is given."
        )
    return Section("Forward time", text, rows, notes=notes)


def _top_kernels(records: Sequence[ProfiledModel]) -> Section:
    rows = []
    for record in records:
        for where, chosen in (
            ("forward", [one for one in record.kernels if one.phase == FORWARD]),
            ("step", record.kernels if record.no_backward is None else []),
        ):
            times = total_by(((one.kernel, one.category), one.total_us) for one in chosen)
            calls = total_by(((one.kernel, one.category), one.calls) for one in chosen)
            whole = times.total()
            for key, time in times.most_common(TOP):
                rows.append(
                    record.key
                    | {"in": where, "kernel": key[0], "category": key[1], "count": calls[key]}
                    | {"total ms": time / 1e3, "mean us": time / calls[key]}
                    | {"share %": 100 * time / whole}
                )
    text = f"The {TOP} kernels with most time in the forward pass, and in the whole step."
    return Section("Top kernels", text, rows)


def _categories(records: Sequence[ProfiledModel]) -> Section:
    rows, bars = [], {}
    for record in records:
        times = record.by_category(FORWARD)
        row = record.key | {"forward ms": times.total() / 1e3}
        rows.append(row | {f"{c} %": 100 * times[c] / times.total() for c in CATEGORIES})
        bars[record.label] = {c: 100 * times[c] / times.total() for c in CATEGORIES}
    text = (
        "Kernel time inside the forward range, by the kind that the kernel's symbol shows. A fused "
        "attention kernel is attention: its matrix products and softmax are one kernel."
    )
    figure = stacked_bars(bars, CATEGORY_COLOURS, "% of the kernel time of the forward pass")
    return Section("Kernel categories in the forward pass", text, rows, figure)


def _phases(records: Sequence[ProfiledModel]) -> Section:
    rows, bars, notes = [], {}, []
    for record in records:
        if record.no_backward is not None:
            notes.append(f"{record.label}: forward only: {record.no_backward}.")
            continue
        times = {phase: record.phases[phase].kernel_us for phase in PHASES}
        whole = sum(times.values())
        row = record.key | {"step ms": whole / 1e3}
        row |= {f"{phase} ms": time / 1e3 for phase, time in times.items()}
        row |= {f"{phase} %": 100 * time / whole for phase, time in times.items()}
        for phase in (FORWARD, BACKWARD, None):
            found = record.by_category(phase)
            row[f"GEMM of {phase or 'step'} %"] = 100 * found["GEMM"] / found.total()
        if record.total_us > whole + SLACK_US:
            row["in no phase ms"] = (record.total_us - whole) / 1e3
        rows.append(row)
        bars[record.label] = {phase: time / 1e3 for phase, time in times.items()}
    text = (
        "GPU time of the three phases, and how much of it is matrix products: the optimizer has "
        "none, so their share in a step is below that in a forward pass."
    )
    figure = stacked_bars(bars, PHASE_COLOURS, "kernel time, ms") if bars else None
    return Section("Forward, backward, optimizer", text, rows, figure, notes)


def _parts(records: Sequence[ProfiledModel]) -> Section:
    names = (*PARTS, OPTIMIZER, OUTSIDE)
    rows = []
    for record in records:
        times = record.part_times()
        rows.append(
            record.key
            | {"GPU ms": times.total() / 1e3}
            | {f"{_heading(name)} %": 100 * times[name] / times.total() for name in names}
        )
    text = (
        "GPU time of forward and backward by part of the model. Projections are the matrix "
        "products before and after the attention core; outside is what no range contains."
    )
    return Section("Parts of the model", text, rows)


def _heading(part: str) -> str:
    return {ATTENTION: "Projections", OUTSIDE: "outside"}.get(part, part)


def _inside_attention(records: Sequence[ProfiledModel]) -> Section:
    rows = []
    for record in records:
        for phase in (FORWARD, BACKWARD):
            if core := _core(record, phase):
                rows.append(record.key | {"phase": phase} | core)
    text = (
        "The attention core of all layers: two matrix products (four in backward, five where one "
        "is computed again) and the softmax between them. FLOPs of products are counted from "
        f"shapes, two a multiply-add; softmax is {SOFTMAX_OPS['aten::_softmax']} operations an "
        f"element, {SOFTMAX_OPS['aten::_softmax_backward_data']} in backward. The rest is scaling, "
        "masks, casts and copies. A fused kernel does all of it at once: its softmax has no time "
        "of its own, and its FLOPs are those of the visible pairs."
    )
    return Section("Inside attention", text, rows)


def _core(record: ProfiledModel, phase: str) -> Row | None:
    core = [one for one in record.kernels if (one.phase, one.part) == (phase, CORE)]
    times = total_by((one.category, one.total_us) for one in core)
    calls = total_by((one.category, one.calls) for one in core)
    if not times:
        return None
    work = [one for one in record.flops if (one.phase, one.part) == (phase, CORE)]
    flops = work[0].flops if work else None
    found: Row = {"core ms": times.total() / 1e3, "product FLOPs, G": _giga(flops)}
    if times["attention"]:
        found["form"] = f"fused: {calls['attention']} attention kernels"
        found["fused ms"] = times["attention"] / 1e3
        found["fused ps a FLOP"] = _picoseconds(times["attention"], flops)
        rest = times.total() - times["attention"]
    else:
        softmax = record.softmax_flops.get(phase)
        products_cost = _picoseconds(times["GEMM"], flops)
        softmax_cost = _picoseconds(times["softmax"], softmax)
        found["form"] = "separate kernels"
        found |= {"products ms": times["GEMM"] / 1e3, "softmax ms": times["softmax"] / 1e3}
        found |= {"softmax FLOPs, G": _giga(softmax), "products ps a FLOP": products_cost}
        found["softmax ps a FLOP"] = softmax_cost
        if products_cost and softmax_cost:
            found["softmax over products, a FLOP"] = softmax_cost / products_cost
        rest = times.total() - times["GEMM"] - times["softmax"]
    found["rest ms"] = rest / 1e3
    found["no FLOPs because"] = work[0].reason if work else "no op with a FLOP formula"
    return found


def _giga(flops: int | None) -> float | None:
    return None if flops is None else flops / 1e9


def _picoseconds(time_us: float, flops: int | None) -> float | None:
    return time_us * 1e6 / flops if flops and time_us else None
