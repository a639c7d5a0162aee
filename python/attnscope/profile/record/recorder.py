"""One recording by PyTorch's profiler, with sentinels at both ends to detect lost events."""

from __future__ import annotations

import datetime
import functools
import json
import os
import platform
import re
import resource
import shlex
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from attnscope.common.child import Child
from attnscope.common.collector import collector_off
from attnscope.common.console import progress, say
from attnscope.common.hardware.nvml import Nvml
from attnscope.common.watcher import begin_step
from attnscope.profile.api import Profile
from attnscope.profile.errors import ProfileError
from attnscope.profile.record.attached import attached_tool
from attnscope.profile.record.launcher import rank_of_process
from attnscope.profile.trace.events import Trace
from attnscope.profile.trace.markers import SENTINEL, WAIT
from attnscope.profile.trace.reader import read_trace

SENTINEL_KERNELS = 3
FOLDER = "attnscope-profile-"  # begins the name of a trace's temporary folder
LARGE_TRACE = 200 << 20  # bytes; about half a million events
LONG_REGION_S = 60.0
LONG_STOP_S = 0.3  # of PyTorch's profiler: a child writes a trace that is as large
TWO = (
    "profile must be the only running profiler of PyTorch, got a second one. End the first: two at "
    "once lose events of each other"
)
SECOND = (
    "the region must contain no other profiler of PyTorch, got one that took its events. Remove "
    "it, or read its own trace with attnscope profile --trace"
)
_running = threading.Lock()


@dataclass(frozen=True)
class Options:
    """What to record besides ops and kernels: shapes, Python frames and modules, allocations."""

    shapes: bool = True
    stacks: bool = False
    memory: bool = False


class Recorder:
    """Records from `start` to `stop`, once. Both must be called on the same thread.

    `averages`: PyTorch's own table, `torch_profiler.key_averages()`, is wanted after `stop`.
    """

    def __init__(self, name: str, options: Options, averages: bool = False) -> None:
        self._name, self._options, self._averages = name, options, averages
        self.torch_profiler: Any = None  # PyTorch's own, once started

    def start(self) -> None:
        """Begin. Raises ProfileError under another tool, or if a profiler is already running."""
        import torch

        cuda = torch.cuda.is_available()
        if cuda and (tool := attached_tool()):
            raise ProfileError(
                "profile must be the only user of CUPTI in its process, got "
                f"{tool[0]} ({tool[1]}). Profile without it, or leave this profiler off there"
            )
        if torch.autograd._profiler_enabled() or not _running.acquire(blocking=False):
            raise ProfileError(TWO)
        with ExitStack() as opened:
            opened.callback(_running.release)
            if cuda:
                _first_start()
            self._cuda, self._thread = cuda, threading.get_ident()
            self._nvml = Nvml(torch.device("cuda" if cuda else "cpu"))
            self.torch_profiler = _torch_profiler(cuda, self._options, self._averages)
            synchronize()
            if self._options.stacks:  # the collector is slow then, and appears in the frames
                opened.enter_context(collector_off())
            self.torch_profiler.__enter__()
            opened.callback(self._stop_torch)
            _note_ranks()
            late = threading.Timer(LONG_REGION_S, _warn_of_length)
            late.daemon = True
            late.start()
            opened.callback(late.cancel)
            with torch.profiler.record_function(WAIT):
                synchronize()
            _sentinel(cuda)
            self._opened = opened.pop_all()
            self._began = time.perf_counter()

    def stop(self, **facts: Any) -> Profile:
        """End, and read the recording; `facts` are further attributes of the Profile.

        Raises ProfileError if the recording cannot be read.
        """
        import torch

        begin_step("collecting the events")
        with self._opened:
            if threading.get_ident() != self._thread:
                raise ProfileError(
                    "the region must end on the thread that it began on, got another one"
                )
            with torch.profiler.record_function(WAIT):
                synchronize()
            facts["wall_s"] = time.perf_counter() - self._began
            _sentinel(self._cuda)
            clock = self._nvml.read().get("sm_clock_mhz")
            why = None if clock else self._nvml.reason or "NVML does not report the SM clock"
            facts["run"] = describe_run()
            began = time.perf_counter()
            if not self._stop_torch():  # another profiler inside took the events
                raise ProfileError(SECOND)
            long = time.perf_counter() - began > LONG_STOP_S
            folder = tempfile.TemporaryDirectory(prefix=FOLDER, ignore_cleanup_errors=True)
            file = re.sub(r"[^A-Za-z0-9._-]+", "-", self._name)
            source = Path(folder.name) / f"{file}.json"
        try:
            trace = self._through_child(source) if long else None
            if trace is None:
                self._export(source)
                _warn_of_size(source)
                trace = read_trace(source)
        except Exception:
            if source.exists():
                kept = Path(tempfile.mkdtemp(prefix=FOLDER)) / source.name
                source.rename(kept)
                say(f"profile: PyTorch's trace is kept: {kept}", "yellow", stderr=True)
            raise
        if trace.waits != 2:
            raise ProfileError(SECOND)
        facts |= {"sm_clock_mhz": clock, "sm_clock_reason": why}
        return Profile(name=self._name, source=source, trace=trace, keeps=folder, **facts)

    def _export(self, source: Path) -> None:
        with progress("PyTorch's profiler writes its trace"):
            self.torch_profiler.export_chrome_trace(str(source))

    def _through_child(self, source: Path) -> Trace | None:
        """The trace, read while a child writes it; None if the child failed."""
        writer = Child(partial(self.torch_profiler.export_chrome_trace, str(source)))
        try:
            trace = read_trace(source, writer)
        except ValueError:
            if writer.failed:  # the trace is cut off, or not there
                return None
            raise
        finally:
            writer.kill()
        if writer.failed:
            return None
        _warn_of_size(source)
        return trace

    def cancel(self) -> None:
        """End without a record."""
        self._opened.close()

    def _stop_torch(self) -> bool:
        """End PyTorch's profiler if it is still recording; False if it is not.

        Requesting the events of a profiler that has lost them would end the process.
        """
        import torch

        here = not self._options.memory or torch.autograd._profiler_enabled()
        if torch.autograd.profiler._is_profiler_enabled and here:
            self.torch_profiler.__exit__(None, None, None)
            return True
        return False


