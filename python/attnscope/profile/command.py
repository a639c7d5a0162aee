"""The command `attnscope profile`: a script, a module or a recorded trace, as tables and files."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from attnscope.common.console import say
from attnscope.common.options import bad_input, make_folder
from attnscope.profile.api import Profile, write_all
from attnscope.profile.errors import LostEvents, ProfileError
from attnscope.profile.record.session import profile
from attnscope.profile.record.step_window import parse_steps
from attnscope.profile.render.terminal import check_sort
from attnscope.profile.script import INTERRUPTED, Script


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
            run = Script(script, arguments or [], module)
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


def _record(run: Script, retries: int, options: dict[str, Any]) -> tuple[Profile, int]:
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
