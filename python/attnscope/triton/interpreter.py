"""Whether Triton interprets (TRITON_INTERPRET=1), and the fixes that its interpreter needs."""

from __future__ import annotations

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


if INTERPRETED:
    _accept_new_numpy()
