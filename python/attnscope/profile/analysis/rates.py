"""FLOPs over the time of their kernels: achieved TFLOP/s, and the share of the card's peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from attnscope.common.hardware.devices import Device

NO_WORK = "no op with a FLOP formula"
# No card runs this far above the clock that its peak is specified for.
OUT_OF_REACH = 1.25
FAR_ABOVE = "FLOPs or time cannot be right"
ABOVE = f"{FAR_ABOVE}, or the card ran above the clock that its peak is given for"
CLOCK_ABOVE = f"{FAR_ABOVE}, or the clock that was read is not the region's"


@dataclass(frozen=True)
class Work:
    """FLOPs of one op, the torch name of the dtype it multiplies, and how they were counted."""

    flops: int
    dtype: str
    rule: str


@dataclass(frozen=True)
class Rate:
    """FLOPs of some events over the time of their kernels.

    tflops: achieved TFLOP/s. mfu: share of the card's dense peak for the multiplied dtypes, 0 to 1.
    mfu_at_clock: share of the peak at the measured SM clock. rule: how FLOPs were counted. peak:
    the dtypes and their peaks. reason: what is missing and why. A share above 1 is dropped as
    impossible, and so is a tflops that no clock of the card allows.
    """

    flops: int | None = None
    tflops: float | None = None
    mfu: float | None = None
    mfu_at_clock: float | None = None
    rule: str | None = None
    peak: str | None = None
    reason: str | None = None


def rate(
    works: Iterable[Work],
    time_ns: float,
    device: Device | None,
    device_reason: str | None = None,
    sm_clock_mhz: float | None = None,
) -> Rate:
    """Achieved TFLOP/s and model FLOP utilisation of work that took `time_ns` nanoseconds.

    `device` and `device_reason` come from `bench.devices.find_device`. For several dtypes, the time
    is compared with the minimum time that the card needs for all the work at its peaks.
    """
    works = list(works)
    if not works:
        return Rate(reason=NO_WORK)
    flops = sum(work.flops for work in works)
    rule = "; ".join(sorted({work.rule for work in works}))
    if time_ns <= 0:
        return Rate(flops=flops, rule=rule, reason="no time on the GPU")
    tflops = flops / time_ns * 1e-3
    if device is None:
        return Rate(flops, tflops, rule=rule, reason=device_reason or "no device")
    by_dtype: Counter[str] = Counter()
    for work in works:
        by_dtype[work.dtype] += work.flops
    if unknown := sorted(set(by_dtype) - set(device.peaks)):
        return Rate(flops, tflops, rule=rule, reason=f"{device.name}: no peak for {unknown[0]}")
    peak = peaks_text(device, by_dtype)
    mfu = sum(n / device.peaks[dtype] for dtype, n in by_dtype.items()) * 1e-3 / time_ns
    if mfu > OUT_OF_REACH:
        return Rate(flops, rule=rule, peak=peak, reason=f"above the peak, {peak}: {FAR_ABOVE}")
    at_clock = None
    if sm_clock_mhz:
        peaks = {dtype: device.peak_at(dtype, sm_clock_mhz) for dtype in by_dtype}
        known = [n / top for dtype, n in by_dtype.items() if (top := peaks[dtype])]
        at_clock = sum(known) * 1e-3 / time_ns if len(known) == len(peaks) else None
    reasons = []
    if mfu > 1:
        reasons.append(f"no MFU: above the peak, {peak}: {ABOVE}")
    if at_clock is not None and at_clock > 1:
        reasons.append(f"no MFU at the clock: above the peak at it: {CLOCK_ABOVE}")
    return Rate(
        flops,
        tflops,
        mfu if mfu <= 1 else None,
        at_clock if at_clock is not None and at_clock <= 1 else None,
        rule,
        peak,
        "; ".join(reasons) or None,
    )


def peaks_text(device: Device, dtypes: Iterable[str]) -> str:
    """The dense peaks of a card for dtypes; dtypes without a peak are left out."""
    known = sorted(set(dtypes) & set(device.peaks))
    return "; ".join(f"{dtype} {device.peaks[dtype]:g} TFLOP/s" for dtype in known)
