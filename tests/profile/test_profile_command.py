"""`attnscope profile`: scripts, modules, recorded traces, output, files and exit codes."""

import gc
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas
import pytest
from forked import run_python
from made_trace import RECORDED, kernel, launch, named, op, write_trace
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

from attnscope.cli import build
from attnscope.profile.attribution.audit import Audit
from attnscope.profile.render import formats
from attnscope.profile.trace.events import CpuEvent

SCRIPT = """
import sys, torch
print("arguments", sys.argv[1:])
with torch.profiler.record_function("work"):
    torch.ones(8, 8) @ torch.ones(8, 8)
if "--fail" in sys.argv:
    raise RuntimeError("mine")
if "--stop" in sys.argv:
    raise KeyboardInterrupt
sys.exit(int(sys.argv[-1]) if sys.argv[-1].isdecimal() else None)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "my_script.py"
    path.write_text(SCRIPT)
    return str(path)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(build("profile"), ["profile", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


def run_text(folder: Path, text: str) -> tuple[int, str]:
    path = folder / "program.py"
    path.write_text(text)
    return run(str(path))


def test_a_recorded_trace_is_shown_with_the_attribution_under_each_table() -> None:
    code, out = run("--trace", str(RECORDED / "train.json.gz"), "--top", "5")
    assert code == 0
    assert "train: H200 SXM; window 29.14 ms; GPU work in 663.8 us of it" in out
    assert "complete: each of 164 launches has its work in the trace" in out
    for title in ("Stages", "Operators", "Kernels", "Copies and fills", "Steps"):
        assert f"\n{title}\n" in out
    assert out.count("100.00 % of 651.9 us GPU time owned by ops.") == 3
    assert "82 more rows" in out
    assert "GPU utilisation" in out and "time in kernels with tensor cores" in out


def test_what_no_op_owns_is_a_row_even_when_few_rows_are_shown() -> None:
    code, out = run("--trace", str(RECORDED / "raw.json.gz"), "--top", "1")
    assert code == 0 and "(not owned by an op)" in out
    assert "not owned: 1 x raw_add, 1.44 us, in range outer" in out


def test_operators_are_sorted_by_the_column_asked_for() -> None:
    path = str(RECORDED / "train.json.gz")
    _, by_self = run("--trace", path, "--sort", "self_gpu_us", "--top", "1")
    assert "aten::sum" in by_self and "engine: AddmmBackward0" not in by_self
    code, out = run("--trace", path, "--sort", "colour")
    assert (
        code == 2
        and "sort must be a column of the operators, got 'colour'" in out
        and "self_gpu_us" in out
    )


ODD = [
    "näm 漢字漢字漢字漢字",
    "[bold]x[/bold]",
    "quo'te\"",
    "a\nb",
    "\x1b[31mred",
    "x" * 10_000,
    "",
]


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_tables_are_no_wider_than_the_terminal_whatever_the_names(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def narrow(stderr: bool = False) -> Console:
        return Console(stderr=stderr, width=width, force_terminal=True, color_system=None)

    events = []
    for at, name in enumerate(ODD):
        start = 1000 * at
        events += [named(name, start, start + 900), op(name, start + 1, start + 800)]
        events += [launch(at + 1, start + 2), kernel(at + 1, start + 9, start + 12345, name)]
        events += [launch(at + 50, start + 850), kernel(at + 50, start + 870, start + 880, name, 8)]
    monkeypatch.setattr("attnscope.profile.render.table.console", narrow)
    for path in (write_trace(tmp_path / "odd.json", *events), RECORDED / "stack.json.gz"):
        code, out = run("--trace", str(path), "--full-names")
        assert code == 0 and "\x1b" not in out.replace("\x1b[1m", "").replace("\x1b[0m", "")
        lines = out.splitlines()
        rules = [at for at, line in enumerate(lines) if line.startswith("──")]
        assert len(rules) >= 4
        for at in rules:
            assert len(lines[at]) <= width
            assert cell_len(lines[at - 1]) == cell_len(lines[at + 1]) == len(lines[at])
            assert "…" not in lines[at - 1]
    assert "[bold]x[/bold]" in run("--trace", str(tmp_path / "odd.json"))[1]


def test_without_a_gpu_one_line_reports_it_and_no_empty_column_is_shown(script: str) -> None:
    code, out = run("--stacks", script)
    assert code == 0 and out.count("no GPU time") == 1
    assert "memcpy" not in out and "cpu" in out


def test_full_names_are_kernel_symbols() -> None:
    path = str(RECORDED / "ops.json.gz")
    assert "attnscope sm90 forward bf16" in run("--trace", path)[1]
    assert "void attnscope::sm90::forward_kernel" in run("--trace", path, "--full-names")[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--check, --diff, --merge must be given, and one only, got neither"),
        (["--trace", "a.json", "b.py"], "must be given, and one only, got script, trace"),
        (["--trace", "nowhere.json"], "nowhere.json: No such file"),
        (["nowhere.py"], "script must be a file, got 'nowhere.py'. A module needs -m"),
        (["-m", "nowhere"], "one that python -m finds, got 'nowhere'"),
        (["-m", "nowhere.inside"], "one that python -m finds, got 'nowhere.inside'"),
        (
            ["-m", "rich.__nowhere__"],
            "one that python -m finds, got 'rich.__nowhere__'",
        ),
        (
            ["-m", "attnscope.bench"],
            "one that python -m finds, got 'attnscope.bench'",
        ),
    ],
)
def test_bad_input_is_one_line_and_code_2(arguments: list[str], said: str) -> None:
    code, out = run(*arguments)
    assert code == 2 and said in out and "Traceback" not in out


def test_a_trace_that_is_cut_off_is_one_line_and_code_2(tmp_path: Path) -> None:
    path = tmp_path / "cut.json"
    path.write_text('{"traceEvents": [{"ph": "X",')
    code, out = run("--trace", str(path))
    assert code == 2 and "cut off at character 28" in out


def test_a_trace_with_lost_kernels_is_marked_and_code_1(tmp_path: Path) -> None:
    events = [op("a", 0, 50), launch(1, 10), launch(2, 20), kernel(2, 30, 40)]
    code, out = run("--trace", str(write_trace(tmp_path / "lost.json", *events)))
    assert code == 1
    assert "INCOMPLETE: 1 of 2 launches have no kernel" in out and "too small" in out


def test_a_script_gets_its_own_options_and_its_code_is_returned(
    script: str, capfd: pytest.CaptureFixture[str]
) -> None:
    before = sys.argv, sys.path[:]
    code, out = run("--top", "6", script, "--top", "9", "3")
    assert code == 3
    assert "arguments ['--top', '9', '3']" in out
    assert "aten::matmul" in out and "work" in out and "no GPU time" in out
    assert (sys.argv, sys.path) == before


def test_a_script_that_fails_shows_its_own_traceback_and_what_ran(
    script: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out = run(script, "--fail")
    errors = out + capfd.readouterr().err
    assert code == 1
    assert "RuntimeError: mine" in errors and "runpy" not in errors
    assert "ended by RuntimeError: mine" in out and "aten::matmul" in out


def test_an_interrupted_script_shows_what_ran(script: str) -> None:
    code, out = run(script, "--stop")
    assert code == 130
    assert "ended by KeyboardInterrupt" in out and "aten::matmul" in out


def test_a_script_without_ops_has_nothing_to_show_or_write(tmp_path: Path) -> None:
    path = tmp_path / "idle.py"
    path.write_text("print('idle')\n")
    code, out = run("--output", str(tmp_path / "out"), str(path))
    assert code == 0 and "nothing was recorded" in out
    assert not list((tmp_path / "out").iterdir())


def test_a_module_runs_as_main_and_soon(tmp_path: Path) -> None:
    # Importing torch._inductor takes seconds, and the module does not need it.
    checks = "assert __name__ == '__main__' and 'torch._inductor' not in sys.modules\n"
    (tmp_path / "my_module.py").write_text(f"import sys\n{checks}{SCRIPT}")
    command = [sys.executable, "-m", "attnscope", "profile", "-m", "my_module", "--flag"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "arguments ['--flag']" in done.stdout and "my_module: " in done.stdout


def test_a_script_whose_events_were_lost_runs_once_and_is_marked(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = Audit(launches=5, lost=[CpuEvent("call", "cudaLaunchKernel", 1, 0, 1)])
    monkeypatch.setattr("attnscope.profile.analysis.result.audit", lambda trace: lost)
    code, out = run(script)
    assert code == 1 and out.count("arguments []") == 1 and "INCOMPLETE" in out
    code, out = run(script, "3")
    assert code == 3 and "INCOMPLETE" in out


def strict(path: Path) -> Any:
    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


@pytest.mark.parametrize("name", ["train", "stack", "raw", "graph_both", "cold", "streams"])
def test_output_holds_tables_page_and_trace(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    code, out = run("--trace", str(RECORDED / f"{name}.json.gz"), "--output", str(folder))
    assert code == 0, out
    for file in ("profile.json", "profile.html", "trace.json", "operators.csv", "kernels.csv"):
        assert (folder / file).stat().st_size > 0 and file in out
    assert isinstance(strict(folder / "profile.json"), dict)
    assert strict(folder / "trace.json")["traceEvents"]
    assert (folder / "modules.csv").exists() == (name == "stack")
    operators = pandas.read_csv(folder / "operators.csv")
    kernels = pandas.read_csv(folder / "kernels.csv")
    assert operators["self_gpu_us"].sum() == pytest.approx(kernels["total_us"].sum())


def test_a_pipe_that_is_closed_early_loses_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    trace = str(RECORDED / "train.json.gz")
    command = [sys.executable, "-m", "attnscope", "profile", "--trace", trace]
    with subprocess.Popen(
        [*command, "--output", str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()  # type: ignore[union-attr]
        said = process.stderr.read()  # type: ignore[union-attr]
    assert b"Traceback" not in said
    for file in ("profile.json", "profile.html", "trace.json", "operators.csv"):
        assert (folder / file).stat().st_size > 0


def test_a_trace_in_the_output_folder_is_kept(tmp_path: Path) -> None:
    path = write_trace(
        tmp_path / "trace.json", op("a", 0, 50), launch(1, 10), kernel(1, 30, 40, "mine")
    )
    before = path.read_bytes()
    code, out = run("--trace", str(path), "--output", str(tmp_path))
    assert code == 0, out
    assert "trace.json is the trace that was read: it stays unchanged" in " ".join(out.split())
    assert path.read_bytes() == before
    wrote = next(line for line in out.splitlines() if line.startswith("wrote "))
    assert "trace.json" not in wrote and "links.csv" in wrote
    assert (tmp_path / "profile.json").exists() and (tmp_path / "kernels.csv").exists()


def test_output_that_cannot_be_written_is_one_line_and_code_1(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = str(RECORDED / "raw.json.gz")
    code, out = run("--trace", path, "--output", str(tmp_path / "file" / "out"))
    assert code == 1 and "Traceback" not in out and "Not a directory" in out


def test_output_of_a_run_without_a_gpu_is_whole(script: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    code, out = run("--stacks", "--memory", "--output", str(folder), script)
    assert code == 0, out
    assert isinstance(strict(folder / "profile.json"), dict)
    assert (folder / "profile.html").exists() and (folder / "memory.csv").exists()
    again, out = run("--trace", str(folder / "trace.json"))
    assert again == 0 and "aten::matmul" in out


def test_options_are_looked_at_before_the_script_runs(script: str, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    for options, said in (
        (["--output", str(tmp_path / "taken")], "File exists"),
        (["--sort", "colour"], "sort must be a column of the operators, got"),
    ):
        code, out = run(*options, script)
        assert code == 2 and said in out and "arguments" not in out


def test_output_is_where_the_command_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other").mkdir()
    Path("moves.py").write_text("import os, torch; os.chdir('other'); torch.ones(2) + 1")
    log = logging.getLogger("matplotlib")
    log.setLevel(logging.DEBUG)  # as in a script that logs everything: hundreds of lines on fonts
    assert run("--output", "out", "moves.py")[0] == 0 and not log.isEnabledFor(logging.INFO)
    assert (tmp_path / "out/profile.json").exists() and not (tmp_path / "other/out").exists()


def test_threads_are_waited_for_as_python_does(tmp_path: Path) -> None:
    code, out = run_text(
        tmp_path,
        "import threading, time, torch\n"
        "def work():\n    time.sleep(0.3)\n    torch.ones(8, 8) @ torch.ones(8, 8)\n"
        "threading.Thread(target=work).start()\n"
        "threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()\n",
    )
    assert code == 0 and "aten::mm" in out


def test_workers_of_executors_are_not_waited_for(tmp_path: Path) -> None:
    """Executor threads may wait for work until the process exits, as torch.compile's do."""
    code, out = run_text(
        tmp_path,
        "import atexit, concurrent.futures, torch\n"
        "pool = concurrent.futures.ThreadPoolExecutor(2)\n"
        "atexit.register(pool.shutdown)  # it outlives the script\n"
        "pool.submit(lambda: torch.ones(8, 8) @ torch.ones(8, 8)).result()\n",
    )
    assert code == 0 and "aten::mm" in out


