"""Comparison of result files: ratios, intervals, the gate, and refused input."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import CPU, H200, gpu_row, lost_row, ok_row, paper, write
from typer.testing import CliRunner

from attnscope.bench.compare import means, pair_rows
from attnscope.bench.statistics import bootstrap_ratio, geometric_mean
from attnscope.bench.workloads import Workload
from attnscope.cli import build

WORKS = paper()[:4]
Row = dict[str, Any]


def rows(scale: float = 1.0, impl: str = "cuda-sm80", **options: Any) -> list[Row]:
    return [ok_row(impl, work, scale * (1 + i), **options) for i, work in enumerate(WORKS)]


@pytest.fixture
def files(tmp_path: Path) -> Callable[..., list[str]]:
    def make(a: list[Row], b: list[Row], env_b: Row | None = None) -> list[str]:
        write(tmp_path / "a.json", H200, a)
        write(tmp_path / "b.json", env_b or H200, b)
        return [str(tmp_path / "a.json"), str(tmp_path / "b.json")]

    return make


def compare(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(build("compare"), ["compare", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


def test_interval_covers_the_true_ratio_and_is_seeded() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(100):
        a, b = rng.normal(2.0, 0.1, 30), rng.normal(1.0, 0.05, 30)
        low, high = bootstrap_ratio(a.tolist(), b.tolist())
        hits += low <= 2.0 <= high
    assert hits >= 88
    sides = rng.normal(2.0, 0.1, 30).tolist(), rng.normal(1.0, 0.05, 30).tolist()
    assert bootstrap_ratio(*sides) == bootstrap_ratio(*sides)
    assert bootstrap_ratio(*sides, seed=1) != bootstrap_ratio(*sides, seed=2)


def test_ratio_is_the_speed_of_b_over_a() -> None:
    pairs = pair_rows(rows(), rows(scale=0.5))
    assert all(pair.ratio == pytest.approx(2.0) for pair in pairs)
    assert all(pair.low and pair.high and pair.low < 2.0 < pair.high for pair in pairs)
    assert {pair.verdict(None) for pair in pairs} == {"faster"}
    assert {pair.verdict(None) for pair in pair_rows(rows(), rows(scale=2.0))} == {"slower"}
    assert {pair.verdict(0.97) for pair in pair_rows(rows(), rows())} == {"same"}


def in_mode(**change: Any) -> list[Row]:
    return [ok_row("cuda", replace(work, **change), 1.0 + i) for i, work in enumerate(WORKS)]


def test_modes_are_not_compared_with_each_other() -> None:
    pairs = pair_rows(in_mode(), in_mode(mode="backward"))
    assert len(pairs) == 2 * len(WORKS) and not any(pair.ratio for pair in pairs)
    mixed = [*in_mode(), *in_mode(mode="backward")]
    groups = means(pair_rows(mixed, mixed))["cuda"]
    assert {"all, forward", "all, backward", "not causal, backward"} <= set(groups)
    assert len(groups["all, backward"]) == len(WORKS)


def test_deterministic_gradients_are_compared_with_others(files) -> None:
    strict = in_mode(mode="backward", deterministic=True)
    assert all(pair.ratio for pair in pair_rows(in_mode(mode="backward"), strict))
    both_kinds = [*in_mode(mode="backward"), *strict]
    assert len(pair_rows(both_kinds, strict)) == 2 * len(WORKS)
    code, out = compare(*files(in_mode(mode="backward"), strict))
    assert code == 0 and "gradients of B are deterministic" in out


def test_noise_is_not_a_regression() -> None:
    noisy = [ok_row("cuda-sm80", WORKS[0], 1.06, noise=0.3, seed=1)]
    (pair,) = pair_rows([ok_row("cuda-sm80", WORKS[0], 1.0, noise=0.3)], noisy)
    assert pair.verdict(0.97) == "unclear"


def test_without_samples_the_ratio_decides() -> None:
    few = [row | {"samples_ms": [1.0]} for row in rows(scale=1.1)]
    pairs = pair_rows(rows(), few)
    assert {pair.verdict(0.97) for pair in pairs} == {"slower"}
    assert all(pair.low is None for pair in pairs)


def test_means_are_geometric_and_by_group() -> None:
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert math.isnan(geometric_mean([]))
    a = [gpu_row("fa3", work) for work in paper()]
    b = [gpu_row("fa3", work) for work in paper()]
    for row in b:
        row["median_ms"] /= 2.0 if row["causal"] else 1.0
    found = means(pair_rows(a, b))["fa3"]
    assert list(found)[:6] == [
        "all", "head dim 64", "head dim 128", "head dim 256", "not causal", "causal",
    ]  # fmt: skip
    assert geometric_mean(found["causal"]) == pytest.approx(2.0)
    assert geometric_mean(found["all"]) == pytest.approx(math.sqrt(2.0))
    assert len(found["length 512"]) == 6


def test_two_impls_of_one_file(files: Callable[..., list[str]]) -> None:
    path, _ = files(rows() + rows(scale=0.8, impl="sdpa-flash"), [])
    code, output = compare(path, "--impl-a", "cuda-sm80", "--impl-b", "flash")
    assert code == 0
    assert "sdpa-flash over cuda-sm80" in output and "1.250" in output
    assert compare(path)[0] == 2
    code, output = compare(path, "--impl-a", "cuda-sm80", "--impl-b", "fa3")
    assert code == 2
    assert "must have rows of fa3, got rows of cuda-sm80, sdpa-flash" in output


def test_gate_passes_and_fails_by_exit_code(files: Callable[..., list[str]]) -> None:
    code, output = compare(*files(rows(), rows(scale=1.01)), "--fail-below", "0.97")
    assert (code, "gate at 0.97: passed" in output) == (0, True)
    code, output = compare(*files(rows(), rows(scale=1.1)), "--fail-below", "0.97")
    assert (code, "gate at 0.97: failed" in output) == (1, True)
    assert "regression: cuda-sm80, geometric mean: 0.909 times the speed" in output
    assert compare(*files(rows(), rows(scale=1.1)))[0] == 0


@pytest.mark.parametrize("status", ["wrong", "failed", "skipped"])
def test_a_row_that_lost_its_time_is_a_regression(
    files: Callable[..., list[str]], status: str
) -> None:
    b = rows()
    b[1] = lost_row("cuda-sm80", WORKS[1], status, "it [bold] broke")
    code, output = compare(*files(rows(), b), "--fail-below", "0.97")
    assert code == 1
    assert f"{WORKS[1].id}: B {status} (it [bold] broke)" in output


def test_wrong_only_in_b_is_a_regression_though_a_had_no_time(
    files: Callable[..., list[str]],
) -> None:
    a, b = rows(), rows()
    a[0] = lost_row("cuda-sm80", WORKS[0], "skipped", "not built")
    b[0] = lost_row("cuda-sm80", WORKS[0], "wrong", "off by one")
    assert compare(*files(a, b), "--fail-below", "0.97")[0] == 1
    assert compare(*files(b, b), "--fail-below", "0.97")[0] == 0


def test_missing_rows_are_reported_and_fail_the_gate(files: Callable[..., list[str]]) -> None:
    code, output = compare(*files(rows(), rows()[:2]), "--fail-below", "0.97")
    assert code == 1
    assert "missing: 2 of 4 rows are not in B" in output
    assert f"{WORKS[3].id}: B has no row" in output
    arguments = ("--fail-below", "0.97", "--allow-missing")
    assert compare(*files(rows(), rows()[:2]), *arguments)[0] == 0
    code, output = compare(*files(rows()[:1], rows()), "--fail-below", "0.97")
    assert (code, "missing: 3 of 4 rows are not in A" in output) == (0, True)


def test_nothing_in_common_fails_the_gate(files: Callable[..., list[str]]) -> None:
    code, output = compare(*files(rows(), rows(impl="triton")), "--fail-below", "0.5")
    assert code == 1
    assert "no workload has a time on both sides" in output


@pytest.mark.parametrize(
    ("b", "env_b", "said"),
    [
        (rows(), H200 | {"gpu": "NVIDIA H100 80GB HBM3"}, "gpu: A has NVIDIA H200, B has"),
        (rows(), H200 | {"power_limit_w": 500.0}, "power_limit_w: A has 700.0, B has 500.0"),
        (rows(), CPU, "device: A has cuda, B has cpu"),
        (rows(l2="warm"), None, "L2 mode: A has cold, B has warm"),
        (rows(l2="warm")[:1] + rows()[1:], None, "L2 mode: A has cold, B has warm"),
        (rows(sm_clock_mhz=1200), None, "SM clock: B ran at"),
        (rows(), H200 | {"settings": {"rest": 2.0}}, "rest after a sample: A has 0, B has 2"),
    ],
    ids=["card", "power", "device", "l2", "one l2", "clock", "rest"],
)
def test_other_conditions_are_refused_unless_forced(
    files: Callable[..., list[str]], b: list[Row], env_b: Row | None, said: str
) -> None:
    paths = files(rows(sm_clock_mhz=1700), b, env_b)
    code, output = compare(*paths)
    assert code == 2
    assert said in output and "refused" in output
    code, output = compare(*paths, "--force")
    assert code == 0
    assert said in output


def test_other_versions_are_reported_not_refused(files: Callable[..., list[str]]) -> None:
    code, output = compare(*files(rows(), rows(), H200 | {"torch": "2.12.0"}))
    assert code == 0
    assert "differs: torch: A has 2.11.0+cu130, B has 2.12.0" in output


def test_other_layouts_are_reported(files: Callable[..., list[str]]) -> None:
    code, output = compare(*files(rows(), rows(), H200 | {"settings": {"layouts": "both"}}))
    assert code == 0
    assert "differs: layouts: A has bshd, B has both" in output


def change(row: Row, **fields: Any) -> list[Row]:
    return [row | fields, *rows()[1:]]


GOOD = rows()[0] | {"max_abs_err": 0.01, "baseline_err": 0.01, "err_ratio": 1.0, "margin": 0.5}
TINY_MARGIN = {"max_abs_err": 5.0, "baseline_err": 0.01, "err_ratio": 500.0, "margin": None}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (GOOD | {"samples_ms": [-1.0, 1.0, 3.0]}, "samples_ms must be above 0, got -1.0"),
        (GOOD | {"samples_ms": [0.0] * 20}, "samples_ms must be above 0, got 0.0"),
        (GOOD | {"samples_ms": [1e6 * ms for ms in GOOD["samples_ms"]]}, "must be the median"),
        (GOOD | {"median_ms": 0.0}, "median_ms must be above 0, got 0.0"),
        (GOOD | {"median_ms": -1.0}, "median_ms must be above 0, got -1.0"),
        (GOOD | {"p20_ms": 2.0}, "median_ms must be between p20_ms and p80_ms"),
        (GOOD | {"tflops": 1e4}, "tflops must be flops / median_ms"),
        (GOOD | {"margin": 1.5}, "margin must be at most 1 where status is ok, got 1.5"),
        (GOOD | TINY_MARGIN, "max_abs_err must be within the gate where status is ok, got 5"),
        (GOOD | {"err_ratio": 500.0}, "err_ratio must be max_abs_err / baseline_err, got 500"),
        (
            GOOD | {"err_ratio": 500.0, "max_abs_err": None, "margin": None},
            "err_ratio must be at most 2 where status is ok, got 500",
        ),
    ],
    ids=str,
)
def test_rows_that_contradict_themselves_are_refused(
    files: Callable[..., list[str]], row: Row, said: str
) -> None:
    bad = [row, *rows()[1:]]
    for a, b in ((rows(), bad), (bad, rows())):
        code, output = compare(*files(a, b), "--fail-below", "0.5")
        assert code == 2, output
        assert said in output and WORKS[0].id in output


def test_rows_that_agree_with_themselves_are_compared(files: Callable[..., list[str]]) -> None:
    small = {"max_abs_err": 3e-4, "baseline_err": 1e-4, "err_ratio": 3.0, "margin": None}
    for row in (GOOD, GOOD | small, rows()[0], GOOD | {"samples_ms": []}):
        assert compare(*files(rows(), change(row)), "--fail-below", "0.5")[0] == 0


def test_the_limits_of_the_gate_are_those_of_numerics() -> None:
    from attnscope import numerics
    from attnscope.bench import consistency

    assert consistency._ERROR_RATIO == numerics.C_FORWARD
    assert {str(dtype).removeprefix("torch.") for dtype in numerics.FLOOR_ULPS} == set(
        consistency._ERROR_FLOOR
    )


def test_rows_that_wait_for_the_host_and_uncommitted_code_are_marked(
    files: Callable[..., list[str]],
) -> None:
    slow = [row | {"host_us": 1e4} for row in rows()]
    fast = [row | {"host_us": 30.0} for row in rows()]
    paths = files(slow, fast, H200 | {"git_dirty": True})
    code, output = compare(*paths)
    text = " ".join(output.split())
    assert code == 0 and "A host late: 10000 us to enqueue" in text
    assert f"back to back, the GPU waits: {len(rows())} of A, 0 of B" in text
    assert "B was measured with changes that are not committed" in text


def test_throttled_rows_and_drifting_samples_are_marked(files: Callable[..., list[str]]) -> None:
    drifting = ok_row("cuda-sm80", WORKS[0], 1.0, noise=0.0)
    drifting["samples_ms"] = [1.0 - 0.05 + 0.1 * i / 20 for i in range(21)]
    drifting |= {"p20_ms": 0.9, "p80_ms": 1.1}
    code, output = compare(*files(rows(throttled=True), [drifting, *rows()[1:]]))
    assert code == 0, output
    assert "A throttled" in output and "B drifts +7.3%" in " ".join(output.split())
    assert "rows timed under a throttle reason: 4 of A, 0 of B" in output
    assert "drift by more than 3% from the first to the last third: 0 of A, 1 of B" in output


def test_short_workloads_have_a_mean_of_their_own(files: Callable[..., list[str]]) -> None:
    short = Workload.of(head_dim=64, seqlen=64, tokens=16384, hidden=2048)
    a = [*rows(), ok_row("cuda-sm80", short, 1.0)]
    b = [*rows(), ok_row("cuda-sm80", short, 2.0)]
    code, output = compare(*files(a, b), "--fail-below", "0.97")
    assert code == 1
    assert "all above S 64, S 512 to 4,096" in output and "all up to S 64, S 64" in output
    assert "geometric mean up to S 64: 0.500 times the speed" in output
    assert "geometric mean above" not in output.partition("regression")[2]


def test_bad_input_has_its_own_exit_code(files: Callable[..., list[str]], tmp_path: Path) -> None:
    good, _ = files(rows(), rows())
    bad = tmp_path / "bad.json"
    for content, said in (
        ('{"schema": 1, "env": {}, "rows": [NaN]}', "NaN is not JSON"),
        ('{"schema": 9, "env": {}, "rows": []}', "schema 9"),
        ('{"schema": 1, "env": {}, "rows": []}', "must have rows of an impl, got rows of none"),
        ('{"schema": 1, "env": {}, "rows": {}}', "env must be an object, and rows a list"),
        ('{"schema": 1, "env": {}, "rows": [3]}', "row 1 must be an object"),
        ('{"schema": 1, "env": {}, "rows": [{"status": "ok"}]}', "it lacks batch, dtype"),
    ):
        bad.write_text(content)
        code, output = compare(good, str(bad))
        assert (code, said in output) == (2, True), output
    assert compare(good, str(tmp_path / "none.json"))[0] == 2
    assert compare(good, good, "--impl-a", "x", "--impl-b", "x")[0] == 2
    assert compare(*files(rows(), rows()), "--fail-below", "97")[0] == 2
    code, output = compare(*files(rows() + rows(), rows()))
    assert (code, "A must have one row of cuda-sm80" in output) == (2, True)
