"""Some steps of a training loop: which are recorded, what is cut, what a program notices of it."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from attnscope.cli import build
from attnscope.profile import Profile, ProfileError, annotate, profile
from attnscope.profile.breakdown import find_steps
from attnscope.profile.steps import parse_steps
from attnscope.profile.trace import STEP


class Loop:
    """A model that trains, `optimizers` of them in turn, and counts the steps it took."""

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


@pytest.mark.parametrize("text", ["", "x", "1:", "-1", "1:2:3", "1.5", "5:4"])
def test_what_is_no_steps_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="steps: "):
        parse_steps(text)


@pytest.mark.parametrize("steps", [range(0), range(3, 3), range(0, 4, 2), range(3, 0, -1)])
def test_a_range_that_is_no_window_is_refused(steps: range) -> None:
    with pytest.raises(ValueError, match="steps: range"):
        profile(steps=steps)


@pytest.mark.parametrize("steps", [range(1), range(2), range(4, 7), range(9, 10)], ids=str)
def test_only_the_steps_that_were_asked_for_are_recorded(steps: range) -> None:
    loop = Loop()
    with profile(steps=steps, kineto=True) as found:
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
    assert not [name for name in found.kineto_comparison()["name"] if name.startswith(STEP)]


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


def test_the_steps_just_before_say_what_it_takes_without_the_profiler() -> None:
    with profile(steps=range(4, 7)) as found:
        Loop().run(8)
    assert found.unprofiled_wall_s is not None and found.unprofiled_wall_s > 0
    with profile(steps=range(3, 6)) as found:  # step 0 is not among them
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


def test_steps_that_never_began_are_an_error_and_profiling_goes_on() -> None:
    with pytest.raises(ProfileError, match="steps: 4 is the first .* the region had 2"):
        with profile(steps=range(4, 5)):
            Loop().run(2)
    with profile() as found:
        Loop().run(1)
    assert calls(found, "aten::addmm") == 1


def test_an_error_after_the_steps_leaves_the_record_whole() -> None:
    with pytest.raises(RuntimeError, match="mine"), profile(steps=range(1, 2)) as found:
        Loop().run(3)
        raise RuntimeError("mine")
    assert found.interrupted is None and calls(found, "aten::addmm") == 1


def test_an_error_within_the_steps_is_told() -> None:
    with pytest.raises(RuntimeError, match="mine"), profile(steps=range(1, 9)) as found:
        Loop().run(3)
        raise RuntimeError("mine")
    assert found.interrupted == "RuntimeError: mine" and calls(found, "aten::addmm") == 2


def test_what_goes_wrong_is_raised_at_the_end_not_in_the_optimizer() -> None:
    loop = Loop()
    with pytest.raises(ProfileError, match="running already"), profile(steps=range(1, 2)):
        with torch.profiler.profile():
            loop.run(3)
    assert loop.steps == 3


def test_one_object_is_for_one_region_at_a_time() -> None:
    both = profile(steps=range(1, 2))
    with both as found:
        with pytest.raises(ProfileError, match="running already"):
            with both:
                pass
        Loop().run(3)
    assert calls(found, "aten::addmm") == 1


def test_every_call_of_a_decorated_function_has_its_steps() -> None:
    @profile(warmup=0, steps=range(1, 3))
    def train() -> None:
        Loop().run(4)

    for _ in range(2):
        train()
        assert calls(train.profile, "aten::addmm") == 2


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "7"], "steps: 7 is the first to record, and the region had 6"),
        (["--steps", "two"], "steps: 'two' is not a step"),
    ],
)
def test_steps_that_cannot_be_had_are_told(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = ["profile", *arguments, str(script), str(tmp_path / "count")]
    result = CliRunner().invoke(build("profile"), command)
    assert result.exit_code == 2 and message in result.output
