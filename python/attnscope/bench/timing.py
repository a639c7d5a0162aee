"""How long a call takes: every sample kept, impls interleaved in random order, the cache stated.

On a GPU a sample is a pair of CUDA events around the call on the current stream. Before it, outside
the pair, the L2 is flushed (`cold`) and the stream is kept busy until the host has enqueued the
call, so that launches are not part of the time. Whether it had is asked of the first event, and a
sample for which the host came late is taken again. After it the card rests: kernels that keep the
tensor cores full, one after the other, would come to its power limit, and the clock would move from
sample to sample. On a CPU it is a wall clock.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from attnscope.ranges import MEASURE, WARMUP, nvtx_range

Call = Callable[[], Any]
L2_MODES = ("cold", "rotate", "warm")
FLUSH_OVER_L2 = 2.0
# torch.cuda._sleep counts cycles of a clock of at most this rate; too long a sleep is harmless.
_SLEEP_HZ = 2.0e9
# How long the stream is kept busy before a sample: at first so many times what the fastest launch
# of the call took, and a little; twice as long after each sample for which the host came late, and
# for so many samples of an impl of a workload at most: one that waits for itself is late always.
_LEAD = 1.5
_LEAST_LEAD_MS = 0.02
_MOST_LEAD_MS = 10.0
_MOST_RETAKES = 12
_MOST_REST = 100.0


@dataclass(frozen=True)
class Settings:
    """How samples are taken.

    l2: "cold" (flushed before each sample), "rotate" (copies of the inputs, used in turn, that
    together exceed the cache) or "warm". Rounds are taken until `budget_s` seconds have passed,
    at least `min_samples` and at most `max_samples`. `graph`: time the replay of a CUDA graph.
    `rest`: after a sample a GPU rests for so many times as long as that took.
    """

    l2: str = "cold"
    graph: bool = False
    warmup: int = 3
    min_samples: int = 10
    max_samples: int = 50
    budget_s: float = 2.0
    rest: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.l2 not in L2_MODES:
            raise ValueError(f"l2: {self.l2!r} is not one of {', '.join(L2_MODES)}")
        if not 1 <= self.min_samples <= self.max_samples:
            raise ValueError(
                f"min_samples, max_samples: {self.min_samples}, {self.max_samples}; "
                "1 <= min_samples <= max_samples is needed"
            )
        if not self.budget_s >= 0:
            raise ValueError(f"budget_s: {self.budget_s} is not a number of at least 0")
        if not 0 <= self.rest <= _MOST_REST:
            raise ValueError(f"rest: {self.rest} is not between 0 and {_MOST_REST:g}")
        if self.warmup < 1:
            raise ValueError(f"warmup: {self.warmup} is less than 1")


@dataclass
class Timing:
    """Samples of one impl in ms, in the order of the rounds, or the error that ended them.

    `late` of them hold time in which the GPU waited for the host, however early it began: a call
    that waits for its own results has no others.
    """

    samples_ms: list[float] = field(default_factory=list)
    late: int = 0
    enqueue_ms: float | None = None  # host time to launch one call; None on a CPU
    error: Exception | None = None


class Sample(NamedTuple):
    """One call in ms; `late`: the host may have been launching when the GPU had begun."""

    ms: float
    late: bool = False


class Timer(Protocol):
    """Takes one sample."""

    name: str

    def warm_up(self, call: Call, times: int) -> float | None:
        """Run the call `times` times; host time to launch it in ms, where that is not all of it."""

    def measure(self, call: Call, lead_ms: float) -> Sample:
        """One call, for which a GPU is first kept busy for `lead_ms`."""


class WallClock:
    """CPU: perf_counter around the call."""

    name = "wall-clock"

    def warm_up(self, call: Call, times: int) -> float | None:
        for _ in range(times):
            call()
        return None

    def measure(self, call: Call, lead_ms: float) -> Sample:
        start = time.perf_counter()
        call()
        return Sample((time.perf_counter() - start) * 1e3)


class CudaEvents:
    """GPU: CUDA events on the current stream of `device`."""

    name = "cuda-events"

    def __init__(self, device: torch.device, flush_bytes: int, rest: float = 0.0) -> None:
        self._device = device
        self._rest = rest
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._buffer = torch.empty(flush_bytes // 4, dtype=torch.int32, device=device)

    def warm_up(self, call: Call, times: int) -> float | None:
        enqueue = []
        for _ in range(times):
            start = time.perf_counter()
            call()
            enqueue.append(time.perf_counter() - start)
            torch.cuda.synchronize(self._device)
        return min(enqueue) * 1e3

    def measure(self, call: Call, lead_ms: float) -> Sample:
        if self._buffer.numel():
            self._buffer.zero_()
            self._buffer.sum()  # the write leaves dirty lines, whose eviction the call would pay
        torch.cuda._sleep(int(1e-3 * lead_ms * _SLEEP_HZ))
        with nvtx_range(MEASURE):
            self._start.record()
            call()
            self._end.record()
            late = self._start.query()
        self._end.synchronize()
        ms = float(self._start.elapsed_time(self._end))
        time.sleep(1e-3 * self._rest * ms)
        return Sample(ms, late)


class CudaGraph:
    """GPU: as CudaEvents, but of the replay of a graph that holds one call."""

    name = "cuda-graph"

    def __init__(self, device: torch.device, flush_bytes: int, rest: float = 0.0) -> None:
        self._events = CudaEvents(device, flush_bytes, rest)
        self._graphs: dict[Call, torch.cuda.CUDAGraph] = {}

    def warm_up(self, call: Call, times: int) -> float | None:
        self._events.warm_up(call, times)
        return self._events.warm_up(self._captured(call).replay, times)

    def measure(self, call: Call, lead_ms: float) -> Sample:
        return self._events.measure(self._captured(call).replay, lead_ms)

    def _captured(self, call: Call) -> torch.cuda.CUDAGraph:
        if call not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph):
                    call()
            except Exception:
                # A capture that fails leaves the generator waiting for its end.
                generator = torch.cuda.default_generators[torch.cuda.current_device()]
                generator.graphsafe_set_state(generator.clone_state())
                raise
            self._graphs[call] = graph
        return self._graphs[call]


def make_timer(device: torch.device, settings: Settings) -> Timer:
    """The timer for a device. Raises ValueError where the settings ask for what it cannot do."""
    if device.type == "cpu":
        if settings.graph:
            raise ValueError("graph: a CPU run has no CUDA graphs")
        if settings.l2 != "warm":
            raise ValueError(f"l2: {settings.l2!r} needs a GPU; a CPU run is always warm")
        return WallClock()
    flush = 0
    if settings.l2 == "cold":
        flush = int(FLUSH_OVER_L2 * torch.cuda.get_device_properties(device).L2_cache_size)
    return (CudaGraph if settings.graph else CudaEvents)(device, flush, settings.rest)


def copies_to_rotate(device: torch.device, settings: Settings, bytes_each: int) -> int:
    """How many sets of inputs to use in turn so that the cache does not hold the next one."""
    if settings.l2 != "rotate":
        return 1
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    return 1 + -(-int(FLUSH_OVER_L2 * l2) // max(bytes_each, 1))


def time_interleaved(
    calls: Mapping[str, Sequence[Call]],
    timer: Timer,
    settings: Settings,
    is_fatal: Callable[[Exception], bool] = lambda error: False,
) -> dict[str, Timing]:
    """Time each name's calls (one, or several to rotate), all names in turn in random order.

    A call that raises ends its own samples and nobody else's, except that after an error which
    `is_fatal` (nothing can run any more) the timing of all ends there.
    """
    rng = random.Random(settings.seed)
    timings = {name: Timing() for name in calls}
    leads_ms = dict.fromkeys(calls, 0.0)
    retakes = dict.fromkeys(calls, _MOST_RETAKES)
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
            timings[name].enqueue_ms = timer.warm_up(call, settings.warmup)
            lead_ms = _LEAST_LEAD_MS + _LEAD * (timings[name].enqueue_ms or 0.0)
            leads_ms[name] = min(max(leads_ms[name], lead_ms), _MOST_LEAD_MS)

    def sample(name: str) -> None:
        taken = measure(name)
        while taken.late and retakes[name]:
            retakes[name] -= 1
            leads_ms[name] = min(2 * leads_ms[name], _MOST_LEAD_MS)
            taken = measure(name)
        timings[name].samples_ms.append(taken.ms)
        timings[name].late += taken.late

    def measure(name: str) -> Sample:
        return timer.measure(next(inputs[name]), leads_ms[name])

    with nvtx_range(WARMUP):
        for name in calls:
            if name in active:
                guarded(warm_up, name)
    start = time.perf_counter()
    for turn in range(settings.max_samples):
        if turn >= settings.min_samples and time.perf_counter() - start >= settings.budget_s:
            break
        order = list(active)
        rng.shuffle(order)
        for name in order:
            if name in active:
                guarded(sample, name)
    return timings
