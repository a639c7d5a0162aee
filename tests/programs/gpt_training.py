"""A small GPT trained on random tokens; `--compile` compiles the model."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, LAYERS, VOCABULARY, LENGTH, BATCH, STEPS = 768, 12, 4, 8192, 512, 16, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.before(x)).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.after(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.tokens(tokens) + self.places(places))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


torch.manual_seed(0)
model = Model().cuda()
step = torch.compile(model) if "--compile" in sys.argv else model
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1)).cuda()
for _ in range(STEPS):
    with torch.autocast("cuda", torch.bfloat16):
        loss = step(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.3f}")
