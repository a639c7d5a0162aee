"""The command `attnscope ncu`: profile a program or a call, read a report, compare two."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from attnscope.common.console import say
from attnscope.common.forms import JSON, AsJson, Form, form_of
from attnscope.common.options import bad_input, split
from attnscope.nsight import ncu
from attnscope.nsight.metrics import SETS, chip_of
from attnscope.nsight.models import read_models
from attnscope.nsight.ncu import Settings
from attnscope.nsight.ncu_reader import Kernel
from attnscope.nsight.output import show
from attnscope.nsight.settings import read_settings
from attnscope.nsight.tool import ToolError, check_program, new_folder, print_plan
from attnscope.profile.render.document import Document

COMMAND = "ncu"
_SETS = "; ".join(f"{name}: {one.question}" for name, one in SETS.items())


Program = Annotated[list[str] | None, typer.Argument(help="A program and its arguments, after --.")]
Impls = Annotated[
    str | None, typer.Option(help="Profile impls of attention, such as cuda,sdpa-flash.")
]
Call = Annotated[
    str | None, typer.Option(help="With --impl: a call, such as b2-s8192-h16-d128-causal.")
]
Mode = Annotated[str | None, typer.Option(help="With --impl: forward, backward or both.")]
Sets = Annotated[
    str | None,
    typer.Option("--set", help=f"Sets of metrics. {_SETS}; full: all of ncu's. Left out: all six."),
]
Metrics = Annotated[str | None, typer.Option(help="Further metrics by ncu's names, with commas.")]
Ranges = Annotated[
    list[str] | None,
    typer.Option("--range", help="Only kernels in this NVTX range: name or name@domain."),
]
Names = Annotated[
    list[str] | None,
    typer.Option(help="Only kernels whose function name matches this regular expression."),
]
Base = Annotated[
    str | None, typer.Option(help="What --kernel searches: function, demangled, mangled.")
]
Top = Annotated[int | None, typer.Option(help="Only the N kernels with the most time in --from.")]
Record = Annotated[
    Path | None,
    typer.Option("--from", help="With --top: a record of attnscope nsys or attnscope profile."),
]
Skip = Annotated[int | None, typer.Option(help="Matching launches to skip.")]
Count = Annotated[int | None, typer.Option(help="Matching launches to profile.")]
Cache = Annotated[
    str | None, typer.Option(help="all: flush caches before each pass (default); none.")
]
Clock = Annotated[str | None, typer.Option(help="none: clocks as they are (default); base; boost.")]
Replay = Annotated[str | None, typer.Option(help="kernel (default) or application.")]
Timeout = Annotated[float | None, typer.Option(help="Seconds for the program.")]
Config = Annotated[
    Path | None, typer.Option(help="YAML with these settings; session.yaml of a run is one.")
]
Output = Annotated[
    Path | None, typer.Option(help="New folder for the run. Left out: ncu-DATE-TIME.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the commands and stop.")]
Import = Annotated[
    Path | None,
    typer.Option("--import", help="Read a folder, .ncu-rep or raw .csv instead of running."),
]
Compare = Annotated[
    tuple[Path, Path] | None, typer.Option(help="Compare two: folders, .ncu-rep or raw .csv.")
]


def ncu_command(
    program: Program = None,
    impl: Impls = None,
    workload: Call = None,
    mode: Mode = None,
    sets: Sets = None,
    metrics: Metrics = None,
    range_: Ranges = None,
    kernel: Names = None,
    base: Base = None,
    top: Top = None,
    record: Record = None,
    skip: Skip = None,
    count: Count = None,
    cache: Cache = None,
    clock: Clock = None,
    replay: Replay = None,
    timeout: Timeout = None,
    config: Config = None,
    output: Output = None,
    dry_run: DryRun = False,
    import_: Import = None,
    compare: Compare = None,
    form: Form = "terminal",
    as_json: AsJson = False,
) -> None:
    """Profile kernels with Nsight Compute, and show what limits each of them.

    A run writes a folder with the report, its tables, the commands and their output. Exit codes: 1
    the profile failed or a filter matched nothing, 2 bad input or no ncu, 130 interrupted.
    """
    with bad_input(COMMAND):
        form = form_of(form, as_json)
        if compare is not None:
            _compare(compare, form)
            return
        if import_ is not None:
            _import(import_, form)
            return
        given: dict[str, Any] = {
            "command": program or None, "impl": impl, "workload": workload, "mode": mode,
            "sets": split(sets) if sets else None, "metrics": split(metrics) if metrics else None,
            "ranges": range_, "kernels": kernel, "base": base, "skip": skip, "count": count,
            "cache": cache, "clock": clock, "replay": replay, "timeout_s": timeout,
        }  # fmt: skip
        lines = _select(given, top, record)
        settings = read_settings(Settings, config, given)
        if settings.impl is None:
            check_program(settings.command)
        folder = output or new_folder(COMMAND)
        chip = _chip()
        if dry_run:
            print_plan(_plan(settings, folder, chip))
            return
        _run(settings, folder, chip, lines, form)


def _select(given: dict[str, Any], top: int | None, record: Path | None) -> list[str]:
    """Put the kernels of --top into the settings; returns lines that name them."""
    if top is None and record is None:
        return []
    if top is None or record is None:
        raise ValueError("--top and --from must be given together, got one of them")
    from attnscope.nsight import selection

    if given["kernels"]:
        raise ValueError("--kernel must be left out with --top, got both")
    inside = given["ranges"] or [None]
    chosen = selection.choose(record, top, inside[0])
    given["kernels"], given["base"] = [selection.pattern(chosen)], chosen[0].base
    return [
        f"chosen from {record}: {one.shown}, {one.total_us:,.0f} us in {one.calls} launches"
        for one in chosen
    ]


def _chip() -> str | None:
    """The chip of the first GPU, for the names of its metrics; None without NVML."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        return chip_of(tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)))
    except Exception:  # no driver, no package: names that every chip has are asked for
        return None


