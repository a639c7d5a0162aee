"""Repeats calls under injected delays and compares every bit with the call without them.

Run in a process of its own with the library in ATTNSCOPE_CUDA_LIBRARY: see command.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from attnscope import _load, attention, attention_varlen
from attnscope.inputs import Case, Inputs, make_inputs
from attnscope.numerics import check_forward_fn
from attnscope.stress import cases
from attnscope.stress.library import NO_DELAYS, Faults, Plan

Row = dict[str, Any]


def call(case: Case, inputs: Inputs, impl: str = "cuda-sm90") -> tuple[Tensor, Tensor]:
    q, k, v, cu_q, cu_k = inputs
    options: dict[str, Any] = case.options | {"return_lse": True, "impl": impl}
    if cu_q is None or cu_k is None:
        out = attention(q, k, v, **options)
    else:
        out = attention_varlen(q, k, v, cu_q, cu_k, case.seqlen_q, case.seqlen_k, **options)
    return out  # type: ignore[return-value]


def wrong_rows(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> int:
    """Rows (a query of a head) of which a bit of out or lse differs; NaN equals NaN."""
    differs = (got[0].view(torch.int16) != want[0].view(torch.int16)).any(-1).transpose(-1, -2)
    return int((differs | (got[1].view(torch.int32) != want[1].view(torch.int32))).sum())


def stress(faults: Faults, calls: int, cycles: int, kinds: int, seed: int) -> Iterator[Row]:
    """One row a case: {case, calls, wrong_calls, wrong_rows, plan}, `plan` of the first wrong call.

    The call without delays is compared with fp64 first; a case that fails there has `error`.
    """
    every = list(cases.all_cases())
    for number, case in enumerate(every):
        count = calls // len(every) + (number < calls % len(every))
        inputs = make_inputs(case, "normal", seed + number, "cuda")
        faults.set(NO_DELAYS)
        verdict = check_forward_fn(lambda *x, c=case: call(c, x), case, "normal", seed + number)
        want = call(case, inputs)
        row: Row = {"case": cases.label(case), "calls": count, "wrong_calls": 0, "wrong_rows": 0}
        row |= {"plan": None, "error": None if verdict.passed else verdict.reason}
        for values in cases.plans(seed + number, count, cycles, kinds):
            plan = Plan(*values)
            faults.set(plan)
            wrong = wrong_rows(call(case, inputs), want)
            if wrong:
                row["wrong_calls"] += 1
                row["wrong_rows"] += wrong
                row["plan"] = row["plan"] or str(plan)
        faults.set(NO_DELAYS)
        yield row


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("calls", "cycles", "kinds", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
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
    bad = False
    for row in stress(faults, options.calls, options.cycles, options.kinds, options.seed):
        print(json.dumps(row), flush=True)
        bad |= bool(row["wrong_calls"] or row["error"])
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
