"""A small Llama of Hugging Face's transformers, with random weights, generates tokens."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=1024, intermediate_size=2816, num_hidden_layers=6, num_attention_heads=16,
    num_key_value_heads=4, vocab_size=4096, max_position_embeddings=512,
)  # fmt: skip
model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
prompt = torch.randint(4096, (4, 64)).cuda()
with torch.inference_mode():
    tokens = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=32, min_new_tokens=32,
        do_sample=False, pad_token_id=0,
    )  # fmt: skip
print(f"{tokens.shape[1]} tokens, their sum {int(tokens.sum())}")
