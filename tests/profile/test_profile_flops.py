"""FLOPs from recorded shapes: formulas, causal masks, each counted once, and shares of the peak."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from made_trace import H200, MadeTrace, op_event, recorded
from torch.utils.flop_counter import FlopCounterMode

import attnscope
from attnscope.common.hardware.devices import Device, find_device
from attnscope.profile.analysis import flops
from attnscope.profile.analysis.flops import FlopCounts, op_flops, op_work, trace_device
from attnscope.profile.analysis.rates import Work, rate
from attnscope.profile.attribution.owners import Attribution
from attnscope.profile.trace.events import CpuEvent
from attnscope.profile.trace.reader import read_trace

Q = (1, 4, 1, 64)  # [B, S, H, D]
P = (1, 1, 4, 64)  # [B, H, S, D]
FLASH = "aten::_scaled_dot_product_flash_attention"


def work(event: CpuEvent) -> Work:
    found = op_work(event)
    assert isinstance(found, Work), found
    return found


def test_small_attention_by_hand() -> None:
    full = work(op_event("attnscope::forward", Q, Q, Q, _8=False, _9=-1, _10=-1))
    assert (full.flops, full.rule) == (4096, "attention 2 (D + Dv) a pair, all pairs")
    causal = work(op_event("attnscope::forward", Q, Q, Q, _8=True, _9=-1, _10=-1))
    assert causal.flops == 2560
    assert causal.rule == "attention 2 (D + Dv) a pair, visible pairs of a causal mask"
    backward = work(op_event("attnscope::backward", Q, Q, Q, Q, Q, _11=True, _12=-1, _13=-1))
    assert backward.flops == 6400 == 2.5 * causal.flops
    assert backward.rule == "attention 2 (3 D + 2 Dv) a pair, visible pairs of a causal mask"
    assert full.dtype == "bfloat16"


def test_every_attention_op_counts_the_same() -> None:
    for name, op in flops._ATTENTION.items():
        shape = Q if op.order == "BSHD" else P
        tensors = [shape] * (3 + op.first)
        scalars = {f"_{op.causal}": True}
        if op.window is not None:
            scalars |= {f"_{op.window}": -1, f"_{op.window + 1}": -1}
        expected = 6400 if op.backward else 2560
        assert op_flops(op_event(name, *tensors, **scalars)) == expected, name


def test_argument_positions_are_those_of_the_installed_ops() -> None:
    names = {
        "first": {"query", "q"},
        "causal": {"is_causal", "causal", "custom_mask_type"},
        "window": {"window_size_left", "window_left"},
        "bias": {"attn_bias", "bias"},
    }
    seen = 0
    for name, op in flops._ATTENTION.items():
        namespace, short = name.split("::")
        packet = getattr(getattr(torch.ops, namespace), short, None)
        if namespace not in ("aten", "attnscope") or packet is None:
            continue
        arguments = [argument.name for argument in packet.default._schema.arguments]
        for field, allowed in names.items():
            position = getattr(op, field)
            assert position is None or arguments[position] in allowed, (name, field)
        lengths = {"seqlen_k", "window_size", "seqused_k", "block_table"}
        lengths |= {f"cu{m}_{q}" for m in ("m_seq", "_seqlens") for q in "qk"}
        there = {arguments[at] for at in op.lengths if at < len(arguments)}  # some are newer
        assert there == lengths & set(arguments), name
        seen += 1
    assert seen >= 10


def test_causal_alignment() -> None:
    """2 queries, 4 keys: bottom-right alignment has 3 + 4 pairs, torch's top-left 1 + 2."""
    q, k = (1, 2, 1, 64), (1, 4, 1, 64)
    assert op_flops(op_event("attnscope::forward", q, k, k, _8=True)) == 7 * 256
    q, k = (1, 1, 2, 64), (1, 1, 4, 64)
    assert op_flops(op_event(FLASH, q, k, k, _4=True)) == 3 * 256
    # 4 queries, 2 keys: top-left has 1 + 2 + 2 + 2 pairs, bottom-right 0 + 0 + 1 + 2.
    assert op_flops(op_event(FLASH, k, q, q, _4=True)) == 7 * 256
    q, k = (1, 4, 1, 64), (1, 2, 1, 64)
    assert op_flops(op_event("attnscope::forward", q, k, k, _8=True)) == 3 * 256


