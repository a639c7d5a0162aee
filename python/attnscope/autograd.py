"""Autograd of the ops: hand-written kernels on the Autograd key.

torch.library.register_autograd costs 5 us per call if no tensor needs a gradient and 45 us
otherwise, and it silently drops forward-mode tangents. These kernels make two checks, then
redispatch below autograd or through an autograd.Function.

The backward of a forward op is the backward op of its namespace, which has no derivative of its
own: it takes part in a graph only to raise when a second derivative is asked for.
"""

# mypy: disallow-untyped-calls=False
from __future__ import annotations

import threading
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

Result = tuple[Tensor, Tensor]
Gradients = tuple[Tensor | None, ...]

below_autograd = torch._C._AutoDispatchBelowAutograd
_AFTER_AUTOGRAD = torch._C._after_autograd_keyset
_transforms_are_active = torch._C._are_functorch_transforms_active
_BACKWARD_OPS: dict[Any, Any] = {}  # by forward op


class _Request(threading.local):
    """What a thread asks of the backwards of its calls; the forward op has no argument for it."""

    deterministic = False


_request = _Request()


def register_autograd_kernel(op: Any, library: torch.library.Library, *keys: str) -> None:
    """Register the autograd kernel of a forward op on dispatch keys, such as "Autograd"."""

    def kernel(keyset: Any, q: Tensor, k: Tensor, v: Tensor, *cu: Any, **options: Any) -> Result:
        if forward_ad._current_level >= 0 and _has_tangent(q, k, v):
            _refuse_forward_mode(op)
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            if _transforms_are_active():
                _refuse_transforms(op)
            return _Forward.apply(op, keyset, options, _request.deterministic, q, k, v, *cu)
        return op.redispatch(keyset & _AFTER_AUTOGRAD, q, k, v, *cu, **options)

    for key in keys:
        library.impl(op, kernel, key, with_keyset=True)


def register_backward_autograd_kernel(
    op: Any, forward_op: Any, library: torch.library.Library, *keys: str
) -> None:
    """Register the autograd kernel of the backward op of `forward_op` on dispatch keys."""

    def kernel(keyset: Any, *tensors: Tensor | None, **options: Any) -> Any:
        given = [t for t in tensors if t is not None]
        if forward_ad._current_level >= 0 and _has_tangent(*given):
            _refuse_forward_mode(op)
        if torch.is_grad_enabled() and any(t.requires_grad for t in given):
            if _transforms_are_active():
                _refuse_transforms(op)
            return _Backward.apply(op, keyset, options, *tensors)
        return op.redispatch(keyset & _AFTER_AUTOGRAD, *tensors, **options)

    for key in keys:
        library.impl(op, kernel, key, with_keyset=True)
    _BACKWARD_OPS[forward_op] = op


def apply_with_grad(op: Any, tensors: tuple[Tensor, ...], options: dict[str, Any]) -> Result:
    """(out, lse) of a forward op that needs a gradient, without a dispatch to the Autograd key.

    `tensors` are q, k, v, or these and both cu_seqlens, none with a tangent, outside torch.func
    transforms and autocast.
    """
    return _apply(op, None, options, False, *tensors)


def apply_functional(
    op: Any,
    tensors: tuple[Tensor | None, ...],
    options: dict[str, Any],
    deterministic: bool = False,
) -> Any:
    """Call a forward op inside torch.func transforms: (out, lse).

    `tensors` are q, k, v, cu_seqlens_q, cu_seqlens_k.
    """
    top = torch._C._functorch.peek_interpreter_stack()
    if top is not None and top.key() == torch._C._functorch.TransformType.Functionalize:
        return op(*tensors, **options)  # it has no rule for autograd functions
    return _FunctionalForward.apply(op, options, deterministic, *tensors)


def call_deterministic(op: Any, tensors: tuple[Any, ...], options: dict[str, Any]) -> Result:
    """Call a forward op whose backward has to be deterministic: (out, lse)."""
    _request.deterministic = True
    try:
        return op(*tensors, **options)
    finally:
        _request.deterministic = False


def _has_tangent(*tensors: Tensor) -> bool:
    return any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def _refuse_forward_mode(op: Any) -> NoReturn:
    raise NotImplementedError(
        f"{op.name()} has no forward-mode derivative (torch.func.jvp, dual tensors). Use "
        "torch.nn.functional.scaled_dot_product_attention under "
        "sdpa_kernel(SDPBackend.MATH) where you need one"
    )


def _refuse_transforms(op: Any) -> NoReturn:
    raise NotImplementedError(
        f"{op.name()} has no rule for these torch.func transforms. Call "
        "attnscope.attention, inside torch.func.grad or torch.func.vjp alone"
    )


