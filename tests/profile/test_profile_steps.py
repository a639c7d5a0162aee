"""Recording some steps of a training loop: which ones, their ends, effects on the program."""

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forked import run_python
from signals import uninterruptible
from typer.testing import CliRunner

from attnscope.cli import build
from attnscope.profile import Profile, ProfileError, annotate, profile
from attnscope.profile.analysis.steps import find_steps
from attnscope.profile.record import recorder
from attnscope.profile.record.step_window import parse_steps
from attnscope.profile.trace.markers import STEP

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Loop:
    """A training loop that steps `optimizers` optimizers in turn and counts its steps."""

    def __init__(self, optimizers: int = 1, device: str = "cpu") -> None:
        self.models = [torch.nn.Linear(8, 8, device=device) for _ in range(optimizers)]
        self.batch = torch.ones(4, 8, device=device)
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in self.models]
        self.steps = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            for model, optimizer in zip(self.models, self.optimizers, strict=True):
                with annotate("forward"):
                    loss = model(self.batch).sum()
                loss.backward()
                with annotate("optimizer"):
                    optimizer.step()
            self.steps += 1


def calls(found: Profile, name: str) -> int:
    table = found.operators().set_index("name")
    return int(table["calls"].get(name, 0))


@pytest.mark.parametrize(
    ("text", "steps"), [("0", range(1)), ("10", range(10, 11)), (" 3:5 ", range(3, 6))]
)
def test_steps_are_written_with_the_last_one_included(text: str, steps: range) -> None:
    assert parse_steps(text) == steps


@pytest.mark.parametrize("text", ["", "x", "1:", "-1", "1:2:3", "1.5", "5:4", f"0:{10**10}"])
def test_what_is_no_steps_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="steps must "):
        parse_steps(text)


@pytest.mark.parametrize("steps", [range(0), range(3, 3), range(0, 4, 2), range(3, 0, -1)])
def test_a_range_that_is_no_window_is_refused(steps: range) -> None:
    with pytest.raises(ValueError, match="steps must be a range"):
        profile(steps=steps)


@pytest.mark.parametrize("steps", [range(1), range(2), range(4, 7), range(9, 10)], ids=str)
def test_only_the_steps_that_were_asked_for_are_recorded(steps: range) -> None:
    loop = Loop()
    with profile(steps=steps) as found:
        loop.run(10)
    assert loop.steps == 10 and found.interrupted is None
    assert calls(found, "aten::addmm") == len(steps)
    table = found.steps()
    assert table["step"].tolist() == [f"step {k}" for k in steps]
    assert table.attrs["steps"] == "to the end of each step of the optimizer"
    assert (table.attrs["setup_us"] is None) == (steps.start > 0 or len(steps) == 1)
    stages = found.stages().set_index("range")
    assert stages["calls"]["forward"] == len(steps)
    assert not [name for name in stages.index if name.startswith(STEP)]


@pytest.mark.gpu
def test_on_a_gpu_all_work_of_the_steps_has_an_owner_and_nothing_else_is_there() -> None:
    with profile(steps=range(3, 6)) as found:
        Loop(device="cuda").run(8)
    assert found.incomplete is None and found.attribution.share == 1.0
    table = found.operators().set_index("name")
    assert table["calls"]["aten::addmm"] == 3 and table["gpu_us"]["aten::addmm"] > 0
    launched = sum(event.kind == "call" and event.correlation > 0 for event in found.trace.cpu)
    assert 0 < len(found.trace.gpu) <= launched
    assert [step.name for step in find_steps(found.attribution)[0]] == [
        "step 3",
        "step 4",
        "step 5",
    ]


def test_the_steps_just_before_give_the_time_without_the_profiler() -> None:
    with profile(steps=range(4, 7)) as found:
        Loop().run(8)
    assert found.unprofiled_wall_s is not None and found.unprofiled_wall_s > 0
    with profile(steps=range(3, 6)) as found:  # step 0 is not recorded
        Loop().run(8)
    assert found.unprofiled_wall_s is None
    assert found.unprofiled_reason == "needs 3 steps before those recorded, besides step 0"


