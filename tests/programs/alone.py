"""Runs a program, or with -m a module, while no other one that was started this way uses its GPUs.

Arguments are the program and its own. Programs that share a GPU slow each other's kernels down, and
so does the start of CUDA in another process: importing PyTorch and the profiler does not start it.
"""

import fcntl
import os
import runpy
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch

import attnscope.profile  # noqa: F401

given = os.environ.get("CUDA_VISIBLE_DEVICES")
gpus = given.split(",") if given else map(str, range(torch.cuda.device_count()))
sys.argv = sys.argv[1:]
with ExitStack() as locks:
    for gpu in sorted(gpus):  # in the same order everywhere, or two could wait for each other
        path = Path(tempfile.gettempdir()) / f"attnscope-programs-{gpu}.lock"
        lock = locks.enter_context(path.open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        locks.callback(fcntl.flock, lock, fcntl.LOCK_UN)  # children may have the file open
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
