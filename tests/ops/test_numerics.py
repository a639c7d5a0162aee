"""The gate: correct results pass in every dtype and kind of input, planted faults fail."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnscope import attention, attention_varlen, numerics
from attnscope.bench.workloads import Workload
from attnscope.numerics import (
    KINDS,
    Verdict,
    check_forward_fn,
    compare_forward,
    forward,
    make_inputs,
)
from attnscope.numerics.forward import forward_truth
from attnscope.numerics.gate import ulp
from attnscope.reference import attention_reference, naive_attention

INF, NAN = math.inf, math.nan
SQUARE = Workload.of(batch=1, seqlen=300, heads=2, head_dim=64, dtype="bfloat16")
CAUSAL = replace(SQUARE, causal=True)
Result = tuple[Tensor, Tensor | None]


def op(work: Workload) -> Callable[..., Result]:
    """The CPU op, with the workload's mask."""
    options = {"causal": work.causal, "window": work.window, "softcap": work.softcap}

    def run(q: Tensor, k: Tensor, v: Tensor, cu_q: Any = None, cu_k: Any = None) -> Result:
        if cu_q is not None:
            lengths = (work.seqlen_q, work.seqlen_k)
            return attention_varlen(q, k, v, cu_q, cu_k, *lengths, return_lse=True, **options)
        return attention(q, k, v, return_lse=True, **options)

    return run


