"""Decoder-only transformer language models, and a training step whose parts and phases are ranges.

The form is GPT-2's (Radford et al. 2019): learned positions, pre-norm blocks, GELU. Attention is
any impl of `attnscope.bench.impls`. Ranges: the PHASES of a step, in them the PARTS of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnscope.bench.impls import Impl, Unsupported, resolve
from attnscope.bench.workloads import Workload
from attnscope.profile.record.session import annotate, synchronize
from attnscope.studies.parts import (
    ADD_NORM,
    ATTENTION,
    BACKWARD,
    CORE,
    EMBEDDING,
    FORWARD,
    LOSS,
    MLP,
    OPTIMIZER,
    PHASES,
)

# Precision -> (dtype of the weights, dtype of autocast).
PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "fp32": (torch.float32, None),
    "autocast": (torch.float32, torch.bfloat16),
    "bf16": (torch.bfloat16, None),
}
_BACKENDS = {
    "sdpa-math": "MATH",
    "sdpa-efficient": "EFFICIENT_ATTENTION",
    "sdpa-flash": "FLASH_ATTENTION",
    "sdpa-cudnn": "CUDNN_ATTENTION",
}

# Causal attention: q, k, v [B, S, H, D] -> [B, S, H, D].
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a model. Raises ValueError for an impossible shape."""

    d_model: int
    d_ff: int
    layers: int
    heads: int
    context: int
    vocabulary: int = 10_000

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if self.d_model % self.heads:
            raise ValueError(
                f"d_model must be a multiple of heads ({self.heads}), got {self.d_model}"
            )

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads

    @property
    def parameters(self) -> int:
        """Trained numbers: matrices, biases, norms, both embeddings and the output matrix."""
        d, ff = self.d_model, self.d_ff
        block = 4 * d * d + 2 * d * ff + (4 * d + ff + d) + 4 * d
        return self.layers * block + 2 * d + d * (2 * self.vocabulary + self.context)


# name: d_model, layers, heads; d_ff is four times d_model.
SIZES = {
    "small": (768, 12, 12),
    "medium": (1024, 24, 16),
    "large": (1280, 36, 20),
    "xl": (1600, 48, 25),
    "2.7B": (2560, 32, 32),
}
TINY = "tiny"  # for a machine without a GPU


