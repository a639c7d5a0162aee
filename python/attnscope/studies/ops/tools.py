"""The command of profiling/reconcile_tools.py: one attention call timed by every tool.

CUDA events, a CUDA graph and PyTorch's profiler time the call in this process; nsys times the same
call in a process of its own, in the range that `studies.attention` puts around it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from attnscope.common.console import say
from attnscope.common.options import bad_input, make_folder, pick_device
from attnscope.nsight.analysis import Analysis
from attnscope.nsight.nsys import NsysSettings, record
from attnscope.nsight.output import TERMINAL, AsJson, Form, form_of, show
from attnscope.nsight.recording import Recording
from attnscope.nsight.tool import ToolError
from attnscope.profile.render.document import Document, Section, rows_of
from attnscope.ranges import DOMAIN
from attnscope.studies.attention import BACKWARD, FORWARD, prepare
from attnscope.studies.ops.reconcile import Measurement, compare, measure

COMMAND = "reconcile_tools"
NSYS_TOLERANCE = 0.005  # the same activity records as PyTorch's profiler, in another process
NAME = "nsys"
TARGET = (
    "import typer; from attnscope.studies.attention import attention_command as c; typer.run(c)"
)


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
    beyond = f"nothing: the sum of {pieces // calls} kernels and copies, in another process"
    return Measurement(NAME, (sums / 1e3).tolist(), beyond, tolerance=NSYS_TOLERANCE)


def record_nsys(arguments: Sequence[str], range_: str, calls: int, folder: Path) -> Measurement:
    """Run a pass under nsys, and read its times; a failure is a measurement with the reason."""
    command = [sys.executable, "-c", TARGET, *arguments]
    settings = NsysSettings(command=command, range=range_, probe=False)
    try:
        return nsys_measurement(record(settings, folder).recording, range_, calls)
    except (ToolError, ValueError) as error:
        return Measurement(NAME, reason=str(error).splitlines()[0])


def reconcile_command(
    seq_len: Annotated[int, typer.Option(min=1, help="Length of queries and keys.")] = 4096,
    impl: Annotated[str, typer.Option(help="One impl or alias.")] = "cuda",
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 4,
    heads: Annotated[int, typer.Option(min=1, help="Heads.")] = 16,
    head_dim: Annotated[int, typer.Option(min=1, help="Head dim.")] = 128,
    causal: Annotated[bool, typer.Option(help="Causal mask.")] = True,
    backward: Annotated[bool, typer.Option("--backward", help="Time the backward too.")] = False,
    samples: Annotated[int, typer.Option(min=2, help="Calls that each tool times.")] = 30,
    output: Annotated[Path, typer.Option(help="New folder for the table and nsys' report.")] = Path(
        "reconcile_output"
    ),
    form: Form = TERMINAL,
    as_json: AsJson = False,
) -> None:
    """Time one call by CUDA events, a CUDA graph, PyTorch's profiler and nsys, in one table.

    Exit codes: 1 a tool differs by more than it may, 2 bad input or no GPU.
    """
    from attnscope.bench.impls import resolve
    from attnscope.bench.workloads import Workload

    with bad_input(COMMAND):
        chosen = form_of(form, as_json)
        where = pick_device("cuda")
        (one,) = resolve([impl])
        sizes = {"seqlen": seq_len, "batch": batch, "heads_q": heads, "head_dim": head_dim}
        work = Workload.of(**sizes, dtype="bfloat16", causal=causal)
        passes = prepare(one, work, 0, where, backward)
        make_folder(output)
    arguments = ["--impl", one.name, "--iterations", str(samples), "--no-profile"]
    arguments += ["--seq-len", str(seq_len), "--batch", str(batch), "--heads", str(heads)]
    arguments += ["--head-dim", str(head_dim), "--causal" if causal else "--no-causal"]
    arguments += ["--backward"] * backward
    sections, agree = [], True
    for each in passes:
        kind = FORWARD if each.kind == FORWARD else BACKWARD
        found = list(measure(each.call, samples=samples))
        folder = output / f"nsys-{kind}"
        with bad_input(COMMAND):
            found.append(record_nsys(arguments, f"{each.range}@{DOMAIN}", samples, folder))
        table = compare(found)
        agree &= bool(np.all([value is not False for value in table["agrees"]]))
        rows = [
            {key: value for key, value in row.items() if key != "difference"}
            | {"of the reference": row["difference"]}
            for row in rows_of(table)
        ]
        sections.append(Section(each.range, "Median of each tool, in microseconds.", rows))
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
