"""What `attnscope profile` does with a result: files, tables, budgets, an exit code."""

from __future__ import annotations

import io
import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from attnscope.common.collector import collector_off
from attnscope.common.console import progress, say
from attnscope.common.watcher import begin_step
from attnscope.profile.analysis.budgets import measure
from attnscope.profile.analysis.diff import Side, difference, is_record, read_side, side_of
from attnscope.profile.analysis.ranks import Rank
from attnscope.profile.api import Profile
from attnscope.profile.options import Showing
from attnscope.profile.record.launcher import RankOf
from attnscope.profile.render import diff as diffs
from attnscope.profile.render.files import lint_facts, write_json
from attnscope.profile.render.formats import write_all
from attnscope.profile.render.markdown import as_markdown
from attnscope.profile.render.ranks import as_json as as_json_ranks
from attnscope.profile.render.ranks import merged
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


RANK_FOLDER = "rank"
RANKS = "rank0/, rank1/ and so on, or with a trace of each rank that has distributedInfo"
RECORD_RANKS = "Record them with torchrun --no-python attnscope profile --output FOLDER SCRIPT"


@collector_off()
def show(found: Profile, how: Showing) -> int:
    """Write the files, then print; return 1 if a budget is exceeded.

    Files come first: a pipe that is closed early ends the printing. The error of a file that cannot
    be written is raised last.
    """
    wrote, failure = "", None
    if how.output is not None and not found.empty:
        try:
            wrote = write_all(found, how.output)
        except Exception as error:
            failure = error
    begin_step("printing")
    _print(found, how)
    if failure is not None:
        raise failure
    if wrote:
        say(wrote, stderr=how.format != "text")
    return _over_budget(found, how)


def show_rank(found: Profile, how: Showing, rank: RankOf) -> int:
    """`show` for one rank of several: rank 0 prints its tables, the others one line each."""
    where = f"rank {rank.number} of {rank.world_size} ({rank.launcher})"
    if rank.number == 0:
        say(where, "bold", stderr=how.format != "text")
        code = show(found, how)
        if how.output is not None:
            line = f"all ranks in one report: attnscope profile --merge {how.output.parent}"
            say(line, stderr=how.format != "text")
        return code
    state = found.incomplete or "complete"
    say(f"{where}: {state}; GPU time {duration(found.attribution.total_ns / 1e3)}", stderr=True)
    if how.output is not None and not found.empty:
        say(f"{where}: {write_all(found, how.output)}", stderr=True)
    return _over_budget(found, how)


def merge_ranks(folder: Path, how: Showing) -> int:
    """Print and write one report of the ranks in a folder; return 1 if one is not complete.

    Raises ValueError for a folder without ranks, or with ranks of several runs.
    """
    ranks: list[Rank] = []
    files = _rank_files(folder)
    with progress(f"reading {folder}") as report:
        for at, (path, number) in enumerate(files):
            report(at / len(files))
            ranks.append(_rank(path, number))
    ranks.sort(key=lambda rank: rank.number)
    for one, other in pairwise(ranks):
        if one.number == other.number:
            raise ValueError(
                f"{folder} must have one trace of each rank, got two of rank {one.number}. Put the "
                "traces of one window of steps into a folder of their own"
            )
    document, content = merged(ranks, folder.resolve().name)
    out = how.output or folder
    out.mkdir(parents=True, exist_ok=True)
    (out / "ranks.json").write_text(as_json_ranks(content))
    document.write_markdown(out / "ranks.md")
    document.write_html(out / "ranks.html")
    if how.format == "json":
        print(as_json_ranks(content), end="")
    elif how.format == "markdown":
        print((out / "ranks.md").read_text(), end="")
    else:
        document.print()
        say(f"wrote ranks.html, ranks.json, ranks.md in {out}")
    return int(any(rank.state != "complete" for rank in ranks))


def _rank_files(folder: Path) -> list[tuple[Path, int | None]]:
    """The record of each rank in its folder, or else its trace, with the folder's number; without
    such folders the traces, each of which has its rank."""
    files: list[tuple[Path, int | None]] = []
    for path in folder.glob(f"{RANK_FOLDER}*"):
        if match := re.fullmatch(rf"{RANK_FOLDER}(\d+)", path.name):
            found = [path / name for name in ("profile.json", "trace.json", "trace.json.gz")]
            file = next(filter(Path.exists, found), None)
            if file is None:
                raise ValueError(f"{path} must have a profile.json or a trace.json, got neither")
            files.append((file, int(match[1])))
    traces = sorted([*folder.glob("*.json"), *folder.glob("*.json.gz")])
    files = files or [(path, None) for path in traces if not is_record(path)]
    if not files:
        raise ValueError(f"merge must be a folder with {RANKS}, got {folder}. {RECORD_RANKS}")
    return files


def _rank(path: Path, number: int | None) -> Rank:
    """The rank `number` from its record or trace; None: the trace has the number."""
    if path.name == "profile.json":
        try:
            content = json.loads(path.read_text())
            world = re.match(r"\d+ of (\d+)", content["run"].get("rank", ""))
            return Rank(number or 0, int(world[1]) if world else None, content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} must be a record of attnscope profile, got {type(error).__name__}: "
                f"{error}. Record the rank again"
            ) from None
    found, text = Profile.read(path), io.StringIO()
    about = found.trace.distributed
    number = about.get("rank") if number is None else number
    if not isinstance(number, int):
        raise ValueError(f"merge must be a folder with {RANKS}, got {path}. {RECORD_RANKS}")
    write_json(found, text)
    return Rank(number, about.get("world_size"), json.loads(text.getvalue()))


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
