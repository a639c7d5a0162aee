"""The CPU kernels against the fp64 reference: every dtype, shape, mask and instruction set."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from forked import run_python
from forward_cases import CASES
from helpers import HEAD_DIMS, LENGTHS, MASKS, Target, assert_matches, assert_workload_passes
from value_cases import VALUE_CASES

from attnscope import attention
from attnscope.numerics import KINDS

FP32, FP64, BF16, FP16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
INF = math.inf
DTYPES = {"fp32": FP32, "fp64": FP64, "bf16": BF16, "fp16": FP16}


@pytest.fixture(params=DTYPES)
def target(request) -> Target:
    return Target("cpu", "cpu", DTYPES[request.param])


@pytest.fixture(params=["fp32", "bf16"])
def common_target(request) -> Target:
    return Target("cpu", "cpu", DTYPES[request.param])


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_dim(target, head_dim):
    shape = {"seqlen_q": 65, "seqlen_k": 130, "heads_q": 2, "heads_kv": 1}
    assert_workload_passes(target, head_dim=head_dim, causal=True, **shape)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (64, 96), (8, 256), (256, 8)])
def test_value_head_dim_of_its_own(target, head_dim, head_dim_v):
    assert_workload_passes(target, seqlen=65, heads=2, head_dim=head_dim, head_dim_v=head_dim_v)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_masks_and_lengths(common_target, seqlen_q, seqlen_k, mask):
    shape = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads_q": 2, "heads_kv": 1}
    assert_workload_passes(common_target, head_dim=24, **shape, **MASKS[mask])


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(1, 1), (5, 5), (6, 2), (8, 1)])
def test_query_heads_share_keys(target, heads_q, heads_kv):
    heads = {"heads_q": heads_q, "heads_kv": heads_kv}
    assert_workload_passes(target, batch=2, seqlen=70, head_dim=32, **heads)


@pytest.mark.parametrize("kind", KINDS)
def test_hard_inputs(target, kind):
    assert_workload_passes(target, kind, batch=2, seqlen=150, heads=2, head_dim=64, causal=True)


@pytest.mark.parametrize("mask", MASKS)
def test_packed_batches(target, mask):
    seqlens = [(65, 65), (1, 130), (0, 9), (100, 30), (7, 0), (64, 128)]
    heads = {"heads_q": 4, "heads_kv": 2}
    assert_workload_passes(target, seqlens=seqlens, head_dim=40, **heads, **MASKS[mask])


@pytest.mark.parametrize("case", CASES)
def test_behaviour(common_target, case):
    case(common_target)


@pytest.mark.parametrize("case", VALUE_CASES)
def test_values(target, case):
    case(target)


@pytest.mark.parametrize("poison", [math.nan, INF])
def test_hidden_keys_of_a_tile_that_others_see_do_not_leak(target, poison):
    q, k, v = target.qkv(1, 100, 100, 2, 1)
    clean, clean_lse = target(q, k, v, causal=True)
    k[:, 50], v[:, 50] = poison, poison
    out, lse = target(q, k, v, causal=True)
    assert torch.equal(out[:, :50], clean[:, :50]) and torch.equal(
        lse[..., :50], clean_lse[..., :50]
    )
    assert out[:, 50:].isnan().all()


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_sixteen_bit_formats_convert_exactly(dtype):
    # With one key, out is v: every bit pattern is converted to fp32 and back.
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    v = patterns.view(dtype).view(1, 1, 256, 256)
    q = torch.zeros(1, 1, 256, 8, dtype=dtype)
    out = attention(q, q, v)
    assert torch.equal(out.isnan(), v.isnan())
    same = (v + 0.0).nan_to_num(0.0, INF, -INF)  # a sum that starts at 0 turns -0 into 0
    assert torch.equal(out.nan_to_num(0.0, INF, -INF).view(torch.int16), same.view(torch.int16))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_sixteen_bit_results_round_to_nearest_even(dtype):
    # With two equal keys, out is the mean: adjacent values give ties and halves of subnormals.
    low = torch.arange(0, 2**15 - 256, dtype=torch.int16).view(dtype)
    low = low[low.isfinite()][: 126 * 256].view(1, 1, -1, 256)
    high = (low.view(torch.int16) + 1).view(dtype)
    q = torch.zeros(1, 1, low.shape[2], 8, dtype=dtype)
    out = attention(q, torch.cat((q, q), 1), torch.cat((low, high), 1))
    assert torch.equal(out, (low.float() / 2 + high.float() / 2).to(dtype))


def test_fp32_exponential_is_accurate():
    # Two keys, scores x and 0: out / (1 - out) of a value 1 beside a 0 is e^x.
    x = -torch.linspace(0, 80, 4096).view(1, 4096, 1, 1)
    q = torch.cat((x, torch.zeros(1, 4096, 1, 7)), -1)
    k = torch.zeros(1, 2, 1, 8)
    k[0, 0, 0, 0] = 1.0
    v = torch.tensor([1.0, 0.0]).view(1, 2, 1, 1).expand(1, 2, 1, 8).contiguous()
    out, lse = attention(q, k, v, scale=1.0, return_lse=True)
    want = torch.sigmoid(x.double()).expand(1, 4096, 1, 8)
    # x itself, scaled by log2(e), is off by up to an ulp, and e^x by x of these.
    assert ((out.double() - want).abs() <= want * 2.0**-24 * (4 + 2 * x.abs())).all()
    assert_matches(out, lse, q, k, v, scale=1.0)


def test_thread_count_does_not_change_the_bits():
    target = Target("cpu", "cpu", FP32)
    q, k, v = target.qkv(2, 200, 200, 3, 3)
    threads = torch.get_num_threads()
    results = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        results.append(target(q, k, v, causal=True)[0])
    torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_offsets_pass_two_to_the_31():
    # The pages in between are never touched, so they use no memory.
    row_stride, rows = 2**31 + 64, 3
    try:
        buffer = torch.empty(rows * row_stride, dtype=BF16)
    except RuntimeError as error:
        pytest.skip(f"no address space for the buffer: {error}")
    q, k, v = (
        buffer.as_strided((1, rows, 2, 64), (0, row_stride, 64, 1), 128 * i).copy_(
            torch.randn(1, rows, 2, 64)
        )
        for i in range(3)
    )
    out, lse = attention(q, k, v, return_lse=True)
    assert_matches(out, lse, *(x.contiguous() for x in (q, k, v)))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_linear_in_sequence_length():
    def peak(seqlen: int) -> int:  # KiB above what was there before
        q = torch.randn(1, seqlen, 1, 8)
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")  # resets the peak
        before = _status("VmRSS")
        attention(q, q, q, window=(256, 256))
        return _status("VmHWM") - before

    peak(1024)
    assert peak(65536) < 64 * 1024  # the scores would take 16 GiB


# In a separate process, whose heap no other test has filled. If each call allocated its scratch,
# the heap would grow by 4 to 10 KiB per call.
TINY_CALLS = """
import torch
from attnscope import attention

def status():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("VmRSS"))

def growth(calls):
    before = status()
    for _ in range(calls):
        attention(q, q, q, causal=True)
    return status() - before

q = torch.randn(1, 4, 2, 64)
growth(500)
print(min(growth(1500) for _ in range(4)))  # thread pools and caches grow once
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_tiny_calls_do_not_fragment_the_heap():
    result = subprocess.run(
        [sys.executable, "-c", TINY_CALLS], capture_output=True, text=True, check=True
    )
    assert int(result.stdout) < 1024, f"grew by {result.stdout} KiB"


def _status(key: str) -> int:
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith(key))


@pytest.mark.skipif("ATTNSCOPE_CPU" in os.environ, reason="in such a run already")
@pytest.mark.parametrize("instructions", ["avx2", "baseline"])
def test_narrower_instruction_sets(instructions):
    tests = (
        "test_every_head_dim or test_packed_batches or test_fp32_exponential or test_hidden_keys"
    )
    selected = f"({tests}) and not fp16 and not 80 and not 104 and not narrower"
    result = run_python(
        "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__, "-k", selected,
        env=os.environ | {"ATTNSCOPE_CPU": instructions},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-3000:]
