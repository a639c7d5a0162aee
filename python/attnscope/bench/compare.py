"""Compare two runs, or two impls of one run: ratios with intervals, and a gate for CI.

A is always the baseline and B the candidate. A ratio is the speed of B over the speed of A (median
time of A over median time of B): above 1, B is faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich import box
from rich.markup import escape
from rich.table import Table

from attnscope.bench.consistency import DRIFT, remarks
from attnscope.bench.means import SHORTEST, by_length, length, span
from attnscope.bench.statistics import LEAST_SAMPLES, bootstrap_ratio, geometric_mean
from attnscope.bench.workloads import Workload

Row = Mapping[str, Any]
CLOCK_TOLERANCE = 0.05  # runs whose SM clocks are further apart are not the same experiment
# What must agree for two runs to be compared, and what is only reported if it differs.
SAME = {"cuda": ("device", "gpu", "gpu_sms", "power_limit_w"), "cpu": ("device", "cpu", "threads")}
REPORTED = ("torch", "cuda", "driver", "cudnn", "triton", "attnscope", "git_sha")


@dataclass(frozen=True)
class Pair:
    """One workload on both sides. `ratio`, `low`, `high` are None where a side has no time."""

    impl: str
    work: Workload
    a: Row | None
    b: Row | None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def significant(self) -> bool:
        """The interval excludes 1. Without enough samples for one, the ratio stands."""
        return self.low is None or self.high is None or not self.low <= 1 <= self.high

    def verdict(self, limit: float | None) -> str:
        """Classify a pair. `limit` is the gate's, at most 1; None: any clear change counts.

        One of: faster, slower, same; unclear (below the limit, but the interval contains 1); lost
        (A has a time, B has none); broken (B is wrong or failed, A did not); no time.
        """
        if self.ratio is None:
            status_a, status_b = _status(self.a), _status(self.b)
            if status_b in ("wrong", "failed") and status_a != status_b:
                return "broken"
            return "lost" if status_a == "ok" else "no time"
        if not self.significant:
            return "unclear" if limit is not None and self.ratio < limit else "same"
        if self.ratio < (limit or 1.0):
            return "slower"
        return "faster" if self.ratio > 1 / (limit or 1.0) else "same"

    def why(self) -> str:
        """Why there is no ratio, as one line."""
        return "; ".join(
            f"{side} {'has no row' if row is None else _describe(row)}"
            for side, row in (("A", self.a), ("B", self.b))
            if _status(row) != "ok"
        )


def _status(row: Row | None) -> str:
    return "missing" if row is None else str(row["status"])


def _describe(row: Row) -> str:
    return f"{row['status']} ({row.get('reason') or 'no reason given'})"


def pair_rows(
    rows_a: Iterable[Row], rows_b: Iterable[Row], across_impls: bool = False
) -> list[Pair]:
    """Join rows on workload and impl, or on workload alone where each side is one impl.

    A row without a partner becomes a pair with None. Deterministic gradients on one side alone are
    compared with the others. Raises ValueError if a side has a key twice.
    """
    rows_a, rows_b = list(rows_a), list(rows_b)
    asked = [{bool(row.get("deterministic")) for row in rows} for rows in (rows_a, rows_b)]
    alike = asked[0] != asked[1] and len(asked[0]) == len(asked[1]) == 1

    def keyed(rows: Iterable[Row], side: str) -> dict[tuple[str | None, str], Row]:
        found: dict[tuple[str | None, str], Row] = {}
        for row in rows:
            work = Workload.from_dict(row)
            work = replace(work, deterministic=False) if alike else work
            key = (None if across_impls else row["impl"], work.id)
            if key in found:
                raise ValueError(f"{side} must have one row of {row['impl']} on {key[1]}, got two")
            found[key] = row
        return found

    a, b = keyed(rows_a, "A"), keyed(rows_b, "B")
    return [_pair(a.get(key), b.get(key)) for key in {**a, **b}]


def _pair(a: Row | None, b: Row | None) -> Pair:
    some = a or b or {}
    impl = str(some["impl"])
    if a and b and a["impl"] != b["impl"]:
        impl = f"{b['impl']} over {a['impl']}"
    work = Workload.from_dict(some)
    if not a or not b or _status(a) != "ok" or _status(b) != "ok":
        return Pair(impl, work, a, b)
    if not a["median_ms"] or not b["median_ms"]:
        return Pair(impl, work, a, b)
    ratio = a["median_ms"] / b["median_ms"]
    samples = a.get("samples_ms") or [], b.get("samples_ms") or []
    if min(map(len, samples)) < LEAST_SAMPLES:
        return Pair(impl, work, a, b, ratio)
    return Pair(impl, work, a, b, ratio, *bootstrap_ratio(*samples))


def differences(env_a: Row, env_b: Row, pairs: Sequence[Pair]) -> tuple[list[str], list[str]]:
    """Why two runs must not be compared, and what else differs, as sentences."""
    refused = [
        f"{key}: A has {env_a.get(key)}, B has {env_b.get(key)}"
        for key in SAME.get(str(env_a.get("device")), SAME["cuda"])
        if env_a.get(key) != env_b.get(key)
    ]
    timed = [(pair.a, pair.b) for pair in pairs if pair.ratio and pair.a and pair.b]
    for key, name in (("l2", "L2 mode"), ("timer", "timer")):
        for one, other in sorted({(str(a.get(key)), str(b.get(key))) for a, b in timed}):
            if one != other:
                refused.append(f"{name}: A has {one}, B has {other}")
    rests = [(env.get("settings") or {}).get("rest", 0.0) for env in (env_a, env_b)]
    if env_a.get("device") == "cuda" and rests[0] != rests[1]:
        refused.append(f"rest after a sample: A has {rests[0]:g}, B has {rests[1]:g} times it")
    clocks = [  # same impl: another may draw other power and run at another clock
        b["sm_clock_mhz"] / a["sm_clock_mhz"]
        for a, b in timed
        if a["impl"] == b["impl"] and a.get("sm_clock_mhz") and b.get("sm_clock_mhz")
    ]
    if clocks and abs(np.median(clocks) - 1) > CLOCK_TOLERANCE:
        refused.append(f"SM clock: B ran at {np.median(clocks):.2f} times the clock of A")
    notes = [
        f"differs: {key}: A has {env_a.get(key)}, B has {env_b.get(key)}"
        for key in REPORTED
        if env_a.get(key) != env_b.get(key)
    ]
    notes += [
        f"{name} was measured with changes that are not committed"
        for name, env in (("A", env_a), ("B", env_b))
        if env.get("git_dirty")
    ]
    for name, side in (("A", 0), ("B", 1)):
        if timed and all(rows[side].get("deterministic") for rows in timed):
            notes.append(f"gradients of {name} are deterministic")
    layouts = [(env.get("settings") or {}).get("layouts", "bshd") for env in (env_a, env_b)]
    if layouts[0] != layouts[1]:
        notes.append(f"differs: layouts: A has {layouts[0]}, B has {layouts[1]}")
    for name in _DOUBTS:
        doubtful = [
            sum(any(remark.startswith(name) for remark in remarks(rows[side])) for rows in timed)
            for side in (0, 1)
        ]
        if any(doubtful):
            notes.append(f"{_DOUBTS[name]}: {doubtful[0]} of A, {doubtful[1]} of B")
    return refused, notes


_DOUBTS = {
    "throttled": "rows timed under a throttle reason",
    "host late": "rows whose call takes longer to enqueue than to run: back to back, the GPU waits",
    "drifts": f"rows whose samples drift by more than {DRIFT:.0%} from the first to the last third",
}


def means(pairs: Iterable[Pair]) -> dict[str, dict[str, list[float]]]:
    """Ratios by impl and by group: all, head dims, masks and lengths, in that order.

    "all" is in two groups where there are workloads of at most 64 tokens and longer ones. Modes
    have groups of their own.
    """
    found: dict[str, dict[str, list[float]]] = {}
    timed = [pair for pair in pairs if pair.ratio]
    overall = {work: name for name, works in _overall(timed).items() for work in works}
    of_phase = _phases(pair.work for pair in timed)
    for group in (
        lambda work: overall[work],
        lambda work: f"head dim {work.head_dim}{of_phase[work.phase]}",
        lambda work: ("causal" if work.causal else "not causal") + of_phase[work.phase],
        lambda work: f"length {length(work):,}{of_phase[work.phase]}",
    ):
        for pair in sorted(timed, key=lambda p: (p.work.head_dim, p.work.causal, p.work.seqlen_k)):
            by_group = found.setdefault(pair.impl, {})
            by_group.setdefault(group(pair.work), []).append(pair.ratio or math.nan)
    return found


def _overall(pairs: Sequence[Pair]) -> dict[str, list[Workload]]:
    groups = list(by_length(pair.work for pair in pairs).values())
    of_phase = _phases(work for group in groups for work in group)
    several = len(groups) > len(of_phase)
    found = {}
    for group in groups:
        limit = f" above S {SHORTEST}" if length(group[0]) > SHORTEST else f" up to S {SHORTEST}"
        found[f"all{limit if several else ''}{of_phase[group[0].phase]}"] = group
    return found


def _phases(works: Iterable[Workload]) -> dict[str, str]:
    """What to add to the name of a group, by phase: nothing where there is one phase."""
    phases = list(dict.fromkeys(work.phase for work in works))
    several = len(phases) > 1
    return {phase: f", {phase or 'forward'}" if several else "" for phase in phases}


def failures(pairs: Sequence[Pair], limit: float, allow_missing: bool) -> list[str]:
    """What makes the gate fail, as sentences; empty where it passes."""
    found = []
    for pair in pairs:
        name, verdict = f"{pair.impl} {pair.work.id}", pair.verdict(limit)
        if verdict == "slower":
            found.append(f"{name}: {pair.ratio:.3f} times the speed, below {limit:g}")
        elif verdict == "broken" or (verdict == "lost" and not (allow_missing and pair.b is None)):
            found.append(f"{name}: {pair.why()}")
    by_impl = means(pairs)
    for impl, by_group in by_impl.items():
        for group in (name for name in by_group if name.startswith("all")):
            if (mean := geometric_mean(by_group[group])) < limit:
                name = "geometric mean" + group.removeprefix("all")
                found.append(f"{impl}, {name}: {mean:.3f} times the speed, below {limit:g}")
    if not by_impl:
        found.append("no workload has a time on both sides")
    return found


def pairs_table(pairs: Sequence[Pair], limit: float | None) -> Table:
    """One line for each workload."""
    table = Table(title="speed of B over A", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("impl", "workload"):
        table.add_column(name, no_wrap=True)
    for name in ("A ms", "B ms", "B / A", "95 % interval"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict")
    table.add_column("remarks")
    for pair in pairs:
        verdict = pair.verdict(limit)
        times = [
            f"{row['median_ms']:.4g}" if row and row["median_ms"] else "-"
            for row in (pair.a, pair.b)
        ]
        ratio = f"{pair.ratio:.3f}" if pair.ratio else "-"
        interval = f"{pair.low:.3f} to {pair.high:.3f}" if pair.low and pair.high else "-"
        said = escape(verdict if pair.ratio else f"{verdict}: {pair.why()}")
        doubts = [
            f"{side} {r}" for side, row in (("A", pair.a), ("B", pair.b)) for r in remarks(row)
        ]
        cells = (pair.impl, _name(pair.work), *times, ratio, interval, said, ", ".join(doubts))
        table.add_row(*cells, style=_STYLES.get(verdict))
    return table


def _name(work: Workload) -> str:
    return f"{work.label}: {work.id}" if work.label else work.id


_STYLES = {"slower": "red", "lost": "red", "broken": "red", "faster": "green", "unclear": "yellow"}


def means_table(pairs: Sequence[Pair]) -> Table:
    """Geometric means: a line for each group, a column for each impl."""
    by_impl = means(pairs)
    overall = _overall([pair for pair in pairs if pair.ratio])
    table = Table(
        title="geometric means of B / A (workloads)", title_justify="left", box=box.SIMPLE_HEAD
    )
    table.add_column("over")
    for impl in by_impl:
        table.add_column(impl, justify="right")
    groups = dict.fromkeys(name for by_group in by_impl.values() for name in by_group)
    for group in groups:
        cells = [by_group.get(group, []) for by_group in by_impl.values()]
        title = f"{group}, {span(overall[group])}" if group in overall else group
        table.add_row(title, *(f"{geometric_mean(c):.3f} ({len(c)})" if c else "-" for c in cells))
    return table
