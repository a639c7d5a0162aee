"""Result files: strict JSON, atomic, resumable, exported."""

import json
import math
from pathlib import Path

import pytest
import torch

from attnscope.common import environment
from attnscope.common import results as store
from attnscope.common.results import ROW_KEYS, Results, read_results, strict_row

ENV = {key: "same" for key in store.SAME_TO_RESUME}


def row(impl: str = "cpu", workload: str = "w", status: str = "ok", **more) -> dict:
    return {"impl": impl, "workload": workload, "status": status, **more}


def refuse(token: str) -> None:
    raise AssertionError(f"{token} in a result file")


def test_numbers_that_are_not_finite_become_null_with_the_reason(tmp_path: Path):
    results = Results.create(tmp_path / "r.json", ENV, resume=False)
    kernels = ["NaN", "Infinity<float>"]
    results.add([
        row(tflops=math.nan, ratio=math.inf, samples_ms=[1.0, -math.inf], kernels=kernels,
            reason="slow", nvml={"before": {"power_w": math.nan}}),
    ])  # fmt: skip
    (found,) = json.loads(results.path.read_text(), parse_constant=refuse)["rows"]
    assert found["tflops"] is None and found["ratio"] is None
    assert found["samples_ms"] == [1.0, None]
    assert found["nvml"] == {"before": {"power_w": None}}
    assert found["kernels"] == kernels
    assert found["reason"].split("; ") == [
        "slow", "samples_ms[1] was -inf", "tflops was nan", "ratio was inf",
        "nvml.before.power_w was nan",
    ]  # fmt: skip


def test_rows_have_every_key_and_no_other():
    assert tuple(strict_row(row())) == ROW_KEYS
    with pytest.raises(ValueError, match="must be in the schema, got 'colour'"):
        strict_row(row(colour="red"))
    with pytest.raises(ValueError, match="status must be one of .*, got 'fine'"):
        strict_row(row(status="fine"))


def test_a_row_replaces_the_one_of_the_same_workload_and_impl(tmp_path: Path):
    results = Results.create(tmp_path / "r.json", ENV, resume=False)
    results.add([row("a", "w", "failed"), row("b", "w")])
    assert results.finished() == {("w", "b")}
    results.add([row("a", "w", "ok", median_ms=1.0)])
    assert [r["impl"] for r in read_results(results.path)["rows"]] == ["a", "b"]
    assert results.finished() == {("w", "a"), ("w", "b")}


def test_a_failed_save_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch):
    results = Results.create(tmp_path / "r.json", ENV, resume=False)
    results.add([row("a")])
    before = results.path.read_text()

    def disk_full(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(store.os, "fsync", disk_full)
    with pytest.raises(OSError, match="no space left"):
        results.add([row("b")])
    assert results.path.read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_an_older_file_is_kept_unless_resumed(tmp_path: Path):
    path = tmp_path / "r.json"
    Results.create(path, ENV, resume=False).add([row("a")])
    assert [r["impl"] for r in Results.create(path, ENV, resume=True).rows] == ["a"]
    assert Results.create(path, ENV, resume=False).rows == []
    assert not path.exists()
    assert read_results(store.backup(path))["rows"][0]["impl"] == "a"


def test_a_file_of_another_experiment_is_not_resumed(tmp_path: Path):
    path = tmp_path / "r.json"
    Results.create(path, ENV, resume=False).add([row("a")])
    with pytest.raises(ValueError, match="resume: gpu must be 'same', as in .*, got 'other'"):
        Results.create(path, ENV | {"gpu": "other"}, resume=True)


def test_a_result_of_record_needs_a_commit(tmp_path: Path):
    path = tmp_path / "benchmarks" / "results" / "h200" / "r.json"
    for git, got in (
        ({"git_sha": "abc", "git_dirty": True}, "changes that are not committed"),
        ({"git_sha": None, "git_dirty": None}, "no commit"),
    ):
        with pytest.raises(ValueError, match=f"unless the code is committed, got .*{got}"):
            Results.create(path, ENV | git, resume=False)
        Results.create(tmp_path / "r.json", ENV | git, resume=False).save()
    committed = ENV | {"git_sha": "abc", "git_dirty": False}
    Results.create(path, committed, resume=False).save()
    with pytest.raises(ValueError, match="resume: git_sha must be 'abc'"):
        Results.create(path, committed | {"git_sha": "def"}, resume=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": 1, "env": {}, "rows": [{"tflops": NaN}]}', "NaN is not JSON"),
        ("[]", "must be a result file with schema, env and rows"),
        ("{", "must be a result file in JSON, got an error"),
        ('{"schema": 2, "env": {}, "rows": []}', "must have schema 1, got schema 2"),
    ],
)
def test_files_that_are_no_results_are_refused(tmp_path: Path, text, message):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_results(path)
    with pytest.raises(ValueError, match="No such file"):
        read_results(tmp_path / "none.json")


def test_export_as_csv(tmp_path: Path):
    import pandas as pd

    results = Results.create(tmp_path / "r.json", ENV, resume=False)
    results.add([row("a", samples_ms=[1.0, 2.0], median_ms=1.5), row("b", status="skipped")])
    store.export(results.path, tmp_path / "r.csv")
    table = pd.read_csv(tmp_path / "r.csv")
    assert tuple(table.columns) == ROW_KEYS
    assert json.loads(table.samples_ms[0]) == [1.0, 2.0]
    assert table.impl.tolist() == ["a", "b"] and math.isnan(table.median_ms[1])


def test_export_refuses_what_it_cannot_write(tmp_path: Path, monkeypatch):
    results = Results.create(tmp_path / "r.json", ENV, resume=False)
    results.add([row("a")])
    with pytest.raises(ValueError, match="target must end in .csv or .parquet"):
        store.export(results.path, tmp_path / "r.xlsx")
    monkeypatch.setattr(store.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="target must be .csv without pyarrow"):
        store.export(results.path, tmp_path / "r.parquet")


def test_environment_has_versions_and_device():
    env = environment.environment(torch.device("cpu"), {"l2": "warm"})
    json.dumps(env, allow_nan=False)
    assert env["torch"] == torch.__version__ and env["device"] == "cpu" and env["gpu"] is None
    assert set(store.SAME_TO_RESUME) <= set(env)
    assert set(env["packages"]) == set(environment.PACKAGES)
    assert env["libraries"]["_C"] == "loaded"
