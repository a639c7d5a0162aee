"""Several ranks of one run side by side: GPU time, steps, and who waited for whom.

A collective ends on all of its ranks together, so it takes the least time on the rank that arrives
last. That time is the collective's own; what it takes longer elsewhere is waiting. No clocks are
compared, so the ranks may be on different machines.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import pandas

from attnscope.profile.analysis.communication import bus_gbs

POINT_TO_POINT = "send/recv"  # takes as long as its partner needs; there is no last rank
# A collective counts as late if the others waited for more than this share of its own time, and
# for more than a launch takes.
LATE_SHARE = 0.05
LATE_US = 10.0
NAMED = 8  # of the missing ranks

Kind = tuple[Any, ...]  # a collective, its group, the group's size, the dtype


@dataclass(frozen=True)
class Rank:
    """What is compared of one rank: times in microseconds.

    Attributes:
        number: its global rank.
        world_size: the number of ranks of its run, None if unknown.
        content: its profile as JSON, see `render/files.py`.
    """

    number: int
    world_size: int | None
    content: Mapping[str, Any]

    def rows(self, table: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.content["tables"].get(table, [])
        return found

    @property
    def gpu_us(self) -> float:
        return float(self.content["attribution"]["total_us"])

    @property
    def state(self) -> str:
        """Whether its record is complete and can be trusted, in a few words."""
        if self.content["incomplete"] or self.content["interrupted"]:
            return str(self.content["incomplete"] or f"ended by {self.content['interrupted']}")
        return "complete" if self.content["lint"]["trusted"] else "not to be trusted"


@dataclass
class Waiting:
    """The times of matched collectives in microseconds, by rank and by kind."""

    by_rank: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    late: Counter[int] = field(default_factory=Counter)  # collectives that the others waited in
    waited_for: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    own: dict[Kind, float] = field(default_factory=lambda: defaultdict(float))  # of each once
    total: dict[Kind, float] = field(default_factory=lambda: defaultdict(float))  # of all ranks
    waited: dict[Kind, float] = field(default_factory=lambda: defaultdict(float))
    moved: Counter[Kind] = field(default_factory=Counter)  # bytes of each once
    matched: Counter[Kind] = field(default_factory=Counter)
    unmatched: Counter[Kind] = field(default_factory=Counter)


def check_ranks(ranks: Sequence[Rank]) -> list[str]:
    """What is missing for the ranks to be a whole run, in words.

    Raises ValueError for ranks of different runs.
    """
    worlds = {rank.world_size for rank in ranks if rank.world_size is not None}
    if len(worlds) > 1:
        sizes = ", ".join(map(str, sorted(worlds)))
        raise ValueError(
            f"the ranks of a folder must be of one run, got world sizes {sizes}. Remove the "
            "folders of the earlier run"
        )
    notes = []
    missing = set(range(max(worlds, default=0))) - {rank.number for rank in ranks}
    if missing:
        names = ", ".join(map(str, sorted(missing)[:NAMED]))
        names += f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        notes.append(f"no record of rank {names}: its times and what waited for it are missing")
    notes += [f"rank {r.number}: {r.state}" for r in ranks if r.state != "complete"]
    return notes


def waiting(ranks: Sequence[Rank]) -> Waiting:
    """Match the collectives of the ranks, and take their waiting apart."""
    found = Waiting()
    by_key: dict[tuple[Any, ...], dict[int, list[dict[str, Any]]]] = defaultdict(dict)
    for rank in ranks:
        for row in rank.rows("collectives"):
            by_key[_key(row)].setdefault(rank.number, []).append(row)
    for key, calls in by_key.items():
        kind = key[:4]
        if kind[0] == POINT_TO_POINT or not _match(calls, key):
            found.unmatched[kind] += sum(map(len, calls.values()))
            continue
        for together in _together(calls):
            _take_apart(found, kind, together)
    return found


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Collectives with the same key are matched: their kind, group, size and dtype, then members
    and bytes."""
    names = ("collective", "group", "size", "dtype", "members", "bytes")
    return tuple(row.get(name) for name in names)


def _match(calls: Mapping[int, Sequence[Any]], key: tuple[Any, ...]) -> bool:
    """Whether the calls of the ranks can be matched: by number, or because all have as many."""
    if len(calls) < 2 or (key[2] is not None and len(calls) != key[2]):
        return False
    numbered = all(row.get("sequence") is not None for rows in calls.values() for row in rows)
    return numbered or len({len(rows) for rows in calls.values()}) == 1


def _together(
    calls: Mapping[int, Sequence[Mapping[str, Any]]],
) -> list[dict[int, Mapping[str, Any]]]:
    """The calls of each collective, by rank; those that a rank did not record are left out."""
    instances: dict[Any, dict[int, Mapping[str, Any]]] = defaultdict(dict)
    for rank, rows in calls.items():
        repeats: Counter[Any] = Counter()
        for at, row in enumerate(rows):
            number = row.get("sequence")
            number = at if number is None else number
            instances[number, repeats[number]][rank] = row
            repeats[number] += 1
    return [one for one in instances.values() if len(one) == len(calls)]


