"""A sweep: check, verify, time and check again every impl on every workload, and keep the rows.

An impl that is absent, unsupported, wrong, raises or runs out of memory gets a row with the reason.
The result file is saved after every workload: a killed sweep loses at most one workload and can be
resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from attnscope import numerics
from attnscope.bench.calls import build_call
from attnscope.bench.checks import assess
from attnscope.bench.checks import check as check
from attnscope.bench.interface import Impl
from attnscope.bench.peers import Unsupported
from attnscope.bench.statistics import LEAST_SAMPLES, bootstrap_ratio
from attnscope.bench.timing import (
    Call,
    Settings,
    Timing,
    copies_to_rotate,
    make_timer,
    time_interleaved,
)
from attnscope.bench.verification import names_of
from attnscope.bench.workloads import Workload
from attnscope.common.console import explain
from attnscope.common.hardware.devices import current_device
from attnscope.common.hardware.nvml import Nvml
from attnscope.common.results import Results

Row = dict[str, Any]


class ContextLost(Exception):
    """The CUDA context of this process is broken: nothing can run in it any more."""


def run_sweep(
    works: Sequence[Workload],
    impls: Sequence[Impl],
    baseline: Impl | None,
    results: Results,
    device: torch.device,
    settings: Settings,
    progress: Callable[[Workload, list[Row]], None] = lambda work, rows: None,
) -> str | None:
    """Fill `results` with a row for each workload and impl that has none yet.

    `progress` is called after each workload with its new rows. Returns None, or why this process
    could not finish the sweep. The remaining rows then have that reason, and a resumed sweep tries
    them again.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    sweep = _Sweep(device, settings, baseline)
    lost: str | None = None
    finished = results.finished()
    for work in works:
        todo = [impl for impl in impls if (work.id, impl.name) not in finished]
        if not todo:
            progress(work, [])
            continue
        if lost is None:
            try:
                with torch.no_grad():
                    rows = sweep.run(work, todo)
            except ContextLost as error:
                lost = str(error)
        if lost is not None:
            rows = [_row(work, impl, "failed", f"not run: {lost}") for impl in todo]
        results.add(rows)
        progress(work, rows)
    return lost


@dataclass
class _Candidate:
    """An impl with inputs of one layout, for one workload; `row` is set once it is final."""

    impl: Impl
    layout: str = "bshd"
    row: Row | None = None
    calls: Sequence[Call] = ()
    kernels: list[str] | None = None
    verdict: numerics.Verdict | None = None
    timing: Timing = field(default_factory=Timing)

    @property
    def name(self) -> str:
        return f"{self.impl.name}/{self.layout}"


