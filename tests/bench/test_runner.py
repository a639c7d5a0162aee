"""Sweeps: a row for every impl even if it fails, no lost rows, resumable."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from forked import run_python
from signals import interruptible

from attnscope.bench import runner
from attnscope.bench.impls import IMPLS, Impl, Unsupported
from attnscope.bench.runner import above_peak, check, run_sweep
from attnscope.bench.timing import Settings
from attnscope.bench.workloads import Workload, expand
from attnscope.common.console import explain
from attnscope.common.results import Results, read_results
from attnscope.reference import attention_reference

CPU = torch.device("cpu")
QUICK = Settings(l2="warm", min_samples=5, max_samples=5)
WORK = Workload.of(seqlen=32, heads=2, head_dim=16, causal=True, dtype="float32")
OTHER = Workload.of(seqlen=48, heads=2, head_dim=16, dtype="float32")


def fake(name: str, body=None, **more) -> Impl:
    """A correct impl, unless `body(work, inputs, right)` changes the result."""

    def make(work, inputs):
        def right():
            out, lse = attention_reference(*inputs, causal=work.causal)
            return out.to(inputs[0].dtype), lse.float()

        return right if body is None else lambda: body(work, inputs, right)

    return Impl(**(dict(name=name, about="", make=make, ran={"cpu": "."}) | more))


GOOD = fake("good")


def sweep(path: Path, impls, works=(WORK,), baseline=GOOD, resume=False, settings=QUICK):
    results = Results.create(path, {}, resume)
    lost = run_sweep(works, impls, baseline, results, CPU, settings)
    return {(row["workload"], row["impl"]): row for row in read_results(path)["rows"]}, lost


def rows_of(tmp_path: Path, *impls: Impl, **more) -> list[dict]:
    rows, lost = sweep(tmp_path / "r.json", impls, **more)
    assert lost is None
    return [rows[WORK.id, impl.name] for impl in impls]


def test_a_good_row_has_every_field(tmp_path):
    (row,) = rows_of(tmp_path, GOOD)
    assert row["status"] == "ok" and row["reason"] == "pct_peak: no peak is known for CPUs"
    assert len(row["samples_ms"]) == 5
    assert row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
    assert (row["timer"], row["l2"]) == ("wall-clock", "warm")
    assert row["flops"] == WORK.flops_half_convention() and row["flops_rule"] == "causal=half"
    assert row["flops_exact"] == WORK.flops()
    assert row["tflops"] == pytest.approx(row["flops"] / row["median_ms"] / 1e9)
    assert row["gbps"] == pytest.approx(WORK.bytes() / row["median_ms"] / 1e6)
    assert row["kernels"] and row["checked"] == "all rows"
    assert row["max_abs_err"] < 1e-5 and 0 <= row["margin"] <= 1
    assert row["host_us"] is None  # a CPU enqueues nothing
    assert (row["ratio"], row["baseline"]) == (1.0, "good")
    assert row["pct_peak"] is None and row["throttled"] is None
    assert "reason" in row["nvml"]["before"]
    assert Workload.from_dict(row) == WORK


def zeros(work, inputs, right):
    out, lse = right()
    return torch.zeros_like(out), lse


def unwritten(work, inputs, right):
    out, lse = right()
    lazy = torch.empty_like(out)
    lazy[:, :-1] = out[:, :-1]
    return lazy, lse


@pytest.mark.parametrize("body", [zeros, unwritten])
def test_a_wrong_impl_has_no_time(tmp_path, body):
    bad, good = rows_of(tmp_path, fake("bad", body), GOOD)
    assert bad["status"] == "wrong" and bad["reason"]
    assert bad["median_ms"] is None and bad["samples_ms"] is None and bad["tflops"] is None
    assert bad["ratio"] is None
    assert good["status"] == "ok"


def test_an_impl_that_goes_wrong_while_it_is_timed_has_no_time(tmp_path):
    count = 0

    def goes_wrong(work, inputs, right):
        nonlocal count
        count += 1
        return right() if count < 8 else zeros(work, inputs, right)

    (row,) = rows_of(tmp_path, fake("bad", goes_wrong), baseline=None)
    assert row["status"] == "wrong" and row["reason"].startswith("after it was timed: ")
    assert row["median_ms"] is None


def test_errors_are_rows_and_stay_where_they_are(tmp_path):
    def raises(work, inputs, right):
        raise KeyError("no such tile")

    def out_of_memory(work, inputs, right):
        raise torch.OutOfMemoryError("Tried to allocate 45 GiB\nmore text")

    def refuses(work, inputs):
        raise Unsupported("SDPA: head dim 512")

    impls = [
        fake("raises", raises),
        fake("oom", out_of_memory),
        fake("refuses", make=refuses),
        fake("absent", absent=lambda: "package x is not installed"),
        fake("elsewhere", ran={"cuda": "."}),
        fake("impostor", ran={"cpu": "aten::flash"}),
        GOOD,
    ]
    rows = rows_of(tmp_path, *impls)
    got = [(row["impl"], row["status"], row["reason"]) for row in rows]
    assert got[0][1] == "failed" and got[0][2].startswith("KeyError: 'no such tile' (test_runner")
    assert got[1][1] == "failed" and got[1][2].startswith("out of memory: Tried to allocate 45 GiB")
    assert "more text" not in got[1][2]
    assert got[2] == ("refuses", "skipped", "SDPA: head dim 512")
    assert got[3] == ("absent", "skipped", "package x is not installed")
    assert got[4] == ("elsewhere", "skipped", "runs on cuda only, not on cpu")
    assert got[5][1] == "failed" and got[5][2].startswith("impostor ran aten::")
    assert rows[5]["kernels"]
    assert got[6][1] == "ok"
    assert all(row["median_ms"] is None for row in rows[:-1])


def test_an_error_while_timing_is_a_row(tmp_path):
    count = 0

    def dies(work, inputs, right):
        nonlocal count
        count += 1
        if count == 7:
            raise RuntimeError("boom")
        return right()

    bad, good = rows_of(tmp_path, fake("bad", dies), GOOD)
    assert bad["status"] == "failed" and "boom" in bad["reason"] and bad["samples_ms"] is None
    assert count == 7
    assert good["status"] == "ok"


def test_no_ratio_without_a_right_baseline(tmp_path):
    good, bad = rows_of(tmp_path, GOOD, fake("bad", zeros), baseline=fake("bad", zeros))
    assert good["status"] == "ok" and good["ratio"] is None and good["ratio_ci"] is None


def test_a_ratio_has_an_interval_around_it(tmp_path):
    def slow(work, inputs, right):
        time.sleep(0.01)
        return right()

    (row, _) = rows_of(tmp_path, fake("slow", slow), GOOD)
    low, high = row["ratio_ci"]
    assert low <= row["ratio"] <= high


BOTH = Settings(l2="warm", min_samples=5, max_samples=5, layouts="both")


def slow_in(layout: str):
    """A correct impl that is slow for one layout of the inputs."""

    def body(work, inputs, right):
        if inputs[0].is_contiguous() == (layout == "bshd"):
            time.sleep(0.1)
        return right()

    return body


@pytest.mark.parametrize(("slow", "fast"), [("bshd", "bhsd"), ("bhsd", "bshd")])
def test_the_faster_layout_counts_for_each_impl(tmp_path, slow, fast):
    mixed, good = rows_of(tmp_path, fake("mixed", slow_in(slow)), GOOD, settings=BOTH)
    assert mixed["status"] == good["status"] == "ok"
    assert mixed["layout"] == fast and set(mixed["layouts_ms"]) == {"bshd", "bhsd"}
    assert mixed["median_ms"] == mixed["layouts_ms"][fast] < mixed["layouts_ms"][slow]
    assert mixed["layouts_ms"][slow] >= 100
    assert mixed["ratio"] == good["median_ms"] / mixed["median_ms"]


def test_an_impl_that_is_wrong_in_one_layout_has_no_time(tmp_path):
    def wrong_in_bhsd(work, inputs, right):
        return right() if inputs[0].is_contiguous() else zeros(work, inputs, right)

    bad, good = rows_of(tmp_path, fake("bad", wrong_in_bhsd), GOOD, settings=BOTH)
    assert (bad["status"], bad["layout"], bad["median_ms"]) == ("wrong", "bhsd", None)
    assert bad["layouts_ms"]["bhsd"] is None and good["status"] == "ok"


def test_a_layout_that_an_impl_refuses_is_named_in_the_reason(tmp_path):
    def refuses_bhsd(work, inputs, right):
        if not inputs[0].is_contiguous():
            raise RuntimeError("no such strides")
        return right()

    (row,) = rows_of(tmp_path, fake("picky", refuses_bhsd), settings=BOTH)
    assert (row["status"], row["layout"]) == ("ok", "bshd")
    assert "bhsd: failed: RuntimeError: no such strides" in row["reason"]


@pytest.mark.parametrize("layouts", ["bshd", "bhsd"])
def test_one_layout_alone_is_timed_where_it_is_asked_for(tmp_path, layouts):
    settings = Settings(l2="warm", min_samples=5, max_samples=5, layouts=layouts)
    (row,) = rows_of(tmp_path, GOOD, settings=settings)
    assert row["layout"] == layouts and row["layouts_ms"] == {layouts: row["median_ms"]}


def test_packed_inputs_have_one_layout(tmp_path):
    packed = Workload.of(seqlens=[20, 12], heads=2, head_dim=16, dtype="float32")

    def make(work, inputs):
        return IMPLS["cpu"].make(work, inputs)

    impl = Impl(name="packed", about="", make=make, ran={"cpu": "."})
    rows, _ = sweep(tmp_path / "r.json", [impl], [packed], baseline=None, settings=BOTH)
    row = rows[packed.id, "packed"]
    assert (row["status"], row["layout"]) == ("ok", "thd") and set(row["layouts_ms"]) == {"thd"}


def test_a_file_has_rows_of_finished_workloads_at_any_time(tmp_path):
    path = tmp_path / "r.json"
    seen = []

    def look(work, rows):
        seen.append([row["workload"] for row in read_results(path)["rows"]])

    results = Results.create(path, {}, resume=False)
    run_sweep([WORK, OTHER], [GOOD], None, results, CPU, QUICK, look)
    assert seen == [[WORK.id], [WORK.id, OTHER.id]]


def test_resume_runs_what_is_missing_or_failed_and_keeps_the_rest(tmp_path):
    broken = True

    def sometimes(work, inputs, right):
        if broken:
            raise RuntimeError("boom")
        return right()

    path, flaky = tmp_path / "r.json", fake("flaky", sometimes)
    first, _ = sweep(path, [GOOD, flaky])
    assert first[WORK.id, "flaky"]["status"] == "failed"
    broken = False
    second, _ = sweep(path, [GOOD, flaky, fake("new")], works=[WORK, OTHER], resume=True)
    assert second[WORK.id, "good"] == first[WORK.id, "good"]
    assert {row["status"] for row in second.values()} == {"ok"}
    assert set(second) == {(w.id, i) for w in (WORK, OTHER) for i in ("good", "flaky", "new")}
    assert second[WORK.id, "new"]["ratio"] is not None


def test_after_a_broken_context_the_rest_has_the_reason_and_can_be_resumed(tmp_path, monkeypatch):
    def illegal(work, inputs, right):
        raise RuntimeError("illegal memory access")

    path = tmp_path / "r.json"
    monkeypatch.setattr(runner._Sweep, "_is_fatal", lambda self, error: "illegal" in str(error))
    rows, lost = sweep(path, [GOOD, fake("bad", illegal)], works=[WORK, OTHER])
    assert lost is not None and lost.startswith(f"bad on {WORK.id} broke the CUDA context")
    assert len(rows) == 4
    assert all(r["status"] == "failed" and "not run: bad on" in r["reason"] for r in rows.values())
    rows, lost = sweep(path, [GOOD], works=[WORK, OTHER], resume=True)
    assert lost is None
    assert rows[WORK.id, "good"]["status"] == rows[OTHER.id, "good"]["status"] == "ok"


def test_more_than_the_peak_is_wrong_and_has_no_time():
    row = dict(tflops=990.0, median_ms=1.0, dtype="bfloat16", status="ok", samples_ms=[1.0])
    flagged = above_peak(row, 989.4, None)
    assert flagged["status"] == "wrong" and flagged["median_ms"] is None
    assert flagged["reason"].startswith("wrong: above the hardware peak: 990 TFLOP/s")
    assert above_peak(row | {"tflops": 494.7}, 989.4, None)["pct_peak"] == pytest.approx(50)
    assert above_peak(row, None, "unknown card") == row | {"reason": "pct_peak: unknown card"}


def test_a_check_of_every_kind_of_inputs():
    for kind in ("normal", "outliers", "constant_rows"):
        assert check(WORK, GOOD, kind, 0, CPU).passed
    assert not check(WORK, fake("bad", zeros), "normal", 0, CPU).passed


def test_errors_are_explained_in_one_line():
    try:
        raise ValueError("first line\nsecond line")
    except ValueError as error:
        assert explain(error).startswith("ValueError: first line (test_runner.py:")


SLOW_SUITE = """\
cpu:
  - seqlen: [496, 497, 498, 499, 500, 501]
    heads: 2
    head_dim: 64
    dtype: float32
