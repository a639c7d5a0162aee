"""Rows of a result file arranged for figures and tables: families, panels and curves.

A family is the data of one figure: rows that agree in all but impl, sequence length, batch, head
dim, heads and causality. A panel is a part of it in which only impl, length and batch vary.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from attnscope.bench.workloads import DTYPE_SHORT, Workload
from attnscope.common.hardware.devices import Device, Roof

Row = Mapping[str, Any]
MOST_CASES = 40  # workloads in one figure of dots; it grows with them


@dataclass(frozen=True)
class Point:
    """One timed row."""

    row: Row
    work: Workload

    @property
    def impl(self) -> str:
        return str(self.row["impl"])

    @property
    def x(self) -> int:
        """The length a curve runs over: of the keys where there are fewer queries."""
        return max(self.work.seqlen_q, self.work.seqlen_k)

    @property
    def ms(self) -> tuple[float, float, float]:
        """p20, median and p80, milliseconds."""
        median = self.row["median_ms"]
        return self.row.get("p20_ms") or median, median, self.row.get("p80_ms") or median

    @property
    def tflops(self) -> tuple[float, float, float]:
        """TFLOP/s at p80, median and p20: slowest first."""
        fast, median, slow = self.ms
        work = self.row["flops"] * 1e-9
        return work / slow, work / median, work / fast

    def roof(self, device: Device | None) -> Roof | None:
        """Ceilings of its workload on a card, by reported FLOPs and least traffic."""
        if device is None:
            return None
        return device.roof(self.work.dtype, self.row["flops"], self.row["bytes"])


@dataclass(frozen=True)
class Panel:
    """Workloads that differ in length and batch only; `curves` by impl, points by length."""

    work: Workload  # any of them
    curves: Mapping[str, list[Point]]

    @property
    def works(self) -> list[Workload]:
        """Its workloads by length."""
        found = {point.x: point.work for curve in self.curves.values() for point in curve}
        return [found[x] for x in sorted(found)]

    @property
    def column(self) -> tuple[int, int, int, int]:
        work = self.work
        return work.head_dim, work.head_dim_v, work.heads_q, work.heads_kv

    @property
    def title(self) -> str:
        return f"{dims(self.work)}, {'causal' if self.work.causal else 'not causal'}"


@dataclass(frozen=True)
class Family:
    """The data of one figure: `panels` if lengths vary, otherwise `cases`, by workload."""

    phase: str  # of the calls, as Workload.phase
    dtype: str
    l2: str | None
    panels: list[Panel]
    cases: dict[Workload, list[Point]]

    @property
    def points(self) -> list[Point]:
        if self.panels:
            return [p for panel in self.panels for curve in panel.curves.values() for p in curve]
        return [point for case in self.cases.values() for point in case]

    @property
    def impls(self) -> list[str]:
        return list(dict.fromkeys(point.impl for point in self.points))


def dims(work: Workload) -> str:
    """Head dim and heads, as text."""
    dim = str(work.head_dim)
    if work.head_dim_v != work.head_dim:
        dim += f" (V {work.head_dim_v})"
    if work.heads_q == work.heads_kv:
        return f"head dim {dim}, {work.heads_q} heads"
    return f"head dim {dim}, {work.heads_q}:{work.heads_kv} heads"


def case_label(work: Workload) -> str:
    """A workload in one or two lines, without what a figure's title has."""
    if work.seqlens is not None:
        tokens = sum(q for q, _ in work.seqlens)
        shape = f"{tokens:,} tokens packed, {work.batch} sequences, longest {work.seqlen_q:,}"
    elif work.seqlen_q == work.seqlen_k:
        shape = f"batch {work.batch}, length {work.seqlen_q:,}"
    else:
        shape = f"batch {work.batch}, {work.seqlen_q:,} queries, {work.seqlen_k:,} keys"
    mask = [", causal"] if work.causal else []
    if work.window != (-1, -1):
        mask.append(f", window {work.window[0]},{work.window[1]}")
    if work.softcap:
        mask.append(f", softcap {work.softcap:g}")
    name = f"{work.label}: " if work.label else ""
    return f"{name}{shape}\n{dims(work)}{''.join(mask)}"


