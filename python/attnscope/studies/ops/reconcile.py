"""The same call timed by several tools, with the reason for each difference.

The reference is the time of the call's GPU work in a profiler's trace. Every other tool measures
that work and something more: what, and at most how much, is stated before the comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import mean, median, quantiles
from typing import TYPE_CHECKING, Any

from attnscope.bench.hold import HoldTimeout
from attnscope.bench.timing import Settings, Timing, make_timer, time_interleaved
from attnscope.common.console import explain
from attnscope.profile.attribution.owners import Attribution, busy_ns
from attnscope.profile.errors import LostEvents
from attnscope.profile.trace.events import GpuEvent
from attnscope.studies.attention import resting
from attnscope.studies.ops.kineto import Averages, record_with_averages

if TYPE_CHECKING:
    import pandas

    from attnscope.profile.api import Profile

# Share of the reference: clocks and caches change a kernel's time this much between runs.
TOLERANCE = 0.03
# Limit of the gap between two kernels of a stream, which is about 1 us.
GAP_US = 1.5
# Limit of the time from the first event to the first kernel's start. On an H200 it is 4.7 to 5.7 us
# longer than an empty pair, with or without a graph.
START_US = 6.0
# Least duration assumed for an empty pair of events: their clock ticks every 0.5 us.
PAIR_US = 1.0
CALL = "reconcile"
RETRIES = 2  # when events were lost
# Idle time of the GPU after each call, as a multiple of the call's time, in the profile and between
# samples: calls back to back reach the power limit, and their clock then falls.
REST = 2.0

Call = Callable[[], Any]


@dataclass(frozen=True)
class Measurement:
    """One tool's times of one call, in microseconds.

    `beyond`: what the times include besides the GPU work; `beyond_us`: at most how much;
    `within_us`: how much of the work they may miss; `tolerance`: share of the reference, None for
    the comparison's own. Without samples, `reason` is why.
    """

    tool: str
    samples_us: Sequence[float] = ()
    beyond: str = ""
    beyond_us: float = 0.0
    within_us: float = 0.0
    reason: str | None = None
    tolerance: float | None = None


@dataclass
class Work:
    """GPU work of the calls in a trace: its sum by call, and how many pieces a call has."""

    sums_us: list[float] = field(default_factory=list)
    pieces: float = 0.0
    overlap_us: float = 0.0  # of a call, on average: what runs beside other work of it


def reconcile(
    fn: Call,
    *,
    samples: int = 30,
    tolerance: float = TOLERANCE,
    warmup: int = 3,
    recorded: Profile | None = None,
) -> pandas.DataFrame:
    """Time `fn` on the current CUDA device by torch's profiler, CUDA events and a CUDA graph.

    For the columns see `compare`; the profiler is the reference. Raises as `measure`.
    """
    found = measure(fn, samples=samples, warmup=warmup, recorded=recorded)
    return compare(found, tolerance)


def measure(
    fn: Call, *, samples: int = 30, warmup: int = 3, recorded: Profile | None = None
) -> tuple[Measurement, ...]:
    """Times of `fn` by each tool of this process, the profiler's first.

    All tools see a warm L2. The profile is `recorded`, as from `record_calls`, or made here. A call
    that cannot be captured into a graph has no samples there, and the reason.

    Raises ValueError without a CUDA device or where `fn` runs nothing on it, ProfileError where the
    profiler lost events; an exception of `fn` is passed on.
    """
    import torch

    if not torch.cuda.is_available():
        raise ValueError("fn must run on a CUDA device, got a machine without one")
    if samples < 2:
        raise ValueError(f"samples must be at least 2, got {samples}")
    device = torch.device("cuda", torch.cuda.current_device())
    events = Settings(l2="warm", warmup=warmup, min_samples=samples, max_samples=samples, rest=REST)
    graph = replace(events, graph=True)
    timed = time_interleaved({"fn": [fn], "empty": [_nothing]}, make_timer(device, events), events)
    if timed["fn"].error is not None and not isinstance(timed["fn"].error, HoldTimeout):
        raise timed["fn"].error
    work = work_of_calls((recorded or record_calls(fn, samples, warmup)[0]).attribution)
    replayed = time_interleaved({"fn": [fn]}, make_timer(device, graph), graph)["fn"]
    pair = max(PAIR_US, 1e3 * median(timed["empty"].samples_ms or [0.0]))
    return measurements(work, timed["fn"], replayed, pair)


def measurements(
    work: Work, events: Timing, graph: Timing, pair_us: float
) -> tuple[Measurement, ...]:
    """The three tools' times, the profiler's first. `pair_us`: what an empty event pair lasts."""
    gaps_us = GAP_US * max(0.0, work.pieces - 1)
    overlap = f"; {work.overlap_us:.1f} us of it run at the same time" if work.overlap_us else ""
    pieces = pieces_text(work.pieces)
    beyond = (
        f"the events themselves (an empty pair: {pair_us:.1f} us), the start of the first kernel"
        f" and the gaps of {pieces}"
    )
    beyond_us = pair_us + START_US + gaps_us
    error = explain(graph.error) if graph.error else None
    waits = "waits for the GPU itself, so its launch cannot be kept out of the time"
    return (
        Measurement("torch profiler", work.sums_us, f"nothing else: the sum of {pieces}{overlap}"),
        Measurement(
            "CUDA events",
            [] if events.error else [1e3 * ms for ms in events.samples_ms],
            beyond,
            beyond_us,
            work.overlap_us,
            waits if events.error else None,
        ),
        Measurement(
            "CUDA graph",
            [] if error else [1e3 * ms for ms in graph.samples_ms],
            f"{beyond}; no launch from the host in between",
            beyond_us,
            work.overlap_us,
            f"cannot be captured: {error}" if error else None,
        ),
    )


def compare(found: Sequence[Measurement], tolerance: float = TOLERANCE) -> pandas.DataFrame:
    """Each measurement against the first one, which is the reference.

    Columns: tool, median_us, p20_us, p80_us, samples, difference_us (to the reference's median),
    difference (its share of that), least_us and most_us (between which difference_us may be:
    `tolerance` of the reference, and what the tool may see more or less), agrees (missing where
    there is no time), reason.

    Raises ValueError where the reference has no samples.
    """
    import pandas

    if not found or not found[0].samples_us:
        raise ValueError("found must begin with the reference and its samples, got none")
    reference = median(found[0].samples_us)
    rows = []
    for one in found:
        row: dict[str, Any] = {"tool": one.tool, "samples": len(one.samples_us)}
        if one.samples_us:
            difference = median(one.samples_us) - reference
            share = tolerance if one.tolerance is None else one.tolerance
            least = -share * reference - one.within_us
            most = share * reference + one.beyond_us
            low, high = _p20_p80(one.samples_us)
            row |= {"median_us": median(one.samples_us), "p20_us": low, "p80_us": high}
            row |= {"difference_us": difference, "difference": difference / reference}
            row |= {"least_us": least, "most_us": most, "agrees": least <= difference <= most}
        rows.append(row | {"reason": one.reason or f"holds {one.beyond}"})
    columns = "tool median_us p20_us p80_us samples difference_us difference least_us most_us"
    return pandas.DataFrame(rows, columns=[*columns.split(), "agrees", "reason"])


def pieces_text(count: float) -> str:
    """The pieces of GPU work of a call."""
    return "1 kernel or copy" if count == 1 else f"{count:g} kernels and copies"


def _p20_p80(samples: Sequence[float]) -> tuple[float, float]:
    if len(samples) == 1:
        return samples[0], samples[0]
    fifths = quantiles(samples, n=5, method="inclusive")
    return fifths[0], fifths[-1]


def _nothing() -> None:
    pass


def record_calls(fn: Call, samples: int, warmup: int = 3) -> tuple[Profile, Averages]:
    """A profile of `samples` calls, each in a range CALL, and PyTorch's own table of them.

    Each call is waited for and followed by a rest, as a sample of CUDA events is.

    Raises LostEvents where the profiler lost events RETRIES times more.
    """
    import torch

    def calls() -> None:
        for _ in range(samples):
            with resting(REST), torch.profiler.record_function(CALL):
                fn()

    for _ in range(warmup):
        calls()
    for _ in range(RETRIES):
        with suppress(LostEvents):
            return record_with_averages(CALL, calls)
    return record_with_averages(CALL, calls)


def work_of_calls(attribution: Attribution) -> Work:
    """GPU work launched inside each range named CALL, in order of the calls.

    Raises ValueError where there is none, or not in every call.
    """
    trace = attribution.trace
    calls: dict[int, list[GpuEvent]] = {
        event.index: [] for event in trace.cpu if event.kind == "range" and event.name == CALL
    }
    for piece in trace.gpu:
        outer = next((r for r in attribution.ranges(piece) if r.name == CALL), None)
        if outer is not None:
            calls[outer.index].append(piece)
    if not calls or not all(calls.values()):
        empty = sum(not pieces for pieces in calls.values())
        raise ValueError(f"fn must run GPU work in each of {len(calls)} calls, got none in {empty}")
    sums = [sum(piece.duration for piece in pieces) / 1e3 for pieces in calls.values()]
    busy = [busy_ns(pieces) / 1e3 for pieces in calls.values()]
    overlaps = [total - union for total, union in zip(sums, busy, strict=True)]
    return Work(sums, mean(len(pieces) for pieces in calls.values()), mean(overlaps))
