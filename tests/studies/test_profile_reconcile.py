"""One call timed by several tools: the bounds on differences, and agreement on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from made_trace import MadeTrace, recorded

from attnscope.bench.timing import Timing
from attnscope.studies.ops.reconcile import (
    CALL,
    GAP_US,
    START_US,
    Measurement,
    Work,
    compare,
    measurements,
    reconcile,
    work_of_calls,
)


def test_work_of_calls(tmp_path: Path) -> None:
    made = MadeTrace()
    for at in (0, 100):
        made.range(CALL, at, 30)
        made.kernel("a", at + 40, 20, launch=at + 5)
        made.kernel("b", at + 50, 20, launch=at + 10, stream=8)
        made.kernel("Memcpy DtoD", at + 75, 5, launch=at + 20, cat="gpu_memcpy")
    made.kernel("outside", 300, 50)
    work = work_of_calls(made.attribution(tmp_path))
    assert (work.sums_us, work.pieces, work.overlap_us) == ([45, 45], 3, 10)


def test_calls_without_gpu_work_are_an_error(tmp_path: Path) -> None:
    made = MadeTrace()
    made.range(CALL, 0, 30)
    made.kernel("a", 40, 20, launch=5)
    made.range(CALL, 100, 30)
    with pytest.raises(ValueError, match="fn must run GPU work in each of 2 calls, got none in 1"):
        work_of_calls(made.attribution(tmp_path))
    with pytest.raises(ValueError, match="fn must run GPU work in each of 0 calls"):
        work_of_calls(recorded("ops"))


def test_differences_are_compared_with_what_a_tool_may_see() -> None:
    table = compare(
        [
            Measurement("reference", [100.0, 99.0, 101.0], "nothing"),
            Measurement("near", [102.0], "something"),
            Measurement("far", [104.0], "something"),
            Measurement("allowed", [104.0], "gaps", beyond_us=2.0),
            Measurement("less", [96.0], "gaps", beyond_us=2.0),
            Measurement("hidden", [96.0], "overlap", within_us=2.0),
            Measurement("none", reason="cannot be captured"),
        ]
    ).set_index("tool")
    assert list(table["agrees"])[:6] == [True, True, False, True, False, True]
    assert table["difference_us"]["far"] == 4 and table["difference"]["far"] == 0.04
    assert (table["least_us"]["hidden"], table["most_us"]["allowed"]) == (-5.0, 5.0)
    assert (table["p20_us"]["reference"], table["p80_us"]["reference"]) == (99.4, 100.6)
    none = table.loc["none"]
    assert none[["median_us", "difference", "agrees"]].isna().all()
    assert none["reason"] == "cannot be captured" and none["samples"] == 0
    with pytest.raises(ValueError, match="must begin with the reference and its samples, got none"):
        compare([Measurement("none")])


def test_each_tool_names_what_it_sees_beyond_the_kernels() -> None:
    events = Timing(samples_ms=[0.110, 0.112])
    refused = Timing(error=RuntimeError("not permitted when stream is capturing"))
    work = Work([100.0, 100.0], pieces=3, overlap_us=0.0)
    profiler, paired, graph = measurements(work, events, refused, pair_us=2.0)
    assert profiler.samples_us == [100.0, 100.0] and "3 kernels" in profiler.beyond
    assert paired.samples_us == [110.0, 112.0]
    assert paired.beyond_us == 2.0 + START_US + 2 * GAP_US and "empty pair: 2.0 us" in paired.beyond
    assert graph.samples_us == [] and graph.reason is not None
    assert graph.reason.startswith("cannot be captured: RuntimeError: not permitted")
    assert graph.beyond_us == paired.beyond_us
    overlapping = Work([100.0, 100.0], pieces=2, overlap_us=30.0)
    profiler, paired, _ = measurements(overlapping, events, events, pair_us=2.0)
    assert "30.0 us of it run at the same time" in profiler.beyond and paired.within_us == 30.0


def test_bad_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="fn must run on a CUDA device"):
        reconcile(lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="samples must be at least 2, got 1"):
        reconcile(lambda: None, samples=1)


@pytest.mark.gpu
@pytest.mark.timing
@pytest.mark.parametrize("impl", ("mm", "attention", "sdpa", "several"))
def test_tools_agree_on_a_gpu(impl: str) -> None:
    import attnscope

    half = dict(device="cuda", dtype=torch.bfloat16)
    a = torch.randn(4096, 4096, **half)  # type: ignore[call-overload]
    q = torch.randn(4, 2048, 16, 128, **half)  # type: ignore[call-overload]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    calls = {
        "mm": lambda: a @ a,
        "attention": lambda: attnscope.attention(q, q, q, causal=True),
        "sdpa": lambda: sdpa(*[q.transpose(1, 2)] * 3, is_causal=True),
        "several": lambda: (a @ a).relu().sum(),
    }
    with torch.no_grad():
        table = reconcile(calls[impl])
    assert list(table["tool"]) == ["torch profiler", "CUDA events", "CUDA graph"]
    assert table["agrees"].eq(True).all(), table.to_string()


@pytest.mark.gpu
@pytest.mark.timing
def test_a_call_that_cannot_be_captured_is_a_row_with_the_reason() -> None:
    a = torch.randn(2048, 2048, device="cuda")
    table = reconcile(lambda: (a @ a).sum().item()).set_index("tool")
    assert table.loc["CUDA graph", "reason"].startswith("cannot be captured: ")
    # The call synchronizes with the GPU, so StreamHold cannot time it either.
    assert "waits for the GPU itself" in table.loc["CUDA events", "reason"]
    assert table["median_us"].notna().sum() == 1
    torch.randn(3, device="cuda")  # as if there had been no capture
    torch.cuda.synchronize()
