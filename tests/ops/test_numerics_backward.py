"""The gate of gradients: correct ones pass in every dtype and kind, planted faults fail."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnscope.bench.workloads import Workload
from attnscope.numerics import (
    KINDS,
    Verdict,
    backward,
    backward_truth,
    check_backward_fn,
    check_training_fn,
    compare_backward,
    gate,
    make_inputs,
    make_output_gradients,
)
from attnscope.reference import (
    attention_reference,
    naive_attention_backward,
    segments,
)

INF, NAN = math.inf, math.nan
SQUARE = Workload.of(batch=1, seqlen=300, heads_q=2, heads_kv=1, head_dim=64, dtype="bfloat16")
CAUSAL = replace(SQUARE, causal=True)
Grads = tuple[Tensor, Tensor, Tensor]


def fused(work: Workload, **change: Any) -> Callable[..., Grads]:
    """Gradients with the rounding of a fused kernel: out, P and dS in the inputs' dtype.

    Everything else is in fp32 (fp64 for fp64). `change` plants a fault: an option of the call.
    """

    def run(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_q: Any, cu_k: Any, dlse: Any) -> Any:
        if cu_q is None:
            return dense(dout, q, k, v, dlse)
        grads = [torch.zeros_like(t) for t in (q, k, v)]
        of_q, of_k = segments(cu_q, q.shape[0]), segments(cu_k, k.shape[0])
        for (q0, q1), (k0, k1) in zip(of_q, of_k, strict=True):
            tensors = (dout[None, q0:q1], q[None, q0:q1], k[None, k0:k1], v[None, k0:k1])
            part = dense(*tensors, None if dlse is None else dlse[None, :, q0:q1])
            for grad, at, t in zip(grads, ((q0, q1), (k0, k1), (k0, k1)), part, strict=True):
                grad[slice(*at)] = t[0]
        return tuple(grads)

    def dense(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, dlse: Tensor | None) -> Grads:
        wide = torch.promote_types(q.dtype, torch.float32)
        group, scale = q.shape[2] // k.shape[2], change.get("scale", q.shape[3] ** -0.5)
        cap, ahead = work.softcap, change.get("ahead", 0)

        def rounded(t: Tensor) -> Tensor:
            return t.to(q.dtype).to(wide)

        qs, ks, vs, ds = (t.to(wide).transpose(1, 2) for t in (q, k, v, dout))
        ks, vs = (t.repeat_interleave(group, 1) for t in (ks, vs))
        visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
        if work.causal:
            visible = visible.tril(k.shape[1] - q.shape[1] + ahead)
        scores = qs @ ks.mT * scale
        slope = torch.ones_like(scores)
        if cap:
            slope = 1 - torch.tanh(scores / cap) ** 2
            scores = cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(~visible, -INF)
        lse = torch.logsumexp(scores, -1, keepdim=True)
        probs = torch.exp(scores - lse).masked_fill(~visible, 0)
        delta = (rounded(probs @ vs) * ds).sum(-1, keepdim=True) * change.get("delta", 1)
        if dlse is not None:
            delta = delta - dlse.unsqueeze(-1)
        dscores = rounded((probs * (ds @ vs.mT - delta) * slope).masked_fill(~visible, 0))
        dk, dv = (
            t.unflatten(1, (-1, group)).sum(2)
            for t in (dscores.mT @ qs * scale, rounded(probs).mT @ ds)
        )
        grads = [t.transpose(1, 2).to(q.dtype) for t in (dscores @ ks * scale, dk, dv)]
        return grads[0], grads[1], grads[2]

    return run


def check(work: Workload, fn: Callable[..., Any] | None = None, **options: Any) -> Verdict:
    return check_backward_fn(fn or fused(work), work, device="cpu", **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("work", [SQUARE, CAUSAL], ids=["full", "causal"])
def test_right_gradients_pass(work, dtype, kind):
    verdict = check(replace(work, dtype=dtype), kind=kind)
    assert verdict.passed and verdict.reason == "", verdict
    assert verdict.margin < 0.8 and verdict.repeatable and verdict.checked == "all rows"
    assert set(verdict.gradients) == {"dq", "dk", "dv"}
    assert verdict.margin == max(errors.margin for errors in verdict.gradients.values())


@pytest.mark.parametrize(
    "options",
    [
        dict(softcap=2.0, causal=True),
        dict(seqlen_q=70, seqlen_k=100, causal=True),
        dict(seqlen_q=100, seqlen_k=70, causal=True),
        dict(head_dim_v=32),
        dict(seqlens=[(70, 70), (0, 5), (5, 0), (1, 90), (40, 20)], causal=True),
    ],
    ids=str,
)
def test_masks_softcap_and_packed_batches_pass(options):
    work = Workload.of(**(dict(seqlen=90, heads_q=4, heads_kv=2, head_dim=40) | options))
    for with_dlse in (False, True):
        verdict = check(work, with_dlse=with_dlse)
        assert verdict.passed and verdict.margin < 0.8, verdict


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_autograd_of_torchs_own_attention_passes(dtype, kind):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def sdpa(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Grads:
        leaves = [t.transpose(1, 2).detach().requires_grad_() for t in (q, k, v)]
        with sdpa_kernel([SDPBackend.MATH]):
            out = torch.nn.functional.scaled_dot_product_attention(
                *leaves, is_causal=True, enable_gqa=True
            )
        dq, dk, dv = torch.autograd.grad(out, leaves, dout.transpose(1, 2))
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    verdict = check(replace(CAUSAL, dtype=dtype), sdpa, kind=kind)
    assert verdict.passed and verdict.margin < 0.7, verdict


# Faults. Each takes correct gradients and makes them those of a faulty kernel.


def one_element_of(at: int, index: tuple[int, ...]) -> Callable[..., Any]:
    def fault(grads: Any) -> None:
        grads[at][index] = -grads[at][index]

    return fault


def rows_not_written(grads: Any) -> None:
    grads[1][:, 96:112] = NAN


def block_of_rows_missing(grads: Any) -> None:
    grads[0][:, 64:80] = 0


FAULTS = {
    "element of dq": one_element_of(0, (0, 150, 1, 3)),
    "element of dk": one_element_of(1, (0, 150, 0, 3)),
    "element of dv": one_element_of(2, (0, 150, 0, 3)),
    "not written": rows_not_written,
    "rows missing": block_of_rows_missing,
    "no sum over heads": lambda grads: grads[2].mul_(0.5),
    "dk and dv swapped": lambda grads: grads.__setitem__(slice(1, 3), grads[:0:-1]),
}
FAULTY_CALLS = {
    "unscaled": dict(scale=1.0),
    "scale off by a twentieth": dict(scale=1.05 / 8),
    "key ahead of the diagonal": dict(ahead=1),
    "key of the diagonal missing": dict(ahead=-1),
    "no delta": dict(delta=0.0),
    "delta off by a tenth": dict(delta=0.9),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("fault", [*FAULTS, *FAULTY_CALLS])
def test_a_fault_is_caught(fault, dtype):
    work = replace(CAUSAL, dtype=dtype)

    def faulty(*inputs: Any) -> Any:
        grads = list(fused(work, **FAULTY_CALLS.get(fault, {}))(*inputs))
        FAULTS.get(fault, lambda grads: None)(grads)
        return tuple(grads)

    verdict = check(work, faulty)
    assert not verdict.passed and verdict.reason


def test_a_missing_dlse_is_caught():
    def faulty(*inputs: Any) -> Any:
        return fused(CAUSAL)(*inputs[:-1], None)

    assert check(CAUSAL, faulty).passed
    assert check(CAUSAL, faulty, with_dlse=True).reason.startswith("dq: head [0, ")


def test_the_location_of_a_fault_is_named():
    q, k, v, *_ = make_inputs(CAUSAL, device="cpu")
    dout, _ = make_output_gradients(CAUSAL, device="cpu")
    truth = backward_truth(dout, q, k, v, causal=True)
    dq, dk, dv = fused(CAUSAL)(dout, q, k, v, None, None, None)

    def assessed(**change: Tensor) -> str:
        grads = {"dq": dq, "dk": dk, "dv": dv} | change
        return compare_backward((grads["dq"], grads["dk"], grads["dv"]), truth).reason

    assert assessed() == ""
    bad = dk.clone()
    bad[0, 7, 0, 5] = NAN
    assert assessed(dk=bad).startswith("dk[0, 7, 0, 5] is nan, the reference ")
    bad[0, 7, 0, 5] = 99.0
    assert assessed(dk=bad).startswith("dk: head [0, 0], row 7 is off by ")
    assert assessed(dv=dv[:, 1:]) == "dv has shape [1, 299, 1, 64], not [1, 300, 1, 64]"
    assert assessed(dq=dq.half()) == "dq has dtype torch.float16, not torch.bfloat16"


def test_gradients_of_what_sees_nothing_must_be_exactly_zero():
    for lengths, at, name in (((120, 100), 0, "dq"), ((100, 120), 1, "dk"), ((100, 120), 2, "dv")):
        work = replace(CAUSAL, seqlen_q=lengths[0], seqlen_k=lengths[1], window=(10, -1))
        q, k, v, *_ = make_inputs(work, device="cpu")
        dout, _ = make_output_gradients(work, device="cpu")
        options: dict[str, Any] = dict(causal=True, window=(10, -1))
        truth = backward_truth(dout, q, k, v, **options)
        grads = naive_attention_backward(dout, q, k, v, **options)
        assert compare_backward(grads, truth).passed
        grads[at][0, 0, 0, 1] = 2.0**-100
        what = "a row without keys" if name == "dq" else "a key that no row sees"
        reason = compare_backward(grads, truth).reason
        assert reason.startswith(f"{name}[0, 0, 0, 1] is 7.88861e-31 in {what}, not 0")


def moody(work: Workload, change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    calls = 0

    def run(*inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        dq, dk, dv = fused(work)(*inputs)
        return dq, (dk if calls % 2 else change(dk)), dv

    return run


def test_results_that_differ_between_runs_are_reported():
    def one_ulp(t: Tensor) -> Tensor:
        return torch.nextafter(t, torch.full_like(t, INF))

    verdict = check(CAUSAL, moody(CAUSAL, one_ulp))
    assert verdict.passed and verdict.repeatable is False
    verdict = check(CAUSAL, moody(CAUSAL, one_ulp), deterministic=True)
    assert not verdict.passed and verdict.repeatable is False
    assert verdict.reason.startswith("dk differs between runs, and deterministic gradients")
    assert check(CAUSAL, deterministic=True).passed
    assert not check(CAUSAL, moody(CAUSAL, lambda t: t + 1)).passed


def test_memory_is_poisoned_before_each_run(monkeypatch):
    held: list[Tensor] = []
    full = torch.full
    monkeypatch.setattr(torch, "full", lambda *a, **kw: held.append(t := full(*a, **kw)) or t)

    def unwritten(*inputs: Any) -> Grads:
        last = held[-9:]
        assert all(t.isnan().all() for t in last)
        return last[0], last[3], last[6]  # as if the allocator had handed them out

    assert check(CAUSAL, unwritten).reason == "dq[0, 0, 0, 0] is nan; the reference is finite"


class TestSampling:
    """Above a size, only some KV heads are compared, but every value is scanned."""

    work = Workload.of(batch=2, seqlen=300, heads_q=4, heads_kv=2, head_dim=16, dtype="float32")

    @pytest.fixture(autouse=True)
    def small_limit(self, monkeypatch):
        monkeypatch.setitem(gate.FULL_SCORES, "cpu", 400_000)

    def test_whole_groups_of_heads_are_compared(self):
        verdict = check(self.work)
        assert verdict.passed and verdict.checked == "2 of 4 KV heads"

    @pytest.mark.parametrize("at", [0, 1, 2])
    def test_nan_is_found_anywhere_and_values_in_the_first_and_last(self, at):
        def faulty(index: tuple[int, ...], value: float) -> Verdict:
            def run(*inputs: Any) -> Any:
                grads = fused(self.work)(*inputs)
                grads[at][index] = value
                return grads

            return check(self.work, run)

        last = -1, 200, -1, 3
        assert not faulty((0, 0, 0, 3), 9.0).passed and not faulty(last, 9.0).passed
        other = (0, 200, 1 if at else 2, 3)
        assert faulty(other, 9.0).passed and not faulty(other, NAN).passed

    def test_packed_batches_are_sampled_by_head(self):
        work = Workload.of(seqlens=[300, 400], heads_q=4, heads_kv=2, head_dim=16, dtype="float32")
        verdict = check(work, with_dlse=True)
        assert verdict.passed and verdict.checked == "1 of 2 KV heads"


def test_the_truth_is_computed_once_for_many_impls(monkeypatch):
    calls = []
    truth = backward_truth
    monkeypatch.setattr(
        backward, "backward_truth", lambda *a, **kw: calls.append(1) or truth(*a, **kw)
    )
    backward.cached_truth.cache_clear()
    small = replace(CAUSAL, seqlen_q=20, seqlen_k=20)
    for _ in range(3):
        check(small)
    assert len(calls) == 1


class TestTraining:
    """A training step: forward and backward, each by its own rule."""

    work = replace(CAUSAL, seqlen_q=60, seqlen_k=60)

    def step(self, change: Callable[[list[Tensor]], Any] = list) -> Verdict:
        def run(dout: Tensor, *inputs: Any) -> Any:
            out, lse = attention_reference(*inputs, causal=True)
            grads = fused(self.work)(dout, *inputs, None)
            parts = [out.bfloat16(), lse.float(), *grads]
            change(parts)
            return tuple(parts)

        return check_training_fn(run, self.work, device="cpu")

    def test_a_right_one_passes(self):
        verdict = self.step()
        assert (
            verdict.passed and verdict.repeatable and set(verdict.gradients) == {"dq", "dk", "dv"}
        )

    @pytest.mark.parametrize("at", range(5))
    def test_each_result_is_checked(self, at):
        verdict = self.step(lambda parts: parts[at].add_(3.0))
        name = ("out", "lse", "dq", "dk", "dv")[at]
        assert not verdict.passed and verdict.reason.startswith(name)


def test_output_gradients_are_seeded_and_have_the_shape_of_the_results():
    for work in (CAUSAL, Workload.of(seqlens=[(3, 5), (0, 2)], heads=2, head_dim=8, head_dim_v=16)):
        dout, dlse = make_output_gradients(work, "wide_range", 1, "cpu")
        q, *_, cu_q, _ = make_inputs(work, "wide_range", 1, "cpu")
        assert dout.shape == (*q.shape[:-1], work.head_dim_v) and dout.dtype == q.dtype
        lse_shape = (work.heads_q, q.shape[0]) if cu_q is not None else (1, 2, 300)
        assert dlse.shape == lse_shape and dlse.dtype == torch.float32
        assert torch.equal(dout, make_output_gradients(work, "wide_range", 1, "cpu")[0])
        assert not torch.equal(dout, make_output_gradients(work, "wide_range", 2, "cpu")[0])
        assert not torch.equal(dout.flatten()[:40], q.flatten()[:40])


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
def test_empty_sequences_pass(lengths):
    work = replace(SQUARE, seqlen_q=lengths[0], seqlen_k=lengths[1])

    def zeros(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Grads:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    verdict = check(work, zeros)
    assert verdict.passed and verdict.max_abs_err == 0.0 and verdict.err_ratio is None
