"""Measures of a recording: time by state, overlap of tensor work and softmax, cost of tiles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.timeline import layout
from attnscope.timeline.layout import COMPUTE
from attnscope.timeline.recording import Recording, Track

Cycles = NDArray[np.int64]


def analyse(recording: Recording) -> dict[str, Any]:
    """All measures of the recorded blocks, as JSON values; cycles are those of the SM clock.

    "roles": of each role and state its count, share of the role's time, median and 90th percentile.
    "overlap": see `overlap`, as shares of the blocks' time. "cycles": see `Layout.costs`.
    "floors": the least that a step of all consumers takes by the units' throughput. "tail": how
    unevenly blocks end.
    """
    states: dict[tuple[str, int], list[Cycles]] = defaultdict(list)
    spent: dict[str, int] = defaultdict(int)
    together: dict[str, int] = defaultdict(int)
    parts: dict[str, list[Cycles]] = defaultdict(list)
    kernel = recording.layout
    first = kernel.products[0]
    ends = []
    steps = 0
    for at in range(len(recording.blocks)):
        tracks = recording.tracks(at)
        for track in tracks:
            spent[track.role] += int(track.cycles.sum())
            for code in np.unique(track.codes):
                states[track.role, int(code)].append(track.cycles[track.codes == code])
        consumers = tracks[kernel.consumer :]
        for name, cycles in overlap(consumers).items():
            together[name] += cycles
        for track in consumers:
            for name, values in kernel.costs(track).items():
                parts[name].append(values)
            steps += int(track.begins(first).sum())
        ends.append(max((int(track.end[-1]) for track in consumers if len(track.end)), default=0))
    total = together.pop("total")
    if not total:
        raise ValueError(
            "recording must have work of a consumer, got none. Record a call with queries and keys"
        )
    floors = kernel.step_floors(recording.facts["tile"])
    tensor_share = steps * floors["tensor_cores"] / recording.facts["tile"]["consumers"] / total
    return {
        "blocks": len(recording.blocks),
        "tiles": int(recording.tile_counts[:, layout.SCHEDULER].sum()),
        "lost_tiles": recording.lost_tiles,
        "clock_mhz": recording.clock_mhz,
        "roles": [
            {
                "role": role,
                "state": kernel.states[role][code].label,
                "kind": kernel.states[role][code].kind,
                "share": sum(int(c.sum()) for c in found) / spent[role],
                **_spread(found),
            }
            for (role, code), found in sorted(
                states.items(), key=lambda item: (kernel.roles.index(item[0][0]), item[0][1])
            )
        ],
        "overlap": {name: cycles / total for name, cycles in together.items()},
        "cycles": {name: _spread(found) for name, found in parts.items()},
        "floors": floors | {"tensor_share": tensor_share},
        "tail": tail(recording, np.array(ends, np.int64)),
    }


def overlap(consumers: Sequence[Track]) -> dict[str, int]:
    """Cycles of a block, from its begin to the end of its last consumer.

    A product is in flight from its issue until its consumer has waited for it: the tensor cores may
    be done sooner. Names: total; tensor (some consumer has a product in flight), tensor_all (every
    one); softmax, softmax_two (two or more at once); softmax_own (some softmax runs while its own
    consumer has a product in flight), softmax_other (while another has), softmax_alone (softmax
    and no product in flight); neither.
    """
    edges = np.unique(np.concatenate([[0], *(e for t in consumers for e in (t.begin, t.end))]))
    width = np.diff(edges)
    tensor = np.zeros((len(consumers), width.size), bool)
    softmax = tensor.copy()
    for row, track in enumerate(consumers):
        at = np.searchsorted(track.begin, edges[:-1], side="right") - 1
        live = (at >= 0) & (edges[:-1] < np.append(track.end, 0)[at])
        tensor[row, live] = track.flying()[at[live]]
        softmax[row, live] = track.kind(COMPUTE)[at[live]]
    flying, soft = tensor.sum(0), softmax.sum(0)
    own = (softmax & tensor).any(0)
    other = (softmax & (flying - tensor > 0)).any(0)
    spans = {
        "tensor": flying > 0,
        "tensor_all": flying == len(consumers),
        "softmax": soft > 0,
        "softmax_two": soft > 1,
        "softmax_own": own,
        "softmax_other": other,
        "softmax_alone": (soft > 0) & (flying == 0),
        "neither": (soft == 0) & (flying == 0),
    }
    return {"total": int(width.sum())} | {n: int(width[on].sum()) for n, on in spans.items()}


def tail(recording: Recording, ends: Cycles) -> dict[str, float | None]:
    """How evenly the blocks end, in ns by the device timer; `ends` are cycles of each block.

    first_end_ns, last_end_ns: since the first block began. idle_share: of the time until the last
    end, over all blocks, what is not between a block's begin and its end. begin_spread_ns: between
    the first and the last begin. timer_step_ns: resolution of the device timer, so of times between
    blocks. None where the timer did not move.
    """
    mhz = recording.clock_mhz
    steps = np.unique(recording.begins_ns)
    ends_ns = recording.begins_ns + ends * 1e3 / mhz if mhz else None
    last = None if ends_ns is None else float(ends_ns.max())
    return {
        "first_end_ns": None if ends_ns is None else float(ends_ns.min()),
        "last_end_ns": last,
        "idle_share": None
        if ends_ns is None
        else 1 - float((ends_ns - recording.begins_ns).mean() / ends_ns.max()),
        "begin_spread_ns": float(steps[-1]),
        "timer_step_ns": float(np.gcd.reduce(steps)) if len(steps) > 1 else None,
    }


def _spread(found: Sequence[Cycles]) -> dict[str, float | int | None]:
    values = np.concatenate(found)
    if not values.size:
        return {"count": 0, "median": None, "p10": None, "p90": None}
    low, median, high = (float(x) for x in np.percentile(values, (10, 50, 90)))
    return {"count": int(values.size), "median": median, "p10": low, "p90": high}