def check(work: Workload, fn: Callable[..., Result] | None = None, **options: Any) -> Verdict:
    return check_forward_fn(fn or op(work), work, device="cpu", **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("work", [SQUARE, CAUSAL], ids=["full", "causal"])
def test_a_right_result_passes(work, dtype, kind):
    verdict = check(replace(work, dtype=dtype), kind=kind)
    assert verdict.passed and verdict.reason == "", verdict
    assert verdict.margin < 0.6 and verdict.lse_margin < 0.6
    assert verdict.repeatable and verdict.checked == "all rows"


@pytest.mark.parametrize("kind", KINDS)
def test_a_peer_without_lse_is_assessed_by_its_output(kind):
    def sdpa(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Result:
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True)
        return out.transpose(1, 2), None

    verdict = check(CAUSAL, sdpa, kind=kind)
    assert verdict.passed, verdict
    assert verdict.lse_err is None and verdict.lse_ratio is None and verdict.lse_margin is None


def test_packed_workloads_pass():
    work = Workload.of(
        seqlens=[(70, 70), (0, 5), (5, 0), (1, 90), (40, 20)],
        heads_q=4,
        heads_kv=2,
        head_dim=40,
        causal=True,
        softcap=10.0,
    )
    assert check(work).passed


# Faults. Each takes the results of a correct kernel and returns those of a faulty one.


def one_element(fn, q, k, v):
    out, lse = fn(q, k, v)
    out[0, 150, 1, 3] *= -1
    return out, lse


def last_key_dropped(fn, q, k, v):
    out, lse = fn(q, k, v)
    last, last_lse = attention(q[:, -1:], k[:, :-1], v[:, :-1], return_lse=True)
    return torch.cat((out[:, :-1], last), 1), torch.cat((lse[..., :-1], last_lse), 2)


def key_ahead_of_the_diagonal(fn, q, k, v):
    return attention(q, k, v, window=(-1, 1), return_lse=True)


def key_of_the_diagonal_missing(fn, q, k, v):
    out, lse = fn(q[:, 1:], k[:, :-1], v[:, :-1])
    first = fn(q[:, :1], k[:, :1], v[:, :1])
    return torch.cat((first[0], out), 1), torch.cat((first[1], lse), 2)


def unscaled(fn, q, k, v):
    return attention(q, k, v, causal=True, scale=1.0, return_lse=True)


def scale_off_by_a_twentieth(fn, q, k, v):
    return attention(q, k, v, causal=True, scale=1.05 / 8, return_lse=True)


def heads_swapped(fn, q, k, v):
    out, lse = fn(q, k, v)
    return out.flip(2), lse.flip(1)


def row_not_written(fn, q, k, v):
    out, lse = fn(q, k, v)
    empty = torch.empty_like(out)
    empty[:, :100], empty[:, 101:] = out[:, :100], out[:, 101:]
    return empty, lse


def nan(fn, q, k, v):
    out, lse = fn(q, k, v)
    out[0, 299, 1, 63] = NAN
    return out, lse


FAULTS = (
    one_element,
    last_key_dropped,
    key_ahead_of_the_diagonal,
    key_of_the_diagonal_missing,
    unscaled,
    scale_off_by_a_twentieth,
    heads_swapped,
    row_not_written,
    nan,
)


@pytest.mark.parametrize("with_lse", [True, False], ids=["lse", "no-lse"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_caught(fault, dtype, with_lse):
    work = replace(CAUSAL, dtype=dtype)

    def faulty(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Result:
        out, lse = fault(op(work), q, k, v)
        return out, lse if with_lse else None

    verdict = check(work, faulty)
    assert not verdict.passed and verdict.reason


@pytest.mark.parametrize("off_by", [1e-3, -1e-4])
def test_an_lse_of_its_own_error_is_caught(off_by):
    def faulty(*inputs: Any) -> Result:
        out, lse = op(CAUSAL)(*inputs)
        lse[0, 1, 250] += off_by
        return out, lse

    verdict = check(CAUSAL, faulty)
    assert not verdict.passed and verdict.margin < 1 < verdict.lse_margin
    assert verdict.reason.startswith("lse[0, 1, 250] is off by")


def test_the_location_of_a_fault_is_named():
    q, k, v, *_ = make_inputs(CAUSAL, device="cpu")
    ref, base = attention_reference(q, k, v, causal=True), naive_attention(q, k, v, causal=True)
    out, lse = op(CAUSAL)(q, k, v)

    def assessed(**change: Any) -> str:
        a, b = change.get("out", out), change.get("lse", lse)
        return compare_forward(a, b, *ref, *base).reason

    assert assessed() == ""
    bad = out.clone()
    bad[0, 7, 1, 5] = NAN
    assert assessed(out=bad).startswith("out[0, 7, 1, 5] is nan, the reference ")
    bad[0, 7, 1, 5] = 9.0
    assert assessed(out=bad).startswith("out: head [0, 1], row 7 is off by ")
    bad = lse.clone()
    bad[0, 1, 9] = -INF
    assert assessed(lse=bad).startswith("lse[0, 1, 9] is -inf, the reference ")
    assert assessed(out=out[:, 1:]) == "out has shape [1, 299, 2, 64], not [1, 300, 2, 64]"
    assert assessed(out=out.half()) == "out has dtype torch.float16, not torch.bfloat16"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda out, lse: out[:, :20].fill_(0.5), "out[0, 0, 0, 0] is 0.5 in a row without"),
        (lambda out, lse: out[:, :20].fill_(NAN), "out[0, 0, 0, 0] is nan"),
        (lambda out, lse: lse[..., :20].fill_(INF), "lse[0, 0, 0] is inf, the reference -inf"),
        (lambda out, lse: lse[..., :20].fill_(0), "lse[0, 0, 0] is 0, the reference -inf"),
    ],
    ids=["not zero", "nan", "+inf", "zero"],
)
def test_rows_without_keys_are_held_to_zero_and_minus_infinity(change, reason):
    work = replace(CAUSAL, seqlen_q=120, seqlen_k=100)
    assert check(work).passed

    def faulty(*inputs: Any) -> Result:
        out, lse = op(work)(*inputs)
        change(out, lse)
        return out, lse

    verdict = check(work, faulty)
    assert not verdict.passed and verdict.reason.startswith(reason)


def test_results_that_differ_between_runs_are_reported():
    calls = 0

    def moody(*inputs: Any) -> Result:
        nonlocal calls
        calls += 1
        out, lse = op(CAUSAL)(*inputs)
        return (out if calls % 2 else torch.nextafter(out, torch.full_like(out, INF))), lse

    verdict = check(CAUSAL, moody)
    assert verdict.passed and verdict.repeatable is False

    def wrong_the_second_time(*inputs: Any) -> Result:
        nonlocal calls
        calls += 1
        out, lse = op(CAUSAL)(*inputs)
        return (out if calls % 2 else out + 1), lse

    assert not check(CAUSAL, wrong_the_second_time).passed


def test_memory_is_poisoned_before_each_run(monkeypatch):
    seen: list[Tensor] = []
    full = torch.full
    monkeypatch.setattr(torch, "full", lambda *a, **kw: seen.append(t := full(*a, **kw)) or t)

    def unwritten(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Result:
        assert {t.shape for t in seen[-4:]} == {(1, 300, 2, 64), (1, 300, 2)}
        assert all(t.isnan().all() for t in seen[-4:])
        return seen[-4], None  # as if the allocator had handed it out

    verdict = check(CAUSAL, unwritten)
    assert verdict.reason == "out[0, 0, 0, 0] is nan; the reference is finite"
    assert len(seen) >= 8


class TestSampling:
    """Above a size, only some heads and rows are compared, but every value is scanned."""

    work = Workload.of(batch=2, seqlen=1500, heads=4, head_dim=16, dtype="float32", causal=True)

    @pytest.fixture(autouse=True)
    def small_limit(self, monkeypatch):
        monkeypatch.setitem(numerics.FULL_SCORES, "cpu", 1 << 21)

    def faulty(self, at: tuple[int, ...], value: float) -> Verdict:
        def run(*inputs: Any) -> Result:
            out, lse = op(self.work)(*inputs)
            out[at] = value
            return out, lse

        return check(self.work, run)

    def test_it_prints_what_was_compared(self):
        verdict = check(self.work)
        assert verdict.passed and verdict.checked == "2 of 8 heads, 476 of 1500 rows"

    def test_first_and_last_are_always_compared(self):
        for at in ((0, 0, 0, 3), (1, 1499, 3, 3), (0, 1499, 0, 3)):
            assert not self.faulty(at, 9.0).passed

    def test_nan_is_found_anywhere(self):
        missed = [row for row in range(0, 1500, 64) if self.faulty((0, row, 1, 3), 9.0).passed]
        assert missed, "head 1 is not in the sample"
        verdict = self.faulty((0, missed[0], 1, 3), NAN)
        assert verdict.reason == f"out[0, {missed[0]}, 1, 3] is nan; the reference is finite"

    def test_packed_batches_are_sampled_by_head(self):
        work = Workload.of(seqlens=[600, 900], heads=4, head_dim=16, dtype="float32")
        verdict = check(work)
        assert verdict.passed and verdict.checked == "1 of 4 heads"


def test_the_reference_is_computed_once_for_many_impls(monkeypatch):
    calls = []

    def counting(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return attention_reference(*args, **options)

    monkeypatch.setattr(forward, "attention_reference", counting)
    forward_truth.cache_clear()
    for _ in range(3):
        check(CAUSAL)
    assert len(calls) == 1
    check(CAUSAL, seed=1)
    assert len(calls) == 2


class TestInputs:
    def test_same_seed_same_inputs(self):
        for kind in KINDS:
            a, b = (make_inputs(CAUSAL, kind, 3, "cpu") for _ in range(2))
            other = make_inputs(CAUSAL, kind, 4, "cpu")
            assert all(torch.equal(x, y) for x, y in zip(a[:3], b[:3], strict=True))
            assert not torch.equal(a[0], other[0])

    def test_shapes(self):
        work = Workload.of(seqlens=[(3, 5), (0, 2)], heads_q=4, heads_kv=2, head_dim=8)
        q, k, v, cu_q, cu_k = make_inputs(work, device="cpu")
        assert (q.shape, k.shape, v.shape) == ((3, 4, 8), (7, 2, 8), (7, 2, 8))
        assert cu_q.tolist() == [0, 3, 3] and cu_k.tolist() == [0, 5, 7]
        assert cu_q.dtype == torch.int32 and q.dtype == torch.bfloat16

    def test_large_logits_are_large_and_exact(self):
        q, k, _, _, _ = make_inputs(SQUARE, "large_logits", device="cpu")
        exact = q[0, :, 0].double() @ k[0, :, 0].double().T / 8
        rounded = q[0, :, 0] @ k[0, :, 0].T / 8
        assert torch.equal(rounded.double(), exact) and exact.abs().max() > 400

    def test_constant_rows_make_every_key_weigh_the_same(self):
        q, k, v, _, _ = make_inputs(SQUARE, "constant_rows", device="cpu")
        out, _ = attention_reference(q, k, v)
        torch.testing.assert_close(out, v.double().mean(1, keepdim=True).expand_as(out))

    def test_wide_range_spans_many_powers_of_two(self):
        for t in make_inputs(replace(SQUARE, dtype="float16"), "wide_range", device="cpu")[:3]:
            assert t.abs().max() / t.abs().min() > 2**13 and t.isfinite().all()

    def test_outliers_are_rare_and_large(self):
        q, *_ = make_inputs(SQUARE, "outliers", device="cpu")
        assert 0.001 < (q.abs() > 6).double().mean() < 0.01

    def test_an_unknown_kind_names_those_there_are(self):
        with pytest.raises(
            ValueError, match="kind must be one of normal, large_logits, .* got 'odd'"
        ):
            make_inputs(SQUARE, "odd", device="cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_ulp_is_the_spacing_of_the_dtype(dtype):
    values = torch.tensor([1e-7, 0.03, 0.5, 1.0, 1.7, 2.0, 100.0], dtype=dtype)
    spacing = torch.nextafter(values, torch.full_like(values, INF)).double() - values.double()
    assert torch.equal(ulp(values.double(), dtype), spacing)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
def test_empty_sequences_pass(lengths):
    verdict = check(replace(SQUARE, seqlen_q=lengths[0], seqlen_k=lengths[1]))
    assert verdict.passed and verdict.max_abs_err == 0.0 and verdict.err_ratio is None
