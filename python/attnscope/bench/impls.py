"""Implementations of attention to check and time, ours and others', behind one interface.

`Impl.cannot` returns what an impl does not support, as a sentence. A pattern over kernel names
(GPU) or aten ops (CPU) verifies which implementation ran: requesting a backend from PyTorch is no
guarantee. A missing impl is reported, never replaced.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from attnscope.bench import peers
from attnscope.bench.aliases import ALIASES
from attnscope.bench.interface import Impl as Impl
from attnscope.bench.interface import Limits as Limits
from attnscope.bench.peers import Call, Inputs
from attnscope.bench.peers import Unsupported as Unsupported
from attnscope.bench.workloads import DTYPE_BYTES, Workload

HALF = ("bfloat16", "float16")


def _own(impl: str) -> Callable[[Workload, Inputs], Call]:
    def make(work: Workload, inputs: Inputs) -> Call:
        import attnscope

        q, k, v, cu_q, cu_k = inputs
        options: dict[str, Any] = dict(
            causal=work.causal, window=work.window, softcap=work.softcap, impl=impl, return_lse=True
        )
        if work.deterministic:
            options["deterministic"] = True
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
        options: dict[str, Any] = dict(enable_gqa=work.heads_q != work.heads_kv)
        options |= _sdpa_mask(work, inputs[0].device, backend_name)

        def call() -> tuple[Tensor, None]:
            # Views, since SDPA takes [B, H, S, D]. One that outlives the call would keep nodes of
            # autograd on the stream that it was made on, and a capture on another one would fail.
            q, k, v = (t.transpose(1, 2) for t in inputs[:3])
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


@contextmanager
def _torch_deterministic(work: Workload) -> Iterator[None]:
    """torch's deterministic algorithms, where asked for, without filling uninitialized memory."""
    if not work.deterministic:
        yield
        return
    filling: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled()
    fills = filling.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    filling.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        filling.fill_uninitialized_memory = fills


_MOST_SCORES = 8 << 30  # bytes


def _scores_too_large(element_bytes: int = 0) -> Callable[[Workload], str | None]:
    """Why an impl that keeps its score matrix for the backward should leave a workload out.

    `element_bytes` are those of a score; 0: of the inputs.
    """

    def left_out(work: Workload) -> str | None:
        scores = work.heads_q * sum(len_q * len_k for len_q, len_k in work.segments())
        size = scores * max(element_bytes, DTYPE_BYTES[work.dtype])
        if work.mode == "forward" or size <= _MOST_SCORES:
            return None
        return (
            f"keeps {size / 2**30:.0f} GiB of scores for the backward: at most "
            f"{_MOST_SCORES >> 30} GiB, or other impls would lack memory"
        )

    return left_out


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
            ran_backward={"cuda": r"attnscope::sm\d+::backward"},
            deterministic=True,
            absent=_own_cuda_absent,
            limits=_OWN,
        ),
        Impl(
            name="cuda-sm80",
            about="this project's portable CUDA kernel (mma.sync), forced",
            make=_own("cuda-sm80"),
            ran={"cuda": r"attnscope::sm80::forward"},
            ran_backward={"cuda": r"attnscope::sm80::backward"},
            deterministic=True,
            absent=_own_cuda_absent,
            limits=_OWN,
        ),
        Impl(
            name="triton",
            about="this project's Triton kernel",
            make=_own("triton"),
            ran={"cuda": r"^attnscope_triton_forward", "cpu": r"^attnscope_triton::forward"},
            ran_backward={
                "cuda": r"^attnscope_triton_backward",
                "cpu": r"^attnscope_triton::backward",
            },
            deterministic=True,
            absent=_no_interpreter,
            limits=Limits(head_dim=256, head_dim_step=8),
        ),
        Impl(
            name="cpu",
            about="this project's C++ kernel for CPUs",
            make=_own("cpu"),
            ran={"cpu": r"^attnscope::forward"},
            ran_backward={"cpu": r"^attnscope::backward"},
            deterministic=True,
            limits=Limits(head_dim=256, head_dim_step=8),
        ),
        Impl(
            name="naive",
            about="matmul, softmax, matmul in plain PyTorch",
            make=_naive,
            ran={"cuda": _GEMM, "cpu": r"aten::(bmm|matmul|mm)"},
            ran_backward={"cuda": _GEMM, "cpu": r"aten::(bmm|matmul|mm)"},
            deterministic=True,
            left_out=_scores_too_large(),
            not_ran=_FUSED,
        ),
        Impl(
            name="sdpa-math",
            about="torch SDPA, unfused",
            make=_sdpa("MATH"),
            ran={"cuda": _GEMM, "cpu": r"aten::bmm"},
            ran_backward={"cuda": _GEMM, "cpu": r"aten::bmm"},
            deterministic=True,
            left_out=_scores_too_large(4),
            not_ran=_FUSED,
            limits=_SDPA,
        ),
        Impl(
            name="sdpa-efficient",
            about="torch SDPA, memory-efficient kernel (CUTLASS)",
            make=_sdpa("EFFICIENT_ATTENTION"),
            ran={"cuda": r"fmha_cutlassF|AttentionKernel"},
            ran_backward={"cuda": r"fmha_cutlassB|AttentionBackwardKernel"},
            deterministic=True,
            scope=_torch_deterministic,
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
            ran_backward={
                "cuda": r"pytorch_flash::flash_bwd",
                "cpu": r"aten::_scaled_dot_product_flash_attention_for_cpu_backward",
            },
            deterministic=True,
            scope=_torch_deterministic,
            limits=_SDPA,
        ),
        Impl(
            name="sdpa-cudnn",
            about="torch SDPA, cuDNN",
            make=_sdpa("CUDNN_ATTENTION"),
            ran={"cuda": r"cudnn.*(sdpa|fmha|mha|flash)"},
            ran_backward={"cuda": r"cudnn.*bprop"},
            deterministic=True,
            scope=_torch_deterministic,
            limits=Limits(
                dtypes=HALF, window=False, softcap=False, packed=False, offset_causal=False
            ),
        ),
        Impl(
            name="fa2",
            about="FlashAttention-2, package flash-attn",
            make=peers.fa2,
            ran={"cuda": r"(?<!pytorch_)flash::flash_fwd"},
            ran_backward={"cuda": r"(?<!pytorch_)flash::flash_bwd"},
            deterministic=True,
            absent=_without("flash_attn.flash_attn_interface", "flash-attn"),
            limits=Limits(dtypes=HALF, head_dim=256, head_dim_step=8, own_head_dim_v=False),
        ),
        Impl(
            name="fa3",
            about="FlashAttention-3, package flash-attn-3 or fa3-fwd",
            make=peers.fa3,
            ran={"cuda": r"FlashAttnFwdSm90"},
            ran_backward={"cuda": r"FlashAttnBwdSm90"},
            deterministic=True,
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
            ran_backward={"cuda": r"(?i)flash_?att.*(bwd|backward)"},
            deterministic=True,
            absent=_without("flash_attn.cute.interface", "flash-attn-4"),
            limits=Limits(dtypes=HALF, head_dim=256, head_dim_step=8),
        ),
        Impl(
            name="flex",
            about="torch flex_attention, compiled",
            make=peers.flex,
            ran={"cuda": r"triton_.*flex|triton_tem"},
            ran_backward={"cuda": r"triton_.*flex.*backward|triton_tem"},
            deterministic=True,
            scope=peers.flex_scope,
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
            raise ValueError(f"impl must be one of {known}, got {name!r}")
        found[impl.name] = impl
    return list(found.values())
