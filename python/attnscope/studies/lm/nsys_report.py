"""The command of profiling/analyze_nsys.py, and the report of a folder of nsys recordings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from attnscope.common.console import say
from attnscope.common.forms import TERMINAL, AsJson, Form, form_of
from attnscope.common.options import bad_input, make_folder
from attnscope.common.results import Results, read_record
from attnscope.nsight.output import show
from attnscope.nsight.tool import ToolError
from attnscope.profile.render.document import Document, Section
from attnscope.studies.lm.nsys import compare_rows, read_folder, record_all
from attnscope.studies.lm.report import model_report
from attnscope.studies.lm.run import Run
from attnscope.studies.outputs import bad_output, progress
from attnscope.studies.records import Row

STEM = "lm-nsys"


def nsys_document(
    rows: Sequence[Row], env: Mapping[str, Any], profiled: Sequence[Row] = ()
) -> Document:
    """The report of records from nsys, beside those of PyTorch's profiler."""
    document = model_report(rows, env)
    document.title = "Where the time of a training step goes, by nsys"
    document.lead = [
        f"{env.get('gpu')}, torch {env.get('torch')}, nsys {env.get('nsys')}"
        + (f", {env['time']}" if env.get("time") else ""),
        "GPU time is the sum of kernel durations in one step that nsys recorded; copies are apart. "
        "The wall clock is the median of steps of the same process before the recording began.",
        "Kernels belong to the NVTX range that was open at their launch; backward kernels belong "
        "to the part of the model whose forward op has the same autograd number.",
    ]
    if both := compare_rows(rows, profiled):
        far = sum(row["difference"] is not None for row in both)
        text = "The same configurations in another process under PyTorch's profiler. "
        same = sum(row["nsys kernels"] == row["profiler kernels"] for row in both)
        text += f"{same} of {len(both)} phases have as many kernels, "
        text += f"{len(both) - far} agree within 0.5 %."
        document.sections.append(Section("Beside PyTorch's profiler", text, both))
    return document


def analyze_command(
    folder: Annotated[
        Path, typer.Argument(help="Folder of reports named <model>-<context>-<impl>.")
    ],
    profiled: Annotated[
        Path | None,
        typer.Option(help="lm.json of PyTorch's profiler; left out, the one above the folder."),
    ] = None,
    form: Form = TERMINAL,
    as_json: AsJson = False,
) -> None:
    """Read a folder of nsys reports, and write where the time of a training step goes.

    Writes lm-nsys.json, .md and .html beside the folder's reports. Exit codes: 1 no configuration
    has a usable report, 2 bad input.
    """
    with bad_input("analyze_nsys"):
        chosen = form_of(form, as_json)
        if not folder.is_dir():
            raise ValueError(f"folder must be a folder of reports, got {folder}")
        document = write_report(folder, folder / STEM, profiled or folder.parent / "lm.json")
    show(document, chosen)
    say(f"wrote {folder / STEM}.json, .md and .html", stderr=chosen != TERMINAL)
    if not _has_kernels(document):
        raise typer.Exit(1)


def record_and_report(
    runs: Sequence[Run], output: Path, timeout_s: float, form: str = TERMINAL
) -> None:
    """Record configurations under nsys, and write `lm-nsys` in the output folder, beside `lm` of
    PyTorch's profiler. Exit codes: 1 no configuration could be recorded, 2 bad input or no nsys."""
    folder = output / "nsys"
    show_record = progress(lambda one: f"{one['model']}, context {one['context']}, {one['impl']}")
    try:
        with bad_input("profile_model"):
            make_folder(folder)
            record_all(runs, folder, timeout_s, show_record)
            document = write_report(folder, output / STEM, output / "lm.json")
    except ToolError as error:
        say(f"profile_model: {error}", "red", stderr=True)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        done = f"{folder} has what was recorded; the same command goes on"
        say(f"profile_model: stopped; {done}", "red", stderr=True)
        raise typer.Exit(130) from None
    show(document, form)
    say(f"wrote {output / STEM}.json, .md and .html", stderr=form != TERMINAL)
    if not _has_kernels(document):
        raise typer.Exit(1)


def _has_kernels(document: Document) -> bool:
    return any(section.title == "Top kernels" for section in document.sections)


def write_report(folder: Path, stem: Path, profiled: Path) -> Document:
    """Read the reports of a folder and write `<stem>.json`, `.md` and `.html`."""
    beside = read_record(profiled)["rows"] if profiled.is_file() else []
    rows, env = read_folder(folder, beside)
    document = nsys_document(rows, env, beside)
    results = Results.create(stem.with_suffix(".json"), env, False)
    results.rows = rows
    with bad_output("analyze_nsys", stem.parent):
        results.save()
        document.write_markdown(stem.with_suffix(".md"))
        document.write_html(stem.with_suffix(".html"))
    return document
