"""Command-line options that several commands share, and how they refuse bad input."""

from __future__ import annotations

import re
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
TOKENS, HIDDEN = 16384, 2048  # batch and heads follow from these where they are left out
HEAD_DIM = typer.Option(help="Head dim of q, k and v.")
SEQ_LEN = typer.Option(help="Queries and keys of a sequence.")
Batch = Annotated[
    int | None, typer.Option(help=f"Left out: {TOKENS} tokens, one sequence at least.")
]
Heads = Annotated[int | None, typer.Option(help=f"Query heads. Left out: {HIDDEN} / head dim.")]
KvHeads = Annotated[
    int | None, typer.Option(help="Key and value heads. Left out: as many as query heads.")
]
Causal = Annotated[bool, typer.Option("--causal/--no-causal", help="Causal mask.")]


@contextmanager
def bad_input(command: str) -> Iterator[None]:
    """Turn a ValueError, or a file that cannot be read or written, into one line on stderr and exit
    code 2."""
    try:
        yield
    except ValueError as error:
        say(f"{command}: {error}", "red", stderr=True)
        raise typer.Exit(2) from None
    except BrokenPipeError:  # the reader of the output has what it wants, such as `head`
        raise
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
        device = torch.device("meta")
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ValueError(f"device must be cuda, cuda:N or cpu, got {name!r}")
    count, index = torch.cuda.device_count(), device.index or 0
    if index >= count:
        raise ValueError(f"device must be one of the {count} CUDA devices of PyTorch, got {name!r}")
    return torch.device("cuda", index)


def call_sizes(
    head_dim: int, seq_len: int, batch: int | None, heads: int | None, kv_heads: int | None
) -> dict[str, int]:
    """`batch`, `heads_q` and `heads_kv` of a call; those left out follow from TOKENS and HIDDEN."""
    heads = max(HIDDEN // max(head_dim, 1), 1) if heads is None else heads
    return {
        "batch": max(TOKENS // max(seq_len, 1), 1) if batch is None else batch,
        "heads_q": heads,
        "heads_kv": heads if kv_heads is None else kv_heads,
    }


def split(text: str) -> list[str]:
    """The words of a list with commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def integers(text: str, option: str) -> list[int]:
    """The positive integers of a list with commas."""
    words = split(text)
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise ValueError(f"{option} must be positive integers such as 128,256, got {text!r}")
    return [int(word) for word in words]


def parse_window(text: str) -> tuple[int, int]:
    """The two bounds of "LEFT,RIGHT". Raises ValueError for anything else."""
    found = re.fullmatch(r"(-?\d+),(-?\d+)", text)
    if found is None:
        raise ValueError(
            f"window must be LEFT,RIGHT, such as 255,0, got {text!r}. -1 leaves a side unbounded"
        )
    return int(found[1]), int(found[2])


def make_folder(path: Path) -> None:
    """Create the folder of the results before the measurement starts.

    Raises ValueError if it cannot be created or is not writable.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise ValueError(
            f"output must be a writable folder, got {path}: {error.strerror}"
        ) from None
