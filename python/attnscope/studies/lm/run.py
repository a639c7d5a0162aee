"""One configuration of a model, measured in a process of its own, as a record that is JSON.

A record has the data of every table: wall times without the profiler, and the GPU time of each
kernel of one profiled step, by phase and part of the model. A failure is a record too.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from attnscope.profile.record.attached import attached_tool
from attnscope.profile.record.session import annotate, profile, synchronize
from attnscope.ranges import MEASURE, WARMUP
from attnscope.studies.isolation import run_apart
from attnscope.studies.lm.model import ModelConfig, Training
from attnscope.studies.lm.records import read_model
from attnscope.studies.records import Row
from attnscope.studies.summary import NO_GPU, gpu_work

if TYPE_CHECKING:
    from attnscope.common.results import Results

WARMUP_STEPS = 2
TIMED_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Run:
    """A configuration: a model by name and shape, and how it is run."""

    name: str
    config: ModelConfig
    impl: str
    precision: str = "autocast"
    batch: int = 4
    device: str = "cuda"

    @property
    def key(self) -> Row:
        """The fields that distinguish it from other configurations of the same device."""
        shape = asdict(self.config) | {"parameters": self.config.parameters}
        how = {"impl": self.impl, "precision": self.precision, "batch": self.batch}
        return {"model": self.name, **how, **shape}


def measure(run: Run) -> Row:
    """Run a configuration in this process: its record, with status "ok".

    Raises Unsupported where the impl cannot do it, and whatever running it raises.
    """
    training, record = time_steps(run)
    if record["no_kernels"] is None:
        recorded = profile(run.name, warmup=0)(training.step)
        recorded()
        record |= asdict(gpu_work(recorded.profile))
    return record


def time_steps(run: Run) -> tuple[Training, Row]:
    """A configuration that has warmed up, and its record with wall times. Raises as `measure`."""
    import torch

    device = torch.device(run.device)
    training = Training(
        run.config,
        batch=run.batch,
        device=device,
        attention=run.impl,
        precision=run.precision,
    )
    with annotate(WARMUP):
        for _ in range(WARMUP_STEPS):
            training.step()
    walls: dict[str, list[float]] = defaultdict(list)
    with annotate(MEASURE):
        for _ in range(TIMED_STEPS):
            synchronize()
            start = time.perf_counter()
            for phase in training.steps():
                walls[phase].append((time.perf_counter() - start) * 1e3)
                start = time.perf_counter()
    record = run.key | {"status": "ok", "reason": None, "wall_ms": dict(walls)}
    record |= {"no_backward": training.no_backward, "peak_memory_gib": None}
    if device.type == "cuda":
        record["peak_memory_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    record["no_kernels"] = _why_no_kernels(device.type)
    return training, record


def _why_no_kernels(device_type: str) -> str | None:
    if tool := attached_tool():
        return f"runs under {tool[0]} ({tool[1]}): PyTorch's profiler stays off"
    return None if device_type == "cuda" else NO_GPU


def run_all(
    runs: Sequence[Run],
    results: Results,
    *,
    timeout_s: float = 600.0,
    on_done: Callable[[Row], None] = lambda record: None,
) -> None:
    """Measure each configuration that `results` has no record of, each in its own process.

    The file is saved after each. A later call retries configurations that failed or whose record
    contradicts itself, and keeps their place.
    """
    for run in runs:
        same = [i for i, old in enumerate(results.rows) if run.key.items() <= old.items()]
        statuses = {read_model(results.rows[at], f"record {at + 1}").status for at in same}
        if statuses & {"ok", "skipped"}:
            continue
        record = run_apart(run, timeout_s, measure)
        at = same[0] if same else len(results.rows)
        results.rows[at : at + 1] = [record]
        results.save()
        on_done(record)
