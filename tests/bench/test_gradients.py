"""Calls with gradients: the backward alone and training steps, built, checked, verified, timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from attnscope import cli
from attnscope.bench import peers
from attnscope.bench.calls import build_call
from attnscope.bench.impls import DEFAULTS, IMPLS, Impl, Unsupported, _torch_deterministic
from attnscope.bench.runner import check, run_sweep
from attnscope.bench.timing import Settings
from attnscope.bench.verification import names_of
from attnscope.bench.workloads import Workload
from attnscope.common.results import Results, read_results
from attnscope.reference import attention_backward_reference, attention_reference, naive_attention

CPU = torch.device("cpu")
WORK = Workload.of(
    seqlen=40, heads_q=4, heads_kv=2, head_dim=16, causal=True, dtype="float32", mode="backward"
)
BOTH = replace(WORK, mode="both")
DETERMINISTIC = replace(WORK, deterministic=True)
ANY = {"cpu": "."}


def fake(name: str, forward: Callable[..., Any] = naive_attention, **more: Any) -> Impl:
    """An impl whose gradients are those of autograd through `forward(q, k, v, causal)`."""

    def make(work: Workload, inputs: Any) -> Any:
        return lambda: (forward(*inputs[:3], causal=work.causal)[0], None)

    options = dict(ran=ANY, ran_backward=ANY, deterministic=True) | more
    return Impl(name=name, about="", make=make, **options)


class Scaled(torch.autograd.Function):
    """Multiplies a gradient by a factor that may change from call to call."""

    factor: Callable[[], float] = staticmethod(lambda: 1.0)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * Scaled.factor()


def scaled_values(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Any:
    return naive_attention(q, k, Scaled.apply(v), causal=causal)


def tensors(work: Workload) -> tuple[Any, Tensor]:
    return work.inputs(CPU, 0), work.output_gradient(CPU, 0)


def test_a_backward_alone_runs_the_forward_once_and_accumulates_nothing():
    calls = []

    def counted(*inputs: Any, **options: Any) -> Any:
        calls.append(1)
        return naive_attention(*inputs, **options)

    inputs, dout = tensors(WORK)
    with torch.no_grad():
        call = build_call(fake("counted", counted), WORK, inputs, dout)
        results = [call() for _ in range(3)]
    assert calls == [1] and all(t.grad is None and not t.requires_grad for t in inputs[:3])
    want = attention_backward_reference(dout, *inputs, causal=True)
    for result in results:
        for got, expected in zip(result, want, strict=True):
            torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_training_step_runs_both_in_every_call():
    inputs, dout = tensors(BOTH)
    with torch.no_grad():
        call = build_call(IMPLS["sdpa-math"], BOTH, inputs, dout)
        for _ in range(2):
            out, lse, *grads = call()
    assert lse is None and not out.requires_grad
    want = attention_reference(*inputs, causal=True)[0]
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
    for got, expected in zip(
        grads, attention_backward_reference(dout, *inputs, causal=True), strict=True
    ):
        torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("work", [WORK, BOTH], ids=["backward", "both"])
def test_an_output_without_a_gradient_is_a_reason(work):
    def detached(*inputs: Any, **options: Any) -> Any:
        return naive_attention(*(t.detach() for t in inputs), **options)

    inputs, dout = tensors(work)
    with pytest.raises(Unsupported, match="flat has no backward: its output does not require"):
        build_call(fake("flat", detached), work, inputs, dout)()


@pytest.mark.parametrize("name", DEFAULTS["cpu"])
@pytest.mark.parametrize("work", [WORK, BOTH, DETERMINISTIC], ids=["backward", "both", "det"])
def test_impls_of_a_cpu_pass_the_gate(name, work):
    assert IMPLS[name].cannot(work, CPU) is None
    verdict = check(work, IMPLS[name], "normal", 0, CPU)
    assert verdict.passed, verdict.reason
    assert set(verdict.gradients) == {"dq", "dk", "dv"}


def test_what_ran_backward_is_verified_by_op_names():
    inputs, dout = tensors(WORK)
    seen = {n: names_of(build_call(IMPLS[n], WORK, inputs, dout), CPU) for n in DEFAULTS["cpu"]}
    for ran, names in seen.items():
        for claimed in DEFAULTS["cpu"]:
            mismatch = IMPLS[claimed].mismatch(names, "cpu", "backward")
            same = ran == claimed or {ran, claimed} == {"naive", "sdpa-math"}
            assert (mismatch is None) == same, (ran, claimed, names)


def test_a_training_step_must_run_both_kinds_of_kernels():
    flash = IMPLS["sdpa-flash"]
    forward, backward = "pytorch_flash::flash_fwd_kernel", "pytorch_flash::flash_bwd_kernel"
    assert flash.mismatch([forward, backward], "cuda", "both") is None
    assert "/pytorch_flash::flash_bwd/" in str(flash.mismatch([forward], "cuda", "both"))
    assert "/pytorch_flash::flash_fwd/" in str(flash.mismatch([backward], "cuda", "both"))
    assert flash.mismatch([backward], "cuda", "backward") is None


KERNELS = {
    "cuda-sm80": "void attnscope::sm80::backward_kernel<attnscope::sm80::BackwardConfig<__half> >",
    "triton": "attnscope_triton_backward_keys_bf16_d64_dv64_causal_or_right",
    "sdpa-flash": "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<pytorch_flash::"
    "Flash_bwd_kernel_traits<128, 64, 128, 8, 2, 4, 2, false, false> >",
    "sdpa-efficient": "fmha_cutlassB_bf16_aligned_64x64_k64_sm80(PyTorchMemEffAttention::"
    "AttentionBackwardKernel<cutlass::arch::Sm80, cutlass::bfloat16_t, true>::Params)",
    "sdpa-cudnn": "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_5_64x128x128",
    "fa2": "void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64> >",
    "fa3": "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnBwdSm90<flash::"
    "CollectiveMainloopBwdSm90<2, 2, 2> > > >(Params)",
    "naive": "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT",
}


@pytest.mark.parametrize("ran", KERNELS)
def test_kernel_names_of_a_backward_match_one_impl(ran):
    for claimed in KERNELS:
        mismatch = IMPLS[claimed].mismatch([KERNELS[ran], "at::fill"], "cuda", "backward")
        assert (mismatch is None) == (ran == claimed), (ran, claimed)


def test_impls_without_a_backward_have_a_reason():
    cuda = torch.device("cuda")
    half = Workload.of(seqlens=[64], heads=2, head_dim=64, mode="backward")
    assert IMPLS["fa3-metadata"].cannot(half, cuda) == "has no backward"
    lacking = fake("plain", deterministic=False)
    assert lacking.cannot(WORK, CPU) is None
    assert lacking.cannot(DETERMINISTIC, CPU) == "has no deterministic backward"


def test_a_build_without_the_backward_is_a_reason(monkeypatch):
    flags = {"FLASHATTENTION_DISABLE_BACKWARD": True}
    config = SimpleNamespace(CONFIG={"build_flags": flags})
    monkeypatch.setattr(peers, "installed", lambda module: True)
    monkeypatch.setattr(peers, "_FA3_MODULES", (("fa3_fwd_interface", "fa3_fwd_config"),))
    monkeypatch.setitem(sys.modules, "fa3_fwd_config", config)
    half = Workload.of(seqlen=64, heads=2, head_dim=64)
    assert IMPLS["fa3"].left_out(half) is None
    reason = IMPLS["fa3"].left_out(replace(half, mode="backward"))
    assert "was compiled with FLASHATTENTION_DISABLE_BACKWARD" in str(reason)


@pytest.mark.parametrize(("name", "most"), [("naive", 8192), ("sdpa-math", 4096)])
def test_score_matrices_that_would_take_the_memory_of_others_are_left_out(name, most):
    shape = dict(tokens=16384, hidden=2048, head_dim=64)
    for seqlen in (4096, 8192, 16384):
        work = Workload.of(seqlen=seqlen, **shape)
        reason = IMPLS[name].left_out(replace(work, mode="backward"))
        assert (reason is None) == (seqlen <= most), seqlen
        assert reason is None or "GiB of scores for the backward" in reason
        assert IMPLS[name].left_out(work) is None


@pytest.mark.parametrize("packed", [False, True])
def test_packages_are_asked_for_deterministic_gradients_by_their_argument(packed):
    asked = []

    def attend(q: Tensor, *rest: Any, **options: Any) -> Tensor:
        asked.append(options.get("deterministic"))
        return q

    module = SimpleNamespace(flash_attn_func=attend, flash_attn_varlen_func=attend)
    shape: Any = dict(seqlens=[8]) if packed else dict(seqlen=8)
    for deterministic in (False, True):
        work = Workload.of(
            **shape, heads=2, head_dim=8, mode="backward", deterministic=deterministic
        )
        peers._flash(module, work, work.inputs(CPU, 0))()
    assert asked == [None, True]


def test_torchs_deterministic_algorithms_are_on_during_the_call_alone():
    seen = []

    def look() -> tuple[bool, bool]:
        filling: Any = torch.utils.deterministic
        return torch.are_deterministic_algorithms_enabled(), filling.fill_uninitialized_memory

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Any:
        seen.append(look())
        return naive_attention(q, k, Scaled.apply(v), causal=causal)

    before = look()
    Scaled.factor = staticmethod(lambda: seen.append(look()) or 1.0)
    impl = fake("asked", forward, scope=_torch_deterministic)
    for work, on in ((WORK, False), (DETERMINISTIC, True)):
        seen.clear()
        build_call(impl, work, *tensors(work))()
        assert seen == [(on, before[1] and not on)] * 2
    assert look() == before


def test_a_refusal_of_torch_to_be_deterministic_is_a_reason():
    def refuse() -> float:
        raise RuntimeError(
            "some_backward does not have a deterministic implementation, but you set "
            "'torch.use_deterministic_algorithms(True)'. You can turn off determinism"
        )

    Scaled.factor = staticmethod(refuse)
    impl = fake("cannot", scaled_values)
    call = build_call(impl, DETERMINISTIC, *tensors(DETERMINISTIC))
    with pytest.raises(Unsupported, match="^some_backward does not have a deterministic impl.*n$"):
        call()
    with pytest.raises(RuntimeError, match="some_backward"):
        build_call(impl, WORK, *tensors(WORK))()


def test_compiled_backwards_keep_their_buffers_and_run_in_this_thread():
    import torch._functorch.config as config

    before = config.donated_buffer
    with peers.flex_scope(WORK):
        assert config.donated_buffer is False
        assert not torch._C._is_multithreading_enabled()
        compiled = torch.compile(lambda x: (x.sin() * x.cos()).sum(), backend="aot_eager")
        x = torch.randn(8, requires_grad=True)
        out = compiled(x)
        for _ in range(2):
            torch.autograd.grad(out, x, retain_graph=True)
    assert config.donated_buffer is before and torch._C._is_multithreading_enabled()


def sweep(path: Path, impls: list[Impl], work: Workload = WORK, **settings: Any) -> dict[str, Any]:
    results = Results.create(path, {}, resume=False)
    quick = Settings(l2="warm", min_samples=5, max_samples=5, **settings)
    assert run_sweep([work], impls, impls[0], results, CPU, quick) is None
    return {row["impl"]: row for row in read_results(path)["rows"]}


@contextmanager
def factor(values: Callable[[], float]):
    Scaled.factor = staticmethod(values)
    yield
    Scaled.factor = staticmethod(lambda: 1.0)


def test_rows_of_a_backward_have_the_errors_of_every_gradient(tmp_path):
    row = sweep(tmp_path / "r.json", [IMPLS["sdpa-flash"]], layouts="both")["sdpa-flash"]
    assert (row["status"], row["mode"], row["deterministic"]) == ("ok", "backward", False)
    assert row["workload"].startswith("backward-fp32-") and row["repeatable"] is True
    assert set(row["gradients"]) == {"dq", "dk", "dv"}
    assert row["margin"] == max(errors["margin"] for errors in row["gradients"].values())
    assert row["kernels"] and "backward" in row["kernels"][-1] + row["kernels"][0]
    assert row["flops"] == WORK.flops_half_convention() and row["bytes"] == WORK.bytes()


def test_a_wrong_gradient_has_no_time(tmp_path):
    with factor(lambda: 1.01):
        rows = sweep(tmp_path / "r.json", [IMPLS["naive"], fake("off", scaled_values)])
    assert rows["naive"]["status"] == "ok"
    assert rows["off"]["status"] == "wrong" and rows["off"]["reason"].startswith("dv: head [0, ")
    assert rows["off"]["median_ms"] is None and rows["off"]["gradients"]["dv"]["margin"] > 1


def test_bits_that_differ_are_wrong_where_deterministic_gradients_were_asked_for(tmp_path):
    calls = 0

    def moody() -> float:
        nonlocal calls
        calls += 1
        return 1.0 + 2.0**-23 * (calls % 2)

    with factor(moody):
        impls = [fake("moody", scaled_values), fake("never", deterministic=False)]
        plain = sweep(tmp_path / "a.json", impls)
        strict = sweep(tmp_path / "b.json", impls, DETERMINISTIC)
    assert plain["moody"]["status"] == "ok" and plain["moody"]["repeatable"] is False
    assert strict["moody"]["status"] == "wrong"
    assert strict["moody"]["reason"].startswith("dv differs between runs")
    assert strict["moody"]["workload"].endswith("-deterministic")
    assert strict["never"]["status"] == "skipped"


def attnscope(command: str, *arguments: str) -> tuple[int, str]:
    options = [command, "--device", "cpu", "--seq-lengths", "32", "--heads", "2", "--causal"]
    result = CliRunner().invoke(cli.build(command), [*options, *arguments])
    return result.exit_code, result.output


def test_check_prints_the_margin_of_every_gradient():
    code, out = attnscope("check", "--mode", "backward", "--impl", "naive,sdpa-flash")
    assert code == 0, out
    assert out.count("backward-fp32-b1-q32") == 2 and out.count("(dq 0.") == 2
    code, out = attnscope("check", "--mode", "both", "--deterministic", "--impl", "naive")
    assert code == 0 and "both-fp32-b1-q32-k32-h2-kv2-d64-causal-deterministic" in out


def test_bench_takes_a_mode(tmp_path):
    path = tmp_path / "r.json"
    options = ["--impl", "sdpa-math", "--output", str(path), "--time-budget", "0"]
    code, out = attnscope("bench", "--mode", "backward", *options)
    assert code == 0 and "mode backward" in out, out
    assert {row["mode"] for row in read_results(path)["rows"]} == {"backward"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mode", "sideways"], "mode must be one of forward, backward, both, got 'sideways'"),
        (["--deterministic"], "deterministic must be used with mode backward or both, got forward"),
        (
            ["--mode", "backward", "--graph"],
            "mode must be forward or both with --graph, got backward",
        ),
    ],
)
def test_bad_modes_are_explained(arguments, message):
    code, out = attnscope("bench", *arguments)
    assert code == 2 and message in " ".join(out.split())
