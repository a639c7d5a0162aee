"""Helpers of the tests of the forward op: targets to call, and checks of results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnscope import attention, attention_varlen
from attnscope.bench.workloads import Workload
from attnscope.numerics import check_forward_fn, compare_forward
from attnscope.reference import attention_reference, naive_attention_blocked

HEAD_DIMS = (8, 16, 24, 32, 40, 64, 72, 80, 96, 104, 128, 160, 192, 256)
LENGTHS = (
    (1, 1), (1, 7), (1, 200), (3, 5), (5, 3), (63, 65), (65, 63),
    (128, 128), (129, 257), (257, 130), (200, 72), (72, 200),
)  # fmt: skip
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "left": {"window": (33, -1)},
    "right": {"window": (-1, 5)},
    "band": {"window": (8, 16)},
    "causal-band": {"causal": True, "window": (70, -1)},
    "softcap": {"softcap": 3.0},
    "causal-softcap": {"causal": True, "softcap": 20.0},
}


@dataclass(frozen=True)
class Target:
    """An implementation under test, with the device and dtype of the inputs made for it."""

    impl: str | None
    device: str
    dtype: torch.dtype

    @property
    def op(self) -> Any:
        """The op behind the implementation, without the checks of attention."""
        namespace = torch.ops.attnscope_triton if self.impl == "triton" else torch.ops.attnscope
        return namespace.forward.default

    @property
    def forced(self) -> dict[str, int]:
        """Options that force the op to run this implementation."""
        variant = {"cuda-sm80": 80, "cuda-sm90": 90}.get(self.impl or "")
        return {} if variant is None else {"variant": variant}

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def qkv(
        self, batch: int, seqlen_q: int, seqlen_k: int, heads_q: int, heads_kv: int, dim: int = 64
    ) -> tuple[Tensor, Tensor, Tensor]:
        q = self.randn(batch, seqlen_q, heads_q, dim)
        k, v = (self.randn(batch, seqlen_k, heads_kv, dim) for _ in range(2))
        return q, k, v

    def cu_seqlens(self, *bounds: int) -> Tensor:
        return torch.tensor(bounds, dtype=torch.int32, device=self.device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *packing: Any, **options: Any) -> Any:
        """(out, lse) of attention, or of attention_varlen if `packing` is given."""
        call = attention_varlen if packing else attention
        return call(q, k, v, *packing, return_lse=True, impl=self.impl, **options)


def assert_matches(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    rows: Tensor | None = None,
    **options: Any,
) -> None:
    """Check with the project's gate. out and lse contain only `rows` (dense), if given."""
    options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "rows": rows}
    truth = attention_reference(q, k, v, **options)
    baseline, _ = naive_attention_blocked(q, k, v, **options)
    wide = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (q, k, v))
    _, baseline_lse = naive_attention_blocked(*wide, **options)
    softcap = options.get("softcap", 0.0)
    verdict = compare_forward(out, lse, *truth, baseline, baseline_lse, softcap=softcap)
    assert verdict.passed, verdict.reason


def assert_workload_passes(target: Target, kind: str = "normal", **shape: Any) -> None:
    """Check a workload with the bench's gate, and that two runs are bitwise equal."""
    workload = Workload.of(dtype=str(target.dtype).removeprefix("torch."), **shape)
    options = {name: getattr(workload, name) for name in ("causal", "window", "softcap")}

    def run(q: Tensor, k: Tensor, v: Tensor, *cu_seqlens: Tensor | None) -> Any:
        packing: tuple[Any, ...] = ()
        if workload.seqlens is not None:
            packing = (*cu_seqlens, workload.seqlen_q, workload.seqlen_k)
        return target(q, k, v, *packing, **options)

    verdict = check_forward_fn(run, workload, kind, device=target.device)
    assert verdict.passed, verdict.reason
    assert verdict.repeatable, "two runs differ"


def assert_unaffected(t: Target, got: Tensor, want: Tensor) -> None:
    """Check that the bits are equal; for Triton, and for out of the Hopper kernel, equal to a few
    ulps, because those compute doubtful rows another way."""
    if t.impl == "triton" or (t.impl in ("cuda", "cuda-sm90") and got.dtype != torch.float32):
        eps = torch.finfo(got.dtype).eps
        torch.testing.assert_close(got, want, atol=max(4 * eps, 1e-5), rtol=4 * eps)
    else:
        assert torch.equal(got, want)
