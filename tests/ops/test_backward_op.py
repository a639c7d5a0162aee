"""The backward op as torch sees it: schema, fakes, FLOP counts, derivatives of its own."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from backward_cases import BACKWARD_CALLS, backward_call
from backward_reference import gradients, upstream, visible
from helpers import Target
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from attnscope import attention, attention_varlen
from attnscope.attention_flops import backward_flops, forward_flops

TARGET = Target(None, "cpu", torch.float32)
BACKWARD = torch.ops.attnscope.backward.default


@pytest.mark.parametrize("name", BACKWARD_CALLS)
@pytest.mark.parametrize("needs_grad", ["no-grad", "grad-of-dout"])
def test_opcheck(name, needs_grad):
    args, kwargs = backward_call(TARGET, name)
    tests = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    if needs_grad == "grad-of-dout":
        if args[0].numel() == 0:
            return
        args = (args[0].detach().requires_grad_(), *args[1:])
        tests = ["test_autograd_registration"]  # the others would differentiate
    torch.library.opcheck(BACKWARD, args, kwargs | {"deterministic": True}, test_utils=tests)


@pytest.mark.parametrize("name", BACKWARD_CALLS)
def test_opcheck_of_the_forward_with_its_backward(name):
    (_, q, k, v, _, _, _, *cu), options = backward_call(TARGET, name)
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    if any(x.numel() == 0 for x in inputs):
        tests = tests[:2]  # the third compares gradients that no element depends on
    forward = torch.ops.attnscope.forward.default
    torch.library.opcheck(
        forward, (*inputs, *cu), options, test_utils=(*tests, "test_autograd_registration")
    )


@pytest.mark.parametrize("name", BACKWARD_CALLS)
def test_fake_returns_shape_strides_dtype_and_device(name):
    args, kwargs = backward_call(TARGET, name)
    real = BACKWARD(*args, **kwargs)
    mode = FakeTensorMode()
    fake = BACKWARD(*(mode.from_tensor(x) if x is not None else None for x in args), **kwargs)
    for r, f, x in zip(real, fake, args[1:4], strict=True):
        assert (r.shape, r.stride(), r.dtype, r.device) == (f.shape, f.stride(), f.dtype, f.device)
        assert (r.shape, r.dtype) == (x.shape, x.dtype) and r.is_contiguous()


def test_gradients_do_not_alias_inputs():
    args, kwargs = backward_call(TARGET, "plain with dlse")
    before = [x.clone() for x in args]
    for grad in BACKWARD(*args, **kwargs):
        grad.fill_(7.0)
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True))


def test_tensors_of_any_layout_are_read():
    (dout, q, k, v, out, lse, dlse), kwargs = backward_call(TARGET, "plain with dlse")
    want = BACKWARD(dout, q, k, v, out, lse, dlse, **kwargs)
    strided = [x.mT.contiguous().mT for x in (dout, q, k, v, out, lse, dlse)]
    assert not any(x.is_contiguous() for x in strided)
    for g, w in zip(BACKWARD(*strided, **kwargs), want, strict=True):
        assert torch.equal(g, w)
    constant = torch.full((), 0.25).expand(lse.shape)
    for g, w in zip(
        BACKWARD(dout, q, k, v, out, lse, constant, **kwargs),
        BACKWARD(dout, q, k, v, out, lse, constant.contiguous(), **kwargs),
        strict=True,
    ):
        assert torch.equal(g, w)


def test_no_dlse_is_a_dlse_of_zeros():
    (dout, q, k, v, out, lse, _), kwargs = backward_call(TARGET, "plain")
    want = BACKWARD(dout, q, k, v, out, lse, torch.zeros_like(lse), **kwargs)
    for g, w in zip(BACKWARD(dout, q, k, v, out, lse, **kwargs), want, strict=True):
        assert torch.equal(g, w)


def test_every_element_is_written_into_poisoned_memory():
    (q, k, v), dout = TARGET.qkv(2, 70, 90, 4, 2, 16), TARGET.randn(2, 70, 4, 16)
    cu = TARGET.cu_seqlens(0, 30, 30, 60)
    want = gradients(TARGET, q, k, v, dout=dout, window=(3, 3))
    torch.utils.deterministic.fill_uninitialized_memory, before = (
        True,
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True)  # torch.empty then gives NaN
    try:
        got = gradients(TARGET, q, k, v, dout=dout, window=(3, 3))
        packed = gradients(TARGET, q[0], k[0], v[0], cu, cu, 30, 30, dout=dout[0])
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    assert all(g.isfinite().all() and (g[60:] == 0).all() for g in packed)


def test_the_op_has_no_derivative():
    args, kwargs = backward_call(TARGET, "plain")
    for place in (0, 1, 4):
        inputs = list(args)
        inputs[place] = inputs[place].detach().requires_grad_()
        dq, _, _ = BACKWARD(*inputs, **kwargs)
        assert dq.requires_grad and torch.equal(dq, BACKWARD(*args, **kwargs)[0])
        with pytest.raises(NotImplementedError, match="attnscope::backward has no derivative: att"):
            dq.sum().backward()
        with torch.no_grad():
            assert not BACKWARD(*inputs, **kwargs)[0].requires_grad


def test_the_op_has_no_forward_mode_derivative_and_no_vmap_rule():
    args, kwargs = backward_call(TARGET, "plain")
    dout, *rest = args
    with fwAD.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        BACKWARD(fwAD.make_dual(dout, dout), *rest, **kwargs)
    with pytest.raises(NotImplementedError, match="attnscope::backward has no vmap rule"):
        torch.func.vmap(lambda x: BACKWARD(x, *rest, **kwargs))(dout[None])


def test_the_op_needs_no_autocast():
    args, kwargs = backward_call(TARGET, "plain")
    want = BACKWARD(*args, **kwargs)
    with torch.autocast("cpu", torch.bfloat16):
        got = BACKWARD(*args, **kwargs)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("path", ["attention", "the op"])
def test_dispatch_modes_see_each_op_once(path):
    seen = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    q, k, v = TARGET.qkv(1, 6, 6, 2, 2, 16)
    q.requires_grad_()
    with Recorder():
        call = attention if path == "attention" else TARGET.op
        out = call(q, k, v, scale=0.25)
        (out if path == "attention" else out[0]).sum().backward()
    assert seen.count("attnscope.forward.default") == seen.count("attnscope.backward.default") == 1


def test_a_profile_has_one_row_a_call():
    q, k, v = TARGET.qkv(1, 6, 6, 2, 2, 16)
    q.requires_grad_()
    with torch.profiler.profile() as profile:
        for _ in range(3):
            attention(q, k, v).sum().backward()
    assert len([e for e in profile.events() if e.name == "attnscope::backward"]) == 3


def test_flops_count_five_products_over_the_visible_pairs():
    assert backward_flops([(4, 4)], 1, 64, 64) == 2.5 * forward_flops([(4, 4)], 1, 64, 64)
    for causal, window in itertools.product((False, True), ((-1, -1), (3, 2))):
        segments = [(5, 9), (8, 3), (0, 4)]
        pairs = sum(int(visible(sq, sk, causal, window).sum()) for sq, sk in segments)
        flops = backward_flops(segments, 4, 16, 24, causal=causal, window=window)
        assert flops == 2 * 4 * pairs * (3 * 16 + 2 * 24)


def test_flop_counter_counts_forward_and_backward():
    q, k, v = (x.requires_grad_() for x in TARGET.qkv(2, 6, 9, 4, 2, 16))
    cu = TARGET.cu_seqlens(0, 2, 2, 6)
    with FlopCounterMode(display=False) as counter:
        attention(q, k, v, causal=True).sum().backward()
        attention_varlen(q[0], k[0], v[0], cu, cu, 4, 4, window=(1, 0)).sum().backward()
    dense, packed = [(6, 9)] * 2, [(2, 2), (0, 0), (4, 4)]
    assert counter.get_total_flops() == 3.5 * (
        forward_flops(dense, 4, 16, 16, causal=True)
        + forward_flops(packed, 4, 16, 16, window=(1, 0))
    )
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(x.detach()) for x in (q[0], k[0], v[0])]
    fake_cu = mode.from_tensor(cu)
    with mode, FlopCounterMode(display=False) as counter:
        fakes[0].requires_grad_()
        attention_varlen(*fakes, fake_cu, fake_cu, 4, 4).sum().backward()
    assert counter.get_total_flops() == 3.5 * forward_flops([(4, 4)] * 3, 4, 16, 16)


def test_upstream_gradient_of_lse_alone():
    q, k, v = TARGET.qkv(1, 7, 9, 2, 1, 16)
    dout, dlse = upstream(TARGET, q, v)
    both = gradients(TARGET, q, k, v, dout=dout, dlse=dlse)
    of_out = gradients(TARGET, q, k, v, dout=dout)
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    _, lse = attention(*inputs, return_lse=True)
    of_lse = torch.autograd.grad(lse, inputs, dlse)
    assert (of_lse[2] == 0).all()
    for a, b, c in zip(both, of_out, of_lse, strict=True):
        torch.testing.assert_close(a, b + c)
