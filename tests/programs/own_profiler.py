"""A script that profiles itself and exports a trace to its argument; without one it only runs."""

import sys
from contextlib import ExitStack

import torch
from torch.profiler import ProfilerActivity, profile

SIZE, ROUNDS = 4096, 12

torch.manual_seed(0)
a = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
weights = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
with ExitStack() as stack:
    if len(sys.argv) > 1:
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        # A first session starts CUPTI; the second loses nothing.
        with profile(activities=activities):
            torch.cuda.synchronize()
        recorder = stack.enter_context(profile(activities=activities))
    torch.cuda.nvtx.range_push("measured")
    for _ in range(ROUNDS):
        a = torch.nn.functional.normalize((a @ weights).relu(), dim=-1)
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_pop()
if len(sys.argv) > 1:
    recorder.export_chrome_trace(sys.argv[1])
print(f"sum {a.float().sum().item():.3f}")
