"""One detector, one table and one output format, each added in a few lines."""

from __future__ import annotations

import json
from pathlib import Path

import pandas
import pytest
from made_trace import RECORDED

from attnscope.profile import Profile
from attnscope.profile.analysis.catalog import TABLES, Recorded, Table
from attnscope.profile.analysis.findings import DETECTORS, Finding
from attnscope.profile.analysis.flops import FlopCounts
from attnscope.profile.attribution.owners import Attribution
from attnscope.profile.render.formats import FORMATS, write_all


def test_a_new_detector_is_on_the_terminal_in_json_and_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def many_kernels(attribution: Attribution, counts: FlopCounts) -> Finding:
        rows = [{"kernels": len(attribution.trace.kernels)}]
        return Finding("many kernels", "there are many", rows, "Fuse them.")

    monkeypatch.setattr("attnscope.profile.analysis.findings.DETECTORS", [*DETECTORS, many_kernels])
    profile = Profile.read(RECORDED / "train.json.gz")
    profile.print()
    assert "many kernels: there are many" in capsys.readouterr().out
    profile.to_json(tmp_path / "p.json")
    finding = json.loads((tmp_path / "p.json").read_text())["findings"][-1]
    assert finding["evidence"] == [{"kernels": 164}]
    profile.to_html(tmp_path / "p.html")
    assert "Fuse them." in (tmp_path / "p.html").read_text()


def test_a_new_table_is_in_every_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def by_stream(of: Recorded) -> pandas.DataFrame:
        kernels = of.table("links").query("kind == 'kernel'")
        return kernels.groupby("stream", as_index=False).agg(total_us=("gpu_us", "sum"))

    monkeypatch.setitem(TABLES, "streams", Table(by_stream, title="Time by stream"))
    profile = Profile.read(RECORDED / "streams.json.gz")
    profile.print()
    assert "\nTime by stream\n" in capsys.readouterr().out
    write_all(profile, tmp_path)
    rows = pandas.read_csv(tmp_path / "streams.csv")
    assert len(rows) > 1 and rows["total_us"].sum() == pytest.approx(
        profile.attribution.total_ns / 1e3
    )
    assert len(json.loads((tmp_path / "profile.json").read_text())["tables"]["streams"]) == len(
        rows
    )
    assert "Time by stream" in (tmp_path / "profile.html").read_text()


def test_a_new_output_format_is_written_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def markdown(profile: object, folder: Path) -> list[Path]:
        (folder / "profile.md").write_text("# A profile\n")
        return [folder / "profile.md"]

    monkeypatch.setitem(FORMATS, "markdown", markdown)
    said = write_all(Profile.read(RECORDED / "ops.json.gz"), tmp_path)
    assert "profile.md" in said and (tmp_path / "profile.md").exists()
