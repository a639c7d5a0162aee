"""Records of models: each kernel in one row, refused contradictions, failures; the reports."""

import json
import os
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from made_trace import RECORDED
from step_trace import FUSED, record, step

from attnscope.common.results import Results, read_record
from attnscope.profile import Profile
from attnscope.profile.errors import ProfileError
from attnscope.profile.render.document import Document, Section
from attnscope.studies.isolation import run_apart
from attnscope.studies.lm.model import ModelConfig
from attnscope.studies.lm.pair import pair_report, recipes, runs
from attnscope.studies.lm.records import ProfiledModel, read_model
from attnscope.studies.lm.report import model_report
from attnscope.studies.lm.run import Run, run_all
from attnscope.studies.records import Row
from attnscope.studies.summary import gpu_work, place

ENV = {"gpu": "NVIDIA H200", "torch": "2.11", "time": "now"}
TINY = ModelConfig(d_model=32, d_ff=64, layers=1, heads=2, context=8, vocabulary=20)


def tiny(impl: str = "naive", **more: Any) -> Run:
    return Run(name="tiny", config=TINY, impl=impl, device="cpu", batch=1, **more)


def section(document: Document, title: str) -> Section:
    return next(one for one in document.sections if one.title == title)


# Records


def test_a_made_step_by_phase_and_part(tmp_path: Path) -> None:
    found = gpu_work(step(tmp_path))
    times: Counter[tuple[str, str, str]] = Counter()
    for row in found.kernels:
        times[row.phase, row.part, row.category] += row.total_us
    assert times == {
        ("forward", "Add & Norm", "norm"): 3.0,
        ("forward", "Attention Core", "GEMM"): 22.0,
        ("forward", "Attention Core", "elementwise"): 5.0,
        ("forward", "Attention Core", "softmax"): 20.0,
        ("forward", "MLP", "GEMM"): 40.0,
        ("backward", "MLP", "GEMM"): 80.0,
        ("backward", "Attention Core", "GEMM"): 25.0,
        ("optimizer", "(outside)", "elementwise"): 15.0,
    }
    assert found.total_us == 210.0
    assert {k: p.kernel_us for k, p in found.phases.items()} == {
        "forward": 90.0,
        "backward": 105.0,
        "optimizer": 15.0,
    }
    assert found.owned == 1.0
    flops = {(row.phase, row.part): row.flops for row in found.flops}
    assert flops["forward", "Attention Core"] == 2 * 2 * 2 * 8 * 8 * 4
    assert flops["backward", "Attention Core"] == 2 * 2 * 8 * 8 * 4
    assert flops["forward", "MLP"] == 2 * 16 * 8 * 32
    assert found.softmax_flops == {"forward": 5 * 2 * 8 * 8}
    json.dumps(asdict(found), allow_nan=False)


@pytest.mark.parametrize("name", ["train", "stack"])
def test_a_recorded_step_adds_up(name: str) -> None:
    owners = Profile.read(RECORDED / f"{name}.json.gz")
    found = gpu_work(owners)
    times: Counter[str] = Counter()
    for row in found.kernels:
        times[row.phase] += row.total_us
    assert sum(times.values()) == pytest.approx(sum(k.duration for k in owners.trace.kernels) / 1e3)
    assert set(times) == {"forward", "backward", "optimizer"}
    for phase, about in found.phases.items():
        assert about.kernel_us == pytest.approx(times[phase])
    assert sum(row.calls for row in found.kernels) == len(owners.trace.kernels)


def test_backward_belongs_to_the_part_of_its_forward_op(tmp_path: Path) -> None:
    owners = step(tmp_path).attribution
    places = Counter(place(owners, kernel) for kernel in owners.trace.kernels)
    assert places["backward", "MLP"] == 1
    assert places["backward", "Attention Core"] == 1


def test_a_step_without_kernels_is_no_record(tmp_path: Path) -> None:
    owners = step(tmp_path)
    owners.trace.gpu = []
    with pytest.raises(ValueError, match="trace must have a kernel, got none"):
        gpu_work(owners)


# Processes


def die(run: Run) -> Row:
    os.kill(os.getpid(), 9)
    return {}


def leave(run: Run) -> Row:
    os._exit(7)


def hang(run: Run) -> Row:
    time.sleep(60)
    return {}


def run_out(run: Run) -> Row:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def go_wrong(run: Run) -> Row:
    raise KeyError("weights")


