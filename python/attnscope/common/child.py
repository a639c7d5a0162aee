"""Work in a forked child, beside this process, for what one core would do too slowly."""

from __future__ import annotations

import json
import os
import select
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

SILENT_S = 60.0  # a child that is silent for longer hangs
# Children pay for a trace of this size, where this process may use this number of cores.
EVENTS, CORES = 50_000, 2
FORKS = hasattr(os, "sched_getaffinity")  # elsewhere than on Linux, a fork may not go on
MOST_PAGES = 1 << 23  # 32 GiB: a fork copies the table of a process's pages, in a second from here
_seconds = 0.0  # CPU seconds of all children that have ended


class Child:
    """Runs `work` in a fork of this process; `result` waits for what it returns, made to JSON.

    The child may read what this process has, and write files. It must not print, use the GPU or
    start threads, and it ends without Python's clean-up. If it fails, cannot be started, or hangs
    (another thread may have held a lock at the fork), this process does the work itself, and raises
    what that raises: work must be such that it may begin again.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work, self.began, self.pid = work, time.monotonic(), 0
        self.failed = not FORKS or _pages() > MOST_PAGES
        if self.failed:
            return
        read, write = os.pipe()
        try:
            with warnings.catch_warnings():  # that locks of other threads stay locked: see above
                warnings.simplefilter("ignore", DeprecationWarning)
                self.pid = os.fork()
        except OSError:
            os.close(read)
            os.close(write)
            self.failed = True
            return
        if not self.pid:
            try:
                line = json.dumps(work()) + "\n"
                os.write(write, line.encode())
            finally:
                os._exit(0)
        os.close(write)
        self._pipe = read
        self._text = b""

    def ended(self, wait_s: float = 0.0) -> bool:
        """Whether the child has ended its work, or has failed, after at most `wait_s` seconds."""
        until = time.monotonic() + wait_s
        while not self.failed and not self._text.endswith(b"\n"):
            if not select.select([self._pipe], [], [], max(until - time.monotonic(), 0.0))[0]:
                return False
            more = os.read(self._pipe, 1 << 16)
            self._text += more
            self.failed = not more
        self._reap()
        return True

    def result(self) -> Any:
        """What the work returned."""
        if not self.ended(SILENT_S + 4 * (time.monotonic() - self.began)):
            self.kill()
        return self.work() if self.failed else json.loads(self._text)

    def kill(self) -> None:
        """End the child; its work counts as failed."""
        if not self.ended():
            self.failed = True
            os.kill(self.pid, signal.SIGKILL)
            self._reap()

    def _reap(self) -> None:
        global _seconds
        if self.pid:
            os.close(self._pipe)
            with suppress(ChildProcessError):  # the program takes all children that end
                used = os.wait4(self.pid, 0)[2]
                _seconds += used.ru_utime + used.ru_stime
            self.pid = 0


def pays(events: int) -> bool:
    """Whether work on this number of events is worth several processes here."""
    return FORKS and events >= EVENTS and len(os.sched_getaffinity(0)) >= CORES


def _pages() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])


def child_seconds() -> float:
    """CPU seconds that the children of this module took, as far as they have ended."""
    return _seconds
