"""The model-by-context report from nsys recordings: phases, parts, failures, both profilers."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import typer
from made_nsys import MadeReport
from typer.testing import CliRunner

from attnscope.common.results import Results, read_record
from attnscope.nsight.recording import read_recording
from attnscope.nsight.tool import ToolError
from attnscope.studies.lm import nsys, nsys_report
from attnscope.studies.lm.command import lm_command
from attnscope.studies.lm.model import model_config
from attnscope.studies.lm.run import Run
from attnscope.studies.records import Row

GEMM, SOFTMAX = "nvjet_tst_128x64", "void cunn_SoftMaxForward<float>(float*)"
ADAM = "void multi_tensor_apply_kernel<FusedAdam>(float)"
RUN = Run(name="tiny", config=model_config("tiny", 16), impl="naive")


def recorded_step(slower: float = 1.0) -> MadeReport:
    """A step whose backward runs on autograd's thread, with the numbers of `emit_nvtx`."""
    made = MadeReport()

    def op(name, sequence, start, kernels, thread=4000):
        made.range(f"{name}, seq = {sequence}", start, start + 20, registered=False, thread=thread)
        for kernel, length in kernels:
            made.kernel(kernel, start + 5, start + 30, start + 30 + length * slower, thread=thread)

    made.range("forward", 0, 500, "attnscope")
    made.range("Self-Attention", 10, 200, "attnscope")
    op("aten::linear", 1, 15, [(GEMM, 10)])
    made.range("Attention Core", 60, 180, "attnscope")
    op("aten::matmul", 2, 65, [(GEMM, 20)])
    op("aten::_softmax", 3, 125, [(SOFTMAX, 15)])
    made.range("MLP", 210, 300, "attnscope")
    op("aten::linear", 4, 220, [(GEMM, 40)])
    made.range("backward", 510, 900, "attnscope")
    op("AddmmBackward0", 4, 520, [(GEMM, 80)], 4001)
    op("SoftmaxBackward0", 3, 640, [(SOFTMAX, 25)], 4001)
    op("BmmBackward0", 2, 710, [(GEMM, 45)], 4001)
    made.range("optimizer", 910, 1100, "attnscope")
    made.kernel(ADAM, 920, 930, 990)
    return made


def record_of(run: Run, status: str = "ok") -> Row:
    walls = {"forward": [1.0, 2.0, 3.0], "backward": [2.0], "optimizer": [1.0]}
    more = {"wall_ms": walls, "no_backward": None, "no_kernels": "nsys", "peak_memory_gib": 1.0}
    return run.key | {"status": status, "reason": None} | more


def save(folder: Path, made: MadeReport, record: Row) -> None:
    folder.mkdir(parents=True)
    made.save(folder / "report.sqlite")
    (folder / "record.json").write_text(json.dumps(record))


def test_backward_kernels_belong_to_the_part_of_the_op_with_their_number(tmp_path):
    step = nsys.Step(read_recording(recorded_step().save(tmp_path / "r.sqlite")))
    found = step.work({"flops": [], "softmax_flops": {}})
    times = {(row.phase, row.part, row.category): row.total_us for row in found.kernels}
    assert times == {
        ("forward", "Self-Attention", "GEMM"): 10.0,
        ("forward", "Attention Core", "GEMM"): 20.0,
        ("forward", "Attention Core", "softmax"): 15.0,
        ("forward", "MLP", "GEMM"): 40.0,
        ("backward", "MLP", "GEMM"): 80.0,
        ("backward", "Attention Core", "softmax"): 25.0,
        ("backward", "Attention Core", "GEMM"): 45.0,
        ("optimizer", "(outside)", "elementwise"): 60.0,
    }
    walls = {name: phase.wall_us for name, phase in found.phases.items()}
    assert walls == {"forward": 500.0, "backward": 390.0, "optimizer": 190.0}
    assert (found.owned, found.total_us) == (1.0, 295.0)
    found.check("step")


