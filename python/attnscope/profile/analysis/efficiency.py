"""How well a GPU was used, estimated from a trace alone.

The formulas come from PyTorch's TensorBoard plug-in (kineto/tb_plugin, docs/gpu_utilization.md):

- GPU utilisation: time in which at least one kernel ran, over wall time.
- estimated SM efficiency: min(1, blocks per SM of the running kernels), integrated over time, over
  wall time.
- estimated achieved occupancy: mean occupancy of the kernels, weighted by their durations.
- tensor-core time share: time of kernels that use tensor cores, over time of all kernels.

No figure uses hardware counters: a kernel can fill every SM and do little work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from attnscope.common.hardware.occupancy import WARP, sm_of, theoretical_occupancy
from attnscope.profile.analysis.kernel_names import uses_tensor_cores
from attnscope.profile.analysis.steps import program_window
from attnscope.profile.attribution.owners import Attribution, busy_ns
from attnscope.profile.trace.events import GpuEvent

FIGURES = ("gpu_utilisation", "sm_efficiency", "occupancy", "tensor_core_time_share")


@dataclass(frozen=True)
class Efficiency:
    """The figures of one GPU over a program; shares are 0 to 1, None with a reason in `reasons`.

    Occupancy is a share of the SM's maximum number of warps. `occupancy_from` counts the kernels
    with the profiler's estimate and those with ours (the trace has 0 or no value).
    """

    gpu: int
    wall_ns: int
    busy_ns: int
    kernel_ns: int
    gpu_utilisation: float | None
    sm_efficiency: float | None
    occupancy: float | None
    tensor_core_time_share: float | None
    occupancy_from: str | None
    reasons: Mapping[str, str]


def efficiency(attribution: Attribution) -> Efficiency:
    """The figures of the busiest GPU, from the program's first event to its last.

    If the program has no kernels or took no time, every figure is None with a reason.
    """
    trace, reason = attribution.trace, "the program took no time in the trace"
    try:
        start, end = program_window(trace)
    except ValueError as error:
        start, end, reason = 0, 0, str(error)
    gpus = {kernel.device for kernel in trace.kernels}
    gpu = max(gpus, key=lambda g: busy_ns(_of(trace.kernels, g)), default=0)
    kernels = _of(trace.kernels, gpu)
    wall, total = end - start, sum(kernel.duration for kernel in kernels)
    if wall and not kernels:
        reason = "no kernel ran"
    if not wall or not kernels:
        reasons = dict.fromkeys(FIGURES, reason)
        return Efficiency(gpu, wall, 0, 0, None, None, None, None, None, reasons)
    busy = busy_ns(kernels)
    device = next((d for d in trace.devices if d.get("id") == gpu), {})
    reasons = {}
    sm = _sm_efficiency(kernels, start, end)
    if isinstance(sm, str):
        reasons["sm_efficiency"] = sm
    occupancies = [kernel_occupancy(kernel, device) for kernel in kernels]
    occupancy = origin = None
    if missing := next((found for found in occupancies if isinstance(found, str)), None):
        reasons["occupancy"] = missing
    else:
        pairs = zip(occupancies, kernels, strict=True)
        occupancy = sum(float(o) * k.duration for o, k in pairs) / total if total else None
        theirs = sum(kernel.occupancy is not None for kernel in kernels)
        origin = f"the profiler's for {theirs} kernels, estimated here for {len(kernels) - theirs}"
    tensor = sum(k.duration for k in kernels if uses_tensor_cores(k.name))
    return Efficiency(
        gpu,
        wall,
        busy,
        total,
        busy / wall,
        None if isinstance(sm, str) else sm,
        occupancy,
        tensor / total if total else None,
        origin,
        reasons,
    )


_PROPERTIES = (
    "computeMajor", "computeMinor", "maxThreadsPerMultiprocessor", "regsPerMultiprocessor",
    "sharedMemPerMultiprocessor", "warpSize",
)  # fmt: skip


def _of(kernels: Sequence[GpuEvent], gpu: int) -> list[GpuEvent]:
    return [kernel for kernel in kernels if kernel.device == gpu]


def _sm_efficiency(kernels: Sequence[GpuEvent], start: int, end: int) -> float | str:
    """Integral of min(1, blocks per SM of the running kernels) over the window, by its length."""
    edges: list[tuple[int, float]] = []
    for kernel in kernels:
        if kernel.blocks_per_sm is None:
            return "the trace lacks the kernels' blocks per SM"
        blocks = kernel.blocks_per_sm
        edges += [(kernel.start, blocks), (kernel.end, -blocks)]
    edges.sort()
    covered, now, before = 0.0, 0.0, start
    for time, change in edges:
        covered += min(1.0, max(0.0, now)) * (time - before)
        now, before = now + change, time
    return covered / (end - start)


def kernel_occupancy(kernel: GpuEvent, device: Mapping[str, Any]) -> float | str:
    """Estimated achieved occupancy of a kernel, 0 to 1, or why it is unknown.

    Uses the profiler's estimate if it is above 0. The profiler writes 0 for shares below 0.5 % and
    for kernels that need more shared memory than the default per-block limit. Their estimate is the
    theoretical occupancy, or the share of the SM that the grid fills if that is less. `device` is
    an entry of the trace's deviceProperties.
    """
    if kernel.occupancy is not None:
        return kernel.occupancy / 100
    theoretical = filled_share(kernel, device)
    if isinstance(theoretical, str):
        return theoretical
    if kernel.warps_per_sm is None:
        return "the trace lacks the kernels' warps per SM"
    slots = device["maxThreadsPerMultiprocessor"] // device["warpSize"]
    return min(theoretical, kernel.warps_per_sm / slots)


def filled_share(kernel: GpuEvent, device: Mapping[str, Any]) -> float | str:
    """Share of an SM's warps that blocks of a kernel can fill, 0 to 1, or why it is unknown.

    Uses the register count at launch; a kernel may move registers between its warps later. A kernel
    that ran counts as at least one block per SM, even if the model gives none.
    """
    if not kernel.block or kernel.registers is None or kernel.shared_bytes is None:
        return "the trace lacks the kernels' block, registers and shared memory"
    if lost := next((key for key in _PROPERTIES if key not in device), None):
        return f"the trace lacks {lost} of GPU {kernel.device}"
    slots = device["maxThreadsPerMultiprocessor"] // device["warpSize"]
    threads = prod(kernel.block)
    try:
        sm = sm_of(
            (device["computeMajor"], device["computeMinor"]),
            slots,
            device["regsPerMultiprocessor"],
            device["sharedMemPerMultiprocessor"],
        )
        most = theoretical_occupancy(max(1, kernel.registers), threads, kernel.shared_bytes, sm)
    except ValueError as error:
        return str(error)
    return max(most.warps_per_sm, -(-threads // WARP)) / slots
