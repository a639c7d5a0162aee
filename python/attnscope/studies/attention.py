"""The command of profiling/profile_kernels.py: attention impls under any profiler.

Each impl and pass runs in an NVTX range of its own, `<impl>-forward` or `<impl>-backward` of the
domain `attnscope`, inside `measure`; the warm-up is in none of them. ncu and nsys select by these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnscope.bench.command import SHAPE
from attnscope.bench.workloads import DTYPE_SHORT, Workload
from attnscope.common.console import say
from attnscope.common.options import Causal, Device, bad_input, make_folder, pick_device, split
from attnscope.profile.errors import ProfileError
from attnscope.profile.record.attached import attached_tool
from attnscope.profile.record.session import annotate, profile, synchronize
from attnscope.profile.render.formats import write_all
from attnscope.ranges import DOMAIN, MEASURE, WARMUP
from attnscope.studies.outputs import bad_output

if TYPE_CHECKING:
    import torch

    from attnscope.bench.impls import Impl
    from attnscope.profile.api import Profile

COMMAND = "profile_kernels"
WARMUP_CALLS = 3
RETRIES = 2
LARGEST = 2**31 - 1  # of each size
FORWARD, BACKWARD = "forward", "backward"


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
    seq_len: Annotated[
        int, typer.Option(min=1, max=LARGEST, help="Length of queries and keys.")
    ] = 512,
    impl: Annotated[
        str | None,
        typer.Option(help="Impls or aliases: cuda,triton,flash ...; left out, cuda or cpu."),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, max=LARGEST, help="Sequences.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, max=LARGEST, help="Query heads.")] = None,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, max=LARGEST, help="Key and value heads.")
    ] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, max=LARGEST, help="Head dim.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16, fp32 or fp64.")] = None,
    causal: Causal = True,
    backward: Annotated[
        bool, typer.Option("--backward", help="Run backward passes too, of impls that have one.")
    ] = False,
    iterations: Annotated[int, typer.Option(min=1, help="Calls of each pass.")] = 10,
    output: Annotated[
        Path, typer.Option(help="Folder for tables, memory data, page and chrome trace.")
    ] = Path("profile_output"),
    no_profile: Annotated[
        bool, typer.Option("--no-profile", help="Run the ranges only, PyTorch's profiler off.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    device: Device = None,
) -> None:
    """Run impls in the ranges warmup and measure, and profile the second.

    Inside measure each impl and pass has a range, such as cuda-forward. Under nsys, ncu or
    compute-sanitizer PyTorch's profiler stays off by itself. Exit codes: 1 a pass failed, or the
    profile is not whole or not of these impls, 2 bad input.
    """
    from attnscope.bench.impls import resolve

    with bad_input(COMMAND):
        where = pick_device(device)
        impls = resolve(split(impl or where.type))
        shape: dict[str, Any] = dict(SHAPE[where.type]) | {"seqlen": seq_len, "causal": causal}
        long = {short: name for name, short in DTYPE_SHORT.items()}
        given = {
            "batch": batch, "heads_q": heads, "heads_kv": kv_heads, "head_dim": head_dim,
            "dtype": long.get(str(dtype), dtype),
        }  # fmt: skip
        shape |= {key: value for key, value in given.items() if value is not None}
        work = Workload.of(**shape)
        with _failures():
            passes = [one for each in impls for one in _prepare(each, work, seed, where, backward)]
        if not passes:
            raise ValueError(f"impl must name at least one, got {impl!r}")
        tool = attached_tool()
        if not (no_profile or tool):
            make_folder(output)
    name = ", ".join(each.name for each in impls)
    say(f"{name}, {work.id}, {where}")
    if tool:
        say(f"runs under {tool[0]} ({tool[1]}): PyTorch's profiler stays off")
    with _failures():
        _warm_up(passes)
        if no_profile or tool:
            _measure(passes, iterations)
        else:
            profiled = _record(name, passes, iterations)
            _verify(passes, profiled, where)
            profiled.print()
    if no_profile or tool:
        ranges = ", ".join(one.range for one in passes)
        say(f"ran {iterations} calls in each NVTX range of the domain {DOMAIN!r}: {ranges}")
        return
    with _failures(), bad_output(COMMAND, output):
        say(write_all(profiled, output))


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


def _prepare(
    impl: Impl, work: Workload, seed: int, device: torch.device, backward: bool
) -> list[Pass]:
    """The passes of an impl; only the forward, with a message, if there is no backward.

    Raises ValueError where the impl cannot do the workload.
    """
    from attnscope.bench.impls import Unsupported

    inputs = work.inputs(device, seed)
    qkv = [t.requires_grad_(backward) for t in inputs[:3]]
    try:
        if why := impl.cannot(work, device):
            raise Unsupported(why)
        passes = [Pass(impl, FORWARD, impl.make(work, inputs))]
    except Unsupported as refusal:
        raise ValueError(f"impl must be able to do {work.id}, got {impl.name}: {refusal}") from None
    if not backward:
        return passes
    trained = replace(work, mode="backward")
    call = impl.cannot(trained, device) or _backward(passes[0].call()[0], qkv)
    if isinstance(call, str):
        say(f"{impl.name} runs its forward only: {call}")
        return passes
    return [*passes, Pass(impl, BACKWARD, call)]


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


def _measure(passes: Sequence[Pass], iterations: int) -> None:
    import torch

    # NVTX ranges are per thread: backward must launch its kernels from this thread.
    with annotate(MEASURE), torch.autograd.set_multithreading_enabled(False):
        for one in passes:
            with annotate(one.range):
                for _ in range(iterations):
                    one.call()
                synchronize()


def _record(name: str, passes: Sequence[Pass], iterations: int) -> Profile:
    recorded = profile(name, warmup=2, retries=RETRIES, memory=True)(_measure)
    recorded(passes, iterations)
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
