"""`attnscope nsys` against a program that imitates nsys and each of its failures."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from made_nsys import MadeReport
from typer.testing import CliRunner

from attnscope import cli
from attnscope.common import tools

SUPPORT = Path(__file__).parents[1] / "support"
GEMM = "void cutlass_80_tensorop_bf16_s16816gemm<float, 3>(Params)"
ATTENTION = "void attnscope::sm90::forward_kernel<__nv_bfloat16, 128>(Params)"


def nsys(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, and stderr."""
    result = CliRunner().invoke(cli.build("nsys"), ["nsys", *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def wait_until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def made_report() -> MadeReport:
    made = MadeReport()
    made.range("warmup", 0, 100, "attnscope")
    made.kernel(GEMM, 10, 20, 60)
    for start in (200, 600):
        made.range("step", start, start + 350, "attnscope")
        made.kernel(ATTENTION, start + 10, start + 30, start + 80)
        made.kernel(GEMM, start + 20, start + 80, start + 120)
    made.range("plain", 1000, 1100, registered=False)
    made.copy(1, 1 << 20, 1010, 1020, 1060)
    return made


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Configure the fake; returns the calls that it got, as lists."""
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "bin" / "nsys"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -SE {SUPPORT / "fake_nsys.py"} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{Path(shutil.which('true')).parent}")
    log = tmp_path / "calls"

    def configure(made: MadeReport | None = None, **how):
        report = (made or made_report()).save(tmp_path / "whole.sqlite")
        monkeypatch.setenv("FAKE_NSYS", json.dumps({"report": str(report), "log": str(log)} | how))

    configure()
    configure.calls = lambda: [json.loads(line) for line in log.read_text().splitlines()]
    return configure


def test_a_run_leaves_tables_and_everything_that_repeats_it(fake, tmp_path):
    code, stdout, stderr = nsys("--output", "out", "--json", "--", "true", "--epochs", "1")
    assert code == 0 and "%" not in stderr  # no progress bars
    shown = json.loads(stdout)
    assert [row["range"] for row in shown["tables"]["Stages"]["rows"]][0] == "step"
    assert shown["notes"] == ["nsys stats agrees: 5 kernels, 0.22 ms"]
    out = tmp_path / "out"
    commands = json.loads((out / "commands.json").read_text())["commands"]
    assert [one["label"] for one in commands] == ["profile", "export", "reports", "stats"]
    assert commands[0]["argv"][-3:] == ["true", "--epochs", "1"]
    assert commands[0]["exit_code"] == 0
    versions = json.loads((out / "versions.json").read_text())
    assert versions["tools"]["nsys"]["version"] == "2025.3.2.474"
    assert (out / "logs/1-profile.err").exists() and (out / "report.sqlite").exists()
    assert {"nsys.md", "nsys.html", "nsys.json"} <= {one.name for one in out.iterdir()}
    # The settings that it wrote are a config for the next run.
    assert yaml.safe_load((out / "session.yaml").read_text())["command"][0] == "true"
    code, stdout, _ = nsys("--config", "out/session.yaml", "--output", "again", "--dry-run")
    assert (code, stdout.splitlines()[0].split()[-3:]) == (0, ["true", "--epochs", "1"])
    assert not (tmp_path / "again").exists()
    refused, _, stderr = nsys("--output", "out", "--", "true")
    assert refused == 2 and "output must be a new or empty folder, got out" in stderr


@pytest.mark.parametrize(
    ("how", "name", "quoted"),
    [
        ({"fail": "permission"}, "no permission", "ERR_NVGPUCTRPERM"),
        ({"fail": "busy"}, "another profiler attached", "MULTIPLE_SUBSCRIBERS"),
        ({"fail": "option"}, "option unknown", "--cuda-graph-trace"),
        ({"fail": "disk"}, "disk full", "No space left"),
        ({"fail": "disk", "at": "export"}, "disk full", "No space left"),
        ({"fail": "driver"}, "driver mismatch", "insufficient"),
        ({"fail": "corrupt", "at": "export"}, "report unreadable", "corrupt"),
        ({"fail": "strange", "at": "export"}, "export failed", "nobody has seen"),
        ({"fail": "nothing"}, "no report", "wrote no report.nsys-rep"),
    ],
)
def test_each_failure_has_a_name_a_cause_and_the_line_that_shows_it(fake, how, name, quoted):
    fake(**how)
    code, stdout, stderr = nsys("--output", "out", "--", "true")
    assert (code, stdout) == (1, "")
    assert f"nsys: {name}: " in stderr
    assert quoted in stderr
    assert ("try: " in stderr) == (name not in ("export failed", "no report"))
    assert json.loads(Path("out/commands.json").read_text())["commands"]


def test_a_missing_tool_and_a_missing_program_are_found_before_anything_runs(fake, monkeypatch):
    assert nsys("--", "no-such-program")[0] == 2
    assert "Write python train.py" in nsys("--", "train.py")[2]
    monkeypatch.setitem(tools.TOOLS, "nsys", ((), "get it there"))
    Path("bin/nsys").unlink()
    code, _, stderr = nsys("--output", "out", "--", "true")
    assert code == 2 and "tool missing: nsys not found; get it there" in stderr
    assert not Path("out").exists()


def test_a_range_gates_by_its_exact_name_with_strings_as_they_are_emitted(fake):
    code, stdout, _ = nsys("--range", "step@attnscope", "--output", "out", "--", "true")
    assert code == 0
    recorded = [call for call in fake.calls() if "--capture-range=nvtx" in call]
    assert recorded[0][:2] == ["profile", None]  # a registered string needs no variable
    assert {"--nvtx-capture=step@attnscope", "--capture-range-end=stop"} <= set(recorded[0])
    assert "only the first 1 of 2 ranges step@attnscope was recorded (--captures 2" in stdout
    assert "gate: 4 of 5 kernels were launched in step@attnscope" in stdout
    assert nsys("--range", "plain", "--output", "two", "--", "true")[0] == 0
    recorded = [call for call in fake.calls() if "--nvtx-capture=plain" in call]
    assert recorded[0][1] == "0"  # admits strings that are not registered
    many = ("--range", "step@*", "--captures", "2", "--output", "three", "--", "true")
    assert nsys(*many)[0] == 0
    assert any("--capture-range-end=repeat:2" in call for call in fake.calls())


def test_a_range_that_is_not_emitted_is_refused_with_those_that_are(fake):
    code, _, stderr = nsys("--range", "step", "--output", "out", "--", "true")
    assert code == 2
    assert "warmup@attnscope (1 x), step@attnscope (2 x), plain (1 x)" in stderr
    assert "got 'step'. Write step@attnscope" in stderr
    assert not any("--nvtx-capture=step" in call for call in fake.calls())
    # Without the probe, the missing report shows it.
    code, _, stderr = nsys("--range", "step", "--no-probe", "--output", "two", "--", "true")
    assert code == 1
    assert "no matching range: no range step began while the program ran" in stderr
    assert "No reports were generated" in stderr


def test_a_program_that_fails_keeps_its_code_and_what_it_did(fake):
    failing = ("--", "sh", "-c", "echo lost >&2; exit 3")
    code, stdout, stderr = nsys("--output", "out", *failing)
    assert code == 3
    assert "the program ended with exit code 3" in stdout and "lost" in stderr
    gated = ("--range", "absent", "--no-probe", "--output", "two", *failing)
    code, _, stderr = nsys(*gated)
    assert code == 1 and "exit code 3 before the gate opened" in stderr


def test_a_time_out_interrupts_the_program(fake):
    code, _, stderr = nsys("--timeout", "0.3", "--output", "out", "--", "sleep", "20")
    assert code == 1 and "time-out: profile took longer than 0.3 s" in stderr
    assert json.loads(Path("out/commands.json").read_text())["commands"][0]["exit_code"] != 0


def test_a_tool_does_not_outlive_the_command(tmp_path):
    """Left behind, it would keep the GPU's counters."""
    lines = [
        "from pathlib import Path",
        "from attnscope.nsight.tool import Step, run",
        "run(Step('x', ['sh', '-c', 'echo $$ > pid; exec sleep 30']), Path('x'))",
    ]
    started = subprocess.Popen([sys.executable, "-c", "\n".join(lines)], cwd=tmp_path)
    pid = tmp_path / "pid"
    wait_until(lambda: pid.is_file() and pid.read_text().endswith("\n"))
    status = Path(f"/proc/{int(pid.read_text())}/status")
    assert status.exists()

    def ended() -> bool:
        try:
            return "\nState:\tZ" in status.read_text()
        except OSError:
            return True

    started.kill()
    started.wait()
    wait_until(ended)


def test_a_recording_without_work_is_an_error(fake):
    made = MadeReport()
    made.range("step", 0, 100, "attnscope")
    made.add("DIAGNOSTIC_EVENT", timestamp=1, severity=3, text="No CUDA events collected.")
    fake(made)
    code, _, stderr = nsys("--output", "out", "--", "true")
    assert code == 1 and "has no kernel and no copy: No CUDA events collected." in stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gate", "nvtx"], "gate must be cuda or left out, got 'nvtx'"),
        (["--range", "@x"], "range must be name, name@domain or name@*, got '@x'"),
        (["--captures", "2"], "captures must be 1, or more with a gate, got 2"),
        (["--trace", "cuda,gpu"], "trace must be of cuda, cuda-hw, nvtx"),
        (["--trace", "cuda", "--range", "a"], "trace must have nvtx"),
        (["--gate", "cuda", "--range", "a"], "gate must be left out with a range"),
        (["--sample", "gpu"], "sample must be one of none, cpu, got 'gpu'"),
        (["--format", "xml"], "format must be one of terminal, markdown, json, got 'xml'"),
        (["--config", "absent.yaml"], "config must be readable, got absent.yaml"),
        (["--import", "x.sqlite"], "or --import a report, got both"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(fake, arguments, message):
    code, _, stderr = nsys(*arguments, "--", "true")
    assert code == 2 and message in stderr
    assert not Path("calls").exists()


def test_a_config_is_checked_by_key_and_type(fake, tmp_path):
    for text, message in (
        ("ranges: a", "keys must be of command, range,"),
        ("captures: many", "captures must be an integer, got 'many'"),
        ("- a", "config must be a mapping of settings, got list"),
        ("a: [", "config must be YAML, got"),
    ):
        (tmp_path / "c.yaml").write_text(text)
        code, _, stderr = nsys("--config", "c.yaml", "--", "true")
        assert code == 2 and message in stderr


def test_reports_are_imported_and_exported_once(fake, tmp_path):
    report = made_report().save(tmp_path / "old.nsys-rep")
    code, stdout, _ = nsys("--import", report, "--range", "step@attnscope", "--format", "markdown")
    assert code == 0, _
    assert len(stdout.splitlines()) <= 60
    assert "inside step@attnscope" in stdout and "| step | 2 |" in stdout
    assert nsys("--import", report)[0] == 0
    assert [call[0] for call in fake.calls()].count("export") == 1
    code, _, stderr = nsys("--import", report, "--range", "no")
    assert code == 2 and "plain (1 x); got 'no'" in stderr
    (tmp_path / "x.sqlite").write_text("no sqlite")
    code, _, stderr = nsys("--import", "x.sqlite")
    assert code == 2 and "a file of another format" in stderr