def test_a_range_that_is_open_at_an_end_is_cut_there() -> None:
    with profile(steps=range(2, 4)) as found:
        Loop().run(6)
    trace = found.trace
    cut = [e for e in trace.cpu if e.kind == "range" and e.name == "optimizer"]
    assert len(cut) == 2
    assert cut[-1].end == max(e.end for e in trace.cpu) <= trace.end
    assert found.wall_s is not None
    assert cut[-1].end - cut[-1].start < found.wall_s * 1e9


def test_only_the_first_optimizer_ends_steps() -> None:
    with profile(steps=range(1, 3)) as found:
        Loop(optimizers=3).run(5)
    assert calls(found, "aten::addmm") == 6


def test_a_program_that_ends_within_the_steps_keeps_what_there_was() -> None:
    with profile(steps=range(4, 9)) as found:
        Loop().run(6)
    assert calls(found, "aten::addmm") == 2
    assert found.interrupted == "the end of the region, after 6 steps of 9"
    assert found.unprofiled_wall_s is None and found.unprofiled_reason
    assert found.steps()["step"].tolist() == ["step 4", "step 5"]


def test_what_follows_the_last_step_is_no_step() -> None:
    with profile(steps=range(4)) as found:
        loop = Loop()
        loop.run(2)
        loop.models[0](loop.batch)
    table = found.steps()
    assert table["step"].tolist() == ["step 0", "step 1"]
    walls = table["wall_us"]
    assert table.attrs["setup_us"] == pytest.approx(walls[0] - walls[1])


def test_the_first_step_begins_where_the_one_before_it_ends() -> None:
    loop = Loop()
    with profile(steps=range(1, 3)) as found:
        for _ in range(4):
            time.sleep(0.02)  # e.g. data loading: no op
            loop.run(1)
    assert found.steps()["wall_us"].min() >= 20e3


@pytest.mark.parametrize("had", [2, 4])
def test_steps_that_never_were_are_an_error_and_profiling_goes_on(had: int) -> None:
    with pytest.raises(ProfileError, match=f"got 4 in a region of {had} steps"):
        with profile(steps=range(4, 5)):
            loop = Loop()
            loop.run(had)
            loop.models[0](loop.batch)
    with profile() as found:
        Loop().run(1)
    assert calls(found, "aten::addmm") == 1


def test_an_error_after_the_steps_leaves_the_record_whole() -> None:
    with pytest.raises(RuntimeError, match="mine"), profile(steps=range(1, 2)) as found:
        Loop().run(3)
        raise RuntimeError("mine")
    assert found.interrupted is None and calls(found, "aten::addmm") == 1


def test_an_error_within_the_steps_is_reported() -> None:
    with pytest.raises(RuntimeError, match="mine"), profile(steps=range(1, 9)) as found:
        Loop().run(3)
        raise RuntimeError("mine")
    assert found.interrupted == "RuntimeError: mine" and calls(found, "aten::addmm") == 2


def test_what_goes_wrong_is_raised_at_the_end_not_in_the_optimizer() -> None:
    loop = Loop()
    with pytest.raises(ProfileError, match="the only running profiler"), profile(steps=range(1, 2)):
        with torch.profiler.profile():
            loop.run(3)
    assert loop.steps == 3


def test_optimizers_after_the_first_are_not_counted_and_the_error_names_them() -> None:
    with pytest.raises(ProfileError, match=r"a region of 2 steps. .* optimizers stepped 4"):
        with profile(steps=range(3, 5)):
            for _ in range(3):
                Loop().run(2)


def test_one_object_is_for_one_region_at_a_time() -> None:
    both = profile(steps=range(1, 2))
    with both as found:
        with pytest.raises(ProfileError, match="the only running profiler"):
            with both:
                pass
        Loop().run(3)
    assert calls(found, "aten::addmm") == 1


@pytest.mark.parametrize("warmup", [0, 2])
def test_every_call_of_a_decorated_function_has_its_steps(warmup: int) -> None:
    @profile(warmup=warmup, steps=range(1, 3))
    def train() -> None:
        Loop().run(4)

    for _ in range(2):
        train()
        assert calls(train.profile, "aten::addmm") == 2
        # The time of a whole call is not the time of these steps.
        assert train.profile.unprofiled_wall_s is None
        assert "2 steps before those recorded" in train.profile.unprofiled_reason


