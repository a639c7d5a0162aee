"""Traces made by hand, in the words of PyTorch's profiler, for cases that are hard to record."""

import json
from pathlib import Path
from typing import Any

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
