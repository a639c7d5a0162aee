"""Runs a program while no other one that was started this way uses the GPU.

Arguments are the program and its own. Programs that share a GPU slow each other's kernels down.
"""

import fcntl
import os
import runpy
import sys
import tempfile
from pathlib import Path

import torch

gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
with open(Path(tempfile.gettempdir()) / f"attnscope-programs-{gpus}.lock", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    torch.cuda.synchronize()
    fcntl.flock(lock, fcntl.LOCK_UN)  # children of the program may have the file open
