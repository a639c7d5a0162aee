"""The native collector: compiled on first use against the CUPTI that PyTorch has loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from attnscope._load import PACKAGE

SOURCE = Path("profiling/native/counters.cpp")
NAME = "attnscope_counters"
_HEADERS = ("cupti_range_profiler.h", "cuda.h")


class Unavailable(RuntimeError):
    """Counters cannot be read here; the message has the reason and the remedy."""


@cache
def load() -> Any:
    """The extension module. Raises Unavailable without a GPU, sources, headers or a compiler."""
    import torch

    if not torch.cuda.is_available():
        raise Unavailable("no CUDA device")
    torch.cuda.init()
    library = _loaded_cupti()
    if library is None:
        raise Unavailable("this PyTorch has loaded no CUPTI; its CUDA wheels have one")
    from torch.utils.cpp_extension import load as compile_extension

    root = _source_tree()
    # PyTorch compiles again where the source, the flags or the CUPTI changed.
    folder = root / "build/counters" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return compile_extension(
            NAME,
            [str(root / SOURCE)],
            extra_include_paths=[str(path) for path in _include_folders(library)],
            extra_ldflags=[str(library), f"-Wl,-rpath,{library.parent}"],
            build_directory=str(folder),
        )
    except Unavailable:
        raise
    except (RuntimeError, OSError, ImportError) as error:
        first = str(error).strip().splitlines()[0]
        raise Unavailable(
            f"{SOURCE} does not build: {first}. It needs g++ and ninja, and {folder} writable"
        ) from None


def _source_tree() -> Path:
    for root in (PACKAGE.parents[1], Path.cwd()):
        if (root / SOURCE).is_file():
            return root
    raise Unavailable(
        f"{SOURCE} is not here: wheels lack it. Run the command in attnscope's source tree"
    )


def _loaded_cupti() -> Path | None:
    """The CUPTI library of this process: a second copy would not see its contexts."""
    with open("/proc/self/maps") as maps:
        paths = [line.split(maxsplit=5)[-1].strip() for line in maps if "libcupti.so" in line]
    return Path(paths[0]) if paths else None


def _include_folders(library: Path) -> list[Path]:
    """Folders with the headers of that CUPTI, and of CUDA. Raises Unavailable without them."""
    folders = []
    for header in _HEADERS:
        found = next((path for path in _candidates(library) if (path / header).is_file()), None)
        if found is None:
            raise Unavailable(
                f"{header} is missing: pip install nvidia-cuda-cupti nvidia-cuda-runtime of "
                "PyTorch's CUDA version, or set CUDA_HOME to a toolkit"
            )
        folders.append(found)
    return list(dict.fromkeys(folders))


def _candidates(library: Path) -> Iterator[Path]:
    wheels = library.parent.parent  # nvidia/cu13, or nvidia/cuda_cupti
    yield wheels / "include"
    yield wheels.parent / "cuda_runtime/include"
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if home:
            yield Path(home) / "include"
            yield Path(home) / "extras/CUPTI/include"
