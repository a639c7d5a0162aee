"""Joins the captures of one run, which nsys writes as one report each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attnscope.nsight.recording import Columns, Recording


def merge(recordings: Sequence[Recording]) -> Recording:
    """Recordings of one run, one after the other on the time axis; the first if there is one."""
    first, *others = recordings
    for other in others:
        first = _append(first, other)
    return first


def _append(one: Recording, two: Recording) -> Recording:
    ends = [one.work["end"], one.calls["end"], one.ranges["end"]]
    shift = max(values.max(initial=0) for values in ends)
    strings, texts = dict(one.strings), list(one.texts)
    key_of = {text: key for key, text in strings.items()}
    moved = {}
    for number, text in two.strings.items():
        if text not in key_of:
            key_of[text] = max(strings, default=0) + 1
            strings[key_of[text]] = text
        moved[number] = key_of[text]
    place_of = {text: place for place, text in enumerate(texts)}
    for text in two.texts:
        if text not in place_of:
            place_of[text] = len(texts)
            texts.append(text)
    places = np.array([place_of[text] for text in two.texts], np.int64)

    def shifted(mine: Columns, theirs: Columns) -> Columns:
        later = dict(theirs)
        for key in ("start", "end"):
            if key in theirs:
                later[key] = theirs[key] + shift
        return {key: np.concatenate([mine[key], later[key]]) for key in mine}

    def renamed(columns: Columns, keys: Sequence[str]) -> Columns:
        changed = dict(columns)
        for key in keys:
            values, inverse = np.unique(columns[key], return_inverse=True)
            new = np.array([moved.get(int(value), value) for value in values], np.int64)
            changed[key] = new[inverse] if len(values) else columns[key]
        return changed

    ranges = dict(two.ranges)
    for key in ("name", "domain"):
        ranges[key] = places[two.ranges[key]]
    return Recording(
        path=one.path,
        strings=strings,
        work=shifted(one.work, renamed(two.work, ("name",))),
        calls=shifted(one.calls, renamed(two.calls, ("name",))),
        ranges=shifted(one.ranges, ranges),
        memory=shifted(one.memory, two.memory),
        texts=texts,
        registered=np.concatenate([one.registered, two.registered]),
        gpus=one.gpus | two.gpus,
        messages=list(dict.fromkeys([*one.messages, *two.messages])),
        breaks=(*one.breaks, int(shift)),
    )
