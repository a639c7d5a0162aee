"""The command of profiling/reconcile_tools.py: one attention call timed by every tool.

CUDA events, a CUDA graph and PyTorch's profiler time the call in this process. nsys and ncu time
the same call in other processes, in the range that `studies.attention` puts around it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from attnscope.common.console import say
from attnscope.common.forms import TERMINAL, AsJson, Form, form_of
from attnscope.common.options import bad_input, make_folder, pick_device
from attnscope.nsight import ncu, nsys
from attnscope.nsight.analysis import Analysis
from attnscope.nsight.ncu import Settings as NcuSettings
from attnscope.nsight.nsys import NsysSettings
from attnscope.nsight.output import show
from attnscope.nsight.recording import Recording
from attnscope.nsight.tool import ToolError
from attnscope.profile.render.document import Document, Section, rows_of
from attnscope.ranges import DOMAIN
from attnscope.studies.attention import BACKWARD, FORWARD, prepare
from attnscope.studies.ops.reconcile import REST, Measurement, compare, measure, pieces_text

COMMAND = "reconcile_tools"
NSYS_TOLERANCE = 0.005  # the same activity records as PyTorch's profiler, in another process
NCU_TOLERANCE = 0.05  # each kernel runs alone, several times
NCU_CALLS = 5


def nsys_measurement(recording: Recording, range_: str, calls: int) -> Measurement:
    """GPU time of each call in a range of `calls` equal calls, as nsys recorded it.

    Raises ValueError where the range has no work, or not the same number of pieces for each call.
    """
    of = Analysis(recording, range_)
    pieces = len(of.duration)
    if pieces % calls:
        raise ValueError(
            f"{range_} must have the same work in each of {calls} calls, got {pieces} pieces"
        )
    sums = of.duration.reshape(calls, -1).sum(1)
    beyond = f"nothing else: the sum of {pieces_text(pieces // calls)}, in another process"
    return Measurement("nsys", (sums / 1e3).tolist(), beyond, tolerance=NSYS_TOLERANCE)


def record_nsys(program: Sequence[str], range_: str, calls: int, folder: Path) -> Measurement:
    """Run a pass under nsys, and read its times; a failure is a measurement with the reason."""
    command = [*program, "--iterations", str(calls)]
    settings = NsysSettings(command=command, range=range_, probe=False)
    try:
        return nsys_measurement(nsys.record(settings, folder).recording, range_, calls)
    except (ToolError, ValueError) as error:
        return Measurement("nsys", reason=str(error).splitlines()[0])


def record_ncu(program: Sequence[str], range_: str, calls: int, folder: Path) -> Measurement:
    """Run a pass under ncu, with caches and clocks unchanged, and read its times."""
    command = [*program, "--iterations", str(calls)]
    settings = NcuSettings(
        command=command, sets=["sol"], ranges=[range_], cache="none", clock="none"
    )
    try:
        kernels = ncu.record(settings, folder, None)
        times = [one.get("time_ns") for one in kernels]
        if len(times) % calls or None in times:
            raise ValueError(f"{range_} must have the same kernels in each of {calls} calls")
        sums = np.array(times, float).reshape(calls, -1).sum(1)
    except (ToolError, ValueError) as error:
        return Measurement("ncu", reason=str(error).splitlines()[0])
    pieces = pieces_text(len(times) // calls)
    beyond = f"nothing else: the sum of {pieces}, each alone and replayed"
    return Measurement("ncu", (sums / 1e3).tolist(), beyond, tolerance=NCU_TOLERANCE)


def reconcile_command(
    workload: Annotated[
        str, typer.Option(help="The call, such as b2-s8192-h16-d128-causal.")
    ] = "b4-s4096-h16-d128-causal",
    impl: Annotated[str, typer.Option(help="One impl or alias.")] = "cuda",
    backward: Annotated[bool, typer.Option("--backward", help="Time the backward too.")] = False,
    samples: Annotated[int, typer.Option(min=2, help="Calls that each tool times.")] = 30,
    output: Annotated[Path, typer.Option(help="Folder for the table and the reports.")] = Path(
        "reconcile_output"
    ),
    form: Form = TERMINAL,
    as_json: AsJson = False,
) -> None:
    """Time one call by CUDA events, a CUDA graph, PyTorch's profiler, nsys and ncu, in one table.

    Exit codes: 1 a tool differs by more than it may, 2 bad input or no GPU.
    """
    import torch

    from attnscope.bench.impls import resolve
    from attnscope.bench.workload_text import parse_workload

    with bad_input(COMMAND):
        chosen = form_of(form, as_json)
        where = pick_device("cuda")
        (one,) = resolve([impl])
        work = parse_workload(workload)
        kinds = (FORWARD, BACKWARD) if backward else (FORWARD,)
        make_folder(output)
        # A backward runs on the stream of its forward, which a graph can capture if it is not the
        # default one.
        stream = torch.cuda.Stream(where)
        with torch.cuda.stream(stream):
            passes = prepare(one, work, 0, where, kinds)
    program = [sys.executable, "-m", "attnscope.studies.attention", "--impl", one.name]
    program += ["--workload", workload, "--mode", "both" if backward else FORWARD]
    program += ["--no-profile", "--rest", str(REST)]
    sections, agree = [], True
    for each in passes:
        with torch.cuda.stream(stream):
            found = list(measure(each.call, samples=samples))
        range_ = f"{each.range}@{DOMAIN}"
        with bad_input(COMMAND):
            found.append(record_nsys(program, range_, samples, output / f"nsys-{each.kind}"))
            found.append(record_ncu(program, range_, NCU_CALLS, output / f"ncu-{each.kind}"))
        table = compare(found)
        agree &= False not in table["agrees"].tolist()
        sections.append(Section(each.range, "Medians of calls, in microseconds.", rows_of(table)))
    lead = [
        f"{one.name}, {work.id}: {'every tool agrees' if agree else 'a tool differs'} within what "
        "it measures besides the kernels",
        "least_us and most_us: between which the difference to the reference, PyTorch's profiler, "
        "may be.",
    ]
    document = Document("One call by every tool", lead, sections)
    document.write_markdown(output / "reconcile.md")
    show(document, chosen)
    say(f"wrote {output}/reconcile.md", stderr=chosen != TERMINAL)
    if not agree:
        raise typer.Exit(1)
