"""Lines on the terminal, and an exception as one line."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

from attnscope.common.watcher import begin_step

_collected: list[str | Table] | None = None  # what is printed on stdout inside `collected`


def console(stderr: bool = False) -> Console:
    """A console; wide where the output is a file or a pipe."""
    found = Console(stderr=stderr)
    if not found.is_terminal:
        found.width = 180
    return found


def say(line: str, style: str | None = None, stderr: bool = False) -> None:
    """Print one line without markup."""
    if _collected is not None and not stderr:
        _collected.append(line)
        return
    out = console(stderr)
    out.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def show_table(table: Table) -> None:
    """Print a table."""
    if _collected is not None:
        _collected.append(table)
    else:
        console().print(table)


@contextmanager
def collected() -> Iterator[list[str | Table]]:
    """Keep the lines and tables that the block would print on stdout, in a list."""
    global _collected
    _collected, before = [], _collected
    try:
        yield _collected
    finally:
        _collected = before


@contextmanager
def progress(what: str) -> Iterator[Callable[[float], None]]:
    """A bar on stderr while the block runs; call the result with the share that is done, 0 to 1.

    The bar is shown in a terminal only, and is gone after the block.
    """
    begin_step(what)
    out = console(stderr=True)
    if not out.is_terminal:
        yield lambda share: None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=out, transient=True) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda share: bar.update(task, completed=share)


def explain(error: BaseException) -> str:
    """An exception as one line: its type, its message, and where Python raised it."""
    message = (str(error).strip() or "no message").splitlines()[0]
    kind = type(error).__name__
    if kind == "OutOfMemoryError":  # torch's; this package does not import torch for it
        kind = "out of memory"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno})" if frames else ""
    return f"{kind}: {message}{where}"
