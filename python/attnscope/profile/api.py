"""`Profile`: a recorded region as tables and files; `Region`: a region that is being recorded."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from attnscope.profile.analysis.result import Result
from attnscope.profile.analysis.steps import select_steps
from attnscope.profile.errors import ProfileError
from attnscope.profile.render.chrome_trace import write_chrome_trace
from attnscope.profile.render.files import to_json as write_json
from attnscope.profile.render.html import write_html
from attnscope.profile.render.terminal import print_profile
from attnscope.profile.trace.reader import read_trace

P = ParamSpec("P")
R = TypeVar("R")


class Profile(Result):
    """The recording of one region: the tables of `Result`, printed or written to files."""

    @classmethod
    def read(
        cls,
        path: str | os.PathLike[str],
        steps: range | None = None,
        step_range: str | None = None,
    ) -> Profile:
        """Read a chrome trace from PyTorch's profiler, `.json` or `.json.gz`.

        Args:
            path: the file.
            steps: read these steps only, such as range(551, 554): N in "ProfilerStep#N" or in the
                marks of `profile(steps=...)`; other steps are counted from 0.
            step_range: each event of this name begins a step; see analysis/steps.py.

        Raises ValueError for a file that is not a complete trace, has nothing to read, or does not
        have the steps.
        """
        why = "the trace was read from a file"
        trace = read_trace(path)
        if not trace.cpu and not trace.gpu and not trace.faults.unread:
            raise ValueError(
                f"trace must have ops, ranges, CUDA calls or GPU work, got none in {path}. Export "
                "it after the profiler has stopped"
            )
        from attnscope import __version__

        run = {"trace": os.fspath(path), "versions": f"attnscope {__version__}"}
        if steps is not None or step_range is not None:
            trace = select_steps(trace, steps, step_range)
        return cls(
            name=Path(path).name.removesuffix(".gz").removesuffix(".json"),
            source=Path(path),
            trace=trace,
            run=run,
            unprofiled_reason=why,
            sm_clock_reason=why,
        )

    def print(self, top: int = 20, sort: str | None = None, full_names: bool = False) -> None:
        """Print the tables in the terminal; see terminal.print_profile."""
        print_profile(self, top=top, sort=sort, full_names=full_names)

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write the tables, the attribution and the audit as strict JSON."""
        write_json(self, path)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained page."""
        write_html(self, path)

    def export_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a chrome trace for Perfetto, with attnscope's rows added."""
        write_chrome_trace(self, path)


def _after(method: Callable[Concatenate[Profile, P], R]) -> Callable[Concatenate[Region, P], R]:
    """A method of Profile, available on a Region after its end."""

    @functools.wraps(method)
    def call(region: Region, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(region.profile, *args, **kwargs)

    return call


def _fact(name: str) -> Any:
    """An attribute of Profile, available on a Region after its end."""
    return property(lambda region: getattr(region.profile, name))


class Region:
    """The target of `with profile() as region`: its name, and `profile` after the region's end.

    A Region also has the attributes and methods of its Profile. Before the region ends they raise
    ProfileError.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._profile: Profile | None = None
        self._failure: str | None = None

    def end(self, profile: Profile) -> None:
        """Set the profile of the ended region."""
        self._profile = profile

    def fail(self, reason: str) -> None:
        """Mark the region as ended without a profile."""
        self._failure = reason

    @property
    def ended(self) -> bool:
        """True if there is a profile."""
        return self._profile is not None

    @property
    def profile(self) -> Profile:
        """The profile. Raises ProfileError before the region's end, and if it has no profile."""
        if self._profile is not None:
            return self._profile
        if self._failure is not None:
            raise ProfileError(f"the region must have a recording, got none: {self._failure}")
        raise ProfileError(
            "the region must have ended, got one that is running. Read results after the with block"
        )

    source, trace, attribution, audit = map(_fact, ("source", "trace", "attribution", "audit"))
    wall_s, unprofiled_wall_s = _fact("wall_s"), _fact("unprofiled_wall_s")
    unprofiled_reason, interrupted = _fact("unprofiled_reason"), _fact("interrupted")
    sm_clock_mhz, sm_clock_reason = _fact("sm_clock_mhz"), _fact("sm_clock_reason")
    incomplete, empty, has_ops = _fact("incomplete"), _fact("empty"), _fact("has_ops")
    lint, verdict, run = _fact("lint"), _fact("verdict"), _fact("run")
    flop_counts, device, device_reason = map(_fact, ("flop_counts", "device", "device_reason"))

    table = _after(Profile.table)
    operators = _after(Profile.operators)
    kernels = _after(Profile.kernels)
    stages = _after(Profile.stages)
    copies = _after(Profile.copies)
    modules = _after(Profile.modules)
    memory = _after(Profile.memory)
    links = _after(Profile.links)
    lines = _after(Profile.lines)
    steps = _after(Profile.steps)
    efficiency = _after(Profile.efficiency)
    findings = _after(Profile.findings)
    expect = _after(Profile.expect)
    print = _after(Profile.print)
    to_json = _after(Profile.to_json)
    to_html = _after(Profile.to_html)
    export_chrome_trace = _after(Profile.export_chrome_trace)
