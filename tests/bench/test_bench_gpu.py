"""The bench on a GPU: known durations, cache modes, verified backends, failures as rows."""

import subprocess
import sys
import textwrap
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from attnscope.bench.calls import build_call
from attnscope.bench.hold import CudaDriver, HoldTimeout, StreamHold
from attnscope.bench.impls import IMPLS, Impl, resolve
from attnscope.bench.runner import check, run_sweep
from attnscope.bench.timing import (
    CudaEvents,
    CudaGraph,
    Settings,
    copies_to_rotate,
    make_timer,
    time_interleaved,
)
from attnscope.bench.verification import names_of
from attnscope.bench.workloads import Workload
from attnscope.common.hardware.nvml import Nvml
from attnscope.common.results import Results, read_results

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
WORK = Workload.of(batch=2, seqlen=1024, heads=8, head_dim=64, causal=True)
SDPA = ["sdpa-math", "sdpa-efficient", "sdpa-flash", "sdpa-cudnn"]


def fixed(samples: int, **more) -> Settings:
    return Settings(min_samples=samples, max_samples=samples, **more)


def median(call, settings: Settings, timer=None) -> float:
    timing = time_interleaved({"it": [call]}, timer or make_timer(GPU, settings), settings)["it"]
    assert timing.error is None
    return float(np.median(timing.samples_ms))


