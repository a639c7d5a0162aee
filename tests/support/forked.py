"""Python programs in processes of their own, forked from one that has PyTorch imported.

A new interpreter takes two seconds of CPU time to import PyTorch and the profiler. Use one only
where the start itself is tested: imports, signals, variables that libraries read when they load.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from attnscope.studies.isolation import PRELOADED

if not torch.cuda.is_available():
    PRELOADED.append("torch._dynamo")  # the first optimizer of a process imports it: 1.3 s


def run_python(
    *arguments: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 120,
    prepare: Callable[[], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run([sys.executable, *arguments])` returns: `-m module` or a script.

    `prepare` runs in the new process first.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        paths = [os.path.join(folder, name) for name in ("out", "err")]
        where = (str(cwd or Path.cwd()), dict(os.environ if env is None else env))
        for path in paths:
            Path(path).touch()
        process = context.Process(target=_child, args=(arguments, paths, *where, prepare))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(arguments, timeout)
        out, err = (Path(path).read_text() for path in paths)
    return subprocess.CompletedProcess(arguments, process.exitcode, out, err)


def _child(
    arguments: tuple[str, ...],
    paths: list[str],
    cwd: str,
    environment: dict[str, str],
    prepare: Callable[[], None] | None,
) -> None:
    if prepare is not None:
        prepare()
    for stream, path in zip((sys.stdout, sys.stderr), paths, strict=True):
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, stream.fileno())
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    if arguments[0] == "-m":
        sys.argv = ["-m", *arguments[2:]]
        sys.path.insert(0, cwd)
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")
