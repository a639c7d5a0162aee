"""A made trace of a token loop, in the text of PyTorch 2.11, with any number of tokens."""

from __future__ import annotations

from itertools import count
from pathlib import Path

LAYERS = 32
# Ops of a layer: names from the outermost to the one that launches, shapes, kernel.
ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
    "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)"
)
LINEAR = (
    "aten::linear", "aten::matmul", "aten::t", "aten::transpose", "aten::as_strided", "aten::mm",
)  # fmt: skip
CAST = ("aten::type_as", "aten::to", "aten::_to_copy", "aten::empty_strided", "aten::copy_")
OPS = (
    (LINEAR, "[[1, 512], [512, 512], []]", "nvjet_tst_64x8_64x16_4x1_v_bz_TNT"),
    (CAST, "[[1, 512], [], [1]]", ADD.replace("CUDAFunctor_add<float>", "direct_copy")),
    (("aten::select", "aten::as_strided", "aten::add"), "[[1, 512], [1, 512], []]", ADD),
    (
        ("aten::view", "aten::reshape", "aten::softmax", "aten::_softmax"),
        "[[8, 256], []]",
        "softmax",
    ),
)
CPU, GPU = '"pid": 2299, "tid": 2299', '"pid": 0, "tid": 7'
ORIGIN_NS = 4976961831853849


def write_token_loop(path: Path, tokens: int, quote: str = "") -> Path:
    """Write a trace of `tokens` * LAYERS * len(OPS) kernels; `quote` is added to a range's name."""
    events: list[str] = []
    ids, correlations = count(1), count(500)
    now = gpu = ORIGIN_NS

    def event(category: str, name: str, where: str, start: int, duration: int, args: str) -> None:
        events.append(
            f'    "ph": "X", "cat": "{category}", "name": "{name}", {where},\n'
            f'    "ts": {start // 1000}.{start % 1000:03}, "dur": {duration / 1e3:.3f},\n'
            f'    "args": {{\n      {args}\n    }}'
        )

    for token in range(tokens):
        length = LAYERS * len(OPS) * 20_000
        about = f'"External id": {next(ids)},"Record function id": 0, "Ev Idx": {len(events)}'
        event("user_annotation", f"token{quote}", CPU, now, length, about)
        for layer in range(LAYERS):
            for at, (names, shapes, kernel) in enumerate(OPS):
                start = now + (layer * len(OPS) + at) * 20_000 + 1000
                for depth, op in enumerate(names):
                    own = next(ids)
                    about = f'"External id": {own},"Record function id": 0, "Concrete Inputs": '
                    about += '["", "", "1"], "Input type": ["c10::BFloat16", "c10::BFloat16", ""]'
                    about += f', "Input Strides": {shapes}, "Input Dims": {shapes}'
                    about += f', "Ev Idx": {len(events)}'
                    event("cpu_op", op, CPU, start + depth * 1000, 18_000 - depth * 1500, about)
                call, correlation = start + 8000, next(correlations)
                gpu = max(gpu + 900, call + 6000)
                arrow = '"cat": "ac2g", "name": "ac2g"'
                about = f'"External id": {own},      "cbid": 211, "correlation": {correlation}'
                event("cuda_runtime", "cudaLaunchKernel", CPU, call, 2000, about)
                events.append(f'    "ph": "s", "id": {correlation}, {CPU}, "ts": 1.5,\n    {arrow}')
                about = (
                    f'"External id": {own},      "queued": 0, "device": 0, "context": 1,      '
                    f'"stream": 7, "correlation": {correlation},      "registers per thread": 18, '
                    '"shared memory": 0, "blocks per SM": 1.939394, "warps per SM": 7.757576, '
                    '"grid": [256, 1, 1], "block": [128, 1, 1], "est. achieved occupancy %": 12'
                )
                event("kernel", kernel, GPU, gpu, 2000 + (token + layer) % 50, about)
                gpu += 2100
        now += length + 5000
    text = "\n  },\n  {\n".join(events)
    path.write_text(f'{{\n  "schemaVersion": 1,\n  "traceEvents": [\n  {{\n{text}\n  }}\n  ]\n}}\n')
    return path
