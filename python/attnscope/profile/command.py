"""The command `attnscope profile`: a script, a module or a recorded trace, as tables and files."""

from __future__ import annotations

import logging
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from typing import Any

import typer

from attnscope.common.child import EVENTS
from attnscope.common.console import explain, say
from attnscope.common.options import bad_input, make_folder
from attnscope.common.watcher import begin_step, watched
from attnscope.profile import options as of
from attnscope.profile.api import Profile
from attnscope.profile.errors import LostEvents, ProfileError
from attnscope.profile.record.launcher import (
    LAUNCHER_MODULES,
    RankOf,
    child_seconds,
    rank_of_process,
    unrecorded_children,
)
from attnscope.profile.record.recorder import kept_traces
from attnscope.profile.record.session import profile
from attnscope.profile.record.step_window import parse_steps
from attnscope.profile.render.terminal import print_lint
from attnscope.profile.reports import (
    RANK_FOLDER,
    check_trace,
    compare,
    merge_ranks,
    show,
    show_rank,
)
from attnscope.profile.script import INTERRUPTED, Script

ENDED = (
    "It was killed, ran out of memory, or called os._exit. Files of earlier steps are whole. If "
    "PyTorch wrote its trace, it is in {}"
)


def profile_command(
    script: of.ScriptName = None,
    arguments: of.Arguments = None,
    module: of.Module = False,
    trace: of.TraceFile = None,
    check: of.Check = None,
    diff: of.Diff = None,
    merge: of.Merge = None,
    output: of.Output = None,
    steps: of.Steps = None,
    step_range: of.StepRange = None,
    shapes: of.Shapes = True,
    stacks: of.Stacks = False,
    memory: of.Memory = False,
    top: of.Top = 20,
    sort: of.Sort = None,
    full_names: of.FullNames = False,
    form: of.Format = "text",
    as_json: of.Json = False,
    fail_if: of.FailIf = None,
) -> None:
    """Run a script under the profiler, or read a trace, and report where the GPU time went.

    Options come before SCRIPT; arguments after it are passed to the script.

    The exit code is the script's own, 1 if it fails, events were lost, the tables cannot be trusted
    or a budget is exceeded, 2 for bad input.
    """
    with bad_input("profile"), watched("profile", "start", ENDED.format(kept_traces())):
        of.check_sources(script=script, trace=trace, check=check, diff=diff, merge=merge)
        form = "json" if as_json else form
        how = of.Showing.parse(top, sort, full_names, form, output, fail_if)
        if check is not None:
            raise typer.Exit(check_trace(check, how))
        if diff is not None:
            raise typer.Exit(compare(diff, how))
        if merge is not None:
            raise typer.Exit(merge_ranks(merge, how))
        window = None if steps is None else parse_steps(steps)
        rank = None
        if trace is not None:
            code = _report(Profile.read(trace, window, step_range), 0, how, rank)
        else:
            assert script is not None
            run = Script(script, arguments or [], module)
            if run.target in LAUNCHER_MODULES:
                raise ValueError(
                    f"script must run in this process, got {run.target}, which starts others. "
                    "Record each rank: torchrun --no-python attnscope profile --output out SCRIPT"
                )
            rank = rank_of_process()
            if rank is not None and how.output is not None:
                how = replace(how, output=how.output / f"{RANK_FOLDER}{rank.number}")
            if how.output is not None:
                make_folder(how.output)
            options: dict[str, Any] = {
                "shapes": shapes, "stacks": stacks, "memory": memory, "steps": window,
                "step_range": step_range,
            }  # fmt: skip
            # No variable has the profile: Exit would keep it, and Python's end is slow with it.
            code = _report(*_record(run, options, form), how, rank)
    raise typer.Exit(code)


def _report(found: Profile | None, code: int, how: of.Showing, rank: RankOf | None) -> int:
    """Write and print a profile, if there is one; return the exit code of the command."""
    if found is None:
        return code
    # A script that logs everything does not mean the fonts of our figures.
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    try:
        over = show_rank(found, how, rank) if rank else show(found, how)
        code = code or over
    except BrokenPipeError:
        raise
    except (ProfileError, OSError) as error:
        if isinstance(error, ProfileError) and how.format == "text":
            print_lint(found.lint, lost=True)
        say(f"profile: {error}", "red", stderr=True)
        code = code or 1
    return code or int(found.incomplete is not None or not found.lint.trusted)


def _record(run: Script, options: dict[str, Any], form: str) -> tuple[Profile | None, int]:
    """Run the script; return its profile (None if nothing was recorded) and the exit code.

    Lines on children that were not recorded follow. Raises ValueError if the recording cannot be
    made.
    """
    children = child_seconds()
    with nullcontext() if form == "text" else redirect_stdout(sys.stderr):
        found = _run(run, options)
    if note := unrecorded_children(children):
        say(f"profile: {note}", "yellow", stderr=True)
    return found


def _run(run: Script, options: dict[str, Any]) -> tuple[Profile | None, int]:
    """`_record` without the lines."""
    code, region = 0, None
    recording = profile(run.name, after_steps=run.end, **options)
    try:
        with recording as region:
            begin_step("running the script")
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
    found = region.profile if region and region.ended else None
    if found is not None and found.trace.size >= EVENTS:
        recording.leave_events()
    return found, code
