"""A training step captured into a CUDA graph and replayed."""

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, BATCH, STEPS = 2048, 4096, 12

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs, targets = torch.randn(2, BATCH, WIDTH, device="cuda")


def step() -> torch.Tensor:
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss


aside = torch.cuda.Stream()
aside.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(aside):
    for _ in range(3):
        step()
        optimizer.zero_grad(set_to_none=True)
torch.cuda.current_stream().wait_stream(aside)

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    loss = step()
for _ in range(STEPS):
    inputs.normal_()
    graph.replay()
print(f"loss {loss.item():.3f}")
