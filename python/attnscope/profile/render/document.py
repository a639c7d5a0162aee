"""Reports as titled tables and figures: the same sections in the terminal, as Markdown and as HTML.

Columns whose name ends in "%" are percentages; a value outside 0 to 100 is refused. A missing
number is None and is written "-"; the reason is in a column of its own or in the table's text.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas

from attnscope.profile.errors import ProfileError

if TYPE_CHECKING:
    from jinja2 import Environment
    from matplotlib.figure import Figure

MISSING = "-"
SLACK = 1e-6  # percent; tolerance for sums of shares
INK = "#010203"  # placeholder in figures for the page's text colour (light or dark)


class Cell(NamedTuple):
    """The text of a cell, its sort key, and the text that a page shows on hover."""

    text: str
    key: Any
    hover: str


@dataclass
class Section:
    """A table with its explanation and an optional figure.

    Raises ProfileError for a percentage outside 0 to 100, and for a number that is not finite.
    """

    title: str
    text: str
    rows: Sequence[Mapping[str, Any]] = ()
    figure: Figure | None = None
    notes: Sequence[str] = ()
    hover: Mapping[str, str] = field(default_factory=dict)  # column -> the column it shows on hover

    def __post_init__(self) -> None:
        for row in self.rows:
            for name, value in row.items():
                if isinstance(value, bool) or not isinstance(value, int | float):
                    continue
                what = f"{self.title}: {name} of {next(iter(row.values()))}"
                if not math.isfinite(value):
                    raise ProfileError(f"{what} must be finite, got {value}")
                if name.endswith("%") and not -SLACK <= value <= 100 + SLACK:
                    raise ProfileError(f"{what} must be between 0 and 100, got {value}")

    @cached_property
    def columns(self) -> list[str]:
        """The columns with a value in some row."""
        names = dict.fromkeys(name for row in self.rows for name in row)
        used = {name for row in self.rows for name, value in row.items() if value is not None}
        return [name for name in names if name in used - set(self.hover.values())]

    @property
    def cells(self) -> list[list[Cell]]:
        """The cell of each row and column."""
        return [
            [
                Cell(*cell(row.get(name)), str(row.get(self.hover.get(name, ""), "")))
                for name in self.columns
            ]
            for row in self.rows
        ]

    @cached_property
    def numbers(self) -> set[str]:
        """The columns that contain only numbers and gaps."""
        texts = {name for row in self.rows for name, v in row.items() if isinstance(v, str)}
        return set(self.columns) - texts

    def markdown_lines(self, rows: int) -> list[str]:
        """The first rows of the table in Markdown, below its heading."""
        rule = _line("---:" if name in self.numbers else "---" for name in self.columns)
        cells = [_line(one.text for one in row) for row in self.cells[:rows]]
        return [_line(self.columns), rule, *cells]


@dataclass
class Document:
    """A title, lines on what was measured on which machine, and sections."""

    title: str
    lead: Sequence[str]
    sections: list[Section] = field(default_factory=list)

    def print(self) -> None:
        """Show the tables in the terminal."""
        from rich import box
        from rich.markup import escape
        from rich.table import Table

        from attnscope.common.console import console, say

        say(self.title, "bold")
        for line in self.lead:
            say(line)
        for section in self.sections:
            say("")
            say(section.title, "bold")
            say(section.text, "dim")
            table = Table(box=box.SIMPLE_HEAD)
            for name in section.columns:
                table.add_column(name, justify="right" if name in section.numbers else "left")
            for row in section.cells:
                table.add_row(*(escape(one.text) for one in row))
            if section.rows:
                console().print(table)
            for note in section.notes:
                say(note)

    def write_markdown(self, path: Path) -> None:
        """Write the sections; figures are PNG and SVG files in the folder `<stem>-figures`."""
        from attnscope.common.plotting import save

        folder = path.with_name(f"{path.stem}-figures")
        lines = [f"# {self.title}", "", *(f"- {line}" for line in self.lead)]
        for section in self.sections:
            lines += ["", f"## {section.title}", "", section.text]
            if section.figure:
                folder.mkdir(parents=True, exist_ok=True)
                stem = re.sub(r"\W+", "-", section.title.lower()).strip("-")
                save(section.figure, folder / stem)
                lines += ["", f"![{section.title}]({folder.name}/{stem}.svg)"]
            if section.rows:
                lines += ["", *section.markdown_lines(len(section.rows))]
            lines += [line for note in section.notes for line in ("", note)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def write_html(self, path: Path) -> None:
        """Write one self-contained page."""
        template = environment().get_template("document.html.j2")
        path.write_text(template.render(document=self), encoding="utf-8")


def cell(value: Any) -> tuple[str, Any]:
    """A value as text, and its sort key."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return MISSING, ""
    if isinstance(value, bool):
        return ("yes" if value else "no"), str(value)
    if isinstance(value, int):
        return f"{value:,}", value
    if isinstance(value, float):
        return number(value), value
    return str(value), str(value).lower()


def number(value: float) -> str:
    """A number with four significant digits, and all digits before the decimal point."""
    if value == 0:
        return "0"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}" if digits < 7 else f"{value:.3g}"


def rows_of(table: pandas.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table, with Python numbers, and None for gaps (NaN)."""
    names = list(table.columns)
    return [dict(zip(names, row, strict=True)) for row in zip(*columns_of(table), strict=True)]


def columns_of(table: pandas.DataFrame) -> list[list[Any]]:
    """The columns of a table, with Python numbers, and None for gaps (NaN)."""
    found = []
    for name in table:
        values = table[name].to_numpy(dtype=object, na_value=None).tolist()
        if table[name].dtype == object:  # may have numbers of NumPy
            values = [_plain(value) for value in values]
        found.append(values)
    return found


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _line(cells: Any) -> str:
    # Escape "<": Markdown would read "add<bf16>" as a tag and drop the type.
    texts = (re.sub(r"([|<\\])", r"\\\1", str(one)).replace("\n", " ") for one in cells)
    return f"| {' | '.join(texts)} |"


def environment() -> Environment:
    """The templates of this package, with autoescaping."""
    from jinja2 import Environment, PackageLoader

    found = Environment(
        loader=PackageLoader("attnscope.profile.render"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["svg"] = svg
    return found


def svg(figure: Figure, name: str) -> Any:
    """A figure as inline SVG, in the page's font; INK becomes the page's text colour.

    `name` makes the ids of the figure unique, so that a page can contain several figures.
    """
    import matplotlib
    from markupsafe import Markup

    from attnscope.common.plotting import RC

    buffer = io.StringIO()
    salt = {"svg.hashsalt": name, "svg.fonttype": "none"}
    with matplotlib.rc_context(RC | salt):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Matplotlib numbers every group, so two figures of a page would share ids.
    used = set(re.findall(r"#([\w.-]+)", text))
    return Markup(re.sub(r' id="([^"]+)"', lambda m: m[0] if m[1] in used else "", text))
