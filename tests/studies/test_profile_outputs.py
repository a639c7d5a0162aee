"""Folders, records and reports of the scripts in profiling/: no lost results, one line per write
error."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import typer

from attnscope.common.options import make_folder
from attnscope.common.results import Results
from attnscope.profile.render.document import Document
from attnscope.studies.outputs import bad_output, finish, start

ENV = {"device": "cpu"}


def saved(stem: Path) -> Results:
    results = start(stem, ENV)
    results.rows.append({"model": "tiny"})
    results.save()
    return results


def test_a_folder_is_made_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ValueError, match="output must be a writable folder, got /dev/null: File exists"
    ):
        make_folder(Path("/dev/null"))
    with pytest.raises(
        ValueError, match="output must be a writable folder, got /proc/1"
    ):  # fails for root too
        make_folder(Path("/proc/1"))

    def full(**options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(ValueError, match=f"got {tmp_path}: No space left on device"):
        make_folder(tmp_path)


@pytest.mark.parametrize(
    ("resume", "says"),
    [
        (None, "lm.json, which exists and is kept. Give another --output$"),
        (False, "kept. Give another --output, or go on with it by --resume$"),
    ],
)
def test_records_are_not_replaced(tmp_path: Path, resume: bool | None, says: str) -> None:
    before = saved(tmp_path / "lm").path.read_bytes()
    with pytest.raises(ValueError, match=says):
        start(tmp_path / "lm", ENV, resume)
    assert (tmp_path / "lm.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["lm.json"]


def test_records_are_gone_on_with(tmp_path: Path) -> None:
    assert start(tmp_path / "lm", ENV, True).rows == []
    saved(tmp_path / "lm")
    assert start(tmp_path / "lm", ENV, True).rows == [{"model": "tiny"}]


@pytest.mark.parametrize("suffix", [".json", ".md", ".html"])
@pytest.mark.parametrize("resume", [True, False])
def test_a_folder_in_the_place_of_a_file(tmp_path: Path, suffix: str, resume: bool) -> None:
    (tmp_path / f"lm{suffix}").mkdir()
    with pytest.raises(ValueError, match=f"output must have no folder lm{suffix}, got"):
        start(tmp_path / "lm", ENV, resume)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must be a result file in JSON, got an error: Expecting value"),
        ("\xff\x00", "must be a result file in JSON"),
        ("[]", "must be a result file with schema, env and rows"),
        (json.dumps({"schema": 2, "env": ENV, "rows": []}), "must have schema 1, got schema 2"),
        (
            json.dumps({"schema": 1, "env": [], "rows": []}),
            "env must be an object",
        ),
        (
            json.dumps({"schema": 1, "env": ENV, "rows": 3}),
            "and rows a list",
        ),
        (
            json.dumps({"schema": 1, "env": {"device": "cuda"}, "rows": []}),
            "resume: device must be 'cuda', as in .*, got 'cpu'",
        ),
    ],
)
def test_what_is_no_result_file_is_not_gone_on_with(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "lm.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=says):
        start(tmp_path / "lm", ENV, True)
    assert path.read_text(encoding="latin-1") == text


def test_a_file_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = start(tmp_path / "lm", ENV)
    results.path.mkdir()  # another program creates the folder
    with pytest.raises(typer.Exit) as end, bad_output("lm", tmp_path):
        results.save()
    assert end.value.exit_code == 2
    with pytest.raises(typer.Exit), bad_output("lm", tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    said = "".join(capsys.readouterr())
    assert f"lm: output: {results.path}: Is a directory" in said
    assert f"lm: output: {tmp_path}: No space left on device" in said


def test_a_report_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "lm")
    (tmp_path / "lm.html").mkdir()
    with pytest.raises(typer.Exit) as end:
        finish("lm", lambda: Document("Title", [], []), tmp_path / "lm")
    assert end.value.exit_code == 2
    assert f"lm: output: {tmp_path}/lm.html: Is a directory" in "".join(capsys.readouterr())
    assert json.loads((tmp_path / "lm.json").read_text())["rows"] == [{"model": "tiny"}]
