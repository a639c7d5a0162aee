"""A training loop of some hundred steps, each in the range `step` of `attnscope`.

One of them is in the range `measure` too. test_nsys_gpu.py records it with and without a gate:
`python tests/support/gated_training.py [STEPS [LAYERS]]`
"""

import sys

import torch
from torch import nn

from attnscope.profile import annotate

WIDTH, HEADS, LENGTH, BATCH = 256, 4, 256, 8
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 300
LAYERS = int(sys.argv[2]) if len(sys.argv) > 2 else 6

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
model = nn.TransformerEncoder(layer, LAYERS).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
x = torch.randn(BATCH, LENGTH, WIDTH, device="cuda")


@annotate("step")
def step() -> torch.Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


for number in range(STEPS):
    if number == STEPS // 2:
        torch.cuda.synchronize()
        with annotate("measure"):
            step()
            torch.cuda.synchronize()
    else:
        step()
print(f"{STEPS} steps, loss {step().item():.3f}")
