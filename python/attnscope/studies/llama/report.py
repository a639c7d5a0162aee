"""The report of a Hugging Face model by attention implementation, from records of
`llama.run`.

Every number is measured or computed from measured numbers, per pass through the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attnscope.profile.analysis.kernel_names import CATEGORIES, category
from attnscope.profile.attribution.backward import ENGINE
from attnscope.profile.render.document import Document, Section
from attnscope.profile.render.figures import CATEGORY_COLOURS, stacked_bars
from attnscope.studies.llama.records import (
    Attempt,
    ProfiledAttempt,
    TimedAttempt,
    read_attempts,
)
from attnscope.studies.llama.run import EAGER, PASSES, RMS_BAR, SAMPLES
from attnscope.studies.outputs import origin
from attnscope.studies.parts import ATTENTION, CORE, EMBEDDING, LOSS, MLP, OUTSIDE, PHASES
from attnscope.studies.records import Row

TOP = 12  # ops and kernels shown of each record
PARTS = {
    EMBEDDING: "embedding", ATTENTION: "projections", CORE: "attention core", MLP: "MLP",
    LOSS: "output", OUTSIDE: "outside",
}  # fmt: skip


def transformers_report(rows: Sequence[Row], env: Mapping[str, Any]) -> Document:
    """The report of the rows of a result file, from one device."""
    records = read_attempts(rows)
    one = records[0]
    lead = [
        f"{origin(env)}, transformers {env['settings'].get('transformers')}",
        f"LlamaForCausalLM with random bf16 weights, {one.parameters / 1e6:.1f} M: "
        f"{one.layers} layers, hidden {one.hidden}, {one.heads} heads, {one.kv_heads} key heads, "
        f"vocabulary {one.vocabulary}; {one.batch} x {one.context} tokens, no padding, no cache.",
        f"All times are for one pass. The wall clock is the median of {SAMPLES} samples of "
        f"{PASSES} passes one after the other, without the profiler; GPU time is the sum of kernel "
        f"durations in {PASSES} profiled passes. Copies and fills are apart.",
    ]
    timed = [record for record in records if isinstance(record, TimedAttempt)]
    sections = [_comparison(records), _logits(records)]
    if timed:
        sections.append(_overhead(timed))
    if kernels := [record for record in timed if isinstance(record, ProfiledAttempt)]:
        sections += [_parts(kernels), _categories(kernels)]
        for record in kernels:
            sections += _details(record)
    return Document("A Hugging Face model by attention implementation", lead, sections)


def _comparison(records: Sequence[Attempt]) -> Section:
    timed = [record for record in records if isinstance(record, TimedAttempt)]
    eager = {record.mode: record.wall for record in timed if record.impl == EAGER}
    rows = []
    for record in records:
        row = record.key | {"status": record.status}
        reason = record.reason
        if isinstance(record, TimedAttempt):
            row["wall clock ms"] = record.wall
            if record.mode in eager:
                row["speed, to eager"] = eager[record.mode] / record.wall
            row["tokens a second"] = record.batch * record.context / record.wall * 1e3
            row["peak GiB"] = record.peak_memory_gib
            reason = reason or record.no_kernels
        if isinstance(record, ProfiledAttempt):
            row |= _gpu(record)
        rows.append(row | {"reason": reason})
    text = (
        "The attention core is the attention function and the making of its mask, in a pass with "
        "backward their backward too; projections are not in it. Owned: GPU time whose op is known."
    )
    return Section("Comparison", text, rows)


def _gpu(record: ProfiledAttempt) -> Row:
    core = record.part_times()[CORE]
    return {
        "GPU ms": _ms(record.total_us),
        "attention core ms": _ms(core),
        **{f"core, {phase} ms": _ms(_core(record, phase)) for phase in PHASES[:2]},
        "attention core %": 100 * core / record.total_us,
        "kernels": _each(sum(row.calls for row in record.kernels)),
        "owned %": 100 * record.owned,
    }


def _core(record: ProfiledAttempt, phase: str) -> float:
    times = [row.total_us for row in record.kernels if (row.phase, row.part) == (phase, CORE)]
    return sum(times)


def _ms(us_of_all: float) -> float:
    return us_of_all / 1e3 / PASSES


def _each(count: int) -> int | float:
    """A count per pass."""
    return count // PASSES if count % PASSES == 0 else count / PASSES


def _logits(records: Sequence[Attempt]) -> Section:
    rows, seen = [], set()
    for record in records:
        check = record.check
        if record.impl not in seen:
            seen.add(record.impl)
            rows.append(
                {
                    "attention": record.impl,
                    "logits": check.status,
                    "largest error": check.max_abs_err,
                    "eager's largest error": check.baseline_err,
                    "worst row, of what is allowed": check.margin,
                    "error, to eager's": check.rms_ratio,
                    "reason": check.reason,
                }
            )
    text = (
        "Before anything is timed: bf16 logits against those of the same weights in fp64 with "
        "eager attention (norms, softmax and rotary angles stay fp32 there). A row may be off by "
        "twice what eager's rows nearby are, plus an ulp; the error of all logits, root of the "
        f"mean square, by {RMS_BAR} times eager's. One that fails has no times."
    )
    return Section("Logits", text, rows)


def _overhead(records: Sequence[TimedAttempt]) -> Section:
    rows = []
    for record in records:
        row = record.key | {
            "wall clock ms": record.wall,
            "least ms": min(record.wall_ms),
            "most ms": max(record.wall_ms),
            "with the profiler ms": record.profiled_ms,
            "overhead ms": record.profiled_ms - record.wall,
            "profiled, to unprofiled": record.profiled_ms / record.wall,
        }
        if isinstance(record, ProfiledAttempt):
            row["GPU busy, profiled ms"] = _ms(sum(p.busy_us for p in record.phases.values()))
            row["SM clock after MHz"] = record.sm_clock_mhz
        rows.append(row)
    text = (
        "What the profiler, the recording of shapes and the named ranges add to a pass. They slow "
        "the CPU; kernels are not slowed. Without the profiler there are no ranges in the model."
    )
    return Section("Overhead of the profiler", text, rows)


def _parts(records: Sequence[ProfiledAttempt]) -> Section:
    rows = []
    for record in records:
        times, whole = record.part_times(), record.total_us
        row = record.key | {f"{name} ms": _ms(times[part]) for part, name in PARTS.items()}
        rows.append(row | {f"{name} %": 100 * times[part] / whole for part, name in PARTS.items()})
    text = (
        "GPU time by part of the model, all layers together; backward kernels belong to the part "
        "of their forward op. Outside are norms, residuals, rotary embedding and loss."
    )
    return Section("Parts of the model", text, rows)


def _categories(records: Sequence[ProfiledAttempt]) -> Section:
    bars = {}
    for record in records:
        times = record.by_category()
        bars[record.label] = {name: _ms(times[name]) for name in CATEGORIES}
    rows = [
        record.key | {f"{name} ms": ms for name, ms in bars[record.label].items()}
        for record in records
    ]
    text = "GPU time by the kind that the kernel's symbol shows."
    figure = stacked_bars(bars, CATEGORY_COLOURS, "kernel time, ms a pass")
    return Section("Kernel categories", text, rows, figure)


# Sections of one record


def _details(record: ProfiledAttempt) -> Iterator[Section]:
    whole, line, label = record.total_us, record.attribution, record.label
    stages = [
        {
            "range": "\N{NO-BREAK SPACE}" * 3 * row.depth + row.range,
            "path": row.path,
            "calls": _each(row.calls),
            "CPU ms": _ms(row.wall_us),
            "GPU ms": _ms(row.gpu_us),
            "own GPU ms": _ms(row.gpu_self_us),
            "share %": 100 * row.gpu_us / whole,
            "kernels": _each(row.kernels),
        }
        for row in record.stages
    ]
    text = f"All {PASSES} passes: {line}."
    yield Section(f"{label}: stages", text, stages, hover={"range": "path"})
    own = [row for row in record.operators if row.self_gpu_us]
    operators = [
        {
            "op": row.name.replace(ENGINE, "engine: "),
            "calls": _each(row.calls),
            "own GPU ms": _ms(row.self_gpu_us),
            "share %": 100 * row.self_gpu_us / whole,
            "GPU ms": _ms(row.gpu_us),
            "TFLOP/s": row.tflops,
        }
        for row in sorted(own, key=lambda row: -row.self_gpu_us)[:TOP]
    ]
    text = "By the time of kernels that an op launched itself; these add up to all kernels."
    yield Section(f"{label}: ops", text, operators, notes=_more(len(own), "ops"))
    symbols = [
        {
            "kernel": row.kernel,
            "symbol": row.symbol,
            "category": category(row.symbol),
            "calls": _each(row.calls),
            "GPU ms": _ms(row.total_us),
            "share %": 100 * row.total_us / whole,
            "mean us": row.mean_us,
            "op": row.op,
        }
        for row in record.symbols[:TOP]
    ]
    notes = _more(len(record.symbols), "kernels")
    yield Section(f"{label}: kernels", "", symbols, notes=notes, hover={"kernel": "symbol"})


def _more(count: int, what: str) -> list[str]:
    return [f"{count - TOP} more {what} are in the JSON file."] if count > TOP else []
