"""The files of a profile's folder. To add an output format, add a line to FORMATS."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from attnscope.common.child import Child, pays
from attnscope.common.console import progress, say
from attnscope.common.watcher import begin_step
from attnscope.profile.analysis.result import Result
from attnscope.profile.render.chrome_trace import write_chrome_trace
from attnscope.profile.render.files import to_json, write_csv
from attnscope.profile.render.html import write_html
from attnscope.profile.render.markdown import as_markdown


def _json(profile: Result, folder: Path) -> list[Path]:
    to_json(profile, folder / "profile.json")
    return [folder / "profile.json"]


def _markdown(profile: Result, folder: Path) -> list[Path]:
    (folder / "profile.md").write_text(as_markdown(profile) + "\n", encoding="utf-8")
    return [folder / "profile.md"]


def _html(profile: Result, folder: Path) -> list[Path]:
    write_html(profile, folder / "profile.html")
    return [folder / "profile.html"]


def _chrome_trace(profile: Result, folder: Path) -> list[Path]:
    """The trace with our rows; a trace that was read from this folder is not changed."""
    path = folder / "trace.json"
    if _is_source(profile, path):
        say(f"{path} is the trace that was read: it stays unchanged", "yellow")
        return []
    write_chrome_trace(profile, path)
    return [path]


def _is_source(profile: Result, path: Path) -> bool:
    return path.exists() and path.samefile(profile.source)


# Each function writes files in a folder and returns their paths. CSV comes first: it removes tables
# of an earlier profile, which it recognises by that profile's JSON.
FORMATS: dict[str, Callable[[Result, Path], list[Path]]] = {
    "csv": write_csv,
    "json": _json,
    "html": _html,
    "markdown": _markdown,
    "chrome trace": _chrome_trace,
}
# The format of a large trace that a child writes while this process writes the others. One with
# tables would make them again in its child, and take as long.
BESIDE = "chrome trace"


def write_all(profile: Result, folder: Path) -> str:
    """Write every format in a folder. Returns a sentence with the names of the files.

    If one cannot be written, the others are; then its error is raised, or the first of several.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written: list[str] = []
    failures: list[Exception] = []
    large = pays(profile.trace.size) and not _is_source(profile, folder / "trace.json")
    writers: dict[str, Callable[[], list[str]]] = {
        name: partial(_write, name, profile, folder) for name in FORMATS
    }
    child = Child(writers[BESIDE]) if large else None
    if child is not None:
        writers[BESIDE] = child.result

    try:
        with progress(f"writing {folder}") as report:
            for at, (name, write) in enumerate(writers.items()):
                report(at / len(FORMATS))
                begin_step(f"writing {name} in {folder}")
                try:
                    written += write()
                except Exception as error:
                    failures.append(error)
    finally:
        if child is not None:
            child.kill()
    if failures:
        raise failures[0]
    return f"wrote {', '.join(sorted(written))} in {folder}"


def _write(name: str, profile: Result, folder: Path) -> list[str]:
    return [path.name for path in FORMATS[name](profile, folder)]
