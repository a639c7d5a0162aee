"""What `attnscope profile` does with a result: files, tables, budgets, an exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from attnscope.common.collector import collector_off
from attnscope.common.console import say
from attnscope.profile.analysis.budgets import measure
from attnscope.profile.analysis.diff import Side, difference, is_record, read_side, side_of
from attnscope.profile.api import Profile
from attnscope.profile.options import Showing
from attnscope.profile.render import diff as diffs
from attnscope.profile.render.files import lint_facts, write_json
from attnscope.profile.render.formats import write_all
from attnscope.profile.render.markdown import as_markdown
from attnscope.profile.render.table import duration, percent
from attnscope.profile.render.terminal import print_lint


def check_trace(path: Path, how: Showing) -> int:
    """Print the faults of a trace; return 0 if its tables can be trusted, else 1.

    Raises ValueError for a file that is no trace.
    """
    lint = Profile.read(path).lint
    if how.format == "json":
        print(json.dumps(lint_facts(lint), indent=1))
    else:
        print_lint(lint, lost=True)
    return int(not lint.trusted)


def compare(paths: tuple[Path, Path], how: Showing) -> int:
    """Print what changed between two traces or records; return 1 if one cannot be trusted.

    Raises ValueError for a file that is neither.
    """
    a, b = (_side(path) for path in paths)
    diff = difference(a, b)
    if how.format == "json":
        print(diffs.as_json(diff))
    elif how.format == "markdown":
        print(diffs.as_markdown(diff))
    else:
        diffs.print_diff(diff, how.top)
    return int(bool(a.faults or b.faults))


def _side(path: Path) -> Side:
    if not path.exists():
        raise ValueError(f"diff must name traces or records, got {path}, which does not exist")
    return read_side(path) if is_record(path) else side_of(Profile.read(path), str(path))


@collector_off()
def show(found: Profile, how: Showing) -> int:
    """Write the files, then print; return 1 if a budget is exceeded or a file cannot be written.

    Files come first: a pipe that is closed early ends the printing.
    """
    wrote, failure = "", None
    if how.output is not None and not found.empty:
        try:
            wrote = write_all(found, how.output)
        except OSError as error:
            failure = error
    _print(found, how)
    if failure is not None:
        raise failure
    if wrote:
        say(wrote, stderr=how.format != "text")
    return _over_budget(found, how)


def _print(found: Profile, how: Showing) -> None:
    if how.format == "json":
        write_json(found, sys.stdout)
        return
    if how.format == "markdown":
        print(as_markdown(found))
        return
    options: dict[str, Any] = {"top": how.top, "sort": how.sort, "full_names": how.full_names}
    found.print(**options)


def _over_budget(found: Profile, how: Showing) -> int:
    over = 0
    for budget in how.budgets:
        value = measure(budget, found)
        shown = percent(value) if budget.share else duration(value)
        exceeded = budget.exceeded(value)
        over += exceeded
        text = f"{'OVER BUDGET' if exceeded else 'within budget'}: not {budget.text}; got {shown}"
        say(text, "bold red" if exceeded else "green", stderr=True)
    return int(over > 0)
