"""Chrome traces made event by event in the format of PyTorch's profiler, and recorded ones.

`cpu`, `op`, `named`, `launch` and `kernel` make one event each, from when to when, in microseconds;
`write_trace` writes them. `MadeTrace` collects them by start and duration, with a launch for each
kernel.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from attnscope.profile.analysis import invariants
from attnscope.profile.attribution.owners import Attribution
from attnscope.profile.trace.events import CpuEvent
from attnscope.profile.trace.reader import read_trace

RECORDED = Path(__file__).parent / "traces"
RECORDINGS = (
    "ops", "train", "stack", "raw", "graph", "graph_both", "streams", "cold", "threads",
)  # fmt: skip

Event = dict[str, Any]


def cpu(category: str, name: str, start: float, end: float, tid: int = 1, **args: Any) -> Event:
    """A CPU event; times in microseconds. Categories: cpu_op, user_annotation, cuda_runtime ..."""
    return {
        "ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": start,
        "dur": end - start, "args": args,
    }  # fmt: skip


def op(name: str, start: float, end: float, tid: int = 1, **args: Any) -> Event:
    return cpu("cpu_op", name, start, end, tid, **args)


def named(name: str, start: float, end: float, tid: int = 1) -> Event:
    return cpu("user_annotation", name, start, end, tid)


def launch(
    correlation: int, at: float, call: str = "cudaLaunchKernel", tid: int = 1, **args: Any
) -> Event:
    category = "cuda_runtime" if call.startswith("cuda") else "cuda_driver"
    return cpu(category, call, at, at + 1, tid, correlation=correlation, **args)


def kernel(
    correlation: int, start: float, end: float, name: str = "k", stream: int = 7, **args: Any
) -> Event:
    about = {"device": 0, "stream": stream, "correlation": correlation} | args
    return {
        "ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": start,
        "dur": end - start, "args": about,
    }  # fmt: skip


def write_trace(path: Path, *events: Event, **members: Any) -> Path:
    path.write_text(json.dumps({"schemaVersion": 1, **members, "traceEvents": events}))
    return path


H200 = {
    "id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150109880320, "computeMajor": 9,
    "computeMinor": 0, "maxThreadsPerMultiprocessor": 2048, "regsPerMultiprocessor": 65536,
    "warpSize": 32, "sharedMemPerMultiprocessor": 233472, "numSms": 132,
}  # fmt: skip


@cache
def recorded(name: str) -> Attribution:
    """One of the traces in tests/traces, recorded on an H200."""
    return Attribution(read_trace(RECORDED / f"{name}.json.gz"))


def check_tables(owners: Attribution, operators: Any, kernels: Any, stages: Any) -> None:
    """Raise ProfileError if one of the three tables is impossible."""
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
    """Times are microseconds: a start and a duration. Every kernel gets a launch call."""

    def __init__(self, device: dict[str, Any] | None = H200) -> None:
        self.events: list[Event] = []
        self.devices = [device] if device else []

    def range(self, name: str, start: float, duration: float, thread: int = 1) -> None:
        self.events.append(named(name, start, start + duration, thread))

    def frame(self, name: str, start: float, duration: float) -> None:
        self.events.append(cpu("python_function", name, start, start + duration))

    def overhead(self, start: float, duration: float) -> None:
        self.events.append(cpu("overhead", "Activity Buffer Request", start, start + duration))

    def op(
        self,
        name: str,
        start: float,
        duration: float,
        shapes: list[Any] | None = None,
        dtype: str = "c10::BFloat16",
        thread: int = 1,
    ) -> None:
        about: dict[str, Any] = {}
        if shapes is not None:
            about = {"Input Dims": shapes, "Concrete Inputs": [""] * len(shapes)}
            about["Input type"] = [dtype if shape else "" for shape in shapes]
        self.events.append(op(name, start, start + duration, thread, **about))

    def call(self, name: str, start: float, duration: float, thread: int = 1) -> int:
        """A CUDA call; returns its correlation id."""
        correlation = len(self.events) + 1
        end = start + duration
        about = {"correlation": correlation}
        self.events.append(cpu("cuda_runtime", name, start, end, thread, **about))
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
        at = start - 5 if launch is None else launch
        correlation = self.call("cudaLaunchKernel", at, 2, thread)
        about = {
            "grid": [132, 1, 1],
            "block": [128, 1, 1],
            "registers per thread": 32,
            "shared memory": 0,
            "blocks per SM": 1.0,
            "warps per SM": 4.0,
            "est. achieved occupancy %": 6,
        }
        event = kernel(correlation, start, start + duration, name, stream, **about | arguments)
        self.events.append(event | {"cat": cat})

    def attribution(self, folder: Path) -> Attribution:
        path = write_trace(folder / "trace.json", *self.events, deviceProperties=self.devices)
        return Attribution(read_trace(path))
