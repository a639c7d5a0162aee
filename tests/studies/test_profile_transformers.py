"""Attention registered with transformers, and the report by attention implementation."""

import dataclasses
import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from made_trace import RECORDED
from typer.testing import CliRunner

from attnscope.integrations import transformers as registered
from attnscope.profile import Profile, ProfileError, profile
from attnscope.studies.llama import run
from attnscope.studies.llama.command import transformers_command
from attnscope.studies.llama.report import transformers_report
from attnscope.studies.parts import ATTENTION, CORE, EMBEDDING, FORWARD, LOSS, MLP
from attnscope.studies.records import Row

TINY = run.Llama(layers=2, hidden=64, heads=4, kv_heads=2, vocabulary=512, batch=2, context=96)
SMALL = "--layers 1 --hidden 32 --heads 4 --kv-heads 2 --batch 2 --context 16 --device cpu".split()
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def llama() -> tuple[Any, torch.Tensor]:
    pytest.importorskip("transformers", minversion="5.24")
    registered.register()
    return run.build(TINY, CPU)


def command(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(transformers_command)
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


# Logits


def test_right_implementations_pass_and_wrong_ones_have_no_times(
    llama: tuple[Any, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = llama
    interface = pytest.importorskip("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS

    def last_row_lost(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        out, _ = registered.forward(*args, **kwargs)
        out[:, -1] = 0
        return out, None

    def not_causal(module: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        q, k, v, *_ = args
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    found = run.check_logits(model, tokens, run.IMPLS)
    assert {name: one["status"] for name, one in found.items()} == dict.fromkeys(run.IMPLS, "ok")
    for wrong in (last_row_lost, not_causal):
        monkeypatch.setitem(interface._local_mapping, registered.NAME, wrong)
        record = run.run_all(TINY, CPU, [registered.NAME])[0]
        assert record["status"] == "wrong" and "logits" in record["reason"]
        assert "wall_ms" not in record


def test_the_bar_of_all_logits_is_below_the_bar_of_a_row() -> None:
    torch.manual_seed(0)
    truth = torch.randn(2, 64, 128, dtype=torch.float64)
    usual = (truth + 0.02 * torch.randn_like(truth)).bfloat16()
    more = (truth + 0.03 * torch.randn_like(truth)).bfloat16()
    assert run.compare_logits(usual, truth, usual)["status"] == "ok"
    found = run.compare_logits(more, truth, usual)
    assert found["status"] == "wrong" and found["margin"] < 1 and found["rms_ratio"] > run.RMS_BAR
    usual[0, 3, 5] = float("nan")
    assert run.compare_logits(usual, truth, usual)["status"] == "wrong"


# Passes


@pytest.mark.parametrize("impl", run.IMPLS)
def test_ranges_stand_around_the_parts_and_go_again(
    llama: tuple[Any, torch.Tensor], impl: str
) -> None:
    model, tokens = llama
    interface = pytest.importorskip("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    model.set_attn_implementation(impl)
    before = interface.get(impl)
    with run.ranges(model, impl), profile("test") as found:
        run._infer(model, tokens)
    calls = dict(zip(found.stages()["path"], found.stages()["calls"], strict=True))
    assert calls == {
        FORWARD: 1,
        f"{FORWARD}/{EMBEDDING}": 1,
        f"{FORWARD}/{CORE}": 1,  # the mask
        f"{FORWARD}/{ATTENTION}": TINY.layers,
        f"{FORWARD}/{ATTENTION}/{CORE}": TINY.layers,
        f"{FORWARD}/{MLP}": TINY.layers,
        f"{FORWARD}/{LOSS}": 1,
    }
    assert interface.get(impl) is before
    assert not any("forward" in vars(module) for module in model.modules())


def test_command_writes_records_and_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(run, "SAMPLES", 2)
    code, said = command(*SMALL, "--output", str(tmp_path))
    assert code == 0, said
    content = json.loads((tmp_path / "transformers.json").read_text())
    assert [(row["impl"], row["mode"], row["status"]) for row in content["rows"]] == [
        (impl, mode, "ok") for mode in run.MODES for impl in run.IMPLS
    ]
    report = (tmp_path / "transformers.md").read_text()
    assert "no GPU" in report and "with the profiler ms" in report
    assert (tmp_path / "transformers.html").exists()
    code, said = command(*SMALL, "--output", str(tmp_path))
    assert (code, "transformers.json, which exists" in said) == (
        2,
        True,
    ), said
    assert json.loads((tmp_path / "transformers.json").read_text()) == content


def test_a_model_that_cannot_be_had_is_rows_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")

    def run_out(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(run, "build", run_out)
    code, said = command(*SMALL, "--output", str(tmp_path))
    assert code == 1
    rows = json.loads((tmp_path / "transformers.json").read_text())["rows"]
    assert len(rows) == len(run.IMPLS) * len(run.MODES)
    assert {row["status"] for row in rows} == {"failed"}
    assert all("out of memory: CUDA out of memory. Tried" in row["reason"] for row in rows)
    assert "out of memory: CUDA" in (tmp_path / "transformers.md").read_text()


def test_parameters_are_those_of_the_model(llama: tuple[Any, torch.Tensor]) -> None:
    assert sum(one.numel() for one in llama[0].parameters()) == TINY.parameters


def test_bad_input_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = ("--output", str(tmp_path / "out"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, said = command(*SMALL, *output)
    assert (code, "transformers must be installed, got" in said) == (
        2,
        True,
    ), said
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__="4.57.1"))
    code, said = command(*SMALL, *output)
    assert (code, "transformers must be 5 or later, got 4.57.1" in said) == (2, True), said
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__="5.24.0"))
    code, said = command(*SMALL, "--kv-heads", "3", *output)
    assert (code, "heads must be a multiple of kv_heads (3), got 4" in said) == (2, True), said
    code, said = command(*SMALL, "--hidden", "12", *output)
    assert (code, "hidden must be an even multiple of heads (4), got 12" in said) == (2, True), said
    assert not (tmp_path / "out").exists()


# The report, of a training step recorded on a GPU


@pytest.fixture
def records(tmp_path: Path) -> list[Row]:
    with gzip.open(RECORDED / "train.json.gz", "rt") as file:
        text = file.read()
    for old, new in (("attention", ATTENTION), ("mlp", MLP)):
        assert f'"{old}"' in text
        text = text.replace(f'"{old}"', f'"{new}"')
    (tmp_path / "train.json").write_text(text)
    found = dataclasses.replace(Profile.read(tmp_path / "train.json"), wall_s=0.012)
    check = {"status": "ok", "reason": None, "max_abs_err": 0.02, "margin": 0.4, "rms_ratio": 1.0}
    key = {"impl": "eager", "mode": run.TRAINING, **vars(TINY), "parameters": 1000, "check": check}
    ok = {"status": "ok", "reason": None, "wall_ms": [2.0, 1.0, 3.0], "peak_memory_gib": 1.0}
    wrong = check | {"status": "wrong", "reason": "logits: are off"}
    lost = {"impl": "sdpa", "check": wrong, "status": "wrong", "reason": "logits: are off"}
    return [key | ok | run.tables(found), key | lost]


def test_report_has_the_times_of_one_pass(records: list[Row], tmp_path: Path) -> None:
    json.dumps(records, allow_nan=False)
    document = transformers_report(records, {"gpu": "H200", "settings": {}})
    sections = {section.title: section for section in document.sections}
    row, refused = sections["Comparison"].rows
    total_us = sum(one["total_us"] for one in records[0]["symbols"])
    assert row["GPU ms"] == pytest.approx(total_us / 1e3 / run.PASSES)
    assert (row["wall clock ms"], row["owned %"]) == (2.0, pytest.approx(100))
    assert refused["reason"] == "logits: are off" and "wall clock ms" not in refused
    overhead = sections["Overhead of the profiler"].rows[0]
    assert overhead["overhead ms"] == pytest.approx(12 / run.PASSES - 2)
    parts = sections["Parts of the model"].rows[0]
    optimizer = records[0]["phases"]["optimizer"]["kernel_us"] / total_us  # belongs to no part
    shares = sum(value for name, value in parts.items() if name.endswith("%"))
    assert shares == pytest.approx(100 * (1 - optimizer))
    # Forward and backward together exceed the forward range.
    stages = {one["path"]: one for one in sections["eager, forward + backward: stages"].rows}
    assert parts["MLP ms"] > stages[f"{FORWARD}/{MLP}"]["GPU ms"] > 0
    document.write_markdown(tmp_path / "report.md")
    document.write_html(tmp_path / "report.html")
    text = (tmp_path / "report.md").read_text()
    assert "GPU time owned by ops" in text and "are in the JSON file" in text


def test_top_ops_and_kernels_come_from_the_profile(records: list[Row]) -> None:
    document = transformers_report(records[:1], {"settings": {}})
    sections = {section.title: section for section in document.sections}
    ops = sections["eager, forward + backward: ops"].rows
    assert [one["own GPU ms"] for one in ops] == sorted(
        (one["own GPU ms"] for one in ops), reverse=True
    )
    assert 50 < sum(one["share %"] for one in ops) <= 100
    kernels = sections["eager, forward + backward: kernels"].rows
    assert kernels[0]["kernel"] == records[0]["symbols"][0]["kernel"]
    bars = sections["Kernel categories"].rows[0]
    whole = sum(v for k, v in bars.items() if k.endswith(" ms"))
    assert whole == pytest.approx(records[0]["total_us"] / 1e3 / run.PASSES)


def test_impossible_tables_are_refused(records: list[Row]) -> None:
    records[0]["symbols"][0]["total_us"] *= 100
    with pytest.raises(ProfileError, match="must be between 0 and 100"):
        transformers_report(records, {"settings": {}})


@pytest.mark.gpu
def test_command_on_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    arguments = "--layers 2 --hidden 512 --heads 8 --kv-heads 2 --batch 2 --context 256".split()
    code, said = command(*arguments, "--output", str(tmp_path))
    assert code == 0, said
    rows = json.loads((tmp_path / "transformers.json").read_text())["rows"]
    for row in rows:
        assert (row["status"], row["owned"]) == ("ok", pytest.approx(1.0)), row["reason"]
    ours = next(row for row in rows if row["impl"] == registered.NAME)
    mine = [row for row in ours["kernels"] if row["part"] == CORE]
    assert {row["category"] for row in mine} == {"attention"}  # no mask, no repeated keys
    assert sum(row["calls"] for row in mine) == 2 * run.PASSES
    trained = rows[-1]
    assert (trained["impl"], trained["mode"]) == (registered.NAME, run.TRAINING)
    mine = [row for row in trained["kernels"] if row["part"] == CORE]
    ours = {row["phase"]: 0 for row in mine}
    for row in mine:
        if row["kernel"].startswith("attnscope "):
            assert f" {row['phase']} " in row["kernel"]
            ours[row["phase"]] += row["calls"]
    assert ours == {"forward": 2 * run.PASSES, "backward": 3 * 2 * run.PASSES}


def test_the_old_name_of_the_integration_works_and_names_the_new_one() -> None:
    sys.modules.pop("attnscope.transformers", None)
    with pytest.warns(DeprecationWarning, match="import attnscope.integrations.transformers"):
        from attnscope.transformers import register
    assert register is registered.register
