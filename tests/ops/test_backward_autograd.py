"""Gradients through attention: gradcheck, saved tensors, transforms, autocast, checkpoints."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from backward_reference import leaves, naive, naive_gradients, upstream
from helpers import Target
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from attnscope import attention, attention_varlen

TARGET = Target(None, "cpu", torch.float32)
EXACT = Target(None, "cpu", torch.float64)
BF16 = torch.bfloat16
OP = TARGET.op
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "softcap": {"softcap": 1.5},
    "everything": {"causal": True, "window": (3, -1), "softcap": 2.0, "scale": -0.4},
}


@pytest.fixture
def qkv():
    return TARGET.qkv(1, 6, 6, 2, 2, 16)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 5), (4, 7), (7, 4), (1, 6), (5, 1)])
def test_gradcheck(seqlen_q, seqlen_k, mask):
    inputs = leaves(*EXACT.qkv(2, seqlen_q, seqlen_k, 4, 2, 8))
    assert torch.autograd.gradcheck(
        lambda q, k, v: attention(q, k, v, **MASKS[mask]), inputs, fast_mode=True
    )


def test_gradcheck_of_every_element():
    q, k, _ = EXACT.qkv(1, 4, 5, 2, 1, 8)
    inputs = leaves(q, k, EXACT.randn(1, 5, 1, 16))
    assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, causal=True), inputs)


@pytest.mark.parametrize("mask", MASKS)
def test_gradcheck_of_packed_batches(mask):
    cu_q, cu_k = EXACT.cu_seqlens(0, 0, 3, 8, 8, 10), EXACT.cu_seqlens(0, 2, 2, 6, 9, 12)
    inputs = leaves(EXACT.randn(11, 2, 8), EXACT.randn(13, 1, 8), EXACT.randn(13, 1, 8))
    assert torch.autograd.gradcheck(
        lambda q, k, v: attention_varlen(q, k, v, cu_q, cu_k, 5, 4, **MASKS[mask]),
        inputs,
        fast_mode=True,
    )


@pytest.mark.parametrize("mask", MASKS)
def test_gradients_of_lse(mask):
    # lse is a float32, too coarse for gradcheck.
    q, k, v = EXACT.qkv(2, 7, 5, 4, 2, 8)
    dout, dlse = upstream(EXACT, q, v)
    inputs = leaves(q, k, v)
    out, lse = attention(*inputs, return_lse=True, **MASKS[mask])
    got = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    want = naive_gradients(torch.float64, (q, k, v, dout, dlse), (), **MASKS[mask])
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("place", range(3))
def test_a_gradient_for_each_input_that_needs_one(qkv, place):
    inputs = [x.detach().clone() for x in qkv]
    inputs[place].requires_grad_()
    attention(*inputs).sum().backward()
    all_inputs = leaves(*qkv)
    attention(*all_inputs).sum().backward()
    for i, (one, every) in enumerate(zip(inputs, all_inputs, strict=True)):
        assert one.grad is None if i != place else torch.equal(one.grad, every.grad)


def test_one_tensor_in_three_places():
    x = EXACT.randn(1, 5, 2, 8).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: attention(x, x, x, causal=True), (x,))


def test_parameters_and_hooks(qkv):
    q, k, v = (torch.nn.Parameter(x) for x in qkv)
    scaled = []
    q.register_hook(lambda grad: scaled.append(grad) or grad * 2)
    attention(q, k, v).sum().backward()
    want = leaves(*qkv)
    attention(*want).sum().backward()
    assert torch.equal(q.grad, 2 * want[0].grad) and torch.equal(scaled[0], want[0].grad)


def test_outputs_without_an_upstream_gradient(qkv):
    inputs = leaves(*qkv)
    out, lse = attention(*inputs, return_lse=True)
    grads = torch.autograd.grad(lse.sum(), inputs, retain_graph=True)
    assert (grads[2] == 0).all() and grads[0].abs().max() > 0
    grads = torch.autograd.grad(out.sum(), inputs)
    assert all(g.abs().max() > 0 for g in grads)
    node = attention(*inputs).grad_fn
    assert node.apply(None, None) == (None,) * 7


def test_saved_tensors_are_those_of_the_call_and_freed_after_the_backward(qkv):
    q, k, v = leaves(*qkv)
    out, lse = attention(q, k, v, return_lse=True)
    saved = out.grad_fn.saved_tensors
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in (q, k, v, out, lse)]
    del saved
    doubled = k * 2  # saved by attention alone
    out = attention(q, doubled, v).sum()
    freed = weakref.ref(doubled)
    del doubled
    gc.collect()
    assert freed() is not None
    out.backward()
    gc.collect()
    assert freed() is None
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.backward()


@pytest.mark.parametrize("place", ["q", "k", "v", "out"])
def test_changed_tensors_are_noticed(qkv, place):
    tensors = dict(zip("qkv", (x * 1 for x in leaves(*qkv)), strict=True))
    out = attention(**tensors)
    loss = out.sum()
    (out if place == "out" else tensors[place]).detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_second_derivative_is_refused(qkv):
    inputs = leaves(*qkv)
    (dq,) = torch.autograd.grad(attention(*inputs).sum(), inputs[0], create_graph=True)
    (want,) = torch.autograd.grad(attention(*inputs).sum(), inputs[0])
    assert torch.equal(dq, want)
    with pytest.raises(NotImplementedError, match="attention can be differentiated once. Use"):
        dq.norm().backward()
    other = inputs[0].square().sum()  # a term that has a second derivative must not hide it
    with pytest.raises(NotImplementedError, match="has no derivative"):
        torch.autograd.grad(dq.sum() + other, inputs[0])


def test_torch_func(qkv):
    def loss(q, k, v):
        return attention(q, k, v, causal=True).square().sum()

    inputs = leaves(*qkv)
    want = torch.autograd.grad(loss(*inputs), inputs)
    got = torch.func.grad(loss, argnums=(0, 1, 2))(*qkv)
    out, vjp = torch.func.vjp(lambda *x: attention(*x, causal=True), *qkv)
    for g, p, w in zip(got, vjp(2 * out), want, strict=True):
        assert torch.equal(g, w) and torch.equal(p, w)
    (q, k, v), cu = (x[0] for x in qkv), TARGET.cu_seqlens(0, 6)
    packed = torch.func.grad(lambda a: attention_varlen(a, k, v, cu, cu, 6, 6).sum())(q)
    assert torch.equal(packed, torch.func.grad(lambda a: attention(a, *qkv[1:]).sum())(qkv[0])[0])


def test_torch_func_with_a_second_derivative_or_a_map_is_refused(qkv):
    q, k, v = qkv

    def grad(a):
        return torch.func.grad(lambda a: attention(a, k, v).sum())(a)

    with pytest.raises(NotImplementedError, match="attnscope::backward has no derivative"):
        torch.func.grad(lambda a: grad(a).norm())(q)
    with pytest.raises(NotImplementedError, match="no rule for these torch.func transforms"):
        torch.func.jvp(grad, (q,), (q,))
    for mapped in (torch.func.vmap(grad), torch.func.jacrev(lambda a: attention(a, k, v))):
        with pytest.raises(NotImplementedError, match="has no vmap rule"):
            mapped(q[None] if mapped.__name__ == "grad" else q)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpoints(qkv, use_reentrant):
    inputs, want = leaves(*qkv), leaves(*qkv)

    def layer(q, k, v):
        return attention(q * 2, k, v, causal=True)

    checkpoint(layer, *inputs, use_reentrant=use_reentrant).sum().backward()
    layer(*want).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(inputs, want, strict=True))


@pytest.mark.parametrize("inside", [False, True])
def test_autocast(qkv, inside):
    inputs, want = leaves(*qkv), leaves(*(x.to(BF16) for x in qkv))
    with torch.autocast("cpu", BF16):
        out = attention(*inputs, causal=True)
        if inside:
            out.sum().backward()
    if not inside:
        out.sum().backward()
    attention(*want, causal=True).sum().backward()
    for a, b in zip(inputs, want, strict=True):
        assert a.grad.dtype == torch.float32 and torch.equal(a.grad, b.grad.float())


def test_backward_inside_autocast_of_a_forward_outside(qkv):
    inputs, want = leaves(*qkv), leaves(*qkv)
    out = attention(*inputs)
    with torch.autocast("cpu", BF16):
        out.backward(torch.ones_like(out))
    attention(*want).backward(torch.ones_like(out))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(inputs, want, strict=True))


def deterministic_of(loss, *inputs, transform=None) -> list[bool]:
    """The option of each backward call of loss(*inputs)."""
    seen = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.attnscope.backward.default:
                seen.append(kwargs.get("deterministic", False))
            return func(*args, **(kwargs or {}))

    with Recorder():
        if transform:
            transform(loss)(*inputs)
        else:
            loss(*inputs).backward()
    return seen


@pytest.mark.parametrize("asked", [False, True])
def test_deterministic_reaches_the_backward(qkv, asked):
    def loss(q, k, v):
        return attention(q, k, v, deterministic=asked).sum()

    def packed(q, k, v):
        cu = TARGET.cu_seqlens(0, 6)
        rows = (x[0] for x in (q, k, v))
        return attention_varlen(*rows, cu, cu, 6, 6, deterministic=asked).sum()

    inputs = leaves(*qkv)
    assert deterministic_of(loss, *inputs) == [asked]
    assert deterministic_of(packed, *inputs) == [asked]
    assert deterministic_of(loss, *(torch.nn.Parameter(x) for x in qkv)) == [asked]
    assert deterministic_of(loss, *qkv, transform=torch.func.grad) == [asked]
    with torch.autocast("cpu", BF16):
        assert deterministic_of(loss, *inputs) == [asked]

    def mixed(q, k, v):
        return loss(q, k, v) + attention(q, k, v).sum()

    assert sorted(deterministic_of(mixed, *inputs)) == [False, asked]


def test_deterministic_algorithms_of_torch_reach_the_backward(qkv):
    torch.use_deterministic_algorithms(True)
    try:
        assert deterministic_of(lambda *x: attention(*x).sum(), *leaves(*qkv)) == [True]
    finally:
        torch.use_deterministic_algorithms(False)
    assert deterministic_of(lambda *x: attention(*x).sum(), *leaves(*qkv)) == [False]


def test_training_step_of_a_small_model():
    torch.manual_seed(1)
    layer = torch.nn.Linear(16, 3 * 32)
    x = torch.randn(2, 9, 16)

    def loss(core):
        layer.zero_grad()
        q, k, v = (y.unflatten(-1, (2, 16)) for y in layer(x).chunk(3, -1))
        core(q, k, v).square().sum().backward()
        return [p.grad.clone() for p in layer.parameters()]

    got = loss(lambda q, k, v: attention(q, k, v, causal=True))
    want = loss(lambda q, k, v: naive(q, k, v, causal=True)[0])
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)
