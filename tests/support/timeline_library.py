"""The instrumented library of a kernel, or a skip where it cannot be compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attnscope.timeline import library


def built(mode: str = "forward") -> tuple[Path, list[dict[str, Any]], float]:
    """What `library.build` returns, for bf16."""
    try:
        return library.build(library.source_tree(), "bfloat16", mode)
    except ValueError as error:
        pytest.skip(str(error))
