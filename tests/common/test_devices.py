"""Peaks by card: dense, different for similar names, none for an unknown card."""

import pytest

from attnscope.common.hardware.devices import DEVICES, find_device


@pytest.mark.parametrize(
    ("name", "sms", "memory_gib", "short", "bf16", "bandwidth"),
    [
        ("NVIDIA H100 80GB HBM3", 132, 79.2, "H100 SXM", 989.4, 3352),
        ("NVIDIA H100 PCIe", 114, 79.2, "H100 PCIe", 756.4, 2039),
        ("NVIDIA H100 NVL", 132, 92.6, "H100 NVL", 835.3, 3938),
        ("NVIDIA H200", 132, 139.8, "H200 SXM", 989.4, 4800),
        ("NVIDIA GH200 480GB", 132, 95.0, "GH200 96GB", 989.4, 4000),
        ("NVIDIA A100-SXM4-40GB", 108, 39.4, "A100 SXM 40GB", 311.9, 1555),
        ("NVIDIA A100 80GB PCIe", 108, 79.3, "A100 PCIe 80GB", 311.9, 1935),
        ("NVIDIA L40S", 142, 44.4, "L40S", 362.0, 864),
        ("NVIDIA L4", 58, 22.5, "L4", 121.0, 300),
        ("NVIDIA GeForce RTX 4090", 128, 23.5, "RTX 4090", 165.2, 1008),
        ("NVIDIA GeForce RTX 3090", 82, 24.0, "RTX 3090", 71.0, 936),
        ("NVIDIA B200", 148, 178.4, "B200", 2250.0, 8000),
    ],
)
def test_cards_are_distinguished(
    name: str, sms: int, memory_gib: float, short: str, bf16: float, bandwidth: float
) -> None:
    device, reason = find_device(name, sms, memory_gib)
    assert reason is None
    assert device is not None
    assert (device.name, device.peaks["bfloat16"]) == (short, bf16)
    assert (device.peaks["float16"], device.bandwidth_gbs) == (bf16, bandwidth)


@pytest.mark.parametrize(
    ("name", "sms", "memory_gib", "said"),
    [
        ("NVIDIA H300", 144, 200.0, "'NVIDIA H300'"),
        ("NVIDIA H100", None, None, "'NVIDIA H100'"),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 60, 39.0, "MIG 3g.40gb"),
        ("NVIDIA GeForce RTX 4090 D", 114, 23.5, "RTX 4090 D"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 76, 15.7, "Laptop"),
        ("NVIDIA H200", 114, 139.8, "114 SMs"),
        ("NVIDIA H100 80GB HBM3", 132, 63.0, "63 GiB"),
    ],
)
def test_another_card_never_gets_a_known_peak(
    name: str, sms: int | None, memory_gib: float | None, said: str
) -> None:
    device, reason = find_device(name, sms, memory_gib)
    assert device is None
    assert reason is not None and said in reason


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_peaks_are_dense_and_within_reach_of_the_boost_clock(device) -> None:
    at_boost = device.peak_at("bfloat16", device.boost_mhz)
    assert 0.75 * at_boost < device.peaks["bfloat16"] < 1.005 * at_boost
    assert device.peak_at("float32", device.boost_mhz) is None
    assert device.source.startswith("NVIDIA")


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_peaks_of_one_card_fit_together(device) -> None:
    """Rates per clock relative to bf16: TF32 half, fp8 twice. Datasheets round."""
    peaks = device.peaks
    assert peaks["tfloat32"] == pytest.approx(peaks["bfloat16"] / 2, rel=0.02)
    assert peaks.get("float8_e4m3fn") == peaks.get("float8_e5m2")
    if "float8_e4m3fn" in peaks:
        assert peaks["float8_e4m3fn"] == pytest.approx(2 * peaks["bfloat16"], rel=0.02)
        for dtype, times in (("tfloat32", 0.5), ("float8_e4m3fn", 2)):
            assert device.peak_at(dtype, 1000) == times * device.peak_at("bfloat16", 1000)
    # On A100, A30 and Hopper the fp64 tensor core rate equals the fp32 rate of the CUDA cores.
    assert peaks.get("float64") in (None, peaks.get("float32"))


def test_cards_without_a_unit_have_no_peak_for_it() -> None:
    peaks = {device.name: device.peaks for device in DEVICES}
    assert "float8_e4m3fn" not in peaks["A100 SXM 80GB"]
    assert "float64" not in peaks["RTX 4090"] and "float64" not in peaks["L40S"]
    a100, _ = find_device("NVIDIA A100-SXM4-40GB")
    assert a100 is not None and a100.peak_at("float8_e4m3fn", 1410) is None


def test_peak_follows_the_measured_clock() -> None:
    device, _ = find_device("NVIDIA H200")
    assert device is not None
    assert device.peak_at("bfloat16", 1695) == pytest.approx(916.5, abs=0.1)


def test_the_roof_is_the_lower_of_compute_and_memory() -> None:
    device, _ = find_device("NVIDIA H200")
    assert device is not None
    short = device.roof("bfloat16", flops=100e9, bytes_moved=1e9)
    long = device.roof("bfloat16", flops=1e12, bytes_moved=1e9)
    assert short is not None and long is not None
    assert (short.tflops, short.bound) == (pytest.approx(480.0), "memory")
    assert (long.tflops, long.bound) == (pytest.approx(989.4), "compute")
    assert device.roof("int8", 1e12, 1e9) is None
