"""`Profile`: what was recorded of a region, as tables and as files."""

from __future__ import annotations

import os
from pathlib import Path

from attnscope.common.console import say
from attnscope.profile.analysis.result import Result
from attnscope.profile.render.chrome_trace import write_chrome_trace
from attnscope.profile.render.files import to_json as write_json
from attnscope.profile.render.files import write_csv
from attnscope.profile.render.html import write_html
from attnscope.profile.render.terminal import print_profile, print_use


class Profile(Result):
    """What was recorded of one region: the tables of `Result`, printed and written as files."""

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Profile:
        """A profile of a chrome trace from PyTorch's profiler, `.json` or `.json.gz`.

        Raises ValueError for a file that is no whole trace.
        """
        found = cls(Path(path).name.removesuffix(".gz").removesuffix(".json"))
        found.unprofiled_reason = found.sm_clock_reason = "the trace was read from a file"
        found.fill(Path(path))
        return found

    def print(self, top: int = 20, sort: str | None = None, full_names: bool = False) -> None:
        """Show the tables in the terminal: see show.print_profile."""
        print_profile(self, top=top, sort=sort, full_names=full_names)
        print_use(self, top)

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write tables, attribution and audit as strict JSON."""
        write_json(self, path)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained page."""
        write_html(self, path)

    def export_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a chrome trace for Perfetto, with rows of ours added."""
        write_chrome_trace(self, path)


def write_all(found: Profile, folder: Path) -> None:
    """Every table as CSV, everything as JSON, the page, and the chrome trace.

    A trace that was read from the folder as `trace.json` stays as it is.
    """
    written = write_csv(found, folder)
    for name, write in (("profile.json", found.to_json), ("profile.html", found.to_html)):
        written.append(folder / name)
        write(written[-1])
    copy = folder / "trace.json"
    if copy.exists() and copy.samefile(found.source):
        say(f"{copy} is the trace that was read: it stays as it is", "yellow")
    else:
        written.append(copy)
        found.export_chrome_trace(copy)
    say(f"wrote {', '.join(sorted(path.name for path in written))} in {folder}")
