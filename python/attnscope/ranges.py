"""NVTX names of the project: one domain, a short fixed set of ranges.

The C++ side emits FORWARD and COPY (csrc/binding/nvtx.h holds the same strings; a test compares
the two), the bench and the checks emit the phases. Strings are registered, so nsys can gate on
them without NSYS_NVTX_PROFILER_REGISTER_ONLY=0.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

DOMAIN = "attnscope"
FORWARD = "attnscope::forward"
COPY = "attnscope::copy"
TRITON_FORWARD = "attnscope_triton::forward"
WARMUP = "warmup"
MEASURE = "measure"
CHECK = "check"

OPS = (FORWARD, COPY)
TRITON_OPS = (TRITON_FORWARD,)
PHASES = (WARMUP, MEASURE, CHECK)


@cache
def _domain() -> Any:
    import nvtx

    return nvtx.get_domain(DOMAIN)


@cache
def _attributes(name: str) -> Any:
    return _domain().get_event_attributes(message=_domain().get_registered_string(name))


@contextmanager
def nvtx_range(name: str) -> Iterator[None]:
    """Push a range in the project's domain for the duration of the block.

    `name` is one of this module's constants: registered strings live as long as the process, so
    anything that varies (a shape, an impl) does not belong in it. Raises ValueError otherwise.
    """
    if name not in (known := OPS + TRITON_OPS + PHASES):
        raise ValueError(f"name: {name!r} is no range of this project; one of {known}")
    _domain().push_range(_attributes(name))
    try:
        yield
    finally:
        _domain().pop_range()
