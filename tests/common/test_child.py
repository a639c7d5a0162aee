"""Work in forked children: what they return, and that nothing is lost with them."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from token_loop import write_token_loop

from attnscope.common import child
from attnscope.common.child import Child
from attnscope.profile import Profile
from attnscope.profile.record import launcher, recorder
from attnscope.profile.render import formats
from attnscope.profile.render.formats import write_all
from attnscope.profile.trace import json_stream
from attnscope.profile.trace.reader import read_trace

HERE = os.getpid()


def test_a_child_works_beside_and_returns_what_its_work_returns() -> None:
    begin = time.monotonic()
    both = [Child(lambda: [time.sleep(0.5), os.getpid()]) for _ in range(2)]
    assert not both[0].ended()
    pids = [one.result()[1] for one in both]
    assert time.monotonic() - begin < 0.95 and len({HERE, *pids}) == 3
    assert both[0].result()[1] == pids[0], "asked twice"


def spin(seconds: float) -> None:
    while time.process_time() < seconds:
        pass


def test_the_programs_children_are_counted_without_these() -> None:
    before = launcher.child_seconds()
    Child(lambda: spin(time.process_time() + 0.2)).result()
    assert child.child_seconds() > 0.19 and launcher.child_seconds() - before < 0.05


def in_child(act: Callable[[], object]) -> int:
    if os.getpid() != HERE:
        act()
    return os.getpid()


def fail() -> None:
    raise ValueError("mine")


@pytest.mark.parametrize(
    "act",
    [fail, lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: time.sleep(60)],
    ids=["fails", "is killed", "hangs"],
)
def test_work_that_a_child_does_not_end_is_done_here(
    act: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "SILENT_S", 0.1)
    assert Child(lambda: in_child(act)).result() == HERE


def test_an_error_of_the_work_and_a_fork_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="mine"):
        Child(fail).result()

    def no_process() -> int:
        raise BlockingIOError("no process is left")

    monkeypatch.setattr(os, "fork", no_process)
    assert Child(os.getpid).result() == HERE


@pytest.mark.parametrize("suffix", [".tmp", ""])
def test_a_trace_is_read_while_a_child_writes_it(suffix: str, tmp_path: Path) -> None:
    """PyTorch renames its file last."""
    whole = write_token_loop(tmp_path / "whole.json", 2)
    text, path = whole.read_text(), tmp_path / "trace.json"

    def write() -> None:
        time.sleep(0.05)
        with open(f"{path}{suffix}", "w") as file:
            for at in range(0, len(text), len(text) // 20):
                file.write(text[at : at + len(text) // 20])
                file.flush()
                time.sleep(0.005)
        os.rename(f"{path}{suffix}", path)

    writer = Child(write)
    found, known = read_trace(path, writer), read_trace(whole)
    assert not writer.failed and (found.cpu, found.gpu) == (known.cpu, known.gpu)


@pytest.mark.parametrize("act", ["works", "fails", "is cut", "hangs"])
def test_a_recording_is_whole_whatever_becomes_of_the_child(
    act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(profiler: object, path: str) -> None:
        if os.getpid() != HERE and act != "works":
            Path(path).write_text('{"traceEvents": [' if act == "is cut" else "")
            time.sleep(60 if act == "hangs" else 0)
            fail()
        original(profiler, path)

    owner = torch.autograd.profiler.profile
    original = owner.export_chrome_trace
    monkeypatch.setattr(owner, "export_chrome_trace", export)
    monkeypatch.setattr(recorder, "LONG_STOP_S", -1.0)
    monkeypatch.setattr(json_stream, "SILENT_S", 0.2)
    one = recorder.Recorder("loop", recorder.Options())
    one.start()
    for _ in range(20):
        torch.ones(8).neg()
    found = one.stop()
    assert found.operators().set_index("name").calls["aten::neg"] == 20
    assert found.source.stat().st_size > 10_000


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_children_write_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_token_loop(tmp_path / "loop.json", 1)
    alone = write_all(Profile.read(path), tmp_path / "alone")
    monkeypatch.setattr(child, "EVENTS", 1)
    monkeypatch.setattr(child, "CORES", 1)
    begun: list[Child] = []
    monkeypatch.setattr(formats, "Child", lambda work: begun.append(Child(work)) or begun[-1])
    assert write_all(Profile.read(path), tmp_path / "beside") == alone.replace("alone", "beside")
    assert contents(tmp_path / "alone") == contents(tmp_path / "beside")
    assert len(begun) == 1 and not any(one.failed for one in begun)


def test_a_file_that_a_child_cannot_write_is_an_error_and_the_others_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "EVENTS", 1)
    monkeypatch.setattr(child, "CORES", 1)
    (tmp_path / "out/trace.json").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        write_all(Profile.read(write_token_loop(tmp_path / "loop.json", 1)), tmp_path / "out")
    assert {"links.csv", "profile.json", "profile.md", "profile.html"} < {
        path.name for path in (tmp_path / "out").iterdir()
    }
