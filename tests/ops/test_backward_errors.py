"""Refusals of the backward op: by the C++ checks, and by the checks that fakes use."""

from __future__ import annotations

import pytest
import torch
from backward_cases import backward_call
from helpers import Target
from torch._subclasses.fake_tensor import FakeTensorMode

TARGET = Target(None, "cpu", torch.float32)
BACKWARD = torch.ops.attnscope.backward.default
NAMES = ("dout", "q", "k", "v", "out", "lse", "dlse", "cu_seqlens_q", "cu_seqlens_k")

# What is changed in a good call -> the message of the C++ op, the message under fakes.
REFUSALS = {
    "dout has another shape": (
        {"dout": lambda t: t[:, :-1]},
        r"dout must have shape \[2, 6, 4, 16\], got \[2, 5, 4, 16\]",
        r"dout must have shape \[2, 6, 4, 16\], got \[2, 5, 4, 16\]",
    ),
    "dout has another rank": (
        {"dout": lambda t: t[0]},
        r"dout must have shape \[2, 6, 4, 16\], got \[6, 4, 16\]",
        "dout must have 4 dimensions, got shape",
    ),
    "dout has another dtype": (
        {"dout": lambda t: t.double()},
        "dout must have dtype float32",
        "dout must have dtype torch.float32, got torch.float64",
    ),
    "out has another shape": (
        {"out": lambda t: t.transpose(1, 2)},
        r"out must have shape \[2, 6, 4, 16\], got \[2, 4, 6, 16\]",
        r"out must have shape \[2, 6, 4, 16\], got \[2, 4, 6, 16\]",
    ),
    "out has another dtype": (
        {"out": lambda t: t.half()},
        "out must have dtype float32",
        "out must have dtype torch.float32, got torch.float16",
    ),
    "lse has the layout of rows": (
        {"lse": lambda t: t.transpose(1, 2)},
        r"lse must have shape \[2, 4, 6\], got \[2, 6, 4\]",
        r"lse must have shape \[2, 4, 6\], got \[2, 6, 4\]",
    ),
    "lse is not float32": (
        {"lse": lambda t: t.double()},
        "lse must have dtype float32",
        "lse must have dtype torch.float32, got torch.float64",
    ),
    "dlse has another shape": (
        {"dlse": lambda t: t.sum()},
        r"dlse must have shape \[2, 4, 6\], got \[\]",
        r"dlse must have 3 dimensions, got shape \[\]",
    ),
    "dlse is not float32": (
        {"dlse": lambda t: t.bfloat16()},
        "dlse must have dtype float32",
        "dlse must have dtype torch.float32, got torch.bfloat16",
    ),
    "k has another dtype": (
        {"k": lambda t: t.double()},
        "q, k, v must have one dtype",
        "k must have q's dtype torch.float32, got torch.float64",
    ),
    "v has another batch": (
        {"v": lambda t: t[:1]},
        "v must have k's size 2 in dimension 0, got 1",
        "v must have k's shape",
    ),
    "one cu_seqlens": (
        {"cu_seqlens_q": lambda _: torch.zeros(2, dtype=torch.int32)},
        "cu_seqlens_q, cu_seqlens_k must be given together",
        "q must have 3 dimensions",
    ),
    "window": ({"window_left": lambda _: -2}, "window_left must be >= -1", "window must be"),
    "softcap": ({"softcap": lambda _: -1.0}, "softcap must be >= 0", "softcap must be 0"),
    "scale": ({"scale": lambda _: 1e-40}, "scale must be 0 or a normal", "scale must be 0 or a"),
    "variant": (
        {"variant": lambda _: 80},
        "variant must be 0 on the CPU, got 80",
        "variant must be one of 0, got 80",
    ),
}


def changed_call(change):
    args, options = backward_call(TARGET, "plain with dlse")
    tensors = dict(zip(NAMES, (*args, None, None), strict=True))
    for name, new in change.items():
        if name in tensors:
            tensors[name] = new(tensors[name])
        else:
            options[name] = new(None)
    return list(tensors.values()), options


@pytest.mark.parametrize("name", REFUSALS)
def test_the_op_names_the_argument(name):
    change, message, _ = REFUSALS[name]
    tensors, options = changed_call(change)
    with pytest.raises(RuntimeError, match=message):
        BACKWARD(*tensors, **options)


@pytest.mark.parametrize("name", REFUSALS)
def test_fakes_name_the_argument(name):
    change, _, message = REFUSALS[name]
    tensors, options = changed_call(change)
    mode = FakeTensorMode()
    fakes = [t if t is None else mode.from_tensor(t) for t in tensors]
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        BACKWARD(*fakes, **options)


def test_16_bit_tensors_name_the_dtype_of_q():
    args, options = backward_call(Target(None, "cpu", torch.bfloat16), "plain")
    dout, *rest = args
    with pytest.raises(RuntimeError, match="dout must have q's dtype"):
        BACKWARD(dout.float(), *rest, **options)


def test_packed_calls_check_their_shapes():
    args, options = backward_call(TARGET, "packed with dlse")
    dout, q, k, v, out, lse, dlse, *cu = args
    with pytest.raises(RuntimeError, match=r"lse must have shape \[4, 10\], got \[1, 4, 10\]"):
        BACKWARD(dout, q, k, v, out, lse[None], dlse, *cu, **options)
    with pytest.raises(RuntimeError, match="max_seqlen_q, max_seqlen_k must be >= 0"):
        BACKWARD(*args, **(options | {"max_seqlen_q": -1}))
    with pytest.raises(RuntimeError, match="cu_seqlens_k must have dtype int32"):
        BACKWARD(dout, q, k, v, out, lse, dlse, cu[0], cu[1].long(), **options)


def test_a_refused_call_changes_nothing():
    args, options = backward_call(TARGET, "plain")
    before = [t.clone() for t in args if t is not None]
    with pytest.raises(RuntimeError):
        BACKWARD(*args, **(options | {"window_left": -5}))
    assert all(torch.equal(a, b) for a, b in zip(before, args, strict=False))


def test_inputs_that_autograd_gives_are_accepted():
    """The engine's own check refuses an upstream gradient of another shape or dtype."""
    q, k, v = (x.requires_grad_() for x in TARGET.qkv(1, 5, 5, 2, 2, 16))
    from attnscope import attention

    out = attention(q, k, v)
    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        out.backward(torch.ones(1, 5, 2, 8))
