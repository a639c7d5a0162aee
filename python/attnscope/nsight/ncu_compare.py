"""Two ncu reports, kernel by kernel and metric by metric: what moved, and by how much."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from attnscope.nsight.diagnosis import limit
from attnscope.nsight.metrics import KEYS, NAMES
from attnscope.nsight.ncu_reader import Kernel
from attnscope.profile.render.document import Document, Section

LEAST_CHANGE = 2.0  # percent, or points of a percentage
MOST_ROWS = 25  # of each pair of kernels
FIRST = ("time_ns", "clock_hz", "instructions", "tensor_pct", "mufu_pct", "issue_pct", "dram_bytes")

Pair = tuple[Kernel, Kernel]


def pair_kernels(
    before: Sequence[Kernel], after: Sequence[Kernel]
) -> tuple[list[Pair], list[Kernel], list[Kernel]]:
    """Pairs of launches, and what has no partner on either side.

    Launches of the same symbol are paired in their order. What remains is paired in order too, if
    both sides have as many, because a changed kernel may have another symbol.
    """
    waiting: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in after:
        waiting[kernel.symbol].append(kernel)
    pairs, only_before = [], []
    for kernel in before:
        if waiting[kernel.symbol]:
            pairs.append((kernel, waiting[kernel.symbol].pop(0)))
        else:
            only_before.append(kernel)
    used = {id(second) for _, second in pairs}
    only_after = [kernel for kernel in after if id(kernel) not in used]
    if len(only_before) == len(only_after):
        pairs += zip(only_before, only_after, strict=True)
        only_before, only_after = [], []
    return sorted(pairs, key=lambda pair: pair[0].number), only_before, only_after


def changes(before: Kernel, after: Kernel, least: float = LEAST_CHANGE) -> list[dict[str, Any]]:
    """The metrics of both that moved by at least `least`: percentages in points, others in %."""
    rows = []
    for name in before.values:
        if name not in after.values:
            continue
        first, second = before.values[name], after.values[name]
        key = KEYS.get(name, name)
        points = name.endswith(".pct") or "pct_of_peak" in name
        if points:
            moved = second - first
        elif first:
            moved = 100 * (second / first - 1)
        else:
            moved = 0.0 if second == first else float("inf")
        if abs(moved) < least and key not in FIRST[:2]:
            continue
        change = f"{moved:+.1f} {'points' if points else '%'}" if abs(moved) < 1e6 else "from 0"
        place = FIRST.index(key) if key in FIRST else len(FIRST)
        row = {"metric": key, "before": first, "after": second, "change": change}
        rows.append((place, -abs(moved), row))
    rows.sort(key=lambda entry: entry[:2])
    return [row for _, _, row in rows]


def _sections(pairs: Sequence[Pair]) -> Iterator[Section]:
    for before, after in pairs:
        rows = changes(before, after)
        known = [row for row in rows if row["metric"] in NAMES]
        shown = (known + [row for row in rows if row not in known])[:MOST_ROWS]
        title = f"Kernel {before.number}: {before.name}"
        if after.name != before.name:
            title += f" -> {after.name}"
        notes = [f"before: {limit(before).line}.", f"after: {limit(after).line}."]
        if len(rows) > len(shown):
            notes.append(f"{len(rows) - len(shown)} more metrics moved; --json has them.")
        yield Section(
            title, f"Metrics that moved by at least {LEAST_CHANGE:g}.", shown, notes=notes
        )


def document(before: Sequence[Kernel], after: Sequence[Kernel], names: tuple[str, str]) -> Document:
    """A table of times, then one of metrics for each pair. Raises ValueError without any pair."""
    pairs, only_before, only_after = pair_kernels(before, after)
    if not pairs:
        raise ValueError(
            f"compare must have kernels in common, got {len(before)} and {len(after)} launches, "
            "none of the same name"
        )
    times = []
    for first, second in pairs:
        old, new = first.get("time_ns"), second.get("time_ns")
        times.append(
            {
                "#": first.number,
                "kernel": second.name,
                "before us": None if old is None else old * 1e-3,
                "after us": None if new is None else new * 1e-3,
                "speed-up": old / new if old and new else None,
            }
        )
    notes = [
        f"only in {name}: {', '.join(kernel.name for kernel in alone)}"
        for name, alone in zip(names, (only_before, only_after), strict=True)
        if alone
    ]
    text = "Time of each pair under ncu; the speed-up is before over after."
    head = Section("Times", text, times, notes=notes)
    lead = [f"before: {names[0]}", f"after: {names[1]}"]
    return Document("Comparison of two ncu reports", lead, [head, *_sections(pairs)])
