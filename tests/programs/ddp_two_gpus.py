"""DistributedDataParallel over NCCL: run with `torchrun --nproc-per-node 2`.

Two arguments: the number of steps, and how many milliseconds the last rank is late to each.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, BATCH, STEPS = 4096, 2048, 30

local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
dist.init_process_group("nccl", device_id=torch.device("cuda", local))
torch.manual_seed(0)
layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
model = DistributedDataParallel(nn.Sequential(*layers).cuda(), device_ids=[local])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(BATCH, WIDTH, device="cuda")
steps, late_ms = map(int, sys.argv[1:] or (STEPS, 0))
for _ in range(steps):
    if late_ms and dist.get_rank() == dist.get_world_size() - 1:
        torch.cuda.synchronize()
        time.sleep(late_ms / 1e3)
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.mse_loss(model(inputs), inputs)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"rank {dist.get_rank()}: loss {loss.item():.3f}")
dist.destroy_process_group()
