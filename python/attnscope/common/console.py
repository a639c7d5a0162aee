"""Lines on the terminal, and an exception as one line."""

from __future__ import annotations

import traceback

from rich.console import Console


def console(stderr: bool = False) -> Console:
    """A console; wide where the output is a file or a pipe."""
    found = Console(stderr=stderr)
    if not found.is_terminal:
        found.width = 180
    return found


def say(line: str, style: str | None = None, stderr: bool = False) -> None:
    """Print one line without markup."""
    out = console(stderr)
    out.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def explain(error: BaseException) -> str:
    """An exception as one line: its type, its message, and where Python raised it."""
    message = (str(error).strip() or "no message").splitlines()[0]
    kind = type(error).__name__
    if kind == "OutOfMemoryError":  # torch's; this package does not import torch for it
        kind = "out of memory"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno})" if frames else ""
    return f"{kind}: {message}{where}"