def _plan(settings: Settings, folder: Path, chip: str | None) -> list[Any]:
    report = folder / ncu.REPORT
    return [
        ncu.profile_step(settings, "ncu", folder, chip),
        ncu.import_step("ncu", report),
    ]


def _run(
    settings: Settings, folder: Path, chip: str | None, lines: Sequence[str], form: str
) -> None:
    with _failures():
        kernels = ncu.record(settings, folder, chip)
    models = read_models(folder / ncu.MODELS)
    lead = [*_lead(kernels, settings), *lines, f"folder: {folder}"]
    asked = [*settings.metrics]
    made = _document(kernels, " ".join(_subject(settings)), lead, models, asked)
    _write(made, kernels, folder)
    _show(made, form, kernels)
    if missing := ncu.unmatched(kernels, settings.ranges):
        say(f"{COMMAND}: no kernel ran in {', '.join(missing)}", "red", stderr=True)
        raise typer.Exit(1)


def _subject(settings: Settings) -> list[str]:
    if settings.impl is None:
        return ["ncu:", *settings.command]
    return ["ncu:", settings.impl, settings.workload or "", settings.mode]


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except ToolError as error:
        say(f"{COMMAND}: {error}", "red", stderr=True)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        say(f"{COMMAND}: interrupted", "red", stderr=True)
        raise typer.Exit(130) from None


def _lead(kernels: Sequence[Kernel], settings: Settings | None = None) -> list[str]:
    devices = dict.fromkeys(kernel.device for kernel in kernels if kernel.device)
    count = "1 kernel" if len(kernels) == 1 else f"{len(kernels)} kernels"
    lines = [f"{count} on {', '.join(devices) or 'an unknown device'}"]
    if settings is None:
        return lines
    how = {
        "all": "caches flushed before each pass", "none": "caches as the program leaves them",
    }[settings.cache]  # fmt: skip
    clocks = "clocks as they are" if settings.clock == "none" else f"{settings.clock} clocks"
    return [
        *lines,
        f"{how}, {clocks}, {settings.replay} replay: times differ from a run without ncu",
    ]


def _document(
    kernels: Sequence[Kernel],
    title: str,
    lead: Sequence[str],
    models: Mapping[str, Any],
    asked: Sequence[str] = (),
) -> Document:
    from attnscope.nsight.ncu_document import document

    return document(kernels, title, lead, models, asked)


def _write(made: Document, kernels: Sequence[Kernel], folder: Path) -> None:
    from attnscope.nsight.ncu_document import as_records

    made.write_markdown(folder / "summary.md")
    made.write_html(folder / "summary.html")
    records = {"schema": 1, "title": made.title, "lead": list(made.lead)}
    content = records | {"kernels": list(as_records(kernels))}
    (folder / "kernels.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def _show(made: Document, form: str, kernels: Sequence[Kernel]) -> None:
    from attnscope.nsight.ncu_document import as_records

    show(made, form, {"kernels": list(as_records(kernels))} if form == JSON else None)


def analyze_command(
    reports: Annotated[
        list[Path], typer.Argument(help="A report, or two to compare: the first is before.")
    ],
    form: Form = "terminal",
    as_json: AsJson = False,
) -> None:
    """Show what limits the kernels of a report, or what moved from one report to another."""
    with bad_input("analyze_ncu"):
        form = form_of(form, as_json)
        if len(reports) > 2:
            raise ValueError(f"reports must be one or two, got {len(reports)}")
        if len(reports) == 2:
            _compare((reports[0], reports[1]), form)
        else:
            _import(reports[0], form)


def _import(path: Path, form: str) -> None:
    with _failures():
        kernels = ncu.read(path)
    if not kernels:
        raise ValueError(f"report must have kernels, got none in {path}")
    folder = path if path.is_dir() else path.parent
    models = read_models(folder / ncu.MODELS)
    made = _document(kernels, f"ncu: {path}", _lead(kernels), models)
    _show(made, form, kernels)


def _compare(paths: tuple[Path, Path], form: str) -> None:
    from attnscope.nsight import ncu_compare

    with _failures():
        before, after = (ncu.read(path) for path in paths)
    names = (str(paths[0]), str(paths[1]))
    made = ncu_compare.document(before, after, names)
    pairs = ncu_compare.pair_kernels(before, after)[0]
    facts = {
        "changes": [
            {"kernel": second.name, "metrics": ncu_compare.changes(first, second)}
            for first, second in pairs
        ]
    }
    show(made, form, facts if form == JSON else None)
