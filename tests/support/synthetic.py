"""Result files with synthetic but plausible numbers, for tests of their readers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from attnscope.bench.workloads import Workload
from attnscope.common.results import SCHEMA, strict_row

# Share of the roofline that an impl reaches at long lengths, and the length with half that share.
CURVES = {
    "cuda-sm80": (0.36, 250),
    "triton": (0.42, 500),
    "naive": (0.05, 100),
    "sdpa-math": (0.035, 100),
    "sdpa-efficient": (0.28, 300),
    "sdpa-flash": (0.35, 220),
    "sdpa-cudnn": (0.64, 300),
    "fa3": (0.70, 420),
    "fa4": (0.69, 520),
}
H200 = {
    "device": "cuda", "gpu": "NVIDIA H200", "gpu_sms": 132, "gpu_memory_gib": 139.8,
    "power_limit_w": 700.0, "torch": "2.11.0+cu130", "cuda": "13.0", "driver": "580.95.05",
    "cpu": "Xeon", "threads": 16, "settings": {"l2": "cold"},
}  # fmt: skip
CPU = H200 | {
    "device": "cpu", "gpu": None, "gpu_sms": None, "gpu_memory_gib": None, "power_limit_w": None,
    "torch": "2.13.0+cpu", "cuda": None, "driver": None, "threads": 2, "settings": {"l2": "warm"},
}  # fmt: skip


def paper() -> list[Workload]:
    return [
        Workload.of(head_dim=d, causal=causal, seqlen=s, tokens=16384, hidden=2048)
        for d in (64, 128, 256)
        for causal in (False, True)
        for s in (512, 1024, 2048, 4096, 8192, 16384)
    ]


def ok_row(
    impl: str, work: Workload, median_ms: float, noise: float = 0.01, seed: int = 0, **extra: Any
) -> dict[str, Any]:
    """A timed row; samples spread by `noise` around the median."""
    rng = np.random.default_rng([seed, len(impl), work.seqlen_k, work.head_dim, work.causal])
    samples = median_ms * (1 + noise * rng.standard_normal(20))
    samples *= median_ms / np.median(samples)
    p20, median, p80 = (float(p) for p in np.percentile(samples, (20, 50, 80)))
    flops, rule = work.flops_reported()
    row = {
        "median_ms": median, "p20_ms": p20, "p80_ms": p80, "samples_ms": samples.tolist(),
        "timer": "cuda-events", "l2": "cold", "flops": flops, "flops_rule": rule,
        "bytes": work.bytes(), "tflops": flops / median * 1e-9,
        "gbps": work.bytes() / median * 1e-6, "sm_clock_mhz": int(rng.integers(1600, 1980)),
    }  # fmt: skip
    return _row(impl, work, "ok", None) | row | extra


def lost_row(impl: str, work: Workload, status: str, reason: str) -> dict[str, Any]:
    return strict_row(_row(impl, work, status, reason))


def _row(impl: str, work: Workload, status: str, reason: str | None) -> dict[str, Any]:
    same = {"impl": impl, "workload": work.id, "varlen": work.seqlens is not None}
    return same | work.to_dict() | {"status": status, "reason": reason}


def gpu_row(impl: str, work: Workload, **extra: Any) -> dict[str, Any]:
    """A row as measured on an H200, on its impl's curve."""
    share, half = CURVES[impl]
    length = max(work.seqlen_q, work.seqlen_k)
    size = {64: 0.78, 128: 0.95, 256: 1.0}.get(work.head_dim, 0.9)
    tflops = 989 * share * size * length / (length + half * (2 if work.causal else 1))
    return ok_row(impl, work, work.flops_reported()[0] / tflops * 1e-9, **extra)


def write(path: Path, env: Mapping[str, Any], rows: list[dict[str, Any]]) -> Path:
    content = {"schema": SCHEMA, "env": dict(env), "rows": [strict_row(row) for row in rows]}
    path.write_text(json.dumps(content, allow_nan=False))
    return path
