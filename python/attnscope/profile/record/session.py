"""`profile(...)`: record a region with PyTorch's profiler so that what is missing cannot hide."""

from __future__ import annotations

import functools
import gc
import inspect
import os
import re
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from attnscope.common.console import say
from attnscope.common.hardware.nvml import Nvml
from attnscope.profile.api import Profile
from attnscope.profile.errors import LostEvents, ProfileError
from attnscope.profile.record.attached import attached_tool
from attnscope.profile.record.step_window import StepWindow
from attnscope.profile.trace.markers import SENTINEL, WAIT

SENTINEL_KERNELS = 3
LARGE_TRACE = 200 << 20  # bytes; about half a million events
LONG_REGION_S = 60.0
TWO = "a profiler of PyTorch is running already; two at once lose events of each other"
SECOND = (
    "another profiler of PyTorch ran inside the region and took its events; take it out there, or "
    "read its own trace with attnscope profile --trace"
)
ELSEWHERE = (
    "memory: allocations are recorded in one thread only, and steps of this loop end in another "
    "than the region's or inside backward(); leave memory out, or put the region around the loop"
)
_running = threading.Lock()


class profile:
    """Record a region: `with profile() as p: ...`, or decorate a function with `@profile()`.

    Of a decorated function every call is recorded: after `warmup` calls that are not, and again, at
    most `retries` times, where events were lost; the last record is its attribute `profile`.

    Args:
        name: a title.
        warmup: unrecorded calls of a decorated function; the last of two or more is timed.
        retries: further calls of a decorated function when events were lost.
        steps: record only these steps of the region, such as range(10, 13): a step ends where the
            optimizer (torch.optim) has stepped, step 0 begins with the region. The wall time of as
            many steps just before them, the first step not among those, is the unprofiled one.
        shapes: record the shapes that FLOPs are counted from. Costs about a microsecond an op.
        stacks: record Python frames and nn.Modules. Slows Python down several times; the trace
            grows two to ten times.
        memory: record each allocation. The trace grows by about a third, and of threads that the
            program started itself no ops are recorded: their kernels then have no owner.
        kineto: keep the rows of `key_averages()` for `kineto_comparison`.

    Raises ProfileError when the region ends and launches have no kernel (it may then be looked at,
    marked incomplete), when a profiler is running already, under nsys, ncu or compute-sanitizer,
    and when the region ends before `steps` begin. An exception in the region goes on after what ran
    before it was kept.
    """

    after_steps: Callable[[], None] | None = None  # called in the program once they are recorded
    _window: StepWindow | None = None
    _recording: AbstractContextManager[None] | None = None

    def __init__(
        self,
        name: str = "profile",
        *,
        warmup: int = 2,
        retries: int = 2,
        steps: range | None = None,
        shapes: bool = True,
        stacks: bool = False,
        memory: bool = False,
        kineto: bool = False,
    ) -> None:
        if callable(name):
            raise TypeError(f"name: is {name!r}; a function is decorated with @profile()")
        for key, value in (("warmup", warmup), ("retries", retries)):
            if value < 0:
                raise ValueError(f"{key}: {value} is not 0 or more")
        if steps is not None and not (steps and steps.start >= 0 and steps.step == 1):
            raise ValueError(
                f"steps: {steps} is not a range of one step or more, one by one, from 0"
            )
        self.name, self.warmup, self.retries, self.steps = name, warmup, retries, steps
        self.shapes, self.stacks, self.memory, self.kineto = shapes, stacks, memory, kineto

    def __enter__(self) -> Profile:
        found = Profile(self.name)
        self._thread = threading.get_ident()
        if self.steps is None:
            self._begin(found)
        elif self._window is not None:
            raise ProfileError(TWO)
        else:
            begin = functools.partial(self._begin, found)
            self._window = StepWindow(
                self.steps, found, begin, self._end, synchronize, self.after_steps
            )
            self._window.open()
        self._profile = found
        return found

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Literal[False]:
        window, self._window = self._window, None
        found, cause = self._profile, f"{type(error).__name__}: {error}".removesuffix(": ")
        if error is not None and not found.filled:
            found.interrupted = cause
        try:
            if window is None:
                self._end()
            else:
                window.close()
        except Exception as failure:
            recording, self._recording = self._recording, None
            if recording is not None:  # it could not end where it should have
                with suppress(Exception):
                    recording.__exit__(None, None, None)
            if error is None:
                raise
            # The region's own error comes first, and may be why there is no record.
            if not found.filled:
                found.interrupted = f"{cause}; and nothing was kept: {failure}"
            return False
        if error is None and not found.filled:
            raise ProfileError(f"{self.name}: interrupted while it was recorded; nothing is")
        if error is None and found.incomplete:
            raise LostEvents(f"{self.name}: {found.incomplete}")
        return False

    def _begin(self, found: Profile) -> None:
        self._check_place()
        recording = self._record(found)
        recording.__enter__()
        self._recording = recording

    def _end(self) -> None:
        self._check_place()
        recording, self._recording = self._recording, None
        assert recording is not None
        recording.__exit__(None, None, None)

    def _check_place(self) -> None:
        """Where steps begin and end, which may be anywhere."""
        if self.steps is not None and self.memory and not _outside_backward(self._thread):
            raise ProfileError(ELSEWHERE)

    def __call__(self, function: Callable[..., Any]) -> Any:
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise TypeError(
                f"{function.__qualname__}: runs when it is iterated or awaited, not when it is "
                "called; profile what iterates or awaits it"
            )

        @functools.wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            call = functools.partial(function, *args, **kwargs)
            unprofiled = self._warm_up(call)
            for left in range(self.retries, -1, -1):
                again = profile(self.name, **self._options())
                try:
                    with again as found:
                        recorded.profile = found  # type: ignore[attr-defined]
                        # Else the steps before those recorded are timed.
                        if self.steps is None and unprofiled is not None:
                            found.unprofiled_wall_s, found.unprofiled_reason = unprofiled, None
                        elif self.steps is None:
                            found.unprofiled_reason = "needs warmup >= 2"
                        return call()
                except LostEvents:
                    if not left:
                        raise
            raise AssertionError("unreachable")

        return recorded

    def _options(self) -> dict[str, Any]:
        return {
            key: getattr(self, key) for key in ("steps", "shapes", "stacks", "memory", "kineto")
        }

    def _warm_up(self, call: Callable[[], Any]) -> float | None:
        seconds = None
        for at in range(self.warmup):
            synchronize()
            start = time.perf_counter()
            call()
            synchronize()
            seconds = time.perf_counter() - start if at else None
        return seconds

    @contextmanager
    def _record(self, found: Profile) -> Iterator[None]:
        import torch

        if torch.cuda.is_available() and (tool := attached_tool()):
            raise ProfileError(
                f"this process runs under {tool[0]} ({tool[1]}), and CUPTI serves one tool at a "
                "time; profile without it, or leave this profiler off there"
            )
        if torch.autograd._profiler_enabled() or not _running.acquire(blocking=False):
            raise ProfileError(TWO)
        try:
            yield from self._record_alone(found)
        finally:
            _running.release()

    def _record_alone(self, found: Profile) -> Iterator[None]:
        import torch

        cuda = torch.cuda.is_available()
        if cuda:
            _first_start()
        nvml = Nvml(torch.device("cuda" if cuda else "cpu"))
        recorder = _recorder(cuda, self.shapes, self.stacks, self.memory)
        synchronize()
        with _collector_off() if self.stacks else nullcontext():
            recorder.start()
            late = threading.Timer(LONG_REGION_S, _warn_of_length)
            late.daemon = True
            late.start()
            try:
                with torch.profiler.record_function(WAIT):
                    synchronize()
                _sentinel(cuda)
                start = time.perf_counter()
                try:
                    yield
                finally:
                    with torch.profiler.record_function(WAIT):
                        synchronize()
                    found.wall_s = time.perf_counter() - start
                    _sentinel(cuda)
                    found.sm_clock_mhz, found.sm_clock_reason = _sm_clock(nvml)
            finally:
                late.cancel()
                # What has no events any more must not be asked for them: that ends the process.
                alone = torch.autograd.profiler._is_profiler_enabled
                here = not self.memory or torch.autograd._profiler_enabled()
                if alone and here:
                    recorder.stop()
        if not alone:  # one that began and ended inside took them
            raise ProfileError(SECOND)
        if not here:
            raise ProfileError(ELSEWHERE)
        folder = tempfile.mkdtemp(prefix="attnscope-profile-")
        weakref.finalize(found, shutil.rmtree, folder, ignore_errors=True)
        source = Path(folder) / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', self.name)}.json"
        recorder.export_chrome_trace(str(source))
        _warn_of_size(source)
        found.fill(source)
        if found.trace.waits != 2:
            raise ProfileError(SECOND)
        if self.kineto:
            from attnscope.profile.analysis.kineto import averages

            try:
                found.kineto = averages(recorder)
            except UnicodeDecodeError as error:  # PyTorch kept the name of a frame that is gone
                found.kineto_reason = f"key_averages() failed in PyTorch: {error}"
                say(f"profile: {found.kineto_reason}", "yellow", stderr=True)


