"""The sqlite reader and the projection of ranges, against a slow search by the same rules."""

import csv
import lzma
import random
import sqlite3
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from made_nsys import GLOBAL_PID, PID, TID, MadeReport, large_report

from attnscope.nsight.analysis import Analysis
from attnscope.nsight.captures import merge
from attnscope.nsight.nsys_report import findings, nsys_report
from attnscope.nsight.output import short_markdown
from attnscope.nsight.projection import Projection, matches, parse_range
from attnscope.nsight.recording import RecordingError, read_recording
from attnscope.nsight.scheduling import (
    CAUSES,
    allocation_rows,
    device_rows,
    gap_rows,
    memory_rows,
    stream_rows,
)
from attnscope.nsight.stats_csv import read_summary

RECORDED = Path(__file__).parents[1] / "support/nsys"
K = "void f<float>(float*)"


def nest(random_, made, start, end, thread, depth, ranges):
    """Fill [start, end] with ranges that lie in each other."""
    at = start
    while depth < 4 and end - at > 8 and random_.random() < 0.8:
        low = at + random_.randint(1, 3)
        high = min(low + random_.randint(2, max((end - at) // 2, 3)), end - 1)
        if low >= high:
            break
        name, domain = random_.choice("abc"), random_.choice(("", "attnscope"))
        made.range(name, low, high, domain, random_.random() < 0.5, thread)
        ranges.append((thread, low * 1000, high * 1000, name, domain))
        nest(random_, made, low, high, thread, depth + 1, ranges)
        at = high


def open_at(ranges, thread, time_ns):
    """Ranges open on a thread, the outermost first; those of the main thread where it has none."""
    own = [r for r in ranges if r[0] == thread and r[1] <= time_ns < r[2]]
    own.sort(key=lambda r: (r[1], -r[2]))
    if thread == TID:
        return own
    # An outermost range of another thread lies in the main thread's that contain it.
    start, end = (own[0][1], own[0][2]) if own else (time_ns, time_ns)
    around = [r for r in open_at(ranges, TID, start) if r[2] >= end]
    return around + own


@pytest.mark.parametrize("seed", range(12))
def test_stages_are_those_of_a_search_through_all_ranges(tmp_path, seed):
    chance, made, ranges, kernels = random.Random(seed), MadeReport(), [], []
    for thread in (TID, TID + 1, TID + 2):
        nest(chance, made, 0, 1000, thread, 0, ranges)
    for _ in range(150):
        thread, launched = chance.choice((TID, TID + 1, TID + 2)), chance.randint(0, 1000)
        start = launched + 0.5 + chance.random() * 50
        end = start + 0.001 + chance.random() * 20
        made.kernel(K, launched + 0.25, start, end, thread, stream=chance.choice((7, 13)))
        kernels.append((thread, launched * 1000 + 250, round(start * 1e3), round(end * 1e3)))
    expected = {}
    for thread, launched, start, end in kernels:
        around = open_at(ranges, thread, launched)
        for depth in range(len(around)):
            path = tuple(r[3] for r in around[: depth + 1])
            domains = tuple(r[4] for r in around[: depth + 1])
            stage = expected.setdefault((path, domains), {"work": [], "own": 0, "by range": {}})
            stage["work"].append((start, end))
            stage["own"] += (end - start) * (depth == len(around) - 1)
            stage["by range"].setdefault(around[depth], []).append((start, end))
    found = Projection(read_recording(made.save(tmp_path / "r.sqlite"))).stages()
    assert len(found) == len(expected) > 5
    for stage in found:
        domains = tuple(domain for _, domain in stage.names)
        wanted = expected[stage.path, domains]
        assert stage.kernels == len(wanted["work"])
        assert stage.total == sum(end - start for start, end in wanted["work"])
        assert stage.own == wanted["own"]
        covered = set()
        for start, end in wanted["work"]:
            covered.update(range(start, end))
        assert stage.busy == len(covered)
        assert stage.span == sum(
            max(e for _, e in w) - min(s for s, _ in w) for w in wanted["by range"].values()
        )


def test_launches_are_found_by_process_and_by_time(tmp_path):
    made = MadeReport()
    for pid, name in ((PID, "a"), (PID + 1, "b")):  # the same correlation id in two processes
        made.range(name, 0, 100, thread=pid, pid=pid)
        made.kernel(K, 10, 20, 30, correlation=7, pid=pid, thread=pid)
    made.range("later", 200, 300)
    made.kernel(K, 210, 220, 230, correlation=7)  # an id that repeats in its process
    made.kernel(K, None, 240, 250, correlation=99)  # its launch is not in the report
    projection = Projection(read_recording(made.save(tmp_path / "r.sqlite")))
    names = [projection.names_of(int(projection.path[one])) for one in projection.inner[:-1]]
    assert names == [(("a", ""),), (("b", ""),), (("later", ""),)] and projection.inner[-1] < 0


def test_a_start_end_range_has_the_work_of_every_thread_of_its_process(tmp_path):
    made = MadeReport()
    made.range("around", 0, 100, "attnscope", kind=60)
    made.range("inner", 5, 15, "attnscope")
    made.kernel(K, 10, 20, 30)
    made.kernel(K, 50, 60, 90, thread=TID + 5)
    made.kernel(K, 150, 160, 190)
    of = Analysis(read_recording(made.save(tmp_path / "r.sqlite")), "around@attnscope")
    rows = {row["range"]: row for row in of.stage_rows()}
    assert rows["around (start/end)"]["kernels"] == 2
    assert rows["around (start/end)"]["busy ms"] == pytest.approx(0.04)
    assert rows["inner"]["kernels"] == 1


def test_names_of_autograd_ops_are_grouped_without_their_numbers(tmp_path):
    made = MadeReport()
    for at, name in enumerate(("aten::mm, seq = 4, op_id = 2", "aten::mm, seq = 5", "aten::mm")):
        made.range(name, at * 100, at * 100 + 50, registered=False)
        made.kernel(K, at * 100 + 10, at * 100 + 60, at * 100 + 70)
    (stage,) = Projection(read_recording(made.save(tmp_path / "r.sqlite"))).stages()
    assert (stage.path, stage.count, stage.kernels) == (("aten::mm",), 3, 3)


def test_columns_are_found_by_name_and_a_missing_one_is_named(tmp_path):
    made = MadeReport()
    made.range("a", 0, 100)
    made.kernel(K, 10, 20, 30)
    made.copy(1, 64, 40, 50, 60)
    optional = ("graphNodeId", "srcKind", "dstKind", "domainId")
    found = read_recording(made.save(tmp_path / "r.sqlite", drop_columns=optional))
    assert found.kernels == 1 and found.range_names() == {"a": 1}
    gone = ("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET", "DIAGNOSTIC_EVENT")
    assert read_recording(made.save(tmp_path / "r.sqlite", without=gone)).kernels == 1
    made.save(tmp_path / "r.sqlite", drop_columns=("streamId",))
    message = "must have the column streamId, got start, end, deviceId"
    with pytest.raises(RecordingError, match=message):
        read_recording(tmp_path / "r.sqlite")


def test_files_that_are_no_export_are_refused(tmp_path):
    path = tmp_path / "r.sqlite"
    for content, message in ((b"", "an empty file"), (b"x" * 99, "a file of another format")):
        path.write_bytes(content)
        with pytest.raises(RecordingError, match=message):
            read_recording(path)
    path.unlink()
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE other (a)")
    db.commit()
    with pytest.raises(RecordingError, match="the table StringIds of nsys, got .* with other"):
        read_recording(path)
    whole = large_report(tmp_path / "large.sqlite", 2000).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RecordingError, match="undamaged"):
        read_recording(path)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("a", ("a", "")),
        ("a@b", ("a", "b")),
        ("a@*", ("a", None)),
        (r"a\@b@c", ("a@b", "c")),
        (r"a\@b", ("a@b", "")),
    ],
)
def test_a_range_is_read_as_nsys_reads_it(text, parsed):
    assert parse_range(text) == parsed


