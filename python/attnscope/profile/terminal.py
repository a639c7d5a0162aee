"""Tables of a terminal: numbers are never cut, and what does not fit is said."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pandas
from rich import box
from rich.markup import escape
from rich.table import Table

from attnscope.bench.show import console, say

MISSING = "-"
# Left-justified, beside the first column.
TEXTS = ("op", "range", "device", "row", "explanation", "names")
LEAST_TEXT = 24  # characters that a column of names keeps
# What a narrow terminal does without, in this order.
LEAVE_OUT = (
    "self_cpu_us", "copy_us", "min_us", "max_us", "gpu_mean_us", "gpu_span_us", "range",
    "mfu_at_clock", "gpu_self_us", "cpu_us", "tflops", "backward_gpu_us", "idle_us", "kernels",
    "op", "bytes", "mean_us", "share",
)  # fmt: skip

# A column of the terminal: heading, column of the table, how its values are written.
Column = tuple[str, str, Callable[[Any], str]]


def print_table(
    title: str,
    table: pandas.DataFrame,
    columns: Sequence[Column],
    top: int,
    note: str,
    pinned: pandas.DataFrame | None = None,
) -> None:
    """`top` rows and the pinned ones, in the width of the terminal: names are cut, then whole
    columns left out, and numbers never."""
    out = console()
    rows = pandas.concat([table.head(top), pinned]) if pinned is not None else table.head(top)
    cells = {key: [_cell(value, write) for value in rows[key]] for _, key, write in columns}
    texts = {columns[0][1]} | {key for _, key, _ in columns if key in TEXTS}
    needed = {key: max(map(len, [label, *cells[key]])) for label, key, _ in columns}
    widths = fit(needed, texts, out.width)
    shown = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
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
        shown.add_row(*map(escape, row))
    out.print(shown)
    rest = f" {len(table) - top} more rows." if len(table) > top else ""
    if left_out := [label for label, key, _ in columns if key not in widths]:
        rest += f" No room for: {', '.join(left_out)}."
    say(f"{note}.{rest}", "dim")
    reasons = rows["flops_reason"] if "flops_reason" in rows else ()
    for reason in dict.fromkeys(r for r in reasons if isinstance(r, str) and r != _no_work()):
        say(f"FLOPs: {reason}.", "dim")


def fit(needed: dict[str, int], texts: set[str], width: int) -> dict[str, int]:
    """Widths of the columns that fit a line: names are cut to LEAST_TEXT characters, then whole
    columns of LEAVE_OUT go, and no number is cut. `needed` has what each column would like."""
    least = {key: min(n, LEAST_TEXT) if key in texts else n for key, n in needed.items()}
    first = next(iter(needed))
    for key in LEAVE_OUT:
        if key == first:
            continue
        if sum(least.values()) + 3 * len(least) + 1 <= width:
            break
        least.pop(key, None)
    spare = width - sum(least.values()) - 3 * len(least) - 1
    for key in [key for key in least if key in texts]:
        more = max(0, min(needed[key] - least[key], spare))
        least[key] += more
        spare -= more
    return least


def _no_work() -> str:
    from attnscope.profile.flops import NO_WORK

    return NO_WORK


def _cell(value: Any, write: Callable[[Any], str]) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return MISSING
    return write(value)


def unit_of(column: pandas.Series) -> tuple[str, Callable[[Any], str]]:
    """Microseconds or milliseconds for all of a table, by its largest number."""
    if column.max() >= 1e5:
        return "ms", lambda value: f"{value / 1e3:,.3f}" if value else "0"
    return "us", lambda value: f"{value:,.2f}" if value else "0"


def duration(microseconds: float) -> str:
    for limit, scale, unit in ((1e3, 1.0, "us"), (1e6, 1e3, "ms")):
        if microseconds < limit:
            return f"{microseconds / scale:.4g} {unit}"
    return f"{microseconds / 1e6:.4g} s"


def percent(share: float) -> str:
    """Never rounded up to 100 %."""
    text = f"{share:.2%}" if share < 0.1 or share > 0.999 else f"{share:.1%}"
    return "99.99 %" if share < 1 and text == "100.00%" else text.replace("%", " %")


def count(value: float) -> str:
    return f"{int(value):,}"


def mebibytes(value: float) -> str:
    return f"{value / 2**20:,.2f}"
