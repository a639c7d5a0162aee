"""The Python side of the ops: fakes, autograd, autocast, vmap and FLOP formulas.

The ops themselves are in C++: csrc/binding/library.cpp has their schemas and tensor layouts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from attnscope import _load  # noqa: F401  the ops exist from here on
from attnscope.argument_checks import DTYPES, Dtypes, check_backward, check_forward
from attnscope.attention_flops import backward_flop_formula, forward_flop_formula
from attnscope.autograd import (
    refuse_vmap,
    register_autograd_kernel,
    register_backward_autograd_kernel,
)

AUTOCAST_DEVICES = {"cuda": "AutocastCUDA", "cpu": "AutocastCPU"}


def fake_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    dtypes: Dtypes = DTYPES,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Outputs of a forward call without its values. Raises as check_forward."""
    check_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, dtypes=dtypes, **options)
    return empty_outputs(q, v)


def empty_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialized out [.., Hq, Dv] and lse [B, Hq, Sq] or [Hq, Tq] for q and v of a call."""
    *rows, heads, _ = q.shape
    out = q.new_empty(*rows, heads, v.shape[-1])
    return out, q.new_empty(*rows[:-1], heads, rows[-1], dtype=torch.float32)


def fake_backward(
    *tensors: Tensor | None, dtypes: Dtypes = DTYPES, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a backward call without their values. Raises as check_backward."""
    check_backward(*tensors, dtypes=dtypes, **options)  # type: ignore[arg-type]
    _, q, k, v, *_ = tensors
    assert q is not None and k is not None and v is not None
    return empty_gradients(q, k, v)


def empty_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialized dq, dk and dv: contiguous, in the shapes and dtype of q, k and v."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def cast_for_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as autocast passes them to torch's own attention."""
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(
        t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors
    )


def register(op: Any, library: torch.library.Library, *autograd_keys: str) -> None:
    """Give a forward op its autograd, autocast and vmap kernels and its FLOP formula."""
    register_autograd_kernel(op, library, *autograd_keys)
    for key in AUTOCAST_DEVICES.values():
        library.impl(op, partial(_autocast, op, torch._C.DispatchKeySet(_key(key))), key)
    torch.library.register_vmap(op.name(), lambda *_args, **_options: refuse_vmap(op), lib=library)
    register_flop_formula(op.overloadpacket, get_raw=True)(forward_flop_formula)


def register_backward(
    op: Any, forward_op: Any, library: torch.library.Library, *autograd_keys: str
) -> None:
    """Give a backward op its autograd and vmap kernels and its FLOP formula; name its forward.

    It has no autocast kernel: its tensors have the dtypes of the forward call.
    """
    register_backward_autograd_kernel(op, forward_op, library, *autograd_keys)
    torch.library.register_vmap(op.name(), lambda *_args, **_options: refuse_vmap(op), lib=library)
    register_flop_formula(op.overloadpacket, get_raw=True)(backward_flop_formula)


def _key(name: str) -> Any:
    return getattr(torch._C.DispatchKey, name)


def _autocast(
    op: Any, keyset: Any, q: Tensor, k: Tensor, v: Tensor, *cu_seqlens: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    with torch._C._ExcludeDispatchKeyGuard(keyset):
        return op(*cast_for_autocast(q, k, v), *cu_seqlens, **options)


_LIBRARY = torch.library.Library("attnscope", "IMPL")
torch.library.register_fake("attnscope::forward", fake_forward, lib=_LIBRARY)
register(torch.ops.attnscope.forward.default, _LIBRARY, "Autograd")
torch.library.register_fake("attnscope::backward", fake_backward, lib=_LIBRARY)
register_backward(
    torch.ops.attnscope.backward.default, torch.ops.attnscope.forward.default, _LIBRARY, "Autograd"
)
