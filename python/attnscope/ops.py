"""The Python side of the ops: argument checks, fakes, autograd, vmap and FLOP formulas.

The C++ op is the op; csrc/binding/library.cpp holds its schema and tensor layouts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils.flop_counter import register_flop_formula

from attnscope import _load  # noqa: F401  the ops exist from here on

# Reads the contents of cu_seqlens on CUDA as well, which waits for the device at every call.
CHECK_CONTENTS = os.environ.get("ATTNSCOPE_CHECK", "") == "1"

MAX_HEAD_DIM = 256
_HALVES = (torch.bfloat16, torch.float16)
_DTYPES = {"cuda": _HALVES, "cpu": (torch.float32, torch.float64, *_HALVES)}
_INTS = (int, torch.SymInt)
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
_KERNELS = {"cuda": ("auto", "sm80", "sm90"), "cpu": ("auto",)}


def check_are_tensors(**arguments: Any) -> None:
    """Raises TypeError if one of the named arguments is not a tensor."""
    for name, t in arguments.items():
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: is a {type(t).__name__}; allowed: a tensor")


def check_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    scale: float,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    kernel_name: str = "auto",
) -> None:
    """Raises if attnscope::forward cannot take these arguments; nothing is launched.

    TypeError for what is of the wrong type or dtype, ValueError for the rest; the message names the
    argument, what it is and what is allowed. The contents of cu_seqlens are read on the CPU, and on
    CUDA when ATTNSCOPE_CHECK=1 was in the environment at import; never while tracing.
    """
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    _check_tensors(q, k, v, rank=3 if packed else 4)
    _check_shapes(q, k, v, packed)
    if packed:
        _check_cu_seqlens(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if not isinstance(window, (tuple, list)) or not all(isinstance(w, _INTS) for w in window):
        raise TypeError(f"window: is {window!r}; allowed: two ints, (left, right)")
    if len(window) != 2 or window[0] < -1 or window[1] < -1:
        raise ValueError(
            f"window: is {window}; allowed: (left, right), -1 (unbounded) or more each"
        )
    if not isinstance(scale, _NUMBERS) or not -math.inf < scale < math.inf:
        raise ValueError(f"scale: is {scale!r}; allowed: a finite number")
    if not isinstance(softcap, _NUMBERS) or not 0 <= softcap < math.inf:
        raise ValueError(f"softcap: is {softcap!r}; allowed: 0 (none) or a finite number above it")
    kernels = _KERNELS[q.device.type]
    if kernel_name not in kernels:
        raise ValueError(
            f"kernel_name: is {kernel_name!r}; allowed on {q.device.type}: {', '.join(kernels)}"
        )


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, rank: int) -> None:
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.layout != torch.strided:
            raise TypeError(f"{name}: layout is {t.layout}; allowed: torch.strided")
        if t.ndim != rank:
            dims = (
                "[tokens, heads, dim] with cu_seqlens" if rank == 3 else "[batch, seq, heads, dim]"
            )
            raise ValueError(f"{name}: shape is {_shape(t)}; allowed: {rank} dimensions, {dims}")
    device, dtype = q.device, q.dtype
    if device.type not in _DTYPES:
        raise ValueError(f"q: is on {device}; allowed: {', '.join(_DTYPES)}")
    for name, t in (("k", k), ("v", v)):
        if t.device != device:
            raise ValueError(f"{name}: is on {t.device}; allowed: q's device, {device}")
    dtypes = _DTYPES[device.type]
    if dtype not in dtypes:
        raise TypeError(
            f"q: dtype is {dtype}; allowed on {device.type}: {', '.join(map(str, dtypes))}"
        )
    for name, t in (("k", k), ("v", v)):
        if t.dtype != dtype:
            raise TypeError(f"{name}: dtype is {t.dtype}; allowed: q's dtype, {dtype}")


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> None:
    *rows_q, heads_q, dim = q.shape
    *rows_k, heads_k, dim_k = k.shape
    *rows_v, heads_v, dim_v = v.shape
    for name, d in (("q", dim), ("v", dim_v)):
        if d < 8 or d > MAX_HEAD_DIM or d % 8 != 0:
            raise ValueError(
                f"{name}: head dim is {d}; allowed: multiples of 8 up to {MAX_HEAD_DIM}"
            )
    if dim_k != dim:
        raise ValueError(f"k: head dim is {dim_k}; allowed: q's head dim, {dim}")
    if heads_k < 1:
        raise ValueError(f"k: has {heads_k} heads; allowed: 1 or more")
    if heads_v != heads_k:
        raise ValueError(f"v: has {heads_v} heads; allowed: as many as k, {heads_k}")
    if heads_q < 1 or heads_q % heads_k != 0:
        raise ValueError(f"q: has {heads_q} heads; allowed: a multiple of k's {heads_k}")
    if rows_v != rows_k:
        raise ValueError(
            f"v: shape is {_shape(v)}; allowed: k's {_shape(k)} in all but the last dimension"
        )
    if not packed and rows_k[0] != rows_q[0]:
        raise ValueError(f"k: batch is {rows_k[0]}; allowed: q's batch, {rows_q[0]}")


def _check_cu_seqlens(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> None:
    check_are_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    assert cu_seqlens_q is not None and cu_seqlens_k is not None
    sides = (
        ("q", cu_seqlens_q, max_seqlen_q, q.shape[0]),
        ("k", cu_seqlens_k, max_seqlen_k, k.shape[0]),
    )
    for side, cu_seqlens, max_seqlen, total in sides:
        name = f"cu_seqlens_{side}"
        if cu_seqlens.dtype != torch.int32:
            raise TypeError(f"{name}: dtype is {cu_seqlens.dtype}; allowed: torch.int32")
        if cu_seqlens.device != q.device:
            raise ValueError(f"{name}: is on {cu_seqlens.device}; allowed: q's device, {q.device}")
        if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1 or not cu_seqlens.is_contiguous():
            raise ValueError(
                f"{name}: has shape {_shape(cu_seqlens)}, strides {list(cu_seqlens.stride())}; "
                "allowed: [batch + 1], contiguous"
            )
        if not isinstance(max_seqlen, _INTS):
            kind = type(max_seqlen).__name__
            raise TypeError(f"max_seqlen_{side}: is a {kind}; allowed: an int")
        if max_seqlen < 0:
            raise ValueError(f"max_seqlen_{side}: is {max_seqlen}; allowed: 0 or more")
        if _may_read(cu_seqlens):
            _check_contents(side, cu_seqlens.tolist(), total, max_seqlen)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_k: shape is {_shape(cu_seqlens_k)}; allowed: that of cu_seqlens_q, "
            f"{_shape(cu_seqlens_q)}"
        )


def _may_read(t: Tensor) -> bool:
    # A fake tensor's type is a subclass of Tensor.
    if type(t) is not Tensor or torch.compiler.is_compiling():
        return False
    return CHECK_CONTENTS or t.device.type == "cpu"


def _check_contents(side: str, bounds: list[int], total: int, max_seqlen: int) -> None:
    name = f"cu_seqlens_{side}"
    if bounds[0] != 0:
        raise ValueError(f"{name}: begins with {bounds[0]}; allowed: 0")
    for i, (begin, end) in enumerate(pairwise(bounds)):
        if end < begin:
            raise ValueError(f"{name}: goes from {begin} to {end} at {i + 1}; allowed: no decrease")
        if end - begin > max_seqlen:
            raise ValueError(
                f"max_seqlen_{side}: is {max_seqlen}, but segment {i} of {name} has {end - begin} "
                "rows; allowed: the longest segment's length or more"
            )
    if bounds[-1] > total:
        raise ValueError(f"{name}: ends with {bounds[-1]}; allowed: up to {side}'s {total} rows")


def _shape(t: Tensor) -> list[int]:
    return list(t.shape)


def _fake_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    *rows, heads, _dim = q.shape
    out = q.new_empty(*rows, heads, v.shape[-1])
    return out, q.new_empty(*rows[:-1], heads, rows[-1], dtype=torch.float32)


def _no_backward(ctx: Any, *grads: Tensor) -> NoReturn:
    raise NotImplementedError(
        "attnscope::forward has no backward yet; call it under torch.no_grad() or on detached "
        "tensors, or use torch.nn.functional.scaled_dot_product_attention where you need gradients"
    )


def _no_vmap(info: Any, in_dims: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(
        "attnscope::forward has no vmap rule; give the mapped dimension to the batch dimension "
        "instead: q.flatten(0, 1) and the like"
    )


def visible_pairs(seqlen_q: int, seqlen_k: int, left: int = -1, right: int = -1) -> int:
    """(query, key) pairs that a window lets through; causal is right=0, -1 is unbounded.

    Query i sees keys j with i + Sk - Sq - left <= j <= i + Sk - Sq + right. Exact, in closed form.
    """
    diagonal = seqlen_k - seqlen_q

    def keys_before(offset: int) -> int:  # sum over queries i of clamp(i + offset, 0, seqlen_k)
        return _ramp(seqlen_q + offset, seqlen_k) - _ramp(offset, seqlen_k)

    upto = keys_before(diagonal + right + 1) if right >= 0 else seqlen_q * seqlen_k
    return upto - (keys_before(diagonal - left) if left >= 0 else 0)


def _ramp(end: int, top: int) -> int:
    """Sum of clamp(i, 0, top) over i < end."""
    end = max(end, 0)
    rising = min(end, top)
    return rising * (rising - 1) // 2 + (end - rising) * top


def forward_flops(
    segments: Iterable[tuple[int, int]],
    heads_q: int,
    head_dim: int,
    head_dim_v: int,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
) -> int:
    """Floating-point operations of one forward call: both products over the visible pairs.

    `segments` are (query length, key length), one a batch entry. Two operations a multiply-add;
    the softmax is not counted, as is usual.
    """
    left, right = window
    pairs = sum(visible_pairs(sq, sk, left, 0 if causal else right) for sq, sk in segments)
    return 2 * heads_q * (head_dim + head_dim_v) * pairs


@register_flop_formula(torch.ops.attnscope.forward, get_raw=True)
def forward_flop_formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    out_val: Any = None,
    **_: Any,
) -> int:
    """What FlopCounterMode counts for a call, from its arguments: exact for real tensors.

    The lengths of fake packed batches are not known: every segment counts as max_seqlen long then,
    as torch does for its own packed attention.
    """
    if cu_seqlens_q is None or cu_seqlens_k is None:
        segments = [(q.shape[1], k.shape[1])] * q.shape[0]
    elif is_fake(cu_seqlens_q) or cu_seqlens_q.device.type == "meta":
        segments = [(max_seqlen_q, max_seqlen_k)] * (cu_seqlens_q.shape[0] - 1)
    else:
        lengths = (cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist())
        segments = list(zip(*lengths, strict=True))
    window = (window_left, window_right)
    dims = (q.shape[-2], q.shape[-1], v.shape[-1])
    return forward_flops(segments, *dims, causal=causal, window=window)


torch.library.register_fake("attnscope::forward", _fake_forward)
torch.library.register_autograd("attnscope::forward", _no_backward)
torch.library.register_vmap("attnscope::forward", _no_vmap)
