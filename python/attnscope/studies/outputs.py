"""Output files of profiles and reports: a folder, records as they arrive, and their report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnscope.common.console import say
from attnscope.common.forms import TERMINAL
from attnscope.common.options import make_folder
from attnscope.nsight.output import show
from attnscope.profile.errors import ProfileError

if TYPE_CHECKING:
    from attnscope.common.results import Results
    from attnscope.profile.render.document import Document
    from attnscope.studies.records import Row

SUFFIXES = (".json", ".md", ".html")  # records, and the report in two forms
Output = Annotated[
    Path,
    typer.Option(
        help="Folder for records (JSON), report and figures. Records that are there are not"
        " replaced: it must be another folder, or they must be moved."
    ),
]


def start(stem: Path, env: dict[str, Any], resume: bool | None = None) -> Results:
    """Start `<stem>.json`, or go on with it; `resume` is None for a command that never does.

    Raises ValueError if the files cannot be written, if there are records that would not be resumed
    (they took time, so they are kept), and as `Results.create`.
    """
    from attnscope.common.results import Results

    make_folder(stem.parent)
    for file in map(stem.with_suffix, SUFFIXES):
        if file.is_dir():
            raise ValueError(f"output must have no folder {file.name}, got {file}: Is a directory")
    path = stem.with_suffix(".json")
    if path.exists():
        if not resume:
            more = "" if resume is None else ", or go on with it by --resume"
            raise ValueError(
                f"output must be a new folder, got {path}, which exists and is kept. Give another "
                f"--output{more}"
            )
    return Results.create(path, env, bool(resume))


@contextmanager
def bad_output(command: str, folder: Path) -> Iterator[None]:
    """Turn a file that cannot be written into one line that names it, and exit code 2."""
    try:
        yield
    except OSError as error:
        # A rename names the temporary file first; a full disk names none.
        name = error.filename2 or error.filename or folder
        say(f"{command}: output: {name}: {error.strerror or error}", "red", stderr=True)
        raise typer.Exit(2) from None


def origin(env: Mapping[str, Any]) -> str:
    """Where and when records were made, from the `env` of their file."""
    return f"{env.get('gpu') or env.get('cpu')}, torch {env.get('torch')}, {env.get('time')}"


def progress(name: Callable[[Row], str]) -> Callable[[Row], None]:
    """Return a function that prints to stderr a record's status and the seconds since now."""
    started = time.perf_counter()

    def show_record(record: Row) -> None:
        why = f": {record['reason']}" if record["reason"] else ""
        seconds = time.perf_counter() - started
        say(f"{seconds:6.1f} s  {name(record)}: {record['status']}{why}", stderr=True)

    return show_record


def finish(command: str, report: Callable[[], Document], stem: Path, form: str = TERMINAL) -> None:
    """Write a report beside its records, and show it; exit code 1 if it contradicts itself, 2 if it
    cannot be written."""
    try:
        document = report()
    except (ProfileError, ValueError) as error:
        say(f"{command}: {error}", "red", stderr=True)
        raise typer.Exit(1) from None
    with bad_output(command, stem.parent):
        document.write_markdown(stem.with_suffix(".md"))
        document.write_html(stem.with_suffix(".html"))
    show(document, form)
    say(f"wrote {stem}.json, .md and .html", stderr=form != TERMINAL)
