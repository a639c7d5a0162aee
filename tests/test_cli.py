"""The command line: output, files and errors."""

import errno
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked import run_python
from typer.testing import CliRunner

import attnscope as attnscope_package
from attnscope import cli
from attnscope.common.results import read_results

ROOT = Path(__file__).parents[1]
SMALL = ["--device", "cpu", "--seq-lengths", "32,48", "--head-dim", "16", "--heads", "2"]


def attnscope(*arguments: str) -> tuple[int, str]:
    """Exit code and everything printed."""
    result = CliRunner().invoke(cli.build(arguments[0]), list(arguments))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def printed(*arguments: str) -> str:
    """What a command prints on stdout."""
    return CliRunner().invoke(cli.build(arguments[0]), list(arguments)).stdout


RECORD = str(ROOT / "benchmarks/results/h200/gqa-forward.json")
PROBE = """
import sys
from attnscope import cli
sys.argv = ["attnscope", *sys.argv[1:]]
try:
    cli.main()
finally:
    loaded = [name for name in ("torch", "attnscope.functional") if name in sys.modules]
    print("loaded", loaded, file=sys.stderr)
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROBE, *arguments]
    env = os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, env=env)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["profile", "--help"],
        ["nsys", "--dry-run", "--", "true"],
        ["bench", "--help"],
        ["env", "--help"],
        ["compare", "--impl-a", "cuda", "--impl-b", "flash", RECORD],
        ["plot", RECORD, "--output-dir", "plots"],
        ["export", RECORD, "rows.csv"],
    ],
    ids=" ".join,
)
def test_what_runs_no_kernel_does_not_import_torch(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "loaded []"
    if arguments == ["--help"]:
        assert all(name in done.stdout for name in cli.COMMANDS)


def test_the_package_is_loaded_when_it_is_first_used():
    probe = "import sys, attnscope\nassert 'torch' not in sys.modules\n"
    probe += "assert 'attention' in dir(attnscope)\nfrom attnscope import attention\n"
    probe += "assert 'torch' in sys.modules and attention is attnscope.attention\n"
    probe += "import attnscope.ops, torch; torch.ops.attnscope.forward\n"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="module 'attnscope' has no attribute 'atention'"):
        attnscope_package.atention  # noqa: B018


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "none.json", RECORD], "none.json: No such file"),
        (["export", RECORD, "nowhere/rows.csv"], "nowhere"),
        (["plot", "none.json"], "none.json: No such file"),
        (["profile", "--trace", "none.json"], "none.json: No such file"),
        (["bench", "--device", "cpu", "--suite", "none"], "or a YAML file, got 'none'"),
        (["profile"], "must be given, and one only, got neither"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_are_on_stderr_with_exit_code_2(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli.build(arguments[0]), arguments)
    assert done.exit_code == 2 and message in done.stderr
    assert done.stdout == "" and isinstance(done.exception, SystemExit)


def test_the_tile_of_a_call_is_shown_by_a_new_process():
    done = run("kernels", "--head-dim", "64", "--seq-len", "512")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("sm90_forward, tile ")


@pytest.mark.parametrize(("command", "code"), [("kernels", 2), ("env", 1)])
def test_a_missing_library_is_one_line(command, code, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "attnscope._load", None)
    monkeypatch.delitem(sys.modules, "attnscope.doctor", raising=False)
    monkeypatch.delattr(attnscope_package, "doctor", raising=False)
    monkeypatch.setattr(sys, "argv", ["attnscope", command])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    out, err = capsys.readouterr()
    assert (exit_.value.code, out) == (code, "")
    assert "attnscope._load" in err and len(err.splitlines()) == 1


def test_shells_complete_the_options_of_a_command():
    line = {"_ATTNSCOPE_COMPLETE": "complete_bash", "COMP_WORDS": "attnscope compare --impl"}
    done = run(**line, COMP_CWORD="2")
    assert {"--impl-a", "--impl-b"} <= set(done.stdout.split())
    line = {"_ATTNSCOPE_COMPLETE": "complete_bash", "COMP_WORDS": "attnscope com"}
    assert "compare" in run(**line, COMP_CWORD="1").stdout.split()


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_exists_and_has_help(name):
    code, out = attnscope(name, "--help")
    assert code == 0 and "Usage" in out


def test_an_unknown_command_is_refused():
    result = CliRunner().invoke(cli.build("bnech"), ["bnech"])
    assert result.exit_code == 2 and "bnech" in result.output


def test_bench_writes_a_file_and_prints_a_table(tmp_path):
    path = tmp_path / "r.json"
    arguments = [
        "bench", *SMALL, "--causal", "--impl", "naive,flash", "--output", str(path),
        "--time-budget", "0", "--dtype", "bf16",
    ]  # fmt: skip
    code, out = attnscope(*arguments)
    assert code == 0, out
    content = read_results(path)
    rows = content["rows"]
    assert [(row["seqlen_q"], row["impl"]) for row in rows] == [
        (32, "naive"), (32, "sdpa-flash"), (48, "naive"), (48, "sdpa-flash"),
    ]  # fmt: skip
    assert all(row["status"] == "ok" and row["dtype"] == "bfloat16" for row in rows)
    assert all(row["causal"] and row["l2"] == "warm" for row in rows)
    assert content["env"]["settings"]["budget_s"] == 0
    assert "flash is sdpa-flash" in out
    assert "GFLOP/s: dtype bf16, D 16, heads 2, batch 1, causal yes" in out
    assert "timer wall-clock; caches warm" in out
    assert "speed over sdpa-flash, geometric mean (workloads), S 32 to 48: naive" in out
    again = json.loads(printed(*arguments, "--resume", "--json"))
    assert again["rows"] == content["rows"] and again["env"]["device"] == "cpu"
    code, out = attnscope("export", str(path), str(tmp_path / "r.csv"))
    assert code == 0 and (tmp_path / "r.csv").read_text().startswith("impl,workload")


def test_bench_adds_the_baseline_and_shows_reasons(tmp_path):
    path = tmp_path / "r.json"
    arguments = ["bench", *SMALL, "--no-causal", "--output", str(path), "--time-budget", "0"]
    code, out = attnscope(*arguments, "--impl", "cuda,cpu", "--baseline", "sdpa-math")
    assert code == 0
    assert "cuda: skipped on 2: runs on cuda only, not on cpu" in out
    statuses = {row["impl"]: row["status"] for row in read_results(path)["rows"]}
    assert statuses == {"cuda": "skipped", "cpu": "ok", "sdpa-math": "ok"}
    code, out = attnscope(*arguments, "--impl", "cpu", "--baseline", "sdpa-math", "--resume")
    assert code == 0 and "6 rows in" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--suite", "papers"], "or a YAML file, got 'papers'"),
        (["bench", "--suite", "paper"], "suite must have cases for cpu, got 'paper' with cuda"),
        (["bench", "--seq-lengths", "128,x"], "--seq-lengths must be positive integers"),
        (["bench", "--seq-lengths", ""], "--seq-lengths must be positive integers"),
        (
            ["bench", "--seq-lengths", "8", "--suite", "quick"],
            "suite or seq-lengths must be given, and one only, got both",
        ),
        (["bench", "--head-dim", "64"], "--head-dim must be given with --seq-lengths, got none"),
        (
            ["bench", "--seq-lengths", "8", "--heads", "3", "--kv-heads", "2"],
            "heads_q must be a multiple of heads_kv (2), got 3",
        ),
        (["bench", "--seq-lengths", "8", "--dtype", "bf8"], "dtype must be one of"),
        (["bench", "--impl", "cude"], "got 'cude'"),
        (["bench", "--baseline", "fa9"], "got 'fa9'"),
        (["bench", "--l2", "cold"], "l2 must be warm on a CPU, got 'cold'"),
        (["bench", "--l2", "tepid"], "l2 must be one of cold, rotate, warm, got 'tepid'"),
        (["bench", "--graph"], "graph must be False on a CPU"),
        (["bench", "--time-budget", "-1"], "budget_s must be >= 0, got -1.0"),
        (["bench", "--device", "cpu:x"], "device must be cuda, cuda:N or cpu, got 'cpu:x'"),
        (["check", "--kinds", "odd"], "kinds must be among normal"),
        (["check", "--impl", "cude"], "got 'cude'"),
        (["export", "none.json", "r.csv"], "none.json: No such file"),
    ],
)
def test_bad_input_is_explained_with_exit_code_2(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if arguments[0] != "export" and "--device" not in arguments:
        arguments = [*arguments, "--device", "cpu"]
    code, out = attnscope(*arguments)
    assert code == 2, out
    assert message in out
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused():
    code, out = attnscope("bench", "--device", "cuda:3")
    assert code == 2 and "one of the 0 CUDA devices of PyTorch, got 'cuda:3'" in out


def test_resume_of_another_experiment_is_refused(tmp_path):
    path = tmp_path / "r.json"
    arguments = ["bench", *SMALL, "--impl", "naive", "--output", str(path), "--time-budget", "0"]
    assert attnscope(*arguments)[0] == 0
    code, out = attnscope(*arguments, "--seed", "7", "--resume")
    assert code == 2 and "resume: settings must be" in out


def test_check_prints_errors_and_passes():
    code, out = attnscope(
        "check", *SMALL, "--dtype", "bf16", "--impl", "naive,sdpa-flash,cuda",
        "--kinds", "normal,outliers",
    )  # fmt: skip
    assert code == 0, out
    assert out.count("pass ") == 2 * 2 * 2 * 2
    assert "naive: 8 of 8 passed, worst margin" in out
    assert "cuda: skipped on 4: runs on cuda only" in out


def test_check_fails_on_a_wrong_result_and_on_an_exception(monkeypatch):
    from attnscope.bench import impls

    def wrong(work, inputs):
        return lambda: (torch.zeros_like(inputs[0]), None)

    def raises(work, inputs):
        raise RuntimeError("no such tile")

    for make, message in ((wrong, "times what is allowed"), (raises, "no such tile")):
        bad = impls.Impl(name="bad", about="", make=make, ran={"cpu": "."})
        monkeypatch.setitem(impls.IMPLS, "bad", bad)
        code, out = attnscope("check", *SMALL, "--no-causal", "--impl", "bad,sdpa-flash")
        assert code == 1
        assert message in out and "bad: 0 of 2 passed" in out
        assert "sdpa-flash: 2 of 2 passed" in out
    arguments = ["check", *SMALL, "--no-causal", "--impl", "sdpa-flash,bad", "--locate"]
    found = json.loads(printed(*arguments, "--json"))
    assert not found["passed"] and [row["passed"] for row in found["results"]] == [True, False] * 2
    assert message in found["results"][1]["reason"]
    lines = printed(*arguments, "--format", "markdown").splitlines()
    assert "- bad: 0 of 2 passed" in lines
    assert [line.split("|")[1].strip() for line in lines if " normal |" in line] == [
        "FAIL", "FAIL", "pass", "pass",
    ]  # fmt: skip


def test_a_check_of_nothing_is_no_success():
    code, out = attnscope("check", *SMALL, "--impl", "cuda")
    assert code == 1 and "nothing could be checked" in out


def test_list_shows_suites_impls_and_aliases():
    code, out = attnscope("bench", "--list", "--device", "cpu")
    assert code == 0
    assert "suites: check, finetune, gqa, models, paper, quick, short, tiny, varlen" in out
    assert "flash is sdpa-flash" in out and "[runs on cuda]" in out


def test_the_script_takes_lengths_and_an_output(tmp_path):
    script = ROOT / "benchmarks" / "benchmark_attention.py"
    path = tmp_path / "benchmark_results.json"
    done = run_python(str(script), *SMALL, "--output", str(path), "--time-budget", "0")
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert {row["seqlen_q"] for row in rows} == {32, 48}
    assert {row["impl"] for row in rows} == {"cpu", "naive", "sdpa-math", "sdpa-flash"}


@pytest.mark.parametrize(
    "line",
    [
        "nsys --import {folder}/gated.sqlite --json",
        "ncu --import tests/support/ncu/attention.csv --json",
        "kernels --json",
    ],
)
def test_a_reader_that_has_enough_is_no_error(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = lzma.decompress((ROOT / "tests/support/nsys/gated.sqlite.xz").read_bytes())
    (tmp_path / "gated.sqlite").write_bytes(report)

    def closed(*_: object, **__: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("builtins.print", closed)
    assert attnscope(*line.format(folder=tmp_path).split()) == (1, "")
