"""The tables of an ncu session: what limits each kernel, its units, roofline, models, stalls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attnscope.nsight import models, roofline
from attnscope.nsight.diagnosis import UNITS, findings, limit, residency, stalls
from attnscope.nsight.metrics import NAMES
from attnscope.nsight.models import Model
from attnscope.nsight.ncu_reader import Kernel
from attnscope.profile.render.document import Document, Section

MOST_KERNELS = 20  # in the tables, longest first
MOST_STALLS = 4  # of each kernel


def document(
    kernels: Sequence[Kernel],
    title: str,
    lead: Sequence[str],
    range_models: Mapping[str, Model] | None = None,
    asked: Sequence[str] = (),
) -> Document:
    """The sections that the counters support. `asked`: further metrics, shown by ncu's names."""
    range_models = range_models or {}
    longest = sorted(kernels, key=lambda kernel: -(kernel.get("time_ns") or 0.0))[:MOST_KERNELS]
    shown = sorted(longest, key=lambda kernel: kernel.number)
    note = f"{len(kernels) - len(shown)} shorter kernels are left out of the tables."
    sections = [
        _limits(shown, [note] if len(shown) < len(kernels) else []),
        _units(shown),
        _roofline(shown, range_models, title),
        _models(kernels, range_models),
        _occupancy(shown),
        _stalls(shown),
        _memory(shown),
        _findings(shown),
        _asked(shown, asked),
    ]
    return Document(title, list(lead), [one for one in sections if one.rows])


def _named(kernel: Kernel) -> dict[str, Any]:
    return {"#": kernel.number, "kernel": kernel.name}


def _limits(kernels: Sequence[Kernel], notes: Sequence[str]) -> Section:
    rows = []
    for kernel in kernels:
        found = limit(kernel)
        time = kernel.get("time_ns")
        rows.append(
            _named(kernel)
            | {
                "us": None if time is None else time * 1e-3,
                "limit": found.line,
                "try": found.advice,
            }
        )
    text = "The unit or the wait that sets the time, by the counters."
    return Section("What limits each kernel", text, rows, notes=notes)


def _units(kernels: Sequence[Kernel]) -> Section:
    rows = []
    for kernel in kernels:
        clock = kernel.get("clock_hz")
        rows.append(
            _named(kernel)
            | {"MHz": None if clock is None else clock * 1e-6}
            | {f"{name} %": _percent(kernel.get(key)) for key, name in UNITS.items()}
        )
    text = "Utilisation of each unit, in percent of its peak; pipes while the SMs are active."
    return Section("Speed of light", text, [row for row in rows if len(row) > 3])


def _percent(value: float | None) -> float | None:
    """A counter's percentage; replayed passes may put it a little past 100."""
    return None if value is None else min(max(value, 0.0), 100.0)


def _roofline(kernels: Sequence[Kernel], range_models: Mapping[str, Model], title: str) -> Section:
    points = [point for point in map(roofline.point_of, kernels) if point]
    drawn = None
    if points:
        drawn = roofline.draw(points, models.largest_kernels(kernels, range_models), title)
    text = (
        "FLOPs and DRAM bytes from counters; roofs at the clocks that were measured. The ridge is "
        "the intensity from which compute limits."
    )
    notes = []
    if without := len(kernels) - len(points):
        notes.append(
            f"Kernels without a counted FLOP are left out: {without}. --set roofline counts FLOPs "
            "outside tensor cores too."
        )
    return Section("Roofline", text, roofline.table(points), figure=drawn, notes=notes)


def _models(kernels: Sequence[Kernel], range_models: Mapping[str, Model]) -> Section:
    rules = sorted({model.rule for model in range_models.values() if model.rule})
    text = "FLOPs and least bytes by the shape of the calls in a range, and what the counters saw."
    notes = [f"FLOPs of the model: {', '.join(rules)}."] if rules else []
    return Section("Model against counters", text, models.table(kernels, range_models), notes=notes)


def _occupancy(kernels: Sequence[Kernel]) -> Section:
    rows = []
    for kernel in kernels:
        room = residency(kernel)
        if room.theoretical is None and room.achieved is None:
            continue
        shared = kernel.sum("shared_static", "shared_dynamic")
        rows.append(
            _named(kernel)
            | {
                "grid": kernel.grid or None,
                "threads": _whole(kernel.get("block_size")),
                "registers": _whole(kernel.get("registers")),
                "shared KiB": None if shared is None else shared / 1024,
                "waves": kernel.get("waves"),
                "theoretical %": _percent(room.theoretical),
                "achieved %": _percent(room.achieved),
                "limited by": room.limiter or None,
                "one more block needs": room.lift or None,
            }
        )
    text = "Resident warps in percent of the SM's slots. Kernels with TMA and wgmma need few warps."
    return Section("Occupancy", text, rows)


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _stalls(kernels: Sequence[Kernel]) -> Section:
    rows = [
        _named(kernel)
        | {
            "stall": one.name,
            "warps": one.warps,
            "share %": one.percent,
            "waits for": one.meaning,
            "try": one.advice,
        }
        for kernel in kernels
        for one in stalls(kernel)[:MOST_STALLS]
    ]
    text = (
        "Warps that wait per issued instruction, and their share of all that wait. Producer warps "
        "count too: those of a warp-specialised kernel wait most of the time."
    )
    return Section("Warp stalls", text, rows)


def _memory(kernels: Sequence[Kernel]) -> Section:
    columns = {
        "DRAM read MB": ("dram_read", 1e-6),
        "DRAM write MB": ("dram_write", 1e-6),
        "L2 MB": ("l2_bytes", 1e-6),
        "L2 hit %": ("l2_hit_pct", 1.0),
        "L1 hit %": ("l1_hit_pct", 1.0),
        "TMA read MB": ("tma_read", 1e-6),
        "bank conflicts": ("bank_conflicts", 1.0),
        "load bytes of 32": ("load_bytes_per_sector", 1.0),
        "store bytes of 32": ("store_bytes_per_sector", 1.0),
    }
    rows = []
    for kernel in kernels:
        cells = {
            name: value * factor
            for name, (key, factor) in columns.items()
            if (value := kernel.get(key)) is not None
        }
        if cells:
            rows.append(_named(kernel) | cells)
    text = "Traffic by level. Loads and stores by TMA are not in the bytes used of a sector."
    return Section("Memory", text, rows)


def _findings(kernels: Sequence[Kernel]) -> Section:
    rows = [
        _named(kernel) | {"seen": seen, "try": advice}
        for kernel in kernels
        for seen, advice in findings(kernel)
    ]
    return Section("Findings", "Only what the numbers beside it support.", rows)


def _asked(kernels: Sequence[Kernel], names: Sequence[str]) -> Section:
    rows = [
        _named(kernel) | {"metric": name, "value": kernel.values[name]}
        for kernel in kernels
        for name in names
        if name in kernel.values
    ]
    return Section("Metrics asked for", "In base units: bytes, ns, Hz.", rows)


def as_records(kernels: Sequence[Kernel]) -> Iterator[dict[str, Any]]:
    """Each kernel with all its counters, for JSON: by key where it has one, else by ncu's name."""
    keys = {name: key for key, name in NAMES.items()}
    for kernel in kernels:
        yield {
            "number": kernel.number,
            "name": kernel.name,
            "symbol": kernel.symbol,
            "grid": kernel.grid,
            "block": kernel.block,
            "ranges": list(kernel.ranges),
            "limit": limit(kernel)._asdict(),
            "metrics": {keys.get(name, name): value for name, value in kernel.values.items()},
        }
