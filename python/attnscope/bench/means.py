"""Mean speeds with their scope: which peers, how many workloads, which lengths.

Workloads of at most 64 tokens have a mean of their own: launch overhead dominates them, and they
would dominate a mean over all lengths. So have the modes, forward, backward and both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnscope.bench.statistics import geometric_mean
from attnscope.bench.workloads import Workload

Row = Mapping[str, Any]
OURS = ("cuda", "cuda-sm80", "triton", "cpu")
SHORTEST = 64


@dataclass(frozen=True)
class Mean:
    """Geometric mean of an impl's speed over the fastest peer of each workload.

    `peers` have a time on every workload of the mean, `some` on part of them.
    """

    impl: str
    lengths: str
    ratio: float
    least: float
    count: int
    peers: tuple[str, ...]
    some: tuple[str, ...]

    def text(self) -> str:
        """The mean and its scope as one line."""
        peers = ", ".join(self.peers) or "none on all workloads"
        some = f"; on part of them {', '.join(self.some)}" if self.some else ""
        count = f"{self.count} workload" + "s" * (self.count > 1)
        head = f"{self.impl} over the fastest peer of each workload, {self.lengths}"
        return f"{head}: {self.ratio:.3f}, least {self.least:.3f} ({count}; peers {peers}{some})"


def length(work: Workload) -> int:
    """The length a workload is listed by: the longer one of queries and keys."""
    return max(work.seqlen_q, work.seqlen_k)


def span(works: Iterable[Workload]) -> str:
    """The lengths of workloads, such as "S 128 to 512"."""
    found = sorted({length(work) for work in works})
    return f"S {found[0]:,}" if len(found) == 1 else f"S {found[0]:,} to {found[-1]:,}"


def by_length(works: Iterable[Workload]) -> dict[str, list[Workload]]:
    """Workloads that one mean may be over, by phase and lengths, longer ones first."""
    groups: dict[tuple[str, bool], list[Workload]] = {}
    for work in sorted(dict.fromkeys(works), key=lambda work: length(work) <= SHORTEST):
        groups.setdefault((work.phase, length(work) <= SHORTEST), []).append(work)
    return {
        f"{phase}, {span(group)}" if phase else span(group): group
        for (phase, _), group in groups.items()
    }


def over_fastest_peer(rows: Sequence[Row]) -> list[Mean]:
    """Means of our impls over the fastest other impl of each workload; none where there is none."""
    times: dict[Workload, dict[str, float]] = {}
    for row in rows:
        if row["status"] == "ok" and row.get("median_ms"):
            times.setdefault(Workload.from_dict(row), {})[row["impl"]] = row["median_ms"]
    found = []
    for impl in OURS:
        raced = [work for work, took in times.items() if impl in took and set(took) - set(OURS)]
        for lengths, works in by_length(raced).items():
            peers = [set(times[work]) - set(OURS) for work in works]
            everywhere, anywhere = set.intersection(*peers), set.union(*peers)
            ratios = [
                min(times[work][peer] for peer in there) / times[work][impl]
                for work, there in zip(works, peers, strict=True)
            ]
            found.append(
                Mean(
                    impl, lengths, geometric_mean(ratios), min(ratios), len(ratios),
                    tuple(sorted(everywhere)), tuple(sorted(anywhere - everywhere)),
                )
            )  # fmt: skip
    return found


def over_baseline(rows: Sequence[Row]) -> tuple[str | None, dict[str, dict[str, list[float]]]]:
    """The run's baseline, and ratios to it by lengths and impl."""
    baseline = next((row["baseline"] for row in rows if row.get("baseline")), None)
    with_ratio = [(Workload.from_dict(row), row) for row in rows if row.get("ratio")]
    found: dict[str, dict[str, list[float]]] = {}
    for lengths, works in by_length(work for work, _ in with_ratio).items():
        members = set(works)
        for work, row in with_ratio:
            if work in members:
                found.setdefault(lengths, {}).setdefault(row["impl"], []).append(row["ratio"])
    return baseline, found
