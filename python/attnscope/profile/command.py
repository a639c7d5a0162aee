"""The command `attnscope profile`: a script, a module or a recorded trace, as tables and files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from attnscope.common.collector import collector_off
from attnscope.common.console import explain, say
from attnscope.common.options import bad_input, make_folder
from attnscope.profile.api import Profile
from attnscope.profile.errors import LostEvents, ProfileError
from attnscope.profile.record.session import profile
from attnscope.profile.record.step_window import parse_steps
from attnscope.profile.render.formats import write_all
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
    top: Annotated[int, typer.Option(min=1, help="Rows shown of each table.")] = 20,
    sort: Annotated[
        str | None, typer.Option(help="Column the operators are sorted by, such as self_gpu_us.")
    ] = None,
    full_names: Annotated[
        bool, typer.Option("--full-names", help="Print whole kernel symbols.")
    ] = False,
) -> None:
    """Run a script under the profiler, or read a trace, and report where the GPU time went.

    Options come before SCRIPT; arguments after it are passed to the script.

    The exit code is the script's own, 1 if it fails or events were lost, 2 for bad input.
    """
    with bad_input("profile"):
        if (trace is None) == (script is None):
            got = "neither" if script is None else "both"
            raise ValueError(f"script or --trace must be given, and one of them only, got {got}")
        check_sort(sort)
        if output is not None:
            output = output.resolve()  # the script may change directories
        found: Profile | None
        if trace is not None:
            if steps is not None:
                raise ValueError("steps must be given with a script, got a trace. It is read whole")
            found, code = Profile.read(trace), 0
        else:
            assert script is not None
            if output is not None:
                make_folder(output)
            run = Script(script, arguments or [], module)
            options: dict[str, Any] = {
                "shapes": shapes,
                "stacks": stacks,
                "memory": memory,
                "steps": None if steps is None else parse_steps(steps),
            }
            found, code = _record(run, options)
        if found is None:
            raise typer.Exit(code)
        try:
            _show(found, output, top=top, sort=sort, full_names=full_names)
        except (ProfileError, OSError) as error:
            say(f"profile: {error}", "red", stderr=True)
            code = code or 1
    raise typer.Exit(code or int(found.incomplete is not None))


@collector_off()
def _show(found: Profile, output: Path | None, **options: Any) -> None:
    """Write the files, then print the tables: a pipe that is closed early ends the printing."""
    wrote, failure = "", None
    if output is not None and not found.empty:
        try:
            wrote = write_all(found, output)
        except OSError as error:
            failure = error
    found.print(**options)
    if failure is not None:
        raise failure
    if wrote:
        say(wrote)


def _record(run: Script, options: dict[str, Any]) -> tuple[Profile | None, int]:
    """Run the script; return its profile (None if nothing was recorded) and the exit code.

    Raises ValueError if the recording cannot be made.
    """
    code, region = 0, None
    try:
        with profile(run.name, after_steps=run.end, **options) as region:
            code = run.run()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except LostEvents:
        code = code or 1
    except Exception as error:
        if error is run.failure:  # printed
            code = 1
        elif isinstance(error, ProfileError) and not code:
            raise ValueError(str(error)) from None
        elif isinstance(error, ProfileError):  # the script's own failure comes first
            say(f"profile: {error}", "red", stderr=True)
        else:
            say(f"profile: the record cannot be read: {explain(error)}", "red", stderr=True)
            code = code or 1
    return region.profile if region and region.ended else None, code
