"""Which rank of a run this process is, and which of its children were not recorded."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from attnscope.common import child

# Launcher, variables of the rank and of the number of ranks. torchrun comes first: under SLURM it
# is what starts the processes.
_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("SLURM", "SLURM_PROCID", "SLURM_NTASKS"),
)
# Modules that start other processes and do no work themselves.
LAUNCHER_MODULES = (
    "torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch",
)  # fmt: skip
MIN_CHILD_S = 0.5  # CPU seconds of children; compilers and shells take less


class RankOf(NamedTuple):
    """A rank of a run with several."""

    number: int
    world_size: int
    launcher: str


def rank_of_process(environment: Mapping[str, str] | None = None) -> RankOf | None:
    """The rank of this process; None if it is alone."""
    found = os.environ if environment is None else environment
    for launcher, rank, size in _LAUNCHERS:
        numbers = found.get(rank, ""), found.get(size, "")
        if all(map(str.isdecimal, numbers)):
            number, world = map(int, numbers)
            return RankOf(number, world, launcher) if 0 <= number < world > 1 else None
    return None


def child_seconds() -> float:
    """CPU seconds of the program's children that have ended and were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime - child.child_seconds()


def unrecorded_children(seconds_before: float) -> str | None:
    """What children of this process did since `child_seconds()` was `seconds_before`, in words.

    None if they did next to nothing.
    """
    seconds = child_seconds() - seconds_before
    alive = _children()
    if seconds < MIN_CHILD_S and not alive:
        return None
    parts = []
    if seconds >= MIN_CHILD_S:
        parts.append(f"child processes took {seconds:.1f} s of CPU time")
    if alive:
        names = ", ".join(dict.fromkeys(alive))
        parts.append(f"{len(alive)} are still running ({names:.60})")
    return (
        "; ".join(parts) + ". None of them was recorded: data loaders and compilers are among "
        "them, and so would be ranks that the script started itself"
    )


def _children() -> list[str]:
    """The commands of the children that are alive; empty where the system does not list them."""
    names = []
    for file in Path("/proc/self/task").glob("*/children"):
        try:
            for pid in file.read_text().split():
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                words = [word.decode(errors="replace") for word in command if word]
                script = next((w for w in words[1:] if not w.startswith("-")), "")
                names.append(re.sub(r".*/", "", script or (words or ["?"])[0]))
        except OSError:  # it has just ended
            continue
    return names