def timed(rows: Iterable[Row]) -> tuple[list[Point], Counter[str]]:
    """The rows that have a time, and how many have none, by status."""
    points, left_out = [], Counter[str]()
    for row in rows:
        if row["status"] != "ok" or not row.get("median_ms"):
            left_out["no time" if row["status"] == "ok" else str(row["status"])] += 1
        elif not row.get("flops") or not row.get("bytes"):
            raise ValueError(
                f"a row with a time must have flops and bytes, got {row['impl']} without"
            )
        else:
            points.append(Point(row, Workload.from_dict(row)))
    return points, left_out


def families(points: Iterable[Point]) -> list[Family]:
    """Arrange points into families: curves where at least two lengths can be joined, and the
    remaining workloads, packed batches among them, as cases of one family per mode and dtype."""
    shelves: dict[tuple[Any, ...], list[Point]] = defaultdict(list)
    for point in points:
        work = point.work
        queries = None if work.seqlen_q == work.seqlen_k else work.seqlen_q
        ratio = work.heads_q // work.heads_kv
        kind = (work.phase, work.dtype, point.row.get("l2"), work.seqlens is not None)
        shelves[(*kind, work.window, work.softcap, queries, ratio)].append(point)

    found: list[Family] = []
    rest: dict[tuple[str, str, str | None], list[Point]] = defaultdict(list)
    for (phase, dtype, l2, packed, *_), shelf in shelves.items():
        for group in [shelf] if packed else _by_scale(shelf):
            panels = [] if packed else _panels(group)
            if any(len(panel.works) > 1 for panel in panels):
                found.append(Family(phase, dtype, l2, panels, {}))
            else:
                rest[phase, dtype, l2] += group
    for (phase, dtype, l2), group in rest.items():
        cases: dict[Workload, list[Point]] = defaultdict(list)
        for point in group:
            cases[point.work].append(point)
        works = list(cases)
        for first in range(0, len(works), MOST_CASES):
            part = {work: cases[work] for work in works[first : first + MOST_CASES]}
            found.append(Family(phase, dtype, l2, [], part))
    return found


def _by_scale(points: list[Point]) -> Iterable[list[Point]]:
    """Split by what stays the same as the length grows: the tokens of a batch, or its size."""
    lengths = defaultdict(set)
    for point in points:
        lengths[point.work.batch * point.x].add(point.x)
    groups = defaultdict(list)
    for point in points:
        tokens = point.work.batch * point.x
        scale = ("tokens", tokens) if len(lengths[tokens]) > 1 else ("batch", point.work.batch)
        groups[scale].append(point)
    return groups.values()


def _panels(points: list[Point]) -> list[Panel]:
    shelves: dict[tuple[Any, ...], dict[str, list[Point]]] = {}
    for point in sorted(points, key=lambda p: p.x):
        panel = Panel(point.work, {})
        curves = shelves.setdefault((point.work.causal, *panel.column), {})
        curves.setdefault(point.impl, []).append(point)
    return [
        Panel(next(iter(curves.values()))[0].work, curves)
        for _, curves in sorted(shelves.items(), key=lambda item: item[0])
    ]


def scale_label(family: Family) -> str:
    """What the workloads of a family have in common beside mode, dtype and L2, as text."""
    works = list(dict.fromkeys(point.work for point in family.points))
    tokens = {work.batch * max(work.seqlen_q, work.seqlen_k) for work in works}
    batches = {work.batch for work in works}
    parts = [DTYPE_SHORT[family.dtype]]
    if family.panels:
        if len(tokens) == 1:
            parts.append(f"{tokens.pop():,} tokens")
        elif len(batches) == 1:
            parts.append(f"batch {batches.pop()}")
        first = works[0]
        if first.seqlen_q != first.seqlen_k:
            parts.append(f"{first.seqlen_q} queries")
        if first.window != (-1, -1):
            parts.append(f"window {first.window[0]},{first.window[1]}")
        if first.softcap:
            parts.append(f"softcap {first.softcap:g}")
    return ", ".join(parts)
