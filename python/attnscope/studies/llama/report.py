"""The report of a Hugging Face model by attention implementation, from `transformers_run`.

Every number is measured or computed from measured numbers, per pass through the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from attnscope.profile.analysis.kernel_names import CATEGORIES, category
from attnscope.profile.attribution.backward import ENGINE
from attnscope.profile.render.document import Document, Section
from attnscope.profile.render.figures import CATEGORY_COLOURS, stacked_bars
from attnscope.studies.llama.run import EAGER, PASSES, RMS_BAR, SAMPLES
from attnscope.studies.parts import ATTENTION, CORE, EMBEDDING, LOSS, MLP
from attnscope.studies.records import OUTSIDE, Record, by_category, part_times

Row = dict[str, Any]
TOP = 12  # ops and kernels shown of each record
PARTS = {
    EMBEDDING: "embedding", ATTENTION: "projections", CORE: "attention core", MLP: "MLP",
    LOSS: "output", OUTSIDE: "outside",
}  # fmt: skip


def transformers_report(records: Sequence[Record], env: Mapping[str, Any]) -> Document:
    """The report of the records of one device, in the form of a result file."""
    one = records[0]
    lead = [
        f"{env.get('gpu') or env.get('cpu')}, torch {env.get('torch')}, transformers "
        f"{env['settings'].get('transformers')}, {env.get('time')}",
        f"LlamaForCausalLM with random bf16 weights, {one['parameters'] / 1e6:.1f} M: "
        f"{one['layers']} layers, hidden {one['hidden']}, {one['heads']} heads, {one['kv_heads']} "
        f"key heads, vocabulary {one['vocabulary']}; {one['batch']} x {one['context']} tokens, no "
        "padding, no cache.",
        f"All times are of one pass. The wall clock is the median of {SAMPLES} samples of {PASSES} "
        f"passes one after the other, without the profiler; GPU time is the sum of kernel "
        f"durations in {PASSES} profiled passes. Copies and fills are apart.",
    ]
    measured = [record for record in records if record["status"] == "ok"]
    sections = [_comparison(records), _logits(records)]
    if measured:
        sections.append(_overhead(measured))
    if kernels := [record for record in measured if record["no_kernels"] is None]:
        sections += [_parts(kernels), _categories(kernels)]
        for record in kernels:
            sections += _details(record)
    return Document("A Hugging Face model by attention implementation", lead, sections)


def _key(record: Record) -> Row:
    return {"attention": record["impl"], "pass": record["mode"]}


def _label(record: Record) -> str:
    return f"{record['impl']}, {record['mode']}"


def _comparison(records: Sequence[Record]) -> Section:
    eager = {r["mode"]: _wall(r) for r in records if r["impl"] == EAGER and r["status"] == "ok"}
    rows = []
    for record in records:
        row = _key(record) | {"status": record["status"]}
        if record["status"] == "ok":
            wall = _wall(record)
            row["wall clock ms"] = wall
            if record["mode"] in eager:
                row["speed, to eager"] = eager[record["mode"]] / wall
            row["tokens a second"] = record["batch"] * record["context"] / wall * 1e3
            row["peak GiB"] = record["peak_memory_gib"]
            row |= _gpu(record)
        rows.append(row | {"reason": record["reason"] or record.get("no_kernels")})
    text = (
        "The attention core is the attention function and the making of its mask, in a pass with "
        "backward their backward too; projections are not in it. Owned: GPU time whose op is known."
    )
    return Section("Comparison", text, rows)


def _gpu(record: Record) -> Row:
    if record["no_kernels"] is not None:
        return {}
    times = part_times(record)
    return {
        "GPU ms": _ms(record["total_us"]),
        "attention core ms": _ms(times[CORE]),
        "attention core %": 100 * times[CORE] / record["total_us"],
        "kernels": _each(sum(row["calls"] for row in record["kernels"])),
        "owned %": 100 * record["owned"],
    }


def _wall(record: Record) -> float:
    return median(record["wall_ms"])


def _ms(us_of_all: float) -> float:
    return us_of_all / 1e3 / PASSES


def _each(count: int) -> int | float:
    """A count per pass."""
    return count // PASSES if count % PASSES == 0 else count / PASSES


def _logits(records: Sequence[Record]) -> Section:
    rows, seen = [], set()
    for record in records:
        found = record["check"]
        if record["impl"] not in seen:
            seen.add(record["impl"])
            rows.append(
                {
                    "attention": record["impl"],
                    "logits": found["status"],
                    "largest error": found.get("max_abs_err"),
                    "eager's largest error": found.get("baseline_err"),
                    "worst row, of what is allowed": found.get("margin"),
                    "error, to eager's": found.get("rms_ratio"),
                    "reason": found["reason"],
                }
            )
    text = (
        "Before anything is timed: bf16 logits against those of the same weights in fp64 with "
        "eager attention (norms, softmax and rotary angles stay fp32 there). A row may be off by "
        "twice what eager's rows nearby are, plus an ulp; the error of all logits, root of the "
        f"mean square, by {RMS_BAR} times eager's. One that fails has no times."
    )
    return Section("Logits", text, rows)


def _overhead(records: Sequence[Record]) -> Section:
    rows = []
    for record in records:
        wall, profiled = _wall(record), record["profiled_ms"]
        row = _key(record) | {
            "wall clock ms": wall,
            "least ms": min(record["wall_ms"]),
            "most ms": max(record["wall_ms"]),
            "with the profiler ms": profiled,
            "overhead ms": profiled - wall,
            "profiled, to unprofiled": profiled / wall,
        }
        if record["no_kernels"] is None:
            row["GPU busy, profiled ms"] = _ms(sum(p["busy_us"] for p in record["phases"].values()))
            row["SM clock after MHz"] = record["sm_clock_mhz"]
        rows.append(row)
    text = (
        "What the profiler, the recording of shapes and the named ranges add to a pass. They slow "
        "the CPU; kernels are not slowed. Without the profiler there are no ranges in the model."
    )
    return Section("Overhead of the profiler", text, rows)


def _parts(records: Sequence[Record]) -> Section:
    rows = []
    for record in records:
        times, whole = part_times(record), record["total_us"]
        row = _key(record) | {f"{told} ms": _ms(times[part]) for part, told in PARTS.items()}
        rows.append(row | {f"{told} %": 100 * times[part] / whole for part, told in PARTS.items()})
    text = (
        "GPU time by part of the model, all layers together; backward kernels belong to the part "
        "of their forward op. Outside are norms, residuals, rotary embedding and loss."
    )
    return Section("Parts of the model", text, rows)


def _categories(records: Sequence[Record]) -> Section:
    bars = {}
    for record in records:
        times = by_category(record)
        bars[_label(record)] = {name: _ms(times[name]) for name in CATEGORIES}
    rows = [
        _key(record) | {f"{name} ms": ms for name, ms in bars[_label(record)].items()}
        for record in records
    ]
    text = "GPU time by what the kernel's symbol says it is."
    figure = stacked_bars(bars, CATEGORY_COLOURS, "kernel time, ms a pass")
    return Section("Kernel categories", text, rows, figure)


# Sections of one record


def _details(record: Record) -> Iterator[Section]:
    whole, line, label = record["total_us"], record["attribution"], _label(record)
    stages = [
        {
            "range": "\N{NO-BREAK SPACE}" * 3 * row["depth"] + row["range"],
            "path": row["path"],
            "calls": _each(row["calls"]),
            "CPU ms": _ms(row["wall_us"]),
            "GPU ms": _ms(row["gpu_us"]),
            "own GPU ms": _ms(row["gpu_self_us"]),
            "share %": 100 * row["gpu_us"] / whole,
            "kernels": _each(row["kernels"]),
        }
        for row in record["stages"]
    ]
    said = f"Of all {PASSES} passes: {line}."
    yield Section(f"{label}: stages", said, stages, hover={"range": "path"})
    own = [row for row in record["operators"] if row["self_gpu_us"]]
    operators = [
        {
            "op": row["name"].replace(ENGINE, "engine: "),
            "calls": _each(row["calls"]),
            "own GPU ms": _ms(row["self_gpu_us"]),
            "share %": 100 * row["self_gpu_us"] / whole,
            "GPU ms": _ms(row["gpu_us"]),
            "TFLOP/s": row["tflops"],
        }
        for row in sorted(own, key=lambda row: -row["self_gpu_us"])[:TOP]
    ]
    text = "By the time of kernels that an op launched itself; these add up to all kernels."
    yield Section(f"{label}: ops", text, operators, notes=_more(len(own), "ops"))
    symbols = [
        {
            "kernel": row["kernel"],
            "symbol": row["symbol"],
            "category": category(row["symbol"]),
            "calls": _each(row["calls"]),
            "GPU ms": _ms(row["total_us"]),
            "share %": 100 * row["total_us"] / whole,
            "mean us": row["mean_us"],
            "op": row["op"],
        }
        for row in record["symbols"][:TOP]
    ]
    notes = _more(len(record["symbols"]), "kernels")
    yield Section(f"{label}: kernels", "", symbols, notes=notes, hover={"kernel": "symbol"})


def _more(count: int, what: str) -> list[str]:
    return [f"{count - TOP} more {what} are in the JSON file."] if count > TOP else []