def test_gaps_are_distinguished_by_what_the_cpu_did(tmp_path):
    made = MadeReport()
    made.range("r", 0, 10_000)
    made.kernel(K, 0, 10, 100)
    made.kernel(K, 20, 110, 200)  # launched in time
    made.kernel(K, 300, 310, 400)  # the CPU was busy
    made.call("cudaStreamSynchronize_v3020", 350, 420)
    made.kernel(K, 450, 460, 500)  # it waited
    made.call("cudaMalloc_v3020", 510, 600)
    made.kernel(K, 610, 620, 700)  # it allocated
    made.kernel(K, None, 750, 800)
    of = Analysis(read_recording(made.save(tmp_path / "r.sqlite")))
    found = {row["cause"]: (row["gaps"], row["total ms"] * 1e3) for row in gap_rows(of)}
    expected = [(1, 110), (1, 60), (1, 120), (1, 10), (1, 50)]
    assert [found[cause] for cause in CAUSES] == [pytest.approx(one) for one in expected]
    assert [row["call"] for row in allocation_rows(of)] == ["cudaMalloc"]


def test_streams_and_devices_show_overlap_and_strays(tmp_path):
    made = MadeReport()
    for at in range(4):
        made.kernel(K, at * 100, at * 100 + 10, at * 100 + 50, stream=7)
        made.kernel(K, at * 100, at * 100 + 40, at * 100 + 80, stream=13)
    made.kernel(K, 500, 510, 520, device=1)
    of = Analysis(read_recording(made.save(tmp_path / "r.sqlite")))
    seven, thirteen, other = stream_rows(of)
    assert seven["overlapped ms"] == thirteen["overlapped ms"] == pytest.approx(0.04)
    assert (seven["turns"], thirteen["turns"], other["turns"]) == (3, 4, 0)
    assert [(row["GPU"], row["kernels"]) for row in device_rows(of)] == [(0, 8), (1, 1)]