def kept_traces() -> str:
    """A pattern for the traces of processes that were killed before they removed theirs."""
    return str(Path(tempfile.gettempdir()) / f"{FOLDER}*" / "*.json")


def describe_run() -> dict[str, str]:
    """The command of this process, the date, versions, and the peak memory up to now, in words."""
    import torch

    from attnscope import __version__

    date = datetime.datetime.now(datetime.timezone.utc)
    found = {
        "command": shlex.join(sys.orig_argv),
        "host": platform.node(),
        "date": date.isoformat(sep=" ", timespec="seconds"),
        "versions": f"attnscope {__version__}, torch {torch.__version__}, "
        f"CUDA {torch.version.cuda or 'none'}, Python {platform.python_version()}",
    }
    # Linux counts in KiB, macOS in bytes.
    scale = 1 if sys.platform == "darwin" else 1024
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
    parts = [f"{host / 2**30:.2f} GiB of the process, with the profiler"]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            if most := torch.cuda.max_memory_allocated(device):
                parts.append(f"{most / 2**30:.2f} GiB allocated on cuda:{device}")
    if rank := rank_of_process():
        found["rank"] = f"{rank.number} of {rank.world_size}, started by {rank.launcher}"
    return found | {"peak memory": "; ".join(parts)}


def synchronize() -> None:
    """Wait for every device that this process has work on."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            # Synchronising an unused device would create a context on it.
            if torch._C._cuda_hasPrimaryContext(device):  # type: ignore[attr-defined]
                torch.cuda.synchronize(device)


def _torch_profiler(cuda: bool, options: Options, averages: bool = False) -> Any:
    """PyTorch's profiler, not started.

    It is the one inside torch.profiler.profile, which imports torch._inductor when it starts; that
    takes seconds.
    """
    import torch

    config = torch._C._profiler._ExperimentalConfig
    # PyTorch 2.13 or later need not make objects of the events for Python, besides its trace.
    settings: dict[str, Any] = {}
    plain = not (averages or options.stacks or options.memory)
    if plain and "trace_only" in str(config.__init__.__doc__):
        settings["trace_only"] = True
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it logs its start and end to stderr
    return torch.autograd.profiler.profile(
        use_kineto=True,
        use_device="cuda" if cuda else None,
        record_shapes=options.shapes,
        with_stack=options.stacks,
        with_modules=options.stacks,
        profile_memory=options.memory,
        # Record the ops of every thread, not only of the recording thread. PyTorch records
        # allocations in the other mode only.
        experimental_config=config(profile_all_threads=not options.memory, **settings),
    )


def _note_ranks() -> None:
    """Add the rank to the trace, as torch.profiler.profile does, for tools that read many ranks."""
    import torch
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        about = {"backend": distributed.get_backend(), "rank": distributed.get_rank()}
        about |= {"world_size": distributed.get_world_size()}
        torch.autograd._add_metadata_json("distributedInfo", json.dumps(about))


@functools.cache
def _first_start() -> None:
    """Run an empty session: the first of a process starts CUPTI, which is slow and loses events."""
    import torch

    torch.cuda.init()
    with _torch_profiler(True, Options(shapes=False)):
        _sentinel(cuda=True)


def _sentinel(cuda: bool) -> None:
    """Launch several kernels and wait for each, so that losing only the first is not reported."""
    import torch

    if not cuda:
        return
    with torch.profiler.record_function(SENTINEL):
        for _ in range(SENTINEL_KERNELS):
            # Bypasses the dispatcher, so no row of PyTorch's own table includes its time.
            torch.cuda._sleep(1)
            torch.cuda.synchronize()


def _warn_of_length() -> None:
    say(
        f"profile: the region has run for {LONG_REGION_S:.0f} s; every op and kernel of it is kept "
        "in memory, half a kilobyte each. A few steps are usually representative",
        "yellow",
        stderr=True,
    )


def _warn_of_size(source: Path) -> None:
    size = source.stat().st_size
    if size > LARGE_TRACE:
        say(
            f"profile: the trace has {size / 2**20:,.0f} MiB, reading it takes about as much "
            "memory; profile fewer steps, or turn stacks, memory and shapes off",
            "yellow",
            stderr=True,
        )
