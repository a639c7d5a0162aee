"""NVTX names of the project: one domain, a short fixed set of ranges.

The C++ side emits FORWARD, BACKWARD and COPY (csrc/binding/nvtx.h has the same strings; a test
compares them), the bench and the checks emit the phases. Strings are registered, so nsys can gate
on them without NSYS_NVTX_PROFILER_REGISTER_ONLY=0.
"""

from functools import cache
from typing import Any

DOMAIN = "attnscope"
FORWARD = "attnscope::forward"
BACKWARD = "attnscope::backward"
COPY = "attnscope::copy"
TRITON_FORWARD = "attnscope_triton::forward"
TRITON_BACKWARD = "attnscope_triton::backward"
WARMUP = "warmup"
MEASURE = "measure"
CHECK = "check"

OPS = (FORWARD, BACKWARD, COPY)
TRITON_OPS = (TRITON_FORWARD, TRITON_BACKWARD)
PHASES = (WARMUP, MEASURE, CHECK)


@cache
def _domain() -> Any:
    import nvtx

    return nvtx.get_domain(DOMAIN)


@cache
def _attributes(name: str) -> Any:
    return _domain().get_event_attributes(message=name)


class _Range:
    """A context manager without state, so that one object serves all blocks of a name."""

    def __init__(self, name: str) -> None:
        self._push, self._pop = _domain().push_range, _domain().pop_range
        self._event = _attributes(name)

    def __enter__(self) -> None:
        self._push(self._event)

    def __exit__(self, *exception: object) -> None:
        self._pop()


@cache
def nvtx_range(name: str) -> _Range:
    """Push a range in the project's domain for the duration of the `with` block.

    `name` is one of this module's constants: registered strings live as long as the process, so
    anything that varies (a shape, an impl) does not belong in it. Raises ValueError otherwise.
    """
    if name not in (known := OPS + TRITON_OPS + PHASES):
        raise ValueError(f"name must be one of {', '.join(known)}, got {name!r}")
    return _Range(name)