def test_window_heads_and_head_dim_v() -> None:
    q, k, v = (2, 8, 4, 64), (2, 8, 2, 64), (2, 8, 2, 32)
    windowed = work(op_event("attnscope::forward", q, k, v, _8=True, _9=1, _10=-1))
    assert windowed.flops == 2 * 2 * 4 * 15 * (64 + 32)  # 1 + 7 * 2 pairs per head
    assert op_flops(op_event("attnscope::forward", q, k, v, _8=False)) == 2 * 2 * 4 * 64 * (64 + 32)
    backward = op_event("attnscope::backward", q, q, k, v, q, q, _11=False)
    assert op_flops(backward) == 2 * 2 * 4 * 64 * (3 * 64 + 2 * 32)
    masked = work(op_event("aten::_scaled_dot_product_efficient_attention", P, P, P, P, _6=False))
    assert masked.rule == "attention 2 (D + Dv) a pair, all pairs, the mask tensor not looked into"


@pytest.mark.parametrize("transposed", (False, True))
def test_recorded_ops_agree_with_torchs_counter(tmp_path: Path, transposed: bool) -> None:
    conv = torch.nn.ConvTranspose2d if transposed else torch.nn.Conv2d
    layer = conv(4, 6, 3, stride=2, padding=1, groups=2, bias=True)
    x = torch.randn(2, 4, 9, 11, requires_grad=True)
    a, b = torch.randn(3, 5, 7), torch.randn(3, 7, 2)
    q, k = torch.randn(2, 8, 4, 16), torch.randn(2, 8, 4, 16)

    def run() -> None:
        layer(x).sum().backward()
        torch.bmm(a, b)
        torch.baddbmm(torch.zeros(3, 5, 2), a, b)
        torch.mm(a[0], b[0])
        torch.addmm(torch.zeros(2), a[0], b[0])
        attnscope.attention(q, k, k)

    run()
    with FlopCounterMode(display=False) as counter:
        run()
    with torch.profiler.profile(record_shapes=True) as profiler:
        run()
    profiler.export_chrome_trace(str(tmp_path / "cpu.json"))
    found: dict[str, int] = {}
    for event in read_trace(tmp_path / "cpu.json").cpu:
        if event.kind == "op" and (count := op_flops(event)) is not None:
            found[event.name] = found.get(event.name, 0) + count
    expected = {
        str(op).replace(".", "::", 1): count
        for op, count in counter.get_flop_counts()["Global"].items()
    }
    # torch's formula of the backward pass does not support grouped heads.
    expected["aten::convolution_backward"] = 2 * expected["aten::convolution"]
    assert found == expected and len(found) == 7


def test_what_is_not_known_has_a_reason() -> None:
    assert op_work(CpuEvent("op", "aten::mm", 1, 0, 1)) == "shapes were not recorded"
    assert op_work(op_event("aten::relu", (4, 4))) == "no FLOP formula for aten::relu"
    packed = op_event("attnscope::forward", (9, 1, 64), (9, 1, 64), (9, 1, 64), (3,), (3,))
    assert op_work(packed) == flops.LENGTHS
    odd = op_work(op_event("aten::mm", (4, 4)))
    assert isinstance(odd, str) and "recorded inputs" in odd
    assert op_flops(op_event("aten::mm", (4, 3), (5, 4))) is None


@pytest.mark.parametrize("name", [n for n, op in flops._ATTENTION.items() if op.lengths])
def test_lengths_that_are_in_tensors_are_not_guessed(name: str) -> None:
    """Packed, partly filled or paged caches: the shapes contain more keys than queries see."""
    op = flops._ATTENTION[name]
    shape = Q if op.order == "BSHD" else P
    for at in op.lengths:
        tensors = [shape] * (3 + op.first) + [None] * 40
        tensors[at] = (3,)
        event = op_event(name, *tensors, **{f"_{op.causal}": True})
        assert op_work(event) == flops.LENGTHS, at


def names_of(attribution: Attribution, counts: FlopCounts) -> list[str]:
    return sorted({attribution.trace.cpu[index].name for index in counts.works})


