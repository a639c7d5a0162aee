"""Hugging Face models run on this attention: right logits, or a refusal that names the argument."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from hf_models import CONFIGS, LENGTH, SIZES, WINDOW, build, hf
from torch import Tensor

from attnscope.integrations import transformers as registered
from attnscope.integrations import transformers_mask
from attnscope.studies.llama.run import compare_logits

masking = pytest.importorskip("transformers.masking_utils")


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest) -> Any:
    return build(request.param)


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("Llama")


@pytest.fixture(scope="module")
def mistral() -> Any:
    return build("Mistral")


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(1, 128, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def logits(model: Any, impl: str = registered.NAME, **inputs: Any) -> Tensor:
    model.set_attn_implementation(impl)
    with torch.no_grad():
        return model(**inputs).logits


def assert_in_bound(got: Tensor, model: Any, **inputs: Any) -> None:
    """Compare the error against fp64 with eager attention's, by the project's rule."""
    truth = logits(copy.deepcopy(model).double(), "eager", **inputs)
    verdict = compare_logits(got, truth, logits(model, "eager", **inputs))
    assert verdict["status"] == "ok", verdict["reason"]


# Logits


def test_logits_are_in_the_fp64_bound(model: Any, tokens: Tensor) -> None:
    assert_in_bound(logits(model, input_ids=tokens), model, input_ids=tokens)


@pytest.mark.parametrize("change", ["window", "softcap"])
def test_the_bound_sees_a_window_or_a_softcap_that_is_left_out(
    tokens: Tensor, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("Gemma 2")
    for layer in model.model.layers:
        if change == "softcap":
            layer.self_attn.attn_logit_softcapping = None
    if change == "window":
        monkeypatch.setattr(registered, "_window", lambda given, of_mask: None)
    got = logits(model, input_ids=tokens)
    with pytest.raises(AssertionError):
        assert_in_bound(got, build("Gemma 2"), input_ids=tokens)


def test_a_mask_of_ones_is_no_mask(model: Any, tokens: Tensor) -> None:
    ones = torch.ones_like(tokens)
    assert torch.equal(
        logits(model, input_ids=tokens, attention_mask=ones), logits(model, input_ids=tokens)
    )


def test_decoding_with_a_growing_cache_gives_the_logits_of_the_whole(
    model: Any, tokens: Tensor
) -> None:
    whole = logits(model, input_ids=tokens)
    cache = None
    for start, end in ((0, 30), (30, 37), (37, 38), (38, 40)):
        with torch.no_grad():
            ones = torch.ones(2, end)
            part = model(
                input_ids=tokens[:, start:end], attention_mask=ones, cache=cache, use_cache=True
            )
        cache = part.cache
        torch.testing.assert_close(part.logits, whole[:, start:end], atol=0.03, rtol=0.03)


def test_a_static_cache_gives_the_logits_of_the_whole(model: Any, tokens: Tensor) -> None:
    whole = logits(model, input_ids=tokens)
    cache = hf.StaticCache(config=model.config, max_cache_len=64)
    for start, end in ((0, 5), (5, 6), (6, 37), (37, 38), (38, 40)):
        with torch.no_grad():
            part = model(input_ids=tokens[:, start:end], cache=cache, use_cache=True).logits
        torch.testing.assert_close(part, whole[:, start:end], atol=0.03, rtol=0.03)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_gives_the_tokens_of_eager(cache: str, tokens: Tensor) -> None:
    model = build("Llama", torch.float32)
    found = []
    for impl in ("eager", registered.NAME):
        model.set_attn_implementation(impl)
        found.append(
            model.generate(
                tokens, max_new_tokens=6, do_sample=False, cache_implementation=cache,
                attention_mask=torch.ones_like(tokens),
            )
        )  # fmt: skip
    assert torch.equal(*found)


# torch.compile and torch.export


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Gemma 2"])
def test_a_compiled_model_without_a_cache_has_one_graph_and_the_same_logits(
    name: str, tokens: Tensor, masked: bool
) -> None:
    model = build(name)
    inputs = dict(input_ids=tokens, use_cache=False)
    if masked:
        inputs["attention_mask"] = torch.ones_like(tokens)
    want = logits(model, **inputs)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(**inputs).logits, want)


@pytest.mark.parametrize("masked", [False, True])
def test_an_exported_model_has_the_same_logits(model: Any, tokens: Tensor, masked: bool) -> None:
    inputs = dict(input_ids=tokens, use_cache=False)
    if masked:
        inputs["attention_mask"] = torch.ones_like(tokens)
    want = logits(model, **inputs)
    with torch.no_grad():
        exported = torch.export.export(model, (), inputs).module()
        assert torch.equal(exported(**inputs).logits, want)


def test_a_graph_asserts_what_tracing_cannot_see(llama: Any, tokens: Tensor) -> None:
    """Padding and packing are values that tracing cannot see; a graph must not ignore them."""
    llama.set_attn_implementation(registered.NAME)
    torch._dynamo.reset()
    compiled = torch.compile(llama, fullgraph=True, backend="aot_eager")
    ones = torch.ones_like(tokens)
    positions = torch.arange(LENGTH).expand(2, -1)
    padded = ones.clone()
    padded[0, :3] = 0
    with torch.no_grad():
        compiled(input_ids=tokens, attention_mask=ones, use_cache=False)
        with pytest.raises(RuntimeError, match="attention_mask must be without padding"):
            compiled(input_ids=tokens, attention_mask=padded, use_cache=False)
        compiled(input_ids=tokens, position_ids=positions, use_cache=False)
        with pytest.raises(RuntimeError, match="mask_function must be the causal mask"):
            compiled(input_ids=tokens, position_ids=positions % 20, use_cache=False)


@pytest.mark.slow
def test_inductor_compiles_the_assertions(tokens: Tensor) -> None:
    """Inductor writes assertion messages into C++ without escaping them."""
    model = build("Gemma 2", torch.float32)
    want = logits(model, input_ids=tokens)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    positions = torch.arange(LENGTH).expand(2, -1)
    with torch.no_grad():
        got = compiled(input_ids=tokens, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        with pytest.raises(RuntimeError, match="mask_function must be the causal mask"):
            compiled(input_ids=tokens, position_ids=positions % 20, use_cache=False)


def test_messages_of_assertions_have_no_quotes() -> None:
    for text in (transformers_mask.REMEDY, transformers_mask.CAUSAL, transformers_mask._PADDING):
        assert not set(text) & set('"\\\n')


def test_decoding_with_a_static_cache_is_one_graph_for_all_lengths(
    llama: Any, tokens: Tensor
) -> None:
    whole = logits(llama, input_ids=tokens)
    cache = hf.StaticCache(config=llama.config, max_cache_len=64)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    step = torch.compile(llama, fullgraph=True, backend=counter)
    with torch.no_grad():
        llama(input_ids=tokens[:, :36], cache=cache, use_cache=True)
        for at in range(36, LENGTH):
            got = step(input_ids=tokens[:, at : at + 1], cache=cache, use_cache=True).logits
            torch.testing.assert_close(got[:, 0], whole[:, at], atol=0.03, rtol=0.03)
    assert counter.frame_count == 1


# Packed sequences

LENGTHS = (7, 12, 1, 20)


@pytest.fixture
def packed(tokens: Tensor) -> dict[str, Any]:
    """The output of DataCollatorWithFlattening for sequences of LENGTHS tokens."""
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return dict(
        input_ids=tokens[:1], position_ids=positions[None], use_cache=False, cu_seq_lens_q=bounds,
        cu_seq_lens_k=bounds, max_length_q=max(LENGTHS), max_length_k=max(LENGTHS),
    )  # fmt: skip


SEGMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


@pytest.mark.parametrize("given", ["all", "bounds", "positions"])
def test_packed_sequences_do_not_see_each_other(
    model: Any, packed: dict[str, Any], given: str
) -> None:
    left_out = {"all": (), "bounds": SEGMENTS[2:], "positions": SEGMENTS}[given]
    inputs = {key: value for key, value in packed.items() if key not in left_out}
    got = logits(model, **inputs)
    for part, length in zip(got.split(LENGTHS, 1), LENGTHS, strict=True):
        assert part.shape[1] == length
    alone = [logits(model, input_ids=one) for one in packed["input_ids"].split(LENGTHS, 1)]
    torch.testing.assert_close(got, torch.cat(alone, 1), atol=0.03, rtol=0.03)


def test_packed_sequences_in_several_entries_of_a_batch(llama: Any, tokens: Tensor) -> None:
    positions = torch.arange(LENGTH).expand(2, -1).clone()
    positions[0, 25:] -= 25
    got = logits(llama, input_ids=tokens, position_ids=positions, use_cache=False)
    alone = logits(llama, input_ids=tokens)
    second = logits(llama, input_ids=tokens[:1, 25:])
    torch.testing.assert_close(got[1], alone[1], atol=0.03, rtol=0.03)
    torch.testing.assert_close(got[0, 25:], second[0], atol=0.03, rtol=0.03)


def test_a_compiled_model_takes_packed_sequences(llama: Any, packed: dict[str, Any]) -> None:
    want = logits(llama, **packed)
    torch._dynamo.reset()
    compiled = torch.compile(llama, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(**packed).logits, want)


# The attention function


@pytest.fixture
def tensors() -> dict[str, Any]:
    torch.manual_seed(1)
    q, kv = torch.randn(2, 4, 24, 16), torch.randn(2, 2, 2, 24, 16)
    return {"query": q, "key": kv[0], "value": kv[1], "attention_mask": None}


def test_attention_is_causal_grouped_and_scaled(tensors: dict[str, Any]) -> None:
    out, weights = registered.forward(torch.nn.Module(), **tensors, scaling=0.5)
    q, k, v = (tensors[name] for name in ("query", "key", "value"))
    want = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=0.5, enable_gqa=True
    )
    torch.testing.assert_close(out, want.transpose(1, 2))
    assert weights is None and out.is_contiguous()


def test_options_that_change_nothing_are_taken(tensors: dict[str, Any]) -> None:
    want, _ = registered.forward(torch.nn.Module(), **tensors)
    harmless = dict(
        position_ids=torch.arange(24)[None], cache_position=torch.arange(24), use_cache=True,
        output_hidden_states=True, output_router_logits=True, num_items_in_batch=torch.tensor(3),
        output_attentions=False, s_aux=None, block_indices=None,
    )  # fmt: skip
    got, _ = registered.forward(torch.nn.Module(), **tensors, **harmless)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"attention_mask": torch.zeros(2, 1, 24, 24)}, r"attention_mask must be None or .*\[2, 1"),
        ({"attention_mask": torch.ones(2, 24)}, "attention_mask must be None or"),
        ({"dropout": 0.1}, "dropout must be 0, got 0.1"),
        ({"is_causal": False}, "is_causal must be True, got False"),
        ({"softcap": -1.0}, "softcap"),
        ({"sliding_window": 0}, "sliding_window must be at least 1, got 0"),
        ({"cu_seq_lens_q": torch.tensor([0, 48])}, "cu_seq_lens_k must be given together"),
        ({"position_bias": torch.zeros(1, 4, 24, 24)}, r"position_bias must be None, got a tensor"),
        ({"s_aux": torch.zeros(4)}, "s_aux must be None, got a tensor of shape"),
        ({"sinks": torch.zeros(4)}, "sinks must be None"),
        ({"output_attentions": True}, "output_attentions must be None or False, got True"),
        ({"block_indices": torch.zeros(2, 2, 24, 1)}, "block_indices must be None"),
        ({"indices": torch.zeros(2, 24, 4)}, "indices must be None"),
        ({"seq_idx": torch.zeros(2, 24)}, "seq_idx must be None"),
        ({"an_option_of_next_year": 3}, "an_option_of_next_year must be None, got 3"),
    ],
)
def test_what_the_op_cannot_do_is_refused(
    tensors: dict[str, Any], given: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        registered.forward(torch.nn.Module(), **tensors | given)


def test_a_module_that_is_not_causal_is_refused(tensors: dict[str, Any]) -> None:
    module = torch.nn.Module()
    module.is_causal = False  # type: ignore[assignment]
    with pytest.raises(ValueError, match="is_causal must be True, got False"):
        registered.forward(module, **tensors)


def test_a_window_of_the_layer_that_is_not_the_masks_is_refused(tensors: dict[str, Any]) -> None:
    window = masking.sliding_window_causal_mask_function(WINDOW)
    note = registered.mask(2, 24, 24, mask_function=window, local_size=WINDOW)
    tensors["attention_mask"] = note
    want, _ = registered.forward(torch.nn.Module(), **tensors, sliding_window=WINDOW)
    got, _ = registered.forward(torch.nn.Module(), **tensors)  # a layer that does not pass it
    assert torch.equal(got, want)
    with pytest.raises(ValueError, match=r"sliding_window must be the mask's \(8\), got 9"):
        registered.forward(torch.nn.Module(), **tensors, sliding_window=WINDOW + 1)


# The mask function


def test_padding_and_masks_of_scores_are_refused_by_the_model(llama: Any, tokens: Tensor) -> None:
    llama.set_attn_implementation(registered.NAME)
    padded = torch.ones_like(tokens)
    padded[0, :5] = 0
    with pytest.raises(ValueError, match="attention_mask must be without padding .*got zeros"):
        llama(input_ids=tokens, attention_mask=padded)
    with pytest.raises(ValueError, match="attention_mask must be None or"):
        llama(input_ids=tokens, attention_mask=torch.zeros(2, 1, LENGTH, LENGTH))


def test_padding_in_what_a_cache_holds_is_refused(llama: Any, tokens: Tensor) -> None:
    llama.set_attn_implementation(registered.NAME)
    for cache in (None, hf.StaticCache(config=llama.config, max_cache_len=64)):
        ones = torch.ones_like(tokens)
        with torch.no_grad():
            first = llama(input_ids=tokens[:, :36], cache=cache, use_cache=True).cache
            padded = ones[:, :37].clone()
            padded[1, 0] = 0
            with pytest.raises(ValueError, match="attention_mask must be without padding"):
                llama(input_ids=tokens[:, 36:37], attention_mask=padded, cache=first)


def overlay(batch: Any, head: Any, q: Any, k: Any) -> Any:
    return k <= q


@pytest.mark.parametrize(
    "function",
    [
        masking.chunked_causal_mask_function(8, torch.zeros(2, dtype=torch.int64)),
        masking.or_masks(
            masking.causal_mask_function, masking.blockwise_overlay(torch.zeros(2, 24))
        ),
        masking.and_masks(masking.causal_mask_function, overlay),
        masking.and_masks(masking.sliding_window_overlay(8), masking.bidirectional_mask_function),
        masking.bidirectional_mask_function,
        overlay,
    ],
)
def test_other_masks_are_refused(function: Any) -> None:
    with pytest.raises(ValueError, match="mask_function must be the causal mask"):
        registered.mask(2, 24, 24, mask_function=function, local_size=8)


def test_an_overlay_of_the_callers_is_refused() -> None:
    with pytest.raises(ValueError, match="got an overlay"):
        registered.mask(2, 24, 24, mask_function=masking.causal_mask_function, use_vmap=True)


def test_fewer_keys_than_the_last_query_sees_are_refused() -> None:
    with pytest.raises(ValueError, match="kv_length must be at least 25 .* got 24"):
        registered.mask(2, 1, 24, q_offset=24)
    assert registered.mask(2, 1, 25, q_offset=24) is None
    with pytest.raises(ValueError, match="attention_mask must have 25 tokens, got 24"):
        registered.mask(2, 1, 25, q_offset=24, attention_mask=torch.ones(2, 24))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("DeepseekV32Config", dict(index_topk=4, index_n_heads=2, index_head_dim=16)),
        ("GlmMoeDsaConfig", dict(index_topk=4, index_n_heads=2, index_head_dim=16)),
    ],
)
def test_models_with_an_index_branch_get_an_error_of_ours(
    kind: str, options: dict[str, Any], tokens: Tensor
) -> None:
    registered.register()
    sizes = dict(
        q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
        n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=8,
        num_key_value_heads=4,
    )  # fmt: skip
    model = hf.AutoModelForCausalLM.from_config(getattr(hf, kind)(**(SIZES | sizes | options)))
    model.set_attn_implementation(registered.NAME)
    with pytest.raises(ValueError, match="config must be of a model without an index branch"):
        model(input_ids=tokens)


def test_sinks_are_refused_by_the_model(tokens: Tensor) -> None:
    registered.register()
    config = hf.GptOssConfig(
        **SIZES, head_dim=16, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=1
    )
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    model.set_attn_implementation(registered.NAME)
    with pytest.raises(ValueError, match="s_aux must be None"):
        model(input_ids=tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_models_on_a_gpu(name: str, tokens: Tensor, packed: dict[str, Any]) -> None:
    model, tokens = build(name).cuda(), tokens.cuda()
    packed = {key: t.cuda() if isinstance(t, Tensor) else t for key, t in packed.items()}
    whole = logits(model, input_ids=tokens, attention_mask=torch.ones_like(tokens))
    assert_in_bound(whole, model, input_ids=tokens)
    alone = [logits(model, input_ids=one) for one in packed["input_ids"].split(LENGTHS, 1)]
    got = logits(model, **packed)
    torch.testing.assert_close(got, torch.cat(alone, 1), atol=0.05, rtol=0.05)
    cache = hf.StaticCache(config=model.config, max_cache_len=64)
    for start, end in ((0, 36), (36, 37), (37, 40)):
        with torch.no_grad():
            part = model(input_ids=tokens[:, start:end], cache=cache, use_cache=True).logits
        torch.testing.assert_close(part, whole[:, start:end], atol=0.05, rtol=0.05)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        found = compiled(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(found, whole, atol=0.05, rtol=0.05)
