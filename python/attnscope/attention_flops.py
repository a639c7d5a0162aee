"""Floating-point operations of attention calls, counted exactly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


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

    `segments` are (query length, key length), one a batch entry. A multiply-add counts as two
    operations; the softmax is not counted, as is usual.
    """
    left, right = window
    pairs = sum(visible_pairs(sq, sk, left, 0 if causal else right) for sq, sk in segments)
    return 2 * heads_q * (head_dim + head_dim_v) * pairs


def backward_flops(
    segments: Iterable[tuple[int, int]],
    heads_q: int,
    head_dim: int,
    head_dim_v: int,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
) -> int:
    """Floating-point operations of one backward call: five products over the visible pairs.

    S, dQ and dK have the inner dimension D, dP and dV have Dv. With D = Dv this is 2.5 times
    `forward_flops`, whose conventions hold. What a kernel computes twice counts once.
    """
    left, right = window
    pairs = sum(visible_pairs(sq, sk, left, 0 if causal else right) for sq, sk in segments)
    return 2 * heads_q * (3 * head_dim + 2 * head_dim_v) * pairs


def forward_flop_formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    out_val: Any = None,
    **lengths: Any,
) -> int:
    """What FlopCounterMode counts for a call, from its arguments: exact for real tensors.

    Fake packed batches have unknown lengths: every segment then counts as max_seqlen long, as in
    torch's own packed attention.
    """
    segments = _segments(q, k, cu_seqlens_q, cu_seqlens_k, **lengths)
    dims = (q.shape[-2], q.shape[-1], v.shape[-1])
    return forward_flops(segments, *dims, causal=causal, window=(window_left, window_right))


def backward_flop_formula(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    out_val: Any = None,
    **lengths: Any,
) -> int:
    """What FlopCounterMode counts for a backward call, as `forward_flop_formula`."""
    segments = _segments(q, k, cu_seqlens_q, cu_seqlens_k, **lengths)
    dims = (q.shape[-2], q.shape[-1], v.shape[-1])
    return backward_flops(segments, *dims, causal=causal, window=(window_left, window_right))


def _segments(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    **_: Any,
) -> list[tuple[int, int]]:
    """(query length, key length) of each batch entry, as far as it is known."""
    from torch._subclasses.fake_tensor import is_fake

    if cu_seqlens_q is None or cu_seqlens_k is None:
        return [(q.shape[1], k.shape[1])] * q.shape[0]
    if is_fake(cu_seqlens_q) or cu_seqlens_q.device.type == "meta":
        return [(max_seqlen_q, max_seqlen_k)] * (cu_seqlens_q.shape[0] - 1)
    lengths = (cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist())
    return list(zip(*lengths, strict=True))