def test_captures_of_one_run_are_joined_without_a_gap_between(tmp_path):
    recordings = []
    for number, name in enumerate((K, "void g(int)")):
        made = MadeReport()
        made.string(f"shifts the ids {number}" * number)
        made.range("r", 0, 100, "attnscope")
        made.kernel(name, 10, 20, 30)
        recordings.append(read_recording(made.save(tmp_path / f"{number}.sqlite")))
    of = Analysis(merge(recordings))
    assert sorted(row["symbol"] for row in of.kernel_rows()) == [K, "void g(int)"]
    (stage,) = of.stage_rows()
    assert (stage["ranges"], stage["kernels"], stage["span ms"]) == (2, 2, pytest.approx(0.02))
    assert gap_rows(of) == []


def test_reading_takes_time_in_proportion_to_the_file(tmp_path):
    path = large_report(tmp_path / "large.sqlite", 12_000)
    start = time.process_time()
    of = Analysis(read_recording(path))
    stages = of.stage_rows()
    seconds = time.process_time() - start
    assert stages[0]["kernels"] == 12_000
    assert np.all(of.recording.work["pid"] == GLOBAL_PID)
    # 200 MB in 5 s, and as much again for a slow machine.
    assert seconds < 10 * path.stat().st_size / 200e6 + 0.5


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """`nsys_program.py --triton` on an H200 as nsys 2025.3 recorded it: whole, and in `measure`."""
    found = {}
    for name in ("whole", "gated"):
        path = tmp_path_factory.mktemp("nsys") / f"{name}.sqlite"
        path.write_bytes(lzma.decompress((RECORDED / f"{name}.sqlite.xz").read_bytes()))
        found[name] = read_recording(path)
    return found


