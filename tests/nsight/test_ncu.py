"""attnscope ncu, driven against a program that imitates ncu and its failures."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
import typer
import yaml
from click.testing import Result
from made_nsys import MadeReport
from typer.testing import CliRunner

from attnscope import cli
from attnscope.bench.workload_text import parse_workload
from attnscope.common import tools
from attnscope.nsight import ncu, selection
from attnscope.nsight.ncu import Settings, to_expression
from attnscope.nsight.ncu_command import analyze_command

SUPPORT = Path(__file__).parents[1] / "support"
PAGE = SUPPORT / "ncu/attention.csv"
# A part of the page, for tests that need no figure.
COLUMNS = (
    "ID", "Kernel Name",
    "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg",
    "gpu__time_duration.sum", "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
)  # fmt: skip


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a run to be, with the fake ncu first on PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()
    shutil.copy(SUPPORT / "fake_ncu.sh", programs / "ncu")
    rows = list(csv.reader(PAGE.open()))
    with (tmp_path / "page.csv").open("w") as file:
        at = [rows[0].index(name) for name in COLUMNS]
        csv.writer(file).writerows([row[i] for i in at] for row in rows)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("FAKE_NCU", "ok")
    monkeypatch.setenv("FAKE_NCU_CSV", str(tmp_path / "page.csv"))
    monkeypatch.setenv("FAKE_NCU_SURVEY", str(SUPPORT / "ncu/survey.csv"))
    monkeypatch.setenv("FAKE_NCU_CALLS", str(tmp_path / "calls"))
    return tmp_path / "run"


def command(*arguments: str) -> Result:
    return CliRunner().invoke(cli.build("ncu"), ["ncu", *arguments])


def words(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def test_a_program_is_profiled_and_its_folder_has_everything(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NCU_CSV", str(PAGE))
    done = command(
        "--output", str(fake), "--set", "sol,roofline", "--metrics", "dram__cycles_active.avg",
        "--range", "measure@attnscope", "--kernel", "^forward", "--count", "3", "--format",
        "markdown", "--", "true",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert len(done.stdout.splitlines()) <= 60
    assert "## What limits each kernel" in done.stdout
    written = {path.name for path in fake.iterdir()}
    assert {
        "report.ncu-rep", "kernels.csv", "kernels.json", "summary.md", "summary.html", "logs",
        "session.yaml", "commands.json", "versions.json",
    } <= written  # fmt: skip
    profiled, imported = json.loads((fake / "commands.json").read_text())["commands"]
    line = profiled["command"]
    assert "--nvtx-include attnscope@measure/ --nvtx-include attnscope@measure " in line
    assert "--kernel-name-base function --kernel-name 'regex:^forward' --launch-count 3" in line
    assert "--cache-control all --clock-control none" in line
    assert "--nvtx --nvtx-push-pop-scope process " in line  # autograd launches from its own thread
    assert "lts__t_bytes.sum.peak_sustained" in line and ",dram__cycles_active.avg " in line
    assert line.endswith(f"-o {fake}/report true")
    assert imported["argv"][1:3] == ["--import", f"{fake}/report.ncu-rep"]
    content = json.loads((fake / "kernels.json").read_text())
    assert content["kernels"][0]["metrics"]["tensor_bf16"] == 35_433_480_192
    assert (
        json.loads((fake / "versions.json").read_text())["tools"]["ncu"]["version"] == "2025.3.1.0"
    )


def test_settings_of_a_run_can_be_passed_again(fake: Path, tmp_path: Path) -> None:
    assert command("--output", str(fake), "--set", "sol", "--", "true").exit_code == 0
    again = command(
        "--config", str(fake / "session.yaml"), "--cache", "none", "--output",
        str(tmp_path / "again"), "--json",
    )  # fmt: skip
    assert again.exit_code == 0, again.output
    kept = yaml.safe_load((tmp_path / "again/session.yaml").read_text())
    assert (kept["sets"], kept["cache"], kept["command"]) == (["sol"], "none", ["true"])
    shown = json.loads(again.stdout)
    assert shown["tables"]["Speed of light"]["rows"][0]["tensor pipe %"] == pytest.approx(
        63.88, 1e-3
    )
    assert any("caches as the program leaves them" in line for line in shown["lead"])


@pytest.mark.parametrize(
    ("way", "name", "quoted", "remedy"),
    [
        (
            "permission",
            "no permission",
            "ERR_NVGPUCTRPERM",
            "NVreg_RestrictProfilingToAdminUsers=0",
        ),
        ("busy", "another profiler attached", "driver resource was unavailable", "DCGM"),
        ("unknown", "unknown error", "Unknown Error on device 0.", "nvidia-smi"),
        (
            "prepare",
            "cannot profile the kernel",
            "Failed to prepare kernel",
            "--replay application",
        ),
        ("lock", "locked", "lock file /tmp/nsight-compute-lock", "set TMPDIR"),
        ("disk", "disk full", "No space left on device", "free space"),
        ("driver", "driver mismatch", "driver version is insufficient", "install the tool"),
        ("section", "unknown section", "No metrics to collect", "ncu --list-sections"),
        ("silent", "no report", "Connected to process 17", ""),
        ("metric", "unknown metric", "Failed to find metric dram__byte.sum", "--query-metrics"),
    ],
)
def test_every_failure_has_a_name_its_line_and_a_remedy(
    way: str, name: str, quoted: str, remedy: str, fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NCU", way)
    done = command("--output", str(fake), "--set", "sol", "--", "true")
    assert done.exit_code == 1 and done.stdout == ""
    text = words(done.stderr)
    assert f"ncu: {name}:" in text and quoted in text and remedy in text
    if way == "metric":
        assert "similar to dram__byte.sum: dram__bytes" in text
    assert not (fake / "kernels.csv").exists()
    assert (fake / "logs/1-profile.out").exists() and (fake / "commands.json").exists()


def test_a_program_that_fails_is_named_and_its_output_shown(fake: Path) -> None:
    done = command("--output", str(fake), "--", "sh", "-c", "echo broken >&2; exit 3")
    assert done.exit_code == 1
    assert "broken" in done.stderr
    assert "program failed: the program itself ended with an error" in words(done.stderr)
    assert "returned an error code (3)" in done.stderr


def test_a_filter_that_matches_nothing_lists_what_there_is(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NCU", "none")
    done = command("--output", str(fake), "--range", "nothing@attnscope", "--", "true")
    assert done.exit_code == 1
    text = words(done.stderr)
    assert "no kernel matched: none of 10 launches matched range nothing@attnscope" in text
    assert "warmup@attnscope (3), measure@attnscope (1), cuda-forward@attnscope (1)" in text
    assert "forward_kernel (4), distribution_elementwise_grid_stride_kernel (3)" in text
    monkeypatch.setenv("FAKE_NCU_SURVEY", "/dev/null")
    shutil.rmtree(fake)
    assert "A survey failed too" in command("--output", str(fake), "--", "true").stderr


def test_a_range_without_kernels_beside_others_is_an_error_after_the_tables(fake: Path) -> None:
    done = command("--output", str(fake), "--range", "measure@attnscope", "--range", "b", "--",
                   "true")  # fmt: skip
    assert done.exit_code == 1
    assert "What limits each kernel" in done.stdout and "no kernel ran in b" in done.stderr


def test_a_value_that_is_not_finite_is_refused(fake: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.csv"
    page.write_text(page.read_text().replace("63.877847", "nan"))
    done = command("--output", str(fake), "--", "true")
    assert done.exit_code == 1
    assert "not finite: sm__pipe_tensor_cycles_active" in words(done.stderr)
    assert (fake / "kernels.csv").exists(), "what was recorded stays"


def test_no_ncu_and_no_program(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "got none. Write -- python script.py" in words(command().stderr)
    assert "Write python x.py" in words(command("--", "x.py").stderr)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setitem(tools.TOOLS, "ncu", ((), "NVIDIA's CUDA toolkit"))
    done = command("--output", str(fake), "--", "true")
    assert done.exit_code == 2 and "tool missing: ncu not found" in words(done.stderr)
    assert not fake.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "sole", "--", "true"], "set must be one of sol, roofline"),
        (["--cache", "cold", "--", "true"], "cache must be one of all, none, got 'cold'"),
        (["--range", "a@*", "--", "true"], "range must be a name or name@domain with one domain"),
        (["--kernel", "(", "--", "true"], "kernel must be a regular expression, got '('"),
        (["--top", "3", "--", "true"], "--top and --from must be given together"),
        (["--count", "-1", "--", "true"], "count must be 0 or more, got -1"),
        (["--impl", "cuda", "--", "true"], "impl must be left out where a program is given"),
        (["--import", "nothing.txt"], "report must be a folder of attnscope ncu, a .ncu-rep or"),
        (["--format", "pdf", "--", "true"], "format must be one of terminal, markdown, json"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    arguments: list[str], message: str, fake: Path, tmp_path: Path
) -> None:
    done = command("--output", str(fake), *arguments)
    assert done.exit_code == 2 and message in words(done.stderr)
    assert not fake.exists() and not (tmp_path / "calls").exists()


def test_a_dry_run_prints_the_commands_and_runs_none(fake: Path, tmp_path: Path) -> None:
    done = command("--output", str(fake), "--impl", "cuda", "--workload", "b2-s64-h2-d64",
                   "--mode", "backward", "--dry-run")  # fmt: skip
    assert done.exit_code == 0
    profiled, imported = done.stdout.splitlines()
    assert "--nvtx-include attnscope@measure/" in profiled
    assert profiled.endswith("--impl cuda --workload b2-s64-h2-d64 --mode backward")
    assert imported.startswith("ncu --import")
    assert not fake.exists() and not (tmp_path / "calls").exists()


def test_reports_are_read_and_compared(fake: Path, tmp_path: Path) -> None:
    page = str(tmp_path / "page.csv")
    (tmp_path / "x.ncu-rep").write_text("report")
    for path in (page, str(SUPPORT / "ncu"), str(tmp_path / "x.ncu-rep")):
        done = command("--import", path, "--json")
        if path.endswith("support/ncu"):
            assert done.exit_code == 2, "a folder without kernels.csv"
            continue
        assert done.exit_code == 0, done.output
        assert len(json.loads(done.stdout)["kernels"]) == 5
    slower = Path(page).read_text().replace("66.464000", "70.000000")
    (tmp_path / "b.csv").write_text(slower)
    done = command("--compare", page, str(tmp_path / "b.csv"), "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["tables"]["Times"]["rows"][0]["speed-up"] == pytest.approx(66.464 / 70)
    assert found["changes"][0]["metrics"][0]["change"] == "+5.3 %"
    assert command("--compare", page, "b.csv").exit_code == 2
    app = typer.Typer()
    app.command()(analyze_command)
    done = CliRunner().invoke(app, [page, str(tmp_path / "b.csv"), "--format", "markdown"])
    assert done.exit_code == 0 and "## Times" in done.stdout
    assert (
        "## What limits each kernel"
        in CliRunner().invoke(app, [page, "--format", "markdown"]).stdout
    )
    assert CliRunner().invoke(app, [page] * 3).exit_code == 2


def test_expressions_of_ranges() -> None:
    assert to_expression("decode") == "decode"
    assert to_expression("attnscope::forward@attnscope") == "attnscope@attnscope::forward"
    assert to_expression("a/b[0],c@my@dom") == r"dom@a\/b\[0\]\,c\@my"
    for bad in ("", "@d", "a@", "a@*"):
        with pytest.raises(ValueError, match="range must be a name"):
            to_expression(bad)


def test_the_longest_kernels_of_a_profile_are_chosen(fake: Path, tmp_path: Path) -> None:
    names = ["void ns::gemm<float>(int)", "void ns::gemm<half>(int)", "relu.kernel", "tiny"]
    rows = [
        {"symbol": name, "total_us": us, "calls": 2, "range": range_}
        for name, us, range_ in zip(
            names, (5.0, 9.0, 12.0, 1.0), ("step", "step/mlp", "step", "other"), strict=True
        )
    ]
    (tmp_path / "profile.json").write_text(json.dumps({"tables": {"kernels": rows}}))
    chosen = selection.choose(tmp_path, 2)
    assert [(one.name, one.total_us, one.calls) for one in chosen] == [
        ("gemm", 14.0, 4), ("relu.kernel", 12.0, 2),
    ]  # fmt: skip
    assert selection.pattern(chosen) == r"^(gemm|relu\.kernel)$"
    assert [one.name for one in selection.choose(tmp_path, 9, "mlp")] == ["gemm"]
    done = command("--output", str(fake), "--top", "2", "--from", str(tmp_path), "--", "true")
    assert done.exit_code == 0, done.output
    assert "chosen from" in done.stdout and "gemm, 14 us in 4 launches" in done.stdout
    assert r"regex:^(gemm|relu\.kernel)$" in (tmp_path / "calls").read_text()
    with pytest.raises(ValueError, match="got none in"):
        selection.choose(tmp_path, 1, "nowhere")


def test_the_longest_kernels_of_an_nsys_folder_are_chosen(tmp_path: Path) -> None:
    made = MadeReport()
    made.range("inside", 0, 45)
    for name, at, us in (("void a::gemm<1>()", 10, 40), ("void a::gemm<2>()", 20, 30),
                         ("relu", 50, 60)):  # fmt: skip
        made.kernel(name, at, 100 * at, 100 * at + us)
    made.save(tmp_path / "report.sqlite")
    found = selection.choose(tmp_path, 5)
    assert [(one.name, one.total_us) for one in found] == [("gemm", 70.0), ("relu", 60.0)]
    assert [one.name for one in selection.choose(tmp_path, 5, "inside")] == ["gemm"]
    assert [one.calls for one in selection.choose(tmp_path / "report.sqlite", 1)] == [2]
    with pytest.raises(ValueError, match="got 'other'"):
        selection.choose(tmp_path, 1, "other")


def test_instances_of_a_template_are_chosen_apart_where_nsys_has_mangled_names(
    fake: Path, tmp_path: Path
) -> None:
    made = MadeReport()
    for name, at, us in (("_Z4gemmILi1EEvv", 10, 40), ("_Z4gemmILi2EEvv", 20, 30),
                         ("nvjet_tst_64x8", 30, 35)):  # fmt: skip
        made.kernel(name, at, 100 * at, 100 * at + us)
    made.save(tmp_path / "report.sqlite")
    record = str(tmp_path / "report.sqlite")
    done = command("--output", str(fake), "--top", "2", "--from", record, "--", "true")
    assert done.exit_code == 0, done.output
    assert "gemm<1>, 40 us in 1 launches" in done.stdout
    called = (tmp_path / "calls").read_text()
    assert "--kernel-name-base mangled" in called
    assert "regex:^(_Z4gemmILi1EEvv|nvjet_tst_64x8)$" in called


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("b2-s8192-h16-d128-causal", "forward-bf16-b2-q8192-k8192-h16-kv16-d128-causal"),
        ("s64-h4-kv2-d64-dv32-fp16", "forward-fp16-b1-q64-k64-h4-kv2-d64-dv32"),
        ("q8-k16-h1-d8-w-1,0-cap30", "forward-bf16-b1-q8-k16-h1-kv1-d8-w-1,0-cap30"),
    ],
)
def test_short_names_of_workloads(text: str, name: str) -> None:
    work = parse_workload(text)
    assert work.id == name and parse_workload(work.id) == work


@pytest.mark.parametrize("text", ["", "b2", "b2-x3", "b2-b3-s1-h1-d1", "s8-h3-kv2-d8", "s0-h0-d1"])
def test_what_is_no_workload(text: str) -> None:
    with pytest.raises(ValueError, match="workload must (be a call|have)"):
        parse_workload(text)


def test_the_target_of_an_impl_runs_its_ranges_and_states_its_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attnscope.studies.attention import attention_command

    path = tmp_path / "models.json"
    settings = Settings(impl="cpu", workload="b1-s32-h2-d16-causal-fp32", mode="both")
    monkeypatch.setenv(ncu.MODELS_VARIABLE, str(path))
    app = typer.Typer()
    app.command()(attention_command)
    arguments = [*settings.program()[3:], "--device", "cpu"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    models = json.loads(path.read_text())
    pairs = 2 * 32 * 33 / 2
    assert models["cpu-forward@attnscope"]["flops"] == 4 * 16 * pairs
    assert models["cpu-backward@attnscope"]["flops"] == 10 * 16 * pairs
    bad = CliRunner().invoke(app, ["--sanitizer", "memchek", "--device", "cpu"])
    assert bad.exit_code == 2 and "sanitizer must be one of memcheck" in words(bad.stderr)
    only = CliRunner().invoke(app, ["--impl", "cpu", "--mode", "forwards", "--device", "cpu"])
    assert only.exit_code == 2 and "mode must be one of forward" in words(only.stderr)


def test_the_sanitizer_gets_the_same_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnscope.common.tools import Tool
    from attnscope.studies import attention

    calls: list[list[str]] = []
    monkeypatch.setattr(attention, "find_tool", lambda name: Tool(name, "/x/sanitizer", "1"))
    monkeypatch.setattr("os.execv", lambda path, argv: calls.append(argv))
    monkeypatch.setattr("sys.orig_argv", ["python", "profile_kernels.py", "--impl", "cuda"])
    attention._sanitize("racecheck")
    assert calls[0][:4] == ["/x/sanitizer", "--tool", "racecheck", "--error-exitcode"]
    assert calls[0][-3:] == ["profile_kernels.py", "--impl", "cuda"]
    monkeypatch.setenv("NV_SANITIZER_INJECTION_PORT_RANGE_BEGIN", "1")
    attention._sanitize("racecheck")
    assert len(calls) == 1, "under the tool it runs"
