"""Argument checks: what the ops accept, and why they refused a call.

The C++ op checks its arguments. These checks explain a refusal after the fact: they raise an
exception that names the argument, the rule and the value. They run before a call only where no C++
sees the arguments: for fake tensors, for the Triton op, and to read the contents of tensors.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from attnscope.schemas import VARIANTS

# Reads the contents of tensors on CUDA as well, which waits for the device at every call.
CHECK_CONTENTS = os.environ.get("ATTNSCOPE_CHECK", "") == "1"

MAX_HEAD_DIM = 256
MAX_HEADS = 2**31 - 1  # batch * heads_q
MAX_ROWS = 2**31 - 1024
MAX_TILES = 2**30 - 1
TILE_ROWS = 64

_INTS = (int, torch.SymInt)
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
_LOG2E = math.log2(math.e)
_FLOAT32 = torch.finfo(torch.float32)
_HALVES = (torch.bfloat16, torch.float16)
_CPU_DTYPES = (torch.float32, torch.float64, *_HALVES)


# Dtypes that an op takes, by device type. A call on the meta device gives shapes only.
Dtypes = Mapping[str, tuple[torch.dtype, ...]]
DTYPES: Dtypes = {"cuda": _HALVES, "cpu": _CPU_DTYPES, "meta": _CPU_DTYPES}
_INTERPRETED = (*_HALVES, torch.float32)  # on a GPU, float32 tiles exceed shared memory
TRITON_DTYPES: Dtypes = {"cuda": _HALVES, "cpu": _INTERPRETED, "meta": _INTERPRETED}


def check_are_tensors(**arguments: Any) -> None:
    """Raise TypeError if one of the named arguments is not a tensor."""
    for name, t in arguments.items():
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(t).__name__}")


def check_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    scale: float,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    variant: int = 0,
    dtypes: Dtypes = DTYPES,
) -> None:
    """Raise if attnscope::forward cannot take these arguments. Nothing is launched or read.

    Raises TypeError for a wrong type or dtype and ValueError for the rest.
    """
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    _check_tensors(q, k, v, 3 if packed else 4, dtypes)
    _check_shapes(q, k, v, packed)
    if packed:
        check_are_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        assert cu_seqlens_q is not None and cu_seqlens_k is not None
        _check_cu_seqlens(q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    _check_sizes(q, k, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be a bool, got {causal!r}")
    _check_window(window_left, window_right)
    _check_scores(scale, softcap)
    variants = VARIANTS[q.device.type]
    if variant not in variants:
        raise ValueError(f"variant must be one of {_join(variants)}, got {variant!r}")


def check_backward(
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
    deterministic: bool = False,
    **options: Any,
) -> None:
    """Raise if attnscope::backward cannot take these arguments; as `check_forward`."""
    check_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)
    *rows, heads, _ = q.shape
    out_shape = [*rows, heads, v.shape[-1]]
    lse_shape = [*rows[:-1], heads, rows[-1]]
    for name, t, shape, dtype in (
        ("out", out, out_shape, q.dtype),
        ("dout", dout, out_shape, q.dtype),
        ("lse", lse, lse_shape, torch.float32),
        ("dlse", dlse, lse_shape, torch.float32),
    ):
        if t is None:
            continue
        if t.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {t.device}")
        if t.dtype != dtype:
            raise TypeError(f"{name} must have dtype {dtype}, got {t.dtype}")
        if t.ndim != len(shape):
            raise ValueError(f"{name} must have {len(shape)} dimensions, got shape {_shape(t)}")
        for size, expected in zip(t.shape, shape, strict=True):
            _require(
                size == expected,
                partial("{} must have shape {}, got {}".format, name, shape, _shape(t)),
            )


def check_contents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
) -> None:
    """Raise ValueError if values in the tensors are not allowed; waits for the device.

    The other checks must have passed. What ATTNSCOPE_CHECK=1 may read belongs here.
    """
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        _check_bounds("q", cu_seqlens_q.tolist(), q.shape[0], max_seqlen_q)
        _check_bounds("k", cu_seqlens_k.tolist(), k.shape[0], max_seqlen_k)


def reads_contents(t: Tensor) -> bool:
    """Whether a call reads the contents of a real tensor: on the CPU, or with ATTNSCOPE_CHECK=1."""
    # A fake tensor's type is a subclass of Tensor.
    return type(t) is Tensor and (CHECK_CONTENTS or t.device.type == "cpu")


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, rank: int, dtypes: Dtypes) -> None:
    form = "[tokens, heads, head_dim] with cu_seqlens" if rank == 3 else "[batch, seq, heads, dim]"
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.layout != torch.strided:
            raise TypeError(f"{name} must have layout torch.strided, got {t.layout}")
        if t.ndim != rank:
            raise ValueError(f"{name} must have {rank} dimensions, {form}, got shape {_shape(t)}")
    device, dtype = q.device, q.dtype
    if device.type not in dtypes:
        raise ValueError(f"q must be on one of {_join(dtypes)}, got {device}")
    for name, t in (("k", k), ("v", v)):
        if t.device != device:
            raise ValueError(f"{name} must be on q's device {device}, got {t.device}")
    if dtype not in dtypes[device.type]:
        raise TypeError(
            f"q must have one of the dtypes {_join(dtypes[device.type])} on {device.type}, got "
            f"{dtype}. "
            "Convert q, k and v, or call under torch.autocast"
        )
    for name, t in (("k", k), ("v", v)):
        if t.dtype != dtype:
            raise TypeError(f"{name} must have q's dtype {dtype}, got {t.dtype}")


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> None:
    *rows_q, heads_q, dim = q.shape
    *rows_k, heads_k, dim_k = k.shape
    *rows_v, heads_v, dim_v = v.shape
    for name, d in (("q", dim), ("v", dim_v)):
        if d < 8 or d > MAX_HEAD_DIM or d % 8 != 0:
            remedy = ". Pad it with zeros and pass scale" if d < MAX_HEAD_DIM else ""
            raise ValueError(
                f"{name} must have a head dim that is a multiple of 8 up to {MAX_HEAD_DIM}, got "
                f"{d}{remedy}"
            )
    if dim_k != dim:
        raise ValueError(f"k must have q's head dim {dim}, got {dim_k}")
    if heads_k < 1:
        raise ValueError(f"k must have at least 1 head, got {heads_k}")
    if heads_v != heads_k:
        raise ValueError(f"v must have as many heads as k, {heads_k}, got {heads_v}")
    if heads_q < 1 or heads_q % heads_k != 0:
        raise ValueError(f"q must have a multiple of k's {heads_k} heads, got {heads_q}")
    for size_v, size_k in zip(rows_v, rows_k, strict=True):
        _require(
            size_v == size_k,
            lambda: (
                f"v must have k's shape {_shape(k)} in all but the last dimension, got {_shape(v)}"
            ),
        )
    if not packed:
        _require(
            rows_k[0] == rows_q[0], lambda: f"k must have q's batch {rows_q[0]}, got {rows_k[0]}"
        )


def _check_cu_seqlens(
    q: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int
) -> None:
    for side, cu_seqlens, max_seqlen in (
        ("q", cu_seqlens_q, max_seqlen_q),
        ("k", cu_seqlens_k, max_seqlen_k),
    ):
        name = f"cu_seqlens_{side}"
        if cu_seqlens.dtype != torch.int32:
            raise TypeError(f"{name} must have dtype torch.int32, got {cu_seqlens.dtype}")
        if cu_seqlens.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {cu_seqlens.device}")
        if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1 or not cu_seqlens.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous, of shape [batch + 1], got shape {_shape(cu_seqlens)}, "
                f"strides {list(cu_seqlens.stride())}"
            )
        if isinstance(max_seqlen, bool) or not isinstance(max_seqlen, _INTS):
            raise TypeError(
                f"max_seqlen_{side} must be an int, got {type(max_seqlen).__name__}. Read it from "
                "a tensor with .item()"
            )
        # A symbolic length may be unknown while tracing; the C++ op checks its value.
        if isinstance(max_seqlen, int) and max_seqlen < 0:
            raise ValueError(f"max_seqlen_{side} must be >= 0, got {max_seqlen}")
    _require(
        cu_seqlens_q.shape[0] == cu_seqlens_k.shape[0],
        lambda: (
            f"cu_seqlens_k must have the shape of cu_seqlens_q, {_shape(cu_seqlens_q)}, got "
            f"{_shape(cu_seqlens_k)}"
        ),
    )


def _check_sizes(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, max_seqlen_q: int, max_seqlen_k: int
) -> None:
    rows_q, heads_q = q.shape[-3], q.shape[-2]
    rows_k = k.shape[-3]
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if not all(isinstance(n, int) for n in (rows_q, rows_k, batch, max_seqlen_q, max_seqlen_k)):
        return  # symbolic sizes: the C++ op checks their values
    seqlen_q, seqlen_k = rows_q, rows_k
    tiles = batch * -(-rows_q // TILE_ROWS)
    if cu_seqlens_q is not None:
        seqlen_q, seqlen_k = min(max_seqlen_q, rows_q), min(max_seqlen_k, rows_k)
        tiles = min(batch * -(-seqlen_q // TILE_ROWS), rows_q // TILE_ROWS + batch)
    remedy = "Split the batch over several calls"
    if batch * heads_q > MAX_HEADS:
        raise ValueError(f"batch * heads_q must be <= {MAX_HEADS}, got {batch * heads_q}. {remedy}")
    for name, rows in (("q", rows_q), ("k", rows_k), ("q and k", seqlen_q + seqlen_k)):
        if rows > MAX_ROWS:
            raise ValueError(
                f"{name} must have <= {MAX_ROWS} rows of a sequence, got {rows}. {remedy}"
            )
    if tiles * heads_q > MAX_TILES:
        raise ValueError(
            f"q must have <= {MAX_TILES} tiles of {TILE_ROWS} rows of a head, got "
            f"{tiles * heads_q}. {remedy}"
        )


def _check_window(left: int, right: int) -> None:
    window = (left, right)
    if not all(isinstance(bound, _INTS) and not isinstance(bound, bool) for bound in window):
        raise TypeError(f"window must be two ints, (left, right), got {window!r}")
    # The values of symbolic bounds are checked by the C++ op.
    if any(isinstance(bound, int) and bound < -1 for bound in window):
        raise ValueError(f"window must be (left, right), both >= -1, got {window}. -1 is unbounded")


def _check_scores(scale: float, softcap: float) -> None:
    for name, value in (("scale", scale), ("softcap", softcap)):
        if isinstance(value, bool) or not isinstance(value, _NUMBERS):
            raise TypeError(f"{name} must be a number, got {value!r}")
    if isinstance(scale, torch.SymFloat) or isinstance(softcap, torch.SymFloat):
        return
    if not softcap >= 0:
        raise ValueError(f"softcap must be 0 (none) or a positive number, got {softcap!r}")
    derived = {
        "scale": (scale, ("", scale), (" * log2(e)", scale * _LOG2E)),
        "softcap": (softcap, ("", softcap), (" * 2 log2(e)", 2 * _LOG2E * softcap)),
    }
    for name, (given, *factors) in derived.items():
        for factor, value in factors:
            if not _is_normal(value):
                raise ValueError(
                    f"{name}{factor} must be 0 or a normal float32 number "
                    f"({_FLOAT32.tiny:.3g} to {_FLOAT32.max:.3g}), got {name} {given!r}"
                )
    if softcap and not _is_normal(2 * _LOG2E * scale / softcap):
        raise ValueError(
            "2 log2(e) * scale / softcap must be 0 or a normal float32 number, got scale "
            f"{scale!r}, softcap {softcap!r}"
        )


def _is_normal(value: float) -> bool:
    return value == 0 or _FLOAT32.tiny <= abs(value) <= _FLOAT32.max


def _check_bounds(side: str, bounds: list[int], total: int, max_seqlen: int) -> None:
    name = f"cu_seqlens_{side}"
    if bounds[0] != 0:
        raise ValueError(f"{name} must begin with 0, got {bounds[0]}")
    for i, (begin, end) in enumerate(pairwise(bounds)):
        if end < begin:
            raise ValueError(f"{name} must not decrease, got {begin}, {end} at {i + 1}")
        if end - begin > max_seqlen:
            raise ValueError(
                f"max_seqlen_{side} must be >= the longest segment, got {max_seqlen}, but segment "
                f"{i} of {name} has {end - begin} rows"
            )
    if bounds[-1] > total:
        raise ValueError(f"{name} must end with at most {side}'s {total} rows, got {bounds[-1]}")


def _require(condition: Any, message: Any) -> None:
    """Raise ValueError unless true; a condition on symbolic sizes becomes a guard of the graph."""
    torch._check_value(condition, message)


def _join(values: Any) -> str:
    return ", ".join(str(value) for value in values)


def _shape(t: Tensor) -> list[int]:
    return list(t.shape)
