"""attnscope_triton::forward on CPU tensors: run by test_triton.py with TRITON_INTERPRET=1."""

from __future__ import annotations

import re

import pytest
import torch
from forward_cases import CASES, op_call
from helpers import MASKS, Target, assert_workload_passes
from value_cases import DIMS, VALUE_CASES

from attnscope import attention
from attnscope.numerics import KINDS
from attnscope.triton.interpreter import INTERPRETED

assert INTERPRETED, "set TRITON_INTERPRET=1"

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TARGET = Target("triton", "cpu", FP16)
# Tens of thousands of programs, or lengths that take the path of those that are kept.
SLOW = re.compile(
    r"many_|left_window_counts_its_keys-(0|127|512)|any_finite_scale-2|zero_length_segments-128"
    r"|views_give_the_bits_of_copies-heads first"
)
QUICK = [case for case in CASES if not SLOW.match(case.id)]


def is_quick(case_id: str) -> bool:
    """Whether a case has the smallest head dim; larger ones take the same path in the kernel."""
    return not any(f"-{dim}" in case_id for dim in DIMS if dim > 8)


pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: log2(0), inf


@pytest.mark.parametrize("case", QUICK)
def test_behaviour(case):
    case(TARGET)


@pytest.mark.parametrize("case", [case for case in VALUE_CASES if is_quick(case.id)])
def test_values(case):
    case(TARGET)


@pytest.mark.parametrize(
    "case", [case for case in VALUE_CASES if re.search("giant.*-64-{}|normal|overflow", case.id)]
)
def test_values_beyond_fp16(case):
    case(Target("triton", "cpu", BF16))


# One of each padded size; all of them run on a GPU.
@pytest.mark.parametrize("head_dim", [8, 40, 96, 256])
def test_head_dims(head_dim):
    shape = {"seqlen_q": 65, "seqlen_k": 130, "heads_q": 2, "heads_kv": 1}
    assert_workload_passes(TARGET, head_dim=head_dim, causal=True, **shape)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (64, 96), (8, 256), (256, 8)])
def test_value_head_dim_of_its_own(head_dim, head_dim_v):
    assert_workload_passes(TARGET, seqlen=65, heads=2, head_dim=head_dim, head_dim_v=head_dim_v)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 200), (129, 257)])
def test_masks_and_lengths(seqlen_q, seqlen_k, mask):
    shape = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads_q": 1, "heads_kv": 1}
    assert_workload_passes(TARGET, head_dim=24, **shape, **MASKS[mask])


# Dense calls have every mask, above.
@pytest.mark.parametrize("mask", ["full", "causal-softcap", "band"])
def test_packed_batches(mask):
    seqlens = [(65, 65), (1, 130), (0, 9), (140, 30), (7, 0)]
    heads = {"heads_q": 2, "heads_kv": 1}
    assert_workload_passes(TARGET, seqlens=seqlens, head_dim=40, **heads, **MASKS[mask])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_hard_inputs(dtype, kind):
    target = Target("triton", "cpu", dtype)
    assert_workload_passes(target, kind, batch=2, seqlen=150, heads=1, head_dim=64, causal=True)


def test_query_heads_share_keys():
    assert_workload_passes(TARGET, batch=2, seqlen=40, head_dim=32, heads_q=6, heads_kv=2)


# The calls that differ for the op itself; the CPU kernel's op is checked with all.
@pytest.mark.parametrize("name", ["packed", "value dim", "no keys"])
def test_opcheck(name):
    args, kwargs = op_call(TARGET, name)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(TARGET.op, args, kwargs, test_utils=tests)


def test_float64_is_refused():
    q = torch.zeros(1, 4, 2, 64, dtype=torch.float64)
    with pytest.raises(
        TypeError, match="q must have one of the dtypes .*torch.float32 on cpu, got torch.float64"
    ):
        attention(q, q, q, impl="triton")
