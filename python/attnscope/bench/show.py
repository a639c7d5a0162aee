"""What the command `bench` prints."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from attnscope.bench.consistency import DRIFT, drifts
from attnscope.bench.means import over_baseline, over_fastest_peer
from attnscope.bench.statistics import geometric_mean
from attnscope.bench.workloads import DTYPE_SHORT, Workload
from attnscope.common.console import say, show_table

Row = Mapping[str, Any]
_TAGS = {"wrong": "[red]wrong[/]", "failed": "[red]failed[/]", "skipped": "[dim]-[/]"}


def print_bench(rows: Sequence[Row], env: Row) -> None:
    """Print TFLOP/s by workload and impl, ratios to the baseline, and why rows have no time."""
    if not rows:
        return
    works = {row["workload"]: Workload.from_dict(row) for row in rows}
    impls = list(dict.fromkeys(row["impl"] for row in rows))
    cells = {(row["workload"], row["impl"]): row for row in rows}
    scale, unit = (1.0, "TFLOP/s") if env["device"] == "cuda" else (1e3, "GFLOP/s")
    common, columns = _labels(list(works.values()))
    table = Table(box=box.SIMPLE_HEAD)
    for name in [*columns, *impls]:
        table.add_column(name, justify="right", no_wrap=True)
    for at, work_id in enumerate(works):
        line = [cells.get((work_id, impl)) for impl in impls]
        best = max((row["tflops"] or 0.0 for row in line if row), default=0.0)
        shown = [_cell(row, scale, best) for row in line]
        table.add_row(*(column[at] for column in columns.values()), *shown)
    if any(row.get("host_us") for row in rows):
        unit += " (host us to enqueue a call)"
    say(f"{unit}: {common}" if common else unit)
    show_table(table)
    _print_conditions(rows, env)
    _print_counters(rows)
    _print_ratios(rows)
    _print_reasons(rows)


def _print_counters(rows: Sequence[Row]) -> None:
    """Hardware counters of each row that has them, and why others have none."""
    counted = [(row, found) for row in rows if (found := row.get("counters"))]
    if not counted:
        return
    columns = {
        "tensor pipe %": ("tensor_pct", 1.0, ".1f"),
        "FLOPs / exact": ("flops_ratio", 1.0, ".4f"),
        "DRAM MB": ("dram_bytes", 1e-6, ",.1f"),
        "L2 hit %": ("l2_hit_pct", 1.0, ".1f"),
    }
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("workload", "impl", *columns):
        table.add_column(name, justify="left" if name in ("workload", "impl") else "right")
    for row, found in counted:
        if "reason" not in found:
            values = ((found.get(key), scale, form) for key, scale, form in columns.values())
            cells = ["" if v is None else format(v * scale, form) for v, scale, form in values]
            table.add_row(row["workload"], row["impl"], *cells)
    if table.row_count:
        say("hardware counters of one call, after all timing")
        show_table(table)
    for reason in dict.fromkeys(found["reason"] for _, found in counted if "reason" in found):
        say(f"no counters: {reason}")


def _labels(works: Sequence[Workload]) -> tuple[str, dict[str, list[str]]]:
    """What all workloads share, as a sentence, and a column for each field that differs."""
    columns = {name: [of(work) for work in works] for name, of in _LABELS.items()}
    shared = {name: found[0] for name, found in columns.items() if len(set(found)) == 1}
    shown = [f"{name} {value}" for name, value in shared.items() if value not in ("", "no")]
    return ", ".join(shown), {name: v for name, v in columns.items() if name not in shared}


def _pair(query: int, key: int) -> str:
    return str(query) if query == key else f"{query}:{key}"


def _lengths(work: Workload) -> str:
    if work.seqlens is None:
        return _pair(work.seqlen_q, work.seqlen_k)
    return f"<={max(work.seqlen_q, work.seqlen_k)}"


_LABELS: dict[str, Callable[[Workload], str]] = {
    "mode": lambda work: work.phase,
    "cell": lambda work: work.label or "",
    "dtype": lambda work: DTYPE_SHORT[work.dtype],
    "D": lambda work: _pair(work.head_dim, work.head_dim_v),
    "heads": lambda work: _pair(work.heads_q, work.heads_kv),
    "batch": lambda work: str(work.batch) + (" packed" if work.seqlens is not None else ""),
    "causal": lambda work: "yes" if work.causal else "no",
    "window": lambda work: "" if work.window == (-1, -1) else "{},{}".format(*work.window),
    "softcap": lambda work: f"{work.softcap:g}" if work.softcap else "",
    "S": _lengths,
}


def _cell(row: Row | None, scale: float, best: float) -> str:
    if row is None:
        return ""
    if row["status"] != "ok" or row["tflops"] is None:
        return _TAGS.get(row["status"], "?")
    value = row["tflops"] * scale
    marks = ("!" if row["throttled"] else "") + ("~" if drifts(row) else "")
    text = f"{value:.{_decimals(value)}f}{marks}"
    host = f" ({row['host_us']:.0f})" if row.get("host_us") else ""
    return f"[bold green]{text}[/]{host}" if row["tflops"] >= best else f"{text}{host}"


def _decimals(value: float) -> int:
    """Decimals for three significant digits."""
    return max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0


def _print_conditions(rows: Sequence[Row], env: Row) -> None:
    timed = [row for row in rows if row["status"] == "ok"]
    if not timed:
        return
    said = [f"median of {_span(len(row['samples_ms']) for row in timed)} samples"]
    said.append(f"timer {timed[0]['timer']}")
    said.append(f"L2 {timed[0]['l2']}" if env["device"] == "cuda" else "caches warm")
    said.append(f"FLOPs by the rules: {', '.join(sorted({row['flops_rule'] for row in timed}))}")
    if clocks := [row["sm_clock_mhz"] for row in timed if row["sm_clock_mhz"]]:
        said.append(f"SM clock {_span(clocks)} MHz")
    if any(row["throttled"] for row in timed):
        said.append("! timed under a throttle reason (a power cap is one)")
    if any(map(drifts, timed)):
        said.append(f"~ samples that drift by more than {DRIFT:.0%} from first to last")
    if layouts := Counter(row["layout"] for row in timed if len(row.get("layouts_ms") or {}) > 1):
        counts = ", ".join(f"{name} in {count}" for name, count in sorted(layouts.items()))
        said.append(f"the faster layout counts: {counts} rows")
    where = env["gpu"] or f"{env['cpu']}, {env['threads']} threads"
    say(f"{where}: " + "; ".join(said))


def _span(values: Iterable[float]) -> str:
    found = sorted(values)
    return f"{found[0]}" if found[0] == found[-1] else f"{found[0]} to {found[-1]}"


def _print_ratios(rows: Sequence[Row]) -> None:
    baseline, groups = over_baseline(rows)
    for lengths, by_impl in groups.items():
        means = [
            f"{impl} {geometric_mean(ratios):.3f} ({len(ratios)})"
            for impl, ratios in by_impl.items()
            if impl != baseline
        ]
        if means:
            head = f"speed over {baseline}, geometric mean (workloads), {lengths}"
            say(f"{head}: " + ", ".join(means))
    for mean in over_fastest_peer(rows):
        say(mean.text())


def _print_reasons(rows: Sequence[Row]) -> None:
    """Print every reason once, with its number of workloads."""
    reasons = Counter((r["impl"], r["status"], r["reason"]) for r in rows if r["status"] != "ok")
    for (impl, status, reason), count in reasons.items():
        say(f"{impl}: {status} on {count}: {reason}", "dim" if status == "skipped" else "red")
