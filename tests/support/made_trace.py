"""Chrome traces made event by event, and the recorded ones, for the tests of attnscope.profile."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import trace_files

from attnscope.profile.analysis import invariants
from attnscope.profile.attribution.owners import Attribution
from attnscope.profile.trace.events import CpuEvent
from attnscope.profile.trace.reader import read_trace

RECORDED = trace_files.RECORDINGS
H200 = {
    "id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150109880320, "computeMajor": 9,
    "computeMinor": 0, "maxThreadsPerMultiprocessor": 2048, "regsPerMultiprocessor": 65536,
    "warpSize": 32, "sharedMemPerMultiprocessor": 233472, "numSms": 132,
}  # fmt: skip


@cache
def recorded(name: str) -> Attribution:
    """One of the traces in tests/traces, recorded on an H200."""
    return Attribution(read_trace(trace_files.RECORDED / f"{name}.json.gz"))


def check_tables(owners: Attribution, operators: Any, kernels: Any, stages: Any) -> None:
    """Raises ProfileError where one of the three tables cannot be true."""
    invariants.check_operators(owners, operators)
    invariants.check_kernels(owners, kernels)
    invariants.check_stages(owners, stages)


def op_event(name: str, *shapes: Any, dtype: str = "c10::BFloat16", **scalars: Any) -> CpuEvent:
    """A recorded op: its inputs are `shapes` (None for no tensor), scalars by "_<position>"."""
    at = {int(key[1:]): value for key, value in scalars.items()}
    count = max([len(shapes), *(position + 1 for position in at)])
    dims = [shapes[i] if i < len(shapes) and shapes[i] else () for i in range(count)]
    dtypes = [dtype if d else "Scalar" if i in at else "" for i, d in enumerate(dims)]
    concrete = tuple(str(at.get(i, "")) for i in range(count))
    return CpuEvent(
        "op", name, 1, 0, 1, 0, shapes=tuple(dims), dtypes=tuple(dtypes), concrete=concrete
    )


class MadeTrace:
    """Times are microseconds. Every kernel gets a launch call."""

    def __init__(self, device: dict[str, Any] | None = H200) -> None:
        self.events: list[dict[str, Any]] = []
        self.devices = [device] if device else []

    def _add(self, cat: str, name: str, start: float, duration: float, **rest: Any) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": duration}
        self.events.append({"pid": 1, "tid": 1, "args": {}} | event | rest)

    def range(self, name: str, start: float, duration: float, thread: int = 1) -> None:
        self._add("user_annotation", name, start, duration, tid=thread)

    def frame(self, name: str, start: float, duration: float) -> None:
        self._add("python_function", name, start, duration)

    def overhead(self, start: float, duration: float) -> None:
        self._add("overhead", "Activity Buffer Request", start, duration, pid=-1)

    def op(
        self,
        name: str,
        start: float,
        duration: float,
        shapes: list[Any] | None = None,
        dtype: str = "c10::BFloat16",
        thread: int = 1,
    ) -> None:
        arguments: dict[str, Any] = {}
        if shapes is not None:
            arguments = {"Input Dims": shapes, "Concrete Inputs": [""] * len(shapes)}
            arguments["Input type"] = [dtype if shape else "" for shape in shapes]
        self._add("cpu_op", name, start, duration, tid=thread, args=arguments)

    def call(self, name: str, start: float, duration: float, thread: int = 1) -> int:
        correlation = len(self.events) + 1
        about = {"correlation": correlation}
        self._add("cuda_runtime", name, start, duration, tid=thread, args=about)
        return correlation

    def kernel(
        self,
        name: str,
        start: float,
        duration: float,
        launch: float | None = None,
        thread: int = 1,
        stream: int = 7,
        cat: str = "kernel",
        **arguments: Any,
    ) -> None:
        """`launch` is when the call that launches it begins; by default 5 us before the start."""
        about: dict[str, Any] = {"device": 0, "stream": stream}
        at = start - 5 if launch is None else launch
        about["correlation"] = self.call("cudaLaunchKernel", at, 2, thread)
        about |= {"grid": [132, 1, 1], "block": [128, 1, 1], "registers per thread": 32}
        about |= {"shared memory": 0, "blocks per SM": 1.0, "warps per SM": 4.0}
        about["est. achieved occupancy %"] = 6
        self._add(cat, name, start, duration, pid=0, tid=stream, args=about | arguments)

    def attribution(self, folder: Path) -> Attribution:
        path = folder / "trace.json"
        content = {"deviceProperties": self.devices, "traceEvents": self.events}
        path.write_text(json.dumps(content))
        return Attribution(read_trace(path))
