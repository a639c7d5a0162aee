"""`profile(...)`: record a region with PyTorch's profiler and detect lost events."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal

from attnscope.common.collector import never_free
from attnscope.profile.api import Profile, Region
from attnscope.profile.errors import LostEvents, ProfileError
from attnscope.profile.record.recorder import TWO, Options, Recorder, synchronize
from attnscope.profile.record.step_window import StepWindow


class profile:
    """Record a region: `with profile() as region: ...`, or decorate a function with `@profile()`.

    The region's `profile` is available after the region's end. A decorated function is recorded on
    every call, after `warmup` unrecorded runs of it. If events were lost, it runs and is recorded
    again, at most `retries` times. The last recording is the function's attribute `profile`.

    Args:
        name: a title.
        warmup: unrecorded calls of a decorated function; the last of two or more is timed.
        retries: further calls of a decorated function if events were lost.
        steps: record only these steps of the region, such as range(10, 13). Step 0 begins with the
            region. A step ends when the first optimizer (torch.optim) that is used has stepped. The
            optimizer must step on the region's thread, outside backward(). The unprofiled wall time
            is measured over as many steps just before them, without step 0.
        step_range: each entry of this range, function or module class begins a step, from step 0,
            for loops without an optimizer. Without `steps` the whole region is recorded.
        after_steps: called once `steps` are recorded, right after the optimizer has stepped.
        shapes: record the shapes that FLOPs are counted from. Costs about a microsecond per op.
        stacks: record Python frames and nn.Modules. Slows Python down several times; the trace
            grows two to ten times.
        memory: record each allocation. The trace grows by about a third. Ops on threads that the
            program started itself are not recorded: their kernels then have no owner.

    Raises ProfileError when the region ends and launches have no kernel (its profile is there,
    marked incomplete), when a profiler is running already, under nsys, ncu or compute-sanitizer,
    and when the region ends before `steps` begin. If the region raises, what was recorded so far is
    kept and the exception propagates.
    """

    def __init__(
        self,
        name: str = "profile",
        *,
        warmup: int = 2,
        retries: int = 2,
        steps: range | None = None,
        step_range: str | None = None,
        after_steps: Callable[[], None] | None = None,
        shapes: bool = True,
        stacks: bool = False,
        memory: bool = False,
    ) -> None:
        if callable(name):
            raise TypeError(f"name must be a title, got {name!r}. Decorate with @profile()")
        for key, value in (("warmup", warmup), ("retries", retries)):
            if value < 0:
                raise ValueError(f"{key} must be 0 or more, got {value}")
        if steps is not None and not (steps and steps.start >= 0 and steps.step == 1):
            raise ValueError(f"steps must be a range from 0 or later by ones, got {steps}")
        self.name, self.warmup, self.retries = name, warmup, retries
        self.steps, self.after_steps, self.step_range = steps, after_steps, step_range
        self.options = Options(shapes, stacks, memory)
        self._region: Region | None = None
        # For a decorated function: the unprofiled time of a call, or why it is unknown.
        self._unprofiled: dict[str, Any] = {}

    def __enter__(self) -> Region:
        if self._region is not None:
            raise ProfileError(TWO)
        self._recorder = Recorder(self.name, self.options)
        self._window: StepWindow | None = None
        if self.steps is None and self.step_range is None:
            self._recorder.start()
        else:
            self._window = StepWindow(self.steps, self._recorder, self.after_steps, self.step_range)
            self._window.open()
        self._region = Region(self.name)
        return self._region

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Literal[False]:
        region, self._region = self._region, None
        assert region is not None
        cause = f"{type(error).__name__}: {error}".removesuffix(": ") if error else None
        region.fail(cause or "interrupted while it was read")
        try:
            region.end(self._finish(cause))
        except Exception as failure:
            # The region's own error comes first; it may be the cause.
            region.fail(f"{cause}; and nothing was kept: {failure}" if cause else str(failure))
            if error is None:
                raise
            return False
        if error is None and region.profile.incomplete:
            raise LostEvents(f"{self.name}: {region.profile.incomplete}")
        return False

    def leave_events(self) -> None:
        """Never free PyTorch's own events: this process ends, and to free them takes time."""
        never_free(self._recorder.torch_profiler)

    def _finish(self, cause: str | None) -> Profile:
        if self._window is not None:
            return self._window.close(cause)
        return self._recorder.stop(interrupted=cause, **self._unprofiled)

    def __call__(self, function: Callable[..., Any]) -> Any:
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise TypeError(
                f"function must run when it is called, got {function.__qualname__}, which runs "
                "when it is iterated or awaited. Profile the code that does this"
            )

        @functools.wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            call = functools.partial(function, *args, **kwargs)
            unprofiled = self._warm_up(call)
            region = Region(self.name)
            for left in range(self.retries, -1, -1):
                again = profile(
                    self.name,
                    steps=self.steps,
                    step_range=self.step_range,
                    after_steps=self.after_steps,
                    **vars(self.options),
                )
                if self.steps is None:  # with steps, the steps before them are timed instead
                    again._unprofiled = unprofiled
                try:
                    with again as region:
                        result = call()
                except LostEvents:
                    if not left:
                        raise
                else:
                    return result
                finally:
                    if region.ended:
                        recorded.profile = region.profile  # type: ignore[attr-defined]
            raise AssertionError("unreachable")

        return recorded

    def _warm_up(self, call: Callable[[], Any]) -> dict[str, Any]:
        seconds = None
        for at in range(self.warmup):
            synchronize()
            start = time.perf_counter()
            call()
            synchronize()
            seconds = time.perf_counter() - start if at else None
        reason = None if seconds is not None else "needs warmup >= 2"
        return {"unprofiled_wall_s": seconds, "unprofiled_reason": reason}


@contextmanager
def annotate(name: str) -> Iterator[None]:
    """A named range: a row of the stage table, and an NVTX range in the domain `attnscope`.

    Use few, fixed names ("forward", "layer"): NVTX keeps each name until the process exits.
    """
    import nvtx
    import torch

    from attnscope.ranges import DOMAIN

    with torch.profiler.record_function(name), nvtx.annotate(name, domain=DOMAIN):
        yield