@pytest.mark.parametrize("ends", ["pass", "raise SystemExit(0)", "raise RuntimeError('mine')"])
def test_the_scripts_globals_live_until_the_record_has_ended(tmp_path: Path, ends: str) -> None:
    code, out = run_text(
        tmp_path,
        "import torch\nenabled = torch.autograd.profiler\n"
        "class Late:\n    def __del__(self, module=torch.autograd.profiler, print=print):\n"
        "        print('destroyed while recording:', module._is_profiler_enabled)\n"
        f"late = Late()\ntorch.ones(2)\n{ends}\n",
    )
    assert code == int("mine" in ends)
    gc.collect()
    assert "destroyed while recording: True" not in out


def test_an_error_of_a_profiler_in_the_script_is_the_scripts(tmp_path: Path) -> None:
    code, out = run_text(
        tmp_path,
        "import torch\nfrom attnscope.profile import profile\ntorch.ones(8)\n"
        "with profile():\n    pass\n",
    )
    assert code == 1 and "aten::ones" in out and "ended by ProfileError" in out


def test_a_failure_is_printed_before_threads_are_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "fails.py"
    path.write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(2,)).start()\n"
        "raise RuntimeError('the reason')\n"
    )
    command = [sys.executable, "-m", "attnscope", "profile", str(path)]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert running.stderr is not None
    lines = iter(running.stderr.readline, "")
    assert any("the reason" in line for line in lines) and running.poll() is None
    out, _ = running.communicate()
    assert running.returncode == 1 and "ended by RuntimeError: the reason" in out.replace("\n", " ")


