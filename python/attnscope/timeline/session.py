"""One launch of the instrumented kernel on a GPU: its marks, and how much they disturb it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnscope.common.environment import environment
from attnscope.inputs import Case, make_inputs, make_output_gradients
from attnscope.timeline import layout
from attnscope.timeline.layouts import layout_of
from attnscope.timeline.library import (
    InstrumentedBackward,
    InstrumentedForward,
    build,
    source_tree,
    tile_of,
    usage_of,
)
from attnscope.timeline.recording import Recording, rows_of_block

# Room for this many times the tiles and steps of an average block, within bounds.
ROOM = 2
MOST_TILE_ROWS, MOST_STEP_ROWS = 1024, 16384
WARMUP = 3
SAMPLES = 25  # of the normal and of the instrumented kernel, in turn
HOLD_CYCLES = 200_000  # about 0.1 ms of waiting on the stream excludes launch overhead


def record(work: Any, device: torch.device, seed: int = 0, mode: str = "forward") -> Recording:
    """Run a dense call through the instrumented kernel and read its marks.

    `work` is an `inputs.Case`, or has its fields; `mode` is "forward" or "backward" (head dims up
    to 128). `facts` of the result contain the workload, the tile, the environment and
    `disturbance`: median milliseconds of the normal and the instrumented call, timed in turn with a
    warm L2, the spills of the latter, and whether both gave the same bits (dq, which the backward
    sums in any order: about the same). Raises ValueError for a device or workload that has no such
    kernel.
    """
    work = Case.of(work)
    _check(work, device, mode)
    library, usage, seconds = build(source_tree(), work.dtype, mode)
    with torch.cuda.device(device):
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        tile = tile_of(work, sms, mode)
        facts: dict[str, Any] = {"workload": {"mode": mode, **asdict(work)}, "tile": tile}
        most_blocks = sms * tile["blocks_per_sm"]
        lanes = layout_of(facts).consumer + tile["consumers"]
        tiles, per_tile = _work_of(work, tile, mode)
        mean_tiles = -(-tiles // min(tiles, most_blocks))
        tile_rows = min(ROOM * mean_tiles + 2, MOST_TILE_ROWS)
        step_rows = min((ROOM * mean_tiles + 2) * per_tile, MOST_STEP_ROWS)
        shape = (most_blocks, rows_of_block(lanes, tile_rows, step_rows), layout.WORDS)
        words = torch.zeros(shape, dtype=torch.int32, device=device)
        normal, instrumented, attach = _calls(work, device, seed, mode, library, tile)
        attach(words, lanes, tile_rows, step_rows)
        medians = _median_ms({"normal": normal, "instrumented": instrumented})
        same = _agree(normal(), instrumented(), mode)
        for _ in range(WARMUP):
            instrumented()
        words.zero_()
        instrumented()
        torch.cuda.synchronize(device)
        marks = words.cpu().numpy().view(np.uint32)
    mine = usage_of(usage, tile, mode)
    facts |= {
        "env": environment(device, {"seed": seed, "l2": "warm"}),
        "disturbance": {
            "normal_ms": medians["normal"],
            "instrumented_ms": medians["instrumented"],
            "slowdown": medians["instrumented"] / medians["normal"],
            "same_output": same,
            "registers": mine["registers"],
            "spill_bytes": mine["spill_store_bytes"] + mine["spill_load_bytes"],
            "compile_s": round(seconds, 1),
        },
    }
    return Recording.from_words(marks, lanes, tile_rows, step_rows, facts)


def _work_of(work: Case, tile: Mapping[str, int], mode: str) -> tuple[int, int]:
    """Tiles of a call, and the most steps of one."""
    if mode == "backward":
        tiles = work.batch * work.heads_kv * -(-work.seqlen_k // tile["block_n"])
        return tiles, work.heads_q // work.heads_kv * -(-work.seqlen_q // tile["block_m"])
    rows = work.seqlen_q * tile["heads"]
    heads_of_tiles = -(-work.heads_q // (tile["heads"] * tile["heads_per_tile"]))
    tiles = work.batch * heads_of_tiles * -(-rows // tile["block_m"])
    return tiles, -(-work.seqlen_k // tile["block_n"])


def _calls(
    work: Case, device: torch.device, seed: int, mode: str, library: Path, tile: dict[str, int]
) -> tuple[Callable[[], Any], Callable[[], Any], Callable[..., None]]:
    """The normal call, the instrumented one, and how its buffer is set."""
    q, k, v, *_ = make_inputs(work, seed=seed, device=device)
    options = {"scale": work.head_dim**-0.5, "causal": work.causal, "variant": 90}
    if mode == "forward":
        forward = InstrumentedForward(library)
        return (
            lambda: torch.ops.attnscope.forward(q, k, v, **options),
            lambda: forward.forward(q, k, v, work.causal, tile),
            forward.attach,
        )
    backward = InstrumentedBackward(library)
    dout, _ = make_output_gradients(work, seed=seed, device=device)
    out, lse = torch.ops.attnscope.forward(q, k, v, **options)
    return (
        lambda: torch.ops.attnscope.backward(dout, q, k, v, out, lse, **options),
        lambda: backward.backward(dout, q, k, v, out, lse, work.causal, tile),
        backward.attach,
    )


def _agree(normal: Sequence[torch.Tensor], marked: Sequence[torch.Tensor], mode: str) -> bool:
    """Whether both calls gave the same bits; dq of a backward: within the rounding of its sum."""
    if mode == "backward":
        (dq, *normal), (marked_dq, *marked) = normal, marked
        error = (dq.float() - marked_dq.float()).abs().max()
        if error > 0.01 * dq.float().abs().max():
            return False
    return all(torch.equal(a, b) for a, b in zip(normal, marked, strict=True))


def _median_ms(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Median milliseconds of each call on the current stream, timed in turn with a warm L2."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for at in range(WARMUP + SAMPLES):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(HOLD_CYCLES)
            begin.record()
            call()
            end.record()
            end.synchronize()
            if at >= WARMUP:
                samples[name].append(begin.elapsed_time(end))
    return {name: float(np.median(values)) for name, values in samples.items()}


def _check(work: Case, device: torch.device, mode: str) -> None:
    if mode not in ("forward", "backward"):
        raise ValueError(f"mode must be forward or backward, got {mode!r}")
    if work.dtype not in ("bfloat16", "float16"):
        raise ValueError(f"dtype must be bfloat16 or float16, got {work.dtype!r}")
    most = 256 if mode == "forward" else 128  # the wide backward kernel has no marks
    if work.head_dim % 8 or not 8 <= work.head_dim <= most:
        raise ValueError(f"head_dim must be a multiple of 8 from 8 to {most}, got {work.head_dim}")
    for name, value in (("batch", work.batch), ("seq_len", min(work.seqlen_q, work.seqlen_k))):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if work.heads_kv < 1 or work.heads_q < 1 or work.heads_q % work.heads_kv:
        raise ValueError(
            f"heads must be a multiple of kv_heads, got {work.heads_q} and {work.heads_kv}"
        )
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        name = "cpu" if device.type != "cuda" else torch.cuda.get_device_name(device)
        raise ValueError(f"device must be a Hopper GPU (H100, H200, GH200), got {name}")
