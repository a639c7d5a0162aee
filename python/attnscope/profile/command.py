"""The command `attnscope profile`: a script, a module or a recorded trace, as tables and files."""

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
from typing import Annotated, Any

import typer

from attnscope.common.console import say
from attnscope.common.options import bad_input, make_folder
from attnscope.profile.checks import ProfileError
from attnscope.profile.result import Profile
from attnscope.profile.session import LostEvents, profile
from attnscope.profile.show import check_sort
from attnscope.profile.steps import parse_steps

INTERRUPTED = 130


def profile_command(
    script: Annotated[
        str | None, typer.Argument(help="Script to run, or module with -m.", show_default=False)
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script.", show_default=False)
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT names a module.")] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Read this chrome trace of PyTorch's, run nothing.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for JSON, CSV, HTML and the chrome trace.")
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(
            help="Record these steps only, such as 10:12, and end the script then. A step ends "
            "where its optimizer has stepped; the first is 0."
        ),
    ] = None,
    shapes: Annotated[bool, typer.Option(help="Record shapes: FLOPs and MFU need them.")] = True,
    stacks: Annotated[
        bool, typer.Option("--stacks", help="Record Python lines and modules; slows Python.")
    ] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="Record allocations; a third more events.")
    ] = False,
    kineto: Annotated[
        bool, typer.Option("--kineto", help="Show PyTorch's own table beside ours.")
    ] = False,
    retries: Annotated[
        int, typer.Option(min=0, help="Runs of the script again when events were lost.")
    ] = 1,
    top: Annotated[int, typer.Option(min=1, help="Rows shown of each table.")] = 20,
    sort: Annotated[
        str | None, typer.Option(help="Column the operators are sorted by, such as self_gpu_us.")
    ] = None,
    full_names: Annotated[
        bool, typer.Option("--full-names", help="Kernel symbols as they are.")
    ] = False,
) -> None:
    """Run a script under the profiler, or read a trace, and say where the GPU time went.

    Options stand before SCRIPT; what follows it is the script's own.

    The exit code is that of the script, 1 where it fails or events were lost, 2 for bad input.
    """
    with bad_input("profile"):
        if (trace is None) == (script is None):
            raise ValueError("give a script to run, or --trace FILE; one of them")
        if trace is not None:
            if steps is not None:
                raise ValueError("--steps: a trace is read whole; run the script")
            if kineto:
                raise ValueError("--kineto: a trace does not hold PyTorch's table; run the script")
            found, code = Profile.read(trace), 0
        else:
            assert script is not None
            check_sort(sort)
            if output is not None:
                output = output.resolve()  # the script may change directories
                make_folder(output)
            run = _Script(script, arguments or [], module)
            options: dict[str, Any] = {
                "shapes": shapes,
                "stacks": stacks,
                "memory": memory,
                "kineto": kineto,
                "steps": None if steps is None else parse_steps(steps),
            }
            found, code = _record(run, retries, options)
        try:
            found.print(top=top, sort=sort, full_names=full_names)
            if output is not None and not found.empty:
                write_all(found, output)
        except (ProfileError, OSError) as error:
            say(f"profile: {error}", "red")
            code = code or 1
    raise typer.Exit(code or int(found.incomplete is not None))


class _Script:
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


def _record(run: _Script, retries: int, options: dict[str, Any]) -> tuple[Profile, int]:
    """Run the script until nothing is lost, and say how it ended."""
    found, code = Profile(run.name), 0
    for left in range(retries, -1, -1):
        ended = False
        try:
            region = profile(run.name, **options)
            region.after_steps = run.end
            with region as found:
                if region.steps is None:
                    found.unprofiled_reason = "the script ran under the profiler only"
                code = run.run()
                ended = True
        except KeyboardInterrupt:
            if not found.filled:
                found.interrupted = found.interrupted or "KeyboardInterrupt"
            code = code if run.ended and found.filled else INTERRUPTED
        except Exception as error:
            if error is run.failure:  # of the script, whatever it is
                code = 1
            elif isinstance(error, LostEvents):
                if left:
                    say(f"profile: {error}. Running the script again", "yellow", stderr=True)
                    continue
            elif isinstance(error, ProfileError):
                if code:  # the script's own failure comes first
                    say(f"profile: {error}", "red", stderr=True)
                    raise typer.Exit(code) from None
                raise ValueError(str(error)) from None
            elif ended:
                say(f"profile: the record cannot be read: {type(error).__name__}: {error}", "red")
                raise typer.Exit(code or 1) from None
            else:
                traceback.print_exception(error)
                code = 1
        break
    return found, code


def write_all(found: Profile, folder: Path) -> None:
    """Every table as CSV, everything as JSON, the page, and the chrome trace.

    A trace that was read from the folder as `trace.json` stays as it is.
    """
    from attnscope.profile.export import write_csv

    written = write_csv(found, folder)
    for name, write in (("profile.json", found.to_json), ("profile.html", found.to_html)):
        written.append(folder / name)
        write(written[-1])
    copy = folder / "trace.json"
    if copy.exists() and copy.samefile(found.source):
        say(f"{copy} is the trace that was read: it stays as it is", "yellow")
    else:
        written.append(copy)
        found.export_chrome_trace(copy)
    say(f"wrote {', '.join(sorted(path.name for path in written))} in {folder}")
