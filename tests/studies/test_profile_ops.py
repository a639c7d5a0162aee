"""The attribution report: raw traces by another reader, rows, bars, and the text on them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from made_trace import RECORDED, RECORDINGS, kernel, launch, named, op, write_trace
from typer.testing import CliRunner

from attnscope.bench.impls import Unsupported
from attnscope.bench.timing import Timing
from attnscope.bench.workloads import Workload
from attnscope.common.results import Results, read_record
from attnscope.profile import profile
from attnscope.profile.api import Profile
from attnscope.profile.errors import ProfileError
from attnscope.profile.render.document import rows_of
from attnscope.profile.trace.markers import SENTINEL
from attnscope.profile.trace.reader import read_trace
from attnscope.studies.ops import command as ops_command
from attnscope.studies.ops import run as ops_run
from attnscope.studies.ops.kineto import Averages, record_with_averages
from attnscope.studies.ops.reconcile import Work, compare, measurements
from attnscope.studies.ops.records import read_attempts
from attnscope.studies.ops.report import attribution_report, missed
from attnscope.studies.ops.run import (
    CALLS,
    CASES,
    COLD_CASES,
    Case,
    Start,
    bars,
    measure,
    measure_all,
    measure_cold,
    raw_kernels,
    summarise,
)
from attnscope.studies.records import Row

CPU = torch.device("cpu")
# All ops with kernels in the recording `ops`, three calls each.
EVERYTHING = {
    "aten::mm": 1,
    "attnscope::forward": 1,
    "attnscope_triton::forward": 1,
    "aten::_scaled_dot_product_flash_attention": 1,
    "flash_attn_3::fwd|fa3_fwd::fwd": 1,
}


def read(name: str) -> tuple[Profile, Averages]:
    rows = json.loads((RECORDED / f"{name}.averages.json").read_text())
    return Profile.read(RECORDED / f"{name}.json.gz"), Averages(rows)


def case(rows: dict[str, int], impl: str | None = None) -> Case:
    return Case(name="mine", rows=rows, make=lambda device: lambda: None, impl=impl)


def failures(record: Row) -> list[str]:
    return missed(read_attempts([record])[0])


def tools(row_us: float, events_us: float) -> list[Row]:
    """The result of `reconcile` for a call of one kernel that cannot be captured."""
    work = Work([row_us] * CALLS, pieces=1)
    events = Timing(samples_ms=[events_us / 1e3] * CALLS)
    refused = Timing(error=RuntimeError("not permitted"))
    return rows_of(compare(measurements(work, events, refused, pair_us=1.0)))


@pytest.mark.parametrize("name", RECORDINGS)
def test_raw_kernels_are_those_of_the_trace(name: str) -> None:
    path = RECORDED / f"{name}.json.gz"
    raw, trace = raw_kernels(path), read_trace(path)
    assert len(raw) == len(trace.kernels)
    total = sum(one.duration for one in trace.kernels) / 1e3
    assert sum(one["dur"] for one in raw) == pytest.approx(total, abs=1e-6)


def test_kernels_of_the_profiler_itself_are_left_out(tmp_path: Path) -> None:
    events = [named(SENTINEL, 0, 10), named(SENTINEL, 100, 110), op("aten::mm", 20, 40)]
    for correlation, at in ((1, 5), (2, 25), (3, 105)):
        events += [launch(correlation, at), kernel(correlation, at + 30, at + 32, f"k{at}")]
    path = write_trace(tmp_path / "made.json", *events)
    assert [one["name"] for one in raw_kernels(path)] == ["k25"]


def test_rows_that_have_every_kernel_meet_the_bars() -> None:
    found = summarise(*read("ops"), case(EVERYTHING), 3)
    assert [row["name"] for row in found["rows"]][-1] == "fa3_fwd::fwd"
    assert found["row_us"] == pytest.approx(found["raw_us"], rel=1e-9)
    assert found["raw_kernels"] == sum(row["kernels"] for row in found["rows"])
    assert [(bar["bar"], bar["met"]) for bar in bars(found, [])] == [
        ("raw kernels", True),
        ("owned by ops", True),
    ]
    product = found["rows"][0]
    assert product["kineto_us"] == pytest.approx(product["gpu_us"] + 5.696)
    assert product["explanation"].startswith("5.70 us of overhead counted as device time")
    json.dumps(found, allow_nan=False)


def test_a_row_that_lacks_kernels_misses_its_bar() -> None:
    rows = dict(list(EVERYTHING.items())[1:])
    record = Start("mine").key | summarise(*read("ops"), case(rows), 3) | {"tools": []}
    (said,) = failures(record | {"bars": bars(record, [])})
    assert said.startswith("raw kernels must be between -0.01000 and 0.01000, got -0.")


def test_a_first_call_has_module_loading_in_kinetos_figure_and_not_in_ours() -> None:
    rows = {"aten::mm": 1, "attnscope::forward": 1}
    found = summarise(*read("cold"), case(rows), 1)
    assert all(bar["met"] for bar in bars(found, []))
    product = found["rows"][0]
    assert product["gpu_us"] == pytest.approx(6.88) and product["kineto_us"] > 40
    assert "module loading" in product["explanation"]


def test_work_that_no_op_owns_misses_the_bar() -> None:
    found, _ = read("raw")
    record = {"row_us": 1.0, "copy_us": 0.0, "raw_us": 1.0, "calls": 1}
    share = bars(record | {"share": found.attribution.share}, [])[1]
    assert (share["bar"], share["met"]) == ("owned by ops", False) and share["value"] < 1


@pytest.mark.parametrize(
    ("rows", "impl", "calls", "says"),
    [
        ({"aten::nothing": 1}, None, 3, "must have a row aten::nothing, got only .*aten::mm"),
        ({"aten::mm": 2}, None, 3, "aten::mm must have 6 calls, got 3"),
        ({"aten::mm": 1}, "sdpa-cudnn", 3, "sdpa-cudnn ran .*; expected one that matches"),
    ],
)
def test_what_is_not_the_case_is_an_error(
    rows: dict[str, int], impl: str | None, calls: int, says: str
) -> None:
    with pytest.raises(ProfileError, match=says):
        summarise(*read("ops"), case(rows, impl), calls)


def test_without_kinetos_table_the_figure_is_missing_with_the_reason() -> None:
    row = summarise(read("ops")[0], Averages(reason="it failed"), case(EVERYTHING), 3)["rows"][0]
    assert (row["kineto_us"], row["explanation"]) == (None, "it failed")


def test_pytorchs_table_comes_from_the_recorded_run() -> None:
    profile, averages = record_with_averages("mine", lambda: torch.ones(4, 4) @ torch.ones(4, 4))
    assert averages.rows is not None and "aten::mm" in {row["key"] for row in averages.rows}
    assert "aten::mm" in set(profile.operators()["name"])
    with pytest.raises(KeyError, match="mine"):
        record_with_averages("mine", lambda: {}["mine"])
    assert record_with_averages("mine", lambda: torch.ones(4))[0].name == "mine"


def test_a_table_that_pytorch_cannot_make_has_a_reason() -> None:
    class Failing:
        def key_averages(self) -> None:
            raise UnicodeDecodeError("utf-8", b"\xbe", 0, 1, "invalid start byte")

    averages = Averages.of(Failing())
    assert averages.rows is None and "invalid start byte" in str(averages.reason)


@pytest.mark.parametrize(("events_us", "met"), [(100.0, True), (109.0, True), (112.0, False)])
def test_events_may_see_what_reconcile_lists_and_no_more(events_us: float, met: bool) -> None:
    record = {"row_us": 90.0 * CALLS, "copy_us": 10.0 * CALLS, "raw_us": 90.0 * CALLS, "share": 1.0}
    found = bars(record | {"calls": CALLS}, tools(100.0, events_us))[-1]
    assert (found["bar"], found["met"]) == ("CUDA events", met)
    assert found["value"] == pytest.approx(events_us - 100.0)


def test_a_missing_number_meets_no_bar() -> None:
    record = {"row_us": 0.0, "copy_us": 0.0, "raw_us": 0.0, "share": None, "calls": 1}
    assert [bar["met"] for bar in bars(record, [])] == [False, False]


def test_a_measured_case_has_tools_and_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the two functions that need a GPU, and check the rest of `measure`."""
    found, averages = read("ops")
    asked: list[int] = []

    def record_calls(call: Any, calls: int) -> tuple[Profile, Averages]:
        asked.append(calls)
        return found, averages

    def reconcile(call: Any, *, samples: int, recorded: Profile) -> Any:
        assert recorded is found and samples == 3
        row_us = (
            sum(row["gpu_us"] for row in summarise(found, averages, case(EVERYTHING), 3)["rows"])
            / 3
        )
        work = Work([row_us] * 3, pieces=1)
        events = Timing(samples_ms=[row_us * 1.02 / 1e3] * 3)
        return compare(measurements(work, events, events, pair_us=1.0))

    monkeypatch.setattr(ops_run, "CALLS", 3)
    monkeypatch.setattr(ops_run, "record_calls", record_calls)
    monkeypatch.setattr(ops_run, "reconcile", reconcile)
    record = measure(case(EVERYTHING), CPU)
    assert asked == [3]
    assert [bar["met"] for bar in record["bars"]] == [True] * 3
    assert (record["call"], record["start"], failures(record)) == ("mine", "warm", [])
    report = attribution_report([record], {"gpu": "H200"})
    assert "1 rows: 1 measured, 0 of all miss a bar or failed." in report.lead[1]
    summary, kineto, several = report.sections
    assert summary.rows[0]["bars"] == "met" and summary.rows[0]["CUDA graph us"] > 0
    assert len(kineto.rows) == 5 and len(several.rows) == 3


