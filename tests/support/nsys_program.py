"""A short program with every kind of GPU work that the reader of nsys reports distinguishes.

The recorded fixtures and the test on a GPU come from it:
`nsys profile ... python tests/support/nsys_program.py [--profiler-api] [--triton] [--rest STEPS]`
"""

import sys

import nvtx
import torch

from attnscope import attention
from attnscope.profile import annotate

CALLS = 3


def sizes(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def train(qkv: list[torch.Tensor], weight: torch.Tensor) -> None:
    """A step: the backward launches its kernels from autograd's thread."""
    with annotate("forward"):
        out = attention(*qkv, causal=True)
        loss = (out.flatten(2) @ weight).float().square().mean()
    with annotate("backward"):
        loss.backward()


def copies(host: torch.Tensor, pinned: torch.Tensor) -> None:
    there = host.cuda()
    pinned.copy_(there[: pinned.numel()], non_blocking=True)
    there.clone()
    there.zero_()


def two_streams(x: torch.Tensor) -> None:
    """Products on two streams, each after the other has ended."""
    side = torch.cuda.Stream()
    for _ in range(CALLS):
        with torch.cuda.stream(side):
            x @ x
        side.synchronize()
        x @ x
        torch.cuda.synchronize()


def main() -> None:
    gated = "--profiler-api" in sys.argv
    qkv = [sizes(2, 512, 4, 64).requires_grad_() for _ in range(3)]
    weight, x = sizes(256, 256).requires_grad_(), sizes(1024, 1024)
    host, pinned = torch.randn(1 << 20), torch.empty(1 << 18, pin_memory=True)
    graph = torch.cuda.CUDAGraph()
    with annotate("warmup"):
        train(qkv, weight)
        copies(host, pinned)
        two_streams(x)
        with torch.cuda.graph(graph):
            x @ x
            x + 1
        torch.cuda.synchronize()
    if gated:
        torch.cuda.profiler.start()
    with annotate("measure"):
        for _ in range(CALLS):
            train(qkv, weight)
            torch.cuda.synchronize()
    if gated:
        torch.cuda.profiler.stop()
    if "--rest" in sys.argv:
        with annotate("rest"):
            for _ in range(int(sys.argv[sys.argv.index("--rest") + 1])):
                train(qkv, weight)
    with annotate("copies"):
        copies(host, pinned)
        torch.cuda.synchronize()
    with annotate("two-streams"):
        two_streams(x)
    with annotate("graph"):
        graph.replay()
        torch.cuda.synchronize()
    with annotate("allocate"):
        torch.cuda.empty_cache()
        torch.empty(1 << 28, device="cuda", dtype=torch.uint8).zero_()
        torch.cuda.synchronize()
    torch.cuda.nvtx.range_push("plain")  # a string that is not registered, in no domain
    (x @ x).sum().item()
    torch.cuda.nvtx.range_pop()
    around = nvtx.start_range("around", domain="attnscope")
    with torch.autograd.profiler.emit_nvtx():
        train(qkv, weight)
    if "--triton" in sys.argv:
        attention(*(t.detach() for t in qkv), causal=True, impl="triton")
    torch.cuda.synchronize()
    nvtx.end_range(around)
    print("done")


if __name__ == "__main__":
    main()
