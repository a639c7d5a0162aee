"""The instrumented copies of the Hopper kernels: compiled on first use from the source tree."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from attnscope._load import PACKAGE
from attnscope.kernels import Call, choose_backward, choose_forward, symbol_matches

SOURCES = {
    "forward": ("csrc/kernels/sm90_forward/launch.cu", "csrc/attn/tile_counter.cu"),
    "backward": ("csrc/kernels/sm90_backward/launch.cu",),
}
FOLDERS = ("csrc/ptx", "csrc/attn")  # and the folder of the kernel
TILE_FIELDS = {
    "forward": (
        "head_dim", "block_m", "block_n", "q_stages", "stages", "blocks_per_sm", "consumers",
        "scores_live", "heads_per_tile", "key_parts",
    ),
    "backward": (
        "row", "head_dim", "block_m", "block_n", "stages", "blocks_per_sm", "consumers",
    ),
}  # fmt: skip
HOPPER = 90  # compute capability
ELEMENTS = {"bfloat16": "__nv_bfloat16", "float16": "__half"}


def source_tree() -> Path:
    """The tree that the package was imported from, or else the current directory.

    Raises ValueError where neither holds the sources of the kernel.
    """
    for root in (PACKAGE.parents[1], Path.cwd()):
        if (root / "setup.py").is_file() and all(
            (root / name).is_file() for names in SOURCES.values() for name in names
        ):
            return root
    raise ValueError(
        f"the working folder must be attnscope's source tree, got {Path.cwd()}. The instrumented "
        "kernel is compiled from it; clone the sources and run the command there"
    )


def build(
    root: Path, dtype: str, mode: str = "forward"
) -> tuple[Path, list[dict[str, Any]], float]:
    """Compile the instrumented library, unless it was compiled of these sources before.

    It serves one dtype, "bfloat16" or "float16", and one mode, "forward" or "backward", so that the
    first call of a session waits less.

    Returns its path, registers and spills of its kernels (`tools/ptxas.py`), and the seconds that
    the compiler took (0 where it did not run). Raises ValueError without nvcc, RuntimeError where
    it fails, or where ptxas serialises the products: such a kernel is not the one to look at.
    """
    setup = _setup_module(root)
    nvcc = setup.find_nvcc()
    if nvcc is None:
        raise ValueError(
            "nvcc must be in CUDA_HOME, PATH or /usr/local/cuda, got none. "
            "pip install 'attnscope[nvcc]' has one"
        )
    home = setup.cuda_home(nvcc)
    command = [str(nvcc), *setup.DEVICE.split(), f"-DATTNSCOPE_TIMELINE={ELEMENTS[dtype]}"]
    command += [f"-gencode=arch=compute_{target}" for target in setup.ARCHITECTURES["sm90"]]
    command += ["-shared", "-cudart", "static", *SOURCES[mode]]
    command += [f"-L{home / name}" for name in ("lib64", "lib", "targets/x86_64-linux/lib")]
    version = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True).stdout
    digest = hashlib.sha256("\0".join((*command, version)).encode())
    folders = (*FOLDERS, f"csrc/kernels/sm90_{mode}")
    for path in sorted(p for folder in folders for p in (root / folder).iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    library = root / "build/timeline" / f"sm90_{mode}-{dtype}-{digest.hexdigest()[:16]}.so"
    log, seconds = library.with_suffix(".ptxas"), 0.0
    if not (library.exists() and log.exists()):
        library.parent.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_suffix(f".{os.getpid()}")
        start = time.perf_counter()
        run = subprocess.run(
            [*command, "-o", str(unfinished)], cwd=root, capture_output=True, text=True
        )
        seconds = time.perf_counter() - start
        if run.returncode:
            raise RuntimeError(
                f"nvcc must compile the kernel, got an error:\n{run.stdout}{run.stderr}"
            )
        log.write_text(run.stdout + run.stderr)
        os.replace(unfinished, library)
    usage, warnings = setup.ptxas.parse(log.read_text())
    if warnings:
        raise RuntimeError(f"ptxas must compile without warnings, got {'; '.join(warnings)}")
    return library, usage, seconds


def _setup_module(root: Path) -> ModuleType:
    """setup.py of the tree, for the flags and the nvcc that the package itself is built with."""
    spec = importlib.util.spec_from_file_location("attnscope_setup", root / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise ValueError(f"setup.py must have its packages, got {error}. Install it") from None
    finally:
        sys.path[:] = path
    return module


def tile_of(work: Any, sms: int, mode: str = "forward") -> dict[str, int]:
    """The tile of the Hopper kernel that serves a dense call, by `TILE_FIELDS`; in the forward also
    "heads", the query heads side by side in the tile.

    `work` has the fields of `inputs.Case`, `sms` is the device's. Raises ValueError for sizes that
    no call has.
    """
    fields = {name: getattr(work, name) for name in Call._fields if hasattr(work, name)}
    choose = choose_forward if mode == "forward" else choose_backward
    choice = choose(Call(**fields, packed=False, sms=sms, capability=HOPPER))
    tile = {name: int(choice["tile"][name]) for name in TILE_FIELDS[mode]}
    return tile | ({"heads": choice["heads_side_by_side"]} if mode == "forward" else {})


class Tile(ctypes.Structure):
    """TimelineTile of csrc/kernels/sm90_forward/record.cuh."""

    _fields_ = [  # noqa: RUF012 (ctypes reads a list)
        (name, ctypes.c_int)
        for name in (
            "block_m", "block_n", "blocks_per_sm", "consumers", "heads_per_tile", "key_parts",
            "heads",
        )
    ]  # fmt: skip


class Backward(ctypes.Structure):
    """TimelineBackward of csrc/kernels/sm90_backward/record.cuh."""

    _fields_ = [  # noqa: RUF012 (ctypes reads a list)
        *((name, ctypes.c_void_p) for name in (
            "dout", "q", "k", "v", "out", "lse", "dq", "dk", "dv", "workspace",
        )),
        ("scale", ctypes.c_double),
        *((name, ctypes.c_int) for name in (
            "batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv", "head_dim", "causal", "block_m",
            "block_n",
        )),
    ]  # fmt: skip


class Instrumented:
    """The library of a kernel in this process.

    Tensors are dense and contiguous, of the dtype that it was built for, all on one device.
    """

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._buffer = self._library.attnscope_timeline_buffer
        self._buffer.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int]
        self._buffer.restype = ctypes.c_char_p

    def attach(self, words: Tensor, lanes: int, tile_rows: int, step_rows: int) -> None:
        """Let the launches that follow leave their marks in `words` (int32, see Recording)."""
        _raise(self._buffer(words.data_ptr(), lanes, tile_rows, step_rows))


class InstrumentedBackward(Instrumented):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        call = ctypes.POINTER(Backward)
        self._workspace = self._library.attnscope_timeline_workspace
        self._workspace.argtypes, self._workspace.restype = [call], ctypes.c_int64
        self._backward = self._library.attnscope_timeline_backward
        self._backward.argtypes = [call, ctypes.c_void_p]
        self._backward.restype = ctypes.c_char_p

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        causal: bool, tile: dict[str, int],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """(dq, dk, dv) of q [B, Sq, Hq, D], k and v [B, Sk, Hkv, D], on torch's current stream.

        `tile` is what `tile_of` returns for the call. Raises RuntimeError if the launch fails, or
        the library was compiled from sources that choose another tile.
        """
        dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
        pointers = [t.data_ptr() for t in (dout, q, k, v, out, lse, dq, dk, dv)]
        sizes = (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3])
        options = (causal, tile["block_m"], tile["block_n"])
        call = Backward(*pointers, 0, q.shape[3] ** -0.5, *sizes, *options)
        size = int(self._workspace(call))
        workspace = torch.empty(size, dtype=torch.uint8, device=q.device)
        call.workspace = workspace.data_ptr()
        _raise(self._backward(call, torch.cuda.current_stream(q.device).cuda_stream))
        return dq, dk, dv


class InstrumentedForward(Instrumented):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        pointer, integer, flag = ctypes.c_void_p, ctypes.c_int, ctypes.c_bool
        self._forward = self._library.attnscope_timeline_forward
        self._forward.argtypes = (
            [pointer] * 5 + [integer] * 6 + [flag]
            + [ctypes.c_double, ctypes.POINTER(Tile), pointer]
        )  # fmt: skip
        self._forward.restype = ctypes.c_char_p

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, tile: dict[str, int]
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) of q [B, Sq, Hq, D], k and v [B, Sk, Hkv, D], on torch's current stream.

        `tile` is what `tile_of` returns for the call. Raises RuntimeError if the launch fails, or
        the library was compiled from sources that choose another tile.
        """
        batch, rows, heads, dim = q.shape
        out = torch.empty_like(q)
        lse = q.new_empty(batch, heads, rows, dtype=torch.float32)
        pointers = (t.data_ptr() for t in (q, k, v, out, lse))
        sizes = (batch, rows, k.shape[1], heads, k.shape[2], dim)
        stream = torch.cuda.current_stream(q.device).cuda_stream
        expected = Tile(*(tile[name] for name, *_ in Tile._fields_))
        options = (causal, dim**-0.5, ctypes.byref(expected))
        _raise(self._forward(*pointers, *sizes, *options, stream))
        return out, lse


def _raise(message: bytes | None) -> None:
    if message is not None:
        raise RuntimeError(f"the instrumented kernel must launch, got {message.decode()}")


def usage_of(usage: list[dict[str, Any]], tile: dict[str, int], mode: str) -> dict[str, Any]:
    """Registers and spills of a tile's instance: of several, that with the most spills."""
    wanted = {"kernel": f"sm90_{mode}", **tile}
    instances = (u for u in usage if symbol_matches(u["kernel"], wanted))
    return max(instances, key=lambda u: u["spill_store_bytes"])
