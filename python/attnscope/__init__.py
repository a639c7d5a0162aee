"""Hand-written attention kernels, and the tools that verify, measure and profile them.

The first access to `attention` or `attention_varlen` imports torch and the compiled ops. `import
attnscope.ops` registers the ops of `torch.ops.attnscope` alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnscope.functional import attention, attention_varlen

__all__ = ["attention", "attention_varlen"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'attnscope' has no attribute {name!r}")
    from attnscope import functional

    globals().update({one: getattr(functional, one) for one in __all__})
    return globals()[name]


def __dir__() -> list[str]:
    return [*globals(), *__all__]
