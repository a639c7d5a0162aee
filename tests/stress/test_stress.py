"""Stress of the Hopper kernels: cases, plans, the command, and the files of its builds."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import sass
import torch
from tile_choice import tile_choices
from typer import Typer
from typer.testing import CliRunner

from attnscope import _load
from attnscope.kernels import Call, choose_backward
from attnscope.stress import cases, library, run
from attnscope.stress import command as stress_module
from attnscope.stress.command import stress_command
from attnscope.stress.library import KINDS, NO_DELAYS, RATE_UNIT, Faults, Plan, bits_of, kinds_of

ROOT = Path(__file__).resolve().parent.parent.parent
HEADER = (ROOT / "csrc/attn/faults.cuh").read_text()
LIBRARY = _load.PACKAGE / "_C_cuda.so"
ALL_KINDS = bits_of(KINDS)


def command(*arguments: str) -> tuple[int, str]:
    app = Typer()
    app.command()(stress_command)
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, re.sub(r"\s+", " ", result.output)


def test_kinds_are_those_of_the_kernel_in_its_order():
    (body,) = re.findall(r"enum class Fault : uint32_t \{(.*?)\};", HEADER, re.DOTALL)
    names = re.findall(r"^\s*k(\w+),", body, re.MULTILINE)
    assert [re.sub(r"(?<!^)([A-Z])", r"-\1", name).lower() for name in names] == list(KINDS)


def test_a_plan_has_the_fields_of_the_kernel_in_its_order():
    (body,) = re.findall(r"struct FaultPlan \{(.*?)\};", HEADER, re.DOTALL)
    assert re.findall(r"uint32_t (\w+);", body) == list(Plan.__dataclass_fields__)
    assert RATE_UNIT == 0xFFFF + 1 and "(h & 0xffffu) < g_faults.rate" in HEADER


@pytest.mark.parametrize("kinds", [ALL_KINDS, 0b100101, 0b1000])
def test_plans_cover_the_kinds_asked_for_and_no_other(kinds):
    plans = [Plan(*values) for values in cases.plans(3, 500, 20_000, kinds)]
    assert len(plans) == 500
    assert all(plan.kinds and not plan.kinds & ~kinds for plan in plans)
    asked = {bit for bit in range(32) if kinds >> bit & 1}
    alone = Counter(plan.kinds for plan in plans[::5])
    assert set(alone) == {1 << bit for bit in asked}, "every kind has launches of its own"
    assert all(0 < plan.rate <= RATE_UNIT and 1 <= plan.cycles <= 20_000 for plan in plans)
    assert {plan.rate for plan in plans} > {RATE_UNIT}, "some delay every occasion"
    assert len({plan.seed for plan in plans}) == 500


def test_plans_repeat_with_their_seed_and_not_with_another():
    first, again, other = (list(cases.plans(seed, 20, 100, ALL_KINDS)) for seed in (1, 1, 2))
    assert first == again != other


def test_a_plan_is_shown_with_what_repeats_it():
    text = str(Plan(seed=12, kinds=0b100001, rate=RATE_UNIT // 2, cycles=345))
    assert text == "seed 12, late-copy+tile, rate 0.500, 345 cycles"


def test_every_case_has_a_label_of_its_own():
    labels = [cases.label(case) for case in cases.all_cases()]
    assert len(labels) == len(set(labels))
    assert "bf16 d128 h4:2 b2 s512x512 causal" in labels
    assert "bf16 d64 h4:2 packed 6 window" in labels
    assert "fp16 d256 h4:2 b2 s512x512 causal" in labels


def test_a_mode_has_the_kinds_that_its_kernels_inject():
    """`turn` without turns, or `query` in the backward, would be launches without a delay."""
    folders = {"forward": "sm90_forward", "backward": "sm90_backward"}
    for mode, folder in folders.items():
        files = (ROOT / "csrc/kernels" / folder).glob("*.cuh")
        injected = {n for f in files for n in re.findall(r"Fault::k(\w+)", f.read_text())}
        names = {re.sub(r"(?<!^)([A-Z])", r"-\1", name).lower() for name in injected}
        assert names == set(kinds_of(mode, deterministic=True))
    assert set(kinds_of("backward", True)) - set(kinds_of("backward")) == {"turn"}
    assert bits_of(("late-copy", "tile", "tile")) == 0b100001


def test_every_backward_case_has_a_label_of_its_own_and_the_tables_a_case_each():
    labels = [subject.label for subject in run.subjects("backward", deterministic=True)]
    assert len(labels) == len(set(labels))
    assert "bf16 d256 h4:2 packed 6 window" in labels
    assert "bf16 d128 h4:2 b2 s700x1000 causal sm80" in labels
    tiles = set()
    for c in cases.all_cases("backward"):
        call = Call(
            c.head_dim, c.head_dim, c.seqlen_q, c.seqlen_k, c.batch, c.heads_q, c.heads_kv,
            c.causal, c.window, c.seqlens is not None, c.softcap, 132, 90,
        )  # fmt: skip
        choice = choose_backward(call)
        assert choice["kernel"] == "sm90_backward"
        tile = choice["tile"]
        size = tile["head_dim"], tile["block_m"], tile["block_n"]
        tiles.add((*size, bool(c.softcap), c.seqlens is not None))
    both = (False, True)
    every = {
        (dim, 64, 128, cap, packed) for dim in (128, 192, 256) for cap in both for packed in both
    }
    narrow = {(64, 64, 192), (64, 64, 128), (64, 128, 128), (128, 80, 128)}
    assert tiles == {*((*size, False, packed) for size in narrow for packed in both), *every}


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_the_cases_use_every_tile_of_the_table():
    choices, count = tile_choices(list(cases.all_cases()))
    assert {choice.row for choice in choices} == set(range(count))
    assert any(choice.grouping for choice in choices)
    assert any(choice.reuses_tile_slots for choice in choices)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--calls=0"], "calls must be between 1 and 1000000000, got 0"),
        (["--cycles=0"], "cycles must be between 1 and 1000000, got 0"),
        (["--cycles=1000001"], "cycles must be between 1 and 1000000, got 1000001"),
        (["--kinds=copy,slow"], "kinds must be among late-copy, copy, query"),
        (["--kinds=copy,slow"], "got slow"),
        (["--kinds=,"], "got ,"),
        (["--kinds=turn"], "got turn"),
        (["--mode=both"], "mode must be one of forward, backward, got both"),
        (["--deterministic"], "deterministic must be left out, got --deterministic in mode"),
        (["--mode=backward", "--kinds=query"], "kinds must be among late-copy, copy, release"),
        (["--mode=backward", "--kinds=turn"], "got turn"),
        (["--library=/no/such.so"], "library must be a file, got /no/such.so"),
    ],
)
def test_bad_input_ends_before_a_build(arguments, message, monkeypatch):
    monkeypatch.setattr(library, "build", lambda *_: pytest.fail("built"))
    code, output = command(*arguments)
    assert code == 2
    assert message in output


@pytest.mark.parametrize("text", ["", "the words of a text file"])
def test_a_library_without_delays_is_refused(tmp_path, text):
    path = _load.PACKAGE / "_C.so"
    if text:
        path = tmp_path / "text.so"
        path.write_text(text)
    with pytest.raises(ValueError, match="library must be a build with -DATTNSCOPE_FAULTS, got"):
        Faults(path)


def test_outside_the_source_tree_the_command_names_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "PACKAGE", tmp_path / "site/attnscope")
    monkeypatch.chdir(tmp_path)
    code, output = command()
    assert code == 2
    assert "the working folder must be attnscope's source tree, got" in output
    assert "clone the sources" in output


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
def test_without_a_hopper_device_the_exit_code_is_2():
    assert command(f"--library={_load.PACKAGE / '_C.so'}", "--calls=1")[0] == 2


class Child:
    """The process that runs the calls, as the command sees it."""

    def __init__(self, rows: list[dict], returncode: int) -> None:
        self.stdout = [json.dumps(row) + "\n" for row in rows]
        self.returncode = returncode

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        pass


GOOD = {"case": "a", "calls": 7, "wrong_calls": 0, "wrong_rows": 0, "plan": None, "error": None}
WRONG = GOOD | {"case": "b", "wrong_calls": 2, "wrong_rows": 31, "plan": "seed 5"}
FAILED = GOOD | {"case": "c", "error": "out is off"}


@pytest.mark.parametrize(
    ("rows", "returncode", "code", "message"),
    [
        ([GOOD, GOOD], 0, 0, "14 calls with delays: 0 wrong, 0 wrong rows; 0 cases wrong"),
        ([GOOD, WRONG], 1, 1, "b: 2 of 7 calls wrong, 31 rows; seed 5"),
        ([GOOD, FAILED], 1, 1, "c: against fp64, without delays: out is off"),
        ([GOOD, WRONG], -11, 1, "the run broke off; its error is above"),
        ([GOOD], 1, 2, "the run broke off; its error is above"),
        ([GOOD], -11, 2, "the run broke off; its error is above"),
    ],
)
def test_the_command_prints_wrong_rows_and_exits_by_them(
    rows, returncode, code, message, monkeypatch
):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: Child(rows, returncode))
    found, output = command(f"--library={_load.PACKAGE / '_C.so'}")
    assert found == code
    assert message in output


def test_each_case_that_ends_is_a_line_on_stderr(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: Child([GOOD, WRONG], -9))
    app = Typer()
    app.command()(stress_command)
    given = [f"--library={_load.PACKAGE / '_C.so'}", "--calls=90", "--json"]
    result = CliRunner().invoke(app, given)
    lines = [re.sub(r"[\d.]+ s", "T", line) for line in result.stderr.splitlines()]
    assert lines == ["7 of 90 calls done, 0 wrong, T: a", "14 of 90 calls done, 2 wrong, T: b"]
    found = json.loads(result.stdout)
    assert (found["calls"], found["wrong_calls"], len(found["cases"])) == (14, 2, 2)


def test_the_command_passes_its_options_on(monkeypatch):
    commands = []
    monkeypatch.setattr(subprocess, "Popen", lambda c, **_: commands.append(c) or Child([GOOD], 0))
    given = ["--mode=backward", "--deterministic", "--beside", "--kinds=turn,add", "--seed=3"]
    assert command(f"--library={_load.PACKAGE / '_C.so'}", *given)[0] == 0
    kinds = bits_of(("turn", "add"))
    assert {"--mode=backward", "--deterministic", "--beside", f"--kinds={kinds}", "--seed=3"} < set(
        commands[0]
    )


def test_a_kernel_that_hangs_ends_the_run(monkeypatch):
    row, popen = json.dumps(GOOD), subprocess.Popen
    script = ["sh", "-c", f"echo '{row}'; exec sleep 60"]
    monkeypatch.setattr(stress_module, "HANG_S", 0.5)
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: popen(script, **options))
    code, output = command(f"--library={_load.PACKAGE / '_C.so'}", "--calls=7")
    assert code == 1
    assert "a kernel hangs in the one after a" in output


def test_wrong_rows_are_counted_once_by_any_bit_of_either_output():
    out, lse = torch.randn(2, 5, 3, 8, dtype=torch.bfloat16), torch.randn(2, 3, 5)
    out[0, 4, 1] = float("nan")
    lse[0, 1, 4] = float("nan")
    other_out, other_lse = out.clone(), lse.clone()
    assert run.wrong_rows((other_out, other_lse), (out, lse)) == 0, "NaN equals NaN"
    other_out[1, 2, 0, [3, 5]] += 1
    other_lse[1, 0, 2] += 1
    assert run.wrong_rows((other_out, other_lse), (out, lse)) == 1, "one row, three elements"
    other_lse[0, 2, 4] = lse[0, 2, 4].nextafter(torch.tensor(9.0))
    assert run.wrong_rows((other_out, other_lse), (out, lse)) == 2
    packed = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    other = other_out.flatten(0, 1), other_lse.transpose(0, 1).flatten(1)
    assert run.wrong_rows(other, packed) == 2


def test_a_zero_of_another_sign_is_a_wrong_row():
    zero, lse = torch.zeros(1, 1, 1, 8, dtype=torch.float16), torch.zeros(1, 1, 1)
    assert run.wrong_rows((-zero, lse), (zero, lse)) == 1


@pytest.mark.parametrize("deterministic", [False, True])
def test_wrong_gradient_rows_allow_dq_another_order_of_its_sum(deterministic):
    want = tuple(torch.randn(2, 5, 3, 8).bfloat16() for _ in range(3))
    count = lambda got: run.wrong_gradient_rows(got, want, deterministic)  # noqa: E731

    def changed(which: int, *at: int, value: float) -> tuple[torch.Tensor, ...]:
        got = [grad.clone() for grad in want]
        got[which][at] = value
        return tuple(got)

    assert count(want) == 0
    largest = want[0][1, 2, 0].float().abs().max()
    near = want[0][1, 2, 0, 3].float() + largest / 128
    assert count(changed(0, 1, 2, 0, 3, value=near)) == int(deterministic)
    assert count(changed(0, 1, 2, 0, 3, value=near + largest / 32)) == 1
    assert count(changed(0, 1, 2, 0, value=float("nan"))) == 1
    for which in (1, 2):
        last_bit = want[which][0, 4, 1, 5].float() * (1 + 2**-7)
        assert count(changed(which, 0, 4, 1, 5, value=last_bit)) == 1
    both = (want[0], *(grad.clone() for grad in want[1:]))
    both[1][0, 4, 1, 5] = both[2][0, 4, 1, 2] = 9
    assert count(both) == 1, "dk and dv of one key"


def test_a_gradient_that_must_be_zero_has_no_tolerance():
    zero = torch.zeros(1, 1, 1, 8).bfloat16()
    assert run.wrong_gradient_rows((zero, zero, zero), (zero, zero, zero), False) == 0
    assert run.wrong_gradient_rows((zero + 1e-9, zero, zero), (zero, zero, zero), False) == 1


class PlannedFaults:
    """Delays that change a row where a plan has the kind `release`."""

    plan = NO_DELAYS

    def set(self, plan: Plan) -> None:
        self.plan = plan


def subject_of(mode: str, case: cases.Case) -> run.Subject:
    if mode == "forward":
        return run.forward_subject(case, "cpu", "cpu")
    return run.backward_subject(case, mode == "deterministic", "cpu", "cpu")


@pytest.mark.parametrize("mode", ["forward", "backward", "deterministic"])
@pytest.mark.parametrize("broken", [False, True])
def test_a_wrong_call_is_counted_with_the_plan_that_repeats_it(broken, mode):
    faults, release, plans = PlannedFaults(), 1 << KINDS.index("release"), []
    some = [
        cases.case(1, 20, 30, causal=True, head_dim=16),
        cases.case(seqlens=((5, 9), (40, 3)), head_dim=16),
    ]
    every = [subject_of(mode, case) for case in (some[:1] if broken else some)]

    def break_calls(subject: run.Subject) -> run.Subject:
        def start(seed: int):
            function = subject.start(seed)

            def call():
                first, *rest = function()
                plans.append(faults.plan)
                if broken and faults.plan.kinds & release:
                    first[0, 7, 1, 3] += 9
                return first, *rest

            return call

        return replace(subject, start=start)

    beside = []
    rows = list(
        run.stress(faults, list(map(break_calls, every)), 21, 1000, ALL_KINDS, 9,
                   lambda: beside.append(faults.plan))
    )  # fmt: skip
    assert [row["case"] for row in rows] == [subject.label for subject in every]
    assert sum(row["calls"] for row in rows) == len(beside) == 21
    assert all(row["error"] is None for row in rows)
    assert faults.plan == NO_DELAYS and NO_DELAYS not in beside
    bad = [plan for plan in plans if plan.kinds & release]
    assert 0 < len(bad) < 21
    if broken:
        assert (rows[0]["wrong_calls"], rows[0]["wrong_rows"]) == (len(bad), len(bad))
        assert rows[0]["plan"] == str(bad[0])
    else:
        assert all(not row["wrong_calls"] and row["plan"] is None for row in rows)


def test_fewer_calls_than_cases_are_spread_over_all():
    every = [subject_of("forward", cases.case(1, n, n, head_dim=16)) for n in range(1, 8)]
    rows = list(run.stress(PlannedFaults(), every, 3, 1000, ALL_KINDS, 0))
    assert [row["calls"] for row in rows] == [1, 1, 1]
    assert [row["case"] for row in rows] == [every[n].label for n in (2, 4, 6)]


@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_a_case_that_is_wrong_without_delays_is_an_error(mode, monkeypatch):
    name = "call" if mode == "forward" else "call_backward"
    original = getattr(run, name)
    monkeypatch.setattr(run, name, lambda *x: tuple(2 * part for part in original(*x)))
    subject = subject_of(mode, cases.case(1, 9, 9, head_dim=16))
    (row,) = run.stress(PlannedFaults(), [subject], 2, 1000, ALL_KINDS, 0)
    assert row["error"] and row["wrong_calls"] == 0


# The build: the variants compile, and the normal build contains no code of them.

KERNELS = {
    "forward": """
