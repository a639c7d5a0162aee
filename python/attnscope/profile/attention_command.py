"""The command of profiling/profile_kernels.py: one attention impl, profiled by whoever is there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnscope.bench.command import SHAPE, bad_input, pick_device
from attnscope.bench.show import say
from attnscope.bench.workloads import DTYPE_SHORT, Workload
from attnscope.profile.attached import attached_tool
from attnscope.profile.session import annotate, profile, synchronize
from attnscope.profile.tables import ProfileError
from attnscope.ranges import MEASURE, WARMUP

if TYPE_CHECKING:
    import torch

    from attnscope.bench.impls import Impl
    from attnscope.profile.result import Profile

WARMUP_CALLS = 3
RETRIES = 2


def attention_command(
    seq_len: Annotated[int, typer.Option(min=1, help="Length of queries and keys.")] = 512,
    impl: Annotated[
        str | None,
        typer.Option(help="Impl or alias: cuda, triton, flash, naive ...; left out, cuda or cpu."),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Key and value heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="Head dim.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16, fp32 or fp64.")] = None,
    causal: Annotated[bool, typer.Option("--causal/--no-causal", help="Causal mask.")] = True,
    iterations: Annotated[int, typer.Option(min=1, help="Calls that are recorded.")] = 10,
    output: Annotated[
        Path, typer.Option(help="Folder for tables, memory data, page and chrome trace.")
    ] = Path("profile_output"),
    no_profile: Annotated[
        bool, typer.Option("--no-profile", help="Run the ranges only, PyTorch's profiler off.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    device: Annotated[str | None, typer.Option(help="cuda, cpu; left out, a GPU if any.")] = None,
) -> None:
    """Run an impl in the ranges warmup and measure, and profile the second.

    Under nsys, ncu or compute-sanitizer PyTorch's profiler stays off by itself. Exit codes: 1 the
    profile is not whole or not of this impl, 2 bad input.
    """
    from attnscope.bench.impls import Unsupported, resolve

    with bad_input("profile_kernels"):
        where = pick_device(device)
        (one,) = resolve([impl or where.type])
        shape: dict[str, Any] = dict(SHAPE[where.type]) | {"seqlen": seq_len, "causal": causal}
        long = {short: name for name, short in DTYPE_SHORT.items()}
        given = {"batch": batch, "heads_q": heads, "heads_kv": kv_heads, "head_dim": head_dim}
        given["dtype"] = long.get(str(dtype), dtype)  # type: ignore[assignment]
        shape |= {key: value for key, value in given.items() if value is not None}
        work = Workload.of(**shape)
        try:
            call = _prepare(one, work, seed, where)
        except Unsupported as refusal:
            raise ValueError(f"impl: {one.name} cannot do {work.id}: {refusal}") from None
        if not (no_profile or attached_tool()):
            make_folder(output)
    say(f"{one.name}, {work.id}, {where}")
    if tool := attached_tool():
        say(f"runs under {tool[0]} ({tool[1]}): PyTorch's profiler stays off")
        no_profile = True
    with annotate(WARMUP):
        for _ in range(WARMUP_CALLS):
            call()
        synchronize()
    if no_profile:
        _measure(call, iterations)
        say(f"ran {iterations} calls in the range {MEASURE!r}")
        return
    try:
        found = _record(one.name, call, iterations)
        _prove(one, found, where)
        found.print()
        _write(found, output)
    except ProfileError as error:
        say(f"profile_kernels: {error}", "red")
        raise typer.Exit(1) from None


def make_folder(path: Path) -> None:
    """Make the folder of the results before time goes into them. Raises ValueError if it cannot."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"output: {path}: {error.strerror}") from None


def _prepare(impl: Impl, work: Workload, seed: int, device: torch.device) -> Any:
    """A callable that runs the impl once. Raises Unsupported where it cannot."""
    from attnscope.bench.impls import Unsupported

    if why := impl.cannot(work, device):
        raise Unsupported(why)
    return impl.make(work, work.inputs(device, seed))


def _measure(call: Any, iterations: int) -> None:
    with annotate(MEASURE):
        for _ in range(iterations):
            call()
        synchronize()


def _record(name: str, call: Any, iterations: int) -> Profile:
    recorded = profile(name, warmup=2, retries=RETRIES, memory=True)(_measure)
    recorded(call, iterations)
    return recorded.profile


def _prove(impl: Impl, found: Profile, device: torch.device) -> None:
    """Raises ProfileError where the kernels (on a CPU: the ops) are not those of the impl."""
    if device.type == "cuda":
        names = [kernel.name for kernel in found.trace.kernels]
    else:
        names = [event.name for event in found.trace.cpu if event.kind == "op"]
    if why := impl.unproved(list(dict.fromkeys(names)), device.type):
        raise ProfileError(why)


def _write(found: Profile, folder: Path) -> None:
    from attnscope.profile.export import write_csv

    write_csv(found, folder)
    found.to_json(folder / "profile.json")
    found.to_html(folder / "profile.html")
    found.export_chrome_trace(folder / "trace.json")
    names = ", ".join(sorted(path.name for path in folder.iterdir()))
    say(f"wrote {names} in {folder}")
