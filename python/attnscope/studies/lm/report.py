"""The model-by-context report: where the time of a training step goes, from records of `model_run`.

Every number is measured or computed from measured numbers; a configuration without numbers is a row
with the reason. A record that contradicts itself is refused, and its row has the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from attnscope.profile.analysis.invariants import SLACK_US
from attnscope.profile.analysis.kernel_names import CATEGORIES
from attnscope.profile.errors import ProfileError
from attnscope.profile.render.document import Document, Section
from attnscope.profile.render.figures import CATEGORY_COLOURS, PART_COLOURS, stacked_bars
from attnscope.studies.lm.run import TIMED_STEPS
from attnscope.studies.parts import ATTENTION, BACKWARD, CORE, FORWARD, OPTIMIZER, PARTS, PHASES
from attnscope.studies.records import OUTSIDE, Record, by_category, checked, part_times
from attnscope.studies.summary import SOFTMAX_OPS

Row = dict[str, Any]
TOP = 3  # kernels shown of each configuration, in the forward pass and in the step
# Wall time is taken without the profiler, kernel time with it; clocks differ by less than this.
BOTH_RUNS = 1.10
PHASE_COLOURS = dict(zip(PHASES, list(PART_COLOURS.values())[:3], strict=True))


def model_report(records: Sequence[Record], env: Mapping[str, Any]) -> Document:
    """The report of the records of one device, in the form of a result file.

    Raises ProfileError where configurations have the same kernel time to the nanosecond: a table
    of constants is not measured.
    """
    # Columns that distinguish configurations, besides model, context and impl.
    also = [key for key in ("precision", "batch") if len({one[key] for one in records}) > 1]
    names = ("model", "context", "impl", *also)
    rows = [checked(one) | {"key": {name: one[name] for name in names}} for one in records]
    good = [one for one in rows if one["status"] == "ok"]
    _refuse_constants(good)
    kernels = [one for one in good if one["no_kernels"] is None]
    lead = [
        f"{env.get('gpu') or env.get('cpu')}, torch {env.get('torch')}, {env.get('time')}",
        "GPU time is the sum of kernel durations in one profiled step; copies are apart. The wall "
        f"clock is the median of {TIMED_STEPS} steps without the profiler. The device is waited "
        "for after each phase.",
        "Backward kernels belong to the part of the model whose forward op they are the backward "
        "of.",
    ]
    sections = [_configurations(rows)]
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


def _refuse_constants(records: Sequence[Record]) -> None:
    measured = (record for record in records if record["no_kernels"] is None)
    times = Counter(
        (record["total_us"], *(phase["kernel_us"] for phase in record["phases"].values()))
        for record in measured
    )
    for (total, *_), count in times.items():
        if count > 1:
            raise ProfileError(
                f"{count} configurations have {total} us of kernels each, to the nanosecond: that "
                "is not measured"
            )


# Sections


def _label(record: Record) -> str:
    return " ".join(map(str, record["key"].values()))


def _key(record: Record) -> Row:
    return dict(record["key"])


def _configurations(records: Sequence[Record]) -> Section:
    rows = [
        _key(record)
        | {
            "parameters, M": record["parameters"] / 1e6,
            "precision": record["precision"],
            "batch": record["batch"],
            "status": record["status"],
            "peak GiB": record.get("peak_memory_gib"),
            "owned by ops %": _owned(record),
            "reason": "; ".join(filter(None, map(record.get, _REASONS))) or None,
        }
        for record in records
    ]
    counts = Counter(record["status"] for record in records)
    said = ", ".join(f"{count} {status}" for status, count in counts.items())
    return Section("Configurations", f"{len(records)} configurations: {said}.", rows)


_REASONS = ("reason", "no_backward", "no_kernels")


def _owned(record: Record) -> float | None:
    has = record["status"] == "ok" and record["no_kernels"] is None
    return 100 * record["owned"] if has else None


def _wall_clock(records: Sequence[Record]) -> Section:
    rows = []
    for record in records:
        walls = {phase: median(times) for phase, times in record["wall_ms"].items()}
        row = _key(record) | {f"{phase} ms": walls.get(phase) for phase in PHASES}
        if record["no_backward"] is None:
            step = sum(walls.values())
            tokens = record["batch"] * record["context"]
            row |= {"step ms": step, "tokens a second": tokens / step * 1e3}
        rows.append(row)
    return Section("Wall clock", "Phases of a step without the profiler.", rows)


def _forward_time(records: Sequence[Record]) -> Section:
    rows, doubtful = [], []
    for record in records:
        wall, phase = median(record["wall_ms"][FORWARD]), record["phases"][FORWARD]
        row = _key(record) | {
            "wall clock ms": wall,
            "with the profiler ms": phase["wall_us"] / 1e3,
            "first to last kernel ms": phase["span_us"] / 1e3,
            "GPU busy ms": phase["busy_us"] / 1e3,
            "kernels": phase["kernels"],
        }
        if phase["busy_us"] / 1e3 > BOTH_RUNS * wall:
            doubtful.append(_label(record))
        else:
            row["GPU busy of wall %"] = min(100.0, 100 * phase["busy_us"] / 1e3 / wall)
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


def _top_kernels(records: Sequence[Record]) -> Section:
    rows = []
    for record in records:
        for where, chosen in (
            ("forward", [row for row in record["kernels"] if row["phase"] == FORWARD]),
            ("step", record["kernels"] if record["no_backward"] is None else []),
        ):
            times, calls = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
            for row in chosen:
                times[row["kernel"], row["category"]] += row["total_us"]
                calls[row["kernel"], row["category"]] += row["calls"]
            whole = times.total()
            for key, time in times.most_common(TOP):
                rows.append(
                    _key(record)
                    | {"in": where, "kernel": key[0], "category": key[1], "count": calls[key]}
                    | {"total ms": time / 1e3, "mean us": time / calls[key]}
                    | {"share %": 100 * time / whole}
                )
    text = f"The {TOP} kernels with most time in the forward pass, and in the whole step."
    return Section("Top kernels", text, rows)


def _categories(records: Sequence[Record]) -> Section:
    rows, bars = [], {}
    for record in records:
        times = by_category(record, FORWARD)
        row = _key(record) | {"forward ms": times.total() / 1e3}
        rows.append(row | {f"{c} %": 100 * times[c] / times.total() for c in CATEGORIES})
        bars[_label(record)] = {c: 100 * times[c] / times.total() for c in CATEGORIES}
    text = (
        "Kernel time inside the forward range, by what the kernel's symbol says it is. A fused "
        "attention kernel is attention: its matrix products and softmax are not told apart."
    )
    figure = stacked_bars(bars, CATEGORY_COLOURS, "% of the kernel time of the forward pass")
    return Section("Kernel categories in the forward pass", text, rows, figure)


def _phases(records: Sequence[Record]) -> Section:
    rows, bars, notes = [], {}, []
    for record in records:
        if record["no_backward"] is not None:
            notes.append(f"{_label(record)}: forward only: {record['no_backward']}.")
            continue
        times = {phase: record["phases"][phase]["kernel_us"] for phase in PHASES}
        whole = sum(times.values())
        row = _key(record) | {"step ms": whole / 1e3}
        row |= {f"{phase} ms": time / 1e3 for phase, time in times.items()}
        row |= {f"{phase} %": 100 * time / whole for phase, time in times.items()}
        for phase in (FORWARD, BACKWARD, None):
            found = by_category(record, phase)
            row[f"GEMM of {phase or 'step'} %"] = 100 * found["GEMM"] / found.total()
        if record["total_us"] > whole + SLACK_US:
            row["in no phase ms"] = (record["total_us"] - whole) / 1e3
        rows.append(row)
        bars[_label(record)] = {phase: time / 1e3 for phase, time in times.items()}
    text = (
        "GPU time of the three phases, and how much of it is matrix products: the optimizer has "
        "none, so their share in a step is below that in a forward pass."
    )
    figure = stacked_bars(bars, PHASE_COLOURS, "kernel time, ms") if bars else None
    return Section("Forward, backward, optimizer", text, rows, figure, notes)


def _parts(records: Sequence[Record]) -> Section:
    names = (*PARTS, OPTIMIZER, OUTSIDE)
    rows = []
    for record in records:
        times = part_times(record)
        rows.append(
            _key(record)
            | {"GPU ms": times.total() / 1e3}
            | {f"{_told(name)} %": 100 * times[name] / times.total() for name in names}
        )
    text = (
        "GPU time of forward and backward by part of the model. Projections are the matrix "
        "products before and after the attention core; outside is what no range holds."
    )
    return Section("Parts of the model", text, rows)


def _told(part: str) -> str:
    return {ATTENTION: "Projections", OUTSIDE: "outside"}.get(part, part)


def _inside_attention(records: Sequence[Record]) -> Section:
    rows = []
    for record in records:
        for phase in (FORWARD, BACKWARD):
            if core := _core(record, phase):
                rows.append(_key(record) | {"phase": phase} | core)
    text = (
        "The attention core of all layers: two matrix products (four in backward, five where one "
        "is computed again) and the softmax between them. FLOPs of products are counted from "
        f"shapes, two a multiply-add; softmax is {SOFTMAX_OPS['aten::_softmax']} operations an "
        f"element, {SOFTMAX_OPS['aten::_softmax_backward_data']} in backward. The rest is scaling, "
        "masks, casts and copies. A fused kernel does all of it at once: its softmax has no time "
        "of its own, and its FLOPs are those of the visible pairs."
    )
    return Section("Inside attention", text, rows)


def _core(record: Record, phase: str) -> Row | None:
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for row in record["kernels"]:
        if (row["phase"], row["part"]) == (phase, CORE):
            times[row["category"]] += row["total_us"]
            calls[row["category"]] += row["calls"]
    if not times:
        return None
    work = [row for row in record["flops"] if (row["phase"], row["part"]) == (phase, CORE)]
    flops = work[0]["flops"] if work else None
    found: Row = {"core ms": times.total() / 1e3, "product FLOPs, G": _giga(flops)}
    if times["attention"]:
        found["form"] = f"fused: {calls['attention']} attention kernels"
        found["fused ms"] = times["attention"] / 1e3
        found["fused ps a FLOP"] = _picoseconds(times["attention"], flops)
        rest = times.total() - times["attention"]
    else:
        softmax = record["softmax_flops"].get(phase)
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
    found["no FLOPs because"] = work[0]["reason"] if work else "no op with a FLOP formula"
    return found


def _giga(flops: int | None) -> float | None:
    return None if flops is None else flops / 1e9


def _picoseconds(time_us: float, flops: int | None) -> float | None:
    return time_us * 1e6 / flops if flops and time_us else None
