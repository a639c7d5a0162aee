"""What the commands `bench` and `check` print."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from attnscope.bench.consistency import DRIFT, drifts
from attnscope.bench.means import over_baseline, over_fastest_peer
from attnscope.bench.statistics import geometric_mean
from attnscope.bench.workloads import DTYPE_SHORT, Workload
from attnscope.common.console import console, say

if TYPE_CHECKING:
    from attnscope.numerics import Verdict

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
    console().print(table)
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
        console().print(table)
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


class CheckReport:
    """Prints a line per result and a summary; `finish` returns whether all passed."""

    def __init__(self) -> None:
        self._verdicts: dict[str, list[Verdict]] = {}
        self._broken: Counter[str] = Counter()
        self._skipped: Counter[tuple[str, str]] = Counter()
        head = f"{'':5}{'impl':15}{'inputs':14}{'error':>9}{'baseline':>10}{'ratio':>7}"
        say(f"{head}{'margin':>8}  workload (margin: share of the allowed error, worst row)")

    def assessed(self, impl: str, work: Workload, kind: str, verdict: Verdict) -> None:
        """A result was compared."""
        self._verdicts.setdefault(impl, []).append(verdict)
        numbers = f"{_number(verdict.max_abs_err):>9}{_number(verdict.baseline_err):>10}"
        numbers += f"{_number(verdict.err_ratio, '.2f'):>7}{_number(verdict.margin, '.2f'):>8}"
        checked = "" if verdict.checked == "all rows" else f" ({verdict.checked})"
        each = [f"{name} {errors.margin:.2f}" for name, errors in verdict.gradients.items()]
        margins = f" ({', '.join(each)})" if each else ""
        named = f"{work.id}{checked}{margins}"
        self._line(verdict.passed, impl, kind, numbers, named, verdict.reason)

    def failed(self, impl: str, work: Workload, kind: str, reason: str) -> None:
        """There is no result: the impl raised."""
        self._broken[impl] += 1
        self._line(False, impl, kind, "", work.id, reason)

    def skipped(self, impl: str, reason: str) -> None:
        """The impl cannot do the workload."""
        self._skipped[impl, reason] += 1

    def _line(self, good: bool, impl: str, kind: str, numbers: str, work: str, reason: str) -> None:
        word = "pass" if good else "FAIL"
        say(f"{word:5}{impl:15}{kind:14}{numbers:34}  {work}", None if good else "red")
        if not good:
            say(f"{'':5}{reason}", "red")

    def finish(self, complete: bool = True) -> bool:
        """Print the summary. True where something was compared and everything passed."""
        for (impl, reason), count in self._skipped.items():
            say(f"{impl}: skipped on {count}: {reason}", "dim")
        good = complete
        for impl in dict.fromkeys([*self._verdicts, *self._broken]):
            verdicts = self._verdicts.get(impl, [])
            passed = sum(verdict.passed for verdict in verdicts)
            total = len(verdicts) + self._broken[impl]
            good &= passed == total
            margins = [verdict.margin for verdict in verdicts if verdict.margin is not None]
            worst = f", worst margin {max(margins):.2f}" if margins else ""
            if moody := sum(verdict.repeatable is False for verdict in verdicts):
                worst += f", bits differ between runs of {moody}"
            say(f"{impl}: {passed} of {total} passed{worst}", None if passed == total else "red")
        if not self._verdicts and not self._broken:
            say("check: nothing could be checked", "red", stderr=True)
            return False
        return good


def _number(value: float | None, form: str = ".2e") -> str:
    if value is None:
        return "-"
    return format(value, form if value < 1000 else ".0e")