def in_thread(run: Callable[[], object]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def stepped_in_backward() -> None:
    loop = Loop()
    parameters = [*loop.models[0].parameters()]
    optimizers = {one: torch.optim.SGD([one], lr=0.1) for one in parameters}
    for one in parameters:
        one.register_post_accumulate_grad_hook(lambda one: optimizers[one].step())
    for _ in range(5):
        loop.models[0](loop.batch).sum().backward()


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda: in_thread(lambda: Loop().run(5)), "got a step on another thread"),
        (stepped_in_backward, "inside backward"),
    ],
)
@pytest.mark.parametrize("steps", [range(2, 4), range(2)], ids=str)
def test_steps_elsewhere_are_an_error_at_once_and_profiling_goes_on(
    steps: range,
    run: Callable[[], object],
    reason: str,
    memory: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ProfileError, match=reason):
        with profile(steps=steps, memory=memory):
            run()
            assert reason in capsys.readouterr().err
    with profile(memory=memory) as found:
        Loop().run(1)
    assert calls(found, "aten::addmm") == 1


@pytest.mark.parametrize(
    "where", ["_torch_profiler", "_warn_of_size"], ids=["begins", "is written"]
)
def test_ctrl_c_while_a_record_is_made_leaves_none(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    twice = profile(steps=range(1, 2))
    with twice:
        Loop().run(3)
    with monkeypatch.context() as patch:
        patch.setattr(recorder, where, interrupted)
        with pytest.raises(KeyboardInterrupt), twice as found:
            Loop().run(3)
        with pytest.raises(ProfileError, match="recording, got none: KeyboardInterrupt"):
            found.operators()
        # A program may catch the exception.
        with pytest.raises(ProfileError, match="got an interrupt while it was recorded"), twice:
            with pytest.raises(KeyboardInterrupt):
                Loop().run(3)
    with twice as found:
        Loop().run(3)
    assert calls(found, "aten::addmm") == 1


@pytest.mark.gpu
def test_a_step_that_is_captured_into_a_cuda_graph_is_an_error() -> None:
    model = torch.nn.Linear(8, 8, device="cuda")
    optimizer = torch.optim.Adam(model.parameters(), capturable=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(torch.ones(4, 8, device="cuda")).sum().backward()
        optimizer.step()

    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            step()
    with pytest.raises(ProfileError, match="captured into a CUDA graph"):
        with profile(steps=range(2, 3)):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                step()


SCRIPT = """
import sys, torch
from pathlib import Path
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    for step in range(6):
        model(torch.ones(4, 8)).sum().backward()
        try:
            optimizer.step()
        except Exception:
            pass
        Path(sys.argv[1]).write_text(str(step))
finally:
    print("cleaned up")
print("went on")
"""


def test_the_command_ends_the_script_after_its_steps(tmp_path: Path) -> None:
    script, out, count = tmp_path / "train.py", tmp_path / "out", tmp_path / "count"
    script.write_text(SCRIPT)
    arguments = ["profile", "--output", str(out), "--steps", "2:3", str(script), str(count)]
    result = CliRunner().invoke(build("profile"), arguments)
    assert result.exit_code == 0
    assert "cleaned up" in result.output and "went on" not in result.output
    assert count.read_text() == "2"
    written = json.loads((out / "profile.json").read_text())
    assert [row["step"] for row in written["tables"]["steps"]] == ["step 2", "step 3"]
    again = CliRunner().invoke(build("profile"), ["profile", "--trace", str(out / "trace.json")])
    assert "to the end of each step of the optimizer" in again.output


FORKED = """
import multiprocessing, os, torch
def train():
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    os._exit(7)
child = multiprocessing.get_context("fork").Process(target=train)
child.start()
child.join()
print("child", child.exitcode)
"""


def test_a_forked_process_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FORKED)
    result = run_python("-m", "attnscope", "profile", "--steps", "2:3", str(script))
    assert "child 7" in result.stdout
    assert result.returncode == 2 and "a region of 0 steps" in result.stdout + result.stderr


THREADED = """
import threading, torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def loop():
    for step in range(6):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        print("took", step)
"""


def test_a_loop_in_another_thread_is_an_error_and_the_script_ends(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{THREADED}threading.Thread(target=loop).start()\n")
    result = CliRunner().invoke(build("profile"), ["profile", "--steps", "2:3", str(script)])
    assert result.exit_code == 2 and "took 5" in result.output
    assert "got a step on another thread" in result.output


@pytest.mark.timeout(120)
def test_a_loop_in_another_thread_ends_where_interrupts_are_ignored(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{THREADED}threading.Thread(target=loop).start()\n")
    command = ("-m", "attnscope", "profile", "--steps", "2:3", str(script))
    done = run_python(*command, prepare=uninterruptible)
    assert done.returncode == 2 and "took 5" in done.stdout
    assert done.stderr.count("got a step on another thread") == 2  # at once, at the end


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "6"], "got 6 in a region of 6 steps"),
        (["--steps", "two"], "steps must be a step or first:last"),
    ],
)
def test_steps_that_never_come_are_an_error(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = ["profile", *arguments, str(script), str(tmp_path / "count")]
    result = CliRunner().invoke(build("profile"), command)
    assert result.exit_code == 2 and message in result.output


def decode(x: torch.Tensor) -> torch.Tensor:
    with annotate("token"):
        return x.softmax(-1) * 2


def tokens(count: int, device: str = "cpu") -> None:
    x = torch.ones(4, 8, device=device)
    for _ in range(count):
        x = decode(x)


FUNCTIONS = pytest.mark.skipif(sys.version_info < (3, 12), reason="functions need Python 3.12")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["token", pytest.param("decode", marks=FUNCTIONS)])
def test_each_entry_of_a_range_or_function_begins_a_step(name: str, device: str) -> None:
    with profile(steps=range(4, 7), step_range=name) as found:
        tokens(9, device)
    assert calls(found, "aten::softmax") == 3 and found.interrupted is None
    table = found.steps()
    assert table["step"].tolist() == ["step 4", "step 5", "step 6"]
    assert table.attrs["steps"] == f"from each {name!r} to the next"
    assert found.unprofiled_wall_s is not None
    with profile(step_range=name) as whole:
        tokens(5, device)
    assert len(whole.steps()) == 5 and calls(whole, "aten::softmax") == 5
    assert whole.steps().attrs["counted"] == 4 and whole.steps().attrs["sd_us"] > 0


