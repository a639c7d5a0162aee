"""The command `attnscope report`: results of several commands as one self-contained page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from attnscope.common.console import say
from attnscope.common.forms import TERMINAL, AsJson, Form, form_of, printed
from attnscope.common.options import bad_input
from attnscope.profile.render.document import Document, Section

MOST_ROWS = 15  # of operators and kernels of a profile
_SIZES = ("mode", "dtype", "batch", "seqlen_q", "heads_q", "heads_kv", "head_dim", "causal")
_ENVIRONMENT = (
    "time", "attnscope", "git_sha", "gpu", "gpu_sms", "driver", "power_limit_w", "torch", "cuda",
    "cudnn", "triton", "python", "platform", "cpu", "threads",
)  # fmt: skip
_FORMS = (
    "a result file of attnscope bench, a folder or profile.json of attnscope profile, or a folder "
    "or report of attnscope ncu or attnscope nsys"
)

Row = Mapping[str, Any]


def report_command(
    results: Annotated[list[Path], typer.Argument(help=f"{_FORMS}, in the order of the page.")],
    output: Annotated[Path, typer.Option(help="The page.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Its title.")] = "attnscope report",
    form: Form = TERMINAL,
    as_json: AsJson = False,
) -> None:
    """Put benchmark curves, attribution, rooflines, what limits kernels, and the environment into
    one HTML file that needs no other file and no network.

    Exit code 2 for a file of another kind.
    """
    with bad_input("report"), printed(form_of(form, as_json), "report") as facts:
        made = make_page(results, title)
        if output.is_dir():
            raise ValueError(f"output must be a file, got the folder {output}")
        made.write_html(output)
        facts |= {"files": [str(output)], "sections": [one.title for one in made.sections]}
        say(f"{output}: {len(made.sections)} sections of {', '.join(map(str, results))}")


def make_page(paths: Sequence[Path], title: str) -> Document:
    """The page's sections. Raises ValueError that names a file of another kind."""
    environments: dict[str, Row] = {}
    sections: list[Section] = []
    for path in paths:
        for section in _sections(path, environments):
            sections.append(section)
    sections.append(_environment(environments))
    # A page links to its sections by their titles, which must differ.
    seen: dict[str, int] = {}
    for section in sections:
        seen[section.title] = count = seen.get(section.title, 0) + 1
        if count > 1:
            section.title += f" ({count})"
    return Document(title, [f"from {', '.join(map(str, paths))}"], sections)


