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


_INPUTS = "Tensor q, Tensor k, Tensor v"
_CU_SEQLENS = "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None"
_SHARED_OPTIONS = (
    Argument("scale", "float"),
    Argument("max_seqlen_q", "SymInt", 0),
    Argument("max_seqlen_k", "SymInt", 0),
    Argument("causal", "bool", False),
    Argument("window_left", "SymInt", -1),
    Argument("window_right", "SymInt", -1),
    Argument("softcap", "float", 0.0),
)
_VARIANT = Argument("variant", "int", 0)
_DETERMINISTIC = Argument("deterministic", "bool", False)

# Which CUDA kernel `variant` forces; 0 is the best one for the device.
VARIANTS = {"cpu": (0,), "cuda": (0, 80, 90), "meta": (0, 80, 90)}


def _forward_schema(options: tuple[Argument, ...]) -> str:
    arguments = f"{_INPUTS}, {_CU_SEQLENS}, *, {', '.join(map(str, options))}"
    return f"({arguments}) -> (Tensor out, Tensor lse)"


def _backward_schema(options: tuple[Argument, ...]) -> str:
    tensors = f"Tensor dout, {_INPUTS}, Tensor out, Tensor lse, Tensor? dlse=None, {_CU_SEQLENS}"
    return f"({tensors}, *, {', '.join(map(str, options))}) -> (Tensor dq, Tensor dk, Tensor dv)"


FORWARD = _forward_schema((*_SHARED_OPTIONS, _VARIANT))
BACKWARD = _backward_schema((*_SHARED_OPTIONS, _VARIANT, _DETERMINISTIC))
# There is one Triton kernel.
TRITON_FORWARD = _forward_schema(_SHARED_OPTIONS)
TRITON_BACKWARD = _backward_schema((*_SHARED_OPTIONS, _DETERMINISTIC))

# What a compiled library must define.
CHOOSE = (
    "(*, int head_dim, int head_dim_v, int seqlen_q, int seqlen_k, int batch, int heads_q, "
    "int heads_kv, bool causal, int window_left, int window_right, bool packed, float softcap, "
    "int sms, int capability, bool deterministic) -> str"
)
OPS = {
    "forward": FORWARD,
    "backward": BACKWARD,
    "kernels": "() -> str",
    "choose_forward": CHOOSE,
    "choose_backward": CHOOSE,
}
