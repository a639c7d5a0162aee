"""The ops' arguments as data: csrc/binding/library.cpp has the same, and loading compares them."""

from __future__ import annotations

from typing import Any, NamedTuple


class Argument(NamedTuple):
    """A keyword-only argument of a schema; without a default it is required."""

    name: str
    type: str
    default: Any = None

    def __str__(self) -> str:
        return f"{self.type} {self.name}" + ("" if self.default is None else f"={self.default}")


_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, *, "
_SHARED_OPTIONS = (
    Argument("scale", "float"),
    Argument("max_seqlen_q", "SymInt", 0),
    Argument("max_seqlen_k", "SymInt", 0),
    Argument("causal", "bool", False),
    Argument("window_left", "SymInt", -1),
    Argument("window_right", "SymInt", -1),
    Argument("softcap", "float", 0.0),
)
FORWARD_OPTIONS = (*_SHARED_OPTIONS, Argument("variant", "int", 0))

# Which CUDA kernel `variant` forces; 0 is the best one for the device.
VARIANTS = {"cpu": (0,), "cuda": (0, 80, 90), "meta": (0, 80, 90)}


def _forward_schema(options: tuple[Argument, ...]) -> str:
    return f"({_TENSORS}{', '.join(map(str, options))}) -> (Tensor out, Tensor lse)"


FORWARD = _forward_schema(FORWARD_OPTIONS)
TRITON_FORWARD = _forward_schema(_SHARED_OPTIONS)  # there is one Triton kernel

# What a compiled library must define.
CHOOSE_FORWARD = (
    "(*, int head_dim, int head_dim_v, int seqlen_q, int seqlen_k, int batch, int heads_q, "
    "int heads_kv, bool causal, int window_left, int window_right, bool packed, float softcap, "
    "int sms, int capability) -> str"
)
OPS = {"forward": FORWARD, "kernels": "() -> str", "choose_forward": CHOOSE_FORWARD}
