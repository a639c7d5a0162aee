"""Implementations of attention to check and time, ours and others', behind one interface.

`Impl.cannot` returns what an impl does not support, as a sentence. A pattern over kernel names
(GPU) or aten ops (CPU) verifies which implementation ran: requesting a backend from PyTorch is no
guarantee. A missing impl is reported, never replaced.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnscope.bench import peers
from attnscope.bench.aliases import ALIASES
from attnscope.bench.peers import Call, Inputs
from attnscope.bench.peers import Unsupported as Unsupported
from attnscope.bench.workloads import Workload

HALF = ("bfloat16", "float16")
ALL_DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What an impl supports; the defaults allow the most."""

    dtypes: tuple[str, ...] = ALL_DTYPES
    head_dim: int | None = None  # largest
    head_dim_step: int = 1
    own_head_dim_v: bool = True  # head_dim_v may differ from head_dim
    window: bool = True
    softcap: bool = True
    packed: bool = True
    offset_causal: bool = True  # a causal mask where lengths differ, aligned to the bottom right
    capability: tuple[int, int] | None = None  # the one compute capability it was built for

    def broken_by(self, work: Workload, device: torch.device) -> str | None:
        """The first limit that the workload exceeds, as a sentence; None if it exceeds none."""
        offset = any(len_q != len_k for len_q, len_k in work.segments())
        if work.dtype not in self.dtypes:
            return f"dtype {work.dtype}: takes {', '.join(self.dtypes)}"
        if self.head_dim and max(work.head_dim, work.head_dim_v) > self.head_dim:
            return f"head dim {max(work.head_dim, work.head_dim_v)}: takes at most {self.head_dim}"
        if work.head_dim % self.head_dim_step or work.head_dim_v % self.head_dim_step:
            return f"head dim {work.head_dim}: takes multiples of {self.head_dim_step}"
        if work.head_dim_v != work.head_dim and not self.own_head_dim_v:
            return f"head_dim_v {work.head_dim_v}: must equal head_dim ({work.head_dim})"
        if work.window != (-1, -1) and not self.window:
            return "takes no sliding window"
        if work.softcap and not self.softcap:
            return "takes no softcap"
        if work.seqlens is not None and not self.packed:
            return "takes no packed batch"
        if work.causal and offset and not self.offset_causal:
            return "its causal mask is for equal lengths only"
        if self.capability and device.type == "cuda":
            have = torch.cuda.get_device_capability(device)
            if have != self.capability:
                want = ".".join(map(str, self.capability))
                return f"built for compute capability {want}, this card has {have[0]}.{have[1]}"
        return None


@dataclass(frozen=True, kw_only=True)
class Impl:
    """One way to compute attention.

    `make(work, inputs)` returns a callable without arguments that returns (out, lse or None) in the
    op's layouts. `ran` maps each supported device type to a pattern: at least one kernel name
    (CUDA) or op name (CPU) of a call must match it. No name may match `not_ran`. `absent()` is why
    the impl is not available here at all; `left_out(work)` is what its installed build lacks.
    """

    name: str
    about: str
    make: Callable[[Workload, Inputs], Call]
    ran: Mapping[str, str]
    not_ran: str | None = None
    limits: Limits = field(default_factory=Limits)
    absent: Callable[[], str | None] = lambda: None
    left_out: Callable[[Workload], str | None] = lambda work: None

    def cannot(self, work: Workload, device: torch.device) -> str | None:
        """Why this workload cannot run here; None if it can."""
        if device.type not in self.ran:
            return f"runs on {' and '.join(self.ran)} only, not on {device.type}"
        if work.mode != "forward":
            return f"mode {work.mode}: only forward passes are implemented"
        return self.absent() or self.limits.broken_by(work, device) or self.left_out(work)

    def unproved(self, names: Sequence[str], device_type: str) -> str | None:
        """Why the kernel or op names of one call do not match this impl; None if they do."""
        if not names:
            return "no kernel was seen in a profiled call (is another profiler attached?)"
        seen = ", ".join(names)
        if not any(re.search(self.ran[device_type], name) for name in names):
            return f"{self.name} ran {seen}; expected one that matches /{self.ran[device_type]}/"
        if self.not_ran and any(re.search(self.not_ran, name) for name in names):
            return f"{self.name} ran {seen}; expected none that matches /{self.not_ran}/"
        return None


def _own(impl: str) -> Callable[[Workload, Inputs], Call]:
    def make(work: Workload, inputs: Inputs) -> Call:
        import attnscope

        q, k, v, cu_q, cu_k = inputs
        options: dict[str, Any] = dict(
            causal=work.causal, window=work.window, softcap=work.softcap, impl=impl, return_lse=True
        )
        dense: Any = attnscope.attention
        packed: Any = attnscope.attention_varlen
        if cu_q is None:
            return lambda: dense(q, k, v, **options)
        longest = (work.seqlen_q, work.seqlen_k)
        return lambda: packed(q, k, v, cu_q, cu_k, *longest, **options)

    return make


