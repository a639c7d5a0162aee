"""`Result`: the recording of one region, with all its tables. A Result is immutable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas

from attnscope.profile.analysis.catalog import TABLES
from attnscope.profile.analysis.efficiency import Efficiency, efficiency
from attnscope.profile.analysis.findings import STARVATION, Finding, detect
from attnscope.profile.analysis.flops import FlopCounts, trace_device
from attnscope.profile.analysis.gaps import idle_time
from attnscope.profile.analysis.invariants import check_figures, check_owners
from attnscope.profile.analysis.lint import Lint, lint
from attnscope.profile.analysis.verdict import Verdict, starves, verdict
from attnscope.profile.attribution.audit import Audit, audit
from attnscope.profile.attribution.owners import Attribution
from attnscope.profile.errors import ProfileError
from attnscope.profile.trace.events import Trace

if TYPE_CHECKING:
    from attnscope.common.hardware.devices import Device

NOT_TWICE = "it ran once; a decorated function with warmup >= 2 also runs without the profiler"


@dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """One recorded region. Each table is built and checked on first access.

    Attributes:
        name: the name given to `profile`.
        source: the chrome trace file that PyTorch wrote.
        trace: the events of that file.
        wall_s: seconds that the region took with the profiler on, devices synchronised at both
            ends; None for a trace read from a file.
        unprofiled_wall_s, unprofiled_reason: seconds without the profiler, or why unknown.
        sm_clock_mhz, sm_clock_reason: SM clock of the current device after the region, or why
            unknown.
        interrupted: what ended the region early, as text; events up to then are recorded.
        run: facts of the run in words: its command, date, versions, peak memory.
        keeps: objects that must live as long as this one, such as the folder of `source`.
    """

    name: str
    source: Path
    trace: Trace
    wall_s: float | None = None
    unprofiled_wall_s: float | None = None
    unprofiled_reason: str | None = NOT_TWICE
    sm_clock_mhz: float | None = None
    sm_clock_reason: str | None = None
    interrupted: str | None = None
    run: Mapping[str, str] = field(default_factory=dict)
    keeps: Any = field(default=None, repr=False)
    _made: dict[str, pandas.DataFrame] = field(default_factory=dict, init=False, repr=False)

    # Contents

    @cached_property
    def _owners(self) -> Attribution:
        return Attribution(self.trace)

    @cached_property
    def attribution(self) -> Attribution:
        """The owners of GPU work. Raises ProfileError if ids and launch times contradict."""
        check_owners(self._owners)
        return self._owners

    @cached_property
    def lint(self) -> Lint:
        """Whether the tables can be trusted, and every kind of fault of the trace, counted."""
        return lint(self._owners, self.audit)

    @cached_property
    def audit(self) -> Audit:
        """The check for lost events."""
        return audit(self.trace)

    @property
    def incomplete(self) -> str | None:
        """What is known to be missing; None if nothing is."""
        return self.audit.problem

    @property
    def empty(self) -> bool:
        """True if no op, no range and no GPU event was recorded."""
        return not self.has_ops and not self.trace.gpu

    @property
    def has_ops(self) -> bool:
        """True if an op or a range was recorded, so that there are steps."""
        return any(event.kind in ("op", "range") for event in self.trace.cpu)

    @cached_property
    def flop_counts(self) -> FlopCounts:
        """FLOPs of the ops, computed from their shapes."""
        return FlopCounts(self.attribution)

    @cached_property
    def _device_and_reason(self) -> tuple[Device | None, str | None]:
        return trace_device(self.trace)

    @property
    def device(self) -> Device | None:
        """The card; None if unknown."""
        return self._device_and_reason[0]

    @property
    def device_reason(self) -> str | None:
        """Why the card is unknown."""
        return self._device_and_reason[1]

    # Tables

    def table(self, name: str) -> pandas.DataFrame:
        """A table of `catalog.TABLES`. Raises ProfileError for one that contradicts the trace."""
        if name not in self._made:
            kind = TABLES[name]
            made = kind.make(self)
            kind.check(self.attribution, made)
            self._made[name] = made
        return self._made[name].copy()

    def operators(self) -> pandas.DataFrame:
        """See tables.operator_table. Raises ProfileError like `table`, as do the methods below."""
        return self.table("operators")

    def kernels(self) -> pandas.DataFrame:
        """See tables.kernel_table."""
        return self.table("kernels")

    def stages(self) -> pandas.DataFrame:
        """See tables.stage_table."""
        return self.table("stages")

    def copies(self) -> pandas.DataFrame:
        """See tables.copies_table."""
        return self.table("copies")

    def modules(self) -> pandas.DataFrame:
        """See tables.module_table; empty unless `stacks` was on."""
        return self.table("modules")

    def memory(self) -> pandas.DataFrame:
        """See tables.memory_table; empty unless `memory` was on."""
        return self.table("memory")

    def links(self) -> pandas.DataFrame:
        """See links.kernel_links: kernel, launch, op and line of each piece of GPU work."""
        return self.table("links")

    def lines(self) -> pandas.DataFrame:
        """See links.line_table; empty unless `stacks` was on."""
        return self.table("lines")

    def steps(self) -> pandas.DataFrame:
        """See steps.step_breakdown; empty where no op was recorded."""
        return self.table("steps")

    # Figures and findings

    @cached_property
    def _efficiency(self) -> Efficiency:
        figures = efficiency(self.attribution)
        check_figures(figures)
        return figures

    def efficiency(self) -> Efficiency:
        """See efficiency.efficiency."""
        return self._efficiency

    @cached_property
    def verdict(self) -> Verdict:
        """What limits the program, as one line with its numbers."""
        return verdict(self.attribution, self.unprofiled_wall_s)

    @cached_property
    def _findings(self) -> tuple[Finding, ...]:
        found = detect(self.attribution, self.flop_counts)
        wall = self.unprofiled_wall_s
        busy_ns = self.attribution.busy_ns
        if wall and not starves(idle_time(self.attribution), busy_ns / (wall * 1e9)):
            found = [one for one in found if one.kind != STARVATION]
        return tuple(found)

    def findings(self) -> list[Finding]:
        """See findings.detect."""
        return list(self._findings)

    def expect(self, name: str, launches: int) -> None:
        """Check how many kernels ran under an op or with a symbol.

        Args:
            name: part of an op's name or of a kernel's symbol.
            launches: expected number of kernels under matching ops or with matching symbols.

        Raises ProfileError for another number, with the actual one, and if nothing matches.
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
            raise ProfileError(
                f"kernels of {name!r} must be {launches}, got a profile without GPU time"
            )
        if not hits:
            known = ", ".join(sorted(one[:60] for one in seen)[:20])
            raise ProfileError(f"name must match an op or kernel, got {name!r}. There are {known}")
        if hits != launches:
            raise ProfileError(f"kernels of {name!r} must be {launches}, got {hits}")
