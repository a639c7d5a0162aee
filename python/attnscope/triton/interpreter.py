"""Whether Triton interprets (TRITON_INTERPRET=1), and the fixes that its interpreter needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from triton import knobs

INTERPRETED = bool(knobs.runtime.interpret)


def _accept_new_numpy() -> None:
    """Loop bounds are arrays of one element there; from numpy 2.4 on, int() of one is an error."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, *scope: Any) -> None:
        original(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patch


def _patch_language_once() -> None:
    """Each call of a device function patches triton.language: a quarter of the time of a launch."""
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._patch_lang
    nothing = SimpleNamespace(restore=lambda: None)

    def patch(function: Any) -> Any:
        values = list(function.__globals__.values())
        used = [lang for lang in (tl, tl.core) if any(value is lang for value in values)]
        builtins = [tl.tensor.to, *(lang.load for lang in used)]  # what is patched is none
        return original(function) if any(map(tl.core.is_builtin, builtins)) else nothing

    interpreter._patch_lang = patch


if INTERPRETED:
    _accept_new_numpy()
    _patch_language_once()