def _naive(work: Workload, inputs: Inputs) -> Call:
    from attnscope.reference import naive_attention

    options: dict[str, Any] = dict(causal=work.causal, window=work.window, softcap=work.softcap)
    q, k, v, *bounds = inputs
    # It reads the bounds of packed sequences on the host: copied here, outside the timed call.
    bounds = [None if bound is None else bound.cpu() for bound in bounds]
    # Without the lse: these scores are rounded to the input dtype, unlike any kernel's scores.
    return lambda: (naive_attention(q, k, v, *bounds, **options)[0], None)


def _sdpa(backend_name: str) -> Callable[[Workload, Inputs], Call]:
    def make(work: Workload, inputs: Inputs) -> Call:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        backend = getattr(SDPBackend, backend_name)
        q, k, v = (t.transpose(1, 2) for t in inputs[:3])  # views: SDPA takes [B, H, S, D]
        options: dict[str, Any] = dict(enable_gqa=work.heads_q != work.heads_kv)
        options |= _sdpa_mask(work, q.device, backend_name)

        def call() -> tuple[Tensor, None]:
            with sdpa_kernel([backend]):
                out = scaled_dot_product_attention(q, k, v, **options)
            return out.transpose(1, 2), None

        # Only the backend itself can report whether it supports this call; its warnings give the
        # reason.
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                call()
            except RuntimeError as error:
                if not re.search("No (available kernel|viable backend)", str(error)):
                    raise
                texts = [str(w.message).split(" (Triggered")[0] for w in said]
                why = "; ".join(text for text in texts if not text.endswith("because:"))
                raise Unsupported(f"SDPA: {why or str(error).splitlines()[0]}") from None
        return call

    return make


def _sdpa_mask(work: Workload, device: torch.device, backend: str) -> dict[str, Any]:
    """The mask as SDPA wants it: its own causal flag is aligned to the upper left."""
    if work.window == (-1, -1) and (not work.causal or work.seqlen_q == work.seqlen_k):
        return {"is_causal": work.causal}
    if device.type == "cuda" and backend != "MATH":
        if work.window != (-1, -1):
            raise Unsupported("takes no sliding window")
        from torch.nn.attention.bias import causal_lower_right

        return {"attn_mask": causal_lower_right(work.seqlen_q, work.seqlen_k)}
    left, right = work.window[0], 0 if work.causal else work.window[1]
    diagonal = torch.arange(work.seqlen_q, device=device)[:, None] + work.seqlen_k - work.seqlen_q
    keys = torch.arange(work.seqlen_k, device=device)
    seen = torch.ones(work.seqlen_q, work.seqlen_k, dtype=torch.bool, device=device)
    if left >= 0:
        seen &= keys >= diagonal - left
    if right >= 0:
        seen &= keys <= diagonal + right
    return {"attn_mask": seen}


def _own_cuda_absent() -> str | None:
    from attnscope._load import library_status

    status = library_status()["_C_cuda"]
    return None if status == "loaded" else f"the CUDA library: {status}"


def _no_interpreter() -> str | None:
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return "Triton needs a GPU, or its interpreter (TRITON_INTERPRET=1; slow, for checks alone)"


def _without(module: str, package: str) -> Callable[[], str | None]:
    def absent() -> str | None:
        if peers.installed(module):
            return None
        return f"package {package} is not installed (no module {module})"

    return absent


_OWN = Limits(dtypes=HALF, head_dim=256, head_dim_step=8)
_SDPA = Limits(softcap=False, packed=False)
_FUSED = r"flash|fmha|cudnn|[eE]fficient"
_GEMM = r"gemm|gemv|nvjet|cutlass|xmma|dot_kernel|bmm"

