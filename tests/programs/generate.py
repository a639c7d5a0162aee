"""Token by token: a decoder with a cache, one small launch after the other, a copy to the host.

An argument is the number of tokens.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, LAYERS, VOCABULARY, LENGTH, TOKENS = 2048, 16, 8, 8192, 512, 48


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("cache", torch.zeros(2, 1, HEADS, LENGTH, WIDTH // HEADS))

    def forward(self, x: torch.Tensor, place: int) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(1, 1, 3, HEADS, -1).transpose(1, 3).unbind(2)
        self.cache[0, :, :, place : place + 1] = k
        self.cache[1, :, :, place : place + 1] = v
        keys, values = self.cache[:, :, :, : place + 1]
        x = x + self.out(F.scaled_dot_product_attention(q, keys, values).flatten(1)[:, None])
        return x + self.down(F.silu(self.up(x)))


torch.manual_seed(0)
with torch.device("cuda"):
    layers = nn.ModuleList(Layer() for _ in range(LAYERS)).to(torch.bfloat16)
    embedding = nn.Embedding(VOCABULARY, WIDTH).to(torch.bfloat16)
found = [1]
with torch.inference_mode():
    for place in range(int(sys.argv[1]) if sys.argv[1:] else TOKENS):
        x = embedding(torch.tensor([[found[-1]]], device="cuda"))
        for layer in layers:
            x = layer(x, place)
        found.append(int((x @ embedding.weight.T).argmax()))
print(f"{len(found)} tokens, the last {found[-1]}")
