"""Tables of a recording: kernels, stages, categories, gaps, copies, allocations, streams, GPUs.

Work outside the chosen range does not count. Parts are checked against their wholes: a table that
cannot be true raises ProfileError.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property, wraps
from typing import Any

import numpy as np

from attnscope.nsight.ncu_reader import demangle
from attnscope.nsight.nesting import NONE, busy_by, factorize, group_by, sums
from attnscope.nsight.projection import Projection, Stage, parse_range
from attnscope.nsight.recording import (
    COPY,
    COPY_KINDS,
    KERNEL,
    MEMORY_KINDS,
    Array,
    Recording,
    RecordingError,
)
from attnscope.profile.analysis.kernel_names import CATEGORIES, category, short_name
from attnscope.profile.errors import ProfileError

Row = dict[str, Any]
OUTSIDE = "(outside)"  # in no range
ALL = "(all)"


def once(make: Callable[[Any], list[Row]]) -> Callable[[Any], list[Row]]:
    """Make the rows of a table once for each analysis: reports are large."""

    @wraps(make)
    def rows(of: Any) -> list[Row]:
        if make.__name__ not in of.tables:
            of.tables[make.__name__] = make(of)
        return of.tables[make.__name__]

    return rows


class Analysis:
    """What a recording shows, in the ranges that `within` names (None: everywhere).

    Raises ValueError for a range that is not there, RecordingError for a report without GPU work.
    """

    def __init__(self, recording: Recording, within: str | None = None) -> None:
        if not len(recording.work["start"]):
            said = "; ".join(recording.messages[:3])
            raise RecordingError(
                f"{recording.path} has no kernel and no copy{': ' + said if said else ''}. "
                "Trace cuda, and end the program after its GPU work"
            )
        self.recording, self.within = recording, within
        self.tables: dict[str, list[Row]] = {}
        self.projection = Projection(recording)
        # The chosen range around each piece of work; 0 for all work where none was chosen.
        everything = np.zeros(len(recording.work["start"]), np.int64)
        self.around = everything if within is None else self.projection.inside(within)
        self.mask = self.around != NONE
        if not self.mask.any():
            raise RecordingError(f"{recording.path}: no GPU work was launched in {within!r}")
        self.work = {name: values[self.mask] for name, values in recording.work.items()}
        self.duration = self.work["end"] - self.work["start"]
        self.is_kernel = self.work["kind"] == KERNEL
        self.inner = self.projection.inner[self.mask]

    # Sums

    @property
    def kernel_ns(self) -> int:
        """Sum of the durations of kernels."""
        return int(self.duration[self.is_kernel].sum())

    @cached_property
    def devices(self) -> list[int]:
        return np.unique(self.work["device"]).tolist()

    @cached_property
    def spans(self) -> dict[int, tuple[int, int]]:
        """By device: time with GPU work, and time from the first to the last, range by range where
        one was chosen."""
        found = {}
        for device in self.devices:
            here = self.work["device"] == device
            start, end = self.work["start"][here], self.work["end"][here]
            window = int(end.max() - start.min())
            if self.within is not None:
                inside = [one for one in self.stages if one.device == device]
                window = sum(one.span for one in inside if self.is_within(one.names[-1:]))
            found[device] = (union(start, end), max(window, 1))
        return found

    def is_within(self, names: Sequence[tuple[str, str]]) -> bool:
        """Whether one of some ranges, each (name, domain), is the chosen one."""
        if self.within is None:
            return True
        name, domain = parse_range(self.within)
        return any(one == name and domain in (None, where) for one, where in names)

    @cached_property
    def stages(self) -> list[Stage]:
        return self.projection.stages(None if self.within is None else self.mask)

    @cached_property
    def names(self) -> dict[int, str]:
        """The symbol of each kernel name."""
        keys = np.unique(self.work["name"][self.is_kernel]).tolist()
        return {key: demangle(self.recording.name(key)) for key in keys}

    @cached_property
    def categories(self) -> Array:
        """For each piece of work its place in CATEGORIES; NONE for copies and fills."""
        keys, group = factorize(self.work["name"])
        place = [
            CATEGORIES.index(category(self.names[key])) if key in self.names else NONE
            for key in keys.tolist()
        ]
        return np.where(self.is_kernel, np.array(place, np.int64)[group], NONE)

    @cached_property
    def paths(self) -> Array:
        """The path of ranges of each piece of work, NONE outside."""
        return self.path_at(self.inner)

    def path_at(self, inner: Array) -> Array:
        if not len(self.projection.path):
            return inner
        return np.where(inner != NONE, self.projection.path[inner], NONE)

    # Tables

    @once
    def kernel_rows(self) -> list[Row]:
        """One row for each kernel symbol, the longest first."""
        keys, group = factorize(self.work["name"][self.is_kernel])
        durations = self.duration[self.is_kernel]
        total = sums(group, durations, len(keys))
        count = np.bincount(group, minlength=len(keys))
        low = np.full(len(keys), np.iinfo(np.int64).max)
        high = np.zeros(len(keys), np.int64)
        np.minimum.at(low, group, durations)
        np.maximum.at(high, group, durations)
        where = self._main_paths(group, durations, len(keys))
        rows = [
            {
                "kernel": short_name(self.names[key]),
                "category": category(self.names[key]),
                "count": int(count[at]),
                "total ms": int(total[at]) / 1e6,
                "mean us": int(total[at]) / int(count[at]) / 1e3,
                "min us": int(low[at]) / 1e3,
                "max us": int(high[at]) / 1e3,
                "share %": 100 * int(total[at]) / self.kernel_ns if self.kernel_ns else None,
                "range": where[at],
                "symbol": self.names[key],
            }
            for at, key in enumerate(keys.tolist())
        ]
        _same("the sum of the kernel table", int(total.sum()), self.kernel_ns)
        return sorted(rows, key=lambda row: -row["total ms"])

    def _main_paths(self, group: Array, weight: Array, size: int) -> list[str]:
        """For each group of kernels the path of ranges with most of its time."""
        path = self.paths[self.is_kernel]
        first, pair = group_by(group, path)
        time = sums(pair, weight, len(first))
        best: dict[int, tuple[int, int]] = {}
        for one, where, ns in zip(
            group[first].tolist(), path[first].tolist(), time.tolist(), strict=True
        ):
            best[one] = max(best.get(one, (-1, NONE)), (ns, where))
        return [self.path_text(best[at][1]) for at in range(size)]

    def path_text(self, path: int) -> str:
        if path == NONE:
            return OUTSIDE
        return " / ".join(name for name, _ in self.projection.names_of(path))

    @once
    def stage_rows(self) -> list[Row]:
        """One row for each path of ranges with GPU work, and one for what is in none."""
        own = Counter[int]()
        rows = []
        for stage in self.stages:
            if not stage.process_wide:
                own[stage.device] += stage.own
            rows.append(
                {
                    "range": " / ".join(stage.path) + (" (start/end)" * stage.process_wide),
                    "GPU": stage.device if len(self.devices) > 1 else None,
                    "ranges": stage.count,
                    "wall ms": stage.wall / 1e6,
                    "kernel ms": stage.total / 1e6,
                    "own ms": None if stage.process_wide else stage.own / 1e6,
                    "busy ms": stage.busy / 1e6,
                    "span ms": stage.span / 1e6,
                    "idle ms": stage.idle / 1e6,
                    "copy ms": stage.copies / 1e6,
                    "kernels": stage.kernels,
                }
            )
            if stage.busy > stage.total + stage.copies or stage.own > stage.total:
                raise ProfileError(f"{' / '.join(stage.path)}: busy or own time above its whole")
        for device in self.devices:
            outside = (self.inner == NONE) & self.is_kernel & (self.work["device"] == device)
            here = self.is_kernel & (self.work["device"] == device)
            ns = int(self.duration[outside].sum())
            whole = int(self.duration[here].sum())
            _same(f"own times of GPU {device}", own[device] + ns, whole)
            if outside.any():
                gpu = device if len(self.devices) > 1 else None
                rows.append(
                    {"range": OUTSIDE, "GPU": gpu, "kernel ms": ns / 1e6, "own ms": ns / 1e6}
                    | {"kernels": int(outside.sum())}
                )
        return rows

    @once
    def category_rows(self) -> list[Row]:
        """Kernel time by category: everywhere, and in each outermost range and those inside it."""
        groups: dict[str, Array] = {ALL: self.is_kernel}
        position = np.cumsum(self.mask) - 1
        for work, ranges in self.projection.levels[:2]:
            keep = self.mask[work]
            path = self.projection.path[ranges[keep]]
            for one in np.unique(path).tolist():
                chosen = np.zeros(len(self.duration), bool)
                chosen[position[work[keep][path == one]]] = True
                groups[self.path_text(one)] = chosen & self.is_kernel
        rows = []
        for name, chosen in groups.items():
            total = int(self.duration[chosen].sum())
            if total:
                times = sums(self.categories[chosen], self.duration[chosen], len(CATEGORIES))
                shares = {
                    c: 100 * ns / total for c, ns in zip(CATEGORIES, times.tolist(), strict=True)
                }
                rows.append(
                    {"range": name, "kernel ms": total / 1e6}
                    | {f"{c} %": share for c, share in shares.items()}
                )
        return sorted(rows, key=lambda row: (row["range"] != ALL, -row["kernel ms"]))

    @once
    def copy_rows(self) -> list[Row]:
        """Copies and fills by kind, host memory and path of ranges."""
        chosen = np.flatnonzero(~self.is_kernel)
        work = {name: values[chosen] for name, values in self.work.items()}
        columns = [work[name] for name in ("kind", "copy_kind", "src_kind", "dst_kind")]
        first, group = group_by(*columns, self.paths[chosen])
        size = sums(group, work["bytes"], len(first))
        time = sums(group, self.duration[chosen], len(first))
        count = np.bincount(group, minlength=len(first))
        rows = []
        for at, (one, n, bytes_, ns) in enumerate(
            zip(chosen[first].tolist(), count.tolist(), size.tolist(), time.tolist(), strict=True)
        ):
            kind, memory = self._copy_kind(one)
            rows.append(
                {"kind": kind, "host memory": memory or None}
                | {"range": self.path_text(int(self.paths[chosen[first[at]]]))}
                | {"count": n, "MiB": bytes_ / 2**20, "total ms": ns / 1e6}
                | {"GB/s": bytes_ / ns if ns else None}
            )
        return sorted(rows, key=lambda row: -row["total ms"])

    def _copy_kind(self, at: int) -> tuple[str, str]:
        if self.work["kind"][at] != COPY:
            return "fill", ""
        number = int(self.work["copy_kind"][at])
        side = {1: "src_kind", 2: "dst_kind"}.get(number)
        memory = ""
        if side and 0 <= self.work[side][at] < len(MEMORY_KINDS):
            memory = MEMORY_KINDS[int(self.work[side][at])]
        return COPY_KINDS.get(number, f"kind {number}"), memory


def union(start: Array, end: Array) -> int:
    return int(busy_by(np.zeros(len(start), np.int64), start, end, 1)[0])


def _same(what: str, value: int, whole: int) -> None:
    if value != whole:
        raise ProfileError(f"{what} must be {whole} ns, got {value} ns")
