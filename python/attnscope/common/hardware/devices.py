"""Peaks of known cards, from their vendor's datasheets: dense, never the sparse figure.

A card is matched by the exact name CUDA reports and by its SM count and memory size, which
distinguishes SXM, PCIe, NVL and MIG slices. A card that is not in the table has no peak.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

# Tensor-core FLOPs per clock relative to bf16; the same on every card in the table.
_TENSOR_RATE = {
    "bfloat16": 1.0, "float16": 1.0, "tfloat32": 0.5, "float8_e4m3fn": 2.0, "float8_e5m2": 2.0,
}  # fmt: skip
_MEMORY_TOLERANCE = 0.08  # ECC and firmware take up to 6 % of the nominal size


@dataclass(frozen=True)
class Device:
    """Nominal figures of one card.

    Attributes:
        name: short name, used in titles.
        cuda_name: the name CUDA reports for it, without the leading "NVIDIA ".
        sms: streaming multiprocessors.
        memory_gib: nominal device memory, GiB.
        bandwidth_gbs: device-memory bandwidth, 1e9 bytes per second.
        l2_mib: L2 size, MiB; None where the vendor's papers do not give it.
        boost_mhz: highest SM clock.
        tensor_flops: dense bf16 or fp16 FLOPs per clock and SM, fp32 accumulation.
        peaks: dense TFLOP/s by torch dtype name, for the units that cuBLAS uses. float32 is
            without TF32, which is "tfloat32". float64 is the tensor-core peak, missing if the card
            has none. float8 is with fp32 accumulation.
        source: the vendor's papers that the figures are from.
    """

    name: str
    cuda_name: str
    sms: int
    memory_gib: int
    bandwidth_gbs: float
    l2_mib: float | None
    boost_mhz: int
    tensor_flops: int
    peaks: Mapping[str, float]
    source: str

    def peak_at(self, dtype: str, sm_clock_mhz: float) -> float | None:
        """Dense tensor-core TFLOP/s at a measured SM clock; None for dtypes of other units."""
        if dtype not in _TENSOR_RATE or dtype not in self.peaks:
            return None
        return self.sms * self.tensor_flops * _TENSOR_RATE[dtype] * sm_clock_mhz * 1e-6

    def roof(self, dtype: str, flops: float, bytes_moved: float) -> Roof | None:
        """The lowest ceiling of `flops` FLOPs over `bytes_moved` bytes, in TFLOP/s.

        None where the card has no peak for `dtype` (a torch dtype name such as "bfloat16").
        """
        peak = self.peaks.get(dtype)
        if peak is None:
            return None
        return Roof(peak, flops / bytes_moved * self.bandwidth_gbs * 1e-3)


@dataclass(frozen=True)
class Roof:
    """Compute and memory ceilings of one workload on one card, in TFLOP/s."""

    compute: float
    memory: float

    @property
    def tflops(self) -> float:
        return min(self.compute, self.memory)

    @property
    def bound(self) -> str:
        return "compute" if self.compute <= self.memory else "memory"


def _peaks(
    half: float, fp32: float | None, tf32: float, fp8: float | None, fp64: float | None
) -> Mapping[str, float]:
    """Dense TFLOP/s: bf16 and fp16, fp32 outside tensor cores, TF32, fp8, fp64 in tensor cores."""
    known = {
        "bfloat16": half, "float16": half, "float32": fp32, "tfloat32": tf32,
        "float8_e4m3fn": fp8, "float8_e5m2": fp8, "float64": fp64,
    }  # fmt: skip
    return MappingProxyType({dtype: peak for dtype, peak in known.items() if peak is not None})


# From Hopper on, datasheets give tensor figures with sparsity; they are halved here. Hopper's
# figures apply at 1830 MHz (SXM), 1620 MHz (PCIe) and 1545 MHz (NVL), not at boost.
_HOPPER = _peaks(989.4, 66.9, 494.7, 1978.9, 66.9)
_HOPPER_PCIE = _peaks(756.4, 51.2, 378.2, 1512.8, 51.2)
_HOPPER_NVL = _peaks(835.3, 60.0, 417.5, 1670.5, 60.0)
_A100 = _peaks(311.9, 19.5, 156.0, None, 19.5)
_H100_PAPERS = "NVIDIA H100 datasheet and Hopper whitepaper"
_H200_PAPERS = "NVIDIA H200 datasheet"
_GH200_PAPERS = "NVIDIA GH200 Grace Hopper datasheet"
_A100_PAPERS = "NVIDIA A100 datasheet and Ampere whitepaper"
_GA102_PAPERS = "NVIDIA Ampere GA102 whitepaper"
_ADA_PAPERS = "NVIDIA Ada whitepaper"

# name, CUDA name, SMs, GiB, GB/s, L2 MiB, boost MHz, bf16 FLOPs/clk/SM, TFLOP/s, source
DEVICES: tuple[Device, ...] = (
    Device("H100 SXM", "H100 80GB HBM3", 132, 80, 3352, 50, 1980, 4096, _HOPPER, _H100_PAPERS),
    Device("H100 PCIe", "H100 PCIe", 114, 80, 2039, 50, 1755, 4096, _HOPPER_PCIE, _H100_PAPERS),
    Device("H100 NVL", "H100 NVL", 132, 94, 3938, None, 1785, 4096, _HOPPER_NVL, _H100_PAPERS),
    # L2 as CUDA reports it.
    Device("H200 SXM", "H200", 132, 141, 4800, 60, 1980, 4096, _HOPPER, _H200_PAPERS),
    Device("H200 NVL", "H200 NVL", 132, 141, 4800, None, 1785, 4096, _HOPPER_NVL, _H200_PAPERS),
    # The "480GB" of the name is the CPU's memory.
    Device("GH200 96GB", "GH200 480GB", 132, 96, 4000, None, 1980, 4096, _HOPPER, _GH200_PAPERS),
    Device(
        "GH200 144GB", "GH200 144G HBM3e", 132, 144, 4900, None, 1980, 4096, _HOPPER, _GH200_PAPERS
    ),
    # L2 as CUDA reports it. Papers differ on fp64 (37 and 40 TFLOP/s), and give no separate fp32.
    Device(
        "B200", "B200", 148, 180, 8000, 126, 1965, 8192,
        _peaks(2250.0, None, 1125.0, 4500.0, None), "NVIDIA HGX B200 datasheet, per GPU",
    ),
    Device("A100 SXM 40GB", "A100-SXM4-40GB", 108, 40, 1555, 40, 1410, 2048, _A100, _A100_PAPERS),
    Device("A100 SXM 80GB", "A100-SXM4-80GB", 108, 80, 2039, 40, 1410, 2048, _A100, _A100_PAPERS),
    Device("A100 PCIe 40GB", "A100-PCIE-40GB", 108, 40, 1555, 40, 1410, 2048, _A100, _A100_PAPERS),
    Device("A100 PCIe 80GB", "A100 80GB PCIe", 108, 80, 1935, 40, 1410, 2048, _A100, _A100_PAPERS),
    Device(
        "A30", "A30", 56, 24, 933, 24, 1440, 2048,
        _peaks(165.0, 10.3, 82.0, None, 10.3), "NVIDIA A30 datasheet",
    ),
    Device(
        "A40", "A40", 84, 48, 696, 6, 1740, 1024,
        _peaks(149.7, 37.4, 74.8, None, None), "NVIDIA A40 datasheet",
    ),
    Device(
        "A10", "A10", 72, 24, 600, 6, 1695, 1024,
        _peaks(125.0, 31.2, 62.5, None, None), "NVIDIA A10 datasheet",
    ),
    Device(
        "RTX A6000", "RTX A6000", 84, 48, 768, 6, 1800, 1024,
        _peaks(154.8, 38.7, 77.4, None, None), _GA102_PAPERS,
    ),
    Device(
        "L40S", "L40S", 142, 48, 864, 96, 2520, 1024,
        _peaks(362.0, 91.6, 183.0, 733.0, None), "NVIDIA L40S datasheet",
    ),
    Device(
        "L40", "L40", 142, 48, 864, 96, 2490, 512,
        _peaks(181.0, 90.5, 90.5, 362.0, None), "NVIDIA L40 datasheet",
    ),
    Device(
        "L4", "L4", 58, 24, 300, 48, 2040, 1024,
        _peaks(121.0, 30.3, 60.0, 242.5, None), "NVIDIA L4 datasheet",
    ),
    Device(
        "RTX 6000 Ada", "RTX 6000 Ada Generation", 142, 48, 960, 96, 2505, 1024,
        _peaks(364.2, 91.1, 182.1, 728.5, None), _ADA_PAPERS,
    ),
    # Tensor figures with fp32 accumulation; those with fp16 accumulation are twice as high.
    Device(
        "RTX 3090", "GeForce RTX 3090", 82, 24, 936, 6, 1695, 512,
        _peaks(71.0, 35.6, 35.6, None, None), _GA102_PAPERS,
    ),
    Device(
        "RTX 4090", "GeForce RTX 4090", 128, 24, 1008, 72, 2520, 512,
        _peaks(165.2, 82.6, 82.6, 330.3, None), _ADA_PAPERS,
    ),
    Device(
        "RTX 5090", "GeForce RTX 5090", 170, 32, 1792, 96, 2407, 512,
        _peaks(209.5, 104.8, 104.8, 419.0, None), "NVIDIA RTX Blackwell whitepaper",
    ),
)  # fmt: skip

_BY_NAME = {device.cuda_name: device for device in DEVICES}


def find_device(
    name: str, sms: int | None = None, memory_gib: float | None = None
) -> tuple[Device | None, str | None]:
    """Look a card up by what CUDA reports about it.

    Args:
        name: device name, as `torch.cuda.get_device_name` gives it.
        sms: SM count; checked where given (a MIG slice or a cut-down part has fewer).
        memory_gib: total memory in GiB; checked where given.

    Returns:
        (device, None), or (None, reason) for a card whose peaks are not known.
    """
    short = name.removeprefix("NVIDIA ").strip()
    device = _BY_NAME.get(short)
    if device is None:
        return None, f"no datasheet figures for {name!r}: its peaks are not known"
    if sms is not None and sms != device.sms:
        return None, f"{name!r} has {sms} SMs here, {device.name} has {device.sms}: not that card"
    if memory_gib is not None and abs(memory_gib / device.memory_gib - 1) > _MEMORY_TOLERANCE:
        return None, (
            f"{name!r} has {memory_gib:.0f} GiB here, {device.name} has {device.memory_gib} GiB: "
            "not that card"
        )
    return device, None


def current_device(index: int = 0) -> tuple[Device | None, str | None]:
    """`find_device` for CUDA device `index` of this process; (None, reason) without one."""
    import torch

    if not torch.cuda.is_available():
        return None, "no CUDA device"
    props = torch.cuda.get_device_properties(index)
    return find_device(props.name, props.multi_processor_count, props.total_memory / 2**30)
