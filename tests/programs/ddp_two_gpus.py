"""DistributedDataParallel over NCCL: run with `torchrun --nproc-per-node 2`.

Arguments: the number of steps, for about how many milliseconds the GPU of the last rank spins
before each, and the size of a bucket of gradients in MiB: with one bucket no kernel runs beside a
collective.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# Long kernels: the GPUs work, and do not wait for launches, under a profiler too. A kernel after an
# idle GPU takes some microseconds longer.
WIDTH, BATCH = 4096, 8192
STEPS, LATE_MS, BUCKET_MIB = 30, 0, 25
CYCLES_PER_MS = 1_980_000  # of an H200

steps, late_ms, bucket = map(int, sys.argv[1:] or (STEPS, LATE_MS, BUCKET_MIB))
local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
dist.init_process_group("nccl", device_id=torch.device("cuda", local))
torch.manual_seed(0)
layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
model = DistributedDataParallel(
    nn.Sequential(*layers).cuda(), device_ids=[local], bucket_cap_mb=bucket
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(BATCH, WIDTH, device="cuda")


def step() -> torch.Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.mse_loss(model(inputs), inputs)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


if late_ms:  # libraries are set up before, and the ranks begin together
    with model.no_sync():
        step()
    dist.barrier()
for _ in range(steps):
    if late_ms and dist.get_rank() == dist.get_world_size() - 1:
        torch.cuda._sleep(late_ms * CYCLES_PER_MS)
    loss = step()
print(f"rank {dist.get_rank()}: loss {loss.item():.3f}")
dist.destroy_process_group()
