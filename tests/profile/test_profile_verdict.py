"""The verdict of a profile, and that advice agrees with the numbers beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_trace import MadeTrace, kernel, launch, named, op, write_trace

from attnscope.profile import Profile
from attnscope.profile.analysis.findings import detect
from attnscope.profile.analysis.verdict import verdict

GEMM, NCCL, ATTENTION = "nvjet_sm90_x", "ncclDevKernel_AllReduce_Sum_bf16_RING", "flash_fwd_kernel"
TF32 = "sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tensor16x8x8"


def loop(*kernels: tuple[str, float], every: float, count: int = 120) -> MadeTrace:
    """`count` steps `every` microseconds apart: the kernels one after the other."""
    made = MadeTrace()
    for at in range(count):
        begin = 10 + every * at
        made.range("step", begin, every - 1)
        for number, (name, duration) in enumerate(kernels):
            made.kernel(name, begin + 10, duration, launch=begin + 3 * number)
            begin += duration
    return made


@pytest.mark.parametrize(
    ("made", "title"),
    [
        (
            loop((GEMM, 40), (ATTENTION, 10), every=200),
            "the GPU waited for launches 71% of the time; GEMM 80%, attention 20% of its work",
        ),
        (loop((GEMM, 190), every=200), "the GPU worked 95% of the time; GEMM 100% of its work"),
        (
            loop((GEMM, 90), (NCCL, 100), every=200),
            "communication that no other kernel overlaps took 50% of the time; communication 53%, "
            "GEMM 47% of its work",
        ),
        (
            loop((GEMM, 136), every=200),
            "the GPU worked 68% of the time, waiting for launches 28%; GEMM 100% of its work",
        ),
    ],
    ids=["launches", "GPU", "communication", "neither"],
)
def test_the_title_is_what_limits_the_program(made: MadeTrace, title: str, tmp_path: Path) -> None:
    found = verdict(made.attribution(tmp_path))
    assert found.title == title
    assert found.evidence[0].startswith("from the first GPU work to the last, ")


def test_attention_is_named_though_it_is_third(tmp_path: Path) -> None:
    made = loop((GEMM, 90), ("layer_norm", 60), (ATTENTION, 40), every=200)
    title = verdict(made.attribution(tmp_path)).title
    assert title.endswith("GEMM 47%, norm 32%, attention 21% of its work")


def test_a_wait_that_the_profiler_causes_is_none(tmp_path: Path) -> None:
    """The region takes 24 ms with the profiler; GPU work is 6 ms."""
    made = loop((GEMM, 50), every=200)
    path = tmp_path / "trace.json"
    owners = made.attribution(tmp_path)
    assert "waited for launches" in verdict(owners).title
    for wall_ms, waits in ((20, True), (7, False)):
        found = Profile(
            name="made", source=path, trace=owners.trace, unprofiled_wall_s=wall_ms / 1e3
        )
        assert ("waited for launches" in found.verdict.title) == waits
        assert ("starvation" in [one.kind for one in found.findings()]) == waits
        assert any("without the profiler GPU work fills" in line for line in found.verdict.evidence)
    assert found.verdict.title.startswith("the GPU worked 86% of the time without the profiler")


def test_a_program_without_gpu_work(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.json", op("outer", 0, 100), op("inner", 10, 90))
    found = Profile.read(path).verdict
    assert found.title == "no GPU work; inner takes 80% of the ops' CPU time"


def test_tf32_is_not_advised_for_what_runs_on_it(tmp_path: Path) -> None:
    for symbol, advised in ((TF32, False), ("ampere_sgemm_128x64_tn", True)):
        made = MadeTrace()
        made.op("aten::mm", 0, 20, [[512, 512], [512, 512]], "float")
        made.kernel(symbol, 30, 400, launch=10)
        (finding,) = detect(made.attribution(tmp_path))
        assert finding.kind == "fp32 product"
        assert ("set_float32_matmul_precision" in finding.advice) == advised


def test_communication_is_no_tiny_grid(tmp_path: Path) -> None:
    for symbol, kinds in ((NCCL, []), ("small", ["tiny grid"])):
        made = MadeTrace()
        made.kernel(symbol, 30, 400, grid=[16, 1, 1])
        assert [one.kind for one in detect(made.attribution(tmp_path))] == kinds


def test_advice_on_tiny_grids_fits_the_kernel(tmp_path: Path) -> None:
    for symbol, fits in (
        (ATTENTION, "heads"),
        (GEMM, "inner dimension"),
        ("mine", "a larger batch"),
    ):
        made = MadeTrace()
        made.kernel(symbol, 30, 400, grid=[16, 1, 1])
        (finding,) = detect(made.attribution(tmp_path))
        assert fits in finding.advice and ("keys" in finding.advice) == (symbol == ATTENTION)


def test_a_wait_for_a_busy_gpu_is_no_finding(tmp_path: Path) -> None:
    """The host waits 900 of 1000 us in each step, but the next kernel was launched before."""
    made = MadeTrace()
    for at in range(10):
        made.kernel("k", 1000 * at + 100, 990, launch=1000 * at + 10)
        made.call("cudaStreamSynchronize", 1000 * at + 50, 900)
    assert "synchronisation" not in [one.kind for one in detect(made.attribution(tmp_path))]


def test_the_most_expensive_finding_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = loop((GEMM, 40), ("ampere_sgemm_128x64_tn", 10), every=200)
    findings = detect(made.attribution(tmp_path))
    assert [one.kind for one in findings] == ["starvation", "fp32 product"]
    assert findings[0].cost_us > findings[1].cost_us > 0
    Profile.read(tmp_path / "trace.json").print()
    out = capsys.readouterr().out
    assert out.startswith("the GPU waited for launches") and "None" not in out


def test_many_replays_are_not_advised_to_use_graphs(tmp_path: Path) -> None:
    events = [named("step", 0, 40000)]
    for at in range(200):
        events += [launch(at + 1, 200 * at, "cudaGraphLaunch")]
        events += [kernel(at + 1, 200 * at + 10, 200 * at + 30)]
    path = write_trace(tmp_path / "t.json", *events)
    (finding,) = Profile.read(path).findings()
    assert finding.advice.startswith("100% of the kernels come from CUDA graphs already")
