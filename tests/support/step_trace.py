"""A made trace of one training step of a one-layer model, and records of it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from made_trace import H200, Event, kernel, launch, named, op, write_trace

from attnscope.profile.analysis.result import Result
from attnscope.profile.trace.reader import read_trace
from attnscope.studies.lm.model import ModelConfig
from attnscope.studies.lm.run import Run
from attnscope.studies.records import Row
from attnscope.studies.summary import gpu_work

BF16 = "c10::BFloat16"
SCORES = [2, 8, 8]
HEADS = [2, 8, 4]
# The core: op, shapes, kernel, microseconds. Products of [2, 8, 4] x [2, 4, 8]: 2048 FLOPs each.
PLAIN = (
    ("aten::bmm", [HEADS, [2, 4, 8]], "nvjet_sm90_a", 10),
    ("aten::mul", [SCORES], "elementwise_kernel", 5),
    ("aten::_softmax", [SCORES, [], []], "cunn_SoftMaxForward", 20),
    ("aten::bmm", [SCORES, HEADS], "nvjet_sm90_b", 12),
)
FUSED = (("attnscope::forward", [[2, 8, 2, 4]] * 3, "attnscope::sm90::forward_kernel", 30),)
# The backward of the core: of its first product, or all of it.
FUSED_BACKWARD = (
    "attnscope::backward",
    [*[[2, 8, 2, 4]] * 5, [2, 2, 8]],
    "attnscope::sm90::backward_kernel",
)


def step_events(core: tuple[Any, ...] = PLAIN, scale: float = 1.0) -> list[Event]:
    """forward (norm, core, MLP), backward of the MLP and of the core on autograd's thread,
    optimizer. Kernels run one after the other from 5000 us on, `scale` times as long."""
    events = [
        named("forward", 0, 1000),
        named("Add & Norm", 10, 50),
        named("Self-Attention", 100, 600),
        named("Attention Core", 150, 550),
        named("MLP", 700, 900),
        named("backward", 1000, 2000),
        named("optimizer", 2000, 9000),
    ]
    clock = [5000.0]

    def run(name: str, at: float, shapes: list[Any], symbol: str, us: float, **how: Any) -> None:
        number = len(events)
        events.append(op(name, at, at + 40, **how | _inputs(name, shapes)))
        events.append(launch(number, at + 5, tid=how.get("tid", 1)))
        us *= scale
        about = {"grid": [132, 1, 1], "block": [128, 1, 1], "blocks per SM": 1.0}
        events.append(kernel(number, clock[0], clock[0] + us, symbol, **about))
        clock[0] += us + 1

    run("aten::native_layer_norm", 10, [[2, 8, 8]], "vectorized_layer_norm_kernel", 3)
    for number, (name, shapes, symbol, us) in enumerate(core):
        how = {"Sequence number": 10 + number, "Fwd thread id": 0}
        run(name, 160 + 60 * number, shapes, symbol, us, **how)
    last = {"Sequence number": 30, "Fwd thread id": 0}
    run("aten::mm", 710, [[16, 8], [8, 32]], "nvjet_sm90_c", 40, **last)
    backward = {"tid": 2, "Sequence number": 30, "Fwd thread id": 1}
    engine = "autograd::engine::evaluate_function: "
    events.append(op(f"{engine}MmBackward0", 1050, 1200, **backward))
    run("aten::mm", 1060, [[8, 16], [16, 32]], "nvjet_sm90_c", 80, **backward)
    backward["Sequence number"] = 10
    events.append(op(f"{engine}CoreBackward0", 1300, 1500, **backward))
    name, shapes, symbol = FUSED_BACKWARD if core is FUSED else core[0][:3]
    run(name, 1310, shapes, symbol, 25, **backward)
    run("aten::_foreach_add_", 2100, [[8]], "multi_tensor_apply_kernel", 15)
    return events


def _inputs(name: str, shapes: list[Any]) -> dict[str, Any]:
    causal = 12 if name == FUSED_BACKWARD[0] else 8
    count = max(len(shapes), causal + 1)
    dims = [*shapes, *[[]] * (count - len(shapes))]
    concrete = [""] * count
    concrete[causal] = "True"
    return {
        "Input Dims": dims,
        "Input type": [BF16 if dim else "" for dim in dims],
        "Concrete Inputs": concrete,
    }


def step(folder: Path, core: tuple[Any, ...] = PLAIN, scale: float = 1.0) -> Result:
    path = write_trace(folder / "step.json", *step_events(core, scale), deviceProperties=[H200])
    return Result(name="made", source=path, trace=read_trace(path))


def record(
    folder: Path, context: int = 8, core: tuple[Any, ...] = PLAIN, scale: float = 1.0, **more: Any
) -> Row:
    """The result of `measure` for the made step."""
    config = ModelConfig(d_model=8, d_ff=32, layers=1, heads=2, context=context, vocabulary=50)
    run = Run(name="made", config=config, impl="naive" if core is PLAIN else "cuda", batch=1)
    walls = {"forward": [2.0, 2.0, 2.2], "backward": [3.0] * 3, "optimizer": [1.0] * 3}
    found = run.key | {"status": "ok", "reason": None, "wall_ms": walls}
    found |= {"no_backward": None, "no_kernels": None, "peak_memory_gib": 1.5}
    return found | asdict(gpu_work(step(folder, core, scale))) | more
