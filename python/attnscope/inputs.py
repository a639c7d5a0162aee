"""Numerically hard inputs of several kinds, generated on the device from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

KINDS = ("normal", "large_logits", "outliers", "constant_rows", "wide_range")

_GRADIENTS = 1_000_000_007  # added to the seed: other numbers than those of q, k and v

Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Case:
    """The part of a workload that determines its numerical results."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str
    causal: bool
    window: tuple[int, int]
    softcap: float
    seqlens: tuple[tuple[int, int], ...] | None

    @classmethod
    def of(cls, workload: Any) -> Case:
        fields = {name: getattr(workload, name) for name in cls.__dataclass_fields__}
        seqlens = fields["seqlens"]
        fields["window"] = tuple(fields["window"])
        fields["seqlens"] = None if seqlens is None else tuple(tuple(pair) for pair in seqlens)
        return cls(**fields)

    @property
    def options(self) -> dict[str, Any]:
        return {"causal": self.causal, "window": self.window, "softcap": self.softcap}

    def scores_per_head(self) -> int:
        """Query-key pairs of one head over the whole batch."""
        if self.seqlens is None:
            return self.batch * self.seqlen_q * self.seqlen_k
        return sum(len_q * len_k for len_q, len_k in self.seqlens)


def make_inputs(
    workload: Any, kind: str = "normal", seed: int = 0, device: str | torch.device = "cuda"
) -> Inputs:
    """(q, k, v, cu_seqlens_q, cu_seqlens_k) of a workload; the last two None when dense.

    The same kind, seed and device type give the same tensors. Kinds: `normal`; `large_logits`,
    logits of a few hundred, in 16 bits exact where 1/sqrt(D) is a power of two; `outliers`, one
    element in 256 is 16 times larger; `constant_rows`, all keys of a head equal, so every visible
    key weighs the same; `wide_range`, magnitudes from 2^-12 to 2^2 (values to 2^8).
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    case, device = Case.of(workload), torch.device(device)
    dtype = getattr(torch, case.dtype)
    if case.seqlens is None:
        cu_q = cu_k = None
        lead_q: tuple[int, ...] = (case.batch, case.seqlen_q)
        lead_k: tuple[int, ...] = (case.batch, case.seqlen_k)
    else:
        lengths = torch.tensor(((0, 0), *case.seqlens), dtype=torch.int32)
        cu_q, cu_k = lengths.cumsum(0, dtype=torch.int32).T.contiguous().to(device)
        lead_q, lead_k = (int(cu_q[-1]),), (int(cu_k[-1]),)
    shapes = (
        (*lead_q, case.heads_q, case.head_dim),
        (*lead_k, case.heads_kv, case.head_dim),
        (*lead_k, case.heads_kv, case.head_dim_v),
    )
    generator = torch.Generator(device).manual_seed(seed)
    q, k, v = (
        _draw(kind, name, shape, generator).to(dtype)
        for name, shape in zip("qkv", shapes, strict=True)
    )
    return q, k, v, cu_q, cu_k


def make_output_gradients(
    workload: Any, kind: str = "normal", seed: int = 0, device: str | torch.device = "cuda"
) -> tuple[Tensor, Tensor]:
    """Gradients of out and lse, (dout, dlse): as out in q's dtype, and as lse in fp32.

    The same kind, seed and device type give the same tensors. Both are normal; of the kinds
    `outliers` and `wide_range`, dout is like q.
    """
    case, device = Case.of(workload), torch.device(device)
    rows: tuple[int, ...] = (case.batch, case.seqlen_q)
    if case.seqlens is not None:
        rows = (sum(len_q for len_q, _ in case.seqlens),)
    generator = torch.Generator(device).manual_seed(seed + _GRADIENTS)
    if kind not in ("outliers", "wide_range"):
        kind = "normal"
    dout = _draw(kind, "dout", (*rows, case.heads_q, case.head_dim_v), generator)
    dlse = _draw("normal", "dlse", (*rows[:-1], case.heads_q, rows[-1]), generator)
    return dout.to(getattr(torch, case.dtype)), dlse


def _draw(kind: str, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    device = generator.device

    def uniform() -> Tensor:
        return torch.rand(shape, generator=generator, device=device)

    if kind == "large_logits" and name != "v":
        # 16 bits round the last factor away and have exact products; fp32 and fp64 must not, or
        # the baseline would be exact where no other order of the same steps is.
        ternary = torch.randint(-1, 2, shape, generator=generator, device=device)
        return ternary * 16.0 * (1.0 + 2.0**-13 * uniform())
    if kind == "wide_range":
        low, high = (-12.0, 8.0) if name == "v" else (-12.0, 2.0)
        sign = torch.randint(0, 2, shape, generator=generator, device=device) * 2.0 - 1.0
        return sign * torch.exp2(low + (high - low) * uniform())
    values = torch.randn(shape, generator=generator, device=device)
    if kind == "outliers":
        return torch.where(uniform() < 1 / 256, 16.0 * values, values)
    if kind == "constant_rows" and name == "k":
        return values[..., :1, :, :].expand(shape)
    return values
