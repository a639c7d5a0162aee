"""Every table of a profile, in display order. To add a table, add a line to TABLES.

Each table in TABLES is built and checked once, and written to JSON and CSV under its name. A table
with a title is also shown in the terminal and on the page. Its columns keep their names unless
`render/terminal.py` or `render/html.py` rename them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import pandas

from attnscope.profile.analysis.communication import (
    call_table,
    collective_calls,
    communication_table,
)
from attnscope.profile.analysis.invariants import (
    check_communication,
    check_copies,
    check_kernels,
    check_lines,
    check_links,
    check_memory,
    check_modules,
    check_operators,
    check_stages,
    check_steps,
)
from attnscope.profile.analysis.links import COLUMNS, kernel_links, line_table
from attnscope.profile.analysis.steps import step_breakdown
from attnscope.profile.analysis.tables import (
    allocation_table,
    copies_table,
    kernel_table,
    memory_table,
    module_table,
    operator_table,
    stage_table,
)
from attnscope.profile.attribution.owners import Attribution

if TYPE_CHECKING:
    from attnscope.common.hardware.devices import Device
    from attnscope.profile.analysis.flops import FlopCounts


class Recorded(Protocol):
    """The input of every table; `analysis.result.Result` implements it."""

    @property
    def attribution(self) -> Attribution: ...

    @property
    def flop_counts(self) -> FlopCounts: ...

    @property
    def device(self) -> Device | None: ...

    @property
    def device_reason(self) -> str | None: ...

    @property
    def sm_clock_mhz(self) -> float | None: ...

    def table(self, name: str) -> pandas.DataFrame: ...


def _unchecked(attribution: Attribution, table: pandas.DataFrame) -> None:
    """No check: for a table whose rows are unchanged events of the trace."""


@dataclass(frozen=True)
class Table:
    """How a table is built and checked.

    Attributes:
        make: builds the table of a recording.
        check: raises ProfileError for a table that contradicts the trace.
        title: title in the terminal and on the page; None if the table is only written to files.
    """

    make: Callable[[Recorded], pandas.DataFrame]
    check: Callable[[Attribution, pandas.DataFrame], None] = _unchecked
    title: str | None = None


def _operators(of: Recorded) -> pandas.DataFrame:
    card = (of.device, of.device_reason, of.sm_clock_mhz)
    return operator_table(of.attribution, of.flop_counts, *card)


def _stages(of: Recorded) -> pandas.DataFrame:
    card = (of.device, of.device_reason, of.sm_clock_mhz)
    return stage_table(of.attribution, of.flop_counts, *card)


def _lines(of: Recorded) -> pandas.DataFrame:
    if not any(event.kind == "python" for event in of.attribution.trace.cpu):
        return line_table(pandas.DataFrame(columns=COLUMNS))
    return line_table(of.table("links"))


def _check_lines(attribution: Attribution, table: pandas.DataFrame) -> None:
    if len(table):
        check_lines(attribution, table)


def _steps(of: Recorded) -> pandas.DataFrame:
    has_ops = any(event.kind in ("op", "range") for event in of.attribution.trace.cpu)
    return step_breakdown(of.attribution) if has_ops else pandas.DataFrame()


def _check_steps(attribution: Attribution, table: pandas.DataFrame) -> None:
    if len(table):
        check_steps(attribution, table)


TABLES: dict[str, Table] = {
    "stages": Table(_stages, check_stages, "Stages"),
    "operators": Table(_operators, check_operators, "Operators"),
    "kernels": Table(lambda of: kernel_table(of.attribution), check_kernels, "Kernels"),
    "copies": Table(lambda of: copies_table(of.attribution), check_copies, "Copies and fills"),
    "communication": Table(
        lambda of: communication_table(collective_calls(of.attribution)),
        check_communication,
        "Communication",
    ),
    "modules": Table(lambda of: module_table(of.attribution), check_modules, "Modules"),
    "lines": Table(_lines, _check_lines, "Python lines"),
    "memory": Table(lambda of: memory_table(of.attribution), check_memory, "Memory"),
    "steps": Table(_steps, _check_steps, "Steps"),
    "allocations": Table(lambda of: allocation_table(of.attribution)),
    "collectives": Table(lambda of: call_table(collective_calls(of.attribution))),
    "links": Table(lambda of: kernel_links(of.attribution), check_links),
}
