"""The call that is checked and timed: a forward, the backward of one, or both.

Gradients are taken by autograd, of every impl in the same way. For a backward alone the forward
runs once, when the call is built; its graph is kept, and each call is `torch.autograd.grad` with
retain_graph: no gradient is accumulated in a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from attnscope.bench.interface import Impl
from attnscope.bench.peers import Inputs, Unsupported
from attnscope.bench.workloads import Workload

Run = Callable[[], Any]


def build_call(impl: Impl, work: Workload, inputs: Inputs, dout: Tensor | None = None) -> Run:
    """A callable without arguments for the workload's mode.

    It returns (out, lse or None) for a forward, (dq, dk, dv) for a backward, and all five for both.
    `dout` is the gradient of out; a forward needs none. Raises Unsupported where the impl cannot.
    """
    if work.mode == "forward":
        return impl.make(work, inputs)
    q, k, v = leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    with _with_grad(impl, work):
        forward = impl.make(work, (q, k, v, *inputs[3:]))

    def run_both() -> tuple[Any, ...]:
        with _with_grad(impl, work):
            out, lse = forward()
            _must_have_grad(impl, out)
            grads = torch.autograd.grad(out, leaves, dout)
        return out.detach(), None if lse is None else lse.detach(), *grads

    if work.mode == "both":
        return run_both
    with _with_grad(impl, work):
        kept, _ = forward()
    _must_have_grad(impl, kept)

    def run_backward() -> tuple[Tensor, ...]:
        with _with_grad(impl, work):
            return torch.autograd.grad(kept, leaves, dout, retain_graph=True)

    return run_backward


@contextmanager
def _with_grad(impl: Impl, work: Workload) -> Iterator[None]:
    try:
        with torch.enable_grad(), impl.scope(work):
            yield
    except RuntimeError as error:
        if not work.deterministic or not re.search("deterministic", str(error)):
            raise
        raise Unsupported(str(error).splitlines()[0].split(", but you set")[0]) from None


def _must_have_grad(impl: Impl, out: Tensor) -> None:
    if not out.requires_grad:
        raise Unsupported(f"{impl.name} has no backward: its output does not require a gradient")
