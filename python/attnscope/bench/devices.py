"""Peaks of known cards, from their vendor's datasheets: dense, never the sparse figure.

A card is matched by the exact name CUDA reports and by its SM count and memory size, so that SXM,
PCIe, NVL and MIG slices are told apart. A card that is not in the table has no peak.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

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
        peaks: dense TFLOP/s by torch dtype name. float32 is without TF32.
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

    def peak_at(self, dtype: str, sm_clock_mhz: float) -> float | None:
        """Dense tensor-core TFLOP/s at a measured SM clock; None for dtypes of other units."""
        if dtype not in ("bfloat16", "float16"):
            return None
        return self.sms * self.tensor_flops * sm_clock_mhz * 1e-6

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


def _card(
    name: str,
    cuda_name: str,
    sms: int,
    memory_gib: int,
    bandwidth_gbs: float,
    l2_mib: float | None,
    boost_mhz: int,
    tensor_flops: int,
    tensor_peak: float,
    fp32_peak: float | None,
) -> Device:
    peaks = {"bfloat16": tensor_peak, "float16": tensor_peak}
    if fp32_peak is not None:
        peaks["float32"] = fp32_peak
    return Device(
        name,
        cuda_name,
        sms,
        memory_gib,
        bandwidth_gbs,
        l2_mib,
        boost_mhz,
        tensor_flops,
        MappingProxyType(peaks),
    )


# name, CUDA name, SMs, GiB, GB/s, L2 MiB, boost MHz, FLOPs/clk/SM, bf16 TFLOP/s, fp32 TFLOP/s
DEVICES: tuple[Device, ...] = (
    # NVIDIA H100 datasheet and Hopper whitepaper. The tensor figures there carry sparsity and are
    # halved here; they hold at 1830 MHz (SXM), 1620 MHz (PCIe) and 1545 MHz (NVL), not at boost.
    _card("H100 SXM", "H100 80GB HBM3", 132, 80, 3352, 50, 1980, 4096, 989.4, 66.9),
    _card("H100 PCIe", "H100 PCIe", 114, 80, 2039, 50, 1755, 4096, 756.4, 51.2),
    _card("H100 NVL", "H100 NVL", 132, 94, 3938, None, 1785, 4096, 835.3, 60.0),
    # NVIDIA H200 datasheet (SXM and NVL columns); L2 as CUDA reports it.
    _card("H200 SXM", "H200", 132, 141, 4800, 60, 1980, 4096, 989.4, 66.9),
    _card("H200 NVL", "H200 NVL", 132, 141, 4800, None, 1785, 4096, 835.3, 60.0),
    # NVIDIA GH200 Grace Hopper datasheet; the "480GB" of the name is the CPU's memory.
    _card("GH200 96GB", "GH200 480GB", 132, 96, 4000, None, 1980, 4096, 989.4, 66.9),
    _card("GH200 144GB", "GH200 144G HBM3e", 132, 144, 4900, None, 1980, 4096, 989.4, 66.9),
    # NVIDIA HGX B200 datasheet (per GPU, sparsity halved); L2 as CUDA reports it.
    _card("B200", "B200", 148, 180, 8000, 126, 1965, 8192, 2250.0, None),
    # NVIDIA A100 datasheet and Ampere whitepaper.
    _card("A100 SXM 40GB", "A100-SXM4-40GB", 108, 40, 1555, 40, 1410, 2048, 311.9, 19.5),
    _card("A100 SXM 80GB", "A100-SXM4-80GB", 108, 80, 2039, 40, 1410, 2048, 311.9, 19.5),
    _card("A100 PCIe 40GB", "A100-PCIE-40GB", 108, 40, 1555, 40, 1410, 2048, 311.9, 19.5),
    _card("A100 PCIe 80GB", "A100 80GB PCIe", 108, 80, 1935, 40, 1410, 2048, 311.9, 19.5),
    # NVIDIA A30, A40, A10 and RTX A6000 datasheets.
    _card("A30", "A30", 56, 24, 933, 24, 1440, 2048, 165.0, 10.3),
    _card("A40", "A40", 84, 48, 696, 6, 1740, 1024, 149.7, 37.4),
    _card("A10", "A10", 72, 24, 600, 6, 1695, 1024, 125.0, 31.2),
    _card("RTX A6000", "RTX A6000", 84, 48, 768, 6, 1800, 1024, 154.8, 38.7),
    # NVIDIA L40S, L40 and L4 datasheets; RTX 6000 Ada datasheet.
    _card("L40S", "L40S", 142, 48, 864, 96, 2520, 1024, 362.0, 91.6),
    _card("L40", "L40", 142, 48, 864, 96, 2490, 512, 181.0, 90.5),
    _card("L4", "L4", 58, 24, 300, 48, 2040, 1024, 121.0, 30.3),
    _card("RTX 6000 Ada", "RTX 6000 Ada Generation", 142, 48, 960, 96, 2505, 1024, 364.2, 91.1),
    # NVIDIA Ampere GA102, Ada and RTX Blackwell whitepapers: tensor figures with fp32 accumulation.
    _card("RTX 3090", "GeForce RTX 3090", 82, 24, 936, 6, 1695, 512, 71.0, 35.6),
    _card("RTX 4090", "GeForce RTX 4090", 128, 24, 1008, 72, 2520, 512, 165.2, 82.6),
    _card("RTX 5090", "GeForce RTX 5090", 170, 32, 1792, 96, 2407, 512, 209.5, 104.8),
)

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
