"""`register()`: attnscope's attention as an attention implementation of Hugging Face transformers.

    register()
    model.set_attn_implementation("attnscope")

Causal self-attention of decoder models, with fewer key heads than query heads, and with a cache. No
mask tensor is built; what would need one is refused, never computed as if it were not there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from attnscope.functional import attention

NAME = "attnscope"
OLDEST = 5  # major version of transformers: how it calls a mask function
INSTALL = 'pip install "attnscope[transformers]"'

# What a model may pass that changes the scores or asks for more than the output.
_CHANGES = (
    "position_bias", "softcap", "sliding_window", "s_aux", "head_mask", "output_attentions",
    "cu_seq_lens_q", "cu_seq_lens_k",
)  # fmt: skip


def register() -> None:
    """Make "attnscope" known to transformers, with its mask.

    Raises ValueError where transformers is not installed or too old.
    """
    require()
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, forward)
    # Without a mask function transformers drops the padding mask that a caller gave.
    AttentionMaskInterface.register(NAME, mask)


def require() -> str:
    """The version of transformers. Raises ValueError as `register`."""
    try:
        import transformers
    except ImportError:
        raise ValueError(f"transformers is not installed; {INSTALL}") from None
    if int(transformers.__version__.partition(".")[0]) < OLDEST:
        raise ValueError(
            f"transformers is {transformers.__version__}; needed: {OLDEST} or later; {INSTALL}"
        )
    return transformers.__version__


def forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' AttentionInterface calls it.

    Args:
        module: the attention module; its `is_causal` counts where the argument is None.
        query: [B, Hq, Sq, D]; key, value: [B, Hkv, Sk, D], not repeated for their query heads.
        attention_mask: must be None.
        dropout: must be 0.
        scaling: factor of the scores; 1 / sqrt(D) by default.
        options: what else a model passes; what changes the scores is refused.

    Returns:
        [B, Sq, Hq, D], contiguous, and None for the weights, which are never there.

    Raises ValueError for what the op cannot do, and as `attnscope.attention`.
    """
    if attention_mask is not None:
        raise ValueError(f"attention_mask: has shape {list(attention_mask.shape)}; allowed: None")
    if dropout > 0:
        raise ValueError(f"dropout: is {dropout:g}; allowed: 0")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal:
        raise ValueError("is_causal: is False; allowed: True")
    for name in _CHANGES:
        if not (options.get(name) is None or options[name] is False):
            raise ValueError(f"{name}: is given; allowed: None")
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    out = attention(q, k, v, causal=True, scale=scaling)
    assert isinstance(out, Tensor)
    return out, None


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> None:
    """The mask as transformers' AttentionMaskInterface asks for it: None, which is causal.

    Raises ValueError for padding, for any mask but the causal one (windows, packed sequences, an
    overlay of the caller's), and for a cache whose last key is not that of the last query.
    """
    from transformers.masking_utils import causal_mask_function

    if attention_mask is not None:
        raise ValueError(
            f"attention_mask: has shape {list(attention_mask.shape)}; allowed: None, for a batch "
            "without padding"
        )
    if mask_function not in (None, causal_mask_function):
        raise ValueError("mask_function: is not the causal one alone; allowed: causal")
    if isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length:
        raise ValueError(
            f"kv_length: is {kv_length} for {q_length} queries after {q_offset} keys; allowed: a "
            "cache that ends with the last query"
        )
