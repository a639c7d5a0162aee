"""Repeats calls under injected delays and compares every bit with the call without them.

Run in a process of its own with the library in ATTNSCOPE_CUDA_LIBRARY: see command.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnscope import _load, attention, attention_varlen
from attnscope.inputs import Case, Inputs, make_inputs, make_output_gradients
from attnscope.numerics import Verdict, check_backward_fn, check_forward_fn
from attnscope.stress import cases
from attnscope.stress.library import NO_DELAYS, Faults, Plan

Row = dict[str, Any]
Tensors = tuple[Tensor, ...]

VARIANTS = {"cpu": 0, "cuda-sm80": 80, "cuda-sm90": 90}
# Sums of dQ in another order differ by this share of the row's largest element, or less: two units
# in the last place of bfloat16.
DQ_TOLERANCE = 2.0**-6


def call(case: Case, inputs: Inputs, impl: str = "cuda-sm90") -> tuple[Tensor, Tensor]:
    """(out, lse) of a case."""
    q, k, v, cu_q, cu_k = inputs
    options: dict[str, Any] = case.options | {"return_lse": True, "impl": impl}
    if cu_q is None or cu_k is None:
        out = attention(q, k, v, **options)
    else:
        out = attention_varlen(q, k, v, cu_q, cu_k, case.seqlen_q, case.seqlen_k, **options)
    return out  # type: ignore[return-value]


def call_backward(
    case: Case,
    inputs: Inputs,
    upstream: Tensors,
    impl: str = "cuda-sm90",
    deterministic: bool = False,
) -> Tensors:
    """(dq, dk, dv) of a case; `upstream` has out, lse, dout and dlse."""
    q, k, v, cu_q, cu_k = inputs
    out, lse, dout, dlse = upstream
    lengths = {} if cu_q is None else {"max_seqlen_q": case.seqlen_q, "max_seqlen_k": case.seqlen_k}
    left, right = case.window
    return torch.ops.attnscope.backward(
        dout, q, k, v, out, lse, dlse, cu_q, cu_k, scale=case.head_dim**-0.5, causal=case.causal,
        window_left=left, window_right=right, softcap=case.softcap, variant=VARIANTS[impl],
        deterministic=deterministic, **lengths,
    )  # fmt: skip


def differs(got: Tensor, want: Tensor) -> Tensor:
    """Where a bit of two 16-bit tensors differs; NaN equals NaN."""
    return got.view(torch.int16) != want.view(torch.int16)


def wrong_rows(got: Tensors, want: Tensors) -> int:
    """Rows (a query of a head) of which a bit of out or lse differs; NaN equals NaN."""
    out = differs(got[0], want[0]).any(-1).transpose(-1, -2)
    return int((out | (got[1].view(torch.int32) != want[1].view(torch.int32))).sum())


def wrong_gradient_rows(got: Tensors, want: Tensors, deterministic: bool) -> int:
    """Rows of dq (a query of a head), and of dk and dv (a key of a head), that are wrong.

    A bit differs; in dq of a call that is not deterministic, more than the order of its sum may.
    """
    (dq, dk, dv), (want_dq, want_dk, want_dv) = got, want
    if deterministic:
        rows = differs(dq, want_dq)
    else:
        allowed = DQ_TOLERANCE * want_dq.float().abs().amax(-1, keepdim=True)
        rows = ~((dq.float() - want_dq.float()).abs() <= allowed)  # NaN is wrong
    keys = differs(dk, want_dk).any(-1) | differs(dv, want_dv).any(-1)
    return int(rows.any(-1).sum() + keys.sum())


@dataclass(frozen=True)
class Subject:
    """A case and what is done with it: `start` makes inputs and returns the call."""

    case: Case
    label: str
    start: Callable[[int], Callable[[], Tensors]]
    check: Callable[[int], Verdict]
    wrong_rows: Callable[[Tensors, Tensors], int]


def forward_subject(case: Case, device: str = "cuda", impl: str = "cuda-sm90") -> Subject:
    return Subject(
        case,
        cases.label(case),
        lambda seed: partial(call, case, make_inputs(case, "normal", seed, device), impl),
        lambda seed: check_forward_fn(
            lambda *x: call(case, x, impl), case, "normal", seed, device=device
        ),
        wrong_rows,
    )


def backward_subject(
    case: Case, deterministic: bool, device: str = "cuda", impl: str = "cuda-sm90"
) -> Subject:
    forward = "cpu" if impl == "cpu" else "cuda-sm90"

    def start(seed: int) -> Callable[[], Tensors]:
        inputs = make_inputs(case, "normal", seed, device)
        upstream = call(case, inputs, forward) + make_output_gradients(case, "normal", seed, device)
        return partial(call_backward, case, inputs, upstream, impl, deterministic)

    def gradients(dout: Tensor, *rest: Any) -> Any:
        inputs, dlse = rest[:-1], rest[-1]
        upstream = (*call(case, inputs, forward), dout, dlse)  # type: ignore[arg-type]
        return call_backward(case, inputs, upstream, impl, deterministic)  # type: ignore[arg-type]

    def check(seed: int) -> Verdict:
        options = {"with_dlse": True, "deterministic": deterministic}
        return check_backward_fn(gradients, case, "normal", seed, device, **options)

    label = cases.label(case) + (" sm80" if impl == "cuda-sm80" else "")
    return Subject(
        case, label, start, check, lambda got, want: wrong_gradient_rows(got, want, deterministic)
    )


def subjects(mode: str, deterministic: bool) -> list[Subject]:
    if mode == "forward":
        return [forward_subject(case) for case in cases.all_cases()]
    found = [backward_subject(case, deterministic) for case in cases.all_cases(mode)]
    if deterministic:  # the portable kernel takes turns too
        found += [backward_subject(case, True, impl="cuda-sm80") for case in cases.turns()]
    return found


def stress(
    faults: Faults, every: list[Subject], calls: int, cycles: int, kinds: int, seed: int,
    beside: Callable[[], object] = lambda: None,
) -> Iterator[Row]:  # fmt: skip
    """One row a case: {case, calls, wrong_calls, wrong_rows, plan}, `plan` of the first wrong call.

    The call without delays is compared with fp64 first; a case that fails there has `error`. With
    fewer calls than cases, some cases spread over all have one. `beside` is called before each
    call with delays.
    """
    for number, subject in enumerate(every):
        count = (number + 1) * calls // len(every) - number * calls // len(every)
        if count == 0:
            continue
        faults.set(NO_DELAYS)
        verdict = subject.check(seed + number)
        function = subject.start(seed + number)
        want = function()
        row: Row = {"case": subject.label, "calls": count, "wrong_calls": 0, "wrong_rows": 0}
        row |= {"plan": None, "error": None if verdict.passed else verdict.reason}
        for values in cases.plans(seed + number, count, cycles, kinds):
            plan = Plan(*values)
            faults.set(plan)
            beside()
            wrong = subject.wrong_rows(function(), want)
            if wrong:
                row["wrong_calls"] += 1
                row["wrong_rows"] += wrong
                row["plan"] = row["plan"] or str(plan)
        faults.set(NO_DELAYS)
        yield row


class OtherWork:
    """Matrix products on another stream: thread blocks of the calls start when SMs are free."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.a, self.out = (torch.ones(2048, 2048, device="cuda").bfloat16() for _ in range(2))

    def __call__(self) -> None:
        with torch.cuda.stream(self.stream):
            for _ in range(4):
                torch.mm(self.a, self.a, out=self.out)


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("calls", "cycles", "kinds", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--mode", required=True)
    for name in ("deterministic", "beside"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
        print(f"device must be a Hopper GPU (H100, H200, GH200), got {name}", file=sys.stderr)
        return 2
    try:
        faults = Faults(_load.CUDA_LIBRARY)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    every = subjects(options.mode, options.deterministic)
    numbers = options.calls, options.cycles, options.kinds, options.seed
    bad = False
    for row in stress(faults, every, *numbers, *([OtherWork()] if options.beside else [])):
        print(json.dumps(row), flush=True)
        bad |= bool(row["wrong_calls"] or row["error"])
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
