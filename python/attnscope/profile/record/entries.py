"""Calls a function whenever a program enters a range, a module or a function of some name."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

FUNCTIONS = sys.version_info >= (3, 12)  # sys.monitoring: no cost for functions of other names
WHAT = "a range of torch.profiler.record_function or attnscope.profile.annotate" + (
    ", a function, or the class of a module" if FUNCTIONS else
    " (functions and classes of modules need Python 3.12)"
)  # fmt: skip


class Entries:
    """Watches the process for entries of `name` and calls `entered` before each.

    A function is named by its qualified name without the enclosing functions ("step",
    "Model.generate"), a module by its class. The frame of a function that torch.compile replaced
    counts like the function.
    """

    def __init__(self, name: str, entered: Callable[[], None]) -> None:
        self._name, self._entered = name, entered

    def watch(self) -> None:
        """Begin."""
        from torch.autograd.profiler import record_function

        self._enter = enter = record_function.__enter__
        name, entered = self._name, self._entered

        @functools.wraps(enter)
        def watched(region: Any) -> Any:
            if region.name == name:
                entered()
            return enter(region)

        record_function.__enter__ = watched  # type: ignore[method-assign]
        if FUNCTIONS:
            self._watch_functions()

    def stop(self) -> None:
        """End."""
        from torch.autograd.profiler import record_function

        record_function.__enter__ = self._enter  # type: ignore[method-assign]
        if FUNCTIONS and self._tool is not None:
            monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
            monitoring.set_events(self._tool, 0)
            monitoring.free_tool_id(self._tool)

    def _watch_functions(self) -> None:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
        free = (tool for tool in range(5, -1, -1) if monitoring.get_tool(tool) is None)
        self._tool = next(free, None)
        if self._tool is None:
            return
        names = (self._name, f"{self._name}.forward")

        def started(code: Any, offset: int) -> Any:
            if code.co_qualname.rpartition("<locals>.")[2] not in names:
                return monitoring.DISABLE
            self._entered()
            return None

        monitoring.use_tool_id(self._tool, "attnscope")
        monitoring.register_callback(self._tool, monitoring.events.PY_START, started)
        monitoring.set_events(self._tool, monitoring.events.PY_START)
        monitoring.restart_events()  # an earlier watch may have disabled functions for this id
