"""A session's result in three forms: tables in the terminal, short Markdown, and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from attnscope.common.forms import JSON, MARKDOWN, MARKDOWN_LINES, share
from attnscope.profile.render.document import Document, Section

LEAST_ROWS = 2  # of each table in Markdown, where there is room for so few


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
    rows = share(left, [len(one.rows) for one in tables])
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
