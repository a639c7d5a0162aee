"""One launch of the instrumented kernel on a GPU: its marks, and how much they disturb it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from attnscope.bench.store import environment
from attnscope.bench.timing import Settings, make_timer, time_interleaved
from attnscope.bench.workloads import Workload
from attnscope.timeline import layout
from attnscope.timeline.library import Instrumented, build, source_tree, usage_of
from attnscope.timeline.recording import Recording, rows_of_block

# Room for this many times the tiles and steps of an average block, within bounds.
ROOM = 2
MOST_TILE_ROWS, MOST_STEP_ROWS = 1024, 16384
WARMUP = 3


def record(work: Workload, device: torch.device, seed: int = 0) -> Recording:
    """Run a dense forward workload through the instrumented kernel and read its marks.

    `facts` of the result hold the workload, the tile, the environment and `disturbance`: median
    milliseconds of the normal and the instrumented kernel, timed in turn with a warm L2, the spills
    of the latter, and whether both gave the same bits. Raises ValueError for a device or workload
    that has no such kernel.
    """
    _check(work, device)
    library, usage, seconds = build(source_tree())
    with torch.cuda.device(device):
        kernel = Instrumented(library)
        heads = work.heads_q, work.heads_kv
        tile = kernel.tile(work.head_dim, work.seqlen_q, work.batch, *heads, work.causal)
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        most_blocks = sms * tile["blocks_per_sm"]
        lanes = layout.CONSUMER + tile["consumers"]
        rows = work.seqlen_q * tile["heads"]
        heads_of_tiles = -(-work.heads_q // (tile["heads"] * tile["own_heads"]))
        tiles = work.batch * heads_of_tiles * -(-rows // tile["block_m"])
        mean_tiles = -(-tiles // min(tiles, most_blocks))
        per_tile = -(-work.seqlen_k // tile["block_n"])
        tile_rows = min(ROOM * mean_tiles + 2, MOST_TILE_ROWS)
        step_rows = min((ROOM * mean_tiles + 2) * per_tile, MOST_STEP_ROWS)
        shape = (most_blocks, rows_of_block(lanes, tile_rows, step_rows), layout.WORDS)
        words = torch.zeros(shape, dtype=torch.int32, device=device)
        kernel.attach(words, lanes, tile_rows, step_rows)
        q, k, v, *_ = work.inputs(device, seed)

        def normal() -> Any:
            options = {"scale": work.head_dim**-0.5, "causal": work.causal}
            return torch.ops.attnscope.forward(q, k, v, **options, variant=90)

        def instrumented() -> Any:
            return kernel.forward(q, k, v, work.causal)

        settings = Settings(l2="warm", budget_s=1.0)
        calls = {"normal": [normal], "instrumented": [instrumented]}
        timings = time_interleaved(calls, make_timer(device, settings), settings)
        for timing in timings.values():
            if timing.error is not None:
                raise timing.error
        same = all(torch.equal(a, b) for a, b in zip(normal(), instrumented(), strict=True))
        for _ in range(WARMUP):
            instrumented()
        words.zero_()
        instrumented()
        torch.cuda.synchronize(device)
        marks = words.cpu().numpy().view(np.uint32)
    medians = {name: float(np.median(t.samples_ms)) for name, t in timings.items()}
    mine = usage_of(usage, tile, work.dtype)
    facts = {
        "workload": work.to_dict(),
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


def _check(work: Workload, device: torch.device) -> None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        name = "cpu" if device.type != "cuda" else torch.cuda.get_device_name(device)
        raise ValueError(f"device: {name} cannot run the Hopper kernel; allowed: H100, H200, GH200")
    if work.dtype not in ("bfloat16", "float16"):
        raise ValueError(f"dtype: {work.dtype!r} is not one of bfloat16, float16")
    if work.head_dim % 8 or not 8 <= work.head_dim <= 256:
        raise ValueError(f"head_dim: {work.head_dim} is not a multiple of 8 up to 256")
    if not (work.batch and work.seqlen_q and work.seqlen_k):
        raise ValueError("batch, seqlen: 0 leaves nothing to record; allowed: 1 or more")
