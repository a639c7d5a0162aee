"""Calls of our ops and of their peers, each compared with its raw trace and with CUDA events.

A call becomes a record that is JSON: its rows in the operator table, the sum of its kernels from
the raw trace, the other tools' times, PyTorch's own figure, and the bars that it met or missed.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attnscope.bench.calls import build_call
from attnscope.bench.impls import IMPLS, Unsupported
from attnscope.bench.workloads import Workload
from attnscope.common.console import explain
from attnscope.profile.errors import ProfileError
from attnscope.profile.render.document import rows_of
from attnscope.profile.trace.markers import SENTINEL
from attnscope.studies.isolation import run_apart
from attnscope.studies.ops.kineto import Averages, comparison, record_with_averages
from attnscope.studies.ops.reconcile import reconcile, record_calls
from attnscope.studies.records import Row

if TYPE_CHECKING:
    from attnscope.common.results import Results
    from attnscope.profile.api import Profile

CALLS = 20
RAW_BAR = 0.01  # of the raw kernels
COLD_TIMEOUT_S = 120.0

DENSE = Workload.of(
    batch=2, seqlen=4096, heads=16, head_dim=128, dtype="bfloat16", causal=True
)  # fmt: skip
PACKED = Workload.of(
    seqlens=[4096, 2048, 1024, 1024], heads=16, head_dim=128, dtype="bfloat16", causal=True
)
MATMUL = 4096  # rows and columns

Call = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call, and the rows of the operator table that have all of its GPU time between them.

    `rows` maps an op's name to how often one call runs it; names that mean the same op in
    different builds are parted by "|". `make` raises Unsupported if the call is not available;
    `impl` is the impl whose kernels must have run, those of a `mode` of MODES.
    """

    name: str
    rows: Mapping[str, int]
    make: Callable[[torch.device], Call]
    impl: str | None = None
    mode: str = "forward"


def _forward(name: str, impl: str, row: str, work: Workload = DENSE) -> Case:
    def make(device: torch.device) -> Call:
        if why := IMPLS[impl].cannot(work, device):
            raise Unsupported(why)
        return IMPLS[impl].make(work, work.inputs(device, 0))

    return Case(name=name, rows={row: 1}, make=make, impl=impl)


def _trained(name: str, impl: str, rows: Mapping[str, int], work: Workload = DENSE) -> Case:
    work = replace(work, mode="both")

    def make(device: torch.device) -> Call:
        if why := IMPLS[impl].cannot(work, device):
            raise Unsupported(why)
        inputs = work.inputs(device, 0)
        dout = torch.randn_like(inputs[0])
        return build_call(IMPLS[impl], work, inputs, dout)

    name = f"{name}, forward and backward"
    return Case(name=name, rows=rows, make=make, impl=impl, mode="both")


def _matrices(device: torch.device) -> list[torch.Tensor]:
    shape = (MATMUL, MATMUL)
    return [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3)]


def _matmul(device: torch.device) -> Call:
    a, b, _ = _matrices(device)
    return lambda: a @ b


def _trained_matmul(device: torch.device) -> Call:
    a, b, grad = _matrices(device)
    a.requires_grad_()
    b.requires_grad_()
    return lambda: torch.autograd.grad(a @ b, (a, b), grad)


_OURS = {"attnscope::forward": 1, "attnscope::backward": 1}
_TRITON = {"attnscope_triton::forward": 1, "attnscope_triton::backward": 1}
_SDPA = "aten::_scaled_dot_product"
# The cases. Add a new op or peer here.
CASES = (
    _forward("cuda", "cuda", "attnscope::forward"),
    _forward("cuda-sm80", "cuda-sm80", "attnscope::forward"),
    _forward("triton", "triton", "attnscope_triton::forward"),
    _forward("cuda, packed", "cuda", "attnscope::forward", PACKED),
    _trained("cuda", "cuda", _OURS),
    _trained("cuda-sm80", "cuda-sm80", _OURS),
    _trained("triton", "triton", _TRITON),
    _trained("cuda, packed", "cuda", _OURS, PACKED),
    Case(name="matmul", rows={"aten::mm": 1}, make=_matmul),
    Case(name="matmul, forward and backward", rows={"aten::mm": 3}, make=_trained_matmul),
    _forward("sdpa-flash", "sdpa-flash", f"{_SDPA}_flash_attention"),
    _trained(
        "sdpa-flash",
        "sdpa-flash",
        {f"{_SDPA}_flash_attention": 1, f"{_SDPA}_flash_attention_backward": 1},
    ),
    _forward("sdpa-cudnn", "sdpa-cudnn", f"{_SDPA}_cudnn_attention"),
    _forward("sdpa-efficient", "sdpa-efficient", f"{_SDPA}_efficient_attention"),
    _forward("fa3", "fa3", "fa3_fwd::fwd|flash_attn_3::fwd"),
)
# The first call of a process, which loads modules: those that PyTorch's table counts too much for.
COLD_CASES = ("cuda", "matmul")


@dataclass(frozen=True)
class Start:
    """A case by name, and whether its first call in a process is measured or a warm one."""

    case: str
    start: str = "warm"
    device: str = "cuda"

    @property
    def key(self) -> Row:
        return {"call": self.case, "start": self.start}


def measure_all(
    results: Results,
    device: torch.device,
    on_done: Callable[[Row], None] = lambda record: None,
    cases: Sequence[Case] = CASES,
) -> None:
    """Measure every case, cold ones in processes of their own; the file is saved after each."""
    for case in cases:
        results.rows.append(_tried(case, device))
        results.save()
        on_done(results.rows[-1])
    for name in COLD_CASES:
        start = Start(name, "cold", str(device))
        results.rows.append(run_apart(start, COLD_TIMEOUT_S, measure_cold))
        results.save()
        on_done(results.rows[-1])


