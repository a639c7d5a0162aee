"""The command of profiling/profile_transformers.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnscope.common.forms import TERMINAL, AsJson, Form, form_of
from attnscope.common.options import Device, bad_input, pick_device
from attnscope.studies.outputs import Output, bad_output, finish, progress, start
from attnscope.studies.records import Row

COMMAND = "profile_transformers"
Size = Annotated[int, typer.Option(min=1)]


def transformers_command(
    output: Output = Path("transformers_report"),
    layers: Size = 8,
    hidden: Size = 1024,
    heads: Size = 16,
    kv_heads: Size = 4,
    batch: Size = 4,
    context: Size = 1024,
    device: Device = None,
    form: Form = TERMINAL,
    as_json: AsJson = False,
) -> None:
    """Profile a Llama model of Hugging Face transformers with attention eager, sdpa and attnscope.

    Weights are random. Logits are checked first. Exit codes: 1 logits are wrong, a measurement
    failed or nothing could be measured, 2 bad input or no transformers.
    """
    with bad_input(COMMAND):
        from attnscope.common.environment import environment
        from attnscope.integrations.transformers import require

        settings = {"transformers": require()}
        from attnscope.studies.llama.report import transformers_report
        from attnscope.studies.llama.run import Llama, run_all

        where, form = pick_device(device), form_of(form, as_json)
        shape = Llama(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            batch=batch,
            context=context,
        )
        stem = output / "transformers"
        results = start(stem, environment(where, settings))
    show = progress(lambda one: f"{one['impl']}, {one['mode']}")

    def keep(record: Row) -> None:
        results.rows.append(record)
        results.save()
        show(record)

    with bad_output(COMMAND, output):
        run_all(shape, where, on_done=keep)
    finish(COMMAND, lambda: transformers_report(results.rows, results.env), stem, form)
    statuses = {record["status"] for record in results.rows}
    if "ok" not in statuses or statuses & {"wrong", "failed"}:
        raise typer.Exit(1)
