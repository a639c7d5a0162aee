"""The SASS of a built library, function by function."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

BUILD = Path(__file__).parents[2] / "build"


@cache
def cuobjdump() -> Path | None:
    """Find cuobjdump: from Triton's wheel, otherwise from the toolkit."""
    triton = importlib.util.find_spec("triton")
    places = [
        Path(p) / "backends/nvidia/bin"
        for p in (triton and triton.submodule_search_locations) or ()
    ]
    places += [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"]
    found = [str(place / "cuobjdump") for place in places] + [shutil.which("cuobjdump") or ""]
    return next((Path(path) for path in found if os.access(path, os.X_OK)), None)


def _dump(library: Path, arch: str) -> str:
    """cuobjdump's text. It takes 7 s for the package's library, so test workers share a file."""
    file = BUILD / f"{library.stem}.{arch}.sass"
    file.parent.mkdir(exist_ok=True)
    with open(file.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists() or file.stat().st_mtime_ns <= library.stat().st_mtime_ns:
            command = [str(cuobjdump()), "-arch", arch, "-sass", str(library)]
            dump = subprocess.run(command, capture_output=True, check=True).stdout
            made = file.with_suffix(".tmp")
            made.write_bytes(dump)
            made.replace(file)
    return file.read_text()


@cache
def functions(library: Path, arch: str) -> dict[str, str]:
    """Demangled symbol -> SASS, for the kernels of one architecture."""
    text = _dump(library, arch)
    _, *parts = re.split(r"^\s*Function : (\S+)$", text, flags=re.MULTILINE)
    symbols = "\n".join(parts[::2])
    names = subprocess.run(["c++filt"], input=symbols, capture_output=True, text=True, check=True)
    return dict(zip(names.stdout.splitlines(), parts[1::2], strict=True))


def main_loop(code: str) -> str:
    """The only loop with products that other products follow (the last P V of a tile)."""
    lines = [(int(at, 16), text) for at, text in re.findall(r"/\*(\w{4,})\*/\s+(.*?);", code)]
    products = [at for at, text in lines if "HGMMA" in text]
    jumps = [(re.search(r"\bBRA\b.* 0x(\w+)", text), at) for at, text in lines]
    loops = [(int(jump[1], 16), at) for jump, at in jumps if jump and at < products[-1]]
    ((first, last),) = (loop for loop in loops if any(loop[0] <= at <= loop[1] for at in products))
    return "\n".join(text for at, text in lines if first <= at <= last)
