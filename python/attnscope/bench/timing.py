"""How long a call takes: every sample kept, impls interleaved in random order, the cache stated.

On a GPU a sample is a pair of CUDA events around the call on the current stream. Before it, outside
the pair, the L2 is flushed (`cold`) and the stream is blocked (`attnscope.bench.hold`) until the
host has enqueued the call. This excludes launch overhead; the host's part of it is `host_us`.
The GPU idles after a sample: back-to-back tensor-core kernels reach the power limit, and throttling
then changes the clock from sample to sample. A call of 50 ms and more settles at that limit within
its own sample, so the idle time ends at 0.1 s. On a CPU a sample is wall-clock time.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from attnscope.bench.hold import CudaDriver, StreamHold
from attnscope.bench.statistics import LEAST_SAMPLES
from attnscope.ranges import MEASURE, WARMUP, nvtx_range

Call = Callable[[], Any]
LAYOUTS = ("both", "bshd", "bhsd")
L2_MODES = ("cold", "rotate", "warm")
FLUSH_OVER_L2 = 2.0
_MOST_REST = 100.0
_LONGEST_REST_S = 0.1
_LONG_S = 10.0  # LEAST_SAMPLES of long calls are enough after it


@dataclass(frozen=True)
class Settings:
    """How samples are taken.

    l2: "cold" (flushed before each sample), "rotate" (copies of the inputs, used in turn, that
    together exceed the cache) or "warm". Rounds are taken until `budget_s` seconds have passed,
    at least `min_samples` (5 once 10 s have passed) and at most `max_samples`. `graph`: time the
    replay of a CUDA graph. `rest`: idle time of a GPU after a sample, as a multiple of the sample's
    time; 0.1 s at most. `layouts`: inputs contiguous as [B, S, H, D] ("bshd"), as [B, H, S, D]
    ("bhsd"), or "both", of which the faster one counts for each impl. `counters`: read hardware
    counters of each call after it was timed.
    """

    l2: str = "cold"
    graph: bool = False
    warmup: int = 3
    min_samples: int = 10
    max_samples: int = 50
    budget_s: float = 2.0
    rest: float = 2.0
    seed: int = 0
    layouts: str = "bshd"
    counters: bool = False

    def __post_init__(self) -> None:
        if self.layouts not in LAYOUTS:
            raise ValueError(f"layouts must be one of {', '.join(LAYOUTS)}, got {self.layouts!r}")
        if self.l2 not in L2_MODES:
            raise ValueError(f"l2 must be one of {', '.join(L2_MODES)}, got {self.l2!r}")
        if not 1 <= self.min_samples <= self.max_samples:
            raise ValueError(
                "min_samples must be >= 1 and at most max_samples, "
                f"got {self.min_samples} and {self.max_samples}"
            )
        if not self.budget_s >= 0:
            raise ValueError(f"budget_s must be >= 0, got {self.budget_s}")
        if not 0 <= self.rest <= _MOST_REST:
            raise ValueError(f"rest must be between 0 and {_MOST_REST:g}, got {self.rest}")
        if self.warmup < 1:
            raise ValueError(f"warmup must be >= 1, got {self.warmup}")


@dataclass
class Timing:
    """Samples of one impl, in the order of the rounds, or the error that ended them."""

    samples_ms: list[float] = field(default_factory=list)
    host_us: list[float] = field(default_factory=list)  # to enqueue each; empty on a CPU
    error: Exception | None = None


class Sample(NamedTuple):
    """One call: its time in ms, and on a GPU the host's time to enqueue it in us."""

    ms: float
    host_us: float | None = None


class Timer(Protocol):
    """Takes one sample."""

    name: str

    def warm_up(self, call: Call, times: int) -> None:
        """Run the call `times` times."""

    def measure(self, call: Call) -> Sample:
        """Time one call."""


class WallClock:
    """CPU: a clock, in seconds, read before the call and after it."""

    name = "wall-clock"

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def warm_up(self, call: Call, times: int) -> None:
        for _ in range(times):
            call()

    def measure(self, call: Call) -> Sample:
        start = self._clock()
        call()
        return Sample((self._clock() - start) * 1e3)


