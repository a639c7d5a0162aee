"""Counters in process: the passes, what goes wrong, and the bench's rows. Counting needs a GPU."""

import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from attnscope import counters
from attnscope.bench.counting import Counting, count_rows
from attnscope.bench.impls import resolve
from attnscope.bench.timing import Settings
from attnscope.bench.workloads import Workload
from attnscope.common.results import Results, read_results
from attnscope.counters import Unavailable, collect, library, metrics_for, session
from attnscope.nsight import evaluator, metrics

ROOT = Path(__file__).parents[2]
WORK = Workload.of(seqlen=64, heads=2, head_dim=32, causal=True)


class FakeCollector:
    """Three passes; the value of a metric is its length."""

    passes = 3

    def __init__(self, events: list[str], fails: str | None = None) -> None:
        self._events, self._fails, self._left = events, fails, self.passes

    def begin(self) -> None:
        self._events.append("begin")

    def end(self) -> bool:
        self._events.append("end")
        self._left -= 1
        return self._left == 0

    def values(self) -> dict[str, float]:
        if self._fails:
            raise RuntimeError(self._fails)
        return {name: float(len(name)) for name in self._metrics}

    def close(self) -> None:
        self._events.append("close")


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A collector without a GPU; `native.events` has what happened, `native.error` raises."""

    class Native:
        events: list[str] = []
        error: str | None = None
        late: str | None = None

        def Collector(self, context: int, device: int, names: list[str]) -> FakeCollector:
            if self.error:
                raise RuntimeError(self.error)
            made = FakeCollector(self.events, self.late)
            made._metrics = names  # type: ignore[attr-defined]
            return made

    made = Native()
    made.events = []
    monkeypatch.setattr(session, "load", lambda: made)
    monkeypatch.setattr(session, "_context", lambda: 17)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: made.events.append("wait"))
    yield made


def test_a_call_is_repeated_for_every_pass(native: Any) -> None:
    names = {"a": "one.sum", "b": "three.pct"}
    found = collect(
        lambda: native.events.append("call"), names, lambda: native.events.append("flush")
    )
    assert found.values == {"a": 7.0, "b": 9.0} and found.passes == 3
    one = ["flush", "wait", "begin", "call", "wait", "end"]
    assert native.events == ["wait", "call", "wait", *one * 3, "close"]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES (35) from x", "restricted to administrators"),
        ("CUPTI_ERROR_HARDWARE_BUSY (26) from x", "another profiler holds the counters"),
        ("CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED (39) from x", "another CUPTI user"),
        ("CUPTI_ERROR_INVALID_METRIC_NAME (17) from x", "does not have one of the metrics"),
        ("CUPTI_ERROR_UNKNOWN (999) from x", "CUPTI_ERROR_UNKNOWN"),
    ],
)
def test_why_there_are_no_counters(message: str, reason: str, native: Any) -> None:
    native.error = message
    with pytest.raises(Unavailable, match=reason) as caught:
        collect(lambda: None)
    assert message in str(caught.value), "CUPTI's own words are kept"
    native.error, native.late = None, message
    with pytest.raises(Unavailable, match=reason):
        collect(lambda: None)
    assert native.events[-1] == "close"


@pytest.mark.parametrize("good", [0, 1])
def test_an_error_of_the_call_propagates_and_gives_the_counters_back(
    native: Any, good: int
) -> None:
    calls = iter([*[None] * good, ValueError("mine")])

    def call() -> None:
        if (error := next(calls)) is not None:
            raise error

    with pytest.raises(ValueError, match="mine"):
        collect(call)
    assert native.events[-2:] == [["wait", "close"], ["end", "close"]][good]


def test_passes_that_do_not_end_and_values_that_are_not_finite(
    native: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "MOST_PASSES", 2)
    with pytest.raises(Unavailable, match="must need at most 2 passes, got more"):
        collect(lambda: None)
    monkeypatch.setattr(session, "MOST_PASSES", 64)
    monkeypatch.setattr(FakeCollector, "values", lambda self: {"x": float("nan")})
    with pytest.raises(Unavailable, match="x has no finite value"):
        collect(lambda: None, {"key": "x"})


def test_without_a_gpu_the_reason_is_named() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    library.load.cache_clear()
    with pytest.raises(Unavailable, match="no CUDA device"):
        counters.collect(lambda: None)


def test_the_row_of_the_bench(native: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Counting(torch.device("cpu"), True).read(WORK, lambda: None) == {
        "reason": "counters need a CUDA device"
    }
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    counting = Counting(torch.device("cuda", 0), False)
    row = counting.read(WORK, lambda: None)
    assert row["passes"] == 3 and row["l2"] == "warm"
    assert row["flops_ratio"] == pytest.approx(row["flops"] / WORK.flops())
    assert set(counters.METRICS) < set(row)
    native.error = "CUPTI_ERROR_HARDWARE_BUSY (26)"
    assert "another profiler" in counting.read(WORK, lambda: None)["reason"]
    native.error = None
    assert "another profiler" in counting.read(WORK, lambda: None)["reason"], (
        "it is not tried again"
    )


def test_rows_get_their_counters_after_the_timing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Workload.of(seqlen=16, heads=1, head_dim=8, dtype="float32")
    fields = {"workload": work.id, "layout": "bshd", **work.to_dict()}
    rows = [{"impl": name, "status": status, **fields}
            for name, status in (("cpu", "ok"), ("naive", "wrong"))]  # fmt: skip
    results = Results(tmp_path / "r.json", {})
    results.add(rows)
    (cpu,) = resolve(["cpu"])
    read: list[str] = []

    def fake(self: Counting, work: Workload, call: Callable[[], Any]) -> dict[str, Any]:
        read.append(str(tuple(call()[0].shape)))
        return {"tensor_pct": 1.0}

    monkeypatch.setattr(Counting, "read", fake)
    for _ in range(2):
        count_rows([work], [cpu, *resolve(["naive"])], results, torch.device("cpu"), Settings())
    assert read == ["(1, 16, 1, 8)"], "wrong rows have no counters, and none is read twice"
    assert read_results(tmp_path / "r.json")["rows"][0]["counters"] == {"tensor_pct": 1.0}


@pytest.mark.parametrize("chip", metrics.CHIPS)
def test_the_metrics_exist_on_every_chip_and_are_those_of_ncu(chip: str) -> None:
    assert {key: metrics.NAMES[key] for key in counters.METRICS} == dict(counters.METRICS)
    capability = metrics.CHIPS[chip]
    names = [name for dtype in ("bfloat16", "float16", "float32")
             for name in metrics_for(dtype, capability).values()]  # fmt: skip
    try:
        assert evaluator.unknown(chip, names) == {}
    except LookupError as reason:
        pytest.skip(str(reason))
    assert "flops" not in metrics_for("float32", capability)


def test_the_native_source_compiles() -> None:
    folders = [Path("/usr/local/cuda/include"), *Path("/usr/local").glob("cuda-1*/include")]
    cuda = next((one for one in folders if (one / "cupti_range_profiler.h").is_file()), None)
    if cuda is None or shutil.which("g++") is None:
        pytest.skip("no g++, or no headers of CUPTI")
    torch_headers = Path(torch.__file__).parent / "include"
    command = ["g++", "-fsyntax-only", "-std=c++17", "-Wall", "-Wextra", "-Werror"]
    command += ["-DTORCH_EXTENSION_NAME=x", str(ROOT / library.SOURCE)]
    for folder in (cuda, torch_headers, sysconfig.get_paths()["include"]):
        command += ["-isystem", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_flops_of_a_product_are_counted() -> None:
    a = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    call: Callable[[], Any] = lambda: a @ a  # noqa: E731
    try:
        found = collect(call, metrics_for("bfloat16", torch.cuda.get_device_capability()))
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert found.values["flops"] == pytest.approx(2 * 1024**3, rel=0.3)
    assert 0 < found.values["tensor_pct"] <= 100
    again = collect(call, metrics_for("bfloat16", torch.cuda.get_device_capability()))
    assert again.values["flops"] == found.values["flops"]
