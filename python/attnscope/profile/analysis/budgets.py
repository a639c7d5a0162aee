"""Budgets of a profile: "attention > 35%", "idle > 20%", "step > 12 ms", "op aten::mm > 3 ms"."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnscope.profile.analysis.kernel_names import CATEGORIES, category

if TYPE_CHECKING:
    from attnscope.profile.analysis.result import Result

_BUDGET = re.compile(r"\s*(.+?)\s*(>|<)\s*([0-9]*\.?[0-9]+)\s*(%|us|ms|s)\s*")
_UNITS = {"%": 0.01, "us": 1.0, "ms": 1e3, "s": 1e6}
_TABLES = {"op": ("operators", "name", "gpu_us"), "kernel": ("kernels", "symbol", "total_us")}
_TABLES["stage"] = ("stages", "path", "gpu_us")
EXAMPLE = 'such as "attention > 35%", "idle > 20%", "step > 12 ms" or "op aten::mm > 3 ms"'


@dataclass(frozen=True)
class Budget:
    """A condition that fails a run.

    Attributes:
        text: the condition as it was written.
        kind: a category of kernels, "gpu", "idle", "step", "unowned", "op", "kernel" or "stage".
        name: of the op, kernel (part of the symbol) or stage (path); "" for other kinds.
        above: whether more than the limit fails, else less than it.
        limit: a share (0 to 1) if `share`, else microseconds.
        share: whether the limit is a share of the GPU time, for "idle" of the program's time.
    """

    text: str
    kind: str
    name: str
    above: bool
    limit: float
    share: bool

    def exceeded(self, value: float) -> bool:
        return value > self.limit if self.above else value < self.limit


def parse_budget(text: str) -> Budget:
    """Parse a budget. Raises ValueError for text that is none."""
    match = _BUDGET.fullmatch(text)
    if match is None:
        raise ValueError(f"fail-if must be NAME > NUMBER UNIT, got {text!r}. Write {EXAMPLE}")
    what, sign, number, unit = match.groups()
    kind, _, name = what.partition(" ")
    plain = ("gpu", "idle", "step", "unowned", *CATEGORIES)
    if not (kind in _TABLES and name.strip() or what in plain):
        known = f"{', '.join(plain)}, or op, kernel or stage with a name"
        raise ValueError(f"fail-if must be about one of {known}; got {what!r}")
    if unit == "%" and kind in ("step", "gpu"):
        raise ValueError(f"fail-if must give {kind} in us, ms or s, got {text!r}")
    limit = float(number) * _UNITS[unit]
    return Budget(text.strip(), kind, name.strip(), sign == ">", limit, unit == "%")


def measure(budget: Budget, result: Result) -> float:
    """The value that a budget limits: a share, or microseconds.

    Raises ValueError for a name that is not in the profile, and for a profile without GPU time.
    """
    owners = result.attribution
    if budget.kind == "step":
        mean = result.steps().attrs.get("mean_us") if result.has_ops else None
        if mean is None:
            raise ValueError(f"fail-if needs steps, got a program without them: {budget.text!r}")
        return float(mean)
    if not owners.total_ns:
        raise ValueError(f"fail-if needs GPU time, got a profile without it: {budget.text!r}")
    if budget.kind == "idle":
        used = result.efficiency()
        idle_ns = used.wall_ns - used.busy_ns
        return idle_ns / used.wall_ns if budget.share else idle_ns / 1e3
    total = owners.total_ns / 1e3
    if budget.kind in _TABLES:
        us = _of_table(budget, result)
    elif budget.kind == "unowned":
        us = total - owners.owned_ns / 1e3
    elif budget.kind == "gpu":
        us = total
    else:
        us = category_us(result)[budget.kind]
    return us / total if budget.share else us


def _of_table(budget: Budget, result: Result) -> float:
    name, key, column = _TABLES[budget.kind]
    table = result.table(name)
    names = table[key].astype(str)
    hits = names.str.contains(budget.name, regex=False) if key == "symbol" else names == budget.name
    if not hits.any():
        known = ", ".join(names.str.slice(0, 60).head(8))
        raise ValueError(
            f"fail-if must name {budget.kind}s of the profile, got {budget.name!r}. Among them "
            f"are {known}"
        )
    return float(table.loc[hits, column].sum())


def category_us(result: Result) -> Counter[str]:
    """GPU time of each category of kernels, in microseconds."""
    found: Counter[str] = Counter()
    for kernel in result.trace.kernels:
        found[category(kernel.name)] += kernel.duration
    return Counter({name: ns / 1e3 for name, ns in found.items()})  # type: ignore[misc]
