"""Programs that this project drives: where they are found, and their versions."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

CUDA_BIN = Path("/usr/local/cuda/bin")

# Program -> (search patterns besides PATH, how to get it). Relative patterns are for programs that
# come in wheels: they are searched in the folders of sys.path.
TOOLS: dict[str, tuple[tuple[str, ...], str]] = {
    "g++": ((), "apt install g++"),
    "ninja": ((), "pip install ninja"),
    "nvcc": (
        (f"{CUDA_BIN}/nvcc", "nvidia/cu13/bin/nvcc"),
        "pip install 'attnscope[nvcc]', or NVIDIA's CUDA toolkit",
    ),
    "cuobjdump": (
        (f"{CUDA_BIN}/cuobjdump", "triton/backends/nvidia/bin/cuobjdump"),
        "pip install triton (it is in the wheel)",
    ),
    "ncu": (
        (f"{CUDA_BIN}/ncu", "/opt/nvidia/nsight-compute/*/ncu"),
        "NVIDIA's CUDA toolkit, or NVIDIA's apt package nsight-compute",
    ),
    "nsys": (
        (
            f"{CUDA_BIN}/nsys",
            "/opt/nvidia/nsight-systems/*/bin/nsys",
            "/opt/nvidia/nsight-compute/*/host/target-linux-x64/nsys",
        ),
        "NVIDIA's CUDA toolkit, or NVIDIA's apt package nsight-systems",
    ),
    "compute-sanitizer": (
        (f"{CUDA_BIN}/compute-sanitizer",),
        "NVIDIA's CUDA toolkit, or its apt package cuda-sanitizer",
    ),
}


@dataclass(frozen=True)
class Tool:
    """A program: where it is and its version, or what is wrong and how to get it."""

    name: str
    path: str | None = None
    version: str | None = None
    missing: str | None = None


def find_tool(name: str) -> Tool:
    """Find a program of TOOLS on PATH or in its usual places, and read its version."""
    places, remedy = TOOLS[name]
    path = shutil.which(name) or next(filter(None, map(_first_program, places)), None)
    if path is None:
        return Tool(name, missing=f"not found; {remedy}")
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        return Tool(name, path, missing=f"does not run ({error}); {remedy}")
    output = done.stdout + done.stderr
    found = re.search(r"(?:[Vv]ersion |\bV)(\d[\w.]*)", output) or re.search(
        r"(\d+\.[\d.]+)", output
    )
    if done.returncode or found is None:
        last = output.strip().splitlines()[-1:] or ["it printed nothing"]
        return Tool(name, path, missing=f"does not run ({last[0]}); {remedy}")
    return Tool(name, path, found[1])


def _first_program(pattern: str) -> str | None:
    """The last executable path, sorted by name, that matches a pattern: the newest version."""
    folders = [Path("/")] if pattern.startswith("/") else [Path(entry) for entry in sys.path]
    found = [path for folder in folders for path in folder.glob(pattern.lstrip("/"))]
    return max((str(path) for path in found if os.access(path, os.X_OK)), default=None)
