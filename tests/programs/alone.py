"""Runs a program, or with -m a module, while no other one that was started this way uses the GPU.

Arguments are the program and its own. Programs that share a GPU slow each other's kernels down, and
so does the start of CUDA in another process: importing PyTorch and the profiler does not start it.
"""

import fcntl
import os
import runpy
import sys
import tempfile
from pathlib import Path

import torch

import attnscope.profile  # noqa: F401

gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
sys.argv = sys.argv[1:]
with open(Path(tempfile.gettempdir()) / f"attnscope-programs-{gpus}.lock", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        if sys.argv[0] == "-m":
            del sys.argv[0]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
        torch.cuda.synchronize()
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # children of the program may have the file open