@pytest.mark.parametrize(
    ("measure", "timeout_s", "reason"),
    [
        (die, 60.0, "ended by SIGKILL: perhaps by the kernel, for want of memory"),
        (leave, 60.0, "ended with code 7 and no result"),
        (hang, 0.5, "took longer than 0.5 s"),
        (run_out, 60.0, "out of memory: CUDA out of memory. Tried to allocate 20.00 GiB."),
        (go_wrong, 60.0, "KeyError: 'weights' (test_profile_model_report.py:"),
    ],
)
def test_what_ends_badly_is_a_row(measure: Any, timeout_s: float, reason: str) -> None:
    found = run_apart(tiny(), timeout_s, measure)
    assert (found["status"], found["model"]) == ("failed", "tiny")
    assert reason in found["reason"]


def test_records_are_saved_as_they_come_and_not_made_twice(tmp_path: Path) -> None:
    path, seen = tmp_path / "lm.json", []
    todo = [tiny(), tiny("cpu"), tiny("cuda")]

    def see(one: Row) -> None:
        seen.append((one["impl"], one["status"]))
        assert one in read_record(path)["rows"]

    results = Results.create(path, {"device": "cpu"}, resume=False)
    run_all(todo, results, on_done=see)
    assert seen == [("naive", "ok"), ("cpu", "ok"), ("cuda", "skipped")]
    naive, cpu, cuda = read_record(path)["rows"]
    assert set(naive["wall_ms"]) == set(cpu["wall_ms"]) == {"forward", "backward", "optimizer"}
    assert cpu["no_backward"] is None
    assert cuda["reason"] == "cuda: runs on cuda only, not on cpu"
    assert naive["no_kernels"].startswith("no GPU")
    again = Results.create(path, {"device": "cpu"}, resume=True)
    run_all(todo, again, on_done=see)
    assert len(seen) == 3
    again.rows[0] |= {"status": "failed", "reason": "out of memory"}
    run_all(todo, again, on_done=see)
    assert seen[3:] == [("naive", "ok")]
    assert [row["impl"] for row in again.rows] == ["naive", "cpu", "cuda"]
    again.rows[1] |= {"wall_ms": {}}  # impossible: a forward pass takes some time
    run_all(todo, again, on_done=see)
    assert seen[4:] == [("cpu", "ok")]


# Impossible records


def _more(one: Row) -> None:
    one["kernels"][0]["total_us"] += 1.0


def _backward_is_nothing(one: Row) -> None:
    one["phases"]["backward"]["kernel_us"] = 0.0


def _forward_over_step(one: Row) -> None:
    one["phases"]["forward"]["kernel_us"] = 1.646 * one["total_us"]


def _busy_over_wall(one: Row) -> None:
    one["phases"]["forward"]["wall_us"] = 1.0


def _lost_a_call(one: Row) -> None:
    one["kernels"][0]["calls"] += 1


def _owned(one: Row) -> None:
    one["owned"] = 1.02


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (_more, "the sum of kernels must be 210.000 us, got 211.000 us"),
        (_backward_is_nothing, "backward: the sum of kernels must be 0.000 us, got 105.000 us"),
        (_forward_over_step, "the sum of the phases must be at most 210.000 us, got 465.660 us"),
        (_busy_over_wall, "forward: busy_us of wall_us must be at most 1.000 us, got 90.000 us"),
        (_lost_a_call, "backward: kernels must be 3, as in rows, got 2"),
        (_owned, "owned must be at least 0 and at most 1, got 1.02"),
    ],
)
def test_a_record_that_cannot_be_true_is_refused(tmp_path: Path, wrong: Any, says: str) -> None:
    good, bad = record(tmp_path, scale=2.0), record(tmp_path, context=16)
    assert read_model(bad, "record 1").status == "ok"
    wrong(bad)
    found = read_model(bad, "record 1")
    assert found.status == "refused" and says in str(found.reason)
    document = model_report([good, bad], ENV)
    row = section(document, "Configurations").rows[1]
    assert (row["status"], says in row["reason"]) == ("refused", True)
    assert row["reason"].startswith("made 16 naive: ")
    for part in document.sections[1:]:
        assert all(row["context"] == 8 for row in part.rows)


def test_a_table_of_constants_is_refused(tmp_path: Path) -> None:
    same = [record(tmp_path, context=context) for context in (8, 16)]
    with pytest.raises(ProfileError, match=r"must differ .*, got 210\.0 us in 2"):
        model_report(same, ENV)


def test_a_share_that_cannot_be_is_refused() -> None:
    with pytest.raises(ProfileError, match="a %"):
        Section("t", "", [{"name": "x", "a %": 164.6}])
    with pytest.raises(ProfileError, match="ms of x must be finite, got nan"):
        Section("t", "", [{"name": "x", "ms": float("nan")}])


# The report