def _tried(case: Case, device: torch.device) -> Row:
    """The record of a warm case; one of status "skipped" or "failed" where there is none."""
    key = Start(case.name).key
    try:
        return measure(case, device)
    except Unsupported as refusal:
        return key | {"status": "skipped", "reason": str(refusal)}
    except Exception as error:
        return key | {"status": "failed", "reason": explain(error)}


def measure(case: Case, device: torch.device) -> Row:
    """CALLS warm calls of a case. Raises what running it raises, ProfileError for a false table."""
    call = case.make(device)
    found, averages = record_calls(call, CALLS)
    record = Start(case.name).key | summarise(found, averages, case, CALLS)
    tools = rows_of(reconcile(call, samples=CALLS, recorded=found))
    return record | {"tools": tools, "bars": bars(record, tools)}


def measure_cold(start: Start) -> Row:
    """The first call of a case in this process."""
    case = next(case for case in CASES if case.name == start.case)
    device = torch.device(start.device)
    if device.type != "cuda":
        raise Unsupported(f"runs on cuda only, not on {device.type}")
    torch.cuda.set_device(device)
    call = case.make(device)
    found, averages = record_with_averages(case.name, call)
    record = start.key | summarise(found, averages, case, 1)
    return record | {"tools": [], "bars": bars(record, [])}


def summarise(found: Profile, averages: Averages, case: Case, calls: int) -> Row:
    """What a profile of `calls` calls, and PyTorch's own table, report of a case, in microseconds.

    rows: of each op its name, calls, kernels, gpu_us, copy_us, kineto_us and why that differs.
    row_us, copy_us: their sums. raw_us, raw_kernels: of the raw trace. share: of GPU time, owned.

    Raises ProfileError where a row is not there, has other calls, or other kernels ran.
    """
    kernels = raw_kernels(found.source)
    names = list(dict.fromkeys(kernel["name"] for kernel in kernels))
    if case.impl and (why := IMPLS[case.impl].mismatch(names, "cuda", case.mode)):
        raise ProfileError(why)
    rows = [_row(found, averages, names, times * calls) for names, times in case.rows.items()]
    return {
        "status": "ok",
        "reason": None,
        "calls": calls,
        "rows": rows,
        "row_us": sum(row["gpu_us"] for row in rows),
        "copy_us": sum(row["copy_us"] for row in rows),
        "raw_us": sum(float(kernel["dur"]) for kernel in kernels),
        "raw_kernels": len(kernels),
        "share": found.attribution.share,
        "symbols": names,
    }


def _row(found: Profile, averages: Averages, names: str, calls: int) -> Row:
    table = found.operators().set_index("name")
    name = next((name for name in names.split("|") if name in table.index), None)
    if name is None:
        known = ", ".join(table.index)
        raise ProfileError(f"the operator table must have a row {names}, got only {known}")
    row = table.loc[name]
    if row["calls"] != calls:
        raise ProfileError(f"{name} must have {calls} calls, got {row['calls']}")
    figure = {"kineto_us": None, "explanation": averages.reason}
    if averages.rows is not None:
        beside = comparison(found.attribution, averages.rows)
        same = rows_of(beside[(beside["name"] == name) & (beside["row"] == "CPU")])
        missing = figure | {"explanation": "no row"}
        figure = {key: same[0][key] for key in figure} if same else missing
    return {
        "name": name,
        "calls": calls,
        "kernels": int(row["kernels"]),
        "gpu_us": float(row["gpu_us"]),
        "copy_us": float(row["copy_us"]),
        **figure,
    }


def bars(record: Row, tools: Sequence[Row]) -> list[Row]:
    """The criteria for a record, each with its value, its limits, and whether it is met.

    The difference to the raw kernels is a share of them. The difference to CUDA events is in
    microseconds per call; its limits are what `reconcile` allows events to include besides the GPU
    work.
    """
    off = record["row_us"] / record["raw_us"] - 1 if record["raw_us"] else None
    found = [
        _bar("raw kernels", off, -RAW_BAR, RAW_BAR),
        _bar("owned by ops", record["share"], 1.0, 1.0),
    ]
    for tool in tools:
        if tool["tool"] == "CUDA events":
            row_us = (record["row_us"] + record["copy_us"]) / record["calls"]
            off = None if tool["median_us"] is None else tool["median_us"] - row_us
            found.append(_bar("CUDA events", off, tool["least_us"], tool["most_us"]))
    return found


def _bar(name: str, value: float | None, least: float | None, most: float | None) -> Row:
    met = value is not None and least is not None and most is not None and least <= value <= most
    return {"bar": name, "value": value, "least": least, "most": most, "met": met}


def raw_kernels(source: Path) -> list[dict[str, Any]]:
    """Kernels of a chrome trace as PyTorch wrote it, without the profiler's own, by plain JSON.

    Uses nothing of the attribution: this is the independent reference for it.
    """
    opener: Any = gzip.open if source.suffix == ".gz" else open
    with opener(source, "rt", encoding="utf-8", errors="replace") as file:
        events = json.load(file)["traceEvents"]
    own = [
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("name") == SENTINEL and event.get("cat") == "user_annotation"
    ]
    launched = {
        event["args"]["correlation"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
        and any(start <= event["ts"] < end for start, end in own)
    }
    return [
        event
        for event in events
        if event.get("cat") == "kernel" and event["args"]["correlation"] not in launched
    ]
