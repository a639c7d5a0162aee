"""Hardware counters of the calls that a sweep timed, for the rows' `counters`.

They are read after all timing: CUPTI's hooks slow the launches of a process down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from attnscope.bench.calls import build_call
from attnscope.bench.interface import Impl
from attnscope.bench.runner import in_layout
from attnscope.bench.timing import FLUSH_OVER_L2, Settings
from attnscope.bench.workloads import Workload
from attnscope.common.console import explain
from attnscope.common.results import Results
from attnscope.counters import Unavailable, collect, metrics_for


class Counting:
    """Reads counters on one device, with the L2 flushed before each pass where `cold`."""

    def __init__(self, device: torch.device, cold: bool) -> None:
        self._device, self._cold = device, cold
        self._reason: str | None = None
        self._buffer: torch.Tensor | None = None

    def read(self, work: Workload, call: Callable[[], Any]) -> dict[str, Any]:
        """Counters of one call: those of `counters.METRICS`, `flops` and its ratio to the exact
        FLOPs, and the number of passes; or only the `reason` that there are none.

        Exceptions of the call propagate.
        """
        if self._device.type != "cuda":
            return {"reason": "counters need a CUDA device"}
        if self._reason is not None:  # it stays for the process
            return {"reason": self._reason}
        metrics = metrics_for(work.dtype, torch.cuda.get_device_capability(self._device))
        try:
            counted = collect(call, metrics, self._flush, self._device.index)
        except Unavailable as error:
            self._reason = str(error)
            return {"reason": self._reason}
        values: dict[str, Any] = {**counted.values, "passes": counted.passes}
        if exact := work.flops():
            values["flops_ratio"] = values["flops"] / exact if "flops" in values else None
        return values | {"l2": "cold" if self._cold else "warm"}

    def _flush(self) -> None:
        if not self._cold:
            return
        if self._buffer is None:
            size = torch.cuda.get_device_properties(self._device).L2_cache_size
            self._buffer = torch.empty(
                int(FLUSH_OVER_L2 * size) // 4, dtype=torch.int32, device=self._device
            )
        self._buffer.zero_()
        self._buffer.sum()  # leaves dirty lines otherwise


def count_rows(
    works: Sequence[Workload],
    impls: Sequence[Impl],
    results: Results,
    device: torch.device,
    settings: Settings,
) -> None:
    """Put `counters` into the timed rows of a sweep that have none, one at a time."""
    counting = Counting(device, settings.l2 == "cold")
    rows = {(row["workload"], row["impl"]): row for row in results.rows}
    for work in works:
        for impl in impls:
            row = rows.get((work.id, impl.name))
            if row is None or row["status"] != "ok" or row.get("counters"):
                continue
            try:
                with torch.no_grad():
                    call = _call(work, impl, row["layout"], device, settings.seed)
                    counters = counting.read(work, call)
            except Exception as error:  # the row has its time all the same
                counters = {"reason": explain(error)}
            results.add([row | {"counters": counters}])


def _call(
    work: Workload, impl: Impl, layout: str, device: torch.device, seed: int
) -> Callable[[], Any]:
    """The call that was timed, on inputs of the same seed and layout."""
    tensors = work.inputs(device, seed)
    if work.mode != "forward":
        tensors += (work.output_gradient(device, seed),)
    inputs = in_layout(tensors, layout)
    return build_call(impl, work, inputs[:5], *inputs[5:])