class _Sweep:
    def __init__(self, device: torch.device, settings: Settings, baseline: Impl | None) -> None:
        self._device = device
        self._settings = settings
        self._baseline = baseline
        self._timer = make_timer(device, settings)
        self._nvml = Nvml(device)

    def run(self, work: Workload, todo: Sequence[Impl]) -> list[Row]:
        """Rows of `todo`; the baseline is timed with them even where its own row is there."""
        impls = list(todo)
        if self._baseline is not None and self._baseline not in impls:
            impls.append(self._baseline)
        layouts = layouts_of(work, self._settings)
        candidates = [_Candidate(impl, layout) for impl in impls for layout in layouts]
        for candidate in candidates:
            if reason := candidate.impl.cannot(work, self._device):
                candidate.row = _row(work, candidate.impl, "skipped", reason)
        self._each(work, candidates, self._build({}))
        self._each(work, candidates, self._check)
        self._each(work, candidates, self._verify)
        timings, readings = self._time(candidates)
        for candidate in candidates:
            if candidate.row is None:
                candidate.timing = timings[candidate.name]
        self._each(work, candidates, self._raise_timing_error)
        self._each(work, candidates, self._check)
        for candidate in candidates:
            if candidate.row is None:
                candidate.row = self._timed_row(work, candidate, readings)
            candidate.calls = ()
        self._free()
        rows = [
            merge_layouts({c.layout: c.row or {} for c in candidates if c.impl is impl})
            for impl in impls
        ]
        self._add_ratios(rows)
        return rows[: len(todo)]

    def _each(
        self,
        work: Workload,
        candidates: Sequence[_Candidate],
        step: Callable[[Workload, _Candidate], None],
    ) -> None:
        """Apply a step to the remaining candidates; an exception becomes the candidate's row."""
        for candidate in candidates:
            if candidate.row is not None:
                continue
            try:
                step(work, candidate)
            except Unsupported as refusal:
                candidate.row = _row(work, candidate.impl, "skipped", str(refusal))
            except Exception as error:
                self._must_live(work, candidate.impl, error)
                candidate.row = _row(work, candidate.impl, "failed", explain(error))
            if candidate.row is not None:
                candidate.calls = ()
                self._free()

    def _build(self, sets: dict[str, list[Any]]) -> Callable[[Workload, _Candidate], None]:
        """A step that makes the calls, on sets of inputs that all candidates of a layout share."""

        def build(work: Workload, candidate: _Candidate) -> None:
            copies = copies_to_rotate(self._device, self._settings, work.bytes())
            shared = sets.setdefault(candidate.layout, [])
            while len(shared) < copies:
                seed = self._settings.seed + len(shared)
                tensors = work.inputs(self._device, seed)
                if work.mode != "forward":
                    tensors += (work.output_gradient(self._device, seed),)
                shared.append(in_layout(tensors, candidate.layout))
            candidate.calls = [
                build_call(candidate.impl, work, tensors[:5], *tensors[5:]) for tensors in shared
            ]

        return build

    def _check(self, work: Workload, candidate: _Candidate) -> None:
        """The gate: checks the same call that is timed, on the seed's inputs."""
        verdict = assess(work, lambda *_: candidate.calls[0](), self._settings.seed, self._device)
        candidate.verdict = verdict
        if not verdict.passed:
            when = "after it was timed: " if candidate.timing.samples_ms else ""
            reason = f"{when}{verdict.reason}"
            candidate.row = _row(work, candidate.impl, "wrong", reason) | _errors(verdict)

    def _verify(self, work: Workload, candidate: _Candidate) -> None:
        candidate.kernels = names_of(candidate.calls[0], self._device)
        if reason := candidate.impl.mismatch(candidate.kernels, self._device.type, work.mode):
            candidate.row = _row(work, candidate.impl, "failed", reason)
            candidate.row["kernels"] = candidate.kernels

    def _time(self, candidates: Sequence[_Candidate]) -> tuple[dict[str, Timing], Row]:
        racing = {c.name: c.calls for c in candidates if c.row is None}
        before = self._nvml.read()
        timings = time_interleaved(racing, self._timer, self._settings, self._is_fatal)
        return timings, {"before": before, "after": self._nvml.read()}

    def _raise_timing_error(self, work: Workload, candidate: _Candidate) -> None:
        if candidate.timing.error is not None:
            raise candidate.timing.error

    def _timed_row(self, work: Workload, candidate: _Candidate, readings: Row) -> Row:
        timing = candidate.timing
        flops, rule = work.flops_reported()
        p20, median, p80 = (float(p) for p in np.percentile(timing.samples_ms, (20, 50, 80)))
        after = readings["after"]
        throttles = [reading.get("throttle") for reading in readings.values()]
        row = _row(work, candidate.impl, "ok", None) | _errors(candidate.verdict)
        row |= {
            "median_ms": median,
            "p20_ms": p20,
            "p80_ms": p80,
            "samples_ms": timing.samples_ms,
            "host_us": float(np.median(timing.host_us)) if timing.host_us else None,
            "timer": self._timer.name,
            "l2": self._settings.l2,
            "flops": flops,
            "flops_exact": work.flops(),
            "flops_rule": rule,
            "bytes": work.bytes(),
            "tflops": flops / median * 1e-9,
            "gbps": work.bytes() / median * 1e-6,
            "kernels": candidate.kernels,
            "nvml": readings,
            "throttled": None if None in throttles else any(throttles),
        }
        row |= {key: after.get(key) for key in ("sm_clock_mhz", "power_w", "temperature_c")}
        return above_peak(row, *self._peak(work.dtype))

    def _peak(self, dtype: str) -> tuple[float | None, str | None]:
        """Dense peak of the card in TFLOP/s, or why it is not known."""
        if self._device.type != "cuda":
            return None, "no peak is known for CPUs"
        card, reason = current_device(self._device.index or 0)
        if card is None:
            return None, reason
        peak = card.peaks.get(dtype)
        return peak, None if peak else f"no {dtype} peak is known for {card.name}"

    def _add_ratios(self, rows: Sequence[Row]) -> None:
        """Add speed over the baseline, both timed in the same rounds; only if both are correct."""
        if self._baseline is None:
            return
        base = next(row for row in rows if row["impl"] == self._baseline.name)
        for row in rows:
            row["baseline"] = self._baseline.name
            if row["status"] == base["status"] == "ok":
                row["ratio"] = base["median_ms"] / row["median_ms"]
                if len(row["samples_ms"]) >= LEAST_SAMPLES:
                    samples = (base["samples_ms"], row["samples_ms"])
                    row["ratio_ci"] = list(bootstrap_ratio(*samples, seed=self._settings.seed))

    def _is_fatal(self, error: Exception) -> bool:
        return self._device.type == "cuda" and context_is_lost(error)

    def _must_live(self, work: Workload, impl: Impl, error: Exception) -> None:
        if self._is_fatal(error):
            raise ContextLost(
                f"{impl.name} on {work.id} broke the CUDA context: {explain(error)}"
            ) from error

    def _free(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def layouts_of(work: Workload, settings: Settings) -> tuple[str, ...]:
    """The layouts that a workload is timed in; packed inputs have one, [T, H, D]."""
    if work.seqlens is not None:
        return ("thd",)
    return ("bshd", "bhsd") if settings.layouts == "both" else (settings.layouts,)


def in_layout(inputs: Any, layout: str) -> Any:
    """Inputs [B, S, H, D], contiguous as they are or, for "bhsd", as [B, H, S, D]."""
    if layout != "bhsd":
        return inputs
    return tuple(
        t.transpose(1, 2).contiguous().transpose(1, 2) if t is not None and t.ndim == 4 else t
        for t in inputs
    )


def merge_layouts(rows: Mapping[str, Row]) -> Row:
    """The row that counts for an impl, of its rows by layout: the fastest one.

    If the impl is wrong in one layout, the row is wrong. A layout without a time for another reason
    is named in the reason of the row that counts.
    """
    medians = {layout: row.get("median_ms") for layout, row in rows.items()}
    timed = [layout for layout in rows if rows[layout]["status"] == "ok"]
    wrong = [layout for layout in rows if rows[layout]["status"] == "wrong"]
    failed = [layout for layout in rows if rows[layout]["status"] == "failed"]
    if wrong or not timed:
        layout = (wrong or failed or list(rows))[0]
        return rows[layout] | {"layout": layout, "layouts_ms": medians}
    layout = min(timed, key=lambda name: rows[name]["median_ms"])
    others = [f"{name}: {row['status']}: {row['reason']}" for name, row in rows.items()
              if name not in timed]  # fmt: skip
    reason = "; ".join(filter(None, [rows[layout]["reason"], *others])) or None
    return rows[layout] | {"layout": layout, "layouts_ms": medians, "reason": reason}


def context_is_lost(error: Exception) -> bool:
    """Whether an error left the CUDA context unusable (an illegal address, say), by trying it."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").item()
    except torch.OutOfMemoryError:
        return False
    except RuntimeError:
        return True
    return False


def above_peak(row: Row, peak: float | None, unknown: str | None) -> Row:
    """Set the row's share of the peak; a row above it is wrong and loses its times.

    Without a known peak the share stays null, with a reason.
    """
    if peak is None:
        return row | {"reason": f"pct_peak: {unknown}"}
    share = row["tflops"] / peak
    if share <= 1.0:
        return row | {"pct_peak": 100.0 * share}
    reason = (
        f"wrong: above the hardware peak: {row['tflops']:.0f} TFLOP/s in {row['median_ms']:.4g} ms,"
        f" the card's dense {row['dtype']} peak is {peak:.0f}"
    )
    times = ("median_ms", "p20_ms", "p80_ms", "samples_ms", "tflops", "gbps")
    return row | dict.fromkeys(times) | {"status": "wrong", "reason": reason}


def _row(work: Workload, impl: Impl, status: str, reason: str | None) -> Row:
    shape = work.to_dict()
    return {
        "impl": impl.name,
        "workload": work.id,
        **shape,
        "varlen": work.seqlens is not None,
        "status": status,
        "reason": reason,
    }


def _errors(verdict: numerics.Verdict | None) -> Row:
    found = asdict(verdict) if verdict else {}
    keys = ("max_abs_err", "baseline_err", "err_ratio", "margin", "checked", "repeatable")
    errors = {key: found.get(key) for key in keys}
    return errors | {"gradients": found.get("gradients") or None}
