"""The console script. It imports only the module of the command that it runs."""

from __future__ import annotations

import importlib
import json
import os
import sys

import typer

from attnscope.common.forms import JSON, TERMINAL, AsJson, Form, form_of, printed
from attnscope.common.options import bad_input

# Command -> where it is, what it does.
COMMANDS = {
    "bench": ("attnscope.bench.command:bench_command", "Time impls, gated by correctness."),
    "host-time": ("attnscope.bench.host_time:host_time_command", "Time the CPU side of a call."),
    "check": ("attnscope.bench.check_command:check_command", "Compare impls with fp64."),
    "compare": ("attnscope.bench.compare_command:compare_command", "Compare two result files."),
    "plot": ("attnscope.bench.plots:plot_command", "Draw the figures of a result file."),
    "export": ("attnscope.bench.command:export_command", "Write a result file as CSV or parquet."),
    "profile": ("attnscope.profile.command:profile_command", "Show where GPU time went."),
    "nsys": ("attnscope.nsight.command:nsys_command", "Record a program under nsys; analyse it."),
    "ncu": (
        "attnscope.nsight.ncu_command:ncu_command",
        "Show what limits kernels, by Nsight Compute.",
    ),
    "timeline": ("attnscope.timeline.command:timeline_command", "Show a kernel from inside."),
    "stress": ("attnscope.stress.command:stress_command", "Delay a kernel; look for wrong rows."),
    "report": ("attnscope.studies.page:report_command", "Put results on one HTML page."),
    "kernels": ("attnscope.kernels:kernels_command", "Show what every CUDA kernel uses."),
    "env": ("attnscope.cli:env_command", "Show what is installed, what runs, what is missing."),
}
# Commands that pass arguments on to another program: their own options end at its name.
PASSING = ("profile", "nsys", "ncu")
HELP = (
    "Attention kernels and their instruments. Exit codes: 0 fine, 1 a gate or check failed, 2 bad "
    "input or a missing part, 130 interrupted."
)


def build(wanted: str | None) -> typer.Typer:
    """The app with the command `wanted` loaded; the others are there for the help text alone."""
    app = typer.Typer(no_args_is_help=True, help=HELP)
    for name, (target, summary) in COMMANDS.items():
        if name == wanted:
            module, function = target.split(":")
            settings = {"allow_interspersed_args": name not in PASSING}
            app.command(name, context_settings=settings)(
                getattr(importlib.import_module(module), function)
            )
        else:
            app.command(name, help=summary)(lambda: None)
    app.callback()(lambda: None)
    return app


def env_command(form: Form = TERMINAL, as_json: AsJson = False) -> None:
    """Show what is installed, which impls run, what is missing and how to get it.

    Exit code 1 where something that the package needs is missing or broken.
    """
    try:
        from attnscope import doctor
        from attnscope.bench.availability import availability
    except ImportError as error:
        print(f"broken: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    with bad_input("env"):
        form = form_of(form, as_json)
    examined = doctor.examine(availability)
    if form == JSON:
        print(json.dumps(examined, indent=1))
    else:
        with printed(form, "env"):
            doctor.print_examined(examined)
    if examined["broken"]:
        raise typer.Exit(1)


def main() -> None:
    """Entry point of `attnscope` and `python -m attnscope`."""
    # During shell completion the line is in one of these variables, not in the arguments.
    line = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS")
    words = line.split()[1:] if line else sys.argv[1:]
    wanted = next((word for word in words if not word.startswith("-")), None)
    try:
        build(wanted)(prog_name="attnscope")
    except ImportError as error:  # of a part of this package, or of what it needs
        print(f"attnscope: {error}. See `attnscope env`", file=sys.stderr)
        sys.exit(2)
