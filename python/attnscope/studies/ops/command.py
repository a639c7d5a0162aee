"""The command of profiling/profile_ops.py."""

from __future__ import annotations

from pathlib import Path

import typer

from attnscope.common.options import Device, bad_input, pick_device
from attnscope.profile.record.attached import attached_tool
from attnscope.studies.outputs import Output, bad_output, finish, start, teller

COMMAND = "profile_ops"


def ops_command(output: Output = Path("attribution_report"), device: Device = None) -> None:
    """Compare the operator table with raw kernels and CUDA events, for our ops and their peers.

    Exit codes: 1 a row misses a bar, failed, or nothing could be measured, 2 bad input.
    """
    with bad_input(COMMAND):
        import torch

        from attnscope.common.environment import environment
        from attnscope.studies.ops.report import attribution_report, missed
        from attnscope.studies.ops.run import CALLS, measure_all

        where = pick_device(device)
        if where.type != "cuda":
            raise ValueError("device: needs a CUDA device: it is GPU time that is accounted for")
        if tool := attached_tool():
            raise ValueError(f"runs under {tool[0]} ({tool[1]}); run it without")
        torch.cuda.set_device(where)
        stem = output / "attribution"
        results = start(stem, environment(where, {"calls": CALLS}))
    with bad_output(COMMAND, output):
        measure_all(results, where, teller(lambda one: f"{one['call']}, {one['start']}"))
    finish(COMMAND, lambda: attribution_report(results.rows, results.env), stem)
    measured = any(record["status"] == "ok" for record in results.rows)
    if not measured or any(map(missed, results.rows)):
        raise typer.Exit(1)
