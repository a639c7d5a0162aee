"""`Result`: what was recorded of a region, and every table of it."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas

from attnscope.profile.analysis.invariants import (
    check_copies,
    check_figures,
    check_lines,
    check_links,
    check_memory,
    check_modules,
    check_steps,
    check_tables,
)
from attnscope.profile.analysis.tables import (
    copies_table,
    kernel_table,
    memory_table,
    module_table,
    operator_table,
    stage_table,
)
from attnscope.profile.attribution.audit import Audit, audit
from attnscope.profile.attribution.owners import Attribution
from attnscope.profile.errors import ProfileError
from attnscope.profile.trace.events import Trace
from attnscope.profile.trace.reader import read_trace

if TYPE_CHECKING:
    from attnscope.profile.analysis.efficiency import Efficiency
    from attnscope.profile.analysis.findings import Finding
    from attnscope.profile.analysis.flops import FlopCounts

NOT_TWICE = "the region ran once; a decorated function with warmup >= 2 is timed without it"


class Result:
    """What was recorded of one region. Filled when the region ends.

    Attributes:
        name: as given to `profile`.
        trace, attribution, audit: the events, their owners, and what is missing.
        source: the chrome trace as PyTorch wrote it; removed with this object unless it was read.
        wall_s: wall time of the region with the profiler on, devices synchronised at both ends;
            None for a trace that was read.
        unprofiled_wall_s, unprofiled_reason: of the same call without the profiler, or why not.
        sm_clock_mhz, sm_clock_reason: of the current device right after the region, or why not.
        interrupted: the exception that ended the region, as text; what ran before it is here.
        kineto, kineto_reason: rows of `key_averages()`, or why there are none.
    """

    trace: Trace
    source: Path
    attribution: Attribution
    audit: Audit

    def __init__(self, name: str) -> None:
        self.name = name
        self.wall_s: float | None = None
        self.unprofiled_wall_s: float | None = None
        self.unprofiled_reason: str | None = NOT_TWICE
        self.sm_clock_mhz: float | None = None
        self.sm_clock_reason: str | None = None
        self.interrupted: str | None = None
        self.kineto: list[dict[str, Any]] | None = None
        self.kineto_reason = "the rows of key_averages() were not kept; kineto=True does"

    def __getattr__(self, name: str) -> Any:
        if name in Result.__annotations__:
            if self.interrupted:
                raise ProfileError(f"nothing is recorded: {self.interrupted}")
            raise ProfileError(f"{name}: the region has not ended yet, nothing is recorded")
        raise AttributeError(name)

    def fill(self, source: Path) -> None:
        """Take the events of a chrome trace."""
        self.source = source
        self.trace = read_trace(source)
        self.attribution = Attribution(self.trace)
        self.audit = audit(self.trace)

    @property
    def incomplete(self) -> str | None:
        """What is known to be missing, None when nothing is."""
        return self.audit.problem

    @property
    def filled(self) -> bool:
        """The record is here, and was read to its end."""
        return "audit" in self.__dict__

    @property
    def empty(self) -> bool:
        """Nothing was recorded: no op, no range, no GPU event."""
        return not self.has_ops and not self.trace.gpu

    @property
    def has_ops(self) -> bool:
        """An op or a range was recorded: there are steps."""
        return any(event.kind in ("op", "range") for event in self.trace.cpu)

    @cached_property
    def flop_counts(self) -> FlopCounts:
        from attnscope.profile.analysis.flops import FlopCounts

        return FlopCounts(self.attribution)

    @cached_property
    def device_and_reason(self) -> tuple[Any, str | None]:
        from attnscope.profile.analysis.flops import trace_device

        return trace_device(self.trace)

    @property
    def device(self) -> Any:
        """The card as bench.devices.Device, None where it is not known."""
        return self.device_and_reason[0]

    @property
    def device_reason(self) -> str | None:
        return self.device_and_reason[1]

    @cached_property
    def _tables(self) -> dict[str, pandas.DataFrame]:
        owners, counts = self.attribution, self.flop_counts
        card = (*self.device_and_reason, self.sm_clock_mhz)
        operators = operator_table(owners, counts, *card)
        kernels = kernel_table(owners)
        stages = stage_table(owners, counts, *card)
        check_tables(owners, operators, kernels, stages)
        return {"operators": operators, "kernels": kernels, "stages": stages}

    def operators(self) -> pandas.DataFrame:
        """See tables.operator_table. Raises ProfileError for tables that cannot be true."""
        return self._tables["operators"].copy()

    def kernels(self) -> pandas.DataFrame:
        """See tables.kernel_table. Raises ProfileError as `operators`."""
        return self._tables["kernels"].copy()

    def stages(self) -> pandas.DataFrame:
        """See tables.stage_table. Raises ProfileError as `operators`."""
        return self._tables["stages"].copy()

    def copies(self) -> pandas.DataFrame:
        """See tables.copies_table. Raises ProfileError as `operators`; so do those below."""
        table = copies_table(self.attribution)
        check_copies(self.attribution, table)
        return table

    def modules(self) -> pandas.DataFrame:
        """See tables.module_table; empty unless `stacks` was on."""
        table = module_table(self.attribution)
        check_modules(self.attribution, table)
        return table

    def memory(self) -> pandas.DataFrame:
        """See tables.memory_table; empty unless `memory` was on."""
        table = memory_table(self.attribution)
        check_memory(self.attribution, table)
        return table

    def links(self) -> pandas.DataFrame:
        """See links.kernel_links: kernel, launch, op, line, of each piece of GPU work."""
        return self._links.copy()

    @cached_property
    def _links(self) -> pandas.DataFrame:
        from attnscope.profile.analysis.links import kernel_links

        table = kernel_links(self.attribution)
        check_links(self.attribution, table)
        return table

    def lines(self) -> pandas.DataFrame:
        """See links.line_table; empty unless `stacks` was on."""
        from attnscope.profile.analysis.links import COLUMNS, line_table

        if not any(event.kind == "python" for event in self.trace.cpu):
            return line_table(pandas.DataFrame(columns=COLUMNS))
        table = line_table(self._links)
        check_lines(self.attribution, table)
        return table

    def steps(self) -> pandas.DataFrame:
        """See breakdown.step_breakdown."""
        return self._steps.copy()

    @cached_property
    def _steps(self) -> pandas.DataFrame:
        from attnscope.profile.analysis.steps import step_breakdown

        table = step_breakdown(self.attribution)
        check_steps(self.attribution, table)
        return table

    def efficiency(self) -> Efficiency:
        """See efficiency.efficiency."""
        from attnscope.profile.analysis.efficiency import efficiency

        found = efficiency(self.attribution)
        check_figures(found)
        return found

    def findings(self) -> list[Finding]:
        """See detect.detect."""
        from attnscope.profile.analysis.findings import detect

        return detect(self.attribution)

    def kineto_comparison(self) -> pandas.DataFrame:
        """See kineto.comparison. Raises ProfileError where there are no rows, with the reason."""
        from attnscope.profile.analysis.kineto import comparison

        if self.kineto is None:
            raise ProfileError(f"kineto: {self.kineto_reason}")
        return comparison(self.attribution, self.kineto)

    def expect(self, name: str, launches: int) -> None:
        """Check that kernels of an op or kernel ran as often as they must have.

        Args:
            name: part of an op's name or of a kernel's symbol.
            launches: kernels that must have run under such an op or such a symbol.

        Raises ProfileError for another number, saying what there is, and where nothing matches.
        """
        hits = 0
        seen = set()
        for kernel in self.trace.kernels:
            op = self.attribution.op(kernel)
            around = (op, *self.trace.ancestors(op)) if op else ()
            names = {kernel.name, *(e.name for e in around if e.kind == "op")}
            seen |= names
            hits += any(name in one for one in names)
        if not self.trace.kernels:
            raise ProfileError(f"expect: {launches} kernels of {name!r}, but there is no GPU time")
        if not hits:
            known = ", ".join(sorted(one[:60] for one in seen)[:20])
            raise ProfileError(f"expect: nothing with GPU time matches {name!r}; there are {known}")
        if hits != launches:
            raise ProfileError(f"expect: {name!r} ran {hits} kernels, not {launches}")
