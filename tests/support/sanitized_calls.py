"""A small grid of calls, for compute-sanitizer: `python sanitized_calls.py IMPL`.

Only this project's kernels run: racecheck fails in some of torch's, which the tests use to compare.
"""

import sys

import torch

from attnscope import attention, attention_varlen

MASKS = (
    {},
    {"causal": True},
    {"window": (20, -1)},
    {"window": (30, 40)},
    {"causal": True, "softcap": 20.0},
)
LENGTHS = ((1, 1), (65, 130), (257, 130), (513, 520), (1100, 1100))
PACKED = ((65, 65), (1, 130), (0, 9), (1000, 300), (7, 0), (640, 1280))


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def cu_seqlens(lengths: list[int]) -> torch.Tensor:
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return ends.to(device="cuda", dtype=torch.int32)


def main(impl: str) -> None:
    calls = 0
    for head_dim in (40, 64, 96, 128, 256):
        for mask in MASKS:
            for seqlen_q, seqlen_k in LENGTHS:
                k, v = (randn(1, seqlen_k, 1, head_dim) for _ in range(2))
                attention(randn(1, seqlen_q, 2, head_dim), k, v, impl=impl, **mask)
                calls += 1
            q_lengths, k_lengths = (list(lengths) for lengths in zip(*PACKED, strict=True))
            # Rows past the last sequence belong to none.
            q = randn(sum(q_lengths) + 5, 2, head_dim)
            k, v = (randn(sum(k_lengths) + 3, 1, head_dim) for _ in range(2))
            bounds = cu_seqlens(q_lengths), cu_seqlens(k_lengths)
            attention_varlen(q, k, v, *bounds, max(q_lengths), max(k_lengths), impl=impl, **mask)
            calls += 1
    # The tiles for long sequences under a causal mask; views with strides of their own.
    for head_dim in (64, 128):
        q, k, v = (randn(1, 1, 4200, head_dim).transpose(1, 2) for _ in range(3))
        attention(q, k, v, causal=True, impl=impl)
        calls += 1
    # Heads of a group side by side.
    k, v = (randn(40, 130, 1, 64) for _ in range(2))
    attention(randn(40, 9, 4, 64), k, v, causal=True, impl=impl)
    # Two heads in a tile, and one.
    k, v = (randn(50, 130, 5, 64) for _ in range(2))
    for mask in ({"causal": True}, {"window": (20, 9)}):
        attention(randn(50, 100, 5, 64), k, v, impl=impl, **mask)
        calls += 1
    lengths = [1 + i % 7 for i in range(40)]
    q, k, v = (randn(sum(lengths), heads, 64) for heads in (4, 1, 1))
    attention_varlen(q, k, v, *2 * [cu_seqlens(lengths)], 7, 7, causal=True, impl=impl)
    # The slow paths for NaN in V and for giant logits.
    for head_dim in (64, 96, 128, 192, 256):
        q, k, v = (randn(1, 150, 1, head_dim) for _ in range(3))
        v[:, 40] = float("nan")
        q[:, 70] *= 1e4
        attention(q, k, v, causal=True, softcap=1e6, impl=impl)
        attention(q * 1e4, k, v, window=(20, 9), impl=impl)
        calls += 2
    calls += 2
    torch.cuda.synchronize()
    print(f"{calls} calls done")


if __name__ == "__main__":
    main(sys.argv[1])
