"""Models: shapes, attention by any impl, ranges, and impls without a backward."""

import json
from pathlib import Path

import pytest
import torch

from attnscope.bench.impls import Unsupported
from attnscope.bench.workloads import Workload
from attnscope.profile import profile
from attnscope.reference import attention_reference
from attnscope.studies.lm.model import (
    SIZES,
    ModelConfig,
    Training,
    TransformerLM,
    attention_by,
    attention_work,
    model_config,
    plain_attention,
)
from attnscope.studies.parts import (
    ADD_NORM,
    ATTENTION,
    BACKWARD,
    CORE,
    FORWARD,
    LOSS,
    MLP,
    OPTIMIZER,
    PHASES,
)

CPU = torch.device("cpu")
TINY = ModelConfig(d_model=32, d_ff=128, layers=2, heads=4, context=16, vocabulary=50)


def training(attention: str = "naive", precision: str = "fp32") -> Training:
    return Training(TINY, batch=2, device=CPU, attention=attention, precision=precision)


@pytest.mark.parametrize(
    ("name", "head_dim", "billions"),
    [
        ("small", 64, 0.1),
        ("medium", 64, 0.3),
        ("large", 64, 0.7),
        ("xl", 64, 1.5),
        ("2.7B", 80, 2.6),
    ],
)
def test_sizes_are_the_known_ones(name: str, head_dim: int, billions: float) -> None:
    config = model_config(name, 1024)
    assert config.head_dim == head_dim
    assert config.d_ff == 4 * config.d_model
    assert config.parameters / 1e9 == pytest.approx(billions, abs=0.05)


def test_the_tiny_model_is_one_by_name() -> None:
    config = model_config("tiny", 16)
    assert (config.layers, config.context, config.d_ff) == (2, 16, 4 * config.d_model)


def test_parameters_are_counted_as_the_model_has_them() -> None:
    model = TransformerLM(TINY, "naive")
    assert sum(p.numel() for p in model.parameters()) == TINY.parameters


def test_a_model_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model must be one of small, .*2\.7B, tiny, got 'huge'"):
        model_config("huge", 128)
    with pytest.raises(ValueError, match=r"d_model must be a multiple of heads \(4\), got 30"):
        ModelConfig(d_model=30, d_ff=1, layers=1, heads=4, context=1)
    with pytest.raises(ValueError, match="context must be an integer of at least 1, got 0"):
        model_config("small", 0)
    with pytest.raises(ValueError, match="precision must be one of .*, got 'int8'"):
        training(precision="int8")
    with pytest.raises(ValueError, match="impl must be one of .* got 'nope'"):
        training("nope")


@pytest.mark.parametrize("impl", ["naive", "sdpa-math", "flash", "cpu"])
def test_every_impl_is_causal_attention(impl: str) -> None:
    q, k, v = torch.randn(3, 2, 33, 4, 16)
    truth, _ = attention_reference(q, k, v, causal=True)
    torch.testing.assert_close(attention_by(impl)(q, k, v).double(), truth, rtol=1e-4, atol=1e-4)


def test_the_loss_matches_its_parts() -> None:
    """Compare with the same model in functional form, with the same weights."""
    model = TransformerLM(TINY, "naive")
    tokens = torch.randint(TINY.vocabulary, (2, TINY.context + 1))
    function = torch.nn.functional
    x = model.embedding(tokens[:, :-1]) + model.positions.weight[: TINY.context]
    for block in model.blocks:
        normed = function.layer_norm(x, (32,), block.norm_1.weight, block.norm_1.bias)
        heads = [t.reshape(2, 16, 4, 8) for t in block.qkv(normed).chunk(3, -1)]
        x = x + block.out(plain_attention(*heads).reshape(2, 16, 32))
        normed = function.layer_norm(x, (32,), block.norm_2.weight, block.norm_2.bias)
        x = x + block.down(function.gelu(block.up(normed)))
    logits = function.layer_norm(x, (32,), model.norm.weight, model.norm.bias) @ model.head.weight.T
    loss = function.cross_entropy(logits.reshape(-1, 50), tokens[:, 1:].reshape(-1))
    torch.testing.assert_close(model(tokens), loss)


