"""Runs a script or a module in this process."""

from __future__ import annotations

import concurrent.futures.thread
import os
import runpy
import sys
import threading
import traceback
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

INTERRUPTED = 130


class Script:
    """A script or module, run as `__main__`.

    `run` waits for the script's non-daemon threads, but not for work left to an executor.
    """

    def __init__(self, target: str, arguments: list[str], module: bool) -> None:
        if module and not _is_module(target):
            raise ValueError(f"module must be one that python -m finds, got {target!r}")
        if not module and not Path(target).is_file():
            raise ValueError(f"script must be a file, got {target!r}. A module needs -m")
        self.target, self.arguments, self.module = target, arguments, module
        self.name = target if module else Path(target).stem
        self.failure: Exception | None = None  # the script's error, already printed
        # Keeps the script's globals alive as long as this object: their destructors may wait for
        # work that must end first. If the script raised, its frames keep them.
        self._globals: Any = None

    def run(self) -> int:
        """Run the script and wait for its threads; return its exit code.

        Exceptions of the script propagate, except SystemExit.
        """
        before = sys.argv, sys.path[:]
        others = {*threading.enumerate()}
        sys.argv = [self.target, *self.arguments]
        sys.path.insert(0, "" if self.module else str(Path(self.target).resolve().parent))
        try:
            code = self._execute()
            for thread in {*threading.enumerate()} - others:
                if not thread.daemon and not _is_worker(thread):
                    thread.join()
        finally:
            sys.argv, sys.path[:] = before
        if self.failure is not None:
            raise self.failure
        return code

    def _execute(self) -> int:
        process, code = os.getpid(), INTERRUPTED
        try:
            if self.module:
                self._globals = runpy.run_module(self.target, run_name="__main__", alter_sys=True)
            else:
                self._globals = runpy.run_path(self.target, run_name="__main__")
            code = 0
        except SystemExit as end:
            self._globals = end
            if end.code is not None and not isinstance(end.code, int):
                print(end.code, file=sys.stderr)
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except Exception as error:
            traceback.print_exception(error.with_traceback(_own_frames(error)))
            self.failure, code = error, 1
        finally:
            if os.getpid() != process:  # a fork of the script must not write the recording
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code & 0xFF)
        return code

    @staticmethod
    def end() -> None:
        """End the script at this point, as by sys.exit(); called inside the script."""
        raise SystemExit


def _own_frames(error: Exception) -> TracebackType | None:
    """The frames of an error, starting at the script's first frame."""
    frame = error.__traceback__
    while frame and frame.tb_frame.f_globals.get("__name__") != "__main__":
        frame = frame.tb_next
    return frame or error.__traceback__


def _is_worker(thread: threading.Thread) -> bool:
    """Whether the thread serves an executor; it may wait for work until the executor shuts down."""
    return thread in concurrent.futures.thread._threads_queues


def _is_module(name: str) -> bool:
    """Whether `python -m` would find `name` here: a module, or a package with a `__main__`."""
    sys.path.insert(0, "")
    try:
        found = find_spec(name)
        if found is not None and found.submodule_search_locations is not None:
            found = find_spec(f"{name}.__main__")
    except (ImportError, ValueError):
        return False
    finally:
        sys.path.remove("")
    return found is not None
