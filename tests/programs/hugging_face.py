"""A small Llama of Hugging Face's transformers, with random weights, generates tokens.

Some of its short kernels take 15 to 35 % longer in one place of the memory than in another. So it
runs several times, with weights and buffers in other places.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
ROUNDS, TOKENS = 6, 8
config = LlamaConfig(
    hidden_size=1024, intermediate_size=2816, num_hidden_layers=6, num_attention_heads=16,
    num_key_value_heads=4, vocab_size=4096, max_position_embeddings=512,
)  # fmt: skip
model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
prompt = torch.randint(4096, (4, 64)).cuda()
held = []
for number in range(ROUNDS):
    model.to("cpu")
    torch.cuda.empty_cache()
    held.append(torch.empty((number + 1) * 150_000, dtype=torch.uint8, device="cuda"))
    model.to("cuda")
    with torch.inference_mode():
        tokens = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=TOKENS,
            min_new_tokens=TOKENS, do_sample=False, pad_token_id=0,
        )  # fmt: skip
print(f"{tokens.shape[1]} tokens, their sum {int(tokens.sum())}")
