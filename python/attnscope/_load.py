"""Loads the compiled libraries of the package into torch, once, when the package is imported."""

import json
import os
from pathlib import Path

import torch

PACKAGE = Path(__file__).parent
# A build of the CUDA kernels to load in place of the package's, such as one with injected faults.
CUDA_LIBRARY = Path(os.environ.get("ATTNSCOPE_CUDA_LIBRARY") or PACKAGE / "_C_cuda.so")
REBUILD = "run `make build` or `pip install .` in the source tree"
# What this Python calls, with the number of arguments; a library that has it otherwise was built
# from other sources.
OPS = {"forward": 13, "kernels": 0}


def _load_library(name: str, path: Path | None = None) -> None:
    path = path or PACKAGE / f"{name}.so"
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(
            f"attnscope: {path} does not load in torch {torch.__version__} (2.10 or later is "
            f"needed): {error}; {REBUILD}"
        ) from error


def _arguments(op: str) -> int | None:
    if not hasattr(torch.ops.attnscope, op):
        return None
    return len(getattr(torch.ops.attnscope, op).default._schema.arguments)


def _load() -> dict[str, str]:
    if not (PACKAGE / "_C.so").exists():
        raise ImportError(f"attnscope: {PACKAGE / '_C.so'} is not built; {REBUILD}")
    _load_library("_C")
    for name, arguments in OPS.items():
        if _arguments(name) != arguments:
            raise ImportError(
                f"attnscope: {PACKAGE / '_C.so'} is stale, it has no op {name} of {arguments} "
                f"arguments; {REBUILD}"
            )
    status = {"_C": "loaded"}
    if not (PACKAGE / "_C_cuda.so").exists():
        status["_C_cuda"] = f"not built: {build_report()['not_built']}"
    elif torch.version.cuda is None:
        status["_C_cuda"] = "built, not loaded: this torch has no CUDA"
    else:
        _load_library("_C_cuda", CUDA_LIBRARY)
        status["_C_cuda"] = "loaded"
    return status


def build_report() -> dict:
    """What the build wrote: `not_built` (why there is no CUDA library, or None) and `kernels`
    (registers, static shared memory, stack and spills of each kernel and architecture)."""
    path = PACKAGE / "kernels.json"
    if not path.exists():
        raise ImportError(f"attnscope: {path} is missing; {REBUILD}")
    return json.loads(path.read_text())


def library_status() -> dict[str, str]:
    """For `_C` and `_C_cuda`: "loaded", or why not."""
    return dict(_STATUS)


_STATUS = _load()
