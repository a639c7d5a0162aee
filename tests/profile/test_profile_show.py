"""Reported speed, order and number of rows, in the terminal and in files."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from made_trace import H200, RECORDED, MadeTrace

from attnscope.profile.api import Profile
from attnscope.profile.render.files import to_json, write_csv
from attnscope.profile.render.html import write_html
from attnscope.profile.render.terminal import SORTED


def read(name: str) -> Profile:
    return Profile.read(RECORDED / f"{name}.json.gz")


def gemm(folder: Path, microseconds: float, device: dict[str, Any] = H200) -> Profile:
    """A product of 2 * 4096**3 FLOPs: 139 us at the peak of an H200."""
    made = MadeTrace(device)
    made.range("step", 0, 100)
    made.op("aten::mm", 1, 10, [[4096, 4096], [4096, 4096]])
    made.kernel("nvjet_sm90_tst_64x64", 20, microseconds, launch=5)
    made.attribution(folder)
    (path,) = folder.glob("*.json")
    return Profile.read(path)


def files(found: Profile, folder: Path) -> tuple[dict[str, Any], list[dict[str, str]], str]:
    """The JSON, the operators' CSV and the page."""
    to_json(found, folder / "out.json")
    write_csv(found, folder / "csv")
    write_html(found, folder / "out.html")
    with (folder / "csv" / "operators.csv").open() as file:
        rows = list(csv.DictReader(file))
    content = json.loads((folder / "out.json").read_text())
    return content, rows, (folder / "out.html").read_text()


def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")


# Speed


def test_an_mfu_above_the_peak_is_printed_nowhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wide(monkeypatch)
    found = gemm(tmp_path, 139 / 4.25)
    why = "above the peak, bfloat16 989.4 TFLOP/s: FLOPs or time cannot be right"
    found.print()
    out = capsys.readouterr().out
    assert f"FLOPs: {why}." in out and "425" not in out
    assert not re.search(r"MFU +|MFU$|TFLOP/s$", "\n".join(out.split("\n")[3:6]))
    content, rows, text = files(found, tmp_path)
    for row in (content["tables"]["operators"][0], content["tables"]["stages"][0]):
        assert (row["mfu"], row["tflops"], row["mfu_at_clock"]) == (None, None, None)
        assert row["flops"] == 2 * 4096**3 and row["flops_reason"] == why
    assert (rows[0]["mfu"], rows[0]["flops_reason"]) == ("", why)
    assert why in text and "MFU %" not in text


def test_the_counting_rule_and_the_peak_stand_beside_the_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wide(monkeypatch)
    found = read("ops")
    found.print()
    said = capsys.readouterr().out
    content, rows, text = files(found, tmp_path)
    causal = "attention 2 (D + Dv) a pair, visible pairs of a causal mask"
    for out in (said, text):
        assert f"FLOPs are counted as: 2 m n k; {causal}." in out
        assert "dense peak of H200 SXM: bfloat16 989.4 TFLOP/s (NVIDIA H200 datasheet)." in out
    assert content["flops_rules"] == ["2 m n k", causal]
    peaks = content["dense_peaks"]
    assert (peaks["device"], peaks["source"]) == ("H200 SXM", "NVIDIA H200 datasheet")
    assert peaks["tflops"]["bfloat16"] == 989.4 and content["dense_peaks_reason"] is None
    ours = next(r for r in content["tables"]["operators"] if r["name"] == "attnscope::forward")
    assert (ours["flops_rule"], ours["peak"]) == (causal, "bfloat16 989.4 TFLOP/s")
    assert ours["mfu"] == pytest.approx(ours["tflops"] / 989.4)
    row = next(row for row in rows if row["name"] == "aten::mm")
    assert (row["flops_rule"], row["peak"]) == ("2 m n k", "bfloat16 989.4 TFLOP/s")


def test_a_card_that_is_not_known_has_a_rule_and_no_peak(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = gemm(tmp_path, 200, H200 | {"name": "NVIDIA H300"})
    found.print()
    out = capsys.readouterr().out
    assert "FLOPs are counted as: 2 m n k." in out and "MFU is relative" not in out
    content, _, _ = files(found, tmp_path)
    assert content["dense_peaks"] is None
    assert "'NVIDIA H300': its peaks are not known" in content["dense_peaks_reason"]
    row = content["tables"]["operators"][0]
    assert row["peak"] is None and row["flops_rule"] == "2 m n k" and row["tflops"] > 0


# Rows


@pytest.mark.parametrize("key", SORTED)
def test_rows_can_be_sorted_by_every_column_with_numbers(
    key: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wide(monkeypatch)
    found = read("train")
    table = found.operators()
    table = table[~table["name"].str.startswith("(")]
    best = table.sort_values(key, ascending=key == "name", kind="stable").iloc[0]["name"]
    found.print(sort=key, top=1)
    rows = capsys.readouterr().out.split("\nOperators\n")[1].splitlines()
    assert rows[2].startswith(best.replace("autograd::engine::evaluate_function", "engine")[:20])


def test_the_columns_to_sort_by_are_all_with_numbers() -> None:
    table = read("ops").operators()
    texts = {"flops_rule", "peak", "flops_reason"}
    assert set(SORTED) == set(table.columns) - texts
    with pytest.raises(ValueError, match="sort must be a column .*, got 'peak'. .* name, calls, "):
        read("ops").print(sort="peak")


@pytest.mark.parametrize("top", [-1, 0, 2.5, "3", None])
def test_a_number_of_rows_that_is_none_is_refused(
    top: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=f"top must be an integer of at least 1, got {top!r}"):
        read("ops").print(top=top)
    assert capsys.readouterr().out == ""


# Files


def test_files_have_every_table(tmp_path: Path) -> None:
    found = read("stack")
    content, _, _ = files(found, tmp_path)
    tables = content["tables"]
    assert len(tables["links"]) == len(found.trace.gpu) == len(found.links())
    assert tables["links"][0]["launch"] and "frames" in tables["links"][0]
    assert [row["line"] for row in tables["lines"]] == list(found.lines()["line"])
    assert sum(row["kernels"] for row in tables["lines"]) == len(found.trace.kernels)
    assert {path.stem for path in (tmp_path / "csv").iterdir()} == set(tables)
    assert {"links", "lines", "memory", "allocations", "steps", "modules"} <= set(tables)


def test_json_names_the_source_of_occupancy_and_set_up(tmp_path: Path) -> None:
    content, _, _ = files(read("train"), tmp_path)
    assert content["efficiency"]["occupancy_from"].startswith("the profiler's for 88 kernels")
    steps = content["steps"]
    assert steps["setup_us"] == pytest.approx(6370.034) and steps["setup_reason"] is None
    assert "'forward'" in steps["rule"]
    content, _, _ = files(read("cold"), tmp_path)
    assert content["steps"]["setup_us"] is None
    assert content["steps"]["setup_reason"] == "there is one step only"


def test_a_program_without_python_frames_has_no_lines(tmp_path: Path) -> None:
    found = read("ops")
    assert found.lines().empty and list(found.lines().columns)[0] == "line"
    content, _, _ = files(found, tmp_path)
    assert "lines" not in content["tables"] and "links" in content["tables"]
