"""The lint of a trace: each kind of fault in a small trace made for it, and the verdict."""

import json
from pathlib import Path
from typing import Any

import pytest
from made_trace import RECORDED, Event, cpu, kernel, launch, op, write_trace
from typer.testing import CliRunner

from attnscope.cli import build
from attnscope.profile import Profile, ProfileError

HOUR = 3600e6  # microseconds
SOUND = [op("aten::mm", 0, 50, **{"External id": 7}), launch(1, 10, **{"External id": 7})]
SOUND += [kernel(1, 30, 40, **{"External id": 7})]


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(build("profile"), ["profile", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


def read(folder: Path, *events: Event) -> Profile:
    return Profile.read(write_trace(folder / "t.json", *events))


def many(count: int = 200, **more: Any) -> list[Event]:
    """Launches at 100, 200, ... each with a kernel of 50 us right after it."""
    events = []
    for at in range(1, count + 1):
        events += [launch(at, 100 * at), kernel(at, 100 * at + 10, 100 * at + 60, **more)]
    return events


def test_sound_traces_are_trusted(tmp_path: Path) -> None:
    graph = RECORDED / "graph_both.json.gz"
    Profile.read(graph).export_chrome_trace(tmp_path / "ours.json")
    for path in (write_trace(tmp_path / "t.json", *SOUND), graph, tmp_path / "ours.json"):
        code, out = run("--check", str(path))
        assert code == 0 and "the tables can be trusted: " in out and "no fault" in out


@pytest.mark.parametrize(
    ("events", "kind", "gpu_us"),
    [
        pytest.param(SOUND * 2, "repeated events: 3", 10, id="twice"),
        pytest.param(
            [*SOUND, launch(2, 40), kernel(2, 50, 49)],
            "negative durations: 1 (left out",
            10,
            id="negative",
        ),
        pytest.param(
            [*SOUND, launch(2, 40), kernel(2, 50, 60) | {"ts": None}],
            "events with a missing or bad value: 1 (left out; the first: event 5, TypeError",
            10,
            id="no time",
        ),
        pytest.param(
            [*(e | {"ts": e["ts"] + 1e6 * HOUR} for e in SOUND), kernel(3, 0, 5)],
            "times of 0, or half a day or more from the others: 1 (left out",
            10,
            id="time 0",
        ),
        pytest.param(
            [*(e | {"ts": e["ts"] + HOUR} for e in SOUND), kernel(3, 0, 5)],
            "times of 0, or half a day or more from the others: 1 (left out",
            10,
            id="time 0 of an hour",
        ),
        pytest.param(
            [*SOUND, launch(2, 50), kernel(2, 60, 1e6 * HOUR)],
            "times of 0, or half a day or more from the others: 1 (left out",
            10,
            id="endless",
        ),
        pytest.param(
            [*SOUND, launch(2, 900), kernel(2, 100, 150)],
            "GPU work before its launch: 1 (by up to 800.0 us; left out",
            10,
            id="before its launch",
        ),
        pytest.param(
            [*SOUND, launch(2, 50), kernel(2, 60, 1e6), launch(3, 52), kernel(3, 70, 75)],
            "outlasts later work of its stream: 1 (cut where that work starts, 999.930 ms less",
            25,
            id="overrun",
        ),
        pytest.param(
            [*SOUND, launch(2, 50), kernel(2, 60, 60)],
            "kernels without a duration: 1 (count 0 us",
            10,
            id="no duration",
        ),
    ],
)
def test_impossible_events_are_left_out_and_counted(
    tmp_path: Path, events: list[Event], kind: str, gpu_us: float
) -> None:
    path = write_trace(tmp_path / "t.json", *events)
    code, out = run("--check", str(path))
    assert code == 0 and kind in out.replace("\n", " ")
    found = Profile.read(path)
    assert found.attribution.total_ns == gpu_us * 1e3 and found.incomplete is None
    assert found.trace.end < 2e9 and found.operators()["self_gpu_us"].sum() == gpu_us
    _, report = run("--trace", str(path))
    assert kind in report


def test_many_events_without_a_thread_cost_the_trust(tmp_path: Path) -> None:
    bad = [event | {"tid": "main"} for event in SOUND[:2]]
    code, out = run("--check", str(write_trace(tmp_path / "t.json", *bad, SOUND[2])))
    assert code == 1 and "DO NOT TRUST the tables: events with a missing or bad value" in out


def test_overlap_that_can_be_is_kept(tmp_path: Path) -> None:
    """The next kernel may start early; other contexts, streams and graphs run side by side."""
    graph = [launch(9, 300, "cudaGraphLaunch"), kernel(9, 310, 400), kernel(9, 320, 330)]
    other = [
        launch(3, 50),
        kernel(3, 70, 75, context=2),
        launch(4, 51),
        kernel(4, 71, 76, stream=8),
    ]
    events = [launch(1, 10), kernel(1, 60, 100), launch(2, 11), kernel(2, 90, 110), *other, *graph]
    found = read(tmp_path, *events)
    assert found.attribution.total_ns == (40 + 20 + 5 + 5 + 90 + 10) * 1e3
    assert not found.lint.faults


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        pytest.param(
            [cpu("Kernel", "k", 1, 2), cpu("Runtime", "cudaLaunchKernel", 0, 1)],
            "unknown events 'Kernel'",
            id="old categories",
        ),
        pytest.param([*SOUND, cpu("mtia_runtime", "x", 1, 2)], "unknown events 'mtia", id="MTIA"),
        pytest.param(
            [*SOUND, op("b", 60, 70) | {"ph": "B"}, op("b", 60, 70) | {"ph": "E"}],
            "unknown events 'cpu_op' in phase 'B': 1",
            id="phases",
        ),
        pytest.param(
            [*SOUND, op("aten::mm", 0, 50, tid=9) | {"pid": 2}],
            "processes in one trace: 2",
            id="pids",
        ),
        pytest.param(
            [*SOUND, kernel(1, 50, 60)], "kernels that share a launch: 1", id="ids of two processes"
        ),
        pytest.param(
            [launch(at, 100 * at + 50) for at in range(1, 9)]
            + [kernel(at, 100 * at, 100 * at + 9) for at in range(1, 9)],
            "GPU work before its launch: 8 (by up to 50.0 us: the clocks",
            id="clocks",
        ),
        pytest.param([*SOUND, launch(2, 60)], "lost launches", id="lost"),
        pytest.param(
            [op("far", -12.7e6, -12.6e6, **{"External id": 9}), *SOUND, launch(2, 60)]
            + [kernel(2, 70, 141, **{"External id": 9})],
            "external ids of an op that is not open at the launch: 1",
            id="ids at a distance",
        ),
    ],
)
def test_traces_that_cannot_be_trusted(tmp_path: Path, events: list[Event], kind: str) -> None:
    path = write_trace(tmp_path / "t.json", *events)
    code, out = run("--check", str(path))
    assert code == 1 and "DO NOT TRUST the tables" in out and kind in out.replace("\n", " ")
    code, out = run("--trace", str(path), "--output", str(tmp_path / "out"))
    assert code == 1
    if "Kernel" in kind:
        assert "no kernel ran" not in out


