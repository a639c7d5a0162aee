"""A plain transformer training loop and its optimised twin: the effect of each change, and why.

The changes are made one after the other (number format, attention, batch), each measured like
every other configuration, so that a difference has one cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from attnscope.profile.analysis.kernel_names import CATEGORIES
from attnscope.profile.render.document import Document, Section
from attnscope.profile.render.figures import CATEGORY_COLOURS, stacked_bars
from attnscope.studies.lm.model import ModelConfig
from attnscope.studies.lm.run import Run
from attnscope.studies.parts import ATTENTION, CORE, OPTIMIZER, PARTS, PHASES
from attnscope.studies.records import OUTSIDE, Record, by_category, check_record, part_times

Row = dict[str, Any]
UNFUSED = ("naive", "sdpa-math")  # impls whose products and softmax are kernels of their own


@dataclass(frozen=True)
class Recipe:
    """One way to train the same model. `change` is what it changes in the recipe before it."""

    change: str
    precision: str
    impl: str
    batch: int


def recipes(impl: str, batch: int, larger: int) -> tuple[Recipe, ...]:
    """Plain first, optimised last. `impl` is the attention of the optimised loop, `larger` its
    batch; recipes without a change, such as from naive to naive, are omitted."""
    form = "unfused" if impl in UNFUSED else "fused"
    ways = [Recipe("plain: fp32, attention in separate ops", "fp32", "naive", batch)]
    ways.append(Recipe("bf16 autocast", "autocast", "naive", batch))
    if impl != "naive":
        ways.append(Recipe(f"{form} attention ({impl})", "autocast", impl, batch))
    if larger != batch:
        ways.append(Recipe(f"batch {larger} instead of {batch}", "autocast", impl, larger))
    return tuple(ways)


def runs(config: ModelConfig, ways: Sequence[Recipe], device: str) -> list[Run]:
    """The configurations to measure."""
    return [
        Run(
            name=way.change,
            config=config,
            impl=way.impl,
            precision=way.precision,
            batch=way.batch,
            device=device,
        )
        for way in ways
    ]


def pair_report(records: Sequence[Record], env: Mapping[str, Any]) -> Document:
    """The effect of each change, from the records of `runs` in their order.

    Raises ProfileError for a record that contradicts itself, ValueError if plain or optimised have
    no times.
    """
    for record in records:
        if record["status"] == "ok":
            check_record(record)
    good = [record for record in records if record["status"] == "ok" and not record["no_backward"]]
    if len(good) < 2 or good[0] is not records[0]:
        said = "; ".join(f"{r['model']}: {_why(r)}" for r in records if r not in good)
        raise ValueError(f"pair: nothing to compare: {said}")
    plain, best = good[0], good[-1]
    speed = _microseconds(plain) / _microseconds(best)
    lead = [
        f"{env.get('gpu') or env.get('cpu')}, torch {env.get('torch')}, {env.get('time')}",
        f"d_model {plain['d_model']}, {plain['layers']} layers, {plain['heads']} heads, context "
        f"{plain['context']}, vocabulary {plain['vocabulary']:,}",
        f"From the plain loop to '{best['model']}': {speed:.2f} times the tokens a second.",
    ]
    sections = [_changes(records)]
    if plain["no_kernels"] is None and best["no_kernels"] is None:
        sections += [_parts(plain, best), _categories(good), _why_section(good)]
    else:
        lead.append(f"No GPU time: {plain['no_kernels'] or best['no_kernels']}.")
    return Document("A plain training loop and its optimised twin", lead, sections)


def _why(record: Record) -> str:
    return str(record.get("no_backward") or record["reason"])


def _tokens(record: Record) -> int:
    return int(record["batch"] * record["context"])


def _microseconds(record: Record) -> float:
    """Wall clock of a step without the profiler, by token."""
    walls = sum(median(record["wall_ms"][phase]) for phase in PHASES)
    return walls * 1e3 / _tokens(record)


def _changes(records: Sequence[Record]) -> Section:
    rows: list[Row] = []
    first = before = _microseconds(records[0])
    for record in records:
        row: Row = {"change": record["model"], "tokens a step": _tokens(record)}
        if record["status"] != "ok" or record["no_backward"]:
            rows.append(row | {"not measured": _why(record)})
            continue
        now = _microseconds(record)
        row |= {"us a token": now, "speed, to the one before": before / now}
        row["speed, to plain"] = first / now
        if record["no_kernels"] is None:
            use = record["efficiency"]
            row["GPU us a token"] = record["total_us"] / _tokens(record)
            row["kernels a step"] = sum(kernel["calls"] for kernel in record["kernels"])
            row["tensor-core time %"] = _percent(use["tensor_core_time_share"])
            row["GPU utilisation, profiled %"] = _percent(use["gpu_utilisation"])
        row["peak GiB"] = record["peak_memory_gib"]
        rows.append(row)
        before = now
    text = (
        "One change after the other. Time a token is the wall clock of a step without the profiler "
        "over its tokens; GPU time is of one profiled step."
    )
    return Section("Changes", text, rows)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _a_token(record: Record, times: Counter[str]) -> dict[str, float]:
    return {name: time / _tokens(record) for name, time in times.items()}


def _parts(plain: Record, best: Record) -> Section:
    a, b = (_a_token(record, part_times(record)) for record in (plain, best))
    rows = []
    for name in (*PARTS, OPTIMIZER, OUTSIDE):
        if name not in a and name not in b:
            continue
        old, new = a.get(name, 0.0), b.get(name, 0.0)
        label = "Self-Attention, projections" if name == ATTENTION else name
        label = "Self-Attention, core" if name == CORE else label
        rows.append(
            {
                "part": label,
                "plain us a token": old,
                "optimised us a token": new,
                "plain %": 100 * old / sum(a.values()),
                "optimised %": 100 * new / sum(b.values()),
                "speed": old / new if new else None,
            }
        )
    text = "GPU time of forward and backward by part of the model, and of the optimizer, by token."
    return Section("Parts", text, rows)


def _categories(records: Sequence[Record]) -> Section:
    bars = {record["model"]: _a_token(record, by_category(record)) for record in records}
    rows = [
        {"change": name} | {f"{c} us": bar.get(c, 0.0) for c in CATEGORIES}
        for name, bar in bars.items()
    ]
    figure = stacked_bars(bars, CATEGORY_COLOURS, "kernel time, us a token")
    return Section("Kernel categories", "Kernel time by token and category.", rows, figure)


def _why_section(records: Sequence[Record]) -> Section:
    """What changed between neighbours, in numbers of the records: where time went, what ended."""
    rows = []
    for before, after in zip(records, records[1:], strict=False):
        a, b = (_a_token(record, by_category(record)) for record in (before, after))
        moved = sorted(CATEGORIES, key=lambda c: -abs(b.get(c, 0.0) - a.get(c, 0.0)))[:3]
        told = [f"{c} {a.get(c, 0.0):.3g} to {b.get(c, 0.0):.3g}" for c in moved]
        kinds = {one["kind"] for one in after["findings"]}
        ended = [one["title"] for one in before["findings"] if one["kind"] not in kinds]
        row = {"change": after["model"], "moved most, us a token": "; ".join(told)}
        for label, of in _FIGURES.items():
            old, new = of(before), of(after)
            row[label] = "-" if old is None or new is None else f"{old:.1%} to {new:.1%}"
        rows.append(row | {"no longer found": "; ".join(ended) or None})
    last = [f"{one['kind']}: {one['title']}." for one in records[-1]["findings"]]
    notes = ["What is still found in the last one:", *last] if last else []
    text = "Kernel time by token that each change moved, and findings that it ended."
    return Section("Why", text, rows, notes=notes)


_FIGURES: dict[str, Callable[[Record], float | None]] = {
    "time in tensor-core kernels": lambda r: r["efficiency"]["tensor_core_time_share"],
    "GPU utilisation, profiled": lambda r: r["efficiency"]["gpu_utilisation"],
}
