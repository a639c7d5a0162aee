"""Options of `attnscope profile`, and what they must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from attnscope.profile.analysis.budgets import Budget, parse_budget
from attnscope.profile.render.terminal import check_sort

FORMATS = ("text", "markdown", "json")

ScriptName = Annotated[
    str | None, typer.Argument(help="Script to run, or module with -m.", show_default=False)
]
Arguments = Annotated[
    list[str] | None, typer.Argument(help="Arguments of the script.", show_default=False)
]
Module = Annotated[bool, typer.Option("-m", help="SCRIPT names a module.")]
TraceFile = Annotated[
    Path | None, typer.Option(help="Read this chrome trace of PyTorch's, run nothing.")
]
Check = Annotated[
    Path | None,
    typer.Option(
        help="Report the faults of this trace, and whether its tables can be trusted (exit code 0) "
        "or not (1)."
    ),
]
Diff = Annotated[
    tuple[Path, Path] | None,
    typer.Option(
        metavar="A B",
        help="Compare two traces or records (profile.json, or its folder): what came, went, moved.",
    ),
]
Merge = Annotated[
    Path | None,
    typer.Option(
        help="One report of the ranks in this folder: rank0/, rank1/ and so on, or their traces."
    ),
]
Output = Annotated[
    Path | None, typer.Option(help="Folder for JSON, CSV, HTML and the chrome trace.")
]
Steps = Annotated[
    str | None,
    typer.Option(
        help="Only these steps, such as 10:12; a script ends after them. A step ends where the "
        "optimizer has stepped, or begins with --step-range; in a trace ProfilerStep#N is step N. "
        "The first is 0."
    ),
]
StepRange = Annotated[
    str | None,
    typer.Option(
        help="Name of a range, a module's class or a function: each entry begins a step.",
    ),
]
Shapes = Annotated[bool, typer.Option(help="Record shapes: FLOPs and MFU need them.")]
Stacks = Annotated[
    bool, typer.Option("--stacks", help="Record Python lines and modules; slows Python.")
]
Memory = Annotated[bool, typer.Option("--memory", help="Record allocations; a third more events.")]
Top = Annotated[int, typer.Option(min=1, help="Rows shown of each table.")]
Sort = Annotated[
    str | None, typer.Option(help="Column the operators are sorted by, such as gpu_us.")
]
FullNames = Annotated[bool, typer.Option("--full-names", help="Print whole kernel symbols.")]
Format = Annotated[
    str, typer.Option("--format", help="text, markdown (60 lines at most) or json, on stdout.")
]
Json = Annotated[bool, typer.Option("--json", help="The same as --format json.")]
FailIf = Annotated[
    list[str] | None,
    typer.Option(
        help='Exit with 1 if this is so, such as "attention > 35%", "idle > 20%", "step > 12 ms", '
        '"op aten::mm > 3 ms"; may be given several times.'
    ),
]


@dataclass(frozen=True)
class Showing:
    """How results are shown: rows, sort column, whole symbols, format, folder of files, budgets."""

    top: int
    sort: str | None
    full_names: bool
    format: str
    output: Path | None
    budgets: tuple[Budget, ...]

    @classmethod
    def parse(
        cls,
        top: int,
        sort: str | None,
        full_names: bool,
        form: str,
        output: Path | None,
        fail_if: Sequence[str] | None,
    ) -> Showing:
        """Raises ValueError for an option that is not allowed."""
        check_sort(sort)
        if form not in FORMATS:
            raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {form!r}")
        budgets = tuple(map(parse_budget, fail_if or ()))
        # The script may change directories.
        folder = None if output is None else output.resolve()
        return cls(top, sort, full_names, form, folder, budgets)


def check_sources(**sources: object) -> None:
    """Raises ValueError unless exactly one of the sources is given."""
    given = [name for name, value in sources.items() if value is not None]
    if len(given) != 1:
        names = [name if name == "script" else f"--{name}" for name in sources]
        got = ", ".join(given) or "neither"
        raise ValueError(f"one of {', '.join(names)} must be given, and one only, got {got}")