def test_recorded_ops_are_counted_once() -> None:
    attribution = recorded("ops")
    counts = FlopCounts(attribution)
    assert names_of(attribution, counts) == [
        FLASH, "aten::mm", "attnscope::forward", "attnscope_triton::forward", "fa3_fwd::fwd",
    ]  # fmt: skip
    assert counts.uncounted == []
    attention = 4 * 64 * 2 * 4 * (512 * 513 // 2)
    expected = {"gemm": 2 * 1024**3, "ours": attention, "triton": attention}
    expected |= {"flash": attention, "fa3": attention}
    ranges = [event for event in attribution.trace.cpu if event.kind == "range"]
    assert [counts.of(event) for event in ranges] == [expected[event.name] for event in ranges]
    by_name = {event.name: event for event in attribution.trace.cpu}
    assert counts.of(by_name["aten::matmul"]) == counts.of(by_name["aten::mm"]) == 2 * 1024**3
    # The op below the counted one has the same FLOPs on its own row.
    assert counts.of(by_name["aten::_flash_attention_forward"]) == attention
    everything = counts.within(attribution.trace.cpu)
    assert not isinstance(everything, str)
    assert sum(w.flops for w in everything) == 3 * (2 * 1024**3 + 4 * attention)


def test_training_step() -> None:
    attribution = recorded("train")
    counts = FlopCounts(attribution)
    # Tokens 512, width 128: 12 weights of width squared; attention B 2, H 4, S 256, D 32, causal.
    linear = 2 * 2 * 512 * 12 * 128**2
    attention = 2 * 4 * 32 * 2 * 4 * (256 * 257 // 2)
    by_range: dict[str, list[int | None]] = {}
    for event in attribution.trace.cpu:
        if event.kind == "range":
            by_range.setdefault(event.name, []).append(counts.of(event))
    assert by_range["forward"] == [linear + attention] * 2
    # All gradients of inputs and weights. LayerNorm makes the net's input need a gradient too.
    assert by_range["backward"] == [2 * linear + 5 * attention // 2] * 2
    assert by_range["optimizer"] == [None, None]
    assert counts.uncounted == []


def test_graph_replays_and_lost_shapes_are_reported() -> None:
    for name, reason in (("graph", "replayed by a CUDA graph"), ("cold", "were not recorded")):
        attribution = recorded(name)
        counts = FlopCounts(attribution)
        assert counts.works == {} and len(counts.uncounted) in (2, 6)
        outer = next(event for event in attribution.trace.cpu if event.kind == "range")
        assert counts.of(outer) is None
        found = counts.rate([outer], 1000, *trace_device(attribution.trace))
        assert found.flops is None and found.mfu is None
        assert found.reason is not None and reason in found.reason


def test_ops_that_were_only_captured_did_nothing() -> None:
    attribution = recorded("graph_both")
    counts = FlopCounts(attribution)
    capture = next(event for event in attribution.trace.cpu if event.name == "capture")
    assert counts.of(capture) is None
    assert counts.within([capture]) == "no op with a FLOP formula"


def test_mixed_known_and_unknown_products_are_not_summed(tmp_path: Path) -> None:
    made = MadeTrace()
    made.range("step", 0, 100)
    made.op("aten::mm", 1, 10, [[64, 64], [64, 64]])
    made.kernel("nvjet_sm90_tst_64x64", 20, 5, launch=5)
    made.op("mine::matmul", 30, 10)
    made.kernel("matmul_kernel", 50, 5, launch=35)
    attribution = made.attribution(tmp_path)
    counts = FlopCounts(attribution)
    step = next(event for event in attribution.trace.cpu if event.name == "step")
    said = counts.within([step])
    assert isinstance(said, str) and "matmul_kernel: no FLOP formula for mine::matmul" in said
    mm = next(event for event in attribution.trace.cpu if event.name == "aten::mm")
    assert counts.of(mm) == 2 * 64**3


def device() -> Device:
    found, reason = find_device("NVIDIA H200", 132, 140)
    assert found is not None, reason
    return found


def test_rate_on_a_known_device() -> None:
    card = device()
    found = rate([Work(989_400_000, "bfloat16", "2 m n k")], 2000, card, None, 1830)
    assert found.tflops == pytest.approx(494.7)
    assert found.mfu == pytest.approx(0.5)
    assert found.mfu_at_clock == pytest.approx(494.7 / card.peak_at("bfloat16", 1830))  # type: ignore[operator]
    assert (found.rule, found.peak) == ("2 m n k", "bfloat16 989.4 TFLOP/s")
    assert found.reason is None
    mixed = rate([Work(989_400_000, "bfloat16", "a"), Work(66_900_000, "float32", "b")], 2000, card)
    assert mixed.mfu == pytest.approx(1.0) and mixed.rule == "a; b"


def test_rate_without_what_it_needs() -> None:
    some = [Work(1000, "bfloat16", "2 m n k")]
    unknown, reason = find_device("NVIDIA H300")
    found = rate(some, 1000, unknown, reason)
    assert (found.flops, found.tflops, found.mfu) == (1000, pytest.approx(1e-3), None)
    assert found.reason == "no datasheet figures for 'NVIDIA H300': its peaks are not known"
    assert rate([], 1000, device()).reason == "no op with a FLOP formula"
    nothing = rate(some, 0, device())
    assert (nothing.flops, nothing.tflops) == (1000, None) and nothing.reason
    whole = rate([Work(1000, "int8", "2 m n k")], 1000, device())
    assert whole.mfu is None and whole.reason == "H200 SXM: no peak for int8"


@pytest.mark.parametrize(
    ("recorded_as", "dtype", "peak"),
    [
        ("c10::BFloat16", "bfloat16", 989.4),
        ("float", "float32", 66.9),
        ("double", "float64", 66.9),
        ("c10::Float8_e4m3fn", "float8_e4m3fn", 1978.9),
        ("c10::Float8_e5m2", "float8_e5m2", 1978.9),
    ],
)
def test_each_dtype_has_its_own_peak(recorded_as: str, dtype: str, peak: float) -> None:
    name = "aten::_scaled_mm" if "Float8" in recorded_as else "aten::mm"
    one = work(op_event(name, (64, 64), (64, 64), dtype=recorded_as))
    assert one.dtype == dtype
    found = rate([one], 1000, device())
    assert found.mfu == pytest.approx(2 * 64**3 / 1e6 / peak)
    assert found.peak == f"{dtype} {peak:g} TFLOP/s"


@pytest.mark.parametrize(("mfu", "shown"), [(1.1, True), (4.25, False)])
def test_a_rate_above_the_peak_is_missing_with_the_reason(mfu: float, shown: bool) -> None:
    some = [Work(round(mfu * 989_400_000), "bfloat16", "2 m n k")]
    found = rate(some, 1000, device(), None, 1830)
    assert found.mfu is None and found.mfu_at_clock is None
    # A card may run slightly above the clock of its specified peak, but not more.
    assert (found.tflops is not None) == shown
    assert found.flops == some[0].flops and found.rule == "2 m n k"
    assert found.reason is not None
    assert "above the peak, bfloat16 989.4 TFLOP/s: FLOPs or time cannot be right" in found.reason
    assert ("at the clock" in found.reason) == shown


def test_a_rate_above_the_peak_at_the_clock_that_was_read_is_missing_alone() -> None:
    found = rate([Work(989_400_000, "bfloat16", "2 m n k")], 2000, device(), None, 400)
    assert found.mfu == pytest.approx(0.5) and found.mfu_at_clock is None
    assert found.reason is not None and "no MFU at the clock" in found.reason


def test_device_of_a_trace(tmp_path: Path) -> None:
    card, reason = trace_device(recorded("ops").trace)
    assert card is not None and card.name == "H200 SXM" and reason is None
    cases = {
        "no device": None,
        "not known": H200 | {"name": "NVIDIA H300"},
        "not that card": H200 | {"numSms": 60},
    }
    for expected, properties in cases.items():
        made = MadeTrace(properties)
        made.op("aten::mm", 0, 1)
        card, reason = trace_device(made.attribution(tmp_path).trace)
        assert card is None and reason is not None and expected in reason


def test_tf32_products_are_not_compared_with_the_fp32_peak(tmp_path: Path) -> None:
    made = MadeTrace()
    made.op("aten::mm", 1, 10, [[64, 64], [64, 64]], dtype="float")
    made.kernel("sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tensor16x8x8", 20, 5, launch=5)
    counts = FlopCounts(made.attribution(tmp_path))
    assert [w.dtype for w in counts.works.values()] == ["tfloat32"]
    found = rate(counts.works.values(), 5000, device(), None, 1830)
    assert found.mfu == pytest.approx(2 * 64**3 / 5e6 / 494.7) and found.reason is None
    assert found.mfu_at_clock == pytest.approx(found.mfu, rel=2e-3)
    fp32 = FlopCounts(recorded("streams"))
    assert {w.dtype for w in fp32.works.values()} == {"float32"}
