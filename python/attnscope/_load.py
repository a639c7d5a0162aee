"""Loads the compiled libraries of the package into torch, once, when the package is imported."""

import json
import os
from itertools import zip_longest
from pathlib import Path

import torch

from attnscope.schemas import OPS

PACKAGE = Path(__file__).parent
# Path of a CUDA library to load instead of the package's, for example one with injected faults.
CUDA_LIBRARY = Path(os.environ.get("ATTNSCOPE_CUDA_LIBRARY") or PACKAGE / "_C_cuda.so")
REBUILD = "run `make build` or `pip install .` in the source tree"


def _load_library(name: str, path: Path | None = None) -> None:
    path = path or PACKAGE / f"{name}.so"
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(
            f"attnscope: {path} does not load in torch {torch.__version__} (2.10 or later is "
            f"needed): {error}; {REBUILD}"
        ) from error


def _difference(op: str, schema: str) -> str | None:
    """The first difference between the library's schema of an op and the one this Python calls."""
    if not hasattr(torch.ops.attnscope, op):
        return f"it has no op {op}"
    expected = str(torch._C.parse_schema(f"attnscope::{op}{schema}")).split(", ")
    compiled = str(getattr(torch.ops.attnscope, op).default._schema).split(", ")
    for ours, theirs in zip_longest(expected, compiled, fillvalue="nothing"):
        if ours != theirs:
            return f"its op {op} must have {ours!r}, got {theirs!r}"
    return None


def _load() -> dict[str, str]:
    if not (PACKAGE / "_C.so").exists():
        raise ImportError(f"attnscope: {PACKAGE / '_C.so'} is not built; {REBUILD}")
    _load_library("_C")
    for name, schema in OPS.items():
        if difference := _difference(name, schema):
            raise ImportError(
                f"attnscope: {PACKAGE / '_C.so'} is stale: {difference}. To rebuild it, {REBUILD}"
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
    """The build's own report: `not_built` (why there is no CUDA library, or None) and `kernels`
    (registers, static shared memory, stack and spills of each kernel and architecture)."""
    path = PACKAGE / "kernels.json"
    if not path.exists():
        raise ImportError(f"attnscope: {path} is missing; {REBUILD}")
    return json.loads(path.read_text())


def library_status() -> dict[str, str]:
    """For `_C` and `_C_cuda`: "loaded", or why not."""
    return dict(_STATUS)


_STATUS = _load()
