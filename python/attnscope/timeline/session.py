"""One launch of the instrumented kernel on a GPU: its marks, and how much they disturb it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from attnscope.common.environment import environment
from attnscope.inputs import Case, make_inputs
from attnscope.timeline import layout
from attnscope.timeline.library import Instrumented, build, source_tree, tile_of, usage_of
from attnscope.timeline.recording import Recording, rows_of_block

# Room for this many times the tiles and steps of an average block, within bounds.
ROOM = 2
MOST_TILE_ROWS, MOST_STEP_ROWS = 1024, 16384
WARMUP = 3
SAMPLES = 25  # of the normal and of the instrumented kernel, in turn
HOLD_CYCLES = 200_000  # about 0.1 ms of waiting on the stream excludes launch overhead


def record(work: Any, device: torch.device, seed: int = 0) -> Recording:
    """Run a dense forward call through the instrumented kernel and read its marks.

    `work` is an `inputs.Case`, or has its fields. `facts` of the result contain the workload, the
    tile, the environment and `disturbance`: median milliseconds of the normal and the instrumented
    kernel, timed in turn with a warm L2, the spills of the latter, and whether both gave the same
    bits. Raises ValueError for a device or workload that has no such kernel.
    """
    work = Case.of(work)
    _check(work, device)
    library, usage, seconds = build(source_tree(), work.dtype)
    with torch.cuda.device(device):
        kernel = Instrumented(library)
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        tile = tile_of(work, sms)
        most_blocks = sms * tile["blocks_per_sm"]
        lanes = layout.CONSUMER + tile["consumers"]
        rows = work.seqlen_q * tile["heads"]
        heads_of_tiles = -(-work.heads_q // (tile["heads"] * tile["heads_per_tile"]))
        tiles = work.batch * heads_of_tiles * -(-rows // tile["block_m"])
        mean_tiles = -(-tiles // min(tiles, most_blocks))
        per_tile = -(-work.seqlen_k // tile["block_n"])
        tile_rows = min(ROOM * mean_tiles + 2, MOST_TILE_ROWS)
        step_rows = min((ROOM * mean_tiles + 2) * per_tile, MOST_STEP_ROWS)
        shape = (most_blocks, rows_of_block(lanes, tile_rows, step_rows), layout.WORDS)
        words = torch.zeros(shape, dtype=torch.int32, device=device)
        kernel.attach(words, lanes, tile_rows, step_rows)
        q, k, v, *_ = make_inputs(work, seed=seed, device=device)

        def normal() -> Any:
            options = {"scale": work.head_dim**-0.5, "causal": work.causal}
            return torch.ops.attnscope.forward(q, k, v, **options, variant=90)

        def instrumented() -> Any:
            return kernel.forward(q, k, v, work.causal, tile)

        medians = _median_ms({"normal": normal, "instrumented": instrumented})
        same = all(torch.equal(a, b) for a, b in zip(normal(), instrumented(), strict=True))
        for _ in range(WARMUP):
            instrumented()
        words.zero_()
        instrumented()
        torch.cuda.synchronize(device)
        marks = words.cpu().numpy().view(np.uint32)
    mine = usage_of(usage, tile)
    facts = {
        "workload": {"mode": "forward", **asdict(work)},
        "tile": tile,
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


def _check(work: Case, device: torch.device) -> None:
    if work.dtype not in ("bfloat16", "float16"):
        raise ValueError(f"dtype must be bfloat16 or float16, got {work.dtype!r}")
    if work.head_dim % 8 or not 8 <= work.head_dim <= 256:
        raise ValueError(f"head_dim must be a multiple of 8 from 8 to 256, got {work.head_dim}")
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
