"""A session's result in three forms: tables in the terminal, short Markdown, and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from attnscope.profile.render.document import Document, Section

TERMINAL, MARKDOWN, JSON = FORMS = ("terminal", "markdown", "json")
MARKDOWN_LINES = 60
LEAST_ROWS = 2  # of each table in Markdown, where there is room for so few

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


def show(document: Document, form: str, facts: Mapping[str, Any] | None = None) -> None:
    """Print a document. `facts` are further keys of the JSON object."""
    if form == JSON:
        print(json.dumps(as_json(document) | dict(facts or {}), indent=1, allow_nan=False))
    elif form == MARKDOWN:
        print(short_markdown(document))
    else:
        document.print()


def as_json(document: Document) -> dict[str, Any]:
    """A document as JSON: every row of every table, under the table's title."""
    sections = {
        one.title: {"rows": [dict(row) for row in one.rows], "notes": list(one.notes)}
        for one in document.sections
    }
    return {"schema": 1, "title": document.title, "lead": list(document.lead), "tables": sections}


def short_markdown(document: Document, lines: int = MARKDOWN_LINES) -> str:
    """The first rows of each table in at most `lines` lines.

    Rows are left out evenly, then whole tables from the last; both are counted in the text.
    """
    head = [f"# {document.title}", "", *(f"- {line}" for line in document.lead)]
    sections = list(document.sections)
    while True:
        left = lines - len(head) - 1 - sum(map(_frame, sections))
        tables = [one for one in sections if one.rows]
        if left >= LEAST_ROWS * len(tables) or not sections:
            break
        sections.pop()
    rows = _share(left, [len(one.rows) for one in tables])
    body: list[str] = []
    for one in sections:
        count = rows.pop(0) if one.rows else 0
        more = len(one.rows) - count
        title = one.title + (f" ({more} more rows)" if more else "")
        body += ["", f"## {title}", *one.notes]
        body += ["", *one.markdown_lines(count)] if one.rows else []
    if dropped := len(document.sections) - len(sections):
        names = ", ".join(one.title for one in document.sections[-dropped:])
        body.append(f"Left out: {names}.")
    return "\n".join([*head, *body])


def _frame(section: Section) -> int:
    """Lines of a section without the rows of its table."""
    return 2 + len(section.notes) + (3 if section.rows else 0)


def _share(lines: int, wanted: list[int]) -> list[int]:
    """Lines for each table: all it wants, or an even part of what the smaller ones leave."""
    found, open_ = [0] * len(wanted), len(wanted)
    for at in sorted(range(len(wanted)), key=wanted.__getitem__):
        found[at] = min(wanted[at], lines // open_)
        lines -= found[at]
        open_ -= 1
    return found
