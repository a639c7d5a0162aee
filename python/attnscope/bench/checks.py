"""The gate on the call of an impl: forward, backward or both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attnscope import numerics
from attnscope.bench.calls import Run, build_call
from attnscope.bench.interface import Impl
from attnscope.bench.peers import Inputs
from attnscope.bench.workloads import Workload
from attnscope.ranges import CHECK, nvtx_range


def assess(
    work: Workload,
    run: Callable[[Inputs, torch.Tensor | None], Any],
    seed: int,
    device: torch.device,
    kind: str = "normal",
) -> numerics.Verdict:
    """The gate of the workload's mode on `run(inputs, dout)`, under the project's NVTX range.

    `run` returns what a call of `build_call` does; dout is None for a forward.
    """

    def forward(*inputs: Any) -> Any:
        return run(inputs, None)  # type: ignore[arg-type]

    def training(dout: torch.Tensor, *inputs: Any) -> Any:
        return run(inputs, dout)  # type: ignore[arg-type]

    def backward(dout: torch.Tensor, *inputs: Any) -> Any:
        return run(inputs[:5], dout)  # type: ignore[arg-type]

    fixed: Any = (work, kind, seed, device)
    with nvtx_range(CHECK), torch.no_grad():
        if work.mode == "forward":
            return numerics.check_forward_fn(forward, *fixed)
        if work.mode == "both":
            of_both = numerics.check_training_fn
            return of_both(training, *fixed, deterministic=work.deterministic)
        of_backward = numerics.check_backward_fn
        return of_backward(backward, *fixed, deterministic=work.deterministic)


def check(
    work: Workload, impl: Impl, kind: str, seed: int, device: torch.device
) -> numerics.Verdict:
    """Compare one impl on one workload with fp64. Exceptions of the impl propagate."""
    built: list[Run] = []

    def run(inputs: Inputs, dout: torch.Tensor | None) -> Any:
        if not built:  # every run of a check has the same inputs
            built.append(build_call(impl, work, inputs, dout))
        return built[0]()

    return assess(work, run, seed, device, kind)
