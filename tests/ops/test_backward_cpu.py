"""The CPU backward against fp64 autograd: every dtype, shape, mask and instruction set."""

from __future__ import annotations

import math
import os
import sys

import pytest
import torch
from backward_cases import CASES
from backward_reference import (
    assert_close,
    assert_gradients_match,
    gradients,
    leaves,
    naive_gradients,
    upstream,
    visible,
)
from forked import run_python
from helpers import HEAD_DIMS, LENGTHS, MASKS, Target

from attnscope import attention

FP32, FP64, BF16, FP16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
DTYPES = {"fp32": FP32, "fp64": FP64, "bf16": BF16, "fp16": FP16}
BACKWARD = torch.ops.attnscope.backward.default


@pytest.fixture(params=DTYPES)
def target(request) -> Target:
    return Target("cpu", "cpu", DTYPES[request.param])


@pytest.fixture(params=["fp32", "bf16"])
def common_target(request) -> Target:
    return Target("cpu", "cpu", DTYPES[request.param])


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_dim(target, head_dim):
    assert_gradients_match(target, *target.qkv(1, 65, 130, 2, 1, head_dim), causal=True)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (64, 96), (8, 256), (256, 8)])
def test_value_head_dim_of_its_own(target, head_dim, head_dim_v):
    q, k, _ = target.qkv(1, 65, 65, 2, 2, head_dim)
    assert_gradients_match(target, q, k, target.randn(1, 65, 2, head_dim_v))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_masks_and_lengths(common_target, seqlen_q, seqlen_k, mask):
    qkv = common_target.qkv(1, seqlen_q, seqlen_k, 2, 1, 24)
    assert_gradients_match(common_target, *qkv, **MASKS[mask])


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(1, 1), (5, 5), (6, 2), (8, 1)])
def test_query_heads_share_keys(target, heads_q, heads_kv):
    qkv = target.qkv(2, 70, 70, heads_q, heads_kv, 32)
    assert_gradients_match(target, *qkv, use_dlse=False)


@pytest.mark.parametrize("mask", MASKS)
def test_packed_batches(target, mask):
    lengths = [(65, 65), (1, 130), (0, 9), (100, 30), (7, 0), (64, 128)]
    bounds = [torch.tensor([0, *x]).cumsum(0) for x in zip(*lengths, strict=True)]
    cu_q, cu_k = (target.cu_seqlens(*b.tolist()) for b in bounds)
    q = target.randn(int(cu_q[-1]), 4, 40)
    k, v = (target.randn(int(cu_k[-1]), 2, 40) for _ in range(2))
    assert_gradients_match(target, q, k, v, cu_q, cu_k, 100, 130, **MASKS[mask])


@pytest.mark.parametrize("case", CASES)
def test_behaviour(common_target, case):
    case(common_target)


@pytest.mark.parametrize("magnitude", [30.0, 1e3, 1e18])
def test_equal_scores_of_any_size_have_equal_weights(magnitude):
    # e^(score - lse) would be lost in the rounding of so large an lse.
    target = Target("cpu", "cpu", FP32)
    q, v = torch.full((1, 5, 1, 8), magnitude), torch.randn(1, 70, 1, 8)
    dout = torch.randn(1, 5, 1, 8)
    _, _, dv = gradients(target, q, torch.full_like(v, magnitude), v, dout=dout, scale=1.0)
    torch.testing.assert_close(dv, (dout.sum(1, keepdim=True) / 70).expand_as(dv))


