"""The command of profiling/profile_kernels.py: attention impls under any profiler.

Each impl and pass runs in an NVTX range of its own, `<impl>-forward` or `<impl>-backward` of the
domain `attnscope`, inside `measure`; the warm-up is in none of them. ncu and nsys select by these.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnscope.bench.command import SHAPE
from attnscope.bench.workload_text import parse_workload
from attnscope.bench.workloads import DTYPE_SHORT, Workload
from attnscope.common.console import say
from attnscope.common.forms import TERMINAL, AsJson, Form, form_of
from attnscope.common.options import Causal, Device, bad_input, make_folder, pick_device, split
from attnscope.common.tools import find_tool
from attnscope.profile.errors import ProfileError
from attnscope.profile.options import Showing
from attnscope.profile.record.attached import attached_tool
from attnscope.profile.record.session import annotate, profile, synchronize
from attnscope.profile.reports import show
from attnscope.ranges import DOMAIN, MEASURE, WARMUP
from attnscope.studies.outputs import bad_output

if TYPE_CHECKING:
    import torch

    from attnscope.bench.impls import Impl
    from attnscope.profile.api import Profile

COMMAND = "profile_kernels"
WARMUP_CALLS = 3
RETRIES = 2
MOST_ROWS = 20  # of each table
MOST_REST_S = 0.1  # a first call may compile for long
SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")
MODELS_VARIABLE = "ATTNSCOPE_RANGE_MODELS"  # the file for FLOPs and bytes of each range
LARGEST = 2**31 - 1  # of each size
FORWARD, BACKWARD = "forward", "backward"

SeqLen = Annotated[int, typer.Option(min=1, max=LARGEST, help="Length of queries and keys.")]
Impls = Annotated[
    str | None,
    typer.Option(help="Impls or aliases: cuda,triton,flash ...; left out, cuda or cpu."),
]
Call = Annotated[
    str | None,
    typer.Option(help="Instead of sizes: a call, such as b2-s8192-h16-d128-causal."),
]
Mode = Annotated[str | None, typer.Option(help="Passes to run: forward, backward or both.")]
Rest = Annotated[
    float, typer.Option(min=0, help="Idle time after each call, as a multiple of its time.")
]
Folder = Annotated[
    Path, typer.Option(help="Folder for tables, memory data, page and chrome trace.")
]
Blocking = Annotated[
    bool,
    typer.Option(
        "--blocking",
        help="CUDA_LAUNCH_BLOCKING=1: an error is raised by the launch that caused it.",
    ),
]
Sanitizer = Annotated[
    str | None,
    typer.Option(
        help="Run under compute-sanitizer: memcheck (out of bounds), racecheck (shared memory),"
        " synccheck (barriers) or initcheck (uninitialised reads). Slow: use small sizes."
    ),
]


@dataclass(frozen=True)
class Pass:
    """A forward or backward pass of an impl, ready to be called."""

    impl: Impl
    kind: str  # FORWARD or BACKWARD
    call: Callable[[], Any]

    @property
    def range(self) -> str:
        """The name of its range."""
        return f"{self.impl.name}-{self.kind}"


def attention_command(
    seq_len: SeqLen = 512,
    impl: Impls = None,
    batch: Annotated[int | None, typer.Option(min=1, max=LARGEST, help="Sequences.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, max=LARGEST, help="Query heads.")] = None,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, max=LARGEST, help="Key and value heads.")
    ] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, max=LARGEST, help="Head dim.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16, fp32 or fp64.")] = None,
    causal: Causal = True,
    workload: Call = None,
    mode: Mode = None,
    backward: Annotated[
        bool, typer.Option("--backward", help="Run backward passes too, of impls that have one.")
    ] = False,
    iterations: Annotated[int, typer.Option(min=1, help="Calls of each pass.")] = 10,
    rest: Rest = 0.0,
    output: Folder = Path("profile_output"),
    no_profile: Annotated[
        bool, typer.Option("--no-profile", help="Run the ranges only, PyTorch's profiler off.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    device: Device = None,
    blocking: Blocking = False,
    sanitizer: Sanitizer = None,
    form: Form = TERMINAL,
    as_json: AsJson = False,
) -> None:
    """Run impls in the ranges warmup and measure, and profile the second.

    Inside measure each impl and pass has a range, such as cuda-forward. Under nsys, ncu or
    compute-sanitizer PyTorch's profiler stays off by itself. Exit codes: 1 a pass failed, or the
    profile is not whole or not of these impls, 2 bad input.
    """
    from attnscope.bench.impls import resolve

    if blocking:
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"  # before the driver is initialised
    with bad_input(COMMAND):
        form = form_of(form, as_json)
        _sanitize(sanitizer)
        where = pick_device(device)
        impls = resolve(split(impl or where.type))
        sizes = {
            "seqlen": seq_len, "batch": batch, "heads_q": heads, "heads_kv": kv_heads,
            "head_dim": head_dim, "dtype": dtype, "causal": causal,
        }  # fmt: skip
        work = _call(workload, sizes, where.type)
        kinds = _kinds(mode, backward)
        with _failures():
            passes = [one for each in impls for one in prepare(each, work, seed, where, kinds)]
        if not passes:
            raise ValueError(f"impl must name at least one, got {impl!r}")
        tool = attached_tool()
        if not (no_profile or tool):
            make_folder(output)
        _write_models(passes, work, iterations)
    name = ", ".join(each.name for each in impls)
    aside = form != TERMINAL
    say(f"{name}, {work.id}, {where}", stderr=aside)
    if tool:
        say(f"runs under {tool[0]} ({tool[1]}): PyTorch's profiler stays off", stderr=aside)
    with _failures():
        _warm_up(passes)
        if no_profile or tool:
            _measure(passes, iterations, rest)
            ranges = ", ".join(one.range for one in passes)
            say(f"ran {iterations} calls in each NVTX range of the domain {DOMAIN!r}: {ranges}")
            return
        profiled = _record(name, passes, iterations, rest)
        _verify(passes, profiled, where)
    with _failures(), bad_output(COMMAND, output):
        how = "text" if form == TERMINAL else form
        show(profiled, Showing(MOST_ROWS, None, False, how, output, ()))


@contextmanager
def _failures() -> Iterator[None]:
    """Turn what a pass or a profile may raise into one line and exit code 1."""
    from attnscope.common.console import explain

    try:
        yield
    except typer.Exit:  # a RuntimeError too
        raise
    except (RuntimeError, MemoryError) as error:
        message = str(error) if isinstance(error, ProfileError) else explain(error)
        say(f"{COMMAND}: {message}", "red", stderr=True)
        raise typer.Exit(1) from None


def _sanitize(tool: str | None) -> None:
    """Start this process again under compute-sanitizer, unless it runs under it.

    Raises ValueError for another tool, and where compute-sanitizer is missing.
    """
    attached = attached_tool()
    if tool is None or (attached and attached[0] == "compute-sanitizer"):
        return
    if tool not in SANITIZERS:
        raise ValueError(f"sanitizer must be one of {', '.join(SANITIZERS)}, got {tool!r}")
    found = find_tool("compute-sanitizer")
    if found.path is None or found.missing:
        raise ValueError(f"sanitizer must be installed, got none: {found.missing}")
    command = [found.path, "--tool", tool, "--error-exitcode", "1", sys.executable]
    os.execv(found.path, [*command, *sys.orig_argv[1:]])


def _call(text: str | None, sizes: dict[str, Any], device_type: str) -> Workload:
    """The call of --workload, or of the sizes. The sizes left out are None."""
    if text is not None:
        return replace(parse_workload(text), mode=FORWARD, deterministic=False)
    long = {short: name for name, short in DTYPE_SHORT.items()}
    sizes = sizes | {"dtype": long.get(str(sizes["dtype"]), sizes["dtype"])}
    given = {key: value for key, value in sizes.items() if value is not None}
    return Workload.of(**dict(SHAPE[device_type]) | given)


def _kinds(mode: str | None, backward: bool) -> tuple[str, ...]:
    """The passes to run. Raises ValueError for an unknown mode."""
    kinds = {FORWARD: (FORWARD,), BACKWARD: (BACKWARD,), "both": (FORWARD, BACKWARD)}
    if mode is not None and mode not in kinds:
        raise ValueError(f"mode must be one of {', '.join(kinds)}, got {mode!r}")
    return kinds[mode or ("both" if backward else FORWARD)]


def _write_models(passes: Sequence[Pass], work: Workload, calls: int) -> None:
    """Write FLOPs and least bytes of each pass where the variable of `attnscope ncu` asks it."""
    path = os.environ.get(MODELS_VARIABLE)
    if not path:
        return
    modes = {one.range: replace(work, mode=one.kind) for one in passes}
    models = {
        f"{name}@{DOMAIN}": {
            "flops": calls * each.flops(),
            "bytes": calls * each.bytes(),
            "calls": calls,
            "rule": "visible pairs",
        }
        for name, each in modes.items()
    }
    Path(path).write_text(json.dumps(models, indent=1) + "\n")


def prepare(
    impl: Impl, work: Workload, seed: int, device: torch.device, kinds: Sequence[str]
) -> list[Pass]:
    """The passes of an impl that are in `kinds`. A missing backward is a message, beside a forward.

    Raises ValueError where the impl cannot do the workload.
    """
    from attnscope.bench.impls import Unsupported

    inputs = work.inputs(device, seed)
    qkv = [t.requires_grad_(BACKWARD in kinds) for t in inputs[:3]]
    try:
        if why := impl.cannot(work, device):
            raise Unsupported(why)
        passes = [Pass(impl, FORWARD, impl.make(work, inputs))]
    except Unsupported as refusal:
        raise ValueError(f"impl must be able to do {work.id}, got {impl.name}: {refusal}") from None
    if BACKWARD in kinds:
        trained = replace(work, mode="backward")
        call = impl.cannot(trained, device) or _backward(passes[0].call()[0], qkv)
        if not isinstance(call, str):
            passes.append(Pass(impl, BACKWARD, call))
        elif FORWARD in kinds:
            say(f"{impl.name} runs its forward only: {call}")
        else:
            raise ValueError(f"impl must have a backward for {work.id}, got {impl.name}: {call}")
    return [one for one in passes if one.kind in kinds]


def _backward(out: torch.Tensor, qkv: Sequence[torch.Tensor]) -> Callable[[], Any] | str:
    """A callable that runs the backward of a forward pass repeatedly, or why there is none."""
    import torch

    grad = torch.randn_like(out)

    def call() -> Any:
        return torch.autograd.grad(out, qkv, grad, retain_graph=True)

    try:
        with torch.autograd.set_multithreading_enabled(False):
            call()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # packages without a backward fail in many ways
        return str(error).partition("\n")[0].partition(";")[0] or type(error).__name__
    return call


def _warm_up(passes: Sequence[Pass]) -> None:
    with annotate(WARMUP):
        for one in passes:
            for _ in range(WARMUP_CALLS):
                one.call()
        synchronize()


@contextmanager
def resting(rest: float) -> Iterator[None]:
    """Wait for the GPU after a call, then for `rest` times as long as the call took."""
    begin = time.perf_counter()
    yield
    synchronize()
    time.sleep(min(rest * (time.perf_counter() - begin), MOST_REST_S))


def _measure(passes: Sequence[Pass], iterations: int, rest: float = 0.0) -> None:
    import torch

    # NVTX ranges are per thread: backward must launch its kernels from this thread.
    with annotate(MEASURE), torch.autograd.set_multithreading_enabled(False):
        for one in passes:
            with annotate(one.range):
                for _ in range(iterations):
                    with resting(rest) if rest else nullcontext():
                        one.call()
                synchronize()


def _record(name: str, passes: Sequence[Pass], iterations: int, rest: float) -> Profile:
    recorded = profile(name, warmup=2, retries=RETRIES, memory=True)(_measure)
    recorded(passes, iterations, rest)
    return recorded.profile


def _verify(passes: Sequence[Pass], found: Profile, device: torch.device) -> None:
    """Raises ProfileError if the kernels (CPU: the ops) of a pass do not match its impl."""
    trace = found.trace
    events: Sequence[Any] = trace.kernels
    if device.type != "cuda":
        events = [event for event in trace.cpu if event.kind == "op"]
    for one in passes:
        names = [
            event.name
            for event in events
            if any(outer.name == one.range for outer in found.attribution.ranges(event))
        ]
        if why := one.impl.mismatch(list(dict.fromkeys(names)), device.type, one.kind):
            raise ProfileError(why)


if __name__ == "__main__":
    typer.run(attention_command)
