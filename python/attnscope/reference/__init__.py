"""Attention and its gradients in plain PyTorch: the fp64 reference and the same-dtype baseline.

Layouts are the op's. Dense: q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv] give out
[B, Sq, Hq, Dv] and lse [B, Hq, Sq]. Packed (cu_seqlens_* int32 [B + 1]): q [Tq, Hq, D],
k [Tk, Hkv, D], v [Tk, Hkv, Dv] give out [Tq, Hq, Dv] and lse [Hq, Tq].

Query i sees keys j with i + Sk - Sq - left <= j <= i + Sk - Sq + right: always one interval, so a
row is exact when its keys are cut to that interval. A row that sees no key has out 0, lse -inf.
Gradients have the shapes of q, k and v; those of query heads that share a key head are summed.
"""

from attnscope.reference.backward import (
    Gradients,
    attention_backward_reference,
    backward_rounding,
    naive_attention_backward,
)
from attnscope.reference.blocks import live_rows_and_keys, segments
from attnscope.reference.forward import (
    attention_reference,
    naive_attention,
    naive_attention_blocked,
)

__all__ = [
    "Gradients",
    "attention_backward_reference",
    "attention_reference",
    "backward_rounding",
    "live_rows_and_keys",
    "naive_attention",
    "naive_attention_backward",
    "naive_attention_blocked",
    "segments",
]
