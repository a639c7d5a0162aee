"""The command `check`, and what it prints."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from attnscope.bench.command import (
    Batch,
    Causal,
    Deterministic,
    Dtype,
    HeadDim,
    Heads,
    Impls,
    KvHeads,
    ListThem,
    Mode,
    Seed,
    SeqLengths,
    Suite,
    in_mode,
    list_choices,
    pick_impls,
    pick_works,
)
from attnscope.bench.workloads import Workload
from attnscope.common.console import explain, say, show_table
from attnscope.common.forms import TERMINAL, AsJson, Form, form_of, printed
from attnscope.common.options import Device, bad_input, pick_device, split

if TYPE_CHECKING:
    import torch

    from attnscope.bench.impls import Impl
    from attnscope.numerics import Verdict
    from attnscope.numerics.locate import Location

Locate = Annotated[
    bool, typer.Option("--locate", help="Show where a failed result goes wrong, and why.")
]
SavedInputs = Annotated[
    Path | None,
    typer.Option(help="With --locate: tensors of torch.save, {q, k, v[, dout]} as [B, S, H, D]."),
]
Kinds = Annotated[str, typer.Option(help="Kinds of inputs, such as normal,outliers; or all.")]


def check_command(
    suite: Suite = None,
    seq_lengths: SeqLengths = None,
    head_dim: HeadDim = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    batch: Batch = None,
    dtype: Dtype = None,
    causal: Causal = None,
    mode: Mode = None,
    deterministic: Deterministic = False,
    impl: Impls = None,
    kinds: Kinds = "normal",
    locate: Locate = False,
    inputs: SavedInputs = None,
    seed: Seed = 0,
    device: Device = None,
    list_: ListThem = False,
    form: Form = TERMINAL,
    as_json: AsJson = False,
) -> None:
    """Compare impls with the fp64 reference, workload by workload.

    A result passes if every row's error is at most twice the error of plain same-dtype PyTorch plus
    a few ulps, and inf and nan are where they must be. With --mode backward this holds for dq, dk
    and dv each; --deterministic gradients must be the same bits in every call. --locate finds the
    first NaN or Inf of a failed result, or the element furthest from fp64, its tile and its cause.
    Exit codes: 1 something failed or nothing could be checked, 2 bad input.
    """
    with bad_input("check"):
        where, form = pick_device(device), form_of(form, as_json)
    if list_:
        list_choices(where)
        return
    if inputs is not None:
        with bad_input("check"), printed(form, "check --locate") as facts:
            if not locate or suite or seq_lengths:
                raise ValueError("--inputs must be with --locate and without a suite or lengths")
            from attnscope.bench.locating import locate_saved

            found = locate_saved(inputs, pick_impls(impl, where.type), bool(causal), where)
            facts["results"] = found
        if not found or not all(one["finite"] for one in found):
            raise typer.Exit(1)
        return
    with bad_input("check"):
        from attnscope.numerics import KINDS

        shape = dict(head_dim=head_dim, heads=heads, kv_heads=kv_heads, batch=batch, dtype=dtype)
        works = pick_works(suite, seq_lengths, shape, causal, where.type, default="check")
        works = in_mode(works, mode, deterministic)
        names = list(KINDS) if kinds == "all" else split(kinds)
        if unknown := [name for name in names if name not in KINDS]:
            raise ValueError(f"kinds must be among {', '.join(KINDS)}, all, got {unknown[0]!r}")
        impls = pick_impls(impl, where.type)
    with printed(form, "check") as facts:
        report = CheckReport(facts, lines=form == TERMINAL)
        if not _check_all(works, impls, names, seed, where, locate, report):
            raise typer.Exit(1)


def _check_all(
    works: list[Workload],
    impls: list[Impl],
    kinds: list[str],
    seed: int,
    device: torch.device,
    locate: bool,
    report: CheckReport,
) -> bool:
    from attnscope.bench.impls import Unsupported
    from attnscope.bench.locating import locate_made
    from attnscope.bench.runner import check, context_is_lost

    for work in works:
        able = []
        for impl in impls:
            if reason := impl.cannot(work, device):
                report.skipped(impl.name, reason)
            else:
                able.append(impl)
        for kind in kinds:
            for impl in list(able):
                try:
                    verdict = check(work, impl, kind, seed, device)
                    report.assessed(impl.name, work, kind, verdict)
                    if locate and not verdict.passed:
                        report.located(locate_made(impl, work, kind, seed, device))
                except Unsupported as refusal:
                    report.skipped(impl.name, str(refusal))
                    able.remove(impl)
                except Exception as error:
                    report.failed(impl.name, work, kind, explain(error))
                    if device.type == "cuda" and context_is_lost(error):
                        say(
                            "check: the CUDA context is lost, nothing more can run",
                            "red",
                            stderr=True,
                        )
                        return report.finish(complete=False)
    return report.finish()


class CheckReport:
    """Prints results and a summary, and puts them into `facts`.

    `lines`: a line for each result as it arrives; otherwise for failures alone, and a table.
    """

    def __init__(self, facts: dict[str, Any], lines: bool = True) -> None:
        self._results: list[dict[str, Any]] = []
        self._skipped: Counter[tuple[str, str]] = Counter()
        self._facts, self._lines = facts, lines
        if lines:
            head = f"{'':5}{'impl':15}{'inputs':14}{'error':>9}{'baseline':>10}{'ratio':>7}"
            say(f"{head}{'margin':>8}  workload (margin: share of the allowed error, worst row)")

    def assessed(self, impl: str, work: Workload, kind: str, verdict: Verdict) -> None:
        """A result was compared."""
        numbers = f"{_number(verdict.max_abs_err):>9}{_number(verdict.baseline_err):>10}"
        numbers += f"{_number(verdict.err_ratio, '.2f'):>7}{_number(verdict.margin, '.2f'):>8}"
        checked = "" if verdict.checked == "all rows" else f" ({verdict.checked})"
        each = [f"{name} {errors.margin:.2f}" for name, errors in verdict.gradients.items()]
        margins = f" ({', '.join(each)})" if each else ""
        named = f"{work.id}{checked}{margins}"
        self._line(verdict.passed, impl, kind, numbers, named, verdict.reason)
        self._add(impl, work, kind, asdict(verdict))

    def failed(self, impl: str, work: Workload, kind: str, reason: str) -> None:
        """There is no result: the impl raised."""
        self._line(False, impl, kind, "", work.id, reason)
        self._add(impl, work, kind, {"passed": False, "reason": reason})

    def located(self, location: Location | None) -> None:
        """Where the last result goes wrong."""
        self._results[-1]["location"] = location and location.facts()

    def skipped(self, impl: str, reason: str) -> None:
        """The impl cannot do the workload."""
        self._skipped[impl, reason] += 1

    def _add(self, impl: str, work: Workload, kind: str, found: dict[str, Any]) -> None:
        row = {"impl": impl, "workload": work.id, "inputs": kind} | found
        self._results.append({key: _plain(value) for key, value in row.items()})

    def _line(self, good: bool, impl: str, kind: str, numbers: str, work: str, reason: str) -> None:
        if good and not self._lines:
            return
        word = "pass" if good else "FAIL"
        say(f"{word:5}{impl:15}{kind:14}{numbers:34}  {work}", None if good else "red")
        if not good:
            say(f"{'':5}{reason}", "red")

    def finish(self, complete: bool = True) -> bool:
        """Print the summary. True where something was compared and everything passed."""
        for (impl, reason), count in self._skipped.items():
            say(f"{impl}: skipped on {count}: {reason}", "dim")
        good = complete
        for impl in dict.fromkeys(row["impl"] for row in self._results):
            rows = [row for row in self._results if row["impl"] == impl]
            passed = sum(row["passed"] for row in rows)
            good &= passed == len(rows)
            margins = [row["margin"] for row in rows if isinstance(row.get("margin"), float)]
            worst = f", worst margin {max(margins):.2f}" if margins else ""
            if moody := sum(row.get("repeatable") is False for row in rows):
                worst += f", bits differ between runs of {moody}"
            text = f"{impl}: {passed} of {len(rows)} passed{worst}"
            say(text, None if passed == len(rows) else "red")
        good &= bool(self._results)
        if not self._results:
            say("check: nothing could be checked", "red", stderr=True)
        elif not self._lines:
            show_table(self._table())
        skipped = [dict(impl=i, reason=r, workloads=n) for (i, r), n in self._skipped.items()]
        self._facts |= {"passed": good, "results": self._results, "skipped": skipped}
        return good

    def _table(self) -> Table:
        """A row for each result: failures first, then the largest margin."""
        table = Table(box=box.SIMPLE_HEAD)
        for name in ("", "impl", "workload", "inputs"):
            table.add_column(name)
        for name in ("error", "baseline", "margin"):
            table.add_column(name, justify="right")

        def rank(row: dict[str, Any]) -> tuple[bool, float]:
            margin = row.get("margin")
            return row["passed"], -margin if isinstance(margin, float) else 0.0

        for row in sorted(self._results, key=rank):
            numbers = [(row.get("max_abs_err"), ".2e"), (row.get("baseline_err"), ".2e")]
            numbers.append((row.get("margin"), ".2f"))
            texts = [_number(v, f) if isinstance(v, float) else str(v or "-") for v, f in numbers]
            word = "pass" if row["passed"] else "FAIL"
            table.add_row(word, row["impl"], row["workload"], row["inputs"], *texts)
        return table


def _plain(value: Any) -> Any:
    """A value of a verdict for JSON: a number that is not finite as text."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    finite = not isinstance(value, float) or abs(value) < float("inf")
    return value if finite else str(value)


def _number(value: float | None, form: str = ".2e") -> str:
    if value is None:
        return "-"
    return format(value, form if value < 1000 else ".0e")
