"""Figures of a result file: throughput, ratio to a baseline, share of the roof, latency.

Nothing is measured or assumed here: every number comes from the file, the ceilings from
`attnscope.common.hardware.devices`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnscope.bench.consistency import DRIFT, drifts
from attnscope.bench.figures import Kind, Value, draw
from attnscope.bench.series import Family, Point, families, scale_label, timed
from attnscope.bench.statistics import bootstrap_ratio
from attnscope.bench.tables import put_results
from attnscope.bench.workloads import DTYPE_SHORT
from attnscope.common.forms import TERMINAL, AsJson, Form, form_of, printed
from attnscope.common.hardware.devices import Device, Roof, find_device
from attnscope.common.plotting import save
from attnscope.common.results import read_results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
BASELINES = ("sdpa-flash", "sdpa-efficient", "sdpa-math", "naive")
WARM = " What the L2 holds can pass its memory part."


def kinds(env: Row, family: Family, device: Device | None, baseline: str | None) -> Iterator[Kind]:
    """The figures that make sense for a family: throughput, ratio and roof; for a CPU, latency."""

    def roof(point: Point) -> Roof | None:
        return point.roof(device)

    def share(point: Point) -> tuple[float, float, float] | None:
        ceiling = roof(point)
        if ceiling is None:
            return None
        low, median, high = (100 * tflops / ceiling.tflops for tflops in point.tflops)
        return median, low, high

    def latency(point: Point) -> tuple[float, float, float]:
        low, median, high = point.ms
        return median, low, high

    def throughput(point: Point) -> tuple[float, float, float]:
        low, median, high = point.tflops
        return median, low, high

    if env["device"] == "cpu":
        yield Kind("latency", "time of a call", "milliseconds", latency, log=True)
    else:
        ceiling = roof if any(map(roof, family.points)) else None
        yield Kind("throughput", "throughput", "TFLOP/s", throughput, ceiling=ceiling)
    if baseline in family.impls and len(family.impls) > 1:
        title = f"speed relative to {baseline}"
        value = speed_over(family, str(baseline))
        interval = "95 % interval of the ratio of medians"
        yield Kind("ratio", title, f"times {baseline}", value, interval, line=1.0)
    if any(map(roof, family.points)):
        yield Kind("roof", "share of the roof", "% of the roof", share, line=100.0)


def speed_over(family: Family, baseline: str) -> Value:
    """Speed relative to the baseline on the same workload, with its bootstrap interval."""
    base = {point.work: point.row for point in family.points if point.impl == baseline}

    known: dict[int, tuple[float, float, float]] = {}  # a figure asks several times

    def value(point: Point) -> tuple[float, float, float] | None:
        if point.work not in base:
            return None
        if id(point) not in known:
            known[id(point)] = speed(point)
        return known[id(point)]

    def speed(point: Point) -> tuple[float, float, float]:
        other, row = base[point.work], point.row
        ratio = other["median_ms"] / row["median_ms"]
        if point.impl == baseline or not other["samples_ms"] or not row["samples_ms"]:
            return ratio, ratio, ratio
        if row.get("baseline") == baseline and row.get("ratio") == ratio and row.get("ratio_ci"):
            return ratio, *row["ratio_ci"]
        return ratio, *bootstrap_ratio(other["samples_ms"], row["samples_ms"])

    return value


def conditions(env: Row, family: Family, device: Device | None) -> str:
    """Card, dtype, tokens, L2 mode, torch and the range of SM clocks, as one line."""
    clocks = [c for p in family.points if (c := p.row.get("sm_clock_mhz"))]
    parts = [device.name if device else env.get("gpu") or f"{env.get('cpu')}"]
    if env["device"] == "cpu":
        parts.append(f"{env.get('threads')} threads")
    parts.append(scale_label(family))
    if env["device"] != "cpu":
        parts.append(f"L2 {family.l2}")
    parts.append(f"torch {env.get('torch')}")
    if clocks:
        span = f"{min(clocks):.0f}" + (f" to {max(clocks):.0f}" if len(set(clocks)) > 1 else "")
        parts.append(f"SM clock {span} MHz")
    return "  |  ".join(parts)


def footnotes(
    family: Family, kind: Kind, device: Device | None, unknown: str | None, left_out: Counter[str]
) -> list[str]:
    """What a reader needs to interpret the figure, and what it does not show."""
    notes = [f"Error bars: {kind.bars}."]
    if kind.name == "throughput":
        rules = sorted({str(point.row.get("flops_rule")) for point in family.points})
        notes[0] += f" FLOPs counted: {', '.join(rules)}."
    if kind.name in ("throughput", "roof"):
        if device is None:
            notes.append(f"No roof: {unknown}.")
        elif family.dtype not in device.peaks:
            notes.append(f"No roof: no {family.dtype} peak is known for {device.name}.")
        else:
            notes.append(
                f"Roof: the lower of {device.peaks[family.dtype]:g} TFLOP/s (dense {family.dtype}) "
                f"and {device.bandwidth_gbs:g} GB/s times the FLOPs per byte, {device.name} "
                f"datasheet.{'' if family.l2 != 'warm' else WARM}"
            )
    throttled = sum(bool(point.row.get("throttled")) for point in family.points)
    if throttled:
        notes.append(f"{throttled} of {len(family.points)} rows ran under a throttle reason.")
    drifting = sum(drifts(point.row) for point in family.points)
    if drifting:
        notes.append(f"{drifting} of {len(family.points)} rows drift by more than {DRIFT:.0%}.")
    if left_out:
        counts = ", ".join(f"{count} {status}" for status, count in sorted(left_out.items()))
        notes.append(f"Not shown, no time in the file: {counts}.")
    return notes


@dataclass(frozen=True)
class Drawn:
    """A figure of a result file: `<stem>-<kind>` names its files."""

    name: str
    title: str
    figure: Figure


def draw_file(path: Path, baseline: str | None = None) -> list[Drawn]:
    """Draw every figure of a result file.

    `baseline` is the denominator of the ratios; the default is the run's baseline. Raises
    ValueError for an invalid file, or one without a timed row, or without a timed row of
    `baseline`.
    """
    from attnscope.bench.aliases import ALIASES

    content = read_results(path)
    env, rows = content["env"], content["rows"]
    if lacking := sorted({"device", "gpu", "torch"} - set(env)):
        raise ValueError(f"{path}: env must have device, gpu and torch, got none of {lacking}")
    points, left_out = timed(rows)
    if not points:
        counts = ", ".join(f"{count} {status}" for status, count in sorted(left_out.items()))
        raise ValueError(f"{path} must have a row with a time, got {counts or 'no rows'}")
    impls = {point.impl for point in points}
    baseline = ALIASES.get(str(baseline), baseline)
    if baseline is not None and baseline not in impls:
        raise ValueError(
            f"baseline must be an impl with times in {path}, {sorted(impls)}, got {baseline!r}"
        )
    baseline = baseline or _usual_baseline(rows, impls)
    device, unknown = device_of(env)
    drawn: list[Drawn] = []
    names: Counter[str] = Counter()
    found = families(points)
    for family in found:
        stem = path.stem
        if len(found) > 1:
            form = "" if family.panels else "-cases"
            if len({family.phase for family in found}) > 1:
                stem += f"-{(family.phase or 'forward').replace(',', '').replace(' ', '-')}"
            stem += f"-{DTYPE_SHORT[family.dtype]}{form}"
        names[stem] += 1
        stem += f"-{names[stem]}" if names[stem] > 1 else ""
        for kind in kinds(env, family, device, baseline):
            title = f"Attention {family.phase or 'forward'}: {kind.title}"
            notes = footnotes(family, kind, device, unknown, left_out)
            figure = draw(family, kind, title, conditions(env, family, device), notes)
            drawn.append(Drawn(f"{stem}-{kind.name}", title, figure))
    return drawn


def plot_file(path: Path, output_dir: Path, baseline: str | None = None) -> list[Path]:
    """Write every figure of `draw_file` as PNG and SVG; returns the files written.

    Raises ValueError as `draw_file`, and for a folder that cannot be made.
    """
    drawn = draw_file(path, baseline)
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"output_dir must be a folder, got {output_dir}: {error.strerror}"
        ) from None
    return [file for one in drawn for file in save(one.figure, output_dir / one.name)]


def _usual_baseline(rows: Sequence[Row], impls: set[str]) -> str | None:
    named = [str(row["baseline"]) for row in rows if row.get("baseline")]
    return next((impl for impl in (*named, *BASELINES) if impl in impls), None)


def device_of(env: Row) -> tuple[Device | None, str | None]:
    """The card of a result file, or why its ceilings are not known."""
    if env["device"] == "cpu":
        return None, "no peak is known for CPUs"
    return find_device(str(env["gpu"]), env.get("gpu_sms"), env.get("gpu_memory_gib"))


def plot_command(
    results: Annotated[list[Path], typer.Argument(help="Result files of `attnscope bench`.")],
    output_dir: Annotated[Path, typer.Option(help="Where PNG and SVG files go.")] = Path("plots"),
    baseline: Annotated[
        str | None, typer.Option(help="Impl that ratios are taken to; left out, the run's.")
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(
            help="Also put a figure and a table of each file into this Markdown file, between the "
            "lines <!-- results:begin --> and <!-- results:end -->."
        ),
    ] = None,
    form: Form = TERMINAL,
    as_json: AsJson = False,
) -> None:
    """Draw result files: throughput, ratio to a baseline, share of the roof; for a CPU, latency."""
    from attnscope.common.console import say
    from attnscope.common.options import bad_input

    with bad_input("plot"), printed(form_of(form, as_json), "plot") as facts:
        written = {path: plot_file(path, output_dir, baseline) for path in results}
        facts["files"] = [str(target) for targets in written.values() for target in targets]
        for target in facts["files"]:
            say(target)
        if markdown is not None:
            put_results(markdown, {path: targets[0] for path, targets in written.items()})
            say(f"{markdown}: a figure and a table of {', '.join(map(str, results))}")
