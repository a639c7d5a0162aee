"""Hugging Face models are trained on this attention: right gradients, checkpoints, one graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hf_models import LENGTH, build
from torch import Tensor

from attnscope.integrations import transformers as registered

MODELS = ("Llama", "Mistral", "Gemma 2")  # plain, with a window, with a window and a softcap
Gradients = dict[str, Tensor]
# Limits over the errors of eager attention in the same dtype: of the largest error of a parameter,
# and of the root mean square of all errors.
ROW_BAR, RMS_BAR = 2.0, 1.25


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(1, 128, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def gradients(
    model: Any, impl: str = registered.NAME, step: Any = None, **inputs: Any
) -> Gradients:
    """The gradients of a language model's loss. `step` is the model, compiled perhaps."""
    model.set_attn_implementation(impl)
    inputs = {"labels": inputs["input_ids"], "use_cache": False} | inputs
    model.zero_grad()
    (model if step is None else step)(**inputs).loss.backward()
    found = {name: one.grad.clone() for name, one in model.named_parameters()}
    model.zero_grad()
    return found


def assert_in_bound(got: Gradients, model: Any, **inputs: Any) -> None:
    truth = gradients(copy.deepcopy(model).double(), "eager", **inputs)
    usual = gradients(model, "eager", **inputs)
    squares = [0.0, 0.0]
    for name, want in truth.items():
        ours, baseline = (grads[name].double() - want for grads in (got, usual))
        ulp = torch.finfo(got[name].dtype).eps * want.abs().max().item()
        bound = ROW_BAR * baseline.abs().max().item() + ulp
        assert ours.abs().max().item() <= bound, (
            f"{name}: {ours.abs().max():.3g}, bound {bound:.3g}"
        )
        for at, error in enumerate((ours, baseline)):
            squares[at] += (error / want.abs().max()).square().sum().item()
    assert squares[0] <= RMS_BAR**2 * squares[1], f"RMS: {(squares[0] / squares[1]) ** 0.5:.3g}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_in_the_fp64_bound(name: str, dtype: torch.dtype, tokens: Tensor) -> None:
    model = build(name, dtype)
    assert_in_bound(gradients(model, input_ids=tokens), model, input_ids=tokens)


@pytest.mark.parametrize("change", ["window", "softcap", "gradient of k"])
def test_the_bound_sees_what_is_left_out(
    tokens: Tensor, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("Gemma 2")
    original = registered.attention

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        if change == "window":
            options["window"] = (-1, -1)
        if change == "softcap":
            options["softcap"] = 0.0
        if change == "gradient of k":
            k = k.detach()
        return original(q, k, v, **options)

    monkeypatch.setattr(registered, "attention", attend)
    model.set_attn_implementation(registered.NAME)
    inputs = dict(input_ids=tokens, labels=tokens, use_cache=False)
    model(**inputs).loss.backward()
    got = {
        name: torch.zeros_like(one) if one.grad is None else one.grad.clone()
        for name, one in model.named_parameters()
    }
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        assert_in_bound(got, model, input_ids=tokens)


@pytest.mark.parametrize("name", MODELS)
def test_packed_sequences_have_the_gradients_of_each(name: str, tokens: Tensor) -> None:
    model = build(name, torch.float32)
    row, lengths = tokens[:1], (13, 1, 26)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    labels = row.clone()
    labels[:, [0, 13, 14]] = -100  # the first token of a sequence has no one before it
    got = gradients(model, input_ids=row, position_ids=positions, labels=labels)
    want: Gradients = {}
    count = sum(lengths) - len(lengths)
    for part in row.split(lengths, 1):
        if part.shape[1] > 1:
            for key, grad in gradients(model, input_ids=part).items():
                want[key] = want.get(key, 0) + grad * (part.shape[1] - 1) / count
    for key, grad in got.items():
        torch.testing.assert_close(grad, want[key], atol=1e-5, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_change_no_gradient(reentrant: bool, tokens: Tensor) -> None:
    model = build("Gemma 2").train()
    want = gradients(model, input_ids=tokens)
    calls = []
    original = registered.attention

    def count(*args: Any, **options: Any) -> Any:
        calls.append(torch.is_grad_enabled())
        return original(*args, **options)

    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registered, "attention", count)
        got = gradients(model, input_ids=tokens)
    assert len(calls) == 2 * model.config.num_hidden_layers  # each layer runs again
    assert calls.count(False) == (model.config.num_hidden_layers if reentrant else 0)
    assert all(torch.equal(grad, want[name]) for name, grad in got.items())


@pytest.mark.parametrize("name", ["Llama", "Gemma 2"])
def test_a_training_step_is_one_graph(name: str, tokens: Tensor) -> None:
    model = build(name, torch.float32).train()
    want = gradients(model, input_ids=tokens)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got = gradients(model, step=compiled, input_ids=tokens)
    for key, grad in got.items():
        torch.testing.assert_close(grad, want[key], atol=1e-6, rtol=1e-4)


def test_a_model_learns_its_tokens(tokens: Tensor) -> None:
    losses: dict[str, list[float]] = {}
    for impl in ("eager", registered.NAME):
        model = build("Mistral", torch.float32).train()
        model.set_attn_implementation(impl)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(8):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.setdefault(impl, []).append(loss.item())
    eager, ours = losses.values()
    assert ours[-1] < 0.8 * ours[0]
    assert ours == pytest.approx(eager, rel=1e-3)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
@pytest.mark.parametrize("name", MODELS)
def test_training_on_a_gpu(name: str, tokens: Tensor) -> None:
    model, tokens = build(name).cuda().train(), tokens.cuda()
    plain = gradients(model, input_ids=tokens)
    assert_in_bound(plain, model, input_ids=tokens)
    model.gradient_checkpointing_enable()
    assert_in_bound(gradients(model, input_ids=tokens), model, input_ids=tokens)
    model.gradient_checkpointing_disable()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    assert_in_bound(gradients(model, step=compiled, input_ids=tokens), model, input_ids=tokens)
