"""Records selected steps of a program.

A step ends when the optimizer has stepped, or begins with an entry of a range, function or module.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from typing import Any

from attnscope.common.console import say
from attnscope.profile.api import Profile
from attnscope.profile.errors import ProfileError
from attnscope.profile.record.entries import WHAT, Entries
from attnscope.profile.record.recorder import Recorder, synchronize
from attnscope.profile.trace.markers import STEP, STEP_OF, STEPS_END

MOST_STEPS = 1 << 40  # no program has as many
LATE_S = 60.0  # seconds without an optimizer step until the warning
_STEPS = re.compile(r"(\d{1,9})(?::(\d{1,9}))?")


def parse_steps(text: str) -> range:
    """Parse steps, counted from 0: "10", or "10:12" with step 12 included.

    Raises ValueError for anything else.
    """
    match = _STEPS.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"steps must be a step or first:last, such as 10 or 10:12, got {text!r}")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ValueError(f"steps must end where they begin or later, got {text!r}")
    return range(first, last + 1)


class StepWindow:
    """Starts and stops a recorder where `steps` of a region begin and end.

    Without `step_range`, step 0 begins with the region. Every other step begins when the optimizer
    has stepped: the first one of torch.optim that is called. Further optimizers (in a GAN, for
    example) are not counted. With `step_range`, each entry of that range, function or module begins
    a step, from step 0; `steps` may then be None: the whole region is recorded.

    Errors are reported at once but raised at the end of the region, not in the program. `after` is
    called once the steps are recorded; its exceptions propagate into the program.
    """

    def __init__(
        self,
        steps: range | None,
        recorder: Recorder,
        after: Callable[[], None] | None = None,
        step_range: str | None = None,
    ) -> None:
        self._whole = steps is None
        self._steps, self._recorder, self._after = steps or range(MOST_STEPS), recorder, after
        self._step_range = step_range
        self._entries = Entries(step_range, self._entered) if step_range else None
        self._optimizer: Any = None
        self._ended = self._others = 0  # steps of the region, and of further optimizers
        self._before: float | None = None  # start of the unprofiled steps
        self._recording = False
        self._unprofiled: dict[str, Any] = {}
        self._profile: Profile | None = None
        self._failure: Exception | None = None

    def open(self) -> None:
        """Begin the region."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._process, self._thread = os.getpid(), threading.get_ident()
        if self._whole:
            self._recorder.start()
            self._recording = True
        elif self._steps.start == 0 and self._entries is None:
            self._begin(0)
            if self._failure is not None:
                raise self._failure
        if self._entries is not None:
            self._entries.watch()
        else:
            self._hook = register_optimizer_step_post_hook(self._stepped)
            self._warning = threading.Timer(LATE_S, self._warn_of_no_step)
            self._warning.daemon = True
            self._warning.start()

    def close(self, interrupted: str | None) -> Profile:
        """End the region, after an error or not, and return its profile.

        Raises the error that stopped the recording, and ProfileError if no complete step was
        recorded.
        """
        if self._entries is not None:
            self._entries.stop()
        else:
            self._hook.remove()
            self._warning.cancel()
        if self._profile is not None:
            return self._profile
        if self._failure is not None:
            if self._recording:
                self._recorder.cancel()
            raise self._failure
        if self._whole and not self._ended:
            say(f"profile: there are no steps: {self._no_step()}", "yellow", stderr=True)
            return self._recorder.stop(interrupted=interrupted, **self._unprofiled)
        if self._recording and (interrupted or self._ended > self._steps.start):
            if self._entries is not None and not interrupted:
                _mark(STEPS_END)  # the last step ends with the region
            if self._whole or self._ended == self._steps.stop and self._entries is not None:
                return self._recorder.stop(interrupted=interrupted, **self._unprofiled)
            end = f"the end of the region, after {self._ended} steps of {self._steps.stop}"
            reason = "fewer steps were recorded"
            return self._recorder.stop(interrupted=interrupted or end, unprofiled_reason=reason)
        if self._recording:
            self._recorder.cancel()
        raise ProfileError(self._no_step())

    def _no_step(self) -> str:
        """Why no complete step was recorded, and what to do."""
        if self._entries is not None:
            if not self._ended:
                return f"step_range must be entered in the region: {WHAT}, got {self._step_range!r}"
            return (
                f"steps must begin before the region's end, got {self._steps.start} in a region "
                f"with {self._ended} entries of {self._step_range!r}"
            )
        others = f" (further optimizers stepped {self._others} times)" if self._others else ""
        return (
            f"steps must begin before the region's end, got {self._steps.start} in a region of "
            f"{self._ended} steps. A step ends when the first optimizer of torch.optim that is "
            f"used has stepped{others}. A loop without one needs step_range"
        )

    def _warn_of_no_step(self) -> None:
        if not self._ended:
            say(
                f"profile: no optimizer has stepped in {LATE_S:.0f} s, and steps end where one "
                "does. If this program has none, stop it and give --step-range",
                "yellow",
                stderr=True,
            )

    def _entered(self) -> None:
        """Called before each entry of the range."""
        if os.getpid() != self._process or self._profile is not None or self._failure is not None:
            return
        if reason := self._why_not_here("an entry"):
            self._fail(
                ProfileError(
                    f"step_range must be entered on the region's thread, outside backward() and "
                    f"graph captures, got {reason}"
                )
            )
            return
        step, self._ended = self._ended, self._ended + 1
        self._begin(step)
        if self._profile is not None and self._after is not None:
            self._after()

    def _stepped(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if os.getpid() != self._process or self._profile is not None or self._failure is not None:
            return
        if self._optimizer is None:
            self._optimizer = optimizer
        if self._optimizer is not optimizer:
            self._others += 1
            return
        if reason := self._why_not_here("a step"):
            self._fail(
                ProfileError(
                    f"the optimizer must step on the region's thread, outside backward() and graph "
                    f"captures, got {reason}. Put `with profile():` around a part instead"
                )
            )
            return
        self._ended += 1
        self._begin(self._ended)
        if self._profile is not None and self._after is not None:
            self._after()

    def _why_not_here(self, what: str) -> str | None:
        """Why a recording cannot begin or end here; `what` is "a step" or "an entry"."""
        import torch

        if torch._C._current_graph_task_id() != -1:
            return f"{what} inside backward()"
        if threading.get_ident() != self._thread:
            return f"{what} on another thread"
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return f"{what} captured into a CUDA graph, whose replays run no Python"
        return None

    def _begin(self, step: int) -> None:
        try:
            if step == self._steps.stop:
                _mark(STEPS_END)
                self._recording = False
                self._profile = self._recorder.stop(**self._unprofiled)
                return
            if step == self._steps.start and not self._whole:
                self._unprofiled = self._time_before()
                self._recorder.start()
                self._recording = True
            elif 0 < step == self._steps.start - len(self._steps):
                synchronize()
                self._before = time.perf_counter()
            if self._recording:
                of = f"{STEP_OF}{self._step_range}" if self._step_range else ""
                _mark(f"{STEP}{step}{of}")
        except Exception as failure:
            self._fail(failure)
        except BaseException:
            self._failure = ProfileError(
                "the region must end by itself, got an interrupt while it was recorded"
            )
            raise

    def _fail(self, failure: Exception) -> None:
        self._failure = failure
        say(f"profile: nothing will be recorded: {failure}", "red", stderr=True)

    def _time_before(self) -> dict[str, Any]:
        """The unprofiled time, measured over the steps just before the recorded ones."""
        if self._before is None:
            reason = f"needs {len(self._steps)} steps before those recorded, besides step 0"
            return {"unprofiled_wall_s": None, "unprofiled_reason": reason}
        synchronize()
        seconds = time.perf_counter() - self._before
        return {"unprofiled_wall_s": seconds, "unprofiled_reason": None}


def _mark(name: str) -> None:
    """Record an empty range; the reader removes it and keeps its time."""
    import torch

    with torch.profiler.record_function(name):
        pass