def test_a_few_wrong_ids_do_not_cost_the_trust(tmp_path: Path) -> None:
    far = op("far", -9e6, -8e6, **{"External id": 9})
    wrong = [launch(201, 30000), kernel(201, 30010, 30012, **{"External id": 9})]
    found = read(tmp_path, far, *many(), *wrong)
    assert found.lint.trusted and [fault.count for fault in found.lint.faults] == [1]
    assert found.operators().set_index("name")["gpu_us"]["far"] == 0


def test_ids_without_a_launch_count_where_the_others_fit(tmp_path: Path) -> None:
    """A kernel whose launch is not in the trace belongs to the op that its id names, unless the
    ids of the trace repeat the correlation ids or do not fit elsewhere."""
    late = kernel(99, 12e6, 12e6 + 5, **{"External id": 7})
    assert read(tmp_path, *SOUND, late).attribution.unowned == []
    copies = [kernel(at, 12e6 + at, 12e6 + at + 1, **{"External id": at}) for at in (5, 6, 7)]
    alone = read(tmp_path, SOUND[0], *copies)
    assert len(alone.attribution.unowned) == 3
    wrong = [launch(2, 500), kernel(2, 510, 520, **{"External id": 7})]
    mixed = Profile.read(write_trace(tmp_path / "m.json", *SOUND, *wrong, late))
    assert not mixed.lint.trusted
    with pytest.raises(ProfileError, match="external ids must be"):
        mixed.operators()


def test_an_empty_trace_is_bad_input(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.json")
    for option in ("--check", "--trace"):
        code, out = run(option, str(path))
        assert code == 2 and "trace must have ops, ranges, CUDA calls or GPU work" in out


def test_the_lint_as_json(tmp_path: Path) -> None:
    code, out = run("--check", str(write_trace(tmp_path / "t.json", *SOUND * 2)), "--json")
    content = json.loads(out)
    assert code == 0 and content["trusted"] and content["faults"][0]["count"] == 3


def test_the_lint_is_in_every_file(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.json", *SOUND * 2)
    code, _ = run("--trace", str(path), "--output", str(tmp_path))
    assert code == 0
    lint = json.loads((tmp_path / "profile.json").read_text())["lint"]
    assert lint["trusted"] and lint["faults"][0]["kind"] == "repeated events"
    page = (tmp_path / "profile.html").read_text()
    assert "Repeated events: 3" in page and "the tables can be trusted" in page.split("<nav>")[0]
