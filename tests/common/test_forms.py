"""The forms of a command's output, and that every command has them."""

import importlib
import json
from typing import Any

import pytest
import typer
from rich.table import Table
from typer.testing import CliRunner

from attnscope import cli
from attnscope.common.console import say, show_table
from attnscope.common.forms import JSON, MARKDOWN, TERMINAL, form_of, printed, short_markdown
from attnscope.studies.attention import attention_command
from attnscope.studies.llama.command import transformers_command
from attnscope.studies.lm.command import lm_command, pair_command
from attnscope.studies.lm.nsys_report import analyze_command
from attnscope.studies.ops.command import ops_command
from attnscope.studies.ops.tools import reconcile_command

SCRIPTS = (
    attention_command, transformers_command, lm_command, pair_command, analyze_command, ops_command,
    reconcile_command,
)  # fmt: skip


def table(rows: int, title: str | None = None) -> Table:
    made = Table(title=title)
    made.add_column("name")
    made.add_column("us", justify="right")
    for at in range(rows):
        made.add_row(f"[bold]k{at}|<f>[/]", str(at))
    return made


def test_markdown_has_lines_and_tables_without_markup() -> None:
    assert short_markdown("check", ["one", "  two\n", table(1, "times")]).splitlines() == [
        "# check", "", "- one", "- two", "", "**times**", "",
        "| name | us |", "| --- | ---: |", r"| k0\|\<f> | 0 |",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "tables"), [(5, [200]), (100, []), (100, [3, 500]), (0, [40, 40, 40]), (57, [2])]
)
def test_markdown_of_anything_fits_and_counts_what_is_left_out(
    lines: int, tables: list[int]
) -> None:
    items = [f"line {at}" for at in range(lines)]
    text = short_markdown("x", [*items, *(table(rows, "t") for rows in tables)]).splitlines()
    assert len(text) <= 60
    shown = sum(line.startswith("- line") for line in text)
    assert shown == lines or f"- ({lines - shown} lines left out)" in text
    more = [int(line.split("(")[1].split()[0]) for line in text if "more rows)" in line]
    rows = sum(line.startswith("| k") for line in text)
    assert rows + sum(more) == sum(tables)


def test_what_was_printed_before_an_error_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    for form in (TERMINAL, MARKDOWN, JSON):
        with pytest.raises(RuntimeError), printed(form, "x") as facts:
            facts["rows"] = [1]
            say("one")
            show_table(table(1))
            say("aside", stderr=True)
            raise RuntimeError
        out, err = capsys.readouterr()
        assert err == "aside\n"
        assert json.loads(out) == {"schema": 1, "rows": [1]} if form == JSON else "one" in out
    say("printed again")
    assert capsys.readouterr().out == "printed again\n"


@pytest.mark.parametrize("name", [*cli.COMMANDS, *SCRIPTS])
def test_every_command_has_the_forms(name: Any) -> None:
    command = name
    if isinstance(name, str):
        module, function = cli.COMMANDS[name][0].split(":")
        command = getattr(importlib.import_module(module), function)
    app = typer.Typer()
    app.command()(command)
    options = {one for option in typer.main.get_command(app).params for one in option.opts}
    assert {"--format", "--json"} <= options


def test_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match="format must be one of terminal, markdown, json, got 'x'"):
        form_of("x", False)
    app = typer.Typer()
    app.command()(attention_command)
    done = CliRunner().invoke(app, ["--format", "x"])
    assert done.exit_code == 2 and "format must be one of" in done.output