@pytest.fixture
def document(tmp_path: Path) -> Document:
    failed = record(tmp_path, context=32) | {"status": "failed", "reason": "out of memory: 9 GiB"}
    cut = record(tmp_path, context=64, core=FUSED, scale=3.0, no_backward="cuda has no backward")
    return model_report([record(tmp_path), record(tmp_path, 16, FUSED), failed, cut], ENV)


def test_every_configuration_is_a_row(document: Document) -> None:
    rows = section(document, "Configurations").rows
    assert [row["status"] for row in rows] == ["ok", "ok", "failed", "ok"]
    assert rows[2]["reason"] == "out of memory: 9 GiB"
    assert rows[3]["reason"] == "cuda has no backward"
    assert all(row["context"] != 32 for part in document.sections[1:] for row in part.rows)


def test_forward_time_wall_clock_against_the_profiler(document: Document) -> None:
    row = section(document, "Forward time").rows[0]
    assert row["wall clock ms"] == 2.0
    assert row["GPU busy ms"] == pytest.approx(0.090)
    assert row["GPU busy of wall %"] == pytest.approx(4.5)


def test_kernels_longer_than_the_wall_clock_have_no_share(tmp_path: Path) -> None:
    slow = record(tmp_path)
    slow["wall_ms"]["forward"] = [0.05] * 3
    part = section(model_report([slow], ENV), "Forward time")
    assert "GPU busy of wall %" not in part.rows[0]
    assert "made 8 naive" in part.notes[0]


def test_top_kernels_count_and_mean(document: Document) -> None:
    rows = [r for r in section(document, "Top kernels").rows if r["context"] == 8]
    step = [row for row in rows if row["in"] == "step"]
    assert (step[0]["kernel"], step[0]["count"]) == ("nvjet_sm90_c", 2)
    assert step[0]["total ms"] == pytest.approx(0.120)
    assert step[0]["mean us"] == pytest.approx(60.0)
    forward = [row for row in rows if row["in"] == "forward"]
    assert forward[0]["share %"] == pytest.approx(100 * 40 / 90)


def test_categories_of_the_forward_pass_sum_to_100(document: Document) -> None:
    for row in section(document, "Kernel categories in the forward pass").rows:
        assert sum(v for k, v in row.items() if k.endswith("%")) == pytest.approx(100)
    row = section(document, "Kernel categories in the forward pass").rows[0]
    assert row["GEMM %"] == pytest.approx(100 * 62 / 90)
    assert row["softmax %"] == pytest.approx(100 * 20 / 90)
    fused = section(document, "Kernel categories in the forward pass").rows[1]
    assert fused["attention %"] == pytest.approx(100 * 30 / 73)


def test_phases_and_the_share_of_products(document: Document) -> None:
    part = section(document, "Forward, backward, optimizer")
    assert len(part.rows) == 2
    row = part.rows[0]
    assert row["forward %"] + row["backward %"] + row["optimizer %"] == pytest.approx(100)
    assert row["GEMM of forward %"] == pytest.approx(100 * 62 / 90)
    assert row["GEMM of step %"] == pytest.approx(100 * (62 + 105) / 210)
    assert part.notes == ["made 64 cuda: forward only: cuda has no backward."]


def test_wall_clock_of_the_phases(document: Document) -> None:
    rows = section(document, "Wall clock").rows
    assert rows[0] | {"backward ms": 3.0, "step ms": 6.0} == rows[0]
    assert rows[0]["tokens a second"] == pytest.approx(8 / 6e-3)
    # Without a backward there is no step.
    assert "step ms" not in rows[2]


def test_what_distinguishes_configurations_is_in_every_table(tmp_path: Path) -> None:
    first, second = record(tmp_path), record(tmp_path, scale=2.0) | {"precision": "fp32"}
    document = model_report([first, second], ENV)
    for part in document.sections:
        assert {row["precision"] for row in part.rows} == {"autocast", "fp32"}
        assert all("batch" not in row for row in part.rows) or part.title == "Configurations"
    times = section(document, "Kernel categories in the forward pass").figure
    assert times is not None
    labels = [label.get_text() for label in times.axes[0].get_yticklabels()]
    assert labels == ["made 8 naive autocast", "made 8 naive fp32"]


def test_inside_attention_by_flop(document: Document) -> None:
    rows = section(document, "Inside attention").rows
    plain = next(r for r in rows if (r["context"], r["phase"]) == (8, "forward"))
    assert plain["form"] == "separate kernels"
    assert (plain["products ms"], plain["softmax ms"], plain["rest ms"]) == (0.022, 0.020, 0.005)
    assert plain["products ps a FLOP"] == pytest.approx(22e6 / 2048)
    assert plain["softmax ps a FLOP"] == pytest.approx(20e6 / 640)
    assert plain["softmax over products, a FLOP"] == pytest.approx(20 / 640 / (22 / 2048))
    fused = next(r for r in rows if (r["context"], r["phase"]) == (16, "forward"))
    assert fused["form"] == "fused: 1 attention kernels"
    assert "softmax ms" not in fused
    assert fused["product FLOPs, G"] == pytest.approx(4 * 2 * 2 * 36 * 4 / 1e9)