"""


def test_a_killed_sweep_keeps_its_rows_and_is_finished_by_resume(tmp_path):
    suite, path = tmp_path / "slow.yaml", tmp_path / "r.json"
    suite.write_text(SLOW_SUITE)
    command = [sys.executable, "-m", "attnscope", "bench", "--suite", str(suite)]
    command += ["--impl", "naive", "--baseline", "naive", "--output", str(path)]
    command += ["--time-budget", "0.2"]
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with subprocess.Popen(command, **quiet) as process:
        deadline = time.monotonic() + 120
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
    killed = read_results(path)["rows"]
    assert 1 <= len(killed) < 6
    done = run_python(*command[1:], "--resume")
    assert done.returncode == 0, done.stderr
    rows = read_results(path)["rows"]
    assert rows[: len(killed)] == killed
    assert [row["seqlen_q"] for row in rows] == list(range(496, 502))
    assert {row["status"] for row in rows} == {"ok"}


def test_an_interrupted_sweep_prints_how_to_resume(tmp_path):
    suite, path = tmp_path / "slow.yaml", tmp_path / "r.json"
    suite.write_text(SLOW_SUITE)
    command = [sys.executable, "-m", "attnscope", "bench", "--suite", str(suite)]
    command += ["--impl", "naive", "--baseline", "naive", "--output", str(path)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(command, **pipes, preexec_fn=interruptible) as process:
        deadline = time.monotonic() + 120
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "go on with --resume" in out + err
    assert read_results(path)["rows"]


def test_the_bench_impls_pass_their_own_gate():
    (case,) = expand(dict(seqlen=65, heads_q=4, heads_kv=2, head_dim=64, causal=True,
                          dtype="bfloat16"))  # fmt: skip
    for name in ("cpu", "naive", "sdpa-math", "sdpa-flash"):
        assert check(case, IMPLS[name], "normal", 0, CPU).passed, name
