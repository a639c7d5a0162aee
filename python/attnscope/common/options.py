"""Command-line options that several commands share, and how they refuse bad input."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnscope.common.console import say

if TYPE_CHECKING:
    import torch

Device = Annotated[str | None, typer.Option(help="cuda, cuda:1, cpu; left out, a GPU if any.")]


@contextmanager
def bad_input(command: str) -> Iterator[None]:
    """Turn a ValueError, or a file that cannot be read or written, into one line on stderr and exit
    code 2."""
    try:
        yield
    except ValueError as error:
        say(f"{command}: {error}", "red", stderr=True)
        raise typer.Exit(2) from None
    except OSError as error:
        # A rename names the temporary file first.
        name = error.filename2 or error.filename
        text = f"{name}: {error.strerror}" if name and error.strerror else str(error)
        say(f"{command}: {text}", "red", stderr=True)
        raise typer.Exit(2) from None


def pick_device(name: str | None) -> torch.device:
    """An available device. Raises ValueError for any other."""
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device: {name!r} is not cuda, cuda:N or cpu") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ValueError(f"device: {name!r} is not cuda, cuda:N or cpu")
    count, index = torch.cuda.device_count(), device.index or 0
    if index >= count:
        raise ValueError(f"device: {name!r} is not there; PyTorch sees {count} CUDA devices")
    return torch.device("cuda", index)


def split(text: str) -> list[str]:
    """The words of a list with commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def integers(text: str, option: str) -> list[int]:
    """The positive integers of a list with commas."""
    words = split(text)
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise ValueError(f"{option}: {text!r} is not a list of positive integers such as 128,256")
    return [int(word) for word in words]


def make_folder(path: Path) -> None:
    """Create the folder of the results before the measurement starts.

    Raises ValueError if it cannot be created or is not writable.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise ValueError(f"output: {path}: {error.strerror}") from None
