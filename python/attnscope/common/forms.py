"""The three forms of a command's output: for a terminal, short Markdown, JSON.

Commands print lines and tables as for a terminal. `printed` collects them for the other forms, and
gives the command an object to fill: that is its JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from attnscope.common.console import collected

TERMINAL, MARKDOWN, JSON = FORMS = ("terminal", "markdown", "json")
MARKDOWN_LINES = 60
HEAD, FRAME = 2, 6  # lines of the title; of a table besides its rows, with those around it
LEAST_ROWS = 3  # of each table, for which lines of text make room

Form = Annotated[
    str,
    typer.Option("--format", help=f"terminal, markdown (at most {MARKDOWN_LINES} lines) or json."),
]
AsJson = Annotated[bool, typer.Option("--json", help="The same as --format json.")]


def form_of(name: str, as_json: bool) -> str:
    """One of FORMS. Raises ValueError for another name."""
    if name not in FORMS:
        raise ValueError(f"format must be one of {', '.join(FORMS)}, got {name!r}")
    return JSON if as_json else name


@contextmanager
def printed(form: str, title: str) -> Iterator[dict[str, Any]]:
    """Print what the block says: at once for a terminal, at its end in the other forms.

    Yields the object that JSON prints, for the block to fill. What a block has said or filled in
    before it raises is printed too.
    """
    facts: dict[str, Any] = {}
    if form == TERMINAL:
        yield facts
        return
    with collected() as items:
        try:
            yield facts
        finally:
            if form == JSON and facts:
                print(json.dumps({"schema": 1} | facts, indent=1, allow_nan=False))
            if form == MARKDOWN and items:
                print(short_markdown(title, items))


def short_markdown(title: str, items: Sequence[str | Table], most: int = MARKDOWN_LINES) -> str:
    """Lines and tables in at most `most` lines.

    Lines of text are left out from the middle, rows evenly from the ends of the tables; both are
    counted in the text.
    """
    parts: list[str | Table] = []
    for one in items:
        parts += [one] if isinstance(one, Table) else [line for line in one.splitlines() if line]
    wanted = [one.row_count for one in parts if isinstance(one, Table)]
    texts = [at for at, one in enumerate(parts) if isinstance(one, str)]
    room = max(most - HEAD - (FRAME + LEAST_ROWS) * len(wanted), 3)
    over = len(texts) - room + 1 if len(texts) > room else 0  # one line counts them
    left_out = texts[(len(texts) - over) // 2 :][:over]
    used = HEAD + len(texts) - over + bool(over) + FRAME * len(wanted)
    rows = share(most - used, wanted)
    lines = [f"# {title}", ""]
    for at, one in enumerate(parts):
        if isinstance(one, Table):
            lines += ["", *table_lines(one, rows.pop(0)), ""]
        elif at not in left_out:
            lines.append(f"- {one.strip()}")
        elif at == left_out[0]:
            lines.append(f"- ({over} lines left out)")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def table_lines(table: Table, rows: int) -> list[str]:
    """The title of a table and its first rows in Markdown, the last of which counts the others."""
    columns = [[_plain(cell) for cell in column.cells] for column in table.columns]
    rule = ["---:" if column.justify == "right" else "---" for column in table.columns]
    body = [_line(cells) for cells in zip(*columns, strict=True)]
    if len(body) > rows:
        more = f"({len(body) - rows + 1} more rows)"
        body[max(rows - 1, 0) :] = [_line([more, *[""] * (len(columns) - 1)])]
    title = [f"**{_plain(table.title)}**", ""] if table.title else []
    return [*title, _line(_plain(one.header) for one in table.columns), _line(rule), *body]


def share(lines: int, wanted: Sequence[int]) -> list[int]:
    """Lines for each table: all it wants, or an even part of what the smaller ones leave."""
    found, open_ = [0] * len(wanted), len(wanted)
    for at in sorted(range(len(wanted)), key=wanted.__getitem__):
        found[at] = min(wanted[at], lines // open_)
        lines -= found[at]
        open_ -= 1
    return found


def _plain(cell: Any) -> str:
    text = Text.from_markup(cell) if isinstance(cell, str) else cell
    return text.plain if isinstance(text, Text) else str(text)


def _line(cells: Any) -> str:
    texts = (re.sub(r"([|<\\])", r"\\\1", str(one)).replace("\n", " ") for one in cells)
    return f"| {' | '.join(texts)} |"