def test_parts_sum_to_the_step(tmp_path: Path) -> None:
    found = read_model(record(tmp_path), "record 1")
    assert isinstance(found, ProfiledModel)
    times = found.part_times()
    assert times["Attention Core"] == 72.0
    assert times["MLP"] == 120.0
    assert times["optimizer"] == 15.0
    assert times.total() == 210.0


def test_the_report_as_files(document: Document, tmp_path: Path) -> None:
    document.write_markdown(tmp_path / "lm.md")
    document.write_html(tmp_path / "lm.html")
    text = (tmp_path / "lm.md").read_text()
    for part in document.sections:
        assert f"## {part.title}" in text
    figures = sorted(path.name for path in (tmp_path / "lm-figures").iterdir())
    assert "forward-backward-optimizer.svg" in figures
    for name in figures:
        assert name.endswith(".png") or f"](lm-figures/{name})" in text
    assert "nan" not in text.lower()
    assert "<" not in text.replace("\\<", "")
    page = (tmp_path / "lm.html").read_text()
    assert "out of memory: 9 GiB" in page
    assert page.count("<svg") == 2


# The pair


def test_recipes_change_one_thing_at_a_time() -> None:
    ways = recipes("sdpa-flash", 4, 32)
    assert (ways[0].precision, ways[0].impl, ways[0].batch) == ("fp32", "naive", 4)
    assert (ways[-1].precision, ways[-1].impl, ways[-1].batch) == ("autocast", "sdpa-flash", 32)
    for before, after in zip(ways, ways[1:], strict=False):
        old, new = ((w.precision, w.impl, w.batch) for w in (before, after))
        assert sum(a != b for a, b in zip(old, new, strict=True)) == 1
    assert [run.batch for run in runs(TINY, ways, "cpu")] == [4, 4, 4, 32]


@pytest.mark.parametrize(
    ("impl", "larger", "changes"),
    [
        ("cuda", 32, ["fused attention (cuda)", "batch 32 instead of 4"]),
        ("sdpa-math", 32, ["unfused attention (sdpa-math)", "batch 32 instead of 4"]),
        ("naive", 32, ["batch 32 instead of 4"]),  # the plain loop has naive attention
        ("cuda", 4, ["fused attention (cuda)"]),
    ],
)
def test_a_change_is_called_what_it_is(impl: str, larger: int, changes: list[str]) -> None:
    plain, bf16, *rest = recipes(impl, 4, larger)
    assert (plain.impl, bf16.impl) == ("naive", "naive")
    assert [way.change for way in rest] == changes


def test_the_pair_by_token(tmp_path: Path) -> None:
    plain = record(tmp_path) | {"model": "plain"}
    best = record(tmp_path, core=FUSED) | {"model": "fused", "batch": 4}
    plain["findings"] = [{"kind": "unfused attention", "title": "unfused attention takes 40 %"}]
    best["findings"] = []
    document = pair_report([plain, best], ENV)
    first, last = section(document, "Changes").rows
    assert first["us a token"] == pytest.approx(6000 / 8)
    assert last["speed, to plain"] == pytest.approx(4.0)
    parts = {row["part"]: row for row in section(document, "Parts").rows}
    assert parts["MLP"]["plain us a token"] == pytest.approx(120 / 8)
    assert parts["MLP"]["speed"] == pytest.approx(4.0)
    assert parts["Self-Attention, core"]["optimised us a token"] == pytest.approx(55 / 32)
    (why,) = section(document, "Why").rows
    assert why["no longer found"] == "unfused attention takes 40 %"
    assert why["moved most, us a token"].startswith("GEMM 20.9 to 3.75")


def test_a_pair_without_its_plain_side_is_nothing_to_compare(tmp_path: Path) -> None:
    lost = record(tmp_path) | {"model": "plain", "status": "failed", "reason": "out of memory"}
    with pytest.raises(ValueError, match="got none: plain: out of memory"):
        pair_report([lost, record(tmp_path, 16)], ENV)


def test_a_change_that_failed_is_a_row_of_the_pair(tmp_path: Path) -> None:
    lost = record(tmp_path, 32) | {"model": "b", "status": "failed", "reason": "out of memory"}
    document = pair_report([record(tmp_path), lost, record(tmp_path, 16, FUSED)], ENV)
    row = section(document, "Changes").rows[1]
    assert row["not measured"] == "out of memory"
