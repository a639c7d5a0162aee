"""The command `attnscope nsys`: record a program under nsys, or read a report, as tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnscope.common.console import say
from attnscope.common.forms import TERMINAL, AsJson, Form, form_of
from attnscope.common.options import bad_input
from attnscope.nsight.nsys import NsysSettings, Recorded, import_report, plan, record
from attnscope.nsight.output import show
from attnscope.nsight.settings import read_settings
from attnscope.nsight.tool import ToolError, check_new, new_folder, print_plan
from attnscope.profile.errors import ProfileError

if TYPE_CHECKING:
    from attnscope.nsight.analysis import Analysis
    from attnscope.profile.render.document import Document

INTERRUPTED = 130


Command = Annotated[
    list[str] | None,
    typer.Argument(help="After --: the program and its arguments.", show_default=False),
]
Import = Annotated[
    Path | None, typer.Option("--import", help="Read this .nsys-rep or .sqlite, run nothing.")
]
Range = Annotated[
    str | None,
    typer.Option(
        "--range",
        help="Record inside this NVTX range: name, name@domain, name@*. With --import, show its "
        "work alone.",
    ),
]
Captures = Annotated[
    int | None, typer.Option(min=1, help="Ranges that are recorded; left out, the first alone.")
]
Gate = Annotated[str | None, typer.Option(help="cuda: record between cudaProfilerStart and Stop.")]
Memory = Annotated[
    bool | None,
    typer.Option("--cuda-memory-usage", help="Record device memory.", show_default=False),
]
Nodes = Annotated[
    bool | None, typer.Option(help="Record each kernel of a CUDA graph.", show_default=False)
]
Probe = Annotated[
    bool | None,
    typer.Option(help="Run the program once before, to check the range.", show_default=False),
]
Timeout = Annotated[
    float | None, typer.Option("--timeout", help="Seconds of the recording; 0: no limit.")
]
Arguments = Annotated[
    list[str] | None, typer.Option("--nsys-arg", help="One more argument of nsys profile.")
]
Output = Annotated[
    Path | None, typer.Option(help="New folder for the results; left out, nsys-DATE-TIME.")
]
Gpu = Annotated[int | None, typer.Option(min=0, help="The GPU that every kernel should run on.")]


def nsys_command(
    command: Command = None,
    import_: Import = None,
    range_: Range = None,
    captures: Captures = None,
    gate: Gate = None,
    trace: Annotated[str | None, typer.Option(help="Of nsys; left out, cuda,nvtx.")] = None,
    sample: Annotated[str | None, typer.Option(help="none, or cpu for CPU samples.")] = None,
    cuda_memory_usage: Memory = None,
    graph_nodes: Nodes = None,
    probe: Probe = None,
    probe_s: Annotated[float | None, typer.Option(help="Seconds of that run.")] = None,
    timeout_s: Timeout = None,
    nsys_args: Arguments = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with these settings.")] = None,
    output: Output = None,
    gpu: Gpu = None,
    top: Annotated[int, typer.Option(min=1, help="Rows of a table.")] = 20,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands only.")] = False,
    form: Form = TERMINAL,
    as_json: AsJson = False,
) -> None:
    """Record a program under Nsight Systems, gated by a range, and report where the time went.

    attnscope nsys --range measure@attnscope -- python train.py

    The exit code is the program's own, 1 if nsys failed or a table cannot be true, 2 for bad input.
    """
    given: dict[str, Any] = {
        "command": command or None, "range": range_, "captures": captures, "gate": gate,
        "trace": trace, "sample": sample, "cuda_memory_usage": cuda_memory_usage,
        "graph_nodes": graph_nodes, "probe": probe, "probe_s": probe_s, "timeout_s": timeout_s,
        "nsys_args": nsys_args or None,
    }  # fmt: skip
    try:
        with bad_input("nsys"):
            chosen = form_of(form, as_json)
            settings = read_settings(NsysSettings, config, given)
            if (import_ is None) == (not settings.command):
                got = "both" if settings.command else "neither"
                raise ValueError(f"command must be given after --, or --import a report, got {got}")
            if import_ is not None:
                recorded, folder = Recorded(import_report(import_), [], 0), output
                if folder is not None:
                    check_new(folder)
            else:
                folder = output or new_folder("nsys")
                check_new(folder)
                if dry_run:
                    print_plan(plan(settings, folder))
                    return
                recorded = record(settings, folder)
            within = settings.range if import_ is not None else None
        code = recorded.exit_code
        _report(recorded, settings, within, folder, top, gpu, chosen)
    except ToolError as error:
        say(f"nsys: {error}", "red", stderr=True)
        raise typer.Exit(error.exit_code) from None
    except BrokenPipeError:
        raise
    except (ProfileError, ValueError, OSError) as error:
        say(f"nsys: {error}", "red", stderr=True)
        raise typer.Exit(1 if import_ is None else 2) from None
    except KeyboardInterrupt:
        say("nsys: interrupted; the folder has what was recorded", "red", stderr=True)
        raise typer.Exit(INTERRUPTED) from None
    raise typer.Exit(code)


def _report(
    recorded: Recorded,
    settings: NsysSettings,
    within: str | None,
    folder: Path | None,
    top: int,
    gpu: int | None,
    form: str,
) -> None:
    from attnscope.nsight.analysis import Analysis
    from attnscope.nsight.nsys_report import as_tables, nsys_report

    analysis = Analysis(recorded.recording, within)
    notes = [*recorded.notes, *_gate_note(analysis, settings)]
    document = nsys_report(analysis, notes, top, gpu)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        _write(document, as_tables(analysis), folder)
    show(document, form, {"notes": notes})
    if folder is not None:
        say(f"wrote {folder}/nsys.md, nsys.html and nsys.json", stderr=form != TERMINAL)


def _gate_note(analysis: Analysis, settings: NsysSettings) -> list[str]:
    """How many kernels of a gated recording were launched in the range of the gate."""
    if settings.range is None or analysis.within is not None:
        return []
    total = int(analysis.is_kernel.sum())
    try:
        inside = (analysis.projection.inside(settings.range) >= 0) & analysis.is_kernel
    except ValueError:  # the report does not have the range that opened the gate
        return [f"gate: {total} kernels were recorded while {settings.range} was open"]
    return [f"gate: {int(inside.sum())} of {total} kernels were launched in {settings.range}"]


def _write(document: Document, tables: dict[str, Any], folder: Path) -> None:
    document.write_markdown(folder / "nsys.md")
    document.write_html(folder / "nsys.html")
    content = {"schema": 1, "lead": list(document.lead), "tables": tables}
    text = json.dumps(content, indent=1, allow_nan=False)
    (folder / "nsys.json").write_text(text + "\n")
