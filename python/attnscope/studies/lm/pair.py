"""A plain transformer training loop and its optimised twin: the effect of each change, and why.

The changes are made one after the other (number format, attention, batch), each measured like
every other configuration, so that a difference has one cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from attnscope.profile.analysis.kernel_names import CATEGORIES
from attnscope.profile.render.document import Document, Section
from attnscope.profile.render.figures import CATEGORY_COLOURS, stacked_bars
from attnscope.studies.lm.model import ModelConfig
from attnscope.studies.lm.records import Model, ProfiledModel, TimedModel, read_models
from attnscope.studies.lm.run import Run
from attnscope.studies.outputs import origin
from attnscope.studies.parts import ATTENTION, CORE, OPTIMIZER, OUTSIDE, PARTS, PHASES
from attnscope.studies.records import Row

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


def pair_report(rows: Sequence[Row], env: Mapping[str, Any]) -> Document:
    """The effect of each change, from the rows of `runs` in their order.

    Raises ValueError for a row that contradicts itself, and if plain or optimised have no times.
    """
    records = read_models(rows)
    for record in records:
        if record.status == "refused":
            raise ValueError(record.reason)
    good = [record for record in records if _has_step(record)]
    if len(good) < 2 or good[0] is not records[0]:
        reasons = "; ".join(f"{one.model}: {_why(one)}" for one in records if one not in good)
        raise ValueError(f"pair must have times of its plain and another loop, got none: {reasons}")
    plain, best = good[0], good[-1]
    speed = _microseconds(plain) / _microseconds(best)
    lead = [
        origin(env),
        f"d_model {plain.d_model}, {plain.layers} layers, {plain.heads} heads, context "
        f"{plain.context}, vocabulary {plain.vocabulary:,}",
        f"From the plain loop to '{best.model}': {speed:.2f} times the tokens a second.",
    ]
    sections = [_changes(records)]
    profiled = [one for one in good if isinstance(one, ProfiledModel)]
    if len(profiled) == len(good):
        sections += [_parts(profiled[0], profiled[-1]), _categories(profiled)]
        sections.append(_why_section(profiled))
    else:
        lead.append(f"No GPU time: {next(filter(None, (one.no_kernels for one in good)))}.")
    return Document("A plain training loop and its optimised twin", lead, sections)


def _has_step(record: Model) -> TypeGuard[TimedModel]:
    return isinstance(record, TimedModel) and record.no_backward is None


def _why(record: Model) -> str:
    """Why a record has no time of a step."""
    return str(record.no_backward if isinstance(record, TimedModel) else record.reason)


def _microseconds(record: TimedModel) -> float:
    """Wall clock of a step without the profiler, by token."""
    return sum(map(record.wall, PHASES)) * 1e3 / record.tokens


def _changes(records: Sequence[Model]) -> Section:
    rows: list[Row] = []
    times: list[float] = []
    for record in records:
        row: Row = {"change": record.model, "tokens a step": record.tokens}
        if not _has_step(record):
            rows.append(row | {"not measured": _why(record)})
            continue
        times.append(_microseconds(record))
        row |= {"us a token": times[-1], "speed, to the one before": times[-2:][0] / times[-1]}
        row["speed, to plain"] = times[0] / times[-1]
        if isinstance(record, ProfiledModel):
            row["GPU us a token"] = record.total_us / record.tokens
            row["kernels a step"] = sum(kernel.calls for kernel in record.kernels)
            row["tensor-core time %"] = _percent(record.efficiency.tensor_core_time_share)
            row["GPU utilisation, profiled %"] = _percent(record.efficiency.gpu_utilisation)
        row["peak GiB"] = record.peak_memory_gib
        rows.append(row)
    text = (
        "One change after the other. Time a token is the wall clock of a step without the profiler "
        "over its tokens; GPU time is from one profiled step."
    )
    return Section("Changes", text, rows)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _a_token(record: Model, times: Counter[str]) -> dict[str, float]:
    return {name: time / record.tokens for name, time in times.items()}


_CORES = tuple(f"Self-Attention, core, {phase}" for phase in PHASES[:2])
_PART_ROWS = (*(name for name in PARTS if name != CORE), *_CORES, OPTIMIZER, OUTSIDE)


def _by_part(record: ProfiledModel) -> Counter[str]:
    """`part_times`, with the forward and the backward of the attention core apart."""
    times: Any = record.part_times()
    for row in record.kernels:
        if row.part == CORE and row.phase in PHASES[:2]:
            times[f"Self-Attention, core, {row.phase}"] += row.total_us
            times[CORE] -= row.total_us
    return times


def _parts(plain: ProfiledModel, best: ProfiledModel) -> Section:
    a, b = (_a_token(record, _by_part(record)) for record in (plain, best))
    rows = []
    for name in _PART_ROWS:
        if name not in a and name not in b:
            continue
        old, new = a.get(name, 0.0), b.get(name, 0.0)
        label = "Self-Attention, projections" if name == ATTENTION else name
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


def _categories(records: Sequence[ProfiledModel]) -> Section:
    bars = {record.model: _a_token(record, record.by_category()) for record in records}
    rows = [
        {"change": name} | {f"{c} us": bar.get(c, 0.0) for c in CATEGORIES}
        for name, bar in bars.items()
    ]
    figure = stacked_bars(bars, CATEGORY_COLOURS, "kernel time, us a token")
    return Section("Kernel categories", "Kernel time by token and category.", rows, figure)


def _why_section(records: Sequence[ProfiledModel]) -> Section:
    """What changed between neighbours, in numbers of the records: where time went, what ended."""
    rows = []
    for before, after in zip(records, records[1:], strict=False):
        a, b = (_a_token(record, record.by_category()) for record in (before, after))
        moved = sorted(CATEGORIES, key=lambda c: -abs(b.get(c, 0.0) - a.get(c, 0.0)))[:3]
        times = [f"{c} {a.get(c, 0.0):.3g} to {b.get(c, 0.0):.3g}" for c in moved]
        kinds = {one.kind for one in after.findings}
        ended = [one.title for one in before.findings if one.kind not in kinds]
        row: Row = {"change": after.model, "moved most, us a token": "; ".join(times)}
        for label, name in _FIGURES.items():
            old, new = (getattr(one.efficiency, name) for one in (before, after))
            row[label] = "-" if old is None or new is None else f"{old:.1%} to {new:.1%}"
        rows.append(row | {"no longer found": "; ".join(ended) or None})
    last = [f"{one.kind}: {one.title}." for one in records[-1].findings]
    notes = ["What is still found in the last one:", *last] if last else []
    text = "Kernel time by token that each change moved, and findings that it ended."
    return Section("Why", text, rows, notes=notes)


_FIGURES = {
    "time in tensor-core kernels": "tensor_core_time_share",
    "GPU utilisation, profiled": "gpu_utilisation",
}
