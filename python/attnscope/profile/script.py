"""Runs a script or a module in this process, as Python would."""

from __future__ import annotations

import atexit
import concurrent.futures.thread
import functools
import os
import runpy
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

INTERRUPTED = 130


class Script:
    """A script or module that runs in this process as if Python had been started with it."""

    def __init__(self, target: str, arguments: list[str], module: bool) -> None:
        if module and not _is_module(target):
            raise ValueError(f"module: there is no module {target!r} to run")
        if not module and not Path(target).is_file():
            raise ValueError(f"script: there is no file {target!r}; a module needs -m")
        self.target, self.arguments, self.module = target, arguments, module
        self.name = target if module else Path(target).stem
        self.ended = False
        self.failure: Exception | None = None  # of the script; printed

    def run(self) -> int:
        """Run it to its end, and that of threads it started; the code it exits with."""
        self.ended, self.failure = False, None
        before = sys.argv, sys.path[:]
        others = threading.enumerate()
        sys.argv = [self.target, *self.arguments]
        sys.path.insert(0, "" if self.module else str(Path(self.target).resolve().parent))
        code = 0
        try:
            with _submitted_work() as work:
                code = self._execute()
                while not self.ended and (threads := _threads_to_wait_for(others)):
                    threads[0].join()
                while not self.ended and (left := [one for one in work if not one.done()]):
                    concurrent.futures.wait(left)
        except KeyboardInterrupt:
            if not self.ended and self.failure is None:
                raise
        finally:
            sys.argv, sys.path[:] = before
        if self.failure is not None:
            raise self.failure
        return code

    def _execute(self) -> int:
        """Its main code, the code this exits with. A process that it forks ends here."""
        process, code = os.getpid(), INTERRUPTED
        try:
            if self.module:
                runpy.run_module(self.target, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(self.target, run_name="__main__")
            code = 0
        except SystemExit as end:
            if end.code is not None and not isinstance(end.code, int):
                print(end.code, file=sys.stderr)
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except Exception as error:
            traceback.print_exception(error.with_traceback(self.frames(error)))
            self.failure, code = error, 1
        finally:
            if os.getpid() != process:
                _end_fork(code)
        return code

    def end(self) -> None:
        """Called in the script: it exits here, as by sys.exit()."""
        first, self.ended = not self.ended, True
        main = threading.main_thread()
        # The exit ends this thread; a main one that waits for it, or goes on, is interrupted: if
        # Python handles the signal, which else would end the process with all that was recorded.
        handled = callable(signal.getsignal(signal.SIGINT))
        if first and handled and threading.current_thread() is not main:
            signal.pthread_kill(main.ident or 0, signal.SIGINT)
        raise SystemExit

    def frames(self, error: Exception) -> TracebackType | None:
        """The frames of an error from the script's own first one on."""
        frame = error.__traceback__
        while frame and frame.tb_frame.f_globals.get("__name__") != "__main__":
            frame = frame.tb_next
        return frame or error.__traceback__


def _threads_to_wait_for(others: Sequence[threading.Thread]) -> list[threading.Thread]:
    """Those that Python would wait for at the end of the program, without `others`.

    Nor workers of executors, which Python would first tell to end: their work is waited for.
    """
    workers = concurrent.futures.thread._threads_queues
    return [
        one
        for one in threading.enumerate()
        if not one.daemon and one not in others and one not in workers
    ]


def _end_fork(code: int) -> None:
    """End a process that the script forked as Python would, but not in the profiler's code."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF)


@contextmanager
def _submitted_work() -> Iterator[weakref.WeakSet[concurrent.futures.Future[Any]]]:
    """What is given to executors of threads meanwhile; what is not done is held by its worker."""
    futures: weakref.WeakSet[concurrent.futures.Future[Any]] = weakref.WeakSet()
    executor = concurrent.futures.ThreadPoolExecutor
    submit: Callable[..., Any] = executor.submit

    @functools.wraps(submit)
    def noted(*args: Any, **kwargs: Any) -> Any:
        future = submit(*args, **kwargs)
        futures.add(future)
        return future

    executor.submit = noted  # type: ignore[method-assign]
    try:
        yield futures
    finally:
        executor.submit = submit  # type: ignore[method-assign]


def _is_module(name: str) -> bool:
    """Whether `python -m` would find it here: a module, or a package with a `__main__`."""
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
