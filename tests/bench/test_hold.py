"""StreamHold blocks a stream until a whole sample is enqueued, at most until the time-out."""

import threading
import time

import pytest

from attnscope.bench.hold import HoldTimeout, StreamHold


class FakeStream:
    """A stream whose work runs in a thread and waits for a release count."""

    def __init__(self) -> None:
        self.word = 0
        self.waits: list[int] = []
        self.releases: list[int] = []
        self.changed = threading.Condition()

    def wait(self, count: int) -> None:
        self.waits.append(count)

    def release(self, count: int) -> None:
        with self.changed:
            self.releases.append(count)
            self.word = max(self.word, count)
            self.changed.notify_all()

    def synchronize(self) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.word >= self.waits[-1], timeout=10)


def test_the_stream_is_released_once_all_is_enqueued():
    stream = FakeStream()
    hold = StreamHold(stream, timeout_s=10)
    for count in (1, 2, 3):
        with hold():
            assert stream.waits[-1] == count and stream.word == count - 1
        assert stream.word == count
    assert stream.waits == stream.releases == [1, 2, 3]


def test_a_call_that_waits_for_the_stream_ends_with_the_reason_and_the_next_one_is_held_again():
    stream = FakeStream()
    hold = StreamHold(stream, timeout_s=0.1)
    start = time.monotonic()
    with pytest.raises(HoldTimeout, match="got no return in 0.1 s while the stream was held"):
        with hold():
            stream.synchronize()
    assert 0.1 <= time.monotonic() - start < 5
    with hold():
        assert stream.word == 1
    assert stream.word == 2


def test_a_late_release_does_not_release_the_next_sample():
    stream = FakeStream()
    hold = StreamHold(stream, timeout_s=0.2)
    for _ in range(20):
        with hold():
            time.sleep(0.05)  # 20 sleeps exceed the time-out, one does not
            assert stream.word < stream.waits[-1]


def test_an_error_of_the_call_releases_the_stream_and_passes_through():
    stream = FakeStream()
    hold = StreamHold(stream, timeout_s=10)
    with pytest.raises(KeyError), hold():
        raise KeyError("no tile")
    assert stream.word == 1


def test_a_driver_that_cannot_hold_is_an_error_and_nothing_is_held():
    class Refuses(FakeStream):
        def wait(self, count: int) -> None:
            raise RuntimeError("cuStreamWaitValue32_v2 must return 0, got CUDA error 801")

    with pytest.raises(RuntimeError, match="got CUDA error 801"), StreamHold(Refuses())():
        pytest.fail("the block ran")