def test_what_is_not_there_is_a_row_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU, impls report their requirements and the other cases fail."""
    monkeypatch.setattr(ops_run, "MATMUL", 16)
    results = Results(tmp_path / "attribution.json", {})
    statuses: list[str] = []
    cases = [one for one in CASES if one.impl != "sdpa-flash"]  # it would run on a CPU
    measure_all(results, CPU, lambda record: statuses.append(record["status"]), cases)
    records = read_record(results.path)["rows"]
    assert records == results.rows and statuses == [record["status"] for record in records]
    assert [record["call"] for record in records] == [*(one.name for one in cases), *COLD_CASES]
    by_name = {record["call"]: record for record in records if record["start"] == "warm"}
    assert by_name["cuda"]["status"] == by_name["fa3"]["status"] == "skipped"
    assert "runs on cuda only, not on cpu" in by_name["cuda"]["reason"]
    assert by_name["matmul"]["status"] == "failed"
    assert {record["status"] for record in records if record["start"] == "cold"} == {"skipped"}
    report = attribution_report(records, {"cpu": "mine"})
    (summary,) = report.sections
    assert summary.columns == ["call", "start", "bars", "reason"]
    report.write_markdown(tmp_path / "attribution.md")
    report.write_html(tmp_path / "attribution.html")
    assert "runs on cuda only" in (tmp_path / "attribution.md").read_text()


def test_the_backward_case_of_a_matmul_computes_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ops_run, "MATMUL", 16)
    call = next(one for one in CASES if one.name == "matmul, forward and backward").make(CPU)
    assert all(bool(one.isfinite().all()) and bool(one.any()) for one in call())


@pytest.mark.parametrize("impl", ["cpu", "sdpa-flash"])
@pytest.mark.parametrize("packed", [False, True])
def test_backward_cases_run_the_ops_of_their_rows(impl: str, packed: bool) -> None:
    dense = replace(ops_run.DENSE, batch=1, seqlen_q=8, seqlen_k=8, heads_q=2, heads_kv=2)
    work = Workload.of(seqlens=[5, 3], heads=2, head_dim=64, dtype="bfloat16") if packed else dense
    made = ops_run._trained(impl, impl, ops_run._OURS, work)
    if packed and impl != "cpu":
        with pytest.raises(Unsupported, match="packed"):
            made.make(CPU)
        return
    out, _, *gradients = made.make(CPU)()
    assert len(gradients) == 3
    assert all(bool(one.isfinite().all()) and bool(one.any()) for one in (out, *gradients))
    if impl == "cpu":
        with profile("both") as found:
            made.make(CPU)()
        calls = dict(zip(found.operators()["name"], found.operators()["calls"], strict=True))
        assert {name: calls[name] for name in made.rows} == dict(made.rows)


def test_every_case_of_ours_has_a_training_twin() -> None:
    names = {one.name for one in CASES}
    assert {f"{name}, forward and backward" for name in names if name.startswith(("cuda", "triton"))
            and "backward" not in name} <= names  # fmt: skip


def test_a_backward_by_another_impl_is_an_error() -> None:
    """The recording has forward kernels of ours only."""
    mine = replace(case(EVERYTHING, "cuda"), mode="both")
    with pytest.raises(ProfileError, match=r"cuda ran .*; expected one that matches .*backward"):
        summarise(*read("ops"), mine, 3)


def test_cold_cases_are_cases() -> None:
    assert set(COLD_CASES) <= {one.name for one in CASES}
    assert Start("cuda", "cold").key == {"call": "cuda", "start": "cold"}


def fake_command(
    records: list[Row], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str]:
    """The command on a machine that has a GPU, with these records."""
    monkeypatch.setattr(ops_command, "pick_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(
        "attnscope.common.environment.environment", lambda device, settings: {"gpu": "G"}
    )

    def measure_all(results: Results, device: torch.device, on_done: Any) -> None:
        for record in records:
            results.rows.append(record)
            results.save()
            on_done(record)

    monkeypatch.setattr(ops_run, "measure_all", measure_all)
    app = typer.Typer()
    app.command()(ops_command.ops_command)
    result = CliRunner().invoke(app, ["--output", str(folder)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_the_command_fails_where_a_row_misses_a_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = Start("all").key | summarise(*read("ops"), case(EVERYTHING), 3)
    row_us = good["row_us"] / 3
    good["tools"] = tools(row_us, 1.01 * row_us)
    good["bars"] = bars(good, good["tools"])
    absent = Start("fa3").key | {"status": "skipped", "reason": "package fa3 is not installed"}
    code, said = fake_command([good, absent], tmp_path, monkeypatch)
    assert code == 0, said
    assert "fa3, warm: skipped: package fa3 is not installed" in said
    text = (tmp_path / "attribution.md").read_text()
    assert "| met | cannot be captured: RuntimeError: not permitted |" in text
    assert {path.name for path in tmp_path.iterdir()} == {
        "attribution.json", "attribution.md", "attribution.html",
    }  # fmt: skip
    bad = good | {"tools": tools(row_us, 2 * row_us + 20)}
    bad["bars"] = bars(bad, bad["tools"])
    code, said = fake_command([good, bad], tmp_path / "bad", monkeypatch)
    assert code == 1 and "missed" in said
    assert fake_command([absent], tmp_path / "absent", monkeypatch)[0] == 1
    failed = Start("cuda").key | {"status": "failed", "reason": "RuntimeError: x"}
    assert fake_command([good, failed], tmp_path / "failed", monkeypatch)[0] == 1


def test_the_command_replaces_no_records_and_names_what_it_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = Start("fa3").key | {"status": "skipped", "reason": "package fa3 is not installed"}
    assert fake_command([absent], tmp_path, monkeypatch)[0] == 1
    before = (tmp_path / "attribution.json").read_bytes()
    code, said = fake_command([absent], tmp_path, monkeypatch)
    assert (code, "attribution.json, which exists" in said) == (
        2,
        True,
    ), said
    assert (tmp_path / "attribution.json").read_bytes() == before
    (tmp_path / "new" / "attribution.md").mkdir(parents=True)
    code, said = fake_command([absent], tmp_path / "new", monkeypatch)
    assert (code, "attribution.md: Is a directory" in said) == (2, True), said


def test_a_cold_case_needs_a_gpu() -> None:
    with pytest.raises(Unsupported, match="runs on cuda only"):
        measure_cold(Start("matmul", "cold", "cpu"))


@pytest.mark.gpu
@pytest.mark.timing
@pytest.mark.parametrize(
    "name",
    [
        "matmul", "sdpa-flash, forward and backward", "cuda, forward and backward",
        "cuda-sm80, forward and backward", "triton, forward and backward",
    ],
)  # fmt: skip
def test_a_case_meets_its_bars_on_a_gpu(name: str) -> None:
    record = measure(next(one for one in CASES if one.name == name), torch.device("cuda", 0))
    assert failures(record) == []
