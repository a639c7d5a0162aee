"""The forward op under autograd, forward mode, torch.func, autocast and modes."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from helpers import Target
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from attnscope import attention, attention_varlen, autograd

TARGET = Target(None, "cpu", torch.float32)
OP = TARGET.op
BF16 = torch.bfloat16


@pytest.fixture
def qkv():
    return TARGET.qkv(1, 6, 6, 2, 2, 16)


def call_op(q, k, v):
    return OP(q, k, v, scale=0.25)[0]


CALLS = {"attention": attention, "the op": call_op}


@pytest.fixture(params=CALLS)
def call(request):
    return CALLS[request.param]


def needs_grad(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()


@pytest.mark.parametrize("place", range(3))
def test_the_output_needs_a_gradient_where_an_input_does(call, qkv, place):
    inputs = list(qkv)
    assert not call(*inputs).requires_grad
    inputs[place] = needs_grad(inputs[place])
    out = call(*inputs)
    assert out.requires_grad and torch.equal(out, call(*qkv))
    with torch.no_grad():
        assert not call(*inputs).requires_grad
    with torch.inference_mode():
        assert call(*inputs).is_inference()
    out.sum().backward()
    assert [x.grad is not None for x in inputs] == [i == place for i in range(3)]


def test_a_parameter_needs_a_gradient(call, qkv):
    q, k, v = qkv
    assert call(torch.nn.Parameter(q), k, v).requires_grad


def test_what_the_backward_needs_is_saved():
    q, k, v = TARGET.randn(9, 2, 16), TARGET.randn(9, 2, 16), TARGET.randn(9, 2, 16)
    cu = TARGET.cu_seqlens(0, 4, 9)
    q.requires_grad_()
    out, lse = attention_varlen(q, k, v, cu, cu, 5, 5, causal=True, softcap=3.0, return_lse=True)
    node = out.grad_fn
    saved = node.saved_tensors
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in (q, k, v, out, lse, cu, cu)]
    options = {"scale": 0.25, "causal": True, "softcap": 3.0}
    assert node.options == options | {"max_seqlen_q": 5, "max_seqlen_k": 5}
    assert node.op is OP


def test_a_changed_input_is_noticed_before_the_backward(qkv):
    q, k, v = qkv
    out = attention(needs_grad(q), k, v)
    k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.grad_fn.saved_tensors  # noqa: B018  the access checks versions


def test_dual_tensors_are_refused(call, qkv):
    q, k, v = qkv
    for grad_mode in (torch.enable_grad, torch.no_grad):
        with grad_mode(), fwAD.dual_level():
            dual = fwAD.make_dual(v, torch.ones_like(v))
            with pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
                call(q, k, dual)
            assert torch.equal(call(q, k, v), call(*qkv))  # without a tangent: fine


def test_jvp_is_refused(call, qkv):
    q, k, v = qkv
    with pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
        torch.func.jvp(lambda a: call(q, k, a), (v,), (torch.ones_like(v),))
    with pytest.raises(NotImplementedError, match="has no"):
        torch.func.jacfwd(lambda a: call(q, k, a))(v)


def test_vjp_returns_the_output_of_the_call(qkv):
    q, k, v = qkv
    out, _ = torch.func.vjp(lambda a: attention(a, k, v), q)
    assert torch.equal(out, attention(q, k, v))
    outer = torch.func.grad(lambda b: torch.func.vjp(lambda a: attention(a, k, b), q)[0].sum())
    assert torch.equal(outer(v), torch.func.grad(lambda b: attention(q, k, b).sum())(v))


def test_func_grad_of_the_op_itself_is_refused(qkv):
    q, k, v = qkv
    with pytest.raises(NotImplementedError, match="no rule for these torch.func transforms"):
        torch.func.grad(lambda a: call_op(a, k, v).sum())(q)


def test_functionalize_passes_the_op(call, qkv):
    assert torch.equal(torch.func.functionalize(call)(*qkv), call(*qkv))


@pytest.mark.parametrize("transform", ["vmap", "vmap of grad"])
def test_vmap_raises_that_there_is_no_rule(call, qkv, transform):
    q, k, v = qkv
    mapped = call
    if transform == "vmap of grad":

        def mapped(q, k, v):
            return torch.func.grad(lambda a: call(a, k, v).sum())(q)

    with pytest.raises(NotImplementedError, match="has no (vmap )?rule"):
        torch.func.vmap(mapped)(*(x.expand(3, *x.shape) for x in qkv))


def test_checkpoint_runs_the_op_again(qkv):
    q, k, v = qkv
    out = checkpoint(attention, needs_grad(q), k, v, use_reentrant=False)
    assert out.requires_grad and torch.equal(out, attention(q, k, v))


def test_inference_tensors_are_taken(call, qkv):
    with torch.inference_mode():
        inputs = [x.clone() for x in qkv]
    assert torch.equal(call(*inputs), call(*qkv))
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        call(needs_grad(qkv[0]), *inputs[1:])  # as torch's attention does


@pytest.mark.parametrize("grad", [False, True])
def test_autocast_casts_calls_of_the_op_too(call, qkv, grad):
    q, k, v = qkv
    want = call(q.to(BF16), k.to(BF16), v.to(BF16))
    with torch.autocast("cpu", BF16):
        out = call(needs_grad(q) if grad else q, k, v.half())
        assert out.requires_grad == grad
        assert call(q.double(), k.double(), v.double()).dtype == torch.float64
    assert out.dtype == BF16
    torch.testing.assert_close(out, call(q.to(BF16), k.to(BF16), v.half().to(BF16)))
    assert want.dtype == BF16


def test_autocast_is_in_the_way_back_to_the_inputs(qkv):
    q, k, v = qkv
    q = needs_grad(q)
    with torch.autocast("cpu", BF16):
        out = attention(q, k, v)
    (cast, _), *_ = out.grad_fn.next_functions
    assert type(cast).__name__ == "ToCopyBackward0" and cast.next_functions[0][0].variable is q


def test_errors_under_autocast_name_the_cast_tensors(qkv):
    q, k, v = qkv
    with torch.autocast("cpu", BF16), pytest.raises(ValueError, match="k must have q's head dim"):
        attention(q, k[..., :8].half(), v)


@pytest.mark.parametrize("grad", [False, True])
def test_dispatch_modes_see_the_op_once(call, qkv, grad):
    seen = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    q, k, v = qkv
    with Recorder():
        call(needs_grad(q) if grad else q, k, v)
    assert seen.count("attnscope.forward.default") == 1


@pytest.mark.parametrize("grad", [False, True])
def test_a_profile_has_one_row_a_call(call, qkv, grad):
    q, k, v = qkv
    q = needs_grad(q) if grad else q
    with torch.profiler.profile() as profile:
        for _ in range(3):
            call(q, k, v)
    rows = [event for event in profile.events() if event.name == "attnscope::forward"]
    assert len(rows) == 3


def test_the_autograd_kernel_and_the_short_cut_save_the_same(qkv):
    q, k, v = qkv
    q = needs_grad(q)
    short, long = attention(q, k, v, scale=0.25), call_op(q, k, v)
    for a, b in zip(short.grad_fn.saved_tensors[:3], long.grad_fn.saved_tensors[:3], strict=True):
        assert a.data_ptr() == b.data_ptr()
    assert short.grad_fn.options == long.grad_fn.options == {"scale": 0.25}
    assert isinstance(short.grad_fn, type(long.grad_fn))
    assert autograd._Forward.__name__ in type(short.grad_fn).__name__