@contextmanager
def annotate(name: str) -> Iterator[None]:
    """A named range: a row of the stage table, and an NVTX range in the domain `attnscope`.

    Names should be few and fixed ("forward", "layer"): NVTX keeps each as long as the process.
    """
    import nvtx
    import torch

    from attnscope.ranges import DOMAIN

    with torch.profiler.record_function(name), nvtx.annotate(name, domain=DOMAIN):
        yield


def synchronize() -> None:
    """Wait for every device that this process has work on."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            # To ask an unused device would make a context on it.
            if torch._C._cuda_hasPrimaryContext(device):  # type: ignore[attr-defined]
                torch.cuda.synchronize(device)


def _outside_backward(thread: int) -> bool:
    """This is the thread, and it is not autograd's, which puts back the profiler it began with."""
    import torch

    inside = torch._C._current_graph_task_id() != -1
    return threading.get_ident() == thread and not inside


def _sm_clock(nvml: Nvml) -> tuple[float | None, str | None]:
    clock = nvml.read().get("sm_clock_mhz")
    return clock, None if clock else nvml.reason or "NVML does not tell the SM clock"


def _recorder(cuda: bool, shapes: bool, stacks: bool, memory: bool) -> Any:
    import torch
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it reports its start and end on stderr
    return torch.profiler.profile(
        activities=activities,
        record_shapes=shapes,
        with_stack=stacks,
        with_modules=stacks,
        profile_memory=memory,
        # Ops of every thread own their kernels, not only those of the thread that records. PyTorch
        # records allocations in the other mode only.
        experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=not memory),
    )


@functools.cache
def _first_start() -> None:
    """The first session of a process starts CUPTI, which takes long and loses events."""
    import torch

    torch.cuda.init()
    recorder = _recorder(cuda=True, shapes=False, stacks=False, memory=False)
    recorder.start()
    _sentinel(cuda=True)
    recorder.stop()


def _sentinel(cuda: bool) -> None:
    """A few kernels that are waited for; more than one, so that losing the first shows nothing."""
    import torch

    if not cuda:
        return
    with torch.profiler.record_function(SENTINEL):
        for _ in range(SENTINEL_KERNELS):
            # Past the dispatcher: no row of PyTorch's own table has its time.
            torch.cuda._sleep(1)
            torch.cuda.synchronize()


@contextmanager
def _collector_off() -> Iterator[None]:
    """No garbage collection meanwhile: with Python frames recorded it is slow, and is in them."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _warn_of_length() -> None:
    say(
        f"profile: the region has run for {LONG_REGION_S:.0f} s; every op and kernel of it is kept "
        "in memory, half a kilobyte each. A few steps say as much",
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
