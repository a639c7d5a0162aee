"""The op as torch sees it: fakes, compile, autograd, transforms, autocast and FLOP counts."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch._dynamo.testing
from forward_cases import OP_CALLS, op_call
from helpers import Target
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from attnscope import attention, attention_varlen
from attnscope.attention_flops import forward_flops, visible_pairs
from attnscope.bench.workloads import Workload

TARGET = Target(None, "cpu", torch.float32)
FORWARD = TARGET.op


@pytest.mark.parametrize("name", OP_CALLS)
@pytest.mark.parametrize("needs_grad", ["no-grad", "grad-of-q"])
def test_opcheck(name, needs_grad):
    args, kwargs = op_call(TARGET, name)
    tests = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    if needs_grad == "grad-of-q":
        args[0].requires_grad_()
        tests.append("test_autograd_registration")
    torch.library.opcheck(FORWARD, args, kwargs, test_utils=tests)


@pytest.mark.parametrize("name", OP_CALLS)
def test_fake_returns_shape_strides_dtype_and_device(name):
    args, kwargs = op_call(TARGET, name)
    real = FORWARD(*args, **kwargs)
    mode = FakeTensorMode()
    fake = FORWARD(*(mode.from_tensor(x) for x in args), **kwargs)
    for r, f in zip(real, fake, strict=True):
        assert (r.shape, r.stride(), r.dtype, r.device) == (f.shape, f.stride(), f.dtype, f.device)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", OP_CALLS)
def test_compiles_into_one_graph(name, dynamic):
    args, kwargs = op_call(TARGET, name)
    packed = name == "packed"

    def user(q, k, v, *cu):
        q = q * 2
        if packed:
            out, lse = attention_varlen(q, k, v, *cu, 7, 7, causal=True, return_lse=True)
        else:
            out, lse = attention(q, k, v, causal=True, window=(5, -1), return_lse=True)
        return out + 1, lse

    torch._dynamo.reset()
    compiled = torch.compile(user, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for got, want in zip(compiled(*args), user(*args), strict=True):
        assert torch.equal(got, want)


def test_changing_lengths_are_compiled_once_more_only():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention, fullgraph=True, backend=counter)
    for seqlen in (5, 9, 33, 70):
        q, k, v = TARGET.qkv(2, seqlen, seqlen + 3, 4, 2, 16)
        assert torch.equal(compiled(q, k, v), attention(q, k, v))
    assert counter.frame_count <= 2


def test_vmap_raises_that_there_is_no_rule():
    q, k, v = (x.unsqueeze(0).expand(3, -1, -1, -1, -1) for x in TARGET.qkv(1, 4, 4, 2, 2, 16))
    with pytest.raises(NotImplementedError, match="attnscope::forward has no vmap rule"):
        torch.func.vmap(attention)(q, k, v)


def test_autocast_casts_like_torch_does():
    q, k, v = TARGET.qkv(1, 8, 8, 2, 2, 16)
    cu = TARGET.cu_seqlens(0, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = attention(q, k, v.bfloat16(), return_lse=True)
        packed = attention_varlen(q[0], k[0], v[0].half(), cu, cu, 8, 8)
        sdpa = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert (out.dtype, lse.dtype, packed.dtype) == (sdpa.dtype, torch.float32, torch.bfloat16)
    assert torch.equal(out, attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(q.double(), k.double(), v.double()).dtype == torch.float64


def test_outputs_do_not_alias_inputs():
    q, k, v = TARGET.qkv(1, 1, 1, 1, 1, 8)
    before = [x.clone() for x in (q, k, v)]
    out, _ = FORWARD(q, k, v, scale=1.0)
    out.fill_(7.0)
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), before, strict=True))


def test_default_scale_follows_the_true_head_dim():
    q, k, v = TARGET.qkv(1, 5, 6, 1, 1, 40)
    assert torch.equal(attention(q, k, v), attention(q, k, v, scale=40**-0.5))


def test_deterministic_is_accepted_and_changes_nothing():
    q, k, v = TARGET.qkv(1, 5, 6, 1, 1)
    assert torch.equal(attention(q, k, v), attention(q, k, v, deterministic=True))


def test_visible_pairs_are_those_of_the_mask():
    for sq, sk, left, right in itertools.product(
        (0, 1, 4, 7), (0, 1, 5), (-1, 0, 2, 9), (-1, 0, 3)
    ):
        i = torch.arange(sq).unsqueeze(1) + sk - sq
        j = torch.arange(sk).unsqueeze(0)
        mask = torch.ones(sq, sk, dtype=torch.bool)
        if left >= 0:
            mask &= j >= i - left
        if right >= 0:
            mask &= j <= i + right
        assert visible_pairs(sq, sk, left, right) == int(mask.sum()), (sq, sk, left, right)


def test_flops_count_two_products_over_the_visible_pairs():
    assert forward_flops([(4, 4)], 1, 64, 64) == 4096
    assert forward_flops([(4, 4)], 1, 64, 64, causal=True) == 2560
    for causal, window in itertools.product((False, True), ((-1, -1), (3, 2))):
        shape = {"heads_q": 4, "heads_kv": 2, "head_dim": 16, "head_dim_v": 24}
        workload = Workload.of(
            seqlens=[(5, 9), (8, 3), (0, 4)], causal=causal, window=window, **shape
        )
        flops = forward_flops(workload.seqlens, 4, 16, 24, causal=causal, window=window)
        assert flops == workload.flops()


def test_flop_counter_counts_calls():
    def count(call) -> int:
        with FlopCounterMode(display=False) as counter:
            call()
        return counter.get_total_flops()

    q, k, v = TARGET.qkv(2, 6, 9, 4, 2, 16)
    want = forward_flops([(6, 9)] * 2, 4, 16, 16, causal=True)
    assert count(lambda: attention(q, k, v, causal=True)) == want

    (q, k, v, *cu), _ = op_call(TARGET, "packed")
    want = forward_flops([(3, 3), (0, 0), (7, 7)], 4, 16, 16, window=(2, 0))
    assert count(lambda: attention_varlen(q, k, v, *cu, 7, 7, window=(2, 0))) == want

    mode = FakeTensorMode()
    fakes = [mode.from_tensor(x) for x in (q, k, v, *cu)]
    want = forward_flops([(7, 7)] * 3, 4, 16, 16)  # lengths are not known: the longest
    with mode:
        assert count(lambda: attention_varlen(*fakes, 7, 7)) == want
