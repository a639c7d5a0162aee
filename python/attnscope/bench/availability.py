"""Which impls run on this machine, and why the others do not."""

from __future__ import annotations

import torch

from attnscope.bench.impls import IMPLS
from attnscope.bench.workloads import Workload


def availability(on_gpu: bool) -> list[dict[str, str | None]]:
    """Every impl, and why it does not run here (None: it runs), checked with a small workload."""
    device = torch.device("cuda" if on_gpu else "cpu")
    dtype = "bfloat16" if on_gpu else "float32"
    work = Workload.of(head_dim=64, heads=2, seqlen=128, dtype=dtype)
    return [
        {"name": impl.name, "about": impl.about, "missing": impl.cannot(work, device)}
        for impl in IMPLS.values()
    ]
