"""Some steps of a program that trains: a step ends where its optimizer has stepped."""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attnscope.profile.errors import ProfileError
from attnscope.profile.trace.markers import STEP, STEPS_END

if TYPE_CHECKING:
    from attnscope.profile.api import Profile

_STEPS = re.compile(r"(\d{1,9})(?::(\d{1,9}))?")


def parse_steps(text: str) -> range:
    """Steps as a user writes them, from 0: "10", or "10:12" with the last one included.

    Raises ValueError for anything else.
    """
    match = _STEPS.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"steps: {text!r} is not a step, such as 10, or first:last, such as 10:12")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ValueError(f"steps: {text!r} ends before it begins")
    return range(first, last + 1)


class StepWindow:
    """Begins and ends the record of a region where `steps` of it do.

    Step 0 begins with the region, the others where the first optimizer of torch.optim that is
    called has stepped; further ones, as a GAN has, are not counted while it lives. What goes wrong
    is raised where the region ends, not in the program's optimizer. `after` is called there, by
    each step after those recorded; what it raises is the program's.
    """

    def __init__(
        self,
        steps: range,
        found: Profile,
        begin: Callable[[], None],
        end: Callable[[], None],
        wait: Callable[[], None],
        after: Callable[[], None] | None,
    ) -> None:
        self._steps, self._found = steps, found
        self._begin, self._end, self._wait, self._after = begin, end, wait, after
        self._optimizer: Callable[[], Any] = lambda: None
        self._ended = self._others = 0  # steps of the region, and those of further optimizers
        self._before: float | None = None  # when as many steps as will be recorded began
        self._began = self._done = self._closed = False
        self._failure: Exception | None = None
        self._lock = threading.Lock()  # the loop may be in another thread than the region's end

    def open(self) -> None:
        """The region begins."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._process = os.getpid()
        self._hook = register_optimizer_step_post_hook(self._stepped)
        self._step_begins(0)

    def close(self) -> None:
        """The region has ended; raises what went wrong in it."""
        self._hook.remove()
        with self._lock:
            self._closed = True
        if self._failure is not None:
            raise self._failure
        reached = self._ended >= self._steps.start
        if self._done or reached and not self._began:
            return  # whole, or interrupted while it was made
        few = ProfileError(
            f"steps: {self._steps.start} is the first to record, and the region had "
            f"{self._ended}; a step ends where its first optimizer, of torch.optim, has stepped"
            + (f" (further ones stepped {self._others} times)" if self._others else "")
        )
        if not reached:
            raise few
        self._end()
        if self._found.interrupted is None:
            if self._ended == self._steps.start:
                raise few
            told = f"the end of the region, after {self._ended} steps of {self._steps.stop}"
            self._found.interrupted = told
        self._found.unprofiled_wall_s = None
        self._found.unprofiled_reason = "fewer steps were recorded"

    def _stepped(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if os.getpid() != self._process:
            return  # forked: not the region, and the lock may never be free there
        if _captured():
            return
        # Not under the lock: a record begins and ends with a wait for the GPU, and that may be for
        # work which other threads have yet to launch.
        if self._optimizer() is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is not optimizer:
            self._others += 1
            return
        with self._lock:
            if self._closed:
                return
            self._ended += 1
            self._step_begins(self._ended)
            if self._done and self._after is not None:
                self._after()

    def _step_begins(self, step: int) -> None:
        if self._done:
            return
        try:
            if step == self._steps.start:
                self._time_before()
                self._begin()
                self._began = True
            elif step == self._steps.stop:
                _mark(STEPS_END)
                self._done = True
                self._end()
            elif 0 < step == self._steps.start - len(self._steps):
                self._wait()
                self._before = time.perf_counter()
            if self._began and not self._done:
                _mark(f"{STEP}{step}")
        except Exception as failure:
            self._failure, self._done = failure, True

    def _time_before(self) -> None:
        """Steps before those recorded are what these take without the profiler."""
        if self._before is None:
            self._found.unprofiled_reason = (
                f"needs {len(self._steps)} steps before those recorded, besides step 0"
            )
        else:
            self._wait()
            self._found.unprofiled_wall_s = time.perf_counter() - self._before
            self._found.unprofiled_reason = None


def _captured() -> bool:
    """The step goes into a CUDA graph: it does not happen now, and a wait would end the capture."""
    import torch

    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _mark(name: str) -> None:
    """The reader takes this out, and keeps when it was."""
    import torch

    with torch.profiler.record_function(name):
        pass