def model_config(name: str, context: int) -> ModelConfig:
    """One of SIZES, or TINY, at a context length. Raises ValueError for another name."""
    if name == TINY:
        return ModelConfig(d_model=64, d_ff=256, layers=2, heads=4, context=context, vocabulary=256)
    if name not in SIZES:
        raise ValueError(f"model must be one of {', '.join([*SIZES, TINY])}, got {name!r}")
    d, layers, heads = SIZES[name]
    return ModelConfig(d_model=d, d_ff=4 * d, layers=layers, heads=heads, context=context)


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the stream x [B, S, d_model]."""

    def __init__(self, config: ModelConfig, attention: Attention) -> None:
        super().__init__()
        self.heads, self.attention = config.heads, attention
        self.norm_1, self.norm_2 = nn.LayerNorm(config.d_model), nn.LayerNorm(config.d_model)
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model)
        self.out = nn.Linear(config.d_model, config.d_model)
        self.up = nn.Linear(config.d_model, config.d_ff)
        self.down = nn.Linear(config.d_ff, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        with annotate(ADD_NORM):
            normed = self.norm_1(x)
        with annotate(ATTENTION):
            q, k, v = self.qkv(normed).unflatten(-1, (3, self.heads, -1)).unbind(2)
            with annotate(CORE):
                attended = self.attention(q, k, v)
            attended = self.out(attended.flatten(2))
        with annotate(ADD_NORM):
            x = x + attended
            normed = self.norm_2(x)
        with annotate(MLP):
            changed = self.down(nn.functional.gelu(self.up(normed)))
        with annotate(ADD_NORM):
            return x + changed


class TransformerLM(nn.Module):
    """Next-token model: tokens int64 [B, S + 1] -> mean cross-entropy, a float32 scalar.

    S is at most `config.context`. `attention` is an impl or alias by name; what it takes is not
    checked here, see `unsupported`.
    """

    def __init__(self, config: ModelConfig, attention: str = "sdpa-flash") -> None:
        super().__init__()
        self.config = config
        call = attention_by(attention)
        self.embedding = nn.Embedding(config.vocabulary, config.d_model)
        self.positions = nn.Embedding(config.context, config.d_model)
        self.blocks = nn.ModuleList(Block(config, call) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.d_model)
        self.head = nn.Linear(config.d_model, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        with annotate(EMBEDDING):
            places = torch.arange(inputs.shape[1], device=tokens.device)
            x = self.embedding(inputs) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        with annotate(ADD_NORM):
            x = self.norm(x)
        with annotate(LOSS):
            logits = self.head(x)
            return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Training:
    """A model with AdamW and random tokens [B, context + 1] on a device, ready to step.

    Raises ValueError for an unknown precision or impl, Unsupported where the impl cannot do this.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        batch: int,
        device: torch.device,
        attention: str = "sdpa-flash",
        precision: str = "autocast",
    ) -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
        weights, self.autocast = PRECISIONS[precision]
        work = attention_work(config, batch, precision)
        (impl,) = resolve([attention])
        if why := impl.cannot(work, device):
            raise Unsupported(f"{impl.name}: {why}")
        self.device, self.batch, self.config = device, batch, config
        with device:
            self.model = TransformerLM(config, attention).to(weights)
            self.tokens = torch.randint(config.vocabulary, (batch, config.context + 1))
        self.no_backward = why_no_backward(impl, work, device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases of a step: the first alone where attention has no backward."""
        return PHASES[:1] if self.no_backward else PHASES

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A range that ends when the device is done, so that its wall time covers its GPU work."""
        with annotate(name):
            yield
            synchronize()

    def steps(self) -> Iterator[str]:
        """One step, phase by phase: each is done when its name is yielded."""
        cast = torch.autocast(self.device.type, self.autocast) if self.autocast else nullcontext()
        with self.phase(FORWARD), cast:
            loss = self.model(self.tokens)
        yield FORWARD
        if self.no_backward:
            return
        with self.phase(BACKWARD):
            loss.backward()
        yield BACKWARD
        with self.phase(OPTIMIZER):
            self.optimizer.step()
            self.optimizer.zero_grad()
        yield OPTIMIZER

    def step(self) -> None:
        """One whole step."""
        for _ in self.steps():
            pass


def attention_work(config: ModelConfig, batch: int, precision: str) -> Workload:
    """The attention of one layer."""
    weights, autocast = PRECISIONS[precision]
    return Workload.of(
        batch=batch,
        seqlen=config.context,
        heads=config.heads,
        head_dim=config.head_dim,
        dtype=str(autocast or weights).removeprefix("torch."),
        causal=True,
    )


def attention_by(name: str) -> Attention:
    """Causal attention by an impl or alias. Raises ValueError for another name."""
    (impl,) = resolve([name])
    if impl.name == "naive":
        return plain_attention
    if impl.name in _BACKENDS:
        return _sdpa(_BACKENDS[impl.name])
    if impl.name == "flex":
        return _flex()
    return lambda q, k, v: impl.make(_work_of(q), (q, k, v, None, None))()[0]


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention as one writes it first: matmul, scale, mask, softmax, matmul."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    out = torch.softmax(scores.masked_fill(future, float("-inf")), -1).to(v.dtype) @ v
    return out.transpose(1, 2)


def _sdpa(backend: str) -> Attention:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel([getattr(SDPBackend, backend)]):
            out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2)

    return call


def _flex() -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled: Any = torch.compile(flex_attention, dynamic=False)
    masks: dict[int, Any] = {}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[1]
        if length not in masks:
            masks[length] = create_block_mask(
                lambda b, h, row, key: row >= key, None, None, length, length, q.device.type
            )
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return compiled(q, k, v, block_mask=masks[length]).transpose(1, 2)

    return call


def _work_of(q: Tensor) -> Workload:
    batch, seqlen, heads, head_dim = q.shape
    dtype = str(q.dtype).removeprefix("torch.")
    return Workload.of(
        batch=batch, seqlen=seqlen, heads=heads, head_dim=head_dim, dtype=dtype, causal=True
    )


def why_no_backward(impl: Impl, work: Workload, device: torch.device) -> str | None:
    """Why attention by an impl has no usable backward, from a trial on 128 tokens; None if it has.

    An op without a backward may raise, or may silently cut the graph: both are detected.
    """
    shape, dtype = (1, 128, 1, work.head_dim), getattr(torch, work.dtype)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    try:
        attention_by(impl.name)(q, k, v).float().sum().backward()
    except (NotImplementedError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        message = str(error).splitlines()[0].partition(";")[0]
        return f"{impl.name} has no backward: {message}"
    missing = [name for name, t in (("q", q), ("k", k), ("v", v)) if t.grad is None]
    return f"{impl.name} has no backward: no gradient reached {missing[0]}" if missing else None
