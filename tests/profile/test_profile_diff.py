"""The difference of two profiles: what came, went, moved, and its share in the change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_trace import RECORDED, Event, kernel, launch, named, op, write_trace
from typer.testing import CliRunner

from attnscope.cli import build
from attnscope.profile import Profile
from attnscope.profile.analysis.diff import Diff, difference, side_of


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(build("profile"), ["profile", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


def program(*works: tuple[str, str, float], steps: int = 1) -> list[Event]:
    """Steps with one kernel for each (op, symbol, microseconds)."""
    events: list[Event] = []
    for step in range(steps):
        events.append(named("step", 10_000 * step, 10_000 * step + 9000))
        for at, (name, symbol, us) in enumerate(works):
            begin, number = 10_000 * step + 1000 * at, 100 * step + at + 1
            events += [op(name, begin + 1, begin + 50), launch(number, begin + 5)]
            events.append(kernel(number, begin + 10, begin + 10 + us, symbol))
    return events


A = (("mm", "nvjet_a", 100.0), ("softmax", "softmax_warp", 50.0), ("add", "elementwise_k", 30.0))
B = (
    ("mm", "nvjet_a", 101.0),
    ("attention", "flash_fwd_kernel", 20.0),
    ("add", "elementwise_k", 60),
)


def diff(folder: Path, a: list[Event], b: list[Event]) -> Diff:
    return difference(
        *(
            side_of(Profile.read(write_trace(folder / f"{name}.json", *events)), name)
            for name, events in (("a", a), ("b", b))
        )
    )


def test_what_came_went_and_moved(tmp_path: Path) -> None:
    found = diff(tmp_path, program(*A), program(*B))
    assert found.totals_us == (180, 181) and not found.per_step
    table = found.tables["operators"].set_index("name")
    assert dict(table["verdict"]) == {
        "softmax": "went", "add": "more", "attention": "came", "mm": "same",
    }  # fmt: skip
    assert list(table["change_us"]) == [-50, 30, 20, 1]
    assert table["share"].abs().sum() == pytest.approx(1)
    assert table["share"]["softmax"] == pytest.approx(-50 / 101)
    categories = found.tables["categories"].set_index("name")["verdict"]
    assert categories["softmax"] == "went" and categories["attention"] == "came"
    assert list(found.tables["stages"]["name"]) == ["step"]


def test_profiles_with_other_numbers_of_steps_are_compared_by_step(tmp_path: Path) -> None:
    found = diff(tmp_path, program(*A, steps=4), program(*A, steps=6))
    assert found.per_step and found.totals_us == (180, 180)
    for table in found.tables.values():
        assert set(table["verdict"]) == {"same"} and (table["a_calls"] == table["b_calls"]).all()


@pytest.mark.parametrize("record", ["trace", "file", "folder"])
def test_traces_and_records_give_the_same_difference(record: str, tmp_path: Path) -> None:
    a, b = str(RECORDED / "train.json.gz"), str(RECORDED / "stack.json.gz")
    want = json.loads(run("--diff", a, b, "--json")[1])
    if record != "trace":
        for name, trace in (("a", a), ("b", b)):
            (tmp_path / name).mkdir()
            Profile.read(trace).to_json(tmp_path / name / "profile.json")
        file = "" if record == "folder" else "profile.json"
        a, b = (str(tmp_path / name / file) for name in "ab")
    code, out = run("--diff", a, b, "--json")
    have = json.loads(out)
    assert code == 0 and have["tables"] == want["tables"] and have["gpu_us"]["a"] > 600


def test_the_difference_in_the_terminal_and_as_markdown(tmp_path: Path) -> None:
    paths = [
        str(write_trace(tmp_path / f"{at}.json", *program(*works)))
        for at, works in enumerate((A, B))
    ]
    code, out = run("--diff", *paths)
    assert code == 0
    assert out.startswith("GPU time: 180 us -> 181 us (+0.6%); most: softmax went with 50 us")
    assert "1 came, 1 went, 1 more, 1 same" in out and "-49.5 %" in out
    code, out = run("--diff", *paths, "--format", "markdown")
    assert code == 0 and len(out.splitlines()) <= 60
    assert "| softmax | 50 us | 0 us | -50 us | -49.5 % | went |" in out


def test_a_difference_of_bad_input(tmp_path: Path) -> None:
    good = str(write_trace(tmp_path / "good.json", *program(*A)))
    (tmp_path / "profile.json").write_text('{"schema": 1, "tables": []}')
    for other, said in (
        ("nowhere", "which does not exist"),
        (str(tmp_path), "diff must name traces or profile.json files"),
        (str(write_trace(tmp_path / "empty.json")), "got none in"),
    ):
        code, out = run("--diff", good, other)
        assert code == 2 and said in out.replace("\n", " ") and "Traceback" not in out
    lost = str(write_trace(tmp_path / "lost.json", *program(*A), launch(9, 5000)))
    code, out = run("--diff", good, lost)
    assert code == 1 and "DO NOT TRUST" in out