def test_a_real_report_has_the_kernels_and_the_times_of_nsys_stats(recorded):
    of = Analysis(recorded["whole"])
    theirs = read_summary(RECORDED / "cuda_gpu_kern_sum.csv")
    assert sum(row.count for row in theirs) == recorded["whole"].kernels == 118
    assert sum(row.total_ns for row in theirs) == of.kernel_ns
    names = {row["kernel"] for row in of.kernel_rows()}
    assert "attnscope sm90 forward bf16 D64 M64" in names  # from the mangled name
    assert {row["host memory"] for row in of.copy_rows() if "host" in row["kind"]} == {
        "pageable", "pinned",
    }  # fmt: skip
    assert recorded["whole"].messages == []  # compilers that Triton started have some
    assert recorded["gated"].messages == []
    assert recorded["whole"].gpus == {0: "NVIDIA H200"}
    device, pinned = memory_rows(of)
    assert (device["memory"], device["allocations"], device["releases"]) == ("device", 28, 7)
    assert device["peak MiB"] == pytest.approx((677_677_056 - 52_428_800) / 2**20)
    assert (pinned["memory"], pinned["peak MiB"]) == ("pinned", pytest.approx(1.0, rel=1e-5))


def test_a_real_report_is_projected_as_nsys_projects_it(recorded):
    """For ranges whose work their own thread launched; nsys knows no other thread."""
    spans: Counter[str] = Counter()
    for stage in Analysis(recorded["whole"]).stages:
        name, domain = stage.names[-1]
        spans[f"{domain}:{name}"] += stage.span
    with (RECORDED / "nvtx_gpu_proj_sum.csv").open() as file:
        theirs = {row["Range"]: int(row["Total Proj Time (ns)"]) for row in csv.DictReader(file)}
    compared = ("warmup", "forward", "two-streams", "copies", "allocate", "graph")
    compared = [f"attnscope:{name}" for name in compared] + [":plain"]
    compared += ["attnscope:attnscope::backward", "attnscope:attnscope_triton::forward"]
    assert {name: spans[name] for name in compared} == {name: theirs[name] for name in compared}


def test_a_real_gated_report_has_the_kernels_of_its_range_alone(recorded):
    inside = Analysis(recorded["whole"], "measure@attnscope")
    gated = Analysis(recorded["gated"])

    def counts(of: Analysis) -> dict[str, int]:
        return {row["kernel"]: row["count"] for row in of.kernel_rows()}

    assert counts(gated) == counts(inside)
    assert bool((gated.projection.inside("measure@attnscope") >= 0).all())
    backward = next(s for s in gated.stages if s.path == ("measure", "backward"))
    assert backward.kernels == 42  # autograd's thread launched them
    ranges = recorded["whole"].range_names()
    assert ranges["measure@attnscope"] == 1 and ranges["plain"] == 1
    registered = recorded["whole"].registered[matches(recorded["whole"], "plain")]
    assert not registered.any()
    assert recorded["whole"].registered[matches(recorded["whole"], "measure@attnscope")].all()


@pytest.mark.parametrize(
    ("range_", "kinds"),
    [
        ("two-streams", ["launch gaps", "allocation in a range", "serialised streams"]),
        ("copies", ["launch gaps"]),
        ("graph", []),
    ],
)
def test_what_stands_out_in_a_real_report(recorded, range_, kinds):
    of = Analysis(recorded["whole"], f"{range_}@attnscope")
    assert [one.kind for one in findings(of)] == kinds
    assert [one.kind for one in findings(of, gpu=1)] == [*kinds, "another GPU"]
    text = short_markdown(nsys_report(of))
    assert len(text.splitlines()) <= 60 and text.startswith("# nsys timeline\n\n- the GPU worked ")


def test_copies_from_pageable_memory_stand_out(tmp_path):
    made = MadeReport()
    made.range("load", 0, 400)
    made.copy(1, 1 << 20, 10, 20, 120)
    made.kernel(K, 20, 121, 300)
    (found,) = findings(Analysis(read_recording(made.save(tmp_path / "r.sqlite"))))
    assert found.kind == "copies" and found.advice.startswith("pin_memory")
    assert "took 100 us (35.7 %), most in load; from pageable memory" in found.title
