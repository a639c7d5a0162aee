"""NVTX ranges projected on the GPU: which work was launched inside each range.

A kernel is joined to its launch by correlation id and process, and the launch to the innermost
push/pop range open on its thread. Where that thread has no range, such as autograd's, the range
that is open on the main thread of the process has the work: backward() waits there meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from attnscope.nsight.nesting import (
    NONE,
    Timeline,
    busy_by,
    depths,
    factorize,
    group_by,
    main_thread,
    sums,
)
from attnscope.nsight.recording import (
    KERNEL,
    PROCESS,
    PUSH_POP,
    START_END,
    Array,
    Recording,
)

_AUTOGRAD = re.compile(r", (seq|op_id|sizes|input_op_ids) = ")
_LAST_AT = re.compile(r"(?<!\\)@(?!.*(?<!\\)@)")


@dataclass(frozen=True)
class Stage:
    """The GPU work of one path of ranges on one device; nanoseconds.

    Attributes:
        names: (name, domain) of each range from the outermost to this one.
        count: how many such ranges there are.
        wall: their duration on the CPU.
        total, own: kernels launched inside, and those in no narrower range.
        busy: time with at least one kernel, copy or fill of these ranges.
        span: from the first to the last of them, range by range.
        copies: duration of copies and fills.
        kernels: how many ran.
        process_wide: a start/end range: it has the work of every thread of its process.
    """

    names: tuple[tuple[str, str], ...]
    device: int
    count: int
    wall: int
    total: int
    own: int
    busy: int
    span: int
    copies: int
    kernels: int
    process_wide: bool = False

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.names)

    @property
    def idle(self) -> int:
        return max(self.span - self.busy, 0)


def parse_range(text: str) -> tuple[str, str | None]:
    """A range as nsys takes it, as (name, domain): the domain is "" without @, None for `@*`.

    Raises ValueError for an empty name or domain.
    """
    name, *rest = _LAST_AT.split(text, maxsplit=1)
    domain = rest[0] if rest else None
    if not name or domain == "":
        raise ValueError(f"range must be name, name@domain or name@*, got {text!r}")
    plain = name.replace(r"\@", "@")
    return plain, "" if domain is None else None if domain == "*" else domain


def matches(recording: Recording, text: str, plain: Array | None = None) -> Array:
    """Mask of the ranges that `text` names (see `parse_range`). `plain`: for each text, the number
    of the name that counts; left out, names count unchanged, as for nsys."""
    name, domain = parse_range(text)
    texts, ranges = recording.texts, recording.ranges
    if name not in texts or (domain is not None and domain not in texts):
        return np.zeros(len(ranges["name"]), bool)
    names = ranges["name"] if plain is None else plain[ranges["name"]]
    chosen = names == texts.index(name)
    return chosen if domain is None else chosen & (ranges["domain"] == texts.index(domain))


class Projection:
    """Launches, ranges and paths of a recording.

    Attributes:
        call: the launching call of each piece of work, NONE where it is not in the report.
        inner: the innermost push/pop range of each piece of work, NONE outside of all.
        parent: the range around each range.
        path: a number for each range; ranges with equal names around them share it.
        adopted: mask of the work that another thread launched for the main thread.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        work, calls = recording.work, recording.calls
        self.call = _launches(work, calls)
        ranges = recording.ranges
        self._nested = np.flatnonzero(ranges["kind"] == PUSH_POP)
        self._timeline = Timeline(ranges, self._nested)
        tid = np.where(self.call >= 0, calls["tid"][self.call], NONE) if len(calls["tid"]) else None
        launched = calls["start"][self.call] if tid is not None else self.call
        self.launched = np.where(self.call >= 0, launched, NONE)
        self._plain = _without_numbers(recording.texts)
        self.parent = np.full(len(ranges["start"]), NONE, np.int64)
        self.parent[self._nested] = self._timeline.parent
        self._adopt_ranges()
        self.inner, self.adopted = self._innermost(tid)
        self.depth = depths(self.parent)
        self.path, self._paths = self._number_paths()

    def _innermost(self, tid: Array | None) -> tuple[Array, Array]:
        if tid is None:
            return np.full(len(self.call), NONE, np.int64), np.zeros(len(self.call), bool)
        inner = self.innermost(tid, self.launched)
        own = self._timeline.innermost(tid, self.launched)
        lone = self.call == NONE
        inner[lone] = own[lone] = NONE
        return inner, inner != own

    def innermost(self, tid: Array, time: Array) -> Array:
        """The innermost push/pop range at a time on a thread, or else on the main thread."""
        inner = self._timeline.innermost(tid, time)
        alone = inner == NONE
        inner[alone] = self._timeline.innermost(main_thread(tid[alone]), time[alone])
        return inner

    def _adopt_ranges(self) -> None:
        """Put outermost ranges of other threads into the range of the main thread around them."""
        ranges = self.recording.ranges
        roots = self._nested[self.parent[self._nested] == NONE]
        roots = roots[ranges["tid"][roots] != main_thread(ranges["tid"][roots])]
        around = self._timeline.innermost(main_thread(ranges["tid"][roots]), ranges["start"][roots])
        while True:  # a range that ends earlier than the one inside is not around it
            early = (around != NONE) & (ranges["end"][around] < ranges["end"][roots])
            if not early.any():
                break
            around[early] = self.parent[around[early]]
        self.parent[roots] = around

    def _number_paths(self) -> tuple[Array, list[tuple[int, int, int]]]:
        """A number for each range, and (number of the parent's path, name, domain) by number."""
        ranges, texts = self.recording.ranges, self.recording.texts
        labels, label = factorize(self._plain[ranges["name"]] * len(texts) + ranges["domain"])
        width = max(len(labels), 1)
        path = np.full(len(label), NONE, np.int64)
        paths: list[tuple[int, int, int]] = []
        nested = ranges["kind"] == PUSH_POP
        for depth in range(int(self.depth.max(initial=-1)) + 1):
            here = np.flatnonzero(nested & (self.depth == depth))
            above = path[self.parent[here]] if depth else np.full(len(here), NONE, np.int64)
            keys, inverse = factorize((above + 1) * width + label[here])
            path[here] = inverse + len(paths)
            for key in keys.tolist():
                over, own = divmod(key, width)
                paths.append((over - 1, *divmod(int(labels[own]), len(texts))))
        return path, paths

    def names_of(self, path: int) -> tuple[tuple[str, str], ...]:
        """(name, domain) of the ranges of a path, the outermost first."""
        found: list[tuple[str, str]] = []
        while path != NONE:
            path, name, domain = self._paths[path]
            found.append((self.recording.texts[name], self.recording.texts[domain]))
        return tuple(reversed(found))

    @cached_property
    def levels(self) -> list[tuple[Array, Array]]:
        """For each depth, the work that has ranges that deep, and its range at this depth."""
        found = []
        current = self.inner.copy()
        for depth in range(int(self.depth.max(initial=-1)), -1, -1):
            here = np.flatnonzero((current != NONE) & (self._depth_of(current) == depth))
            found.append((here, current[here]))
            current[here] = self.parent[current[here]]
        return found[::-1]

    def _depth_of(self, ranges: Array) -> Array:
        return self.depth[ranges] if len(self.depth) else ranges

    def inside(self, text: str) -> Array:
        """The outermost of the ranges that `text` names (see `parse_range`) around each piece of
        work, NONE outside of them.

        Raises ValueError where no range has this name, with the ranges there are.
        """
        chosen = matches(self.recording, text, self._plain)
        if not chosen.any():
            raise ValueError(no_such_range(text, self.recording.range_names()))
        found = np.full(len(self.inner), NONE, np.int64)
        for work, ranges in self.levels:
            new = chosen[ranges] & (found[work] == NONE)
            found[work[new]] = ranges[new]
        for one, at in self._wide(np.flatnonzero(chosen)):
            found[at[found[at] == NONE]] = one
        return found

    def stages(self, mask: Array | None = None) -> list[Stage]:
        """Every path of ranges with GPU work, by GPU time; work outside `mask` does not count."""
        found = [*self._nested_stages(mask), *self._wide_stages(mask)]
        return sorted(found, key=lambda one: (-one.total, one.path))

    def _nested_stages(self, mask: Array | None) -> Iterator[Stage]:
        work, ranges = self.recording.work, self.recording.ranges
        devices = int(work["device"].max(initial=0)) + 1
        kernel = work["kind"] == KERNEL
        duration = work["end"] - work["start"]
        counts = np.bincount(self.path[self._nested], minlength=len(self._paths))
        wall = sums(
            self.path[self._nested], (ranges["end"] - ranges["start"])[self._nested], len(counts)
        )
        for at, around in self.levels:
            if mask is not None:
                keep = mask[at]
                at, around = at[keep], around[keep]
            if not len(at):
                continue
            key = self.path[around] * devices + work["device"][at]
            keys, group = factorize(key)
            size = len(keys)
            ours = kernel[at]
            total = sums(group, duration[at] * ours, size)
            own = sums(group, duration[at] * (ours & (self.inner[at] == around)), size)
            copies = sums(group, duration[at] * ~ours, size)
            kernels = np.bincount(group, weights=ours, minlength=size)
            busy = busy_by(group, work["start"][at], work["end"][at], size)
            span = self._spans(at, around, group, size, devices)
            for number, one in enumerate(keys.tolist()):
                path, device = divmod(one, devices)
                yield Stage(
                    self.names_of(path),
                    device,
                    int(counts[path]),
                    int(wall[path]),
                    int(total[number]),
                    int(own[number]),
                    int(busy[number]),
                    int(span[number]),
                    int(copies[number]),
                    int(kernels[number]),
                )

    def _spans(self, at: Array, around: Array, group: Array, size: int, devices: int) -> Array:
        """Sum over the ranges of each group: from first to last work of the range."""
        work = self.recording.work
        key = around * devices + work["device"][at]
        first, inverse = group_by(key)
        low = work["start"][at][first]  # work is sorted by start
        high = np.zeros(len(first), np.int64)
        np.maximum.at(high, inverse, work["end"][at])
        return sums(group[first], high - low, size)

    def _wide(self, chosen: Array) -> Iterator[tuple[int, Array]]:
        """Start/end ranges of `chosen`, each with the work that its process launched in it."""
        ranges = self.recording.ranges
        chosen = chosen[ranges["kind"][chosen] == START_END]
        if not len(chosen):
            return
        pid = self.recording.work["pid"]
        for process in np.unique(ranges["tid"][chosen] // PROCESS):
            ours = np.flatnonzero((pid // PROCESS == process) & (self.call >= 0))
            ours = ours[np.argsort(self.launched[ours], kind="stable")]
            times = self.launched[ours]
            for one in chosen[ranges["tid"][chosen] // PROCESS == process]:
                low = np.searchsorted(times, ranges["start"][one], "left")
                high = np.searchsorted(times, ranges["end"][one], "right")
                yield int(one), ours[low:high]

    def _wide_stages(self, mask: Array | None) -> Iterator[Stage]:
        work, ranges, texts = self.recording.work, self.recording.ranges, self.recording.texts
        by_name: dict[tuple[int, int, int], list[tuple[int, Array]]] = {}
        for one, at in self._wide(np.arange(len(ranges["start"]))):
            at = at if mask is None else at[mask[at]]
            for device in np.unique(work["device"][at]).tolist():
                key = (int(ranges["name"][one]), int(ranges["domain"][one]), device)
                by_name.setdefault(key, []).append((one, at[work["device"][at] == device]))
        for (name, domain, device), members in by_name.items():
            at = np.unique(np.concatenate([one for _, one in members]))
            kernel = work["kind"][at] == KERNEL
            duration = work["end"][at] - work["start"][at]
            own = int((duration * kernel).sum())
            yield Stage(
                ((texts[name], texts[domain]),),
                device,
                len({one for one, _ in members}),
                sum(int(ranges["end"][one] - ranges["start"][one]) for one, _ in members),
                own,
                own,
                int(busy_by(np.zeros(len(at), np.int64), work["start"][at], work["end"][at], 1)[0]),
                sum(int(work["end"][w].max() - work["start"][w].min()) for _, w in members),
                int((duration * ~kernel).sum()),
                int(kernel.sum()),
                process_wide=True,
            )


def no_such_range(text: str, there: dict[str, int]) -> str:
    """The message for a filter that matches no range."""
    name = parse_range(text)[0]
    close = [one for one in there if parse_range(one)[0] == name] if there else []
    listed = ", ".join(f"{one} ({count} x)" for one, count in list(there.items())[:30])
    more = f" and {len(there) - 30} more" if len(there) > 30 else ""
    remedy = f". Write {close[0]}" if close else ""
    return (
        f"range must be one that the program emits: {listed or 'none'}{more}; got {text!r}{remedy}"
    )


def _launches(work: dict[str, Array], calls: dict[str, Array]) -> Array:
    """The call that launched each piece of work: the same process and correlation id, the last one
    that began before the work. Ids may repeat in a process."""
    if not len(calls["start"]):
        return np.full(len(work["start"]), NONE, np.int64)
    process = np.concatenate([work["pid"] // PROCESS, calls["tid"] // PROCESS])
    _, place = factorize(process)
    ours, theirs = place[: len(work["pid"])], place[len(work["pid"]) :]
    call_keys = theirs * (1 << 33) + calls["correlation"]
    order = np.argsort(call_keys, kind="stable")  # calls of one id stay in time order
    sorted_keys = call_keys[order]
    keys = ours * (1 << 33) + work["correlation"]
    at = np.searchsorted(sorted_keys, keys, "right") - 1
    found = (at >= 0) & (sorted_keys[at] == keys)
    start = calls["start"][order]
    while True:
        late = found & (start[at] > work["start"])
        if not late.any():
            break
        at[late] -= 1
        found &= (at >= 0) & (sorted_keys[at] == keys)
    return np.where(found, order[at], NONE)


def _without_numbers(texts: list[str]) -> Array:
    """For each name, the number of the same name without what `emit_nvtx` of PyTorch appends."""
    place = {text: number for number, text in reversed(list(enumerate(texts)))}
    found = np.arange(len(texts))
    for number, text in enumerate(texts):
        if match := _AUTOGRAD.search(text):
            plain = text[: match.start()]
            if plain not in place:
                place[plain] = len(texts)
                texts.append(plain)
            found[number] = place[plain]
    return found
