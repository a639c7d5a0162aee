"""`register()`: attnscope's attention as an attention implementation of Hugging Face transformers.

    register()
    model.set_attn_implementation("attnscope")

Causal self-attention of decoder models: grouped heads, sliding windows, softcap, packed batches,
growing and static caches, torch.compile and torch.export. No mask of scores is built. A mask that
would need one is refused, and so is an unknown option.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attnscope.functional import attention, attention_varlen
from attnscope.integrations.transformers_mask import CAUSAL, REMEDY, mask, read_note

__all__ = ["INSTALL", "NAME", "OLDEST", "forward", "mask", "register", "require"]

NAME = "attnscope"
OLDEST = 5  # major version of transformers: how it calls a mask function
INSTALL = 'pip install "attnscope[transformers]"'

# Options that models pass to their attention and that have no effect there.
_HARMLESS = frozenset(
    {
        "position_ids", "cache_position", "use_cache", "cache", "past_key_value", "past_key_values",
        "output_hidden_states", "output_router_logits", "return_dict", "num_items_in_batch",
        "logits_to_keep", "layer_idx", "deterministic",
    }
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
        raise ValueError(
            f"transformers must be installed, got no such package. {INSTALL}"
        ) from None
    if int(transformers.__version__.partition(".")[0]) < OLDEST:
        raise ValueError(
            f"transformers must be {OLDEST} or later, got {transformers.__version__}. {INSTALL}"
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
    sliding_window: int | None = None,
    softcap: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: int | Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' AttentionInterface calls it.

    Args:
        module: the attention module; its `is_causal` counts where the argument is None.
        query: [B, Hq, Sq, D]; key, value: [B, Hkv, Sk, D], not repeated for their query heads.
        attention_mask: what `mask` returned: None, or a note of a few numbers.
        dropout: must be 0.
        scaling: factor of the scores; 1 / sqrt(D) by default.
        is_causal: must be True.
        sliding_window: a query sees its own key and sliding_window - 1 before it.
        softcap: scores s become softcap * tanh(s / softcap).
        cu_seq_lens_q, cu_seq_lens_k: [N + 1], bounds of packed sequences in the B * S rows. They
            decide, as with transformers' FlashAttention, whatever the position ids say.
        max_length_q, max_length_k: the longest packed sequence; the number of rows by default.
        options: other options must be None, False or known to change nothing.

    Returns:
        [B, Sq, Hq, D], contiguous, and None for the weights, which are never there.

    Raises ValueError for what the op cannot do, and as `attnscope.attention`.
    """
    if dropout > 0:
        raise ValueError(
            f"dropout must be 0, got {dropout:g}. Call model.eval(), or set attention_dropout to 0 "
            "in the configuration."
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal:
        raise ValueError(f"is_causal must be True, got {causal}. {REMEDY}")
    segmented = cu_seq_lens_q is not None
    _refuse_unknown(options, segmented)
    if segmented != (cu_seq_lens_k is not None):
        raise ValueError(
            f"cu_seq_lens_k must be given together with cu_seq_lens_q, got {cu_seq_lens_k}. "
            "Pass both or neither."
        )
    note = read_note(attention_mask)
    window = _window(sliding_window, note.window)
    heads: dict[str, Any] = dict(causal=True, window=(window - 1 if window else -1, -1))
    heads |= dict(scale=scaling, softcap=0.0 if softcap is None else float(softcap))

    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        bounds = cu_seq_lens_q.int(), cu_seq_lens_k.int()
        longest = _longest(max_length_q, query), _longest(max_length_k, key)
        return _packed(query, key, value, bounds, longest, heads), None
    if note.plain is not None:
        torch._assert_async(note.plain.all(), f"mask_function must be {CAUSAL}. {REMEDY}")
    if note.segments is not None:
        longest = query.shape[2], key.shape[2]
        return _packed(query, key, value, (note.segments, note.segments), longest, heads), None
    if note.filled is not None:
        return _partly_filled(query, key, value, note.filled, heads), None
    if note.from_empty:
        key, value = (t[:, :, : query.shape[2]] for t in (key, value))
    out = attention(*(t.transpose(1, 2) for t in (query, key, value)), **heads)
    assert isinstance(out, Tensor)
    return out, None


def _refuse_unknown(options: dict[str, Any], segmented: bool) -> None:
    for name, given in options.items():
        if given is None or given is False or name in _HARMLESS:
            continue
        if name == "seq_idx" and segmented:  # the same sequences, for other kinds of layers
            continue
        rule = "None or False" if isinstance(given, bool) else "None"
        shown = f"a tensor of shape {list(given.shape)}" if isinstance(given, Tensor) else given
        raise ValueError(f"{name} must be {rule}, got {shown}. {REMEDY}")


def _window(sliding_window: int | None, of_mask: int | None) -> int | None:
    """The sliding window in tokens; the mask's and the layer's must agree."""
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(
            f"sliding_window must be at least 1, got {sliding_window}. None is no window."
        )
    if None not in (sliding_window, of_mask) and sliding_window != of_mask:
        raise ValueError(
            f"sliding_window must be the mask's ({of_mask}), got {sliding_window}. {REMEDY}"
        )
    return of_mask if sliding_window is None else sliding_window


def _longest(length: int | Tensor | None, rows: Tensor) -> int:
    """The longest sequence, or an upper bound if reading its length would synchronize."""
    return length if isinstance(length, int) else rows.shape[0] * rows.shape[2]


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    heads: dict[str, Any],
) -> Tensor:
    """Sequences end to end in the rows of a batch."""
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    out = attention_varlen(q, k, v, *bounds, *longest, **heads)
    assert isinstance(out, Tensor)
    return out.unflatten(0, (query.shape[0], query.shape[2]))


def _partly_filled(
    query: Tensor, key: Tensor, value: Tensor, filled: Tensor, heads: dict[str, Any]
) -> Tensor:
    """Attention to the first `filled[1]` keys of a cache, a number that only the device knows.

    All batch entries have as many keys, so they are heads of one packed sequence: that needs no
    copy of the cache. Query head b * Hq + h reads key head b * Hkv + h // (Hq / Hkv), as it must.
    """
    batch, _, queries, _ = query.shape
    q, k, v = (t.flatten(0, 1).transpose(0, 1) for t in (query, key, value))
    bounds = torch.arange(2, dtype=torch.int32, device=query.device) * queries, filled
    out = attention_varlen(q, k, v, *bounds, queries, key.shape[2], **heads)
    assert isinstance(out, Tensor)
    return out.unflatten(1, (batch, -1)).transpose(0, 1).contiguous()
