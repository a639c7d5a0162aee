"""Python's garbage collector, off for a while."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Disable the collector of cycles: it walks every object again and again while many are made.

    Also a decorator: `@collector_off()`.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def never_free(one: object) -> None:
    """Keep an object, and what it holds, until the process ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
