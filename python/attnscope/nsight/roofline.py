"""Kernels under the roofs of their card, from counters: FLOPs, bytes, and the clocks of the run.

The compute roof is the tensor-core peak of the kernel's operands, or the fp32 peak where it used no
tensor cores, at the SM clock that ncu measured. The memory roofs are the peaks of DRAM and L2 at
their measured clocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnscope.common.hardware.devices import find_device
from attnscope.nsight.metrics import TENSOR
from attnscope.nsight.ncu_reader import Kernel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from attnscope.nsight.models import Model

# Tensor counters -> the dtype of their operands.
DTYPES = {
    "tensor_bf16": "bfloat16", "tensor_fp16": "float16", "tensor_fp16_fp32": "float16",
    "tensor_fp16_fp16": "float16", "tensor_tf32": "tfloat32", "tensor_fp8": "float8_e4m3fn",
    "tensor_fp64": "float64",
}  # fmt: skip
FP32 = "float32"
LEAST_SHARE = 0.01  # of the FLOPs in tensor cores, below which the fp32 roof counts


@dataclass(frozen=True, eq=False)
class Point:
    """A kernel under its roofs: FLOPs, bytes, seconds; peaks in FLOP/s and bytes/s."""

    kernel: Kernel
    dtype: str
    flops: float
    tensor_flops: float
    seconds: float
    dram_bytes: float
    l2_bytes: float | None
    compute_peak: float | None
    dram_peak: float | None
    l2_peak: float | None

    @property
    def rate(self) -> float:
        """FLOP/s."""
        return self.flops / self.seconds

    @property
    def intensity(self) -> float | None:
        """FLOPs a byte of DRAM traffic; None without traffic."""
        return self.flops / self.dram_bytes if self.dram_bytes else None

    @property
    def ridge(self) -> float | None:
        """The intensity at which the memory roof meets the compute roof."""
        if self.compute_peak is None or not self.dram_peak:
            return None
        return self.compute_peak / self.dram_peak

    @property
    def roofs(self) -> dict[str, float]:
        """Every known roof at this point, in FLOP/s."""
        found = {} if self.compute_peak is None else {"compute": self.compute_peak}
        if self.dram_peak and self.dram_bytes:
            found["DRAM"] = self.flops / self.dram_bytes * self.dram_peak
        if self.l2_peak and self.l2_bytes:
            found["L2"] = self.flops / self.l2_bytes * self.l2_peak
        return found

    @property
    def lowest(self) -> tuple[str, float] | None:
        """The lowest roof and its FLOP/s; None where no roof is known."""
        return min(self.roofs.items(), key=lambda item: item[1], default=None)


def point_of(kernel: Kernel) -> Point | None:
    """The kernel under its roofs; None without time, DRAM bytes, or a FLOP that was counted."""
    counted, time = kernel.flops, kernel.get("time_ns")
    moved = kernel.get("dram_bytes")
    if counted is None or not counted[0] or not time or moved is None:
        return None
    flops, tensor = counted
    used = max(TENSOR, key=lambda key: kernel.get(key) or 0.0)
    in_tensor_cores = tensor > LEAST_SHARE * flops
    peaks = ("dram_peak", "memory_clock_hz"), ("l2_peak", "l2_clock_hz")
    dram_peak, l2_peak = (_product(kernel, *keys) for keys in peaks)
    return Point(
        kernel=kernel,
        dtype=DTYPES[used] if in_tensor_cores else FP32,
        flops=tensor if in_tensor_cores else flops,
        tensor_flops=tensor,
        seconds=time * 1e-9,
        dram_bytes=moved,
        l2_bytes=kernel.get("l2_bytes"),
        compute_peak=_compute_peak(kernel, used if in_tensor_cores else None),
        dram_peak=dram_peak,
        l2_peak=l2_peak,
    )


def _product(kernel: Kernel, *keys: str) -> float | None:
    first, second = (kernel.get(key) for key in keys)
    return None if first is None or second is None else first * second


def _compute_peak(kernel: Kernel, tensor_key: str | None) -> float | None:
    """Dense FLOP/s at the measured clock; in tensor cores where a counter of them is given.

    By the datasheet of the card: the counter's own peak is the rate of sparse products.
    """
    clock = kernel.get("clock_hz")
    if clock is None:
        return None
    if tensor_key is None:
        peak = kernel.get("ffma_peak")
        return None if peak is None else 2 * peak * clock
    card, _ = find_device(kernel.device)
    at_clock = card.peak_at(DTYPES[tensor_key], clock * 1e-6) if card else None
    return None if at_clock is None else at_clock * 1e12


def table(points: Sequence[Point]) -> list[dict[str, Any]]:
    """A row for each kernel: intensity, rate, its lowest roof and the distance to it."""
    rows = []
    for point in points:
        roof = point.lowest
        rows.append(
            {
                "kernel": point.kernel.name,
                "#": point.kernel.number,
                "dtype": point.dtype,
                "GFLOP": point.flops * 1e-9,
                "DRAM MB": point.dram_bytes * 1e-6,
                "FLOP/byte": point.intensity,
                "ridge": point.ridge,
                "TFLOP/s": point.rate * 1e-12,
                "roof TFLOP/s": None if roof is None else roof[1] * 1e-12,
                "roof": None if roof is None else roof[0],
                "of roof %": None if roof is None else min(100 * point.rate / roof[1], 100.0),
                "L2 FLOP/byte": point.flops / point.l2_bytes if point.l2_bytes else None,
            }
        )
    return rows


def draw(points: Sequence[Point], models: Mapping[int, Model], title: str) -> Figure:
    """The roofline plot. `models`: kernel number -> its model, a hollow point beside the counted.

    The roofs are those of the first kernel with the highest compute peak.
    """
    import matplotlib
    from matplotlib.figure import Figure

    from attnscope.common.plotting import INK, RC

    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(7.2, 4.4), layout="constrained")
        axes = figure.subplots()
        axes.set_xscale("log")
        axes.set_yscale("log")
        shown = {point: x for point in points if (x := point.intensity)}
        _draw_roofs(axes, list(shown))
        for number, (point, intensity) in enumerate(shown.items()):
            colour = f"C{number % 10}"
            label = f"{point.kernel.number}: {point.kernel.name}"
            axes.plot(intensity, point.rate * 1e-12, "o", color=colour, label=label)
            if (model := models.get(point.kernel.number)) and model.flops and model.bytes:
                x, y = model.flops / model.bytes, model.flops / point.seconds * 1e-12
                axes.plot(x, y, "o", color=colour, fillstyle="none")
        axes.set_title(title, loc="left")
        axes.set_xlabel("FLOPs per byte of DRAM traffic (hollow: FLOPs and bytes of the model)")
        axes.set_ylabel("TFLOP/s")
        axes.tick_params(colors=INK)
        if shown:
            axes.legend(loc="lower right", fontsize=7)
        return figure


def _draw_roofs(axes: Any, points: Sequence[Point]) -> None:
    import numpy as np

    known = [point for point in points if point.compute_peak and point.dram_peak]
    if not known:
        return
    top = max(known, key=lambda point: point.compute_peak or 0.0)
    assert top.compute_peak and top.dram_peak and top.ridge
    spans = [point.intensity or top.ridge for point in points]
    x = np.geomspace(min([*spans, top.ridge]) / 4, max([*spans, top.ridge]) * 4, 200)
    dram = np.minimum(x * top.dram_peak, top.compute_peak) * 1e-12
    style = {"color": "#808080", "linewidth": 1.5, "zorder": 1}
    slope = f"DRAM {top.dram_peak * 1e-9:,.0f} GB/s, ridge at {top.ridge:,.0f}"
    axes.plot(x, dram, **style, label=slope)
    name = f"{top.dtype} {top.compute_peak * 1e-12:,.0f} TFLOP/s at the measured clock"
    axes.annotate(name, (x[-1], dram[-1]), ha="right", va="bottom", fontsize=7)
    if top.l2_peak:
        l2 = np.minimum(x * top.l2_peak, top.compute_peak) * 1e-12
        axes.plot(x, l2, **style, linestyle=":", label=f"L2 {top.l2_peak * 1e-9:,.0f} GB/s")
