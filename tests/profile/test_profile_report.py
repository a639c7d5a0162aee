"""Files of a profile: a self-contained page, strict JSON, CSV, a trace with added rows."""

import csv
import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from made_trace import RECORDED, RECORDINGS, kernel, launch, named, op, write_trace
from step_trace import PLAIN, step

from attnscope.profile import profile
from attnscope.profile.analysis.tree import Node, icicle
from attnscope.profile.api import Profile
from attnscope.profile.attribution.owners import Attribution
from attnscope.profile.errors import ProfileError
from attnscope.profile.render.chrome_trace import write_chrome_trace
from attnscope.profile.render.document import Document, Section, cell, number, rows_of
from attnscope.profile.render.figures import activity
from attnscope.profile.render.files import profile_tables, to_json, write_csv
from attnscope.profile.render.html import write_html
from attnscope.profile.trace.reader import read_trace

VOID = {"meta", "input", "br"}


class Page(HTMLParser):
    """Parse a page and refuse malformed HTML."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.scripts: dict[str, str] = {}
        self.ids: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.script: str | None = None
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        about = dict(attrs)
        if "id" in about:
            self.ids.append(str(about["id"]))
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag == "script":
            self.script = str(about.get("id"))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, self.getpos()
        self.script = None

    def handle_data(self, data: str) -> None:
        if self.script is not None:
            self.scripts[self.script] = data
        elif self.tables and self.open[-1] in ("td", "button"):
            self.tables[-1][-1][-1] += data


def read(name: str) -> Profile:
    return Profile.read(RECORDED / f"{name}.json.gz")


def page(profile: Profile, folder: Path) -> tuple[str, Page]:
    write_html(profile, folder / "page.html")
    text = (folder / "page.html").read_text()
    return text, Page(text)


def strict(path: Path) -> Any:
    def refuse(token: str) -> None:
        raise AssertionError(token)

    return json.loads(path.read_text(), parse_constant=refuse)


# The page


@pytest.mark.parametrize("name", RECORDINGS)
def test_the_page_is_whole_and_needs_nothing_else(name: str, tmp_path: Path) -> None:
    text, parsed = page(read(name), tmp_path)
    assert len(parsed.ids) == len(set(parsed.ids))
    links = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert all(link.startswith("#") for link in links)
    assert "@import" not in text
    assert set(re.findall(r"https?://[\w./]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    for target in re.findall(r'<a href="#([^"]+)"', text):
        assert target in parsed.ids


def test_the_page_has_every_row_of_its_tables(tmp_path: Path) -> None:
    found = read("train")
    text, parsed = page(found, tmp_path)
    assert "100.00 % of 651.9 us GPU time owned by ops" in text
    tables = {table[0][0]: table for table in reversed(parsed.tables)}
    operators, kernels, stages = tables["op"], tables["kernel"], tables["range"]
    assert len(operators) == len(found.operators()) + 1
    assert len(kernels) == len(found.kernels()) + 1
    assert [row[0].strip("\N{NO-BREAK SPACE}") for row in stages[1:]] == list(
        found.stages()["range"]
    )
    column = operators[0].index("self GPU us")
    shown = sum(float(row[column].replace(",", "")) for row in operators[1:])
    assert shown == pytest.approx(651.9, rel=1e-3)
    assert "MFU %" in stages[0]
    assert text.count("<svg") == 3


def test_the_tree_on_the_page_is_the_tree(tmp_path: Path) -> None:
    found = read("train")
    _, parsed = page(found, tmp_path)
    assert json.loads(parsed.scripts["tree-data"]) == icicle(found.attribution).as_dict()


def test_names_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    evil = '</script><b onclick="x">&'
    events = [op(evil, 0, 10), launch(1, 2), kernel(1, 20, 30, evil), named(evil, 0, 40)]
    found = Profile.read(write_trace(tmp_path / "t.json", *events))
    text, parsed = page(found, tmp_path)
    assert "<b onclick" not in text
    assert json.loads(parsed.scripts["tree-data"])["children"][0]["name"] == evil


@pytest.mark.parametrize("name", ["costs $x^$ and $\\frac$", "_hidden", "", "a\nb"])
def test_any_name_can_be_drawn(name: str, tmp_path: Path) -> None:
    events = [named(name, 0, 40), op(name, 0, 10), launch(1, 2), kernel(1, 20, 30, name)]
    found = Profile.read(write_trace(tmp_path / "t.json", *events))
    text, _ = page(found, tmp_path)
    assert text.count("<svg") == 3
    write_csv(found, tmp_path)
    assert added(found, tmp_path / "added.json")


def test_what_is_missing_is_reported_on_the_page(tmp_path: Path) -> None:
    events = [op("a", 0, 10), launch(1, 2), kernel(1, 20, 30), launch(2, 5)]
    found = Profile.read(write_trace(tmp_path / "t.json", *events))
    found = dataclasses.replace(found, interrupted="KeyError: 3")
    text, _ = page(found, tmp_path)
    assert "INCOMPLETE: 1 of 2 launches have no kernel" in text
    assert "Ended by KeyError: 3" in text
    assert "No MFU: the trace names no device" in text


def test_a_page_of_a_program_without_kernels(tmp_path: Path) -> None:
    with profile("cpu only") as found:
        torch.ones(4, 4) @ torch.ones(4, 4)
    found.to_html(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "no GPU time: no kernel ran in the region" in text
    assert "aten::mm" in text
    assert "tree-data" not in text
    found.to_json(tmp_path / "p.json")
    content = strict(tmp_path / "p.json")
    assert content["attribution"]["share"] is None
    assert content["env"]["torch"] == torch.__version__
    assert (content["sm_clock_mhz"] is None) == bool(content["sm_clock_reason"])
    found.export_chrome_trace(tmp_path / "t.json")
    assert len(read_trace(tmp_path / "t.json").cpu) >= len(found.trace.cpu)


# The tree


@pytest.mark.parametrize("name", RECORDINGS)
def test_the_tree_holds_all_kernel_time_once(name: str) -> None:
    owners = read(name).attribution
    root = icicle(owners)
    assert root.ns == owners.total_ns
    assert root.kernels == len(owners.trace.kernels)

    def leaves(node: Node) -> int:
        return sum(map(leaves, node.children.values())) if node.children else node.ns

    assert leaves(root) == owners.total_ns


def test_the_tree_goes_from_stages_over_ops_to_kernels(tmp_path: Path) -> None:
    node: Node = icicle(step(tmp_path).attribution)
    for key in (
        ("stage", "forward"),
        ("stage", "Self-Attention"),
        ("stage", "Attention Core"),
        ("op", "aten::_softmax"),
    ):
        node = node.children[key]
    assert node.ns == 20_000
    (leaf,) = node.children.values()
    assert (leaf.kind, leaf.category) == ("kernel", "softmax")
    backward = icicle(step(tmp_path).attribution).children["stage", "backward"]
    assert set(backward.children) == {("op", "aten::mm"), ("op", "aten::bmm")}


def test_small_nodes_are_put_together_and_no_time_is_lost(tmp_path: Path) -> None:
    small = tuple(("aten::mul", [[2]], f"tiny_{i}", 1) for i in range(5))
    large = (("aten::bmm", [[1, 1, 1]] * 2, "nvjet_x", 90_000),)
    owners = step(tmp_path, core=(*large, *small))
    node = icicle(owners.attribution)
    assert node.ns == owners.attribution.total_ns
    for name in ("forward", "Self-Attention", "Attention Core"):
        node = node.children["stage", name]
    # A single small child keeps its name; several under one parent are merged without names.
    mul = node.children["op", "aten::mul"]
    (rest,) = mul.children.values()
    assert (rest.kind, rest.name, rest.ns, rest.kernels) == ("rest", "(5 smaller)", 5000, 5)


# Files


@pytest.mark.parametrize("name", RECORDINGS)
def test_json_is_strict_and_has_the_tables(name: str, tmp_path: Path) -> None:
    found = read(name)
    to_json(found, tmp_path / "p.json")
    content = strict(tmp_path / "p.json")
    assert content["schema"] == 1
    assert (content["env"], content["env_reason"]) == (None, "the trace was read from a file")
    assert set(content["tables"]) == set(profile_tables(found))
    assert content["audit"]["sentinels"] == found.trace.sentinels
    assert content["sm_clock_reason"] == "the trace was read from a file"
    total = sum(row["total_us"] for row in content["tables"]["kernels"])
    assert total == pytest.approx(content["attribution"]["total_us"])
    assert content["attribution"]["owned_us"] <= content["attribution"]["total_us"] + 1e-6


def test_a_kernel_named_nan_stays_a_name(tmp_path: Path) -> None:
    events = [op("NaN", 0, 10), launch(1, 2), kernel(1, 20, 30, "NaN")]
    found = Profile.read(write_trace(tmp_path / "t.json", *events))
    to_json(found, tmp_path / "p.json")
    (row,) = strict(tmp_path / "p.json")["tables"]["kernels"]
    assert (row["symbol"], row["op"]) == ("NaN", "NaN")
    operators = strict(tmp_path / "p.json")["tables"]["operators"]
    assert operators[0]["tflops"] is None
    assert operators[0]["flops_reason"]


def test_csv_of_an_earlier_profile_is_removed(tmp_path: Path) -> None:
    (tmp_path / "modules.csv").write_text("of an earlier profile")
    write_csv(read("ops"), tmp_path)
    assert (tmp_path / "modules.csv").exists()  # or another program's
    (tmp_path / "profile.json").write_text("{}")
    write_csv(read("ops"), tmp_path)
    assert not (tmp_path / "modules.csv").exists()


def test_csv_has_a_file_for_each_table(tmp_path: Path) -> None:
    found = read("stack")
    (tmp_path / "csv").mkdir()
    files = write_csv(found, tmp_path / "csv")
    assert {path.stem for path in files} == set(profile_tables(found))
    with (tmp_path / "csv" / "allocations.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(found.trace.memory)
    assert {row["device"] for row in rows} >= {"cuda:0"}
    assert int(rows[-1]["allocated_bytes"]) == found.trace.memory[-1].allocated


@pytest.mark.parametrize("name", RECORDINGS)
@pytest.mark.parametrize("suffix", ["json", "json.gz"])
def test_the_trace_has_our_rows_and_loses_none(name: str, suffix: str, tmp_path: Path) -> None:
    found = read(name)
    path = tmp_path / f"t.{suffix}"
    write_chrome_trace(found, path)
    again = read_trace(path)
    assert [(k.name, k.start, k.end) for k in again.gpu] == [
        (k.name, k.start, k.end) for k in found.trace.gpu
    ]
    assert len(again.cpu) == len(found.trace.cpu)


@pytest.mark.parametrize("link", [False, True])
def test_the_trace_that_was_read_is_not_written_over(link: bool, tmp_path: Path) -> None:
    source = write_trace(tmp_path / "t.json", op("a", 0, 9), launch(1, 1), kernel(1, 5, 9))
    before, target = source.read_text(), source
    if link:
        target = tmp_path / "link.json"
        target.symlink_to(source)
    with pytest.raises(ValueError, match="path must not be the trace that was read, got"):
        write_chrome_trace(Profile.read(source), target)
    assert source.read_text() == before


def test_a_trace_of_one_cuda_call_has_every_file(tmp_path: Path) -> None:
    call = launch(1, 5, "cudaDeviceSynchronize")
    found = Profile.read(write_trace(tmp_path / "t.json", call))
    text, _ = page(found, tmp_path)
    assert "no op, no range" in text or "no kernel" in text
    to_json(found, tmp_path / "p.json")
    content = strict(tmp_path / "p.json")
    assert content["efficiency"]["gpu_utilisation"] is None
    assert len(content["efficiency_reasons"]) == 4
    write_csv(found, tmp_path / "csv")
    write_chrome_trace(found, tmp_path / "added.json")
    assert strict(tmp_path / "added.json")["traceEvents"] == [call]


def added(found: Profile, path: Path) -> list[dict[str, Any]]:
    write_chrome_trace(found, path)
    events = strict(path)["traceEvents"]
    names = [e for e in events if e["ph"] == "M" and e["args"].get("name") == "attnscope"]
    (process,) = names
    return [event for event in events if event["pid"] == process["pid"]]


@pytest.mark.parametrize("name", ["ops", "train", "streams", "graph_both"])
def test_our_rows_are_aligned_to_gpu_time(name: str, tmp_path: Path) -> None:
    """Slices of a track contain every kernel of the stream and do not overlap."""
    found = read(name)
    rows = added(found, tmp_path / "t.json")
    tracks = {e["tid"]: e["args"]["name"] for e in rows if e["name"] == "thread_name"}
    streams = {kernel.stream for kernel in found.trace.kernels}
    assert len(tracks) == 2 * len(streams)
    kernels = [e for e in strict(tmp_path / "t.json")["traceEvents"] if e.get("cat") == "kernel"]
    for track, title in tracks.items():
        mine = [e for e in rows if e["ph"] == "X" and e["tid"] == track]
        stream = int(title.split()[-1])
        inside = [k for k in kernels if k["args"]["stream"] == stream]
        assert sum(e["args"]["kernels"] for e in mine) == len(inside)
        assert min(e["ts"] for e in mine) == pytest.approx(min(k["ts"] for k in inside), abs=2e-3)
        ends = [e["ts"] + e["dur"] for e in mine]
        assert max(ends) == pytest.approx(max(k["ts"] + k["dur"] for k in inside), abs=2e-3)
        for end, after in zip(ends, mine[1:], strict=False):
            assert end <= after["ts"] + 2e-3


def test_rows_name_the_stage_and_the_op(tmp_path: Path) -> None:
    step(tmp_path, PLAIN)
    rows = added(Profile.read(tmp_path / "step.json"), tmp_path / "t.json")
    stages = [e["name"] for e in rows if e.get("cat") == "attnscope_stage"]
    assert stages[:3] == ["forward/Add & Norm", "forward/Self-Attention/Attention Core"] + [
        "forward/MLP"
    ]
    softmax = next(e for e in rows if e["name"] == "aten::_softmax")
    assert softmax["args"]["kernel us"] == 20.0
    assert softmax["args"]["stage"] == "forward/Self-Attention/Attention Core"
    backward = [e for e in rows if e.get("args", {}).get("forward op") == "aten::mm"]
    assert len(backward) == 1


# Parts


def test_numbers_have_four_digits() -> None:
    assert [number(v) for v in (0.0, 1.5, 12345.678, 0.00012345, 123.44, -3.2, 1e-9)] == [
        "0", "1.500", "12,346", "0.000123", "123.4", "-3.200", "1e-09",
    ]  # fmt: skip
    assert cell(None) == ("-", "")
    assert cell(1234567) == ("1,234,567", 1234567)


def test_gaps_of_a_table_are_none() -> None:
    rows = rows_of(read("train").operators())
    assert {type(row["calls"]) for row in rows} == {int}
    assert any(row["tflops"] is None for row in rows)
    assert not any(isinstance(v, float) and v != v for row in rows for v in row.values())


def test_columns_without_any_value_are_left_out() -> None:
    part = Section("t", "", [{"a": 1, "b": None, "c": None}, {"a": 2, "b": None, "c": "x"}])
    assert part.columns == ["a", "c"]
    assert part.numbers == {"a"}


def test_a_long_table_takes_a_time_that_grows_with_its_rows(tmp_path: Path) -> None:
    """A page of 20,000 rows took hours when each cell scanned every row."""
    rows = [{"name": f"row {i}", "us": float(i)} for i in range(20_000)]
    Document("long", [], [Section("Rows", "", rows)]).write_html(tmp_path / "long.html")
    assert (tmp_path / "long.html").read_text().count("<tr>") == 20_001


def test_a_tree_whose_parts_are_not_the_whole_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(node: Node, ns: int, kernels: int) -> None:
        node.ns += ns * (1 + (node.kind == "kernel"))

    monkeypatch.setattr(Node, "add", twice)
    with pytest.raises(ProfileError, match="of its parts, got"):
        icicle(read("ops").attribution)


def test_kernels_that_took_no_time_have_no_activity(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.json", op("a", 0, 9), launch(1, 1), kernel(1, 5, 5))
    assert activity(Attribution(read_trace(trace))) is None
