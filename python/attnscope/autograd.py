"""Autograd of the forward ops: a hand-written kernel on the Autograd key.

torch.library.register_autograd costs 5 us per call if no tensor needs a gradient and 45 us
otherwise, and it silently drops forward-mode tangents. This kernel makes two checks, then
redispatches below autograd or through an autograd.Function.
"""

# mypy: disallow-untyped-calls=False
from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

Result = tuple[Tensor, Tensor]

below_autograd = torch._C._AutoDispatchBelowAutograd
_AFTER_AUTOGRAD = torch._C._after_autograd_keyset
_transforms_are_active = torch._C._are_functorch_transforms_active


def register_autograd_kernel(op: Any, library: torch.library.Library, *keys: str) -> None:
    """Register the autograd kernel of a forward op on dispatch keys, such as "Autograd"."""

    def kernel(keyset: Any, q: Tensor, k: Tensor, v: Tensor, *cu: Any, **options: Any) -> Result:
        if forward_ad._current_level >= 0 and _has_tangent(q, k, v):
            _refuse_forward_mode(op)
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            if _transforms_are_active():
                raise NotImplementedError(
                    f"{op.name()} has no rule for these torch.func transforms. Call "
                    "attnscope.attention, inside torch.func.grad or torch.func.vjp alone"
                )
            return _Forward.apply(op, keyset, options, q, k, v, *cu)
        return op.redispatch(keyset & _AFTER_AUTOGRAD, q, k, v, *cu, **options)

    for key in keys:
        library.impl(op, kernel, key, with_keyset=True)


def apply_with_grad(op: Any, tensors: tuple[Tensor, ...], options: dict[str, Any]) -> Result:
    """(out, lse) of a forward op that needs a gradient, without a dispatch to the Autograd key.

    `tensors` are q, k, v, or these and both cu_seqlens, none with a tangent, outside torch.func
    transforms and autocast.
    """
    return _apply(op, None, options, *tensors)


def apply_functional(op: Any, tensors: tuple[Tensor | None, ...], options: dict[str, Any]) -> Any:
    """Call a forward op inside torch.func transforms: (out, lse).

    `tensors` are q, k, v, cu_seqlens_q, cu_seqlens_k.
    """
    top = torch._C._functorch.peek_interpreter_stack()
    if top is not None and top.key() == torch._C._functorch.TransformType.Functionalize:
        return op(*tensors, **options)  # it has no rule for autograd functions
    return _FunctionalForward.apply(op, options, *tensors)


def _has_tangent(*tensors: Tensor) -> bool:
    return any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def _refuse_forward_mode(op: Any) -> NoReturn:
    raise NotImplementedError(
        f"{op.name()} has no forward-mode derivative (torch.func.jvp, dual tensors). Use "
        "torch.nn.functional.scaled_dot_product_attention under "
        "sdpa_kernel(SDPBackend.MATH) where you need one"
    )


def _refuse_backward(op: Any) -> NoReturn:
    raise NotImplementedError(
        f"{op.name()} has no backward yet; call it under torch.no_grad() or on detached tensors, "
        "or use torch.nn.functional.scaled_dot_product_attention where you need gradients"
    )


def _save(ctx: Any, op: Any, options: dict[str, Any], tensors: Any, result: Result) -> None:
    """Keep what a backward needs: q, k, v, out, lse, cu_seqlens and the options."""
    q, k, v, *cu_seqlens = tensors
    ctx.save_for_backward(q, k, v, *result, *cu_seqlens)
    ctx.op, ctx.options = op, options
    ctx.set_materialize_grads(False)


class _Forward(torch.autograd.Function):
    """Called by the kernel. This old form costs a quarter of one with setup_context."""

    @staticmethod
    def forward(ctx: Any, op: Any, keyset: Any, options: dict[str, Any], *tensors: Any) -> Result:
        with below_autograd():
            if keyset is None:
                result = op(*tensors, **options)
            else:
                result = op.redispatch(keyset & _AFTER_AUTOGRAD, *tensors, **options)
        _save(ctx, op, options, tensors, result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
        _refuse_backward(ctx.op)


# Function.apply is Python around this: it looks for transforms once more, for 2 us.
_apply = super(torch.autograd.Function, _Forward).apply


class _FunctionalForward(torch.autograd.Function):
    """The form that torch.func transforms take."""

    @staticmethod
    def forward(op: Any, options: dict[str, Any], *tensors: Any) -> Result:
        return op(*tensors, **options)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Result) -> None:
        op, options, *tensors = inputs
        _save(ctx, op, options, tensors, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
        _refuse_backward(ctx.op)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        _refuse_forward_mode(ctx.op)

    @staticmethod
    def vmap(info: Any, in_dims: Any, op: Any, *arguments: Any) -> NoReturn:
        refuse_vmap(op)


def refuse_vmap(op: Any) -> NoReturn:
    raise NotImplementedError(
        f"{op.name()} has no vmap rule; give the mapped dimension to the batch dimension instead: "
        "q.flatten(0, 1) and the like"
    )
