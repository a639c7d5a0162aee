"""The gate of training steps: a forward and a backward call, each by its own rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from attnscope.inputs import Case, make_inputs, make_output_gradients
from attnscope.numerics.backward import DETERMINISTIC_RUNS, RUNS, assess_runs, cached_truth, poison
from attnscope.numerics.forward import forward_truth
from attnscope.numerics.gate import Verdict

# (dout, q, k, v, cu_seqlens_q, cu_seqlens_k) -> (out, lse or None, dq, dk, dv)
TrainingFn = Callable[..., tuple[Any, ...]]


def check_training_fn(
    fn: TrainingFn,
    workload: Any,
    kind: str = "normal",
    seed: int = 0,
    device: str | torch.device = "cuda",
    *,
    deterministic: bool = False,
) -> Verdict:
    """Run `fn(dout, q, k, v, cu_seqlens_q, cu_seqlens_k) -> (out, lse or None, dq, dk, dv)`.

    out, lse and the gradients are checked as `check_forward_fn` and `check_backward_fn` do. The
    errors of the verdict are those of the part with the larger margin.
    """
    case, device = Case.of(workload), torch.device(device)
    inputs = make_inputs(case, kind, seed, device)
    dout, _ = make_output_gradients(case, kind, seed, device)
    runs = []
    for _ in range(DETERMINISTIC_RUNS if deterministic else RUNS):
        poison(inputs)
        runs.append(fn(dout, *inputs))
    truth = cached_truth(case, kind, seed, device, False)
    backward = assess_runs([run[2:] for run in runs], truth, deterministic)
    out, lse = runs[0][:2]
    forward = forward_truth(case, kind, seed, device).assess(out, lse)
    lead = max(forward, backward, key=lambda verdict: verdict.margin or 0.0)
    if not forward.passed or not backward.passed:
        lead = backward if forward.passed else forward
    same = all(torch.equal(out, run[0]) for run in runs[1:])
    repeatable = bool(backward.repeatable) and same
    return replace(lead, gradients=backward.gradients, repeatable=repeatable)
