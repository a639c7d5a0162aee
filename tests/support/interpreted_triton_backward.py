"""attnscope_triton::backward on CPU tensors.

test_triton.py runs this file with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import math

import pytest
import torch
from backward_cases import CASES, backward_call, backward_op
from backward_reference import assert_gradients_match, gradients, upstream
from helpers import MASKS, Target

from attnscope.triton.interpreter import INTERPRETED

assert INTERPRETED, "set TRITON_INTERPRET=1"

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TARGET = Target("triton", "cpu", FP16)
# Cases that do not repeat a path of the kernels, nor take seconds in the interpreter.
CASE_IDS = (
    "causal_is_aligned_to_the_bottom_right-200-72",
    "band_that_starts_after_the_first_tile",
    "keys_that_no_query_sees_have_no_gradient",
    "zero_length_segments-64",
    "batch_of_empty_segments",
    "empty_dimension-0-3-3",
    "empty_dimension-1-0-3",
    "empty_dimension-1-3-0",
    "dout_of_any_layout-last dimension strided",
    "dout_of_any_layout-rows not aligned",
    "rows_past_the_last_segment_do_not_leak-nan",
    "segments_do_not_see_each_other-inf",
    "rubbish_in_cu_seqlens_stays_in_bounds--7-10-1073741824-64",
    "lengths_beyond_max_seqlen_are_cut",
    "any_finite_scale-0.0",
    "any_finite_scale--0.3",
)
QUICK = [case for case in CASES if case.id in CASE_IDS]
assert len(QUICK) == len(CASE_IDS)
# Head dims padded to each width, with different paddings of q k^T and of p v.
HEAD_DIMS = ((8, 8), (64, 96), (256, 8), (8, 256))

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: log2(0), inf


@pytest.mark.parametrize("case", QUICK)
def test_behaviour(case):
    case(TARGET)


@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask):
    assert_gradients_match(TARGET, *TARGET.qkv(1, 150, 100, 2, 1, 24), **MASKS[mask])


@pytest.mark.parametrize("mask", ["full", "causal", "band"])
def test_one_query(mask):
    assert_gradients_match(TARGET, *TARGET.qkv(1, 1, 150, 2, 1, 24), **MASKS[mask])


@pytest.mark.parametrize("mask", ["full", "causal-band"])
def test_packed_batches(mask):
    lengths = [(65, 65), (1, 130), (0, 9), (140, 30), (7, 0)]
    bounds = [torch.tensor([0, *x]).cumsum(0) for x in zip(*lengths, strict=True)]
    cu_q, cu_k = (TARGET.cu_seqlens(*b.tolist()) for b in bounds)
    q = TARGET.randn(int(cu_q[-1]), 2, 40)
    k, v = (TARGET.randn(int(cu_k[-1]), 1, 40) for _ in range(2))
    assert_gradients_match(TARGET, q, k, v, cu_q, cu_k, 140, 130, **MASKS[mask])


@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEAD_DIMS)
def test_head_dims(head_dim, head_dim_v):
    q, k, _ = TARGET.qkv(1, 35, 70, 2, 1, head_dim)
    assert_gradients_match(TARGET, q, k, TARGET.randn(1, 70, 1, head_dim_v), causal=True)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_dtypes(dtype):
    target = Target("triton", "cpu", dtype)
    assert_gradients_match(target, *target.qkv(1, 70, 70, 6, 2, 32), causal=True)


@pytest.mark.parametrize("softcap", [20.0, 1e4], ids=["narrow", "wide"])
def test_softcap_of_large_scores(softcap):
    q, k, v = TARGET.qkv(1, 70, 90, 2, 1, 32)
    assert_gradients_match(TARGET, q * 20, k, v, softcap=softcap)


def test_without_dlse():
    assert_gradients_match(TARGET, *TARGET.qkv(1, 70, 90, 2, 1, 32), use_dlse=False)


def test_a_row_whose_scores_overflow_has_no_gradient():
    target = Target("triton", "cpu", FP32)
    q, v = torch.full((1, 1, 1, 16), -1e19), torch.randn(1, 40, 1, 16)
    k = 1e19 * (1 + v.abs())  # every score is -inf, and so is lse
    for grad in gradients(target, q, k, v, dout=torch.randn(1, 1, 1, 16), scale=1.0):
        assert (grad == 0).all()


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_keys_that_no_query_sees_do_not_leak(poison):
    # Nobody sees keys before 97, but the tile that contains key 97 also contains some of those.
    q, k, v = TARGET.qkv(1, 20, 120, 2, 1)
    dout, dlse = upstream(TARGET, q, v)
    options = {"dout": dout, "dlse": dlse, "window": (3, 2)}
    clean = gradients(TARGET, q, k, v, **options)
    k[:, :97], v[:, :97] = poison, poison
    for got, want in zip(gradients(TARGET, q, k, v, **options), clean, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_queries_without_keys_do_not_leak(poison):
    q, k, v = TARGET.qkv(1, 150, 40, 2, 1)  # queries before 110 see no key
    dout, dlse = upstream(TARGET, q, v)
    options = {"dout": dout, "dlse": dlse, "causal": True}
    clean = gradients(TARGET, q, k, v, **options)
    q[:, :110], dout[:, :110], dlse[..., :110] = poison, poison, poison
    for got, want in zip(gradients(TARGET, q, k, v, **options), clean, strict=True):
        assert torch.equal(got, want)


def test_every_element_is_written():
    cu = TARGET.cu_seqlens(0, 30, 30, 60)
    packed = [TARGET.randn(70, 2, 32) for _ in range(3)]
    for tensors, packing in ((TARGET.qkv(1, 33, 20, 2, 2, 32), ()), (packed, (cu, cu, 30, 30))):
        dout, _ = upstream(TARGET, tensors[0], tensors[2])
        clean = gradients(TARGET, *tensors, *packing, dout=dout)
        for _ in range(2):
            rubbish = [torch.full_like(t, math.nan) for t in tensors for _ in range(2)]
            rubbish.append(torch.full((2 * 1024,), math.nan))
            del rubbish  # the allocator gives its memory to the outputs and to the workspace
            for got, want in zip(
                gradients(TARGET, *tensors, *packing, dout=dout), clean, strict=True
            ):
                assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["packed with dlse"])
def test_opcheck(name):
    args, kwargs = backward_call(TARGET, name)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(backward_op(TARGET), args, kwargs, test_utils=tests)
