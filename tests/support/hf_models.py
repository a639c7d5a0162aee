"""Small Hugging Face models, random and in every dtype, whose masks and caps have an effect."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnscope.integrations import transformers as registered

hf = pytest.importorskip("transformers", minversion="5.24")

LENGTH = 40
WINDOW = 8
SIZES: dict[str, Any] = dict(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0,
)  # fmt: skip
# Gemma 2's softcap is low enough that a call without it fails.
CONFIGS: dict[str, Any] = {
    "Llama": ("LlamaConfig", {}),
    "Qwen2": ("Qwen2Config", {}),
    "Mistral": ("MistralConfig", dict(sliding_window=WINDOW)),
    "Gemma 2": (
        "Gemma2Config",
        dict(
            sliding_window=WINDOW, head_dim=16, query_pre_attn_scalar=16, attn_logit_softcapping=2.0
        ),
    ),
    "Gemma 3": (
        "Gemma3TextConfig",
        dict(
            sliding_window=WINDOW, head_dim=16, query_pre_attn_scalar=16, sliding_window_pattern=2
        ),
    ),
}  # fmt: skip


def build(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    kind, options = CONFIGS[name]
    registered.register()
    torch.manual_seed(0)
    config = getattr(hf, kind)(**(SIZES | options))
    model = hf.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():  # scores differ enough that a mask or a cap has an effect
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(12)
    return model
