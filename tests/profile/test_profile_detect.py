"""Detectors: a finding where the numbers justify it, none otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_trace import RECORDINGS, MadeTrace, recorded

from attnscope.profile.analysis.findings import Finding, detect
from attnscope.profile.attribution.owners import Attribution

BMM, SOFTMAX = "aten::bmm", "aten::_softmax"


def find(attribution: Attribution, kind: str) -> Finding | None:
    found = [finding for finding in detect(attribution) if finding.kind == kind]
    assert len(found) <= 1
    return found[0] if found else None


def test_recorded_traces() -> None:
    """The recordings are small and launch-bound; only the long ones have the finding."""
    kinds = {name: [finding.kind for finding in detect(recorded(name))] for name in RECORDINGS}
    silent: list[str] = []
    assert kinds == {
        "ops": silent,
        "raw": silent,
        "graph": silent,
        "graph_both": silent,
        "cold": silent,
        "train": ["starvation"],
        "stack": ["starvation"],
        "streams": ["fp32 product"],
        "threads": silent,
    }


def test_findings_have_evidence_and_advice() -> None:
    for name in RECORDINGS:
        for finding in detect(recorded(name)):
            assert finding.evidence and finding.advice.endswith(".")
            assert any(letter.isdigit() for letter in finding.title)


def loop(wait: float, made: MadeTrace | None = None) -> MadeTrace:
    """Ten steps of 1 ms: a launch, a kernel, and an .item() that waits."""
    made = made or MadeTrace()
    for step in range(10):
        at = 1000 * step
        made.range("step", at, 900)
        made.frame("train.py(12): main", at + 1, 890)
        made.kernel("k", at + 20, 80, launch=at + 10)
        made.op("aten::item", at + 30, wait + 20)
        made.op("aten::_local_scalar_dense", at + 31, wait + 10)
        made.call("cudaStreamSynchronize", at + 35, wait)
    return made


def test_long_synchronisations_and_who_caused_them(tmp_path: Path) -> None:
    finding = find(loop(600).attribution(tmp_path), "synchronisation")
    assert finding is not None
    row = finding.evidence[0]
    # No launch follows the last .item(): that wait costs nothing.
    assert (row["call"], row["op"], row["calls"]) == ("cudaStreamSynchronize", "aten::item", 9)
    assert row["wait_us"] == 9 * 600 and row["range"] == "step"
    assert row["line"] == "train.py(12): main"
    assert row["gpu_idle_after_us"] == pytest.approx(9 * (1020 - 635))
    assert "5.40 ms" in finding.title and "aten::item" in finding.title


def test_short_waits_and_a_closing_one_are_no_finding(tmp_path: Path) -> None:
    assert find(loop(90).attribution(tmp_path), "synchronisation") is None
    made = MadeTrace()
    made.range("step", 0, 100)
    made.kernel("k", 20, 5000, launch=10)
    made.call("cudaDeviceSynchronize", 30, 5000)
    assert find(made.attribution(tmp_path), "synchronisation") is None


@pytest.mark.parametrize(
    ("dtype", "symbol", "units"),
    (
        ("float", "ampere_sgemm_128x64_tn", "FP32 units"),
        ("float", "sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tensor16x8x8", "TF32 tensor cores"),
        ("c10::BFloat16", "nvjet_sm90_tst_128x64_64x8_1x2_h_bz_NNT", None),
    ),
)
@pytest.mark.parametrize("shapes", ([[512, 512], [512, 512]], None))
def test_float32_products(
    tmp_path: Path, dtype: str, symbol: str, units: str | None, shapes: list[Any] | None
) -> None:
    made = MadeTrace()
    for at in (0, 1000):
        made.op("aten::mm", at, 20, shapes, dtype)
        made.kernel(symbol, at + 30, 400, launch=at + 10)
    finding = find(made.attribution(tmp_path), "fp32 product")
    if units is None:
        assert finding is None
        return
    assert finding is not None
    row = finding.evidence[0]
    assert (row["op"], row["units"], row["calls"], row["gpu_us"]) == ("aten::mm", units, 2, 800)
    assert units in finding.title and "100%" in finding.title


def test_a_small_share_of_float32_products_is_no_finding(tmp_path: Path) -> None:
    made = MadeTrace()
    made.op("aten::mm", 0, 20, [[512, 512], [512, 512]], "float")
    made.kernel("ampere_sgemm_128x64_tn", 30, 150, launch=10)
    made.kernel("other", 200, 5000)
    assert find(made.attribution(tmp_path), "fp32 product") is None


def attention(made: MadeTrace, at: float, keys: int = 128, parent: bool = True) -> None:
    """Scores, a mask, softmax, output of B*H 8, 64 queries: 100 us of kernels."""
    shapes = [
        (BMM, [[8, 64, 32], [8, 32, keys]], 40.0),
        ("aten::masked_fill_", [[8, 64, keys], [8, 64, keys]], 10.0),
        (SOFTMAX, [[2, 4, 64, 128]], 20.0),
        (BMM, [[8, 64, 128], [8, 128, 32]], 30.0),
    ]
    if parent:
        made.range("attention", at, 200)
    for place, (name, inputs, duration) in enumerate(shapes):
        begin = at + 5 + 10 * place
        made.op(name, begin, 8, inputs)
        made.kernel(f"k{place}", at + 200 + 50 * place, duration, launch=begin + 2)


def test_unfused_attention(tmp_path: Path) -> None:
    made = MadeTrace()
    attention(made, 0)
    attention(made, 1000)
    finding = find(made.attribution(tmp_path), "unfused attention")
    assert finding is not None and len(finding.evidence) == 2
    row = finding.evidence[0]
    assert (row["range"], row["scores"], row["kernels"]) == ("attention", [2, 4, 64, 128], 4)
    assert (row["gpu_us"], row["products_us"], row["softmax_us"]) == (100, 70, 20)
    assert row["between_us"] == 10 and row["flops"] == 2 * 2 * 8 * 64 * 128 * 32
    assert "100%" in finding.title


def test_products_around_a_softmax_of_something_else(tmp_path: Path) -> None:
    made = MadeTrace()
    attention(made, 0, keys=64)  # the softmax is over a matrix that is not the product
    assert find(made.attribution(tmp_path), "unfused attention") is None
    made = MadeTrace()
    attention(made, 0)
    made.kernel("other", 2000, 5000)
    assert find(made.attribution(tmp_path), "unfused attention") is None


def test_attention_split_over_ranges_is_not_one(tmp_path: Path) -> None:
    made = MadeTrace()
    attention(made, 0, parent=False)
    made.range("router", 0, 30)
    made.range("experts", 32, 30)
    assert find(made.attribution(tmp_path), "unfused attention") is None


def launches(count: int, every: float, duration: float) -> MadeTrace:
    made = MadeTrace()
    made.range("step", 0, count * every + 100)
    end = 0.0
    for at in range(count):
        launch = every * at + 10
        start = max(launch + 5, end)
        made.kernel("k", start, duration, launch=launch)
        end = start + duration
    return made


def test_starvation(tmp_path: Path) -> None:
    finding = find(launches(200, 20, 4).attribution(tmp_path), "starvation")
    assert finding is not None
    row = finding.evidence[0]
    # Each gap is 16 us; 3 us of a gap are between the end of the launch call and the start.
    assert (row["range"], row["gaps"]) == ("step", 199)
    assert row["idle_us"] == pytest.approx(199 * 13) and row["longest_us"] == pytest.approx(13)
    assert "a kernel takes 4.0 us" in finding.title


def test_what_the_profiler_took_is_not_starvation(tmp_path: Path) -> None:
    made = launches(200, 20, 4)
    made.overhead(0, 200 * 20 * 0.9)
    assert find(made.attribution(tmp_path), "starvation") is None


def test_a_busy_gpu_or_a_few_launches_are_not_starved(tmp_path: Path) -> None:
    assert find(launches(200, 20, 30).attribution(tmp_path), "starvation") is None
    assert find(launches(50, 20, 4).attribution(tmp_path), "starvation") is None


def test_tiny_grids(tmp_path: Path) -> None:
    made = MadeTrace()
    made.op("aten::mm", 0, 20)
    made.kernel("small", 30, 200, launch=10, grid=[4, 8, 1])
    made.kernel("large", 300, 800, grid=[132, 1, 1])
    made.kernel("short", 1200, 20, grid=[1, 1, 1])
    finding = find(made.attribution(tmp_path), "tiny grid")
    assert finding is not None and len(finding.evidence) == 1
    row = finding.evidence[0]
    assert (row["kernel"], row["blocks"], row["sms"], row["op"]) == ("small", 32, 132, "aten::mm")
    assert row["share"] == pytest.approx(200 / 1020)
    made = MadeTrace()
    made.kernel("enough", 30, 200, grid=[66, 1, 1])
    assert find(made.attribution(tmp_path), "tiny grid") is None


def test_a_program_without_kernels_has_no_findings(tmp_path: Path) -> None:
    made = MadeTrace()
    made.op("aten::mm", 0, 20)
    assert detect(made.attribution(tmp_path)) == []
