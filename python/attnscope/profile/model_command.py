"""The commands of profiling/profile_model.py: `pair` and `lm`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnscope.bench.command import bad_input, integers, pick_device, split
from attnscope.bench.show import say
from attnscope.profile.attention_command import make_folder
from attnscope.profile.document import Document
from attnscope.profile.models import PRECISIONS, SIZES, ModelConfig, model_config
from attnscope.profile.tables import ProfileError

if TYPE_CHECKING:
    from attnscope.bench.store import Results
    from attnscope.profile.model_run import Run
    from attnscope.profile.records import Record

Output = Annotated[Path, typer.Option(help="Folder for records (JSON), report and figures.")]
Device = Annotated[str | None, typer.Option(help="cuda, cuda:1, cpu; left out, a GPU if any.")]
Timeout = Annotated[float, typer.Option(min=1, help="Seconds that one configuration may take.")]
TINY = "tiny"  # for a machine without a GPU: a model that takes a second


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
        bool, typer.Option("--resume", help="Go on with the records there; failed ones again.")
    ] = False,
    timeout: Timeout = 600.0,
    device: Device = None,
) -> None:
    """Profile training steps of transformer language models, and write the report.

    Each configuration runs in a process of its own and is saved when it is done. Exit codes: 1 a
    record contradicts itself or no configuration could be measured, 2 bad input.
    """
    with bad_input("profile_model"):
        from attnscope.bench.impls import resolve
        from attnscope.profile.model_run import Run

        if precision not in PRECISIONS:
            raise ValueError(f"precision: {precision!r} is not one of {', '.join(PRECISIONS)}")
        where = str(pick_device(device))
        names = list(SIZES) if models == "all" else split(models)
        runs = [
            Run(
                name=name,
                config=_config(name, context),
                impl=one.name,
                precision=precision,
                batch=batch,
                device=where,
            )
            for name in names
            for context in integers(contexts, "--contexts")
            for one in resolve(split(impl))
        ]
        if not runs:
            raise ValueError(f"nothing to run: --models {models!r}, --impl {impl!r}")
    from attnscope.profile.model_report import model_report
    from attnscope.profile.records import checked

    results = _measure(runs, output / "lm.json", timeout, where, resume)
    finish("profile_model", lambda: model_report(results.rows, results.env), output / "lm")
    statuses = {checked(record)["status"] for record in results.rows}
    if "refused" in statuses or "ok" not in statuses:
        raise typer.Exit(1)


def pair_command(
    model: Annotated[str, typer.Option(help=f"One of {', '.join([*SIZES, TINY])}.")] = "small",
    context: Annotated[int, typer.Option(min=1, help="Context length.")] = 512,
    impl: Annotated[str, typer.Option(help="The fused attention.")] = "sdpa-flash",
    batch: Annotated[int, typer.Option(min=1, help="Sequences a step of the plain loop.")] = 4,
    larger_batch: Annotated[int, typer.Option(min=1, help="Of the optimised one.")] = 32,
    output: Output = Path("pair_report"),
    timeout: Timeout = 600.0,
    device: Device = None,
) -> None:
    """Profile a plain transformer training loop and its optimised twin; say what changed and why.

    Exit codes: 1 a record contradicts itself or there is nothing to compare, 2 bad input.
    """
    with bad_input("profile_model"):
        from attnscope.bench.impls import resolve
        from attnscope.profile.transformer import pair_report, recipes, runs

        where = str(pick_device(device))
        (fused,) = resolve([impl])
        ways = recipes(fused.name, batch, larger_batch)
        todo = runs(_config(model, context), ways, where)
    results = _measure(todo, output / "pair.json", timeout, where)
    finish("profile_model", lambda: pair_report(results.rows, results.env), output / "pair")


def _config(name: str, context: int) -> ModelConfig:
    if name == TINY:
        return ModelConfig(d_model=64, d_ff=256, layers=2, heads=4, context=context, vocabulary=256)
    return model_config(name, context)


def _measure(
    runs: list[Run], path: Path, timeout_s: float, device: str, resume: bool | None = None
) -> Results:
    """Run what the file has no record of. `resume` is None where a run cannot be gone on with."""
    import torch

    from attnscope.bench.store import Results, environment
    from attnscope.profile.model_run import run_all
    from attnscope.profile.records import check_configurations

    with bad_input("profile_model"):
        make_folder(path.parent)
        results = Results.create(path, environment(torch.device(device), {}), bool(resume))
        check_configurations(results.rows)
    told = teller(lambda one: f"{one['model']}, context {one['context']}, {one['impl']}")
    try:
        run_all(runs, results, timeout_s=timeout_s, on_done=told)
    except KeyboardInterrupt:
        how = "" if resume is None else "; go on with --resume"
        done = f"{path} has what was done{how}" if results.rows else "nothing was done yet"
        say(f"profile_model: stopped; {done}", "red")
        raise typer.Exit(130) from None
    return results


def teller(name: Callable[[Record], str]) -> Callable[[Record], None]:
    """Says how a record ended, and how long after now."""
    started = time.perf_counter()

    def tell(record: Record) -> None:
        why = f": {record['reason']}" if record["reason"] else ""
        seconds = time.perf_counter() - started
        say(f"{seconds:6.1f} s  {name(record)}: {record['status']}{why}")

    return tell


def finish(command: str, report: Callable[[], Document], stem: Path) -> None:
    """Show a report and write it beside its records; exit code 1 where it cannot be true."""
    try:
        document = report()
    except (ProfileError, ValueError) as error:
        say(f"{command}: {error}", "red")
        raise typer.Exit(1) from None
    document.print()
    document.write_markdown(stem.with_suffix(".md"))
    document.write_html(stem.with_suffix(".html"))
    say(f"wrote {stem}.json, .md and .html")