class CudaEvents:
    """GPU: CUDA events on the current stream of `device`."""

    name = "cuda-events"

    def __init__(
        self,
        device: torch.device,
        flush_bytes: int,
        rest: float = 0.0,
        hold: StreamHold | None = None,
    ) -> None:
        self._device = device
        self._rest = rest
        self._hold = hold or StreamHold(CudaDriver(device))
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._buffer = torch.empty(flush_bytes // 4, dtype=torch.int32, device=device)

    def warm_up(self, call: Call, times: int) -> None:
        for _ in range(times):
            call()
            torch.cuda.synchronize(self._device)

    def measure(self, call: Call) -> Sample:
        if self._buffer.numel():
            self._buffer.zero_()
            self._buffer.sum()  # leaves dirty lines; the timed call would pay their eviction
        with nvtx_range(MEASURE), self._hold():
            self._start.record()
            began = time.perf_counter()
            call()
            host_us = (time.perf_counter() - began) * 1e6
            self._end.record()
        self._end.synchronize()
        ms = float(self._start.elapsed_time(self._end))
        time.sleep(min(1e-3 * self._rest * ms, _LONGEST_REST_S))
        return Sample(ms, host_us)


class CudaGraph:
    """GPU: as CudaEvents, but of the replay of a graph that holds one call."""

    name = "cuda-graph"

    def __init__(self, device: torch.device, flush_bytes: int, rest: float = 0.0) -> None:
        self._events = CudaEvents(device, flush_bytes, rest)
        self._graphs: dict[Call, torch.cuda.CUDAGraph] = {}

    def warm_up(self, call: Call, times: int) -> None:
        self._events.warm_up(call, times)
        self._events.warm_up(self._captured(call).replay, times)

    def measure(self, call: Call) -> Sample:
        return self._events.measure(self._captured(call).replay)

    def _captured(self, call: Call) -> torch.cuda.CUDAGraph:
        if call not in self._graphs:
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            try:
                # On the current stream, if it can be captured: autograd runs a backward there.
                default = stream == torch.cuda.default_stream()
                capture = torch.cuda.graph(graph, stream=None if default else stream)
                with torch.cuda.stream(stream), capture:  # one that fails leaves its stream current
                    call()
            except Exception as error:
                # A capture that fails leaves the generator waiting for its end.
                generator = torch.cuda.default_generators[torch.cuda.current_device()]
                generator.graphsafe_set_state(generator.clone_state())
                # The end of the capture fails too, and hides the error of the call.
                first = error.__context__
                raise first if isinstance(first, Exception) else error from None
            self._graphs[call] = graph
        return self._graphs[call]


def make_timer(device: torch.device, settings: Settings) -> Timer:
    """The timer for a device. Raises ValueError where the settings ask for what it cannot do."""
    if device.type == "cpu":
        if settings.graph:
            raise ValueError("graph must be False on a CPU, which has no CUDA graphs, got True")
        if settings.l2 != "warm":
            raise ValueError(
                f"l2 must be warm on a CPU, got {settings.l2!r}. The other modes need a GPU"
            )
        return WallClock()
    flush = 0
    if settings.l2 == "cold":
        flush = int(FLUSH_OVER_L2 * torch.cuda.get_device_properties(device).L2_cache_size)
    return (CudaGraph if settings.graph else CudaEvents)(device, flush, settings.rest)


def copies_to_rotate(device: torch.device, settings: Settings, bytes_each: int) -> int:
    """How many sets of inputs to rotate so that the next set is never in the cache."""
    if settings.l2 != "rotate":
        return 1
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    return 1 + -(-int(FLUSH_OVER_L2 * l2) // max(bytes_each, 1))


def time_interleaved(
    calls: Mapping[str, Sequence[Call]],
    timer: Timer,
    settings: Settings,
    is_fatal: Callable[[Exception], bool] = lambda error: False,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time each name's calls (one, or several to rotate), all names in turn in random order.

    A call that raises ends only its own samples. After an error for which `is_fatal` is true
    (nothing can run any more), all timing ends. `clock`, in seconds, limits the time to the budget.
    """
    rng = random.Random(settings.seed)
    timings = {name: Timing() for name in calls}
    inputs = {name: itertools.cycle(turns) for name, turns in calls.items()}
    active = list(calls)

    def guarded(step: Callable[[str], None], name: str) -> None:
        try:
            step(name)
        except Exception as error:
            timings[name].error = error
            active.remove(name)
            if is_fatal(error):
                active.clear()

    def warm_up(name: str) -> None:
        for call in calls[name]:
            timer.warm_up(call, settings.warmup)

    def sample(name: str) -> None:
        taken = timer.measure(next(inputs[name]))
        timings[name].samples_ms.append(taken.ms)
        if taken.host_us is not None:
            timings[name].host_us.append(taken.host_us)

    with nvtx_range(WARMUP):
        for name in calls:
            if name in active:
                guarded(warm_up, name)
    start = clock()
    for turn in range(settings.max_samples):
        passed = clock() - start
        if turn >= settings.min_samples and passed >= settings.budget_s:
            break
        if turn >= LEAST_SAMPLES and passed >= max(_LONG_S, settings.budget_s):
            break
        order = list(active)
        rng.shuffle(order)
        for name in order:
            if name in active:
                guarded(sample, name)
    return timings