def test_forks_that_exit_end_there(tmp_path: Path) -> None:
    ends = {"sys.exit(3)": 3, "sys.exit(1 << 40)": 0, "raise KeyboardInterrupt": 130}
    ends |= {"raise OSError('mine')": 1}
    path = tmp_path / "forks.py"
    path.write_text(
        f"import os, sys, torch\ntorch.ones(8)\nfor end in {list(ends)}:\n"
        "    child = os.fork()\n    if not child:\n        exec(end)\n"
        "    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "    print('child', code, flush=True)\n"
    )
    result = run_python("-m", "attnscope", "profile", str(path))
    children = "".join(f"child {code}\n" for code in ends.values())
    assert result.returncode == 0 and result.stdout.startswith(children)
    assert result.stdout.count("\naten::ones ") == 1


def test_a_range_may_have_quotes_in_its_name(tmp_path: Path) -> None:
    path = tmp_path / "quotes.py"
    path.write_text(SCRIPT.replace('"work"', "'say \"hi\"'"))
    code, out = run("--output", str(tmp_path / "out"), str(path))
    assert code == 0 and 'say "hi"' in out
    for name in ("profile.json", "trace.json"):
        assert "say" in json.dumps(json.loads((tmp_path / "out" / name).read_text()))


SECOND = {
    "ended": "with torch.profiler.profile():\n    torch.ones(2) + 1",
    "with a schedule": (
        "with torch.profiler.profile(schedule=torch.profiler.schedule(wait=0, warmup=1, active=1))"
        " as p:\n    torch.ones(2) + 1; p.step(); torch.ones(2) + 1; p.step()"
    ),
    "of autograd": "with torch.autograd.profiler.profile():\n    torch.ones(2) + 1",
    "left running": "p = torch.profiler.profile(); p.start(); torch.ones(2) + 1",
}