@pytest.mark.parametrize("precision", ["fp32", "autocast", "bf16"])
def test_training_learns_its_tokens(precision: str) -> None:
    train = training(precision=precision)
    train.optimizer.param_groups[0]["lr"] = 1e-2
    with torch.no_grad():
        before = float(train.model(train.tokens))
    for _ in range(10):
        train.step()
    with torch.no_grad():
        assert float(train.model(train.tokens)) < 0.8 * before
    weights = {p.dtype for p in train.model.parameters()}
    assert weights == {torch.bfloat16 if precision == "bf16" else torch.float32}


def test_autocast_computes_attention_in_bf16() -> None:
    seen = []
    train = training(precision="autocast")
    attention = train.model.blocks[0].attention

    def spy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.append(q.dtype)
        return attention(q, k, v)

    train.model.blocks[0].attention = spy
    train.step()
    assert seen == [torch.bfloat16]


def test_a_step_has_its_phases_and_parts_as_ranges() -> None:
    train = training()
    with profile("step") as found:
        train.step()
    paths = set(found.stages()["path"])
    assert {FORWARD, BACKWARD, OPTIMIZER} <= paths
    assert {f"{FORWARD}/{ATTENTION}/{CORE}", f"{FORWARD}/{MLP}", f"{FORWARD}/{LOSS}"} <= paths
    calls = found.stages().set_index("path")["calls"]
    assert calls[f"{FORWARD}/{ATTENTION}"] == TINY.layers
    assert calls[f"{FORWARD}/{ADD_NORM}"] == 3 * TINY.layers + 1


def test_without_a_backward_a_step_is_its_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    for impl in ("flash", "cpu"):
        assert training(impl).phases == PHASES
        assert training(impl).no_backward is None

    def refuse(ctx: object, *grads: object) -> None:
        raise NotImplementedError("there is none; use another")

    monkeypatch.setattr("attnscope.autograd._Forward.backward", refuse)
    train = training("cpu")
    assert train.phases == (FORWARD,)
    assert train.no_backward == "cpu has no backward: there is none"
    assert list(train.steps()) == [FORWARD]


def test_a_graph_that_is_cut_silently_is_no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(name: str) -> object:
        return lambda q, k, v: q.detach() * 1 + 0 * v

    monkeypatch.setattr("attnscope.studies.lm.model.attention_by", cut)
    assert training("flash").no_backward == "sdpa-flash has no backward: no gradient reached q"


def test_an_impl_that_cannot_do_it_has_a_reason() -> None:
    with pytest.raises(Unsupported, match="cuda: runs on cuda only, not on cpu"):
        training("cuda")


def test_attention_of_a_layer_as_a_workload() -> None:
    work = attention_work(model_config("2.7B", 256), 4, "autocast")
    assert work == Workload.of(
        batch=4, seqlen=256, heads=32, head_dim=80, dtype="bfloat16", causal=True
    )
    assert list(SIZES) == ["small", "medium", "large", "xl", "2.7B"]


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["naive", "sdpa-flash", "sdpa-cudnn", "cuda", "triton"])
def test_models_on_a_gpu_own_all_their_kernels(impl: str, tmp_path: Path) -> None:
    from attnscope.studies.lm.records import read_model
    from attnscope.studies.lm.run import Run, measure

    config = ModelConfig(d_model=256, d_ff=1024, layers=2, heads=4, context=256)
    record = measure(Run(name="two layers", config=config, impl=impl))
    json.dumps(record, allow_nan=False)
    model = read_model(record, "record")
    assert model.status == "ok", model.reason
    assert record["owned"] == 1.0
    assert record["no_backward"] is None
    for phase in (FORWARD, BACKWARD):
        core = [row for row in record["kernels"] if (row["part"], row["phase"]) == (CORE, phase)]
        assert core
        fused = any(row["category"] == "attention" for row in core)
        assert fused == (impl != "naive")
        if impl in ("cuda", "triton"):
            mine = [row for row in core if row["kernel"].startswith("attnscope ")]
            assert all(f" {phase} " in row["kernel"] for row in mine)
            per_call = 1 if phase == FORWARD else 3
            assert sum(row["calls"] for row in mine) == per_call * config.layers
    outside = sum(row["total_us"] for row in record["kernels"] if row["phase"] not in PHASES)
    assert outside == 0
