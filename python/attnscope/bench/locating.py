"""`attnscope check --locate`: where a result of an impl goes wrong, by element, tile and cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from attnscope.bench.calls import build_call
from attnscope.bench.interface import Impl
from attnscope.bench.workloads import Workload
from attnscope.common.console import explain, say
from attnscope.kernels import Call, choose_backward, choose_forward
from attnscope.numerics.locate import Location, locate_backward, locate_forward

NEEDED = ("q", "k", "v")
OURS = ("cuda", "cuda-sm80")  # impls whose tiles are known


def locate(
    impl: Impl, work: Workload, inputs: Sequence[Any], dout: torch.Tensor | None
) -> Location | None:
    """Where the result of one call goes wrong; None where it equals fp64.

    `inputs` are (q, k, v, None, None), dense. Raises ValueError for a packed batch, Unsupported
    where the impl cannot do the call; exceptions of the impl propagate.
    """
    if work.seqlens is not None:
        raise ValueError("locate must have a dense workload, got a packed one")
    q, k, v = inputs[:3]
    options: dict[str, Any] = {
        "causal": work.causal, "window": work.window, "softcap": work.softcap,
    }  # fmt: skip
    result = build_call(impl, work, (q, k, v, None, None), dout)()
    if work.mode != "backward":
        block = _block(impl, work, q.device, backward=False)
        if found := _odd(locate_forward(q, k, v, *result[:2], **options, block=block), work):
            return found
    if work.mode == "forward":
        return None
    assert dout is not None
    block = _block(impl, work, q.device, backward=True)
    return locate_backward(dout, q, k, v, result[-3:], **options, block=block)


def _odd(found: Location | None, work: Workload) -> Location | None:
    """The location; a forward before its backward counts only where it is not finite."""
    if found is None or work.mode == "forward" or found.error != found.error:
        return found
    return None


def _block(
    impl: Impl, work: Workload, device: torch.device, backward: bool
) -> tuple[int, int] | None:
    """(query rows, keys) of the tile that serves the call; None for kernels of others."""
    if impl.name not in OURS or device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    major, minor = (8, 0) if impl.name == "cuda-sm80" else (properties.major, properties.minor)
    call = Call(
        **{name: getattr(work, name) for name in Call._fields if hasattr(work, name)},
        packed=False, sms=properties.multi_processor_count, capability=10 * major + minor,
    )  # fmt: skip
    tile = (choose_backward if backward else choose_forward)(call)["tile"]
    return int(tile["block_m"]), int(tile["block_n"])


def report(
    impl: Impl, work: Workload, inputs: Sequence[Any], dout: torch.Tensor | None
) -> Location | None:
    """`locate`, printed."""
    try:
        found = locate(impl, work, inputs, dout)
    except ValueError as error:
        say(f"     {error}", "red")
        return None
    except Exception as error:  # of the impl
        say(f"     {explain(error)}", "red")
        return None
    for line in found.lines() if found else ["equal to fp64 everywhere"]:
        say(f"     {line}")
    return found


def read_tensors(path: Path, options: Mapping[str, Any]) -> tuple[Workload, dict[str, Any]]:
    """The workload and tensors of a file of torch.save: a dict of q, k, v and, for gradients, dout.

    Raises ValueError for another file or shapes that are no call.
    """
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many types
        raise ValueError(f"inputs must be a file of torch.save, got {path}: {error}") from None
    if not isinstance(tensors, dict) or not all(
        isinstance(tensors.get(name), torch.Tensor) and tensors[name].dim() == 4 for name in NEEDED
    ):
        raise ValueError(f"inputs must be a dict of q, k and v [B, S, H, D], got another in {path}")
    q, k, v = (tensors[name] for name in NEEDED)
    work = Workload.of(
        batch=q.shape[0], seqlen_q=q.shape[1], seqlen_k=k.shape[1], heads_q=q.shape[2],
        heads_kv=k.shape[2], head_dim=q.shape[3], head_dim_v=v.shape[3],
        dtype=str(q.dtype).removeprefix("torch."),
        mode="both" if "dout" in tensors else "forward", **options,
    )  # fmt: skip
    return work, tensors


def locate_saved(
    path: Path, impls: list[Impl], causal: bool, device: torch.device
) -> list[dict[str, Any]]:
    """Locate errors of impls on saved tensors; a row for each: is it finite, and its location."""
    work, tensors = read_tensors(path, {"causal": causal})
    on_device = {name: tensor.to(device) for name, tensor in tensors.items()}
    results = []
    for each in impls:
        if reason := each.cannot(work, device):
            say(f"{each.name}: skipped: {reason}", "dim")
            continue
        say(f"{each.name}, {work.id}")
        qkv = (on_device["q"], on_device["k"], on_device["v"], None, None)
        found = report(each, work, qkv, on_device.get("dout"))
        finite = found is None or found.error == found.error
        row = {"impl": each.name, "workload": work.id, "finite": finite}
        results.append(row | {"location": found and found.facts()})
    return results


def locate_made(
    impl: Impl, work: Workload, kind: str, seed: int, device: torch.device
) -> Location | None:
    """Locate the error of an impl on inputs that it failed on."""
    dout = None
    if work.mode != "forward":
        dout = work.output_gradient(device, seed, kind)
    return report(impl, work, work.inputs(device, seed, kind), dout)
