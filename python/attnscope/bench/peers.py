"""Other people's attention packages, called as their own documentation does.

Each function builds a callable for one workload and one set of inputs; none of the packages is
imported before that. Layouts are theirs and ours alike: [B, S, H, D] or packed [T, H, D].
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from attnscope.bench.workloads import Workload


class Unsupported(Exception):
    """An impl refused a workload when it was built; the message is the reason."""


# (q, k, v, cu_seqlens_q, cu_seqlens_k), the last two None when dense.
Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
Call = Callable[[], tuple[Tensor, Tensor | None]]  # a forward: out, lse or None


def installed(module: str) -> bool:
    """Whether a module can be found, without importing it (its parent packages are imported)."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # no parent package; a module without a spec
        return False


def fa2(work: Workload, inputs: Inputs) -> Call:
    """FlashAttention-2; it returns the lse only with return_attn_probs."""
    return _flash(importlib.import_module("flash_attn"), work, inputs, return_attn_probs=True)


# The whole package and the forward-only build, each with the module that lists its build flags.
_FA3_MODULES = (
    ("flash_attn_interface", "flash_attn_config"),
    ("fa3_fwd_interface", "fa3_fwd_config"),
)


def _fa3_module() -> tuple[str, str] | None:
    return next((names for names in _FA3_MODULES if installed(names[0])), None)


def fa3_absent() -> str | None:
    """Why FlashAttention-3 is not available, or None."""
    if _fa3_module() is None:
        names = " or ".join(name for name, _ in _FA3_MODULES)
        return f"package flash-attn-3 or fa3-fwd is not installed (no module {names})"
    return None


def fa3_left_out(work: Workload) -> str | None:
    """What the installed FlashAttention-3 build was compiled without and the workload needs."""
    names = _fa3_module()
    if names is None or not installed(names[1]):
        return None
    flags = importlib.import_module(names[1]).CONFIG["build_flags"]
    needs = {
        "LOCAL": work.window != (-1, -1),
        "SOFTCAP": work.softcap > 0.0,
        "VARLEN": work.seqlens is not None,
        "FP16": work.dtype == "float16",
        "BACKWARD": work.mode != "forward",
    }
    for feature, needed in needs.items():
        flag = f"FLASHATTENTION_DISABLE_{feature}"
        if needed and flags.get(flag):
            return f"this build of {names[0]} was compiled with {flag}"
    return None


def fa3(work: Workload, inputs: Inputs) -> Call:
    """FlashAttention-3: the whole package where it is installed, else the forward-only build."""
    names = _fa3_module()
    assert names is not None, "asked for after fa3_absent said it is there"
    return _flash(importlib.import_module(names[0]), work, inputs, return_attn_probs=True)


# Where the two builds keep their operators.
_FA3_OPERATORS = ("flash_attn_3_gpu", "flash_attn_3_cuda", "fa3_fwd_cuda")


def fa3_metadata_left_out(work: Workload) -> str | None:
    """Why FlashAttention-3 cannot be called with metadata made once, or None."""
    if work.seqlens is None:
        return "reuses the schedule of a packed batch; this one is dense"
    return fa3_left_out(work)


