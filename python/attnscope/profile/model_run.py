"""One configuration of a model, measured in a process of its own, as a record that is JSON.

A record has what every table is made from: wall times without the profiler, and the GPU time of
each kernel of one profiled step, by phase and part of the model. What fails is a record too.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from attnscope.profile.attached import attached_tool
from attnscope.profile.attribution import Attribution, busy_ns
from attnscope.profile.flops import FlopCounts
from attnscope.profile.models import CORE, PARTS, PHASES, ModelConfig, Training
from attnscope.profile.names import category, short_name, uses_tensor_cores
from attnscope.profile.records import OUTSIDE, Record, checked
from attnscope.profile.session import annotate, profile, synchronize
from attnscope.profile.trace import CpuEvent, GpuEvent
from attnscope.ranges import MEASURE, WARMUP

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from attnscope.common.results import Results

WARMUP_STEPS = 2
TIMED_STEPS = 5
ENDING_S = 30.0  # that a process has to end after its record
# Operations an element: maximum, subtract, exp, sum, divide; backward: multiply, sum, subtract,
# multiply.
SOFTMAX_OPS = {"aten::_softmax": 5, "aten::_softmax_backward_data": 4}


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
    def key(self) -> Record:
        """What tells it from other configurations of the same device."""
        shape = asdict(self.config) | {"parameters": self.config.parameters}
        how = {"impl": self.impl, "precision": self.precision, "batch": self.batch}
        return {"model": self.name, **how, **shape}


class Keyed(Protocol):
    """What is run: anything that says what tells its record from others."""

    @property
    def key(self) -> Record: ...


R = TypeVar("R", bound=Keyed)


def measure(run: Run) -> Record:
    """Run a configuration in this process: its record, with status "ok".

    Raises Unsupported where the impl cannot do it, and whatever running it raises.
    """
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
    if record["no_kernels"] is None:
        recorded = profile(run.name, warmup=0)(training.step)
        recorded()
        record |= summarise(recorded.profile.attribution)
    return record


def _why_no_kernels(device_type: str) -> str | None:
    if tool := attached_tool():
        return f"runs under {tool[0]} ({tool[1]}): PyTorch's profiler stays off"
    return None if device_type == "cuda" else "no GPU: kernels are what a GPU runs"


def summarise(attribution: Attribution) -> Record:
    """The GPU side of one profiled step, times in microseconds.

    total_us, owned: kernel time, and the share that ops own. phases: of each, wall_us (the range
    on the CPU, the wait for the device included), kernel_us, busy_us, span_us, copy_us, kernels.
    kernels: rows of phase, part, kernel, category, tensor_cores, calls, total_us; each kernel is
    in one row. flops: rows of phase, part, flops (None with a reason). softmax_flops: by phase, in
    the attention core. efficiency, findings: see those modules.
    """
    from attnscope.profile.detect import detect
    from attnscope.profile.efficiency import efficiency

    trace = attribution.trace
    if not trace.kernels:
        raise ValueError("trace: no kernel ran")
    calls: Counter[tuple[Any, ...]] = Counter()
    times: Counter[tuple[Any, ...]] = Counter()
    for kernel in trace.kernels:
        where, name = place(attribution, kernel), kernel.name
        key = (*where, short_name(name), category(name), uses_tensor_cores(name))
        calls[key] += 1
        times[key] += kernel.duration
    columns = ("phase", "part", "kernel", "category", "tensor_cores")
    found = efficiency(attribution)
    return {
        "total_us": attribution.total_ns / 1e3,
        "owned": attribution.share,
        "phases": _phases(attribution),
        "kernels": [
            dict(zip(columns, key, strict=True)) | {"calls": calls[key], "total_us": time / 1e3}
            for key, time in times.most_common()
        ],
        **_flops(attribution),
        "efficiency": {
            "gpu_utilisation": found.gpu_utilisation,
            "tensor_core_time_share": found.tensor_core_time_share,
        },
        "findings": [{"kind": one.kind, "title": one.title} for one in detect(attribution)],
    }


def place(attribution: Attribution, event: CpuEvent | GpuEvent) -> tuple[str, str]:
    """Phase of a step and part of the model that an event belongs to.

    Backward work belongs to the part of its forward op.
    """
    around = [one.name for one in attribution.ranges(event)]
    phase = next((name for name in around if name in PHASES), OUTSIDE)
    op = attribution.op(event) if isinstance(event, GpuEvent) else event
    forward = attribution.forward_op(op) if op else None
    if forward:
        around = [one.name for one in attribution.ranges(forward)]
    return phase, next((name for name in reversed(around) if name in PARTS), OUTSIDE)


def _phases(attribution: Attribution) -> dict[str, Record]:
    trace = attribution.trace
    work: dict[str, list[GpuEvent]] = defaultdict(list)
    for one in trace.gpu:
        names = {event.name for event in attribution.ranges(one)}
        for phase in names & set(PHASES):
            work[phase].append(one)
    walls: Counter[str] = Counter()
    for event in trace.cpu:
        if event.kind == "range" and event.name in PHASES:
            walls[event.name] += event.duration
    found = {}
    for phase in PHASES:
        if not walls[phase]:
            continue
        inside = work[phase]
        kernels = [one for one in inside if one.kind == "kernel"]
        span = max((w.end for w in inside), default=0) - min((w.start for w in inside), default=0)
        found[phase] = {
            "wall_us": walls[phase] / 1e3,
            "kernel_us": sum(one.duration for one in kernels) / 1e3,
            "busy_us": busy_ns(kernels) / 1e3,
            "span_us": span / 1e3,
            "copy_us": sum(one.duration for one in inside if one.kind != "kernel") / 1e3,
            "kernels": len(kernels),
        }
    return found


def _flops(attribution: Attribution) -> Record:
    counts = FlopCounts(attribution)
    flops: Counter[tuple[str, str]] = Counter()
    softmax: Counter[str] = Counter()
    missed = {place(attribution, kernel): reason for kernel, reason in counts.uncounted}
    for at, work in counts.works.items():
        flops[place(attribution, attribution.trace.cpu[at])] += work.flops
    for event in attribution.trace.cpu:
        if event.kind == "op" and event.name in SOFTMAX_OPS and event.shapes:
            phase, part = place(attribution, event)
            if part == CORE:
                softmax[phase] += SOFTMAX_OPS[event.name] * prod(event.shapes[0])
    rows = []
    for phase, part in {**flops, **missed}:
        reason = missed.get((phase, part))
        number = None if reason else flops[phase, part]
        rows.append({"phase": phase, "part": part, "flops": number, "reason": reason})
    return {"flops": rows, "softmax_flops": dict(softmax)}


def run_all(
    runs: Sequence[Run],
    results: Results,
    *,
    timeout_s: float = 600.0,
    on_done: Callable[[Record], None] = lambda record: None,
) -> None:
    """Measure each configuration that `results` has no record of, each in its own process.

    The file is saved after every one of them. Those that failed, or whose record cannot be true,
    are tried again in a later call, and keep their place.
    """
    for run in runs:
        same = [i for i, old in enumerate(results.rows) if run.key.items() <= old.items()]
        if any(checked(results.rows[i])["status"] in ("ok", "skipped") for i in same):
            continue
        record = run_apart(run, timeout_s, measure)
        at = same[0] if same else len(results.rows)
        results.rows[at : at + 1] = [record]
        results.save()
        on_done(record)


def run_apart(run: R, timeout_s: float, measure: Callable[[R], Record]) -> Record:
    """`measure` in a process of its own; a record in any case, also where that process dies.

    Processes are forked from a server that has PyTorch loaded and has not touched the GPU.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(measure, run, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if receiver.poll(timeout_s):
            record = receiver.recv()
            process.join(ENDING_S)  # the next one needs the memory
            return record
        reason = f"took longer than {timeout_s:g} s"
    except EOFError:
        process.join()
        reason = _ending(process.exitcode or 0)
    finally:
        process.kill()
        process.join()
    return run.key | {"status": "failed", "reason": reason}


def _child(measure: Callable[[R], Record], run: R, sender: Connection) -> None:
    from attnscope.bench.impls import Unsupported
    from attnscope.common.console import explain

    # Ctrl-C reaches every process of a terminal; the one that started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        record = measure(run)
    except Unsupported as refusal:
        record = run.key | {"status": "skipped", "reason": str(refusal)}
    except Exception as error:
        record = run.key | {"status": "failed", "reason": explain(error)}
    sender.send(record)


def _ending(code: int) -> str:
    if code >= 0:
        return f"its process ended with code {code} and no result"
    name = signal.Signals(-code).name
    memory = ": perhaps by the kernel, for want of memory" if name == "SIGKILL" else ""
    return f"its process was ended by {name}{memory}"
