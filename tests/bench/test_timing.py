"""Timers measure known durations; impls are interleaved; one impl's error stops no other."""

import time

import pytest
import torch

from attnscope.bench.timing import (
    Sample,
    Settings,
    WallClock,
    make_timer,
    time_interleaved,
)

CPU = torch.device("cpu")
WARM = Settings(l2="warm", min_samples=10, max_samples=10)


class Clock:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.now, self.step = 0.0, 2e-3

    def __call__(self) -> float:
        return self.now

    def advance(self) -> None:
        self.now += self.step


def spin_2ms() -> None:
    end = time.perf_counter() + 2e-3
    while time.perf_counter() < end:
        pass


def fixed(samples: int, **more) -> Settings:
    return Settings(l2="warm", min_samples=samples, max_samples=samples, **more)


@pytest.mark.parametrize("samples", [1, 10, 100])
def test_a_call_of_2_ms_takes_2_ms(samples):
    clock = Clock()
    timings = time_interleaved({"a": [clock.advance]}, WallClock(clock), fixed(samples))
    assert timings["a"].samples_ms == pytest.approx([2.0] * samples)


@pytest.mark.timing
def test_the_wall_clock_times_a_call():
    took: list[float] = []

    def spin() -> None:
        start = time.perf_counter()
        spin_2ms()
        took.append((time.perf_counter() - start) * 1e3)

    timings = time_interleaved({"spin": [spin]}, WallClock(), fixed(10))
    assert min(took) >= 2.0  # longer if the processor is busy
    assert timings["spin"].samples_ms == pytest.approx(took[-10:], rel=0.05)


def test_every_impl_is_called_once_a_round_in_changing_order():
    calls: list[str] = []
    named = {name: [lambda name=name: calls.append(name)] for name in "abc"}
    time_interleaved(named, WallClock(), fixed(30, warmup=1))
    rounds = [tuple(calls[i : i + 3]) for i in range(3, len(calls), 3)]
    assert len(rounds) == 30
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert len(set(rounds)) > 3
    again: list[str] = calls.copy()
    calls.clear()
    time_interleaved(named, WallClock(), fixed(30, warmup=1))
    assert calls == again
    calls.clear()
    time_interleaved(named, WallClock(), fixed(30, warmup=1, seed=1))
    assert calls != again


def test_sets_of_inputs_are_used_in_turn():
    used: list[int] = []
    calls = [lambda i=i: used.append(i) for i in range(3)]
    time_interleaved({"a": calls}, WallClock(), fixed(7, warmup=1))
    assert used[3:] == [0, 1, 2, 0, 1, 2, 0]


def test_rounds_end_with_the_budget_but_not_before_the_least():
    clock = Clock()

    def samples(**settings) -> int:
        options, calls = Settings(l2="warm", **settings), {"a": [clock.advance]}
        timings = time_interleaved(calls, WallClock(clock), options, clock=clock)
        return len(timings["a"].samples_ms)

    assert samples(min_samples=4, max_samples=50, budget_s=0.0) == 4
    assert samples(min_samples=1, max_samples=6, budget_s=60.0) == 6
    assert samples(min_samples=1, max_samples=1000, budget_s=0.049) == 25
    clock.step = 4.0  # seconds
    assert samples(min_samples=10, max_samples=50, budget_s=2.0) == 5
    assert samples(min_samples=10, max_samples=50, budget_s=30.0) == 8


class Enqueues(WallClock):
    """A timer that reports the host's enqueue time separately, as a GPU timer does."""

    def measure(self, call) -> Sample:
        return Sample(super().measure(call).ms, host_us=len(self.taken))

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[int] = []


def test_host_times_are_kept_beside_the_samples():
    timer = Enqueues()
    calls = {"a": [lambda: timer.taken.append(0)]}
    timing = time_interleaved(calls, timer, fixed(3, warmup=1))["a"]
    assert timing.host_us == [2, 3, 4] and len(timing.samples_ms) == 3


def test_a_cpu_has_no_time_to_enqueue():
    assert time_interleaved({"a": [spin_2ms]}, WallClock(), fixed(3))["a"].host_us == []


def test_an_error_ends_its_own_samples_only():
    count = 0

    def third_time_bad() -> None:
        nonlocal count
        count += 1
        if count == 6:
            raise RuntimeError("third sample")

    def never_good() -> None:
        raise MemoryError("while warming up")

    calls = {"bad": [third_time_bad], "worse": [never_good], "good": [lambda: None]}
    timings = time_interleaved(calls, WallClock(), WARM)
    assert str(timings["bad"].error) == "third sample"
    assert isinstance(timings["worse"].error, MemoryError)
    assert timings["worse"].samples_ms == []
    assert timings["good"].error is None and len(timings["good"].samples_ms) == 10


def test_a_fatal_error_ends_the_timing_of_all():
    def fatal() -> None:
        raise RuntimeError("illegal address")

    ran: list[None] = []
    calls = {"first": [lambda: ran.append(None)], "fatal": [fatal], "last": [lambda: 1 / 0]}
    timings = time_interleaved(calls, WallClock(), WARM, is_fatal=lambda error: True)
    assert str(timings["fatal"].error) == "illegal address"
    assert timings["first"].error is None and timings["last"].error is None
    assert len(ran) == WARM.warmup and timings["first"].samples_ms == []


def test_a_cpu_run_is_warm_and_by_wall_clock():
    assert make_timer(CPU, WARM).name == "wall-clock"
    with pytest.raises(ValueError, match="l2 must be warm on a CPU, got 'cold'"):
        make_timer(CPU, Settings())
    with pytest.raises(ValueError, match="graph must be False on a CPU"):
        make_timer(CPU, Settings(l2="warm", graph=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(l2="lukewarm"), "l2 must be one of .* got 'lukewarm'"),
        (dict(min_samples=0), "min_samples must be >= 1 .* got 0 and 50"),
        (dict(min_samples=9, max_samples=8), "at most max_samples, got 9 and 8"),
        (dict(budget_s=-1.0), "budget_s must be >= 0, got -1.0"),
        (dict(budget_s=float("nan")), "budget_s must be >= 0, got nan"),
        (dict(layouts="sbhd"), "layouts must be one of both, bshd, bhsd, got 'sbhd'"),
        (dict(warmup=0), "warmup must be >= 1, got 0"),
        (dict(rest=-1.0), "rest must be between 0 and .* got -1.0"),
        (dict(rest=float("inf")), "rest must be between 0 and .* got inf"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Settings(**settings)


def test_all_samples_are_kept_in_order():
    clock = Clock()
    waits = iter([5e-3, 15e-3, 25e-3, 10e-3] * 2)

    def wait() -> None:
        clock.now += next(waits)

    timings = time_interleaved({"a": [wait]}, WallClock(clock), fixed(4, warmup=4))
    assert timings["a"].samples_ms == pytest.approx([5.0, 15.0, 25.0, 10.0])