def _take_apart(found: Waiting, kind: Kind, together: Mapping[int, Mapping[str, Any]]) -> None:
    times = {rank: float(row["time_us"]) for rank, row in together.items()}
    last = min(times, key=lambda rank: times[rank])
    own = times[last]
    waited = {rank: time - own for rank, time in times.items()}
    for rank, time in waited.items():
        found.by_rank[rank] += time
    found.own[kind] += own
    found.total[kind] += sum(times.values())
    found.waited[kind] += sum(waited.values())
    found.matched[kind] += 1
    found.moved[kind] += next(iter(together.values())).get("bytes") or 0
    longest = max(waited.values())
    if longest > max(LATE_US, LATE_SHARE * own):
        found.late[last] += 1
        found.waited_for[last] += sum(waited.values())


def rank_table(ranks: Sequence[Rank], waits: Waiting) -> pandas.DataFrame:
    """One row per rank.

    Columns: rank, host, gpu_us (kernels), compute_us (kernels that are no communication),
    communication_us, exposed_us (communication with nothing else on its device), waiting_us (of the
    communication, for late ranks), late (collectives that others waited in for this rank), wall_us,
    owned (share of the GPU time), state.
    """
    rows = []
    for rank in ranks:
        calls = rank.rows("collectives")
        on_gpu = sum(row["time_us"] for row in calls if row["gpu"] is not None)
        wall = rank.content["wall_s"]
        row: dict[str, Any] = {"rank": rank.number, "host": rank.content["run"].get("host")}
        row |= {"gpu_us": rank.gpu_us, "compute_us": rank.gpu_us - on_gpu}
        row |= {"communication_us": float(sum(row["time_us"] for row in calls))}
        row |= {"exposed_us": float(sum(row["exposed_us"] for row in calls))}
        row |= {"waiting_us": waits.by_rank.get(rank.number, 0.0), "late": waits.late[rank.number]}
        row |= {"wall_us": None if wall is None else wall * 1e6}
        rows.append(row | {"owned": rank.content["attribution"]["share"], "state": rank.state})
    return pandas.DataFrame(rows)


def collective_table(ranks: Sequence[Rank], waits: Waiting) -> pandas.DataFrame:
    """One row for each kind of collective of a group, longest time first.

    Columns: collective, group, size, dtype, calls (of each rank, the mean), bytes (of a rank's
    calls, the mean), time_us (of all ranks), own_us (of all ranks, without waiting), waiting_us,
    exposed_us, overlapped_us, bus_gbs (of the collectives' own time), reason (why waiting is
    unknown).
    """
    sums: dict[tuple[Any, ...], Counter[str]] = defaultdict(Counter)
    for rank in ranks:
        for row in rank.rows("collectives"):
            one = sums[_key(row)[:4]]
            one["calls"] += 1
            one["bytes"] += row["bytes"] or 0
            one["time"] += row["time_us"]
            one["exposed"] += row["exposed_us"]
    rows = []
    for kind, one in sums.items():
        known = waits.matched[kind] > 0
        share = len(ranks) if kind[2] is None else kind[2]
        row = dict(zip(("collective", "group", "size", "dtype"), kind, strict=True))
        calls = one["calls"] / share
        row |= {"calls": int(calls) if calls.is_integer() else calls}
        row |= {"bytes": one["bytes"] / share or None}
        row |= {"time_us": float(one["time"])}
        row |= {"own_us": waits.total[kind] - waits.waited[kind] if known else None}
        row |= {"waiting_us": waits.waited[kind] if known else None}
        row |= {"exposed_us": float(one["exposed"])}
        row |= {"overlapped_us": float(one["time"] - one["exposed"])}
        size = kind[2] or (len(ranks) if len(ranks) > 1 else None)
        row |= {"bus_gbs": bus_gbs(kind[0], size, waits.moved[kind], waits.own[kind] * 1e3)}
        rows.append(row | {"reason": _reason(waits, kind)})
    table = pandas.DataFrame(rows)
    return table.sort_values("time_us", ascending=False, ignore_index=True) if rows else table


def _reason(waits: Waiting, kind: Kind) -> str | None:
    if not waits.unmatched[kind]:
        return None
    if kind[0] == POINT_TO_POINT:
        return "point to point: the partner's wait is part of it"
    what = f"{waits.unmatched[kind]} calls" if waits.matched[kind] else "the calls"
    return f"{what} of the ranks could not be matched: some ranks recorded more of them"


def step_table(ranks: Sequence[Rank]) -> pandas.DataFrame:
    """One row for each step that every rank recorded: step, mean_us, fastest_us, slowest_us,
    slowest (its rank)."""
    walls: dict[str, dict[int, float]] = defaultdict(dict)
    for rank in ranks:
        for recorded in rank.rows("steps"):
            walls[recorded["step"]][rank.number] = recorded["wall_us"]
    rows = []
    for step, times in walls.items():
        if len(times) == len(ranks):
            slowest = max(times, key=lambda rank: times[rank])
            row: dict[str, Any] = {"step": step, "mean_us": fmean(times.values())}
            row |= {"fastest_us": min(times.values()), "slowest_us": times[slowest]}
            rows.append(row | {"slowest": slowest})
    columns = ["step", "mean_us", "fastest_us", "slowest_us", "slowest"]
    return pandas.DataFrame(rows, columns=columns)


def straggler(waits: Waiting) -> tuple[int, int, float] | None:
    """The rank that the others waited for most: its number, in how many collectives, and the time
    of all that waited, in microseconds. None if nobody waited."""
    if not waits.waited_for:
        return None
    rank = max(waits.waited_for, key=lambda number: waits.waited_for[number])
    return rank, waits.late[rank], waits.waited_for[rank]
