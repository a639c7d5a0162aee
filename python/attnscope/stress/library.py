"""Variants of the CUDA library: built from the source tree; delays are set through ctypes."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from attnscope._load import PACKAGE, REBUILD

# Must match enum Fault in csrc/attn/faults.cuh.
KINDS = ("late-copy", "copy", "query", "release", "release-tile", "tile", "scores", "add", "turn")
# Those that have an occasion in the kernels of a mode; turns are of deterministic calls.
MODES = {
    "forward": ("late-copy", "copy", "query", "release", "release-tile", "tile"),
    "backward": ("late-copy", "copy", "release", "release-tile", "tile", "scores", "add", "turn"),
}
RATE_UNIT = 65536  # a plan's rate is a share of this many occasions
MAX_CYCLES = 20_000
# The definitions of each variant; its folder in build/ has its name.
VARIANTS = {
    "faults": ("ATTNSCOPE_FAULTS",),
    "faults-unguarded": ("ATTNSCOPE_FAULTS", "ATTNSCOPE_UNGUARDED_RING"),
    "racecheck": ("ATTNSCOPE_RACECHECK",),
    "planted-race": ("ATTNSCOPE_RACECHECK", "ATTNSCOPE_PLANTED_RACE"),
}


@dataclass(frozen=True)
class Plan:
    """Which delays a launch gets: the kinds (a bit each), how often (of RATE_UNIT), how long."""

    seed: int
    kinds: int
    rate: int
    cycles: int

    def __str__(self) -> str:
        names = [name for bit, name in enumerate(KINDS) if self.kinds >> bit & 1]
        share = self.rate / RATE_UNIT
        return f"seed {self.seed}, {'+'.join(names)}, rate {share:.3f}, {self.cycles} cycles"


NO_DELAYS = Plan(0, 0, 0, 0)


def kinds_of(mode: str, deterministic: bool = False) -> tuple[str, ...]:
    """The kinds of delay that calls of a mode can have."""
    return tuple(kind for kind in MODES[mode] if kind != "turn" or deterministic)


def bits_of(kinds: Iterable[str]) -> int:
    return sum(1 << KINDS.index(kind) for kind in set(kinds))


def build(variant: str = "faults") -> Path:
    """Build a variant of the CUDA library and return its path; seconds where it is current.

    `faults` has injected delays; `faults-unguarded` also lacks the invariant of
    csrc/attn/ring.cuh, and its backward overwrites dS and adds dQ too early. `racecheck` arrives at
    barriers in a way that racecheck follows; `planted-race` also has a race for it to find
    (csrc/attn/faults.cuh).
    Raises ValueError outside the source tree or where the build fails.
    """
    root = next((r for r in (PACKAGE.parents[1], Path.cwd()) if (r / "setup.py").is_file()), None)
    if root is None:
        raise ValueError(
            f"the working folder must be attnscope's source tree, got {Path.cwd()}. The library "
            "is compiled from it; clone the sources and run the command there"
        )
    folder, defines = Path("build") / variant, ",".join(VARIANTS[variant])
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--define", defines]
    run = subprocess.run(
        [*command, "--build-temp", str(folder)], cwd=root, capture_output=True, text=True
    )
    path = root / folder / "_C_cuda.so"
    if run.returncode or not path.exists():
        output = f"{run.stdout[-2000:]}{run.stderr[-2000:]}"
        raise ValueError(
            f"variant must build, got {variant}, which fails. First {REBUILD}:\n{output}"
        )
    return path


class Faults:
    """The library in this process; sets the delays of later launches."""

    def __init__(self, path: Path) -> None:
        try:
            self._set = ctypes.CDLL(str(path)).attnscope_set_faults
        except (AttributeError, OSError):
            raise ValueError(
                f"library must be a build with -DATTNSCOPE_FAULTS, got {path}. "
                "Leave --library out to have it built"
            ) from None
        self._set.argtypes = [ctypes.c_uint32] * 4
        self._set.restype = ctypes.c_char_p

    def set(self, plan: Plan) -> None:
        """Use the plan in later launches on the current device."""
        message = self._set(plan.seed, plan.kinds, plan.rate, plan.cycles)
        if message is not None:
            raise RuntimeError(f"the delays must reach the device, got {message.decode()}")