def _sections(path: Path, environments: dict[str, Row]) -> Iterator[Section]:
    """The sections of one result; its environment goes into `environments`."""
    if path.is_dir():
        inside = (
            "profile.json",
            "kernels.csv",
            "report.ncu-rep",
            "report.sqlite",
            "report.nsys-rep",
        )
        path = next((path / name for name in inside if (path / name).is_file()), path)
    if path.suffix in (".csv", ".ncu-rep"):
        yield from _of_ncu(path)
        return
    if path.suffix in (".sqlite", ".nsys-rep"):
        yield from _of_nsys(path)
        return
    content = _read_json(path)
    if isinstance(content.get("env"), dict):
        environments[str(path)] = content["env"]
    if isinstance(content.get("tables"), dict):
        yield from _of_profile(path, content)
    elif isinstance(content.get("rows"), list):
        yield from _of_bench(path)
    else:
        raise ValueError(f"results must be {_FORMS}; got {path}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except IsADirectoryError:
        raise ValueError(f"results must be {_FORMS}; got the folder {path}") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"results must be {_FORMS}; got {path}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"results must be {_FORMS}; got {path}")
    return content


def _of_bench(path: Path) -> Iterator[Section]:
    from attnscope.bench.plots import draw_file
    from attnscope.common.results import read_results

    rows = read_results(path)["rows"]
    for number, drawn in enumerate(draw_file(path)):
        table = [_bench_row(row) for row in rows] if number == 0 else []
        text = (
            f"{path}. Medians; the interval belongs to the ratio of medians."
            if table
            else str(path)
        )
        yield Section(drawn.title, text, table, figure=drawn.figure)


def _bench_row(row: Row) -> dict[str, Any]:
    counters = row.get("counters") or {}
    interval = row.get("ratio_ci")
    cells = {name: row.get(name) for name in _SIZES}
    return cells | {
        "impl": row["impl"],
        "status": row["status"],
        "ms": row.get("median_ms"),
        "TFLOP/s": row.get("tflops"),
        "baseline": row.get("baseline"),
        "speed over it": row.get("ratio"),
        "95 %": f"{interval[0]:.3f} to {interval[1]:.3f}" if interval else None,
        "MHz": row.get("sm_clock_mhz"),
        "throttled": row.get("throttled"),
        "tensor pipe %": counters.get("tensor_pct"),
        "FLOPs / exact": counters.get("flops_ratio"),
        "reason": row.get("reason"),
    }


def _of_profile(path: Path, content: Row) -> Iterator[Section]:
    share = (content.get("attribution") or {}).get("share")
    notes = [] if share is None else [f"Attributed to ops: {100 * share:.2f} % of GPU time."]
    wanted: dict[str, tuple[str, Callable[[Row], dict[str, Any]]]] = {
        "operators": ("Operators", _operator),
        "kernels": ("GPU kernels", _kernel),
        "stages": ("Stages", _stage),
    }
    for name, (title, cells) in wanted.items():
        if rows := content["tables"].get(name):
            text = f"{content.get('name')}, {path}: the first {MOST_ROWS} of {len(rows)}."
            yield Section(f"{title}: {content.get('name')}", text,
                          [cells(row) for row in rows[:MOST_ROWS]], notes=notes)  # fmt: skip
            notes = []
    if findings := content.get("findings"):
        rows = [{key: value for key, value in one.items() if isinstance(value, str | int | float)}
                for one in findings]  # fmt: skip
        yield Section(f"Findings: {content.get('name')}", str(path), rows)


def _operator(row: Row) -> dict[str, Any]:
    return {
        "op": row.get("name"),
        "calls": row.get("calls"),
        "CPU ms": _milli(row.get("cpu_us")),
        "GPU ms": _milli(row.get("gpu_us")),
        "self GPU ms": _milli(row.get("self_gpu_us")),
        "kernels": row.get("kernels"),
    }


def _kernel(row: Row) -> dict[str, Any]:
    share = row.get("share")
    return {
        "kernel": row.get("kernel"),
        "calls": row.get("calls"),
        "ms": _milli(row.get("total_us")),
        "mean us": row.get("mean_us"),
        "share %": None if share is None else 100 * share,
        "op": row.get("op"),
        "range": row.get("range"),
    }


def _stage(row: Row) -> dict[str, Any]:
    return {
        "range": row.get("path"),
        "calls": row.get("calls"),
        "wall ms": _milli(row.get("wall_us")),
        "GPU busy ms": _milli(row.get("gpu_busy_us")),
        "kernels": row.get("kernels"),
    }


def _milli(micro: float | None) -> float | None:
    return None if micro is None else micro / 1e3


def _of_ncu(path: Path) -> Iterator[Section]:
    from attnscope.nsight import ncu
    from attnscope.nsight.models import read_models
    from attnscope.nsight.ncu_document import document
    from attnscope.nsight.tool import ToolError

    try:
        kernels = ncu.read(path)
    except ToolError as error:
        raise ValueError(f"{path}: {error}") from None
    models = read_models(path.parent / ncu.MODELS)
    for section in document(kernels, f"Roofline of {path}", [], models).sections:
        section.text = f"{path}. {section.text}"
        yield section


def _of_nsys(path: Path) -> Iterator[Section]:
    from attnscope.nsight.analysis import Analysis
    from attnscope.nsight.nsys import import_report
    from attnscope.nsight.nsys_report import nsys_report
    from attnscope.nsight.tool import ToolError

    try:
        made = nsys_report(Analysis(import_report(path)), top=MOST_ROWS)
    except ToolError as error:
        raise ValueError(f"{path}: {error}") from None
    for number, section in enumerate(made.sections):
        section.text = " ".join([str(path), *(made.lead if number == 0 else ()), section.text])
        yield section


def _environment(environments: Mapping[str, Row]) -> Section:
    rows = [
        {"from": path} | {key: _plain(env[key]) for key in _ENVIRONMENT if key in env}
        for path, env in environments.items()
    ]
    text = "What the numbers depend on, as each result file has it."
    if not rows:
        text = "No result has its environment in it; folders of ncu have versions.json."
    return Section("Environment", text, rows)


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float) else str(value)
