"""Running sums behind the rows of the operator and the stage table, in nanoseconds."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from attnscope.profile.attribution.owners import busy_ns
from attnscope.profile.trace.events import CpuEvent, GpuEvent


@dataclass
class Row:
    """Sums of one op name, in nanoseconds."""

    name: str
    calls: int = 0
    cpu: int = 0
    self_cpu: int = 0
    gpu: int = 0
    self_gpu: int = 0
    kernels: int = 0
    copy: int = 0
    backward: int = 0
    replayed: bool = False  # a call that was captured into a CUDA graph ran many times
    events: list[CpuEvent] = field(default_factory=list)
    launches: set[int] = field(default_factory=set)

    def add(self, work: GpuEvent) -> None:
        if work.kind == "kernel":
            self.gpu += work.duration
            self.kernels += 1
        else:
            self.copy += work.duration

    def columns(self, total: int) -> dict[str, object]:
        return {
            "name": self.name,
            "calls": self.calls or len(self.launches),
            "cpu_us": self.cpu / 1e3 if self.calls else None,
            "self_cpu_us": self.self_cpu / 1e3 if self.calls else None,
            "gpu_us": self.gpu / 1e3,
            "self_gpu_us": self.self_gpu / 1e3,
            "kernels": self.kernels,
            "gpu_mean_us": self.gpu / 1e3 / self.calls
            if self.calls and not self.replayed
            else None,
            "gpu_share": self.gpu / total if total else 0.0,
            "copy_us": self.copy / 1e3,
            "backward_gpu_us": self.backward / 1e3,
        }


class Rows(dict[str, Row]):
    def __missing__(self, name: str) -> Row:
        return self.setdefault(name, Row(name))


class Stage:
    """The calls of one path of ranges and the GPU work of each."""

    def __init__(self, path: tuple[str, ...]) -> None:
        self.path = path
        self.walls: list[CpuEvent] = []
        self.work: dict[int, list[GpuEvent]] = defaultdict(list)  # by index of the range
        self.own: list[GpuEvent] = []

    @property
    def busy(self) -> int:
        return busy_ns(one for part in self.work.values() for one in part)

    def columns(self) -> dict[str, object]:
        work = [one for part in self.work.values() for one in part]
        kernels = [one for one in work if one.kind == "kernel"]
        parts = [(min(w.start for w in p), max(w.end for w in p), p) for p in self.work.values()]
        span = sum(end - start for start, end, _ in parts)
        return {
            "range": self.path[-1],
            "path": "/".join(self.path),
            "depth": len(self.path) - 1,
            "calls": len(self.walls),
            "wall_us": sum(e.duration for e in self.walls) / 1e3 if self.walls else None,
            "gpu_us": sum(one.duration for one in kernels) / 1e3,
            "gpu_self_us": sum(one.duration for one in self.own) / 1e3,
            "gpu_busy_us": self.busy / 1e3,
            "gpu_span_us": span / 1e3,
            "idle_us": sum(end - start - busy_ns(part) for start, end, part in parts) / 1e3,
            "kernels": len(kernels),
        }
