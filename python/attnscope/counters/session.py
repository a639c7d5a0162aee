"""Counters of one call: it is repeated for as many passes as the hardware needs."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from attnscope.counters.library import Unavailable, load

# Key -> metric; every chip from GA100 to GB100 has these. Times are not among them: the range of a
# call has the launch in it.
METRICS: Mapping[str, str] = {
    "instructions": "sm__inst_executed.sum",
    "tensor_pct": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "dram_bytes": "dram__bytes.sum",
    "dram_read": "dram__bytes_read.sum",
    "l2_hit_pct": "lts__t_sector_hit_rate.pct",
}
_BF16 = "sm__ops_path_tensor_src_bf16_dst_fp32.sum"
_FP16 = {9: "sm__ops_path_tensor_src_fp16.sum"}  # by the major compute capability
_FP16_ELSEWHERE = "sm__ops_path_tensor_src_fp16_dst_fp32.sum"
MOST_PASSES = 64  # a collection that does not end is an error

# CUPTI's result -> why, and what to do.
_REASONS = (
    (r"INSUFFICIENT_PRIVILEGES|\(35\)", "counters are restricted to administrators (RmProfiling"
     "AdminOnly): run as root, or load nvidia with NVreg_RestrictProfilingToAdminUsers=0"),
    (r"HARDWARE_BUSY|\(26\)", "another profiler holds the counters (DCGM, ncu, a second collector):"
     " end it"),
    (r"MULTIPLE_SUBSCRIBERS|\(39\)", "another CUPTI user is in this process (nsys, ncu, PyTorch's "
     "profiler): end it first"),
    (r"VIRTUALIZED|\(33\)|\(40\)", "a virtual GPU without access to counters"),
    (r"INVALID_METRIC|\(17\)", "this chip does not have one of the metrics"),
)  # fmt: skip


@dataclass(frozen=True)
class Counted:
    """Values by the keys of the metrics, and how many passes they took."""

    values: Mapping[str, float] = field(default_factory=dict)
    passes: int = 0


def metrics_for(dtype: str, capability: tuple[int, int]) -> dict[str, str]:
    """METRICS, and `flops` in tensor cores for bfloat16 and float16 operands; a FMA is 2."""
    own = {"bfloat16": _BF16, "float16": _FP16.get(capability[0], _FP16_ELSEWHERE)}
    return {**METRICS, **({"flops": own[dtype]} if dtype in own else {})}


def collect(
    call: Callable[[], Any],
    metrics: Mapping[str, str] | None = None,
    before: Callable[[], Any] = lambda: None,
    device: int | None = None,
) -> Counted:
    """Hardware counters of all kernels of a call on a CUDA device.

    Args:
        call: launches the work; it runs once to warm up, then once a pass, and must do the same
            each time.
        metrics: key -> a metric's full name, such as `dram__bytes.sum`; METRICS if left out.
        before: runs before each pass and is not counted, such as a flush of the L2.
        device: index of the device; the current one if left out.

    Clocks and caches are as the program leaves them. Raises Unavailable, with the reason, where
    counters cannot be read, or a value is not finite; exceptions of `call` propagate.
    """
    import torch

    native = load()
    metrics = METRICS if metrics is None else metrics
    index = torch.cuda.current_device() if device is None else device
    with torch.cuda.device(index):
        torch.cuda.synchronize()
        try:
            collector = native.Collector(_context(), index, list(dict.fromkeys(metrics.values())))
        except RuntimeError as error:
            raise Unavailable(explain(str(error))) from None
        try:
            call()  # now: a first collector leaves lines in the L2 that a pass would write back
            torch.cuda.synchronize()
            values = _passes(collector, call, before, torch.cuda.synchronize)
        finally:
            collector.close()
    counted = {key: values[name] for key, name in metrics.items()}
    if bad := [key for key, value in counted.items() if not math.isfinite(value)]:
        raise Unavailable(f"{metrics[bad[0]]} has no finite value on this GPU and driver")
    return Counted(counted, collector.passes)


def _passes(
    collector: Any,
    call: Callable[[], Any],
    before: Callable[[], Any],
    synchronize: Callable[[], Any],
) -> Mapping[str, float]:
    for _ in range(MOST_PASSES):
        before()
        synchronize()
        _native(collector.begin)
        try:
            call()
            synchronize()
        finally:
            last = _native(collector.end)
        if last:
            return _native(collector.values)
    raise Unavailable(f"the counters must need at most {MOST_PASSES} passes, got more")


def _native(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except RuntimeError as error:
        raise Unavailable(explain(str(error))) from None


def explain(message: str) -> str:
    """A failure of CUPTI as its cause and remedy, with CUPTI's own words."""
    reason = next((text for pattern, text in _REASONS if re.search(pattern, message)), None)
    return message if reason is None else f"{reason} [{message}]"


def _context() -> int:
    """The current CUcontext."""
    driver = ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()
    if driver.cuCtxGetCurrent(ctypes.byref(context)) or not context.value:
        raise Unavailable("no CUDA context is current")
    return context.value
