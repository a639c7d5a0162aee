"""Result files as Markdown tables: the only way by which numbers come into the README."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attnscope.bench.means import by_length, over_baseline, over_fastest_peer
from attnscope.bench.series import Point, timed
from attnscope.bench.statistics import geometric_mean
from attnscope.bench.workloads import DTYPE_SHORT, Workload
from attnscope.common.results import read_results

Row = Mapping[str, Any]
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
FOLD_OVER = 12  # workloads; more are folded away under a table of means


def results_table(path: Path, folder: Path) -> str:
    """Markdown of a result file: where it comes from (seen from `folder`), and a line for each
    workload.

    Values are TFLOP/s, or milliseconds for a CPU run; the best is bold, "-" is a missing time. Many
    workloads are folded away under a table of geometric means over lengths. Raises ValueError for a
    file without times.
    """
    content = read_results(path)
    env, rows = content["env"], content["rows"]
    points, left_out = timed(rows)
    if not points:
        raise ValueError(f"{path} must have a row with a time, got none")
    unit, value = ("ms", _ms) if env["device"] == "cpu" else ("TFLOP/s", _tflops)
    impls = list(dict.fromkeys(point.impl for point in points))
    by_work: dict[Workload, dict[str, Point]] = {}
    for point in points:
        by_work.setdefault(point.work, {})[point.impl] = point

    by_shape: dict[str, list[Workload]] = {}
    for work in by_work:
        by_shape.setdefault(_shape(work), []).append(work)
    every = [
        (_name(work), {i: value(p) for i, p in cells.items()}) for work, cells in by_work.items()
    ]
    means = [
        (f"{shape}, {lengths} ({len(works)})", _means(impls, [by_work[w] for w in works], value))
        for shape, same in by_shape.items()
        for lengths, works in by_length(same).items()
    ]
    ratios = _ratios(rows, impls)
    phases = list(dict.fromkeys(work.phase for work in by_work))
    of_calls = unit
    if any(phases):
        of_calls += f" ({'; '.join(phase or 'forward' for phase in phases)})"
    source = [_source(os.path.relpath(path, folder), env, of_calls, left_out)]
    over_peers = [f"- {mean.text()}" for mean in over_fastest_peer(rows)]
    last = ["", *over_peers] if over_peers else []
    if len(every) <= FOLD_OVER or any(work.label for work in by_work):
        return "\n".join([*source, *_table("workload", impls, every, unit, ratios), *last])
    folded = [f"<details><summary>All {len(every)} workloads</summary>", ""]
    folded += [*_table("workload", impls, every, unit), "", "</details>"]
    head = "geometric mean over lengths (workloads)"
    table = _table(head, impls, means, unit, ratios)
    return "\n".join([*source, *table, *last, "", *folded])


def put_results(document: Path, results: Mapping[Path, Path]) -> None:
    """Replace the text between the two result marks of a Markdown file.

    `results` maps each result file to its figure; figure and table of each file are stacked. Raises
    ValueError if the document does not have exactly one pair of marks.
    """
    try:
        text = document.read_text()
    except OSError as error:
        raise ValueError(f"{document}: {error.strerror}") from None
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(
            f"{document} must have one {BEGIN} and then one {END}, got {text.count(BEGIN)} and "
            f"{text.count(END)}. Put each on a line of its own"
        )
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    here = document.parent
    parts = [
        f"![{path.stem}]({os.path.relpath(figure, here)})\n\n{results_table(path, here)}"
        for path, figure in results.items()
    ]
    document.write_text("\n\n".join([f"{before}{BEGIN}", *parts, f"{END}{after}"]))


def _ms(point: Point) -> float:
    return point.ms[1]


def _tflops(point: Point) -> float:
    return point.tflops[1]


def _shape(work: Workload) -> str:
    """What stays when the length varies."""
    dim, heads = str(work.head_dim), str(work.heads_q)
    if work.head_dim_v != work.head_dim:
        dim += f"/{work.head_dim_v}"
    if work.heads_kv != work.heads_q:
        heads += f":{work.heads_kv}"
    parts = [DTYPE_SHORT[work.dtype], f"D {dim}", f"{heads} heads"]
    if work.window != (-1, -1):
        parts.append(f"window {work.window[0]},{work.window[1]}")
    if work.softcap:
        parts.append(f"softcap {work.softcap:g}")
    return ", ".join([*parts, "causal" if work.causal else "not causal"])


def _name(work: Workload) -> str:
    name = ", ".join(filter(None, [_shape(work), work.phase, _size(work)]))
    return f"{work.label}: {name}" if work.label else name


def _size(work: Workload) -> str:
    if work.seqlens is not None:
        return f"{len(work.seqlens)} packed, {sum(q for q, _ in work.seqlens):,} tokens"
    if work.seqlen_q == work.seqlen_k:
        return f"{work.batch} x {work.seqlen_q:,}"
    return f"{work.batch} x {work.seqlen_q:,} to {work.seqlen_k:,}"


def _means(
    impls: Sequence[str], cells: Sequence[Mapping[str, Point]], value: Callable[[Point], float]
) -> dict[str, float]:
    """Geometric means of the impls that have a time for each of the workloads."""
    whole = [impl for impl in impls if all(impl in points for points in cells)]
    return {impl: geometric_mean(value(points[impl]) for points in cells) for impl in whole}


def _ratios(rows: Sequence[Row], impls: Sequence[str]) -> list[str]:
    """The last lines: geometric mean speed over the run's baseline, by lengths, with how many
    workloads."""
    baseline, groups = over_baseline(rows)
    lines = []
    for lengths, ratios in groups.items():
        cells = [
            f"{geometric_mean(ratios[impl]):.2f}x ({len(ratios[impl])})" if impl in ratios else "-"
            for impl in impls
        ]
        head = f"speed over {baseline}, geometric mean, {lengths} (workloads)"
        lines.append(f"| {head} | {' | '.join(cells)} |")
    return lines


def _table(
    head: str,
    impls: Sequence[str],
    lines: Sequence[tuple[str, Mapping[str, float]]],
    unit: str,
    last: Sequence[str] = (),
) -> list[str]:
    best_of = min if unit == "ms" else max
    table = ["", f"| {head} | {' | '.join(impls)} |", "| :-- |" + " --: |" * len(impls)]
    for name, values in lines:
        best = best_of(values.values(), default=None)
        texts = []
        for impl in impls:
            text = f"{values[impl]:.3g}" if impl in values else "-"
            texts.append(f"**{text}**" if impl in values and values[impl] == best else text)
        table.append(f"| {name} | {' | '.join(texts)} |")
    return table + list(last)


def _source(path: str, env: Row, unit: str, left_out: Mapping[str, int]) -> str:
    where = env["gpu"] or f"{env['cpu']}, {env['threads']} threads"
    counts = ", ".join(f"{count} {status}" for status, count in sorted(left_out.items()))
    without = f"; rows without a time: {counts}" if counts else ""
    return f"{unit} on {where}, torch {env['torch']}, from [{path}]({path}){without}."
