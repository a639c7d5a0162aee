"""How ranges lie inside each other, and sums of intervals by group."""

from __future__ import annotations

import numpy as np

from attnscope.nsight.recording import PROCESS, Array

NONE = -1


class Timeline:
    """The innermost push/pop range open on a thread at a time."""

    def __init__(self, ranges: dict[str, Array], nested: Array) -> None:
        tid, start, end = (ranges[key][nested] for key in ("tid", "start", "end"))
        self._tids, thread = factorize(tid)
        self._base = int(start.min(initial=0))
        self._width = int(end.max(initial=0)) - self._base + 2
        end = np.maximum(end, start)
        count = len(nested)
        times = np.concatenate([start, end]) - self._base
        threads = np.concatenate([thread, thread])
        is_start = np.repeat([1, 0], count)
        # At one time: ends first, the inner before the outer; then starts, the outer first. A range
        # of no length starts first.
        other = np.concatenate([end - self._base, start - self._base])
        empty = np.concatenate([end == start, end == start])
        rank = np.where(empty, 2 + (1 - is_start), is_start)
        number = np.arange(count)
        order = np.lexsort((np.concatenate([number, -number]), -other, rank, times, threads))
        opening = order < count
        which = order % count if count else order
        level = np.cumsum(np.where(opening, 1, -1))
        self.parent = np.full(count, NONE, np.int64)
        depth = level[opening] - 1
        opened, at = which[opening], np.flatnonzero(opening)
        for one in range(1, int(depth.max(initial=0)) + 1):
            mine, above = depth == one, depth == one - 1
            place = np.searchsorted(at[above], at[mine]) - 1
            self.parent[opened[mine]] = opened[above][place]
        state = np.where(opening, which, self.parent[which] if count else which)
        self._keys = threads[order] * self._width + times[order]
        self._threads, self._state, self._nested = threads[order], state, nested
        self.parent = (
            np.where(self.parent >= 0, nested[self.parent], NONE) if count else self.parent
        )

    def innermost(self, tid: Array, time: Array) -> Array:
        """The innermost range, as a number of a range of the recording, or NONE."""
        found = np.full(len(tid), NONE, np.int64)
        if not len(self._tids):
            return found
        thread = np.minimum(np.searchsorted(self._tids, tid), len(self._tids) - 1)
        inside = (time >= self._base) & (time < self._base + self._width)
        known = (self._tids[thread] == tid) & inside
        key = thread[known] * self._width + time[known] - self._base
        at = np.searchsorted(self._keys, key, "right") - 1
        same = (at >= 0) & (self._threads[at] == thread[known])
        state = np.where(same, self._state[at], NONE)
        found[known] = np.where(state >= 0, self._nested[state], NONE)
        return found


def main_thread(tid: Array) -> Array:
    """The thread with the number of its process, as on Linux."""
    return tid // PROCESS * PROCESS + tid // PROCESS % PROCESS


def depths(parent: Array) -> Array:
    depth = np.zeros(len(parent), np.int64)
    above = parent.copy()
    while (up := above != NONE).any():
        depth[up] += 1
        above[up] = parent[above[up]]
    return depth


def sums(group: Array, values: Array, size: int) -> Array:
    """Sums of nanoseconds by group; exact up to 104 days."""
    return np.bincount(group, weights=values, minlength=size).astype(np.int64)


def busy_by(group: Array, start: Array, end: Array, size: int) -> Array:
    """Length of the union of intervals, by group; intervals come in the order of their starts."""
    if not len(start):
        return np.zeros(size, np.int64)
    order = np.argsort(group, kind="stable")
    base = int(start.min())
    width = int(end.max()) - base + 1
    offset = group[order] * width
    low, high = start[order] - base + offset, end[order] - base + offset
    reached = np.maximum.accumulate(high)
    before = np.concatenate([[NONE], reached[:-1]])
    new = np.maximum(high - np.maximum(low, before), 0)
    return sums(group[order], new, size)


def factorize(column: Array) -> tuple[Array, Array]:
    """The distinct integers of a column in order, and the place of each row among them.

    Where the integers are dense, this takes no sort.
    """
    if not len(column):
        return column, column
    low, high = int(column.min()), int(column.max())
    if high - low > 4 * len(column):
        values, inverse = np.unique(column, return_inverse=True)
        return values, inverse
    there = np.zeros(high - low + 1, np.int64)
    there[column - low] = 1
    return np.flatnonzero(there) + low, (np.cumsum(there) - 1)[column - low]


def group_by(*columns: Array) -> tuple[Array, Array]:
    """Group rows by the values of integer columns: the first row of each group, and the group of
    each row."""
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        values, inverse = factorize(column)
        key = key * max(len(values), 1) + inverse
    values, group = factorize(key)
    first = np.empty(len(values), np.int64)
    first[group[::-1]] = np.arange(len(key))[::-1]
    return first, group