def _refuse_second_derivative(op: Any) -> NoReturn:
    raise NotImplementedError(
        f"{op.name()} has no derivative: attention can be differentiated once. Use "
        "torch.nn.functional.scaled_dot_product_attention under "
        "sdpa_kernel(SDPBackend.MATH) where you need a second derivative"
    )


def refuse_vmap(op: Any) -> NoReturn:
    raise NotImplementedError(
        f"{op.name()} has no vmap rule; give the mapped dimension to the batch dimension instead: "
        "q.flatten(0, 1) and the like"
    )


def _save(
    ctx: Any, op: Any, options: dict[str, Any], deterministic: bool, tensors: Any, result: Result
) -> None:
    """Keep what the backward needs: q, k, v, out, lse, cu_seqlens and the options."""
    q, k, v, *cu_seqlens = tensors
    ctx.save_for_backward(q, k, v, *result, *cu_seqlens)
    ctx.op, ctx.options, ctx.deterministic = op, options, deterministic
    ctx.set_materialize_grads(False)


def _backward_call(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
    """(op, tensors, options) of the backward of a saved call."""
    q, k, v, out, lse, *cu_seqlens = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    options = ctx.options
    if ctx.deterministic or torch.are_deterministic_algorithms_enabled():
        options = {**options, "deterministic": True}
    return _BACKWARD_OPS[ctx.op], (dout, q, k, v, out, lse, dlse, *cu_seqlens), options


class _Forward(torch.autograd.Function):
    """Called by the kernel. This old form costs a quarter of one with setup_context."""

    @staticmethod
    def forward(
        ctx: Any, op: Any, keyset: Any, options: dict[str, Any], deterministic: bool, *tensors: Any
    ) -> Result:
        with below_autograd():
            if keyset is None:
                result = op(*tensors, **options)
            else:
                result = op.redispatch(keyset & _AFTER_AUTOGRAD, *tensors, **options)
        _save(ctx, op, options, deterministic, tensors, result)
        return result

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Gradients:  # type: ignore[override]
        if dout is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        op, tensors, options = _backward_call(ctx, dout, dlse)
        # With create_graph the op's autograd kernel notes that there is no derivative.
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            gradients = op(*tensors, **options)
        else:
            with below_autograd():
                gradients = op(*tensors, **options)
        return (None, None, None, None, *gradients, None, None)[: len(ctx.needs_input_grad)]


# Function.apply is Python around this: it looks for transforms once more, for 2 us.
_apply = super(torch.autograd.Function, _Forward).apply


class TracedForward(torch.autograd.Function):
    """The form that compilers take: without a rule for forward mode."""

    @staticmethod
    def forward(op: Any, options: dict[str, Any], deterministic: bool, *tensors: Any) -> Result:
        return op(*tensors, **options)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Result) -> None:
        op, options, deterministic, *tensors = inputs
        _save(ctx, op, options, deterministic, tensors, output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Gradients:  # type: ignore[override]
        if dout is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        op, tensors, options = _backward_call(ctx, dout, dlse)
        gradients = op(*tensors, **options)
        return (None, None, None, *gradients, None, None)[: len(ctx.needs_input_grad)]


class _FunctionalForward(TracedForward):
    """The form that torch.func transforms take."""

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Gradients:  # type: ignore[override]
        if dout is None and dlse is None:
            return (None,) * 8
        op, tensors, options = _backward_call(ctx, dout, dlse)
        return None, None, None, *_FunctionalBackward.apply(op, options, *tensors), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        _refuse_forward_mode(ctx.op)

    @staticmethod
    def vmap(info: Any, in_dims: Any, op: Any, *arguments: Any) -> NoReturn:
        refuse_vmap(op)


class _Backward(torch.autograd.Function):
    """Called by the kernel where something needs a gradient of gradients."""

    @staticmethod
    def forward(ctx: Any, op: Any, keyset: Any, options: dict[str, Any], *tensors: Any) -> Any:
        ctx.op = op
        with below_autograd():
            return op.redispatch(keyset & _AFTER_AUTOGRAD, *tensors, **options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        _refuse_second_derivative(ctx.op)


class _FunctionalBackward(torch.autograd.Function):
    """The same in the form that torch.func transforms take."""

    @staticmethod
    def forward(op: Any, options: dict[str, Any], *tensors: Any) -> Any:
        return op(*tensors, **options)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.op = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        _refuse_second_derivative(ctx.op)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        _refuse_forward_mode(ctx.op)

    @staticmethod
    def vmap(info: Any, in_dims: Any, op: Any, *arguments: Any) -> NoReturn:
        refuse_vmap(op)
