"""The command `host-time`: CPU time of a call, by impl and by grad mode.

A "training" call is a forward and its backward, by torch.autograd.grad.

All impls and modes are timed in one process, in interleaved blocks of calls. A block's time ends
when its last call returns. The device is then synchronized, so the launch queue never fills up.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich import box
from rich.table import Table

from attnscope.common.console import say, show_table
from attnscope.common.forms import TERMINAL, AsJson, Form, form_of, printed
from attnscope.common.options import bad_input, pick_device, split

SHAPES = {"cuda": (1, 128, 16, 128), "cpu": (1, 8, 2, 16)}  # [B, S, H, D]
DTYPES = {"cuda": "bfloat16", "cpu": "float32"}
IMPLS = {
    "cuda": ("cuda", "triton", "sdpa-flash", "sdpa-cudnn"),
    "cpu": ("cpu", "sdpa-flash"),
}
BASELINE = "sdpa-flash"
MODES = ("plain", "no_grad", "inference_mode", "grad needed", "training", "compiled")
WARMUP_S = 1.0


class HostTime(NamedTuple):
    """Microseconds a call on the CPU: the median of the blocks, and the 20th percentile."""

    impl: str
    mode: str
    median_us: float
    p20_us: float
    ratio: float | None  # of the medians, to the baseline in the same mode


class _Case(NamedTuple):
    impl: str
    mode: str
    run: Callable[[int], None]  # runs this number of calls
    scopes: Callable[[], list[Any]]


def _cases(impls: tuple[str, ...], modes: tuple[str, ...], device: Any) -> Iterator[_Case]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    import attnscope

    mode_scopes: dict[str, Callable[[], Any]] = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
    }
    backends = {"sdpa-flash": SDPBackend.FLASH_ATTENTION, "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION}
    batch, seqlen, heads, dim = SHAPES[device.type]
    dtype = getattr(torch, DTYPES[device.type])
    for impl in impls:
        ours = impl not in backends
        shape = (batch, seqlen, heads, dim) if ours else (batch, heads, seqlen, dim)
        q, k, v, dout = (torch.randn(shape, device=device).to(dtype) for _ in range(4))

        def call(q: Any, k: Any, v: Any, impl: str = impl, ours: bool = ours) -> Any:
            if ours:
                return attnscope.attention(q, k, v, impl=None if impl in ("cuda", "cpu") else impl)
            return scaled_dot_product_attention(q, k, v)

        compiled = torch.compile(call, fullgraph=True)
        for mode in modes:
            needed = {"grad needed": 1, "training": 3}.get(mode, 0)
            inputs = [t.clone().requires_grad_(at < needed) for at, t in enumerate((q, k, v))]

            def train(*inputs: Any, call: Any = call, dout: Any = dout) -> Any:
                return torch.autograd.grad(call(*inputs), inputs, dout)

            called = {"compiled": compiled, "training": train}.get(mode, call)

            def run(count: int, called: Any = called, inputs: Any = inputs) -> None:
                for _ in range(count):
                    called(*inputs)

            def scopes(impl: str = impl, mode: str = mode) -> list[Any]:
                found = [sdpa_kernel([backends[impl]])] if impl in backends else []
                return [*found, *([mode_scopes[mode]()] if mode in mode_scopes else [])]

            yield _Case(impl, mode, run, scopes)


def measure_host_time(
    device: Any,
    impls: tuple[str, ...] | None = None,
    modes: tuple[str, ...] = MODES,
    calls: int = 200,
    blocks: int = 50,
    seed: int = 0,
) -> list[HostTime]:
    """Time `blocks` blocks of `calls` calls of each impl in each mode, in random order.

    Raises ValueError for an unknown impl or mode.
    """
    import torch

    known = IMPLS[device.type]
    impls = impls or known
    for name, values, allowed in (("impl", impls, known), ("mode", modes, MODES)):
        if unknown := [value for value in values if value not in allowed]:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {unknown[0]!r}")
    if min(calls, blocks) < 1:
        raise ValueError(f"calls and blocks must be >= 1, got {calls}, {blocks}")
    synchronize = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    cases = list(_cases(impls, modes, device))
    samples: list[list[float]] = [[] for _ in cases]

    def block(case: _Case) -> float:
        with ExitStack() as stack:
            for scope in case.scopes():
                stack.enter_context(scope)
            begin = time.perf_counter()
            case.run(calls)
            elapsed = time.perf_counter() - begin
        synchronize()
        return elapsed

    for case in cases:
        block(case)  # compiles
    end = time.perf_counter() + WARMUP_S
    while time.perf_counter() < end:
        for case in cases:
            block(case)
    order = list(range(len(cases)))
    shuffled = random.Random(seed)
    for _ in range(blocks):
        shuffled.shuffle(order)
        for i in order:
            samples[i].append(block(cases[i]) / calls * 1e6)
    medians = {
        (case.impl, case.mode): statistics.median(taken)
        for case, taken in zip(cases, samples, strict=True)
    }
    rows = []
    for case, taken in zip(cases, samples, strict=True):
        median, base = medians[case.impl, case.mode], medians.get((BASELINE, case.mode))
        p20 = sorted(taken)[len(taken) // 5]
        rows.append(HostTime(case.impl, case.mode, median, p20, median / base if base else None))
    return rows


def host_time_command(
    impl: Annotated[
        str | None, typer.Option(help="Impls, such as cuda,triton; left out, all of the device.")
    ] = None,
    mode: Annotated[str | None, typer.Option(help=f"Modes: {', '.join(MODES)}.")] = None,
    calls: Annotated[int, typer.Option(help="Calls in a block.")] = 200,
    blocks: Annotated[int, typer.Option(help="Blocks of each impl and mode.")] = 50,
    seed: Annotated[int, typer.Option(help="Seed of the order of the blocks.")] = 0,
    device: Annotated[str | None, typer.Option(help="cuda, cuda:1, cpu.")] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file for the rows.")] = None,
    form: Form = TERMINAL,
    as_json: AsJson = False,
) -> None:
    """Time the CPU side of short calls: plain, no_grad, inference_mode, grad needed, compiled.

    Mode `training` is a forward and its backward. Exit code: 2 bad input.
    """
    with bad_input("host-time"):
        where, form = pick_device(device), form_of(form, as_json)
        rows = measure_host_time(
            where,
            tuple(split(impl)) if impl else None,
            tuple(split(mode)) if mode else MODES,
            calls,
            blocks,
            seed,
        )
    from attnscope.common.environment import environment

    facts = environment(where, {"calls": calls, "blocks": blocks, "seed": seed})
    shape = "x".join(map(str, SHAPES[where.type]))
    content = {"env": facts, "rows": [row._asdict() for row in rows]}
    with printed(form, "host-time") as made:
        made |= content
        say(f"{shape} {DTYPES[where.type]}, {blocks} blocks of {calls} calls, {facts.get('cpu')}")
        show_table(_table(rows))
    if output is not None:
        output.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def _table(rows: Sequence[HostTime]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("impl", "mode"):
        table.add_column(name, no_wrap=True)
    for name in ("us/call", "p20", f"/{BASELINE}"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        ratio = f"{row.ratio:.2f}" if row.ratio else "-"
        table.add_row(row.impl, row.mode, f"{row.median_us:.2f}", f"{row.p20_us:.2f}", ratio)
    return table