@FUNCTIONS
def test_a_module_is_named_by_its_class() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    with profile(steps=range(1, 3), step_range="Sequential") as found:
        for _ in range(5):
            model(torch.ones(2, 8))
    assert calls(found, "aten::addmm") == 2


def test_the_last_step_ends_with_the_region() -> None:
    for last, interrupted in ((7, None), (9, "the end of the region, after 8 steps of 10")):
        with profile(steps=range(6, last + 1), step_range="token") as found:
            tokens(8)
        assert calls(found, "aten::softmax") == 2 and found.interrupted == interrupted
        assert found.steps()["step"].tolist() == ["step 6", "step 7"]


def test_a_range_that_is_never_entered(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ProfileError, match="got 5 in a region with 3 entries of 'token'"):
        with profile(steps=range(5, 6), step_range="token"):
            tokens(3)
    with pytest.raises(ProfileError, match="step_range must be entered .*, got 'nowhere'"):
        with profile(steps=range(1), step_range="nowhere"):
            tokens(3)
    with profile(step_range="nowhere") as found:
        tokens(3)
    assert calls(found, "aten::softmax") == 3 and "there are no steps" in capsys.readouterr().err


def test_an_entry_in_another_thread_is_an_error() -> None:
    with pytest.raises(ProfileError, match="got an entry on another thread"):
        with profile(steps=range(1, 2), step_range="token"):
            thread = threading.Thread(target=tokens, args=(3,))
            thread.start()
            thread.join()
    with annotate("token"):  # the watch has ended
        pass
