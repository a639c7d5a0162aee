"""The command of profiling/profile_ops.py."""

from __future__ import annotations

from pathlib import Path

import typer

from attnscope.common.forms import TERMINAL, AsJson, Form, form_of
from attnscope.common.options import Device, bad_input, pick_device
from attnscope.profile.record.attached import attached_tool
from attnscope.studies.outputs import Output, bad_output, finish, progress, start

COMMAND = "profile_ops"


def ops_command(
    output: Output = Path("attribution_report"),
    device: Device = None,
    form: Form = TERMINAL,
    as_json: AsJson = False,
) -> None:
    """Compare the operator table with raw kernels and CUDA events, for our ops and their peers.

    Exit codes: 1 a row misses a bar, failed, or nothing could be measured, 2 bad input.
    """
    with bad_input(COMMAND):
        import torch

        from attnscope.common.environment import environment
        from attnscope.studies.ops.records import read_attempts
        from attnscope.studies.ops.report import attribution_report, missed
        from attnscope.studies.ops.run import CALLS, measure_all

        where, form = pick_device(device), form_of(form, as_json)
        if where.type != "cuda":
            raise ValueError(f"device must be a CUDA device, got {where}")
        if tool := attached_tool():
            raise ValueError(
                f"profile_ops must be the only user of CUPTI, got {tool[0]} ({tool[1]})"
            )
        torch.cuda.set_device(where)
        stem = output / "attribution"
        results = start(stem, environment(where, {"calls": CALLS}))
    with bad_output(COMMAND, output):
        measure_all(results, where, progress(lambda one: f"{one['call']}, {one['start']}"))
    finish(COMMAND, lambda: attribution_report(results.rows, results.env), stem, form)
    records = read_attempts(results.rows)
    if not any(record.status == "ok" for record in records) or any(map(missed, records)):
        raise typer.Exit(1)