#include "kernels/sm90_forward/kernel.cuh"
template __global__ void attnscope::sm90::forward_kernel<
    attnscope::sm90::ForwardConfig<__nv_bfloat16, 64, 64, 64>>(
    const __grid_constant__ attnscope::sm90::ForwardArguments);
""",
    "backward": """
#include <cuda_bf16.h>
#include "kernels/sm90_backward/kernel.cuh"
#include "kernels/sm90_backward/wide.cuh"
using namespace attnscope::sm90;
template __global__ void attnscope::sm90::backward_kernel<BackwardConfig<__nv_bfloat16, 3>>(
    const __grid_constant__ BackwardArguments);
template __global__ void attnscope::sm90::wide_backward_kernel<WideConfig<__nv_bfloat16, 5>>(
    const __grid_constant__ BackwardArguments);
""",
}


@pytest.fixture(scope="module")
def nvcc():
    sys.path.insert(0, str(ROOT))
    import setup

    path = setup.find_nvcc()
    if path is None:
        pytest.skip("no nvcc")
    return path


@pytest.fixture(scope="module", params=KERNELS)
def ptx(request, nvcc, tmp_path_factory):
    """PTX of some kernels, by variant; the normal build is `normal`."""
    folder, texts = tmp_path_factory.mktemp("ptx"), {}
    source = folder / "kernels.cu"
    source.write_text(KERNELS[request.param])
    variants = {"normal": (), **library.VARIANTS}
    if request.param == "backward":  # no race is planted there
        del variants["planted-race"]
    for variant, defines in variants.items():
        out = folder / f"{variant}.ptx"
        flags = ["-std=c++17", "-Xcicc=-O0", f"-I{ROOT / 'csrc'}", "-arch=compute_90a", "--ptx"]
        result = subprocess.run(
            [str(nvcc), *flags, *(f"-D{name}" for name in defines), "-o", str(out), str(source)],
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr
        texts[variant] = out.read_text()
    return texts


@pytest.mark.long
def test_every_variant_compiles_to_a_kernel_of_its_own(ptx):
    assert len(set(ptx.values())) == len(ptx) >= 4


@pytest.mark.long
def test_delays_are_in_the_variants_that_have_them_alone(ptx):
    delayed = {name for name, text in ptx.items() if "g_faults" in text}
    assert delayed == {name for name in ptx if name.startswith("faults")}
    assert {name for name, text in ptx.items() if "%clock" in text} == delayed


@pytest.mark.long
@pytest.mark.parametrize("ptx", ["forward"], indirect=True)
def test_the_planted_race_is_one_wait_less(ptx):
    waits = {name: text.count("mbarrier.try_wait") for name, text in ptx.items()}
    assert waits["planted-race"] == waits["normal"] - 1


@pytest.mark.long
@pytest.mark.parametrize("ptx", ["backward"], indirect=True)
def test_the_unguarded_build_adds_out_of_turn(ptx):
    """Each wait for a turn is a loop of ld.acquire; so are waits for a first part of dQ."""
    waits = {name: text.count("ld.acquire") for name, text in ptx.items()}
    assert {name for name in ptx if waits[name] < waits["normal"]} == {"faults-unguarded"}


CLOCKS = "CLOCK|GLOBALTIMER|VIRTUALSMID"  # of delays, and of the timeline
needs_library = pytest.mark.skipif(not LIBRARY.exists(), reason="_C_cuda.so is not built")


@needs_library
def test_the_library_has_no_symbol_of_the_delays():
    symbols = subprocess.run(["nm", str(LIBRARY)], capture_output=True, text=True, check=True)
    assert "launch_forward" in symbols.stdout
    assert "faults" not in symbols.stdout
    assert b"attnscope_set_faults" not in LIBRARY.read_bytes()


@needs_library
@pytest.mark.skipif(sass.cuobjdump() is None, reason="no cuobjdump: no Triton, no toolkit")
def test_no_kernel_of_the_library_reads_the_clock():
    kernels = sass.functions(LIBRARY, "sm_90a")
    assert kernels
    assert [name for name, code in kernels.items() if re.search(CLOCKS, code)] == []


# On a Hopper device.


def stress(*arguments: str) -> subprocess.CompletedProcess[str]:
    whole = [sys.executable, "-m", "attnscope", "stress", *arguments]
    return subprocess.run(whole, cwd=ROOT, capture_output=True, text=True)


MODES = {"forward": (), "backward": ("--mode=backward",)} | {
    "deterministic": ("--mode=backward", "--deterministic")
}


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("mode", ["backward", "deterministic"])
def test_some_delayed_backward_calls_are_right(mode):
    result = stress("--calls=80", "--beside", *MODES[mode])
    assert result.returncode == 0, result.stdout + result.stderr
    assert "80 calls with delays: 0 wrong, 0 wrong rows; 0 cases wrong" in result.stdout


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_ten_thousand_delayed_calls_are_right(mode):
    result = stress("--calls=10000", *MODES[mode])
    assert result.returncode == 0, result.stdout + result.stderr
    assert "10000 calls with delays: 0 wrong, 0 wrong rows; 0 cases wrong" in result.stdout


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.slow
def test_the_stress_finds_the_unguarded_ring():
    """If a consumer skips blocks without waiting for copies, late copies give wrong rows.

    A ring that is overrun may also fail the launch, which ends the run.
    """
    result = stress("--unguarded", "--calls=2000")
    assert "0 cases wrong without delays" in result.stdout, result.stdout + result.stderr
    broke_off = "unspecified launch failure" in result.stdout + result.stderr
    wrong = re.findall(r"(d\d+ .*): \d+ of \d+ calls wrong, \d+ rows; seed", result.stdout)
    assert result.returncode == (1 if wrong else 2)
    assert broke_off or any(re.match(r"d256 .* causal", label) for label in wrong)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["backward", "deterministic"])
def test_the_stress_finds_the_unguarded_backward(mode):
    """dS that is overwritten before its last read; in deterministic calls, dQ out of turn too."""
    result = stress("--unguarded", "--calls=1000", *MODES[mode])
    assert result.returncode == 1, result.stdout + result.stderr
    for head_dim in cases.BACKWARD_HEAD_DIMS:
        wrong = rf"d{head_dim} .*: \d+ of \d+ calls wrong, \d+ rows; seed"
        assert re.search(wrong, result.stdout), head_dim
