"""The check for lost events: every launch call of the window must have GPU work in the trace."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from attnscope.profile.trace.events import CpuEvent, GpuEvent, Trace
from attnscope.profile.trace.markers import BEGIN_CAPTURE, END_CAPTURE

LAUNCH = re.compile(r"c(uda|u)(Launch(Cooperative)?Kernel|GraphLaunch)")


@dataclass
class Audit:
    """The match between launch calls and GPU work.

    Attributes:
        launches: launch calls that must have started work.
        captured: launch calls captured into a CUDA graph instead of run.
        lost: the calls in `launches` without a kernel, copy or fill in the trace.
        orphans: kernels without a launch call in the trace. They are counted, but no op owns them.
        sentinels: kernels found in the sentinel at each end; empty if there were no sentinels.
    """

    launches: int = 0
    captured: int = 0
    lost: list[CpuEvent] = field(default_factory=list)
    orphans: list[GpuEvent] = field(default_factory=list)
    sentinels: list[int] = field(default_factory=list)

    @property
    def problem(self) -> str | None:
        """What is missing and the likely cause; None if nothing is missing."""
        if self.sentinels and not any(self.sentinels) and not self.launches:
            return (
                "no kernel was recorded, not even those of the sentinels: CUPTI gave no GPU events "
                "(another profiler is attached, such as nsys, ncu or a second torch profiler, or "
                "the driver does not permit it)"
            )
        missing = self.sentinels.count(0)
        if not self.lost and not missing:
            return None
        parts = []
        if self.lost:
            calls = Counter(event.name for event in self.lost).most_common(3)
            names = ", ".join(f"{count} {name}" for name, count in calls)
            parts.append(f"{len(self.lost)} of {self.launches} launches have no kernel ({names})")
        if missing:
            parts.append(f"no kernel of {missing} of the {len(self.sentinels)} sentinels is there")
        return (
            "; ".join(parts) + ": events were lost, at an end of the window or because the "
            "profiler's buffers were full, or a launch failed. Profile fewer steps"
        )


def audit(trace: Trace) -> Audit:
    """Join launch calls and GPU work of a trace, both ways."""
    found = Audit(sentinels=list(trace.sentinels))
    started = {work.launch for work in trace.gpu}
    capturing: Counter[int] = Counter()  # open captures by thread
    for event in trace.cpu:
        if event.kind != "call":
            continue
        if event.name.startswith(BEGIN_CAPTURE):
            capturing[event.thread] += 1
        elif event.name.startswith(END_CAPTURE):
            if capturing:  # this thread's first; a capture may end on another thread
                capturing -= Counter([event.thread if capturing[event.thread] else min(capturing)])
        elif LAUNCH.match(event.name):
            if event.index in started or event.correlation in trace.faults.left_out:
                found.launches += 1
            elif capturing:
                # A capture on any thread counts: backward is captured from autograd's threads.
                found.captured += 1
            else:
                found.launches += 1
                found.lost.append(event)
    found.orphans = [kernel for kernel in trace.kernels if kernel.launch < 0]
    return found