@pytest.mark.parametrize("how", SECOND)
def test_a_second_profiler_in_the_script_is_an_error(how: str, tmp_path: Path) -> None:
    """In a separate process: PyTorch aborts if the second profiler is not detected in time."""
    (tmp_path / "second.py").write_text(f"import torch\ntorch.ones(3) * 2\n{SECOND[how]}\n")
    done = run_python("-m", "attnscope", "profile", "second.py", cwd=tmp_path)
    said = done.stdout + done.stderr
    assert done.returncode == 2 and "must contain no other profiler" in said, said
    assert "Traceback" not in said


def test_a_record_that_cannot_be_read_is_not_the_fault_of_the_script(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(source: Path) -> None:
        raise KeyError("ours")

    monkeypatch.setattr("attnscope.profile.record.recorder.read_trace", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code, out = run(script)
    assert code == 1 and "the record cannot be read: KeyError: 'ours'" in out
    assert "Traceback" not in out
    (kept,) = tmp_path.glob("attnscope-profile-*/my_script.json")
    assert f"PyTorch's trace is kept: {kept}" in out and json.loads(kept.read_text())


def test_a_format_that_fails_costs_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(profile: object, folder: Path) -> list[Path]:
        raise RuntimeError("mine")

    monkeypatch.setitem(formats.FORMATS, "json", broken)
    arguments = ["--trace", str(RECORDED / "raw.json.gz"), "--output", str(tmp_path)]
    result = CliRunner().invoke(build("profile"), ["profile", *arguments])
    assert result.exit_code == 1 and str(result.exception) == "mine"
    assert "44.7 % of 6.016 us GPU time owned by ops" in result.output
    for file in ("profile.html", "profile.md", "trace.json", "operators.csv"):
        assert (tmp_path / file).stat().st_size > 0


def test_a_process_that_is_killed_after_the_script_says_so(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, signal, torch\nfrom attnscope.profile.render import formats\n"
        "def kill(*arguments):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "formats.FORMATS['html'] = kill\ntorch.ones(8, 8) @ torch.ones(8, 8)\n"
    )
    command = [sys.executable, "-m", "attnscope", "profile", "--output", "out", "script.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert "profile: the process ended in this step: writing html in " in done.stderr
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "out" / "profile.json").stat().st_size > 0
    (trace,) = tmp_path.glob("attnscope-profile-*/script.json")
    assert str(tmp_path / "attnscope-profile-*" / "*.json") in done.stderr
    code, out = run("--trace", str(trace))
    assert code == 0 and "aten::mm" in out