def test_a_folder_of_reports_becomes_the_report_beside_pytorchs_profiler(tmp_path):
    save(tmp_path / "nsys/tiny-16-naive", recorded_step(), record_of(RUN))
    other = Run(name="tiny", config=model_config("tiny", 32), impl="naive")
    save(tmp_path / "nsys/tiny-32-naive", recorded_step(1.1), record_of(other))
    (tmp_path / "nsys/small-128-naive").mkdir()
    lost = Run(name="small", config=model_config("small", 128), impl="naive").key
    lost |= {"status": "failed", "reason": "out of memory: 80 GiB"}
    (tmp_path / "nsys/small-128-naive/record.json").write_text(json.dumps(lost))
    profiled = []
    for run, slower in ((RUN, 1.0), (other, 1.0)):
        made = recorded_step(slower).save(tmp_path / "profiled.sqlite")
        flops = [{"phase": "forward", "part": "Attention Core", "flops": 4000, "reason": None}]
        step = nsys.Step(read_recording(made))
        work = step.work({"flops": flops, "softmax_flops": {"forward": 600}})
        profiled.append(record_of(run) | {"no_kernels": None} | asdict(work))
    results = Results.create(tmp_path / "lm.json", {}, False)
    results.rows = profiled
    results.save()
    document = nsys_report.write_report(
        tmp_path / "nsys", tmp_path / "lm-nsys", tmp_path / "lm.json"
    )
    sections = {one.title: list(one.rows) for one in document.sections}
    assert [row["status"] for row in sections["Configurations"]] == ["failed", "ok", "ok"]
    forward = sections["Forward time"]
    assert [row["wall clock ms"] for row in forward] == [2.0, 2.0]
    assert forward[0]["GPU busy ms"] == pytest.approx(0.085)
    inside = next(row for row in sections["Inside attention"] if row["context"] == 16)
    assert inside["product FLOPs, G"] == 4e-6 and inside["softmax ms"] == pytest.approx(0.015)
    both = sections["Beside PyTorch's profiler"]
    assert [row["difference"] is None for row in both] == [True] * 3 + [False] * 2 + [True]
    assert "other times (two runs, two clocks): most +7.0 us in nvjet" in both[3]["difference"]
    text = (tmp_path / "lm-nsys.md").read_text()
    assert (
        "out of memory: 80 GiB" in text
        and "6 of 6 phases have as many kernels, 4 agree within 0.5 %" in text
    )
    assert len(read_record(tmp_path / "lm-nsys.json")["rows"]) == 3


def test_plain_reports_are_known_by_their_names(tmp_path):
    recorded_step().save(tmp_path / "tiny-16-naive.sqlite")
    rows, env = nsys.read_folder(tmp_path)
    assert env["gpu"] == "NVIDIA H200"
    assert (rows[0]["status"], rows[0]["wall_ms"]["forward"]) == ("ok", [0.5])
    recorded_step().save(tmp_path / "huge-16.sqlite")
    with pytest.raises(ValueError, match="model must be one of small, .* got 'huge'"):
        nsys.read_folder(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="folder must have reports named <model>"):
        nsys.read_folder(tmp_path / "empty")


def test_profile_model_records_each_configuration_once(tmp_path, monkeypatch):
    calls = []

    def record(settings, folder):
        calls.append(json.loads(settings.command[3]))
        made, run = Path(settings.command[4]), calls[-1]
        folder.mkdir(parents=True)
        if run["config"]["context"] == 64:
            raise ToolError("no matching range", "the gate did not open")
        recorded_step().save(folder / "report.sqlite")
        config = nsys.ModelConfig(**run["config"])
        made.write_text(json.dumps(record_of(Run(**run | {"config": config}))))

    monkeypatch.setattr(nsys, "record", record)
    app = typer.Typer()
    app.command()(lm_command)
    arguments = ["--nsys", "--models", "tiny", "--contexts", "16,64", "--device", "cpu"]
    for form in ("terminal", "markdown"):
        line = [*arguments, "--output", str(tmp_path), "--format", form]
        done = CliRunner().invoke(app, line)
        assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].startswith("# Where the time of a training step goes") and len(lines) <= 60
    assert len(calls) == 2  # recorded ones and failed ones are kept
    assert "no matching range: the gate did not open" in done.output
    assert (tmp_path / "lm-nsys.html").exists()
    shutil.rmtree(tmp_path / "nsys/tiny-16-naive")
    analyze = typer.Typer()
    analyze.command()(nsys_report.analyze_command)
    done = CliRunner().invoke(analyze, [str(tmp_path / "nsys"), "--json"])
    assert done.exit_code == 1  # the one that is left failed
