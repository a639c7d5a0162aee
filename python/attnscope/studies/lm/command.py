"""The commands of profiling/profile_model.py: `pair` and `lm`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnscope.common.console import say
from attnscope.common.forms import TERMINAL, AsJson, Form, form_of
from attnscope.common.options import Device, bad_input, integers, pick_device, split
from attnscope.studies.lm.model import PRECISIONS, SIZES, TINY, model_config
from attnscope.studies.outputs import Output, bad_output, finish, progress, start

if TYPE_CHECKING:
    from attnscope.common.results import Results
    from attnscope.studies.lm.run import Run

# The maximum is the longest wait: milliseconds in 32 bits.
Timeout = Annotated[
    float, typer.Option(min=1, max=2e6, help="Seconds that one configuration may take.")
]


def lm_command(
    models: Annotated[
        str, typer.Option(help=f"Models, of {', '.join([*SIZES, TINY])}, or all.")
    ] = "all",
    contexts: Annotated[str, typer.Option(help="Context lengths.")] = "128,256,512,1024",
    impl: Annotated[str, typer.Option(help="Impls or aliases of attention.")] = "naive",
    precision: Annotated[str, typer.Option(help=f"One of {', '.join(PRECISIONS)}.")] = "autocast",
    batch: Annotated[int, typer.Option(min=1, help="Sequences a step.")] = 4,
    output: Output = Path("model_report"),
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the records there; failed ones again. Left out, records that are"
            " there are an error, so that none is lost.",
        ),
    ] = False,
    nsys: Annotated[
        bool,
        typer.Option(
            "--nsys",
            help="Record a step of each under nsys instead, in folders below OUTPUT/nsys, and"
            " write lm-nsys beside lm. Recorded ones are kept.",
        ),
    ] = False,
    timeout: Timeout = 600.0,
    device: Device = None,
    form: Form = TERMINAL,
    as_json: AsJson = False,
) -> None:
    """Profile training steps of transformer language models, and write the report.

    Each configuration runs in a process of its own and is saved when it is done. Exit codes: 1 a
    record contradicts itself or no configuration could be measured, 2 bad input.
    """
    with bad_input("profile_model"):
        from attnscope.bench.impls import resolve
        from attnscope.studies.lm.run import Run

        chosen = form_of(form, as_json)
        if precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
        where = str(pick_device(device))
        names = list(SIZES) if models == "all" else split(models)
        runs = [
            Run(
                name=name,
                config=model_config(name, context),
                impl=one.name,
                precision=precision,
                batch=batch,
                device=where,
            )
            for name in names
            for context in integers(contexts, "contexts")
            for one in resolve(split(impl))
        ]
        if not runs:
            raise ValueError(f"models, impl must each name one or more, got {models!r}, {impl!r}")
    if nsys:
        from attnscope.studies.lm.nsys_report import record_and_report

        return record_and_report(runs, output, timeout, chosen)
    from attnscope.studies.lm.records import read_models
    from attnscope.studies.lm.report import model_report

    results = _measure(runs, output / "lm", timeout, where, resume)
    finish("profile_model", lambda: model_report(results.rows, results.env), output / "lm", chosen)
    statuses = {record.status for record in read_models(results.rows)}
    if "refused" in statuses or "ok" not in statuses:
        raise typer.Exit(1)


def pair_command(
    model: Annotated[str, typer.Option(help=f"One of {', '.join([*SIZES, TINY])}.")] = "small",
    context: Annotated[int, typer.Option(min=1, help="Context length.")] = 512,
    impl: Annotated[str, typer.Option(help="Attention of the optimised loop.")] = "sdpa-flash",
    batch: Annotated[int, typer.Option(min=1, help="Sequences a step of the plain loop.")] = 4,
    larger_batch: Annotated[
        int, typer.Option(min=1, help="Sequences a step of the optimised loop.")
    ] = 32,
    output: Output = Path("pair_report"),
    timeout: Timeout = 600.0,
    device: Device = None,
    form: Form = TERMINAL,
    as_json: AsJson = False,
) -> None:
    """Profile a plain transformer training loop and its optimised twin; say what changed and why.

    Exit codes: 1 a record contradicts itself or there is nothing to compare, 2 bad input.
    """
    with bad_input("profile_model"):
        from attnscope.bench.impls import resolve
        from attnscope.studies.lm.pair import pair_report, recipes, runs

        where, form = str(pick_device(device)), form_of(form, as_json)
        (fused,) = resolve([impl])
        ways = recipes(fused.name, batch, larger_batch)
        todo = runs(model_config(model, context), ways, where)
    results = _measure(todo, output / "pair", timeout, where)
    stem = output / "pair"
    finish("profile_model", lambda: pair_report(results.rows, results.env), stem, form)


def _measure(
    runs: list[Run], stem: Path, timeout_s: float, device: str, resume: bool | None = None
) -> Results:
    """Run what the file has no record of. `resume` is None where a run cannot be gone on with."""
    import torch

    from attnscope.common.environment import environment
    from attnscope.studies.lm.records import read_models
    from attnscope.studies.lm.run import run_all

    with bad_input("profile_model"):
        results = start(stem, environment(torch.device(device), {}), resume)
        read_models(results.rows)  # raises an error before anything runs
    show = progress(lambda one: f"{one['model']}, context {one['context']}, {one['impl']}")
    try:
        with bad_output("profile_model", stem.parent):
            run_all(runs, results, timeout_s=timeout_s, on_done=show)
    except KeyboardInterrupt:
        how = "" if resume is None else "; go on with --resume"
        done = f"{results.path} has what was done{how}" if results.rows else "nothing was done yet"
        say(f"profile_model: stopped; {done}", "red", stderr=True)
        raise typer.Exit(130) from None
    return results