@pytest.fixture(scope="module")
def spin_2ms():
    """A kernel that spins for 2 ms, calibrated in clock cycles on a longer spin."""

    def milliseconds(cycles: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    milliseconds(10_000_000)
    rate = 400_000_000 / milliseconds(400_000_000)
    return lambda: torch.cuda._sleep(int(2.0 * rate))


@pytest.mark.timing
@pytest.mark.parametrize("samples", [1, 10, 100])
@pytest.mark.parametrize("side_stream", [False, True])
@pytest.mark.parametrize("settings", [dict(), dict(l2="warm"), dict(graph=True)], ids=str)
def test_a_kernel_of_2_ms_takes_2_ms(spin_2ms, samples, side_stream, settings):
    stream = torch.cuda.Stream() if side_stream else torch.cuda.default_stream()
    with torch.cuda.stream(stream):
        assert median(spin_2ms, fixed(samples, **settings)) == pytest.approx(2.0, rel=0.05)


def test_launching_is_not_part_of_the_time():
    x = torch.zeros(8, device=GPU)

    def slow_to_launch() -> None:
        for _ in range(20_000):
            pass
        x.add_(1)

    assert median(slow_to_launch, fixed(20)) < 0.03


@pytest.mark.timing
@pytest.mark.parametrize("settings", [dict(), dict(l2="warm"), dict(graph=True)], ids=str)
def test_a_host_that_gets_slow_is_waited_for(settings):
    x = torch.zeros(8, device=GPU)
    calls = 0

    def slow_at_times() -> None:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            time.sleep(3e-3)
        x.add_(1)

    timer = make_timer(GPU, fixed(30, **settings))
    timing = time_interleaved({"it": [slow_at_times]}, timer, fixed(30, **settings))["it"]
    assert timing.error is None and len(timing.samples_ms) == 30
    assert max(timing.samples_ms) < 0.1
    if "graph" not in settings:  # a replay runs no Python
        assert max(timing.host_us) > 3000 > np.median(timing.host_us) > 0


def test_a_held_stream_runs_nothing_before_all_is_enqueued():
    x = torch.zeros(8, device=GPU)
    began, ended = torch.cuda.Event(), torch.cuda.Event()
    hold = StreamHold(CudaDriver(GPU))
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for _ in range(5):
                torch.cuda.synchronize()
                with hold():
                    began.record()
                    x.add_(1)
                    ended.record()
                    time.sleep(5e-3)
                    assert not began.query() and not ended.query()
                ended.synchronize()
                assert began.query()
    assert x[0].item() == 10


def test_many_launches_in_a_sample_are_held():
    x = torch.zeros(8, device=GPU)

    def many() -> None:
        for _ in range(300):
            x.add_(1)

    timing = time_interleaved({"it": [many]}, CudaEvents(GPU, 0), fixed(5))["it"]
    assert timing.error is None
    assert np.median(timing.samples_ms) < 300 * 5e-3  # a launch from Python takes longer


@pytest.mark.timing
def test_the_card_rests_after_a_sample(spin_2ms):
    start = time.perf_counter()
    median(spin_2ms, fixed(10, l2="warm", rest=10.0))
    assert time.perf_counter() - start > 10 * 22e-3


def test_a_call_that_waits_for_the_gpu_ends_with_the_reason_and_the_next_ones_are_timed():
    x = torch.zeros(8, device=GPU)
    timer = CudaEvents(GPU, 0, hold=StreamHold(CudaDriver(GPU), timeout_s=0.2))
    calls = {"waits": [lambda: x.sum().item()], "fine": [lambda: x.add_(1)]}
    timings = time_interleaved(calls, timer, fixed(3))
    assert isinstance(timings["waits"].error, HoldTimeout) and timings["waits"].samples_ms == []
    assert timings["fine"].error is None and len(timings["fine"].samples_ms) == 3
    assert sorted(timings["fine"].samples_ms)[1] < 0.1  # another process may delay one


@pytest.mark.timing
def test_cold_is_slower_than_warm_and_does_not_depend_on_the_flush():
    x = torch.randn(1 << 20, device=GPU)  # 4 MiB: stays in L2 unless flushed
    l2 = torch.cuda.get_device_properties(GPU).L2_cache_size
    settings = fixed(50)
    times = [median(lambda: x.sum(), settings, CudaEvents(GPU, n * l2)) for n in (0, 1, 2, 4)]
    assert times[2] > 1.05 * times[0]
    assert times[2] == pytest.approx(times[3], rel=0.15)


def test_rotated_inputs_exceed_the_cache():
    l2 = torch.cuda.get_device_properties(GPU).L2_cache_size
    copies = copies_to_rotate(GPU, Settings(l2="rotate"), 2 << 20)
    assert (copies - 1) * (2 << 20) >= 2 * l2
    assert copies_to_rotate(GPU, Settings(l2="cold"), 2 << 20) == 1


def test_a_call_that_cannot_be_captured_is_an_error_and_the_rest_goes_on():
    x = torch.zeros(8, device=GPU)
    calls = {"syncs": [lambda: x.sum().item()], "fine": [lambda: x.add_(1)]}
    timings = time_interleaved(calls, CudaGraph(GPU, 0), fixed(3))
    assert timings["syncs"].error is not None
    assert timings["fine"].error is None and len(timings["fine"].samples_ms) == 3


@pytest.mark.parametrize("name", SDPA)
def test_pytorch_backends_are_what_they_are_called(name):
    impl, inputs = IMPLS[name], WORK.inputs(GPU, seed=0)
    call = impl.make(WORK, inputs)
    call()
    names = names_of(call, GPU)
    assert names and impl.mismatch(names, "cuda") is None
    for other in set(SDPA) - {name}:
        assert IMPLS[other].mismatch(names, "cuda") is not None


def sweep(tmp_path, impls, works=(WORK,), baseline=IMPLS["sdpa-flash"], **settings):
    results = Results.create(tmp_path / "r.json", {}, resume=False)
    assert run_sweep(works, impls, baseline, results, GPU, fixed(5, **settings)) is None
    return {row["impl"]: row for row in read_results(results.path)["rows"]}


def make_math(work, inputs):
    return IMPLS["sdpa-math"].make(work, inputs)


def make_zeros(work, inputs):
    return lambda: (torch.zeros_like(inputs[0]), None)


def make_huge(work, inputs):
    return lambda: (torch.empty(1 << 46, device=GPU), None)


def test_an_impostor_a_wrong_one_and_a_hungry_one_are_rows_without_times(tmp_path):
    flash = IMPLS["sdpa-flash"]
    impls = [
        Impl(name="impostor", about="", make=make_math, ran=flash.ran),
        Impl(name="zeros", about="", make=make_zeros, ran={"cuda": "."}),
        Impl(name="huge", about="", make=make_huge, ran={"cuda": "."}),
        flash,
    ]
    rows = sweep(tmp_path, impls)
    assert rows["impostor"]["status"] == "failed" and "impostor ran" in rows["impostor"]["reason"]
    assert rows["zeros"]["status"] == "wrong"
    assert rows["huge"]["status"] == "failed"
    assert rows["huge"]["reason"].startswith("out of memory")
    assert all(rows[name]["median_ms"] is None for name in ("impostor", "zeros", "huge"))
    row = rows["sdpa-flash"]
    assert row["status"] == "ok" and row["l2"] == "cold" and row["timer"] == "cuda-events"
    assert any("flash_fwd" in name for name in row["kernels"])
    assert row["host_us"] > 0 and row["layout"] == "bshd"
    assert row["pct_peak"] is None or 0 < row["pct_peak"] < 100


@pytest.mark.parametrize(
    "options", [dict(dtype="float32"), dict(head_dim=512), dict(head_dim_v=32)], ids=str
)
def test_flash_refuses_what_it_cannot_do(tmp_path, options):
    work = Workload.of(**(dict(seqlen=256, heads=2, head_dim=64) | options))
    row = sweep(tmp_path, [IMPLS["sdpa-flash"]], [work])["sdpa-flash"]
    assert row["status"] == "skipped" and row["reason"].startswith("SDPA: "), row["reason"]


def test_grouped_heads_run_flash_or_are_refused(tmp_path):
    work = Workload.of(seqlen=512, heads_q=8, heads_kv=2, head_dim=64, causal=True)
    for name, row in sweep(tmp_path, resolve(SDPA), [work]).items():
        assert row["status"] in ("ok", "skipped"), (name, row["reason"])
    assert row["kernels"] or row["reason"]


@pytest.mark.parametrize(
    "settings", [dict(l2="warm"), dict(l2="rotate"), dict(graph=True)], ids=str
)
def test_every_way_of_timing_gives_rows(tmp_path, settings):
    rows = sweep(tmp_path, resolve(["cuda", "sdpa-flash"]), **settings)
    assert rows["sdpa-flash"]["status"] == "ok", rows["sdpa-flash"]["reason"]
    assert rows["cuda"]["status"] in ("ok", "skipped"), rows["cuda"]["reason"]
    assert rows["sdpa-flash"]["timer"] == ("cuda-graph" if "graph" in settings else "cuda-events")


def test_both_layouts_are_timed_and_the_faster_one_counts(tmp_path):
    rows = sweep(tmp_path, resolve(["cuda", "sdpa-flash", "sdpa-cudnn"]), layouts="both")
    for name, row in rows.items():
        if row["status"] == "ok":
            assert set(row["layouts_ms"]) == {"bshd", "bhsd"}, name
            assert row["median_ms"] == row["layouts_ms"][row["layout"]]
            assert row["median_ms"] == min(row["layouts_ms"].values())


def test_metadata_of_flash_attention_3_is_reused_on_packed_batches(tmp_path):
    work = Workload.of(seqlens=[200, 31, 100], heads_q=8, heads_kv=2, head_dim=128, causal=True)
    rows = sweep(tmp_path, resolve(["fa3", "fa3-metadata"]), [work])
    for name, row in rows.items():
        assert row["status"] in ("ok", "skipped"), (name, row["reason"])
    if rows["fa3-metadata"]["status"] == "ok":
        assert not any("prepare_varlen" in name for name in rows["fa3-metadata"]["kernels"])


CASES = [
    dict(),
    dict(causal=True),
    dict(causal=True, seqlen_q=100, seqlen_k=300),
    dict(causal=True, window=(70, -1)),
    dict(window=(33, 20)),
    dict(softcap=20.0, causal=True),
    dict(heads_q=4, heads_kv=2, causal=True),
    dict(seqlens=[200, 31, 100], causal=True),
    dict(dtype="float16"),
]


COMPILED = ("fa4", "flex")  # compile for seconds at every new shape
NAMES = [
    pytest.param(name, marks=[pytest.mark.slow] if name in COMPILED else [])
    for name in IMPLS
    if name != "cpu"
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", CASES, ids=str)
def test_every_impl_is_right_or_has_a_reason(tmp_path, name, options):
    work = Workload.of(**(dict(seqlen=256, heads=2, head_dim=64) | options))
    row = sweep(tmp_path, [IMPLS[name]], [work], baseline=None)[name]
    assert row["status"] == "ok" or (row["status"] == "skipped" and row["reason"]), row["reason"]


BACKWARD = replace(WORK, mode="backward")


@pytest.mark.parametrize("name", SDPA)
def test_backwards_of_pytorchs_backends_are_what_they_are_called(name):
    call = build_call(
        IMPLS[name], BACKWARD, BACKWARD.inputs(GPU, 0), BACKWARD.output_gradient(GPU, 0)
    )
    call()
    names = names_of(call, GPU)
    assert names and IMPLS[name].mismatch(names, "cuda", "backward") is None
    for other in set(SDPA) - {name}:
        assert IMPLS[other].mismatch(names, "cuda", "backward") is not None


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", CASES, ids=str)
def test_every_backward_is_right_or_has_a_reason(tmp_path, name, options, deterministic):
    work = Workload.of(**(dict(seqlen=256, heads=2, head_dim=64, mode="backward") | options))
    work = replace(work, deterministic=deterministic)
    row = sweep(tmp_path, [IMPLS[name]], [work], baseline=None)[name]
    if name in COMPILED and row["status"] == "failed":
        pytest.skip(f"{name}: {row['reason']}")  # packages refuse in their own ways
    assert row["status"] == "ok" or (row["status"] == "skipped" and row["reason"]), row["reason"]


@pytest.mark.parametrize("settings", [dict(), dict(l2="rotate"), dict(layouts="both")], ids=str)
def test_a_backward_is_timed_without_its_forward(tmp_path, settings):
    rows = sweep(tmp_path, resolve(["sdpa-flash"]), [BACKWARD], **settings)
    both = sweep(tmp_path, resolve(["sdpa-flash"]), [replace(WORK, mode="both")], **settings)
    row, step = rows["sdpa-flash"], both["sdpa-flash"]
    assert row["status"] == step["status"] == "ok", (row["reason"], step["reason"])
    assert not any("flash_fwd" in name for name in row["kernels"])
    assert row["median_ms"] < step["median_ms"]


def test_a_training_step_is_replayed_from_a_graph(tmp_path):
    row = sweep(tmp_path, resolve(["sdpa-flash"]), [replace(WORK, mode="both")], graph=True)
    assert row["sdpa-flash"]["status"] == "ok", row["sdpa-flash"]["reason"]
    assert row["sdpa-flash"]["timer"] == "cuda-graph"


def test_clocks_are_read_or_the_reason_is_there():
    reading = Nvml(GPU).read()
    assert reading.get("sm_clock_mhz", 0) > 0 or reading["reason"]


BROKEN = """
    import sys, torch
    from attnscope.bench.impls import IMPLS, Impl
    from attnscope.bench.runner import run_sweep
    from attnscope.common.results import Results
    from attnscope.bench.timing import Settings
    from attnscope.bench.workloads import Workload
    from pathlib import Path

    def make(work, inputs):
        bad = torch.full((4,), 1 << 20, device="cuda")
        return lambda: (torch.zeros(4, device="cuda")[bad], None)

    works = [Workload.of(seqlen=s, heads=2, head_dim=64) for s in (128, 256)]
    impls = [IMPLS["sdpa-flash"], Impl(name="bad", about="", make=make, ran={"cuda": "."})]
    results = Results.create(Path(sys.argv[1]), {}, resume=False)
    device = torch.device("cuda", 0)
    print(run_sweep(works, impls, impls[0], results, device, Settings(budget_s=0.1)))
"""


def test_a_broken_context_ends_the_sweep_and_is_the_reason_of_every_row(tmp_path):
    path = tmp_path / "r.json"
    script = textwrap.dedent(BROKEN)
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "bad on forward-bf16" in done.stdout and "broke the CUDA context" in done.stdout
    rows = read_results(path)["rows"]
    assert len(rows) == 4
    assert all(row["status"] == "failed" and "not run: bad on" in row["reason"] for row in rows)


def test_check_runs_every_kind_on_the_portable_kernel():
    for kind in ("normal", "large_logits", "outliers", "constant_rows", "wide_range"):
        verdict = check(WORK, IMPLS["cuda-sm80"], kind, 0, GPU)
        assert verdict.passed, f"{kind}: {verdict.reason}"
