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
# Formats of a large trace that children write while this process writes the others. Formats with
# tables would make them again in their child, and take as long.
BESIDE = ("chrome trace",)


def write_all(profile: Result, folder: Path) -> str:
    """Write every format in a folder. Returns a sentence with the names of the files.

    If one cannot be written, the others are; then its error is raised, or the first of several.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written: list[str] = []
    failures: list[Exception] = []
    children: list[tuple[str, Child]] = []
    large = pays(profile.trace.size) and not _is_source(profile, folder / "trace.json")
    names = sorted(FORMATS, key=lambda name: large and name not in BESIDE)

    def collect(name: str, write: Callable[[], list[str]]) -> None:
        begin_step(f"writing {name} in {folder}")
        try:
            written.extend(write())
        except Exception as error:
            failures.append(error)

    try:
        with progress(f"writing {folder}") as report:
            for at, name in enumerate(names):
                report(at / len(FORMATS))
                write = partial(_write, name, profile, folder)
                if large and name in BESIDE:
                    children.append((name, Child(write)))
                else:
                    collect(name, write)
            for name, child in children:
                collect(name, child.result)
    finally:
        for _, child in children:
            child.kill()
    if failures:
        raise failures[0]
    return f"wrote {', '.join(sorted(written))} in {folder}"


def _write(name: str, profile: Result, folder: Path) -> list[str]:
    return [path.name for path in FORMATS[name](profile, folder)]
