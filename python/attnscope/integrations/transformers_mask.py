"""The mask function of attnscope in Hugging Face transformers: it builds no mask of scores.

`mask` reads the request of transformers, and returns None (causal) or a note of a few numbers that
`attnscope.transformers.forward` reads. It refuses masks that the kernels do not support.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Configuration fields of models whose keys are selected by an index branch.
_INDEX_BRANCH = ("index_topk", "index_n_heads", "index_head_dim")
# Without quotes: TorchInductor writes these into string literals and does not escape them.
REMEDY = "Use another attn_implementation for this model, such as eager."
CAUSAL = "the causal mask, with or without a sliding window, in one or several packed sequences"
_PADDING = (
    "without padding (all ones). Pack the sequences (DataCollatorWithFlattening), run them one by "
    "one, or use another attn_implementation, such as sdpa."
)


class Note(NamedTuple):
    """What `mask` passes to `forward` where the mask is more than causal."""

    window: int | None = None
    from_empty: bool = False  # the keys of a static cache end with the last query
    filled: Tensor | None = None  # int32 [2]: 0 and how many keys of a static cache are filled
    segments: Tensor | None = None  # int32 [N + 1]: bounds of packed sequences
    plain: Tensor | None = None  # bool [1]: whether the mask is causal, of a graph being traced


# transformers passes a 4-D mask through unchanged, also between generate() and a compiled model. So
# a note is a 4-D tensor [1 + window, 1, n, 1] with one row of n numbers (expanded: it takes no
# memory). n is 0 for a window alone, 1 for `from_empty` or `plain`, 2 for `filled`, more for
# `segments`.


def _write_note(window: int | None, numbers: Tensor) -> Tensor:
    return numbers.view(1, 1, -1, 1).expand(1 + (window or 0), -1, -1, -1)


def read_note(given: Tensor | None) -> Note:
    """What `mask` returned. Raises ValueError for any other mask."""
    if given is None:
        return Note()
    if given.ndim != 4 or given.shape[1] != 1 or given.shape[3] != 1 or not _is_note(given.dtype):
        raise ValueError(
            f"attention_mask must be None or what attnscope's mask function returned, got a tensor "
            f"of shape {list(given.shape)}, {given.dtype}. {REMEDY}"
        )
    window = given.shape[0] - 1 or None
    numbers = given[0].flatten()
    if given.dtype == torch.uint8:
        return Note(window, plain=numbers.bool())
    count = given.shape[2]
    if count <= 1:
        return Note(window, from_empty=count == 1)
    return Note(window, filled=numbers) if count == 2 else Note(window, segments=numbers)


def _is_note(dtype: torch.dtype) -> bool:
    return dtype in (torch.int32, torch.uint8)  # a mask that a caller makes is bool or float


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: Any = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Tensor | None:
    """The mask as transformers' AttentionMaskInterface asks for it.

    Args:
        q_length, kv_length: lengths of queries and keys; q_offset, kv_offset: positions of the
            first of each. Only a static cache has more keys than the last query may see.
        mask_function: transformers' causal mask, with or without a sliding window of `local_size`
            tokens and packed sequences.
        attention_mask: [B, tokens], must be all ones for the keys that are there.

    Returns:
        None for the causal mask, which needs no more, or a note of a few numbers for `forward`.

    While a graph is traced, tensor values are not available. Checks on values become assertions in
    the graph, which do not wait for the device: RuntimeError on a CPU, a device-side assertion on
    CUDA.

    Raises ValueError for padding, for any other mask (chunks, blocks, an overlay of the caller's)
    and for models with an index branch.
    """
    _refuse_index_branch(config)
    traced = _is_traced(attention_mask)
    _check_padding(attention_mask, q_offset + q_length, kv_offset, kv_length, traced)
    numbers = torch.empty(0, dtype=torch.int32, device=device)
    filled = q_offset + q_length - kv_offset
    if isinstance(filled, Tensor):
        numbers = torch.arange(2, dtype=torch.int32, device=device) * filled.to(device)
        numbers = numbers.int()
    elif filled > kv_length:
        raise ValueError(
            f"kv_length must be at least {filled} for {q_length} queries after {q_offset} keys, "
            f"got {kv_length}. {REMEDY}"
        )
    elif filled < kv_length:
        count = 1 if filled == q_length else 2
        numbers = torch.arange(2, dtype=torch.int32, device=device)[:count] * filled
    if use_vmap:
        raise ValueError(
            f"mask_function must be {CAUSAL}, got an overlay of the caller's. {REMEDY}"
        )
    known = None if torch.compiler.is_dynamo_compiling() else _pattern(mask_function)
    if _is_causal(mask_function):
        known = _Pattern()
    if known is None and not traced:
        name = getattr(mask_function, "__qualname__", mask_function)
        raise ValueError(f"mask_function must be {CAUSAL}, got {name}. {REMEDY}")
    if known is None or (traced and known.sequences is not None):
        assert mask_function is not None
        plain = _is_plain(
            mask_function, local_size, batch_size, q_length, kv_length, q_offset, kv_offset, device
        )
        if not isinstance(filled, Tensor) and filled == kv_length:
            return _write_note(local_size, plain.to(torch.uint8))
        torch._assert_async(plain.all(), f"mask_function must be {CAUSAL}. {REMEDY}")
        return _write_note(local_size, numbers)
    if known.sequences is not None:
        numbers = _bounds(known.sequences)
    if known.window is None and not numbers.numel():
        return None
    return _write_note(known.window, numbers)


def _refuse_index_branch(config: Any) -> None:
    for name in _INDEX_BRANCH:
        if getattr(config, name, None) is not None:
            raise ValueError(
                f"config must be of a model without an index branch, got {name} = "
                f"{getattr(config, name)}. {REMEDY}"
            )


def _is_traced(tensor: Tensor | None) -> bool:
    """Whether values cannot be read: in a graph being traced, or captured on CUDA."""
    if torch.compiler.is_compiling():
        return True
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return True
    return isinstance(tensor, torch._subclasses.FakeTensor)


def _check_padding(
    attention_mask: Tensor | None, end: int | Tensor, start: int, kv_length: int, traced: bool
) -> None:
    """Refuse a mask that hides a key between positions `start` and `end`."""
    if attention_mask is None:
        return
    if attention_mask.ndim != 2:
        raise ValueError(
            f"attention_mask must be of shape [batch, tokens], got {list(attention_mask.shape)}. "
            f"{REMEDY}"
        )
    tokens = attention_mask.shape[1]
    if isinstance(end, Tensor):
        later = torch.arange(tokens, device=attention_mask.device) >= end.to(attention_mask.device)
        whole = (attention_mask.bool() | later).all() & (end.to(attention_mask.device) <= tokens)
    elif tokens < end:
        raise ValueError(f"attention_mask must have {end} tokens, got {tokens}. {REMEDY}")
    else:
        whole = attention_mask[:, start:end].bool().all()
    if traced:
        torch._assert_async(whole, f"attention_mask must be {_PADDING}")
    elif not whole:
        raise ValueError(
            f"attention_mask must be {_PADDING[:-1]}, got zeros in a mask of shape "
            f"{list(attention_mask.shape)}."
        )


class _Pattern(NamedTuple):
    """What a mask function does besides being causal."""

    window: int | None = None
    sequences: Tensor | None = None  # [B, S]: the number of each token's sequence


def _is_causal(function: Callable[..., Any] | None) -> bool:
    from transformers.masking_utils import causal_mask_function

    return function is None or function is causal_mask_function


def _pattern(function: Callable[..., Any] | None) -> _Pattern | None:
    """The pattern of one of transformers' mask functions, read from its parts; None for others."""
    if _is_causal(function):
        return _Pattern()
    name, parts = _made_by(function)
    if name != "and_masks" or len(parts["mask_functions"]) != 2:
        return None
    first, second = parts["mask_functions"]
    name, parts = _made_by(first)
    if name == "sliding_window_overlay" and _is_causal(second):
        return _Pattern(window=parts["sliding_window"])
    name_of_second, parts_of_second = _made_by(second)
    if (name, name_of_second) == (
        "remap_positions_for_packed_sequence",
        "packed_sequence_mask_function",
    ):
        within = _pattern(parts["mask_function"])
        sequences = parts_of_second["packed_sequence_mask"]
        return within and within._replace(sequences=sequences)
    return None


def _made_by(function: Callable[..., Any] | None) -> tuple[str, dict[str, Any]]:
    """Which function of transformers.masking_utils made this one, and from what."""
    if getattr(function, "__module__", None) != "transformers.masking_utils":
        return "", {}
    assert function is not None
    parts = dict(inspect.getclosurevars(function).nonlocals)
    return function.__qualname__.partition(".<locals>")[0], parts


def _bounds(sequences: Tensor) -> Tensor:
    """Bounds of packed sequences, int32, of the number of each token's sequence [B, S].

    No sequence goes on in the next entry of the batch.
    """
    first = torch.ones_like(sequences[:, :1], dtype=torch.bool)
    starts = torch.cat((first, sequences.diff(dim=1) != 0), dim=1).flatten()
    at = starts.nonzero().flatten()
    return torch.cat((at, at.new_full((1,), starts.numel()))).int()


def _is_plain(
    function: Callable[..., Any],
    window: int | None,
    batch: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    device: torch.device | str,
) -> Tensor:
    """Whether a mask function is causal with this window, by asking it for every pair; bool [1].

    In a compiled graph that is one reduction, which keeps no pair in memory.
    """
    entries = torch.arange(batch, device=device)[:, None, None, None]
    head = torch.zeros(1, dtype=torch.int64, device=device)[None, :, None, None]
    q = (torch.arange(q_length, device=device) + q_offset)[None, None, :, None]
    k = (torch.arange(kv_length, device=device) + kv_offset)[None, None, None, :]
    want = k <= q
    if window is not None:
        want = want & (k > q - window)
    got = function(entries, head, q, k)
    # TorchInductor cannot compile an == of booleans that come from indices.
    return ~((got & ~want) | (want & ~got)).any().view(1)
