"""FLOPs and bytes that a call needs by its shape, compared with what the counters saw.

A program can state them for its NVTX ranges in a JSON file whose path is in the environment
variable ATTNSCOPE_RANGE_MODELS: `{"cuda-forward@attnscope": {"flops": 1e9, "bytes": 1e6, "calls":
1, "rule": "visible pairs"}}`. `profiling/profile_kernels.py` does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnscope.nsight.ncu_reader import Kernel

EXACT, MOST_EXTRA = 0.005, 0.05  # tolerance of "equal"; extra FLOPs that tiles explain


@dataclass(frozen=True)
class Model:
    """FLOPs and least bytes of all calls in a range, and the rule that they follow."""

    range: str
    flops: float
    bytes: float
    calls: int
    rule: str = ""


def read_models(path: Path) -> dict[str, Model]:
    """The models that a program wrote, by range; none where it wrote no file.

    Raises ValueError for a file of another form.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
        return {
            name: Model(name, float(one["flops"]), float(one["bytes"]), int(one["calls"]),
                        str(one.get("rule", "")))
            for name, one in content.items()
        }  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} must map each range to flops, bytes and calls, got an error: {error!r}"
        ) from None


def kernels_by_model(
    kernels: Sequence[Kernel], models: Mapping[str, Model]
) -> dict[str, list[Kernel]]:
    """The kernels of each range that has a model."""
    return {
        name: inside
        for name in models
        if (inside := [kernel for kernel in kernels if name in kernel.ranges])
    }


def largest_kernels(kernels: Sequence[Kernel], models: Mapping[str, Model]) -> dict[int, Model]:
    """Kernel number -> the model of its range, for the one kernel that does a range's FLOPs.

    Ranges with several calls are left out: the model is of all of them.
    """
    found = {}
    for name, inside in kernels_by_model(kernels, models).items():
        if models[name].calls == 1:
            biggest = max(inside, key=lambda kernel: (kernel.flops or (0.0, 0.0))[1])
            found[biggest.number] = models[name]
    return found


def table(kernels: Sequence[Kernel], models: Mapping[str, Model]) -> list[dict[str, Any]]:
    """A row for each range: model and counters, their ratios, and what explains the difference."""
    rows = []
    for name, inside in kernels_by_model(kernels, models).items():
        model = models[name]
        counted = [kernel.flops for kernel in inside]
        moved = [kernel.get("dram_bytes") for kernel in inside]
        if None in counted or None in moved:
            continue
        tensor = sum(pair[1] for pair in counted if pair)
        traffic = sum(one for one in moved if one is not None)
        work, bytes_ = tensor / model.flops, traffic / model.bytes
        rows.append(
            {
                "range": name,
                "calls": model.calls,
                "kernels": len(inside),
                "model GFLOP": model.flops * 1e-9,
                "tensor GFLOP": tensor * 1e-9,
                "FLOP ratio": work,
                "model MB": model.bytes * 1e-6,
                "DRAM MB": traffic * 1e-6,
                "byte ratio": bytes_,
                "why": f"{_why_flops(work, model)}; {_why_bytes(bytes_)}",
            }
        )
    return rows


def _why_flops(ratio: float, model: Model) -> str:
    if abs(ratio - 1) <= EXACT:
        return "FLOPs equal"
    if ratio > 1:
        again = ", or products computed again" if ratio > 1 + MOST_EXTRA else ""
        return f"extra FLOPs: parts of tiles that are masked or past the end{again}"
    return "FLOPs missing: products outside tensor cores, or fewer calls profiled than the model's"


def _why_bytes(ratio: float) -> str:
    if ratio > 1.1:
        return "extra bytes: tensors read again after they left L2, or workspace of the kernel"
    if ratio < 0.9:
        return "fewer bytes: a part of the tensors was in L2, or stays there"
    return "bytes as the model"
