"""Hardware counters of the calls that a sweep times, for the rows' `counters`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attnscope.bench.timing import FLUSH_OVER_L2
from attnscope.bench.workloads import Workload
from attnscope.counters import Unavailable, collect, metrics_for


class Counting:
    """Reads counters on one device, with the L2 flushed before each pass where `cold`."""

    def __init__(self, device: torch.device, cold: bool) -> None:
        self._device, self._cold = device, cold
        self._buffer: torch.Tensor | None = None

    def read(self, work: Workload, call: Callable[[], Any]) -> dict[str, Any]:
        """Counters of one call: those of `counters.METRICS`, `flops` and its ratio to the exact
        FLOPs, and the number of passes; or only the `reason` that there are none.

        Exceptions of the call propagate.
        """
        if self._device.type != "cuda":
            return {"reason": "counters need a CUDA device"}
        metrics = metrics_for(work.dtype, torch.cuda.get_device_capability(self._device))
        try:
            counted = collect(call, metrics, self._flush, self._device.index)
        except Unavailable as error:
            return {"reason": str(error)}
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
