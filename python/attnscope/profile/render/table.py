"""Tables in a terminal: numbers are never cut, and omitted columns are listed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import pandas
from rich import box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from attnscope.common.console import console, say
from attnscope.profile.analysis.rates import NO_WORK
from attnscope.profile.attribution.backward import ENGINE

MISSING = "-"
# Left-justified, beside the first column.
TEXTS = ("op", "range", "device", "row", "explanation", "names")
PIPE_WIDTH = 120  # characters, where the output is no terminal
LEAST_TEXT = 24  # minimum width of a text column, in characters
GAP = 2  # spaces between columns
# Columns that a narrow terminal omits, first to last.
LEAVE_OUT = (
    "self_cpu_us", "copy_us", "min_us", "max_us", "gpu_mean_us", "gpu_span_us", "range",
    "mfu_at_clock", "gpu_self_us", "cpu_us", "tflops", "backward_gpu_us", "idle_us", "kernels",
    "op", "bytes", "mean_us", "share",
)  # fmt: skip

# Compiled graphs have their hash in their name.
_HASH = re.compile(r"\b[a-z0-9]{32,}\b")

# A terminal column: heading, column of the table, format of its values.
Column = tuple[str, str, Callable[[Any], str]]


def print_table(
    title: str,
    table: pandas.DataFrame,
    columns: Sequence[Column],
    top: int,
    note: str,
    pinned: pandas.DataFrame | None = None,
) -> None:
    """Print `top` rows and the pinned ones in the terminal's width.

    Names are cut first, then whole columns are omitted; numbers are never cut.
    """
    out = console()
    rows = pandas.concat([table.head(top), pinned]) if pinned is not None else table.head(top)
    cells = {key: [_cell(value, write) for value in rows[key]] for _, key, write in columns}
    texts = {columns[0][1]} | {key for _, key, _ in columns if key in TEXTS}
    needed = {key: max(map(cell_len, [label, *cells[key]])) for label, key, _ in columns}
    whole = out.is_terminal or columns[0][1] == "symbol"  # symbols were asked for
    widths = fit(needed, texts, out.width if whole else PIPE_WIDTH)
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    kept = [column for column in columns if column[1] in widths]
    for label, key, _ in kept:
        shown.add_column(
            label,
            justify="left" if key in texts else "right",
            no_wrap=True,
            overflow="ellipsis",
            width=widths[key],
        )
    for row in zip(*(cells[key] for _, key, _ in kept), strict=True):
        shown.add_row(*map(Text, row))
    say("")
    say(title, "bold")
    out.print(shown)
    notes = [note] if note else []
    if more := len(table) - top if len(table) > top else 0:
        notes.append(f"{more} more row{'s' if more > 1 else ''}")
    if left_out := [label for label, key, _ in columns if key not in widths]:
        notes.append(f"No room for: {', '.join(left_out)}")
    if notes:
        say(plain(". ".join(notes)) + ".", "dim")
    reasons = rows["flops_reason"] if "flops_reason" in rows else ()
    for reason in dict.fromkeys(r for r in reasons if isinstance(r, str) and r != NO_WORK):
        say(f"FLOPs: {reason}.", "dim")


def fit(needed: dict[str, int], texts: set[str], width: int) -> dict[str, int]:
    """Widths of the columns that fit a line.

    Names are cut to LEAST_TEXT characters, then columns are omitted, LEAVE_OUT first. No number is
    cut. `needed` is the full width of each column.
    """
    least = {key: min(n, LEAST_TEXT) if key in texts else n for key, n in needed.items()}
    first = next(iter(needed))
    found = {first: least.pop(first)}
    spare = width - found[first]
    for key in (*[key for key in least if key not in LEAVE_OUT], *reversed(LEAVE_OUT)):
        if key in least and least[key] + GAP <= spare:
            found[key] = least[key]
            spare -= least[key] + GAP
    for key in [key for key in needed if key in found and key in texts]:
        more = max(0, min(needed[key] - found[key], spare))
        found[key] += more
        spare -= more
    return found


def _cell(value: Any, write: Callable[[Any], str]) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return MISSING
    return plain(write(value))


def shown_name(name: str) -> str:
    """The name of an op or range: without the engine's prefix, long hashes cut to 7 characters."""
    return _HASH.sub(lambda found: f"{found[0][:7]}…", name.replace(ENGINE, "engine: "))


def plain(text: str) -> str:
    """Text without control characters or line breaks: names are untrusted."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", " ", text)


def unit_of(column: pandas.Series) -> tuple[str, Callable[[Any], str]]:
    """Microseconds or milliseconds for a whole table, chosen by its largest number."""
    if column.max() >= 1e5:
        return "ms", lambda value: f"{value / 1e3:,.3f}" if value else "0"
    return "us", lambda value: f"{value:,.2f}" if value else "0"


def unit_for(microseconds: float) -> tuple[float, str]:
    """The unit that fits times up to this one: microseconds in the unit, and its name."""
    for limit, scale, unit in ((1e4, 1.0, "us"), (1e7, 1e3, "ms")):
        if not microseconds >= limit:  # true for NaN too
            return scale, unit
    return 1e6, "s"


def duration(microseconds: float) -> str:
    for limit, scale, unit in ((1e3, 1.0, "us"), (1e6, 1e3, "ms")):
        if microseconds < limit:
            return f"{microseconds / scale:.4g} {unit}"
    return f"{microseconds / 1e6:.4g} s"


def percent(share: float) -> str:
    """A share as a percentage, never rounded up to 100 %."""
    text = f"{share:.2%}" if share < 0.1 or share > 0.999 else f"{share:.1%}"
    return "99.99 %" if share < 1 and text == "100.00%" else text.replace("%", " %")


def count(value: float) -> str:
    return f"{int(value):,}"


def mebibytes(value: float) -> str:
    return f"{value / 2**20:,.2f}"