def fa3_metadata(work: Workload, inputs: Inputs) -> Call:
    """FlashAttention-3 on a packed batch, its scheduler_metadata made once and used by every call.

    A server computes the metadata once a step, for all layers. The public varlen function does not
    accept it, so this calls the function below.
    """
    names = _fa3_module()
    assert names is not None, "asked for after fa3_absent said it is there"
    module = importlib.import_module(names[0])
    operators = next((getattr(module, n) for n in _FA3_OPERATORS if hasattr(module, n)), None)
    forward = getattr(module, "_flash_attn_forward", None)
    if operators is None or forward is None:
        raise Unsupported(f"{names[0]} has no get_scheduler_metadata or _flash_attn_forward")
    q, k, v, cu_q, cu_k = inputs
    assert cu_q is not None and cu_k is not None
    left, right = work.window[0], 0 if work.causal else work.window[1]
    splits, pack_gqa, margin, chunk = 1, None, 0, 0  # the public function's defaults
    lengths_k = (cu_k[1:] - cu_k[:-1]).int()
    metadata = operators.get_scheduler_metadata(
        work.batch, work.seqlen_q, work.seqlen_k, work.heads_q, work.heads_kv, work.head_dim,
        work.head_dim_v, q.dtype, lengths_k, cu_q, cu_k, None, None, None, None, 0, work.causal,
        left, right, chunk, work.softcap > 0, splits, pack_gqa, margin,
    )  # fmt: skip
    options: dict[str, Any] = dict(
        cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=work.seqlen_q,
        max_seqlen_k=work.seqlen_k, softmax_scale=work.head_dim**-0.5, causal=work.causal,
        window_size_left=left, window_size_right=right, attention_chunk=chunk,
        softcap=work.softcap, scheduler_metadata=metadata, num_splits=splits, pack_gqa=pack_gqa,
        sm_margin=margin,
    )  # fmt: skip

    def call() -> tuple[Tensor, Tensor | None]:
        result = forward(q, k, v, **options)
        return result[0], result[1]

    return call


def fa4(work: Workload, inputs: Inputs) -> Call:
    """FlashAttention-4 (CuTe DSL); its first call compiles. An unbounded window side is None."""
    module = importlib.import_module("flash_attn.cute")
    return _flash(module, work, inputs, unbounded=None, return_lse=True)


def _flash(
    module: Any, work: Workload, inputs: Inputs, *, unbounded: int | None = -1, **returns: bool
) -> Call:
    q, k, v, cu_q, cu_k = inputs
    options: dict[str, Any] = dict(causal=work.causal, softcap=work.softcap, **returns)
    options["window_size"] = tuple(unbounded if side < 0 else side for side in work.window)
    if work.deterministic:
        options["deterministic"] = True
    if cu_q is not None:
        options |= dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
        options |= dict(max_seqlen_q=work.seqlen_q, max_seqlen_k=work.seqlen_k)
        attention = module.flash_attn_varlen_func
    else:
        attention = module.flash_attn_func

    def call() -> tuple[Tensor, Tensor | None]:
        result = attention(q, k, v, **options)
        return (result[0], result[1]) if isinstance(result, tuple) else (result, None)

    return call


@contextmanager
def flex_scope(work: Workload) -> Iterator[None]:
    """Keep the graph of a compiled forward usable for several backwards.

    A compiled backward frees buffers of the graph unless a setting of its thread forbids that, so
    the backward has to run in the calling thread.
    """
    import torch
    import torch._functorch.config as config

    with (
        config.patch(donated_buffer=False),  # type: ignore[attr-defined]
        torch.autograd.set_multithreading_enabled(False),
    ):
        yield


def flex(work: Workload, inputs: Inputs) -> Call:
    """torch flex_attention under torch.compile, with a block mask; its first call compiles."""
    import torch
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    offset = work.seqlen_k - work.seqlen_q
    left, right = work.window[0], 0 if work.causal else work.window[1]

    def visible(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        seen = key == key
        if left >= 0:
            seen = seen & (key >= row + offset - left)
        if right >= 0:
            seen = seen & (key <= row + offset + right)
        return seen

    def cap(score: Tensor, b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return work.softcap * torch.tanh(score / work.softcap)

    mask = None
    if left >= 0 or right >= 0:
        mask = create_block_mask(
            visible, None, None, work.seqlen_q, work.seqlen_k, inputs[0].device.type
        )
    # Compiled code is kept per function, at most eight shapes: beyond, it would run uncompiled.
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    options: dict[str, Any] = dict(block_mask=mask, score_mod=cap if work.softcap else None)
    options |= dict(enable_gqa=work.heads_q != work.heads_kv, return_aux=AuxRequest(lse=True))

    def call() -> tuple[Tensor, Tensor | None]:
        q, k, v = (t.transpose(1, 2) for t in inputs[:3])  # made anew, as in impls._sdpa
        out, aux = compiled(q, k, v, **options)
        return out.transpose(1, 2), aux.lse

    return call
