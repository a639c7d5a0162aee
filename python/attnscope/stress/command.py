"""The command `attnscope stress`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from attnscope.common.console import say
from attnscope.common.forms import TERMINAL, AsJson, Form, form_of, printed
from attnscope.common.options import bad_input, split
from attnscope.stress.library import MAX_CYCLES, MODES, bits_of, build, kinds_of

_KINDS_HELP = " ".join(f"{mode.capitalize()}: {', '.join(kinds)}." for mode, kinds in MODES.items())
HANG_S = 300  # without a finished case; plus 10 ms per call


def stress_command(
    mode: Annotated[str, typer.Option(help="forward or backward.")] = "forward",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Deterministic backward calls.")
    ] = False,
    calls: Annotated[int, typer.Option(help="Launches in all, spread over the cases.")] = 10_000,
    cycles: Annotated[int, typer.Option(help="Longest delay, in SM cycles.")] = MAX_CYCLES,
    kinds: Annotated[str, typer.Option(help=f"Kinds of delay; left out, all. {_KINDS_HELP}")] = "",
    seed: Annotated[int, typer.Option(help="Seed of the inputs and the delays.")] = 0,
    unguarded: Annotated[
        bool, typer.Option("--unguarded", help="Plant the fault that the stress must find.")
    ] = False,
    library: Annotated[
        Path | None, typer.Option(help="A library with injected delays, instead of a build.")
    ] = None,
    beside: Annotated[
        bool, typer.Option("--beside", help="Run matrix products on another stream meanwhile.")
    ] = False,
    form: Form = TERMINAL,
    as_json: AsJson = False,
) -> None:
    """Run the Hopper kernels under injected delays and compare every bit with undelayed calls.

    Builds the CUDA library with -DATTNSCOPE_FAULTS on first use (it needs nvcc and the source
    tree). Copies, releases and tiles are delayed at random by up to --cycles; each case is compared
    with fp64 first. The protocol is correct if no delay changes a bit. dq of a backward call that
    is not deterministic may differ by the rounding of its sums. Each case that ends is a line on
    stderr. Exit code 0: no row is wrong. 1: wrong rows, printed with the plan that repeats them, or
    a kernel that hangs. 2: bad input, or the run broke off.
    """
    with bad_input("stress"):
        form = form_of(form, as_json)
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode}")
        if deterministic and mode == "forward":
            raise ValueError(
                "deterministic must be left out, got --deterministic in mode forward, which always "
                "is. Add --mode backward"
            )
        chosen = _kinds(kinds, kinds_of(mode, deterministic))
        for name, value, most in (("calls", calls, 10**9), ("cycles", cycles, 10**6)):
            if not 1 <= value <= most:
                raise ValueError(f"{name} must be between 1 and {most}, got {value}")
        path = library or build("faults-unguarded" if unguarded else "faults")
        if not path.is_file():
            raise ValueError(f"library must be a file, got {path}")
    command = [sys.executable, "-m", "attnscope.stress.run"]
    command += [f"--calls={calls}", f"--cycles={cycles}", f"--kinds={chosen}", f"--seed={seed}"]
    command += [f"--mode={mode}", *["--deterministic"] * deterministic, *["--beside"] * beside]
    environment = os.environ | {"ATTNSCOPE_CUDA_LIBRARY": str(path.resolve())}
    with printed(form, "stress") as facts:
        code = _run(command, environment, calls, facts)
    raise typer.Exit(code)


def _run(command: list[str], environment: dict[str, str], calls: int, facts: dict[str, Any]) -> int:
    """Run the cases in another process, print what is wrong, and return the exit code.

    Each case has a line on stderr once it has ended, so a run that is cut off says what it did.
    """
    rows: list[dict[str, Any]] = []
    last, began, limit_s = "the start", time.monotonic(), HANG_S + calls / 100
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        watch = Watch(child, limit_s)
        for line in child.stdout:
            watch.restart()
            row = json.loads(line)
            last = row["case"]
            rows.append(row)
            done, wrong = (sum(row[name] for row in rows) for name in ("calls", "wrong_calls"))
            spent = time.monotonic() - began
            say(f"{done} of {calls} calls done, {wrong} wrong, {spent:.1f} s: {last}", stderr=True)
            if row["error"]:
                say(f"{row['case']}: against fp64, without delays: {row['error']}", "red")
            if row["wrong_calls"]:
                say(
                    f"{row['case']}: {row['wrong_calls']} of {row['calls']} calls wrong, "
                    f"{row['wrong_rows']} rows; {row['plan']}",
                    "red",
                )
        watch.stop()
    sums = {name: sum(row[name] for row in rows) for name in ("calls", "wrong_calls", "wrong_rows")}
    failed = sum(bool(row["error"]) for row in rows)
    facts |= sums | {"wrong_without_delays": failed, "hangs": watch.expired, "cases": rows}
    say("{calls} calls with delays: {wrong_calls} wrong, {wrong_rows} wrong rows; ".format(**sums)
        + f"{failed} cases wrong without delays")  # fmt: skip
    if watch.expired:
        say(f"no case ended for {limit_s:.0f} s: a kernel hangs in the one after {last}", "red")
        return 1
    wrong = bool(sums["wrong_calls"] or failed)
    broke_off = child.returncode not in (0, 2) and not wrong
    if broke_off or child.returncode < 0:
        say("stress: the run broke off; its error is above", "red")
    return 1 if wrong else 2 if broke_off else child.returncode


class Watch:
    """Kills a process that is silent for `limit_s` seconds: a wrong protocol may deadlock."""

    def __init__(self, child: subprocess.Popen[str], limit_s: float) -> None:
        self.child, self.limit_s, self.expired = child, limit_s, False
        self.start()

    def start(self) -> None:
        self.timer = threading.Timer(self.limit_s, self.expire)
        self.timer.daemon = True
        self.timer.start()

    def restart(self) -> None:
        self.stop()
        self.start()

    def expire(self) -> None:
        self.expired = True
        self.child.kill()

    def stop(self) -> None:
        self.timer.cancel()


def _kinds(text: str, allowed: tuple[str, ...]) -> int:
    if not text:
        return bits_of(allowed)
    words = split(text)
    unknown = [word for word in words if word not in allowed]
    if unknown or not words:
        raise ValueError(
            f"kinds must be among {', '.join(allowed)}, got {', '.join(unknown) or text}"
        )
    return bits_of(words)