@pytest.mark.parametrize("dtype", [FP32, FP64], ids=["fp32", "fp64"])
def test_a_part_of_the_keys_with_the_lse_of_all(dtype):
    # Keys spread over two calls, as over two devices: out and lse are those of the whole.
    target = Target("cpu", "cpu", dtype)
    q, k, v = target.qkv(1, 70, 150, 4, 2)
    dout, _ = upstream(target, q, v)
    out, lse = target(q, k, v)
    parts = [
        BACKWARD(dout, q, k[:, keys], v[:, keys], out, lse, scale=0.125)
        for keys in (slice(0, 60), slice(60, 150))
    ]
    (dq_a, dk_a, dv_a), (dq_b, dk_b, dv_b) = parts
    got = (dq_a + dq_b, torch.cat((dk_a, dk_b), 1), torch.cat((dv_a, dv_b), 1))
    tensors = (q, k, v, dout, torch.zeros_like(lse))
    want = naive_gradients(FP64, tensors, ())
    assert_close(got, want, naive_gradients(FP32, tensors, ()), FP32) if dtype == FP32 else None
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.double(), w, atol=2e-6, rtol=2e-6)  # lse is a float32


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("place", ["q", "k", "v", "dout"])
def test_nan_stays_where_it_is_seen(common_target, place, poison):
    t = common_target
    tensors = dict(zip("qkv", t.qkv(1, 100, 120, 2, 1), strict=True))
    tensors["dout"] = t.randn(1, 100, 2, 64)
    options = {"window": (20, 10)}
    clean = gradients(t, **tensors, **options)
    tensors[place][:, 50] = poison
    dirty = gradients(t, **tensors, **options)
    mask = visible(100, 120, False, (20, 10))
    if place in ("q", "dout"):
        rows = torch.arange(100) == 50
    else:
        rows = mask[:, 50]
    keys = mask[rows].any(0)  # those that a doubtful query sees
    for grad, want, reached in zip(dirty, clean, (rows, keys, keys), strict=True):
        assert torch.equal(grad[:, ~reached], want[:, ~reached])
    dq, dk, dv = dirty
    if place in ("k", "q"):
        assert dq[:, rows].isnan().all() and dk[:, keys].isnan().all()
    elif place == "dout":
        assert not dv[:, keys].isfinite().any() and dk[:, keys].isnan().all()
    else:
        assert dq[:, rows].isnan().all() and torch.equal(dv, clean[2])


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_keys_that_no_query_sees_do_not_leak(common_target, poison):
    # Nobody sees keys before 97, but the tile that contains key 97 also contains some of those.
    t = common_target
    q, k, v = t.qkv(1, 20, 120, 2, 1)
    dout, dlse = upstream(t, q, v)
    clean = gradients(t, q, k, v, dout=dout, dlse=dlse, window=(3, 2))
    k[:, :97], v[:, :97] = poison, poison
    for g, w in zip(gradients(t, q, k, v, dout=dout, dlse=dlse, window=(3, 2)), clean, strict=True):
        assert torch.equal(g, w)


def test_queries_without_keys_do_not_leak():
    t = Target("cpu", "cpu", FP32)
    q, k, v = t.qkv(1, 100, 60, 2, 1)
    dout, dlse = upstream(t, q, v)
    clean = gradients(t, q, k, v, dout=dout, dlse=dlse, causal=True)
    q[:, :40], dout[:, :40], dlse[..., :40] = (math.nan,) * 3
    dirty = gradients(t, q, k, v, dout=dout, dlse=dlse, causal=True)
    for g, w in zip(dirty, clean, strict=True):
        assert torch.equal(g, w)
    assert (dirty[0][:, :40] == 0).all()


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_thread_count_does_not_change_the_bits(dtype):
    target = Target("cpu", "cpu", dtype)
    q, k, v = target.qkv(2, 200, 200, 3, 1)
    dout, dlse = upstream(target, q, v)
    threads = torch.get_num_threads()
    results = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        results.append(gradients(target, q, k, v, dout=dout, dlse=dlse, causal=True))
    torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_offsets_pass_two_to_the_31():
    # The pages in between are never touched, so they use no memory.
    row_stride, rows = 2**31 + 64, 3
    try:
        buffer = torch.empty(rows * row_stride, dtype=BF16)
    except RuntimeError as error:
        pytest.skip(f"no address space for the buffer: {error}")
    q, k, v, dout = (
        buffer.as_strided((1, rows, 2, 64), (0, row_stride, 64, 1), 128 * i).copy_(
            torch.randn(1, rows, 2, 64)
        )
        for i in range(4)
    )
    out, lse = attention(q, k, v, return_lse=True)
    got = BACKWARD(dout, q, k, v, out, lse, scale=0.125)
    want = BACKWARD(*(x.contiguous() for x in (dout, q, k, v)), out, lse, scale=0.125)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_linear_in_sequence_length():
    def status(key: str) -> int:
        with open("/proc/self/status") as f:
            return next(int(line.split()[1]) for line in f if line.startswith(key))

    def peak(seqlen: int) -> int:  # KiB above what was there before
        q, k, v = leaves(*(torch.randn(1, seqlen, 1, 8) for _ in range(3)))
        out = attention(q, k, v, window=(256, 256))
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")  # resets the peak
        before = status("VmRSS")
        out.backward(torch.ones_like(out))
        return status("VmHWM") - before

    peak(1024)
    assert peak(65536) < 64 * 1024  # the scores would take 16 GiB


@pytest.mark.skipif("ATTNSCOPE_CPU" in os.environ, reason="in such a run already")
@pytest.mark.parametrize("instructions", ["avx2", "baseline"])
def test_narrower_instruction_sets(instructions):
    tests = "test_every_head_dim or test_packed_batches or test_nan_stays or test_equal_scores"
    selected = f"({tests}) and not fp16 and not 80 and not 104 and not narrower"
    result = run_python(
        "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__, "-k", selected,
        env=os.environ | {"ATTNSCOPE_CPU": instructions},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-3000:]