IMPLS: dict[str, Impl] = {
    impl.name: impl
    for impl in (
        Impl(
            name="cuda",
            about="this project's best CUDA kernel for the card",
            make=_own("cuda"),
            ran={"cuda": r"attnscope::sm\d+::forward"},
            absent=_own_cuda_absent,
            limits=_OWN,
        ),
        Impl(
            name="cuda-sm80",
            about="this project's portable CUDA kernel (mma.sync), forced",
            make=_own("cuda-sm80"),
            ran={"cuda": r"attnscope::sm80::forward"},
            absent=_own_cuda_absent,
            limits=_OWN,
        ),
        Impl(
            name="triton",
            about="this project's Triton kernel",
            make=_own("triton"),
            ran={"cuda": r"^attnscope_triton_forward", "cpu": r"^attnscope_triton::forward"},
            absent=_no_interpreter,
            limits=Limits(head_dim=256, head_dim_step=8),
        ),
        Impl(
            name="cpu",
            about="this project's C++ kernel for CPUs",
            make=_own("cpu"),
            ran={"cpu": r"^attnscope::forward"},
            limits=Limits(head_dim=256, head_dim_step=8),
        ),
        Impl(
            name="naive",
            about="matmul, softmax, matmul in plain PyTorch",
            make=_naive,
            ran={"cuda": _GEMM, "cpu": r"aten::(bmm|matmul|mm)"},
            not_ran=_FUSED,
        ),
        Impl(
            name="sdpa-math",
            about="torch SDPA, unfused",
            make=_sdpa("MATH"),
            ran={"cuda": _GEMM, "cpu": r"aten::bmm"},
            not_ran=_FUSED,
            limits=_SDPA,
        ),
        Impl(
            name="sdpa-efficient",
            about="torch SDPA, memory-efficient kernel (CUTLASS)",
            make=_sdpa("EFFICIENT_ATTENTION"),
            ran={"cuda": r"fmha_cutlassF|AttentionKernel"},
            limits=Limits(dtypes=(*HALF, "float32"), window=False, softcap=False, packed=False),
        ),
        Impl(
            name="sdpa-flash",
            about="torch SDPA, FlashAttention-2 (on a CPU: torch's own flash kernel)",
            make=_sdpa("FLASH_ATTENTION"),
            ran={
                "cuda": r"pytorch_flash::flash_fwd",
                "cpu": r"aten::_scaled_dot_product_flash_attention_for_cpu",
            },
            limits=_SDPA,
        ),
        Impl(
            name="sdpa-cudnn",
            about="torch SDPA, cuDNN",
            make=_sdpa("CUDNN_ATTENTION"),
            ran={"cuda": r"cudnn.*(sdpa|fmha|mha|flash)"},
            limits=Limits(
                dtypes=HALF, window=False, softcap=False, packed=False, offset_causal=False
            ),
        ),
        Impl(
            name="fa2",
            about="FlashAttention-2, package flash-attn",
            make=peers.fa2,
            ran={"cuda": r"(?<!pytorch_)flash::flash_fwd"},
            absent=_without("flash_attn.flash_attn_interface", "flash-attn"),
            limits=Limits(dtypes=HALF, head_dim=256, head_dim_step=8, own_head_dim_v=False),
        ),
        Impl(
            name="fa3",
            about="FlashAttention-3, package flash-attn-3 or fa3-fwd",
            make=peers.fa3,
            ran={"cuda": r"FlashAttnFwdSm90"},
            absent=peers.fa3_absent,
            left_out=peers.fa3_left_out,
            limits=Limits(dtypes=HALF, head_dim=256, head_dim_step=8, capability=(9, 0)),
        ),
        Impl(
            name="fa3-metadata",
            about="FlashAttention-3 on packed batches, its scheduler_metadata made once",
            make=peers.fa3_metadata,
            ran={"cuda": r"FlashAttnFwdSm90"},
            not_ran=r"prepare_varlen_num_blocks",
            absent=peers.fa3_absent,
            left_out=peers.fa3_metadata_left_out,
            limits=Limits(dtypes=HALF, head_dim=256, head_dim_step=8, capability=(9, 0)),
        ),
        Impl(
            name="fa4",
            about="FlashAttention-4, package flash-attn-4",
            make=peers.fa4,
            ran={"cuda": r"(?i)flash_?attn|FlashAttentionForward"},
            absent=_without("flash_attn.cute.interface", "flash-attn-4"),
            limits=Limits(dtypes=HALF, head_dim=256, head_dim_step=8),
        ),
        Impl(
            name="flex",
            about="torch flex_attention, compiled",
            make=peers.flex,
            ran={"cuda": r"triton_.*flex|triton_tem"},
            limits=Limits(dtypes=(*HALF, "float32"), packed=False),
        ),
    )
}

# The impls that run by default.
DEFAULTS = {
    "cuda": tuple(name for name in IMPLS if name != "cpu"),
    "cpu": ("cpu", "naive", "sdpa-math", "sdpa-flash"),
}
BASELINES = {"cuda": "sdpa-flash", "cpu": "sdpa-flash"}


def resolve(names: Sequence[str]) -> list[Impl]:
    """Impls by name or alias, each once, in the order given. Raises ValueError for others."""
    found = {}
    for name in names:
        impl = IMPLS.get(ALIASES.get(name, name))
        if impl is None:
            known = ", ".join([*IMPLS, *(f"{short} (= {long})" for short, long in ALIASES.items())])
            raise ValueError(f"impl: {name!r} is not one of {known}")
        found[impl.name] = impl
    return list(found.values())
