"""profiling/*.py as a user calls them, on the CPU, and as targets of other tools."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import typer
from forked import run_python
from signals import interruptible
from typer.testing import CliRunner

from attnscope.bench.impls import ALIASES, DEFAULTS, IMPLS
from attnscope.profile.record.attached import attached_tool
from attnscope.studies.attention import BACKWARD, Pass, _backward, _measure, attention_command
from attnscope.studies.lm import run as model_run
from attnscope.studies.lm.command import lm_command, pair_command
from attnscope.studies.lm.run import Run
from attnscope.studies.records import Row

ROOT = Path(__file__).parents[2]
TOOLS = ("NSYS_", "NV_", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH")


def script(name: str, *arguments: str, **environment: str) -> tuple[int, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(TOOLS)}
    file, env = str(ROOT / "profiling" / name), clean | environment
    if "NVTX_INJECTION64_PATH" in environment:  # read when nvtx loads
        command = [sys.executable, file, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    else:
        done = run_python(file, *arguments, env=env)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("environment", "tool"),
    [
        ({}, None),
        ({"NSYS_NVTX_PROFILER_REGISTER_ONLY": "0", "LD_PRELOAD": "libjemalloc.so"}, None),
        ({"CUDA_INJECTION64_PATH": ""}, None),
        ({"NSYS_PROFILING_SESSION_ID": "17"}, "nsys"),
        ({"LD_PRELOAD": "/opt/nsys/libToolsInjectionProxy64.so"}, "nsys"),
        ({"CUDA_INJECTION64_PATH": "/opt/nsys/libToolsInjection64.so"}, "nsys"),
        ({"NV_COMPUTE_PROFILER_PERFWORKS_DIR": "/opt/ncu"}, "ncu"),
        ({"NV_NSIGHT_INJECTION_PORT_BASE": "49152"}, "ncu"),
        ({"LD_PRELOAD": "/x/libTreeLauncherTargetInjection.so"}, "ncu"),
        ({"NV_SANITIZER_INJECTION_PORT_RANGE_BEGIN": "1"}, "compute-sanitizer"),
        ({"CUDA_INJECTION64_PATH": "/my/nvbit.so"}, "a CUDA injection"),
    ],
)
def test_the_tool_that_started_a_process(environment: dict[str, str], tool: str | None) -> None:
    found = attached_tool(environment)
    assert (found and found[0]) == tool
    if found:
        assert any(name in found[1] for name in environment)


def test_profile_kernels_writes_tables_memory_and_a_trace(tmp_path: Path) -> None:
    output = tmp_path / "out"
    code, said = script(
        "profile_kernels.py", "--seq-len", "64", "--impl", "flash", "--device", "cpu",
        "--iterations", "3", "--output", str(output),
    )  # fmt: skip
    assert code == 0, said
    assert "sdpa-flash, forward-fp32-b1-q64-k64-h8-kv8-d64-causal, cpu" in said
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in said
    written = {path.name for path in output.iterdir()}
    assert {"memory.csv", "allocations.csv", "trace.json", "profile.json"} <= written
    content = json.loads((output / "profile.json").read_text())
    calls = {row["name"]: row["calls"] for row in content["tables"]["operators"]}
    assert calls["aten::scaled_dot_product_attention"] == 3
    stages = {row["path"]: row["calls"] for row in content["tables"]["stages"]}
    assert stages == {"measure": 1, "measure/sdpa-flash-forward": 1}
    assert "traceEvents" in json.loads((output / "trace.json").read_text())


@pytest.mark.parametrize(
    "environment",
    [{"NSYS_PROFILING_SESSION_ID": "1"}, {"NV_COMPUTE_PROFILER_PERFWORKS_DIR": "/opt/ncu"}],
)
def test_profile_kernels_leaves_the_profiler_off_under_a_tool(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    arguments = ("--seq-len", "32", "--device", "cpu", "--output", str(output))
    code, said = command("profile_kernels.py", *arguments)
    assert code == 0, said
    assert f"{next(iter(environment))} is set): PyTorch's profiler stays off" in said
    assert "ran 10 calls in each NVTX range of the domain 'attnscope': cpu-forward" in said
    assert not output.exists()


def test_profile_kernels_has_a_range_for_each_impl_and_pass(tmp_path: Path) -> None:
    code, said = command(
        "profile_kernels.py", "--seq-len", "32", "--impl", "flash,naive,cpu", "--backward",
        "--device", "cpu", "--iterations", "2", "--output", str(tmp_path),
    )  # fmt: skip
    assert code == 0, said
    tables = json.loads((tmp_path / "profile.json").read_text())["tables"]
    assert {row["path"] for row in tables["stages"]} == {
        "measure", "measure/sdpa-flash-forward", "measure/sdpa-flash-backward",
        "measure/naive-forward", "measure/naive-backward", "measure/cpu-forward",
        "measure/cpu-backward",
    }  # fmt: skip
    calls = {row["name"]: row["calls"] for row in tables["operators"]}
    assert calls["aten::_scaled_dot_product_flash_attention_for_cpu_backward"] == 2
    assert calls["attnscope::backward"] == 2


@pytest.mark.gpu
def test_a_backward_pass_launches_from_the_thread_of_its_range() -> None:
    """NVTX ranges, and the filters of ncu and nsys, apply to a single thread."""
    threads = []
    x = torch.ones(4, device="cuda", requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: threads.append(threading.get_ident()))
    call = _backward(y * 3, [x])
    assert not isinstance(call, str)
    _measure([Pass(IMPLS["naive"], BACKWARD, call)], 2)
    assert threads == [threading.get_ident()] * 3


def recorder(tmp_path: Path) -> Path:
    tool = tmp_path / "recorder.so"
    source = ROOT / "tests/support/nvtx_recorder.cpp"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", tool, source], check=True)
    return tool


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles a small tool")
def test_the_ranges_of_profile_kernels_are_registered_in_one_domain(tmp_path: Path) -> None:
    code, said = script(
        "profile_kernels.py", "--seq-len", "32", "--impl", "flash", "--backward", "--device", "cpu",
        "--iterations", "1", "--no-profile", NVTX_INJECTION64_PATH=str(recorder(tmp_path)),
    )  # fmt: skip
    assert code == 0, said
    nvtx = [line.split() for line in said.splitlines() if line.startswith(("push ", "pop "))]
    assert all(line[1] == "attnscope" for line in nvtx)
    assert all(line[2] == "registered" for line in nvtx if line[0] == "push")
    assert [line[3] if line[0] == "push" else "pop" for line in nvtx] == [
        "warmup", "pop",
        "measure", "sdpa-flash-forward", "pop", "sdpa-flash-backward", "pop", "pop",
    ]  # fmt: skip


def test_profile_kernels_without_a_profile(tmp_path: Path) -> None:
    code, said = command(
        "profile_kernels.py", "--seq-len", "32", "--impl", "naive", "--no-profile",
        "--output", str(tmp_path / "out"),
    )  # fmt: skip
    assert (code, (tmp_path / "out").exists()) == (0, False)
    assert "ran 10 calls" in said


def command(script: str, *arguments: str) -> tuple[int, str]:
    """Run a script with arguments in this process."""
    app = typer.Typer()
    if script == "profile_kernels.py":
        app.command()(attention_command)
    else:
        app.command("lm")(lm_command)
        app.command("pair")(pair_command)
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


def test_every_impl_and_alias_is_understood() -> None:
    """CPU impls run; the others report their requirements."""
    names = {*DEFAULTS["cuda"], *DEFAULTS["cpu"], *ALIASES}
    if torch.cuda.is_available():
        names.remove("triton")  # it would treat CPU tensors as the interpreter's
    for name in sorted(names):
        arguments = ["--seq-len", "16", "--impl", name, "--device", "cpu", "--no-profile"]
        code, said = command("profile_kernels.py", *arguments)
        able = ALIASES.get(name, name) in DEFAULTS["cpu"]
        assert code == (0 if able else 2), said
        assert "must be one of" not in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--impl", "nope"], "impl must be one of cuda, cuda-sm80, triton"),
        (["--impl", "cuda", "--device", "cpu"], "impl must be able to do forward-fp32-b1-q512"),
        (["--impl", "cpu", "--dtype", "int"], "dtype must be one of bfloat16"),
        (
            ["--impl", "cpu", "--heads", "3", "--kv-heads", "2"],
            "heads_q must be a multiple of heads_kv",
        ),
        (["--device", "tpu"], "device must be cuda, cuda:N or cpu, got 'tpu'"),
        (["--seq-len", "100000000000000000000"], "--seq-len"),
        (["--impl", "cpu", "--device", "cpu", "--output", "/dev/null"], "got /dev/null: File"),
    ],
)
def test_bad_input_of_profile_kernels_is_one_line(arguments: list[str], says: str) -> None:
    code, said = command("profile_kernels.py", *arguments)
    assert (code, says in said) == (2, True), said


def test_a_file_that_profile_kernels_cannot_write_is_named(tmp_path: Path) -> None:
    (tmp_path / "profile.json").mkdir()
    code, said = script(
        "profile_kernels.py", "--seq-len", "16", "--impl", "cpu", "--device", "cpu",
        "--iterations", "1", "--output", str(tmp_path),
    )  # fmt: skip
    assert code == 2, said
    assert f"profile_kernels: output: {tmp_path}/profile.json: Is a directory\n" in said
    assert "Traceback" not in said


def test_a_pass_without_the_memory_is_one_line(tmp_path: Path) -> None:
    code, said = command(
        "profile_kernels.py", "--impl", "cpu", "--device", "cpu", "--batch", "2000000000",
        "--seq-len", "2000000000", "--output", str(tmp_path),
    )  # fmt: skip
    assert code == 1
    assert said.startswith("profile_kernels: RuntimeError: ") and said.count("\n") == 1, said


def test_profile_model_lm_writes_records_and_the_report(tmp_path: Path) -> None:
    code, said = command(
        "profile_model.py", "lm", "--models", "tiny", "--contexts", "16", "--impl",
        "naive,cpu,cuda", "--device", "cpu", "--output", str(tmp_path),
    )  # fmt: skip
    assert code == 0, said
    content = json.loads((tmp_path / "lm.json").read_text())
    assert [row["status"] for row in content["rows"]] == ["ok", "ok", "skipped"]
    report = (tmp_path / "lm.md").read_text()
    assert "3 configurations: 2 ok, 1 skipped" in report
    assert "no backward" not in report
    for row in content["rows"][:2]:
        assert list(row["wall_ms"]) == ["forward", "backward", "optimizer"]
    assert (tmp_path / "lm.html").exists()


def test_profile_model_without_any_measured_configuration_fails(tmp_path: Path) -> None:
    code, said = command(
        "profile_model.py", "lm", "--models", "tiny", "--contexts", "16", "--impl", "cuda",
        "--device", "cpu", "--output", str(tmp_path),
    )  # fmt: skip
    assert code == 1
    assert "skipped: cuda: runs on cuda only, not on cpu" in said


LM = ("lm", "--models", "tiny", "--device", "cpu", "--output")


def test_records_are_lost_by_no_second_run(tmp_path: Path) -> None:
    first = (*LM, str(tmp_path), "--contexts", "8")
    assert command("profile_model.py", *first)[0] == 0
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    code, said = command("profile_model.py", *LM, str(tmp_path), "--contexts", "16")
    assert (code, "or go on with it by --resume" in said) == (2, True)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files
    code, said = command("profile_model.py", *LM, str(tmp_path), "--contexts", "16", "--resume")
    assert code == 0, said
    rows = json.loads((tmp_path / "lm.json").read_text())["rows"]
    assert [row["context"] for row in rows] == [8, 16]


def run_out(run: Run) -> Row:
    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def die(run: Run) -> Row:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


@pytest.mark.parametrize(
    ("measured", "reason"),
    [(run_out, "out of memory: CUDA out of memory"), (die, "its process was ended by SIGKILL")],
)
def test_a_configuration_that_fails_is_a_row_of_the_report(
    measured: object, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = (*LM, str(tmp_path), "--contexts")
    assert command("profile_model.py", *lm, "8")[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr(model_run, "measure", measured)
        code, said = command("profile_model.py", *lm, "8,16", "--resume")
    assert (code, f"context 16, naive: failed: {reason}" in said) == (0, True), said
    ok, failed = json.loads((tmp_path / "lm.json").read_text())["rows"]
    assert (ok["status"], failed["status"]) == ("ok", "failed")
    row = next(line for line in (tmp_path / "lm.md").read_text().splitlines() if reason in line)
    assert "| failed |" in row
    code, said = command("profile_model.py", *lm, "8,16", "--resume")
    assert (code, "context 16, naive: ok" in said) == (0, True), said


def test_a_damaged_file_is_not_gone_on_with(tmp_path: Path) -> None:
    again = (*LM, str(tmp_path), "--contexts", "16", "--resume")
    code, said = command("profile_model.py", *again)
    assert code == 0, said
    path = tmp_path / "lm.json"
    content = json.loads(path.read_text())
    wall = content["rows"][0].pop("wall_ms")
    path.write_text(json.dumps(content))
    code, said = command("profile_model.py", *again)
    assert (code, "tiny, context 16, naive: ok" in said) == (0, True)  # it is measured again
    content["rows"][0] |= {"wall_ms": wall, "status": "fine"}
    path.write_text(text := json.dumps(content))
    code, said = command("profile_model.py", *again)
    assert (code, "record 1: status must be one of ok, " in said) == (2, True), said
    assert path.read_text() == text


def test_ctrl_c_keeps_what_was_done(tmp_path: Path) -> None:
    """SIGINT goes to the whole process group, as a terminal sends it."""
    path = tmp_path / "lm.json"
    run = subprocess.Popen(
        [sys.executable, str(ROOT / "profiling" / "profile_model.py"), *LM, str(tmp_path),
         "--contexts", "16,8192"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        preexec_fn=interruptible,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.5)
    os.killpg(run.pid, signal.SIGINT)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 130, said
    assert "lm.json has what was done; go on with --resume" in said
    assert "Process" not in said and "Traceback" not in said
    assert [row["context"] for row in json.loads(path.read_text())["rows"]] == [16]


def test_profile_model_pair_reports_what_each_change_brought(tmp_path: Path) -> None:
    code, said = command(
        "profile_model.py", "pair", "--model", "tiny", "--context", "16", "--larger-batch", "8",
        "--device", "cpu", "--output", str(tmp_path),
    )  # fmt: skip
    assert code == 0, said
    report = (tmp_path / "pair.md").read_text()
    assert "times the tokens a second" in report
    assert "| batch 8 instead of 4 | 128 |" in report
    assert "No GPU time: no GPU" in report
    records = (tmp_path / "pair.json").read_bytes()
    code, said = command("profile_model.py", "pair", "--device", "cpu", "--output", str(tmp_path))
    assert (code, "pair.json, which exists and is kept" in said) == (2, True), said
    assert (tmp_path / "pair.json").read_bytes() == records


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["lm", "--models", "huge"],
            "model must be one of small, medium, large, xl, 2.7B, tiny, got 'huge'",
        ),
        (["lm", "--contexts", "0"], "contexts must be positive integers such as 128,256, got '0'"),
        (["lm", "--batch", "-1"], "--batch"),
        (["lm", "--impl", "nope"], "impl must be one of"),
        (["lm", "--timeout", "inf"], "--timeout"),
        (["pair", "--context", "0"], "--context"),
        (["lm", "--contexts", "a"], "contexts must be positive integers such as 128,256, got 'a'"),
        (
            ["lm", "--precision", "int8"],
            "precision must be one of fp32, autocast, bf16, got 'int8'",
        ),
        (["pair", "--impl", "nope"], "impl must be one of"),
        (["lm", "--models", ","], "models, impl must each name one or more, got ','"),
        (["lm", "--timeout", "-1"], "--timeout"),
        (["lm", "--models", "tiny", "--output", "/dev/null"], "got /dev/null: File exists"),
        (["pair", "--model", "tiny", "--output", "/dev/null/x"], "got /dev/null/x: Not a dir"),
    ],
)
def test_bad_input_of_profile_model_is_one_line(arguments: list[str], says: str) -> None:
    code, said = command("profile_model.py", *arguments)
    assert (code, says in said) == (2, True), said


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["cuda", "triton", "flash", "naive"])
def test_profile_kernels_on_a_gpu(impl: str, tmp_path: Path) -> None:
    code, said = script("profile_kernels.py", "--impl", impl, "--output", str(tmp_path))
    assert code == 0, said
    content = json.loads((tmp_path / "profile.json").read_text())
    assert content["attribution"]["share"] == 1.0
    assert content["incomplete"] is None
    assert (tmp_path / "kernels.csv").exists()


@pytest.mark.gpu
def test_backward_passes_on_a_gpu_are_in_their_range(tmp_path: Path) -> None:
    code, said = script(
        "profile_kernels.py", "--impl", "cuda,flash", "--backward", "--output", str(tmp_path)
    )
    assert code == 0, said
    rows = json.loads((tmp_path / "profile.json").read_text())["tables"]["stages"]
    kernels = {row["path"]: row["kernels"] for row in rows}
    assert kernels["measure/cuda-forward"] == 10 and kernels["measure/cuda-backward"] >= 10
    assert kernels["measure/sdpa-flash-backward"] >= 20
    assert kernels["measure"] == sum(kernels[path] for path in kernels if "/" in path)
