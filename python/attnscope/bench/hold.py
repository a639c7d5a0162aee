"""Block a CUDA stream until the host has enqueued a whole sample: excludes launch overhead.

The stream waits for a word of pinned memory (cuStreamWaitValue32); the host writes the word. A call
that synchronizes with the GPU would deadlock, so a watchdog releases the stream after a time-out
and the sample ends in `HoldTimeout`. Block only after warm-up: lazy module loading synchronizes
too.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

TIMEOUT_S = 2.0
_POLL_S = 0.05
_REACHED = 0  # CU_STREAM_WAIT_VALUE_GEQ: cyclic, so the count may wrap around


class HoldTimeout(RuntimeError):
    """The call did not return while the stream was blocked: the call synchronizes with the GPU."""


class Driver(Protocol):
    """Blocks and releases a stream."""

    def wait(self, count: int) -> None:
        """Enqueue on the current stream: wait until `release` was called with `count` or more."""

    def release(self, count: int) -> None:
        """End every wait for `count` or less. Does not block the host."""


class CudaDriver:
    """libcuda, by ctypes, with one word of pinned memory."""

    def __init__(self, device: Any) -> None:
        import torch

        self._device = device
        self._word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._host = ctypes.c_int32.from_address(self._word.data_ptr())
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise RuntimeError(f"libcuda.so.1 must be loadable, got {error}") from None
        # The names without _v2 are an older form that some drivers refuse.
        self._wait = self._function("cuStreamWaitValue32_v2", "cuStreamWaitValue32")
        self._wait.argtypes = (
            ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint,
        )  # fmt: skip
        address = ctypes.c_uint64()
        get = self._function("cuMemHostGetDevicePointer_v2")
        get.argtypes = (ctypes.POINTER(ctypes.c_uint64), ctypes.c_void_p, ctypes.c_uint)
        self._check(get(ctypes.byref(address), self._word.data_ptr(), 0), get)
        self._address = address.value

    def wait(self, count: int) -> None:
        import torch

        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._check(self._wait(stream, self._address, count & 0xFFFFFFFF, _REACHED), self._wait)

    def release(self, count: int) -> None:
        self._host.value = count

    def _function(self, *names: str) -> Any:
        for name in names:
            if function := getattr(self._library, name, None):
                function.restype = ctypes.c_int
                return function
        raise RuntimeError(f"libcuda.so.1 must have {names[-1]}, got none. Update the driver.")

    @staticmethod
    def _check(result: int, function: Any) -> None:
        if result:
            raise RuntimeError(f"{function.__name__} must return 0, got CUDA error {result}")


class StreamHold:
    """Blocks the current stream for the duration of a `with` block.

    Raises HoldTimeout on exit if the `with` block took longer than `timeout_s`. The stream was then
    released at the time-out, and the enqueued work has run or is running.
    """

    def __init__(self, driver: Driver, timeout_s: float = TIMEOUT_S) -> None:
        self._driver = driver
        self._timeout_s = timeout_s
        self._count = 0
        self._held: tuple[int, float] | None = None  # count, and when it is released at the latest
        self._timed_out = 0
        self._watchdog: threading.Thread | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self._watchdog is None:
            poll_s = min(_POLL_S, self._timeout_s / 4)
            self._watchdog = threading.Thread(
                target=_watch, args=(weakref.ref(self), poll_s), name="hold", daemon=True
            )
            self._watchdog.start()
        self._count += 1
        self._driver.wait(self._count)
        self._held = (self._count, time.monotonic() + self._timeout_s)
        try:
            yield
        finally:
            self._held = None
            self._driver.release(self._count)
        if self._timed_out == self._count:
            raise HoldTimeout(
                f"the call must return without waiting for the GPU, got no return in "
                f"{self._timeout_s:g} s while the stream was held. Time it with --graph, or take "
                "its own synchronisation out."
            )

    def release_if_late(self) -> None:
        held = self._held
        if held is not None and time.monotonic() > held[1]:
            # A release of this count never releases a later one.
            self._timed_out = held[0]
            self._driver.release(held[0])


def _watch(hold: weakref.ref[StreamHold], poll_s: float) -> None:
    """The watchdog's thread: it ends with the hold."""
    while (watched := hold()) is not None:
        watched.release_if_late()
        del watched
        time.sleep(poll_s)
