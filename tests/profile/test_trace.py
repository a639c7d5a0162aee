"""Reading chrome traces: real recordings, exact times, nesting, and invalid files."""

import gzip
import io
import json
import tracemalloc
from collections import Counter
from decimal import Decimal
from pathlib import Path

import pytest
from made_trace import (
    RECORDED,
    RECORDINGS,
    Event,
    cpu,
    kernel,
    launch,
    named,
    op,
    write_trace,
)

from attnscope.profile import Profile
from attnscope.profile.analysis.steps import find_steps
from attnscope.profile.attribution.audit import audit
from attnscope.profile.attribution.owners import Attribution
from attnscope.profile.trace import json_stream as jsonstream
from attnscope.profile.trace.events import Trace
from attnscope.profile.trace.markers import SENTINEL, STEP, STEPS_END, WAIT
from attnscope.profile.trace.reader import read_trace


def recording(name: str) -> Trace:
    return read_trace(RECORDED / f"{name}.json.gz")


def raw_events(name: str) -> list[dict]:
    """The events, parsed by json with exact decimal numbers."""
    with gzip.open(RECORDED / f"{name}.json.gz", "rt") as file:
        return json.load(file, parse_float=Decimal)["traceEvents"]


@pytest.mark.parametrize("name", RECORDINGS)
def test_every_event_of_a_recording_is_read_once_with_its_exact_time(name: str) -> None:
    trace, raw = recording(name), raw_events(name)
    for kind, category in {
        "kernel": "kernel",
        "memcpy": "gpu_memcpy",
        "memset": "gpu_memset",
    }.items():
        want = [e for e in raw if e.get("cat") == category and e["ph"] == "X"]
        have = [e for e in trace.gpu if e.kind == kind]
        assert len(have) == len(want)
        assert sum(e.duration for e in have) == sum(e["dur"] * 1000 for e in want)
    cpu_kinds = Counter(e.kind for e in trace.cpu)
    raw_kinds = Counter(e.get("cat") for e in raw if e["ph"] == "X")
    assert cpu_kinds["op"] == raw_kinds["cpu_op"]
    assert cpu_kinds["range"] == raw_kinds["user_annotation"]
    assert cpu_kinds["python"] == raw_kinds["python_function"]
    assert cpu_kinds["call"] == raw_kinds["cuda_runtime"] + raw_kinds["cuda_driver"]
    assert len(trace.overhead) == raw_kinds["overhead"]


@pytest.mark.parametrize("name", RECORDINGS)
def test_events_are_sorted_numbered_and_inside_their_parents(name: str) -> None:
    trace = recording(name)
    for events in (trace.cpu, trace.gpu):
        assert [e.index for e in events] == list(range(len(events)))
        assert all(a.start <= b.start for a, b in zip(events, events[1:], strict=False))
    for event in trace.cpu:
        if event.parent >= 0:
            parent = trace.cpu[event.parent]
            assert parent.thread == event.thread and parent.kind != "call"
            assert parent.start <= event.start < parent.end
            assert event.kind == "call" or event.end <= parent.end
    assert all(trace.start <= e.start and e.end <= trace.end for e in trace.gpu)


@pytest.mark.parametrize("name", RECORDINGS)
def test_gpu_work_is_joined_to_the_call_that_launched_it(name: str) -> None:
    trace = recording(name)
    for work in trace.gpu:
        call = trace.cpu[work.launch]
        assert work.launch >= 0 and call.kind == "call"
        assert call.correlation == work.correlation and call.start <= work.start


def test_details_of_a_kernel_are_those_of_the_recording() -> None:
    trace = recording("cold")
    gemm = next(k for k in trace.kernels if k.name.startswith("nvjet"))
    assert (gemm.grid, gemm.block) == ((2, 64, 1), (384, 1, 1))
    assert (gemm.registers, gemm.shared_bytes) == (168, 213268)
    assert gemm.blocks_per_sm == 0.969697 and gemm.warps_per_sm == 11.636364
    assert gemm.occupancy is None  # the recording has 0
    assert trace.devices[0]["name"] == "NVIDIA H200" and trace.devices[0]["numSms"] == 132
    assert [c.bytes for c in trace.copies] == [32768]
    mm = next(e for e in recording("train").cpu if e.name == "aten::mm" and e.shapes)
    assert len(mm.shapes or ()) == 2 and mm.dtypes == ("c10::BFloat16",) * 2


@pytest.mark.parametrize("bad", ["NaN", "Infinity", "-Infinity", "1e999", "null"])
def test_a_number_that_is_none_is_missing(bad: str, tmp_path: Path) -> None:
    about = {"blocks per SM": -1, "warps per SM": -1, "est. achieved occupancy %": -1}
    path = write_trace(
        tmp_path / "t.json", op("a", 0, 9), launch(1, 2), kernel(1, 5, 6, **about),
        deviceProperties=[{"name": "NVIDIA H200", "odd": -1}],
    )  # fmt: skip
    path.write_text(path.read_text().replace("-1", bad))
    (one,) = read_trace(path).kernels
    assert (one.blocks_per_sm, one.warps_per_sm, one.occupancy) == (None, None, None)
    Profile.read(path).to_json(tmp_path / "p.json")
    (device,) = json.loads((tmp_path / "p.json").read_text(), parse_constant=pytest.fail)["devices"]
    assert device == {"name": "NVIDIA H200", "odd": None}


def test_allocations_are_read_where_they_were_recorded() -> None:
    memory = recording("stack").memory
    assert len(memory) == 460
    assert {m.device for m in memory} == {-1, 0}
    assert max(m.allocated for m in memory if m.device == 0) > 70_000_000
    assert recording("train").memory == []


@pytest.mark.parametrize("chunk", [1, 13, 1000])
def test_the_size_of_a_chunk_changes_nothing(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    want = recording("raw")
    monkeypatch.setattr(jsonstream, "CHUNK", chunk)
    have = recording("raw")
    assert (have.cpu, have.gpu, have.devices) == (want.cpu, want.gpu, want.devices)


def test_a_number_may_lie_across_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    text = '{"a": 12.5e+3, "traceEvents": [1, 2.25], "b": -0.125}'
    want = [("a", "12.5e+3"), ("traceEvents", [1, "2.25"]), ("b", "-0.125")]
    for chunk in range(1, len(text)):
        monkeypatch.setattr(jsonstream, "CHUNK", chunk)
        members = jsonstream.JsonText(io.StringIO(text), Path("t")).members("traceEvents")
        assert [(k, list(v) if k == "traceEvents" else v) for k, v in members] == want


def test_a_file_cut_off_anywhere_is_an_error_with_the_position(tmp_path: Path) -> None:
    whole = gzip.decompress((RECORDED / "raw.json.gz").read_bytes())
    path = tmp_path / "cut.json"
    for size in [*range(0, len(whole) - 60, 997), len(whole.rstrip()) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"cut\.json must .*(cut off at character \d+|empty)"):
            read_trace(path)
    packed = tmp_path / "cut.json.gz"
    packed.write_bytes((RECORDED / "raw.json.gz").read_bytes()[:-500])
    with pytest.raises(ValueError, match=r"cut\.json\.gz must be a whole file, got"):
        read_trace(packed)
    text = json.dumps({"traceEvents": [op('"näm" 漢字', 1, 2)], "a": 1.5}, ensure_ascii=False)
    for size in range(len(text.encode())):
        path.write_bytes(text.encode()[:size])
        with pytest.raises(ValueError, match=r"cut\.json must .*(cut off at character \d+|empty)"):
            read_trace(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hello", "'h' where '{' is expected"),
        ("[1, 2]", "'{' is expected"),
        ('{"a": 1}', "have a list traceEvents, got"),
        ('{"traceEvents": {}}', r"'\[' is expected"),
        ('{"traceEvents": [1]}', "event 1"),
        ('{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a"}]}', "event 1 .*'ts'"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a", "ts": "x"}]}', "event 1"),
        ('{"traceEvents": [], 5: 1}', "a key is expected"),
        ('{"traceEvents": [{"ph": "M"},]}', "no value .*, at character 29"),
        ('{"traceEvents": [' + "[" * 99999, "nested too deeply"),
        ('{"traceEvents": []} {}', "text after the end of the object, at character 20"),
    ],
)
def test_a_file_that_is_no_trace_is_an_error_with_the_reason(
    text: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"other.json must .*{said}"):
        read_trace(path)


def test_garbage_in_the_middle_is_not_taken_for_a_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonstream, "LONGEST_VALUE", 2000)
    path = tmp_path / "garbled.json"
    good = json.dumps(op("a", 1, 2))
    path.write_text('{"traceEvents": [' + ",".join([good, "{oops}", *[good] * 100]) + "]}")
    with pytest.raises(ValueError, match=r"must be JSON, got .*, at character \d+"):
        read_trace(path)


def test_missing_and_packed_nonsense_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        read_trace(tmp_path / "none.json")
    (tmp_path / "no.json").write_bytes(b"\x1f\x8bnot gzip at all")
    with pytest.raises(ValueError, match="must be a whole file, got Unknown compression method"):
        read_trace(tmp_path / "no.json")


def test_a_file_is_read_by_what_it_has_not_by_its_name(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": [op("a", 1, 2)]})
    for name, content in (
        ("packed.json", gzip.compress(text.encode())),
        ("unpacked.json.gz", text.encode()),
        ("marked.json", text.encode("utf-8-sig")),
    ):
        (tmp_path / name).write_bytes(content)
        assert [event.name for event in read_trace(tmp_path / name).cpu] == ["a"]


def test_an_empty_trace_is_a_trace(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path / "empty.json"))
    assert (trace.cpu, trace.gpu, trace.start, trace.end) == ([], [], 0, 0)


def test_events_that_cross_do_not_nest(tmp_path: Path) -> None:
    path = write_trace(
        tmp_path / "t.json", named("a", 0, 10), named("b", 5, 15), op("x", 6, 7), op("y", 12, 13)
    )
    trace = read_trace(path)
    parents = {e.name: e.parent for e in trace.cpu}
    assert parents == {"a": -1, "b": -1, "x": 1, "y": 1}


def test_a_python_frame_without_an_end_ends_with_its_caller(tmp_path: Path) -> None:
    frames = [
        cpu("python_function", name, start, end)
        for name, start, end in [
            ("main", 0, 90), ("model", 1, 30), ("apply", 5, 90), ("inside", 6, 9), ("after", 40, 50)
        ]
    ]  # fmt: skip
    main, model, apply, inside, after = read_trace(write_trace(tmp_path / "t", *frames)).cpu
    assert (apply.end, apply.parent) == (model.end, model.index)
    assert (inside.parent, after.parent) == (apply.index, main.index)


def test_events_of_the_same_time_nest_as_they_are_entered(tmp_path: Path) -> None:
    path = write_trace(
        tmp_path / "t.json",
        op("op", 0, 10), cpu("python_function", "frame", 0, 10), named("range", 0, 10),
    )  # fmt: skip
    trace = read_trace(path)
    assert [e.name for e in trace.cpu] == ["range", "frame", "op"]
    assert [e.parent for e in trace.cpu] == [-1, 0, 1]


def test_a_call_that_ends_after_its_op_by_another_clock_belongs_to_it(tmp_path: Path) -> None:
    late = cpu("cuda_runtime", "cudaLaunchKernel", 9, 10.4, correlation=1)
    trace = read_trace(write_trace(tmp_path / "t.json", op("op", 0, 10), late))
    assert trace.cpu[1].parent == 0


def test_a_repeated_correlation_id_names_the_last_call_before(tmp_path: Path) -> None:
    path = write_trace(
        tmp_path / "t.json", op("a", 0, 10), launch(1, 2), op("b", 50, 60), launch(1, 52),
        kernel(1, 5, 6), kernel(1, 70, 80), kernel(0, 90, 91),
    )  # fmt: skip
    trace = read_trace(path)
    parents = [trace.cpu[trace.cpu[k.launch].parent].name for k in trace.kernels[:2]]
    assert parents == ["a", "b"] and trace.kernels[2].launch == -1


def test_sentinels_are_taken_out_and_bound_the_window(tmp_path: Path) -> None:
    path = write_trace(
        tmp_path / "t.json",
        named(SENTINEL, 0, 10), op("aten::add_", 1, 4), launch(1, 2), kernel(1, 3, 4),
        op("work", 20, 30), launch(2, 21), kernel(2, 25, 28, "mine"),
        named(WAIT, 32, 38), cpu("cuda_runtime", "cudaDeviceSynchronize", 33, 37, correlation=9),
        named(SENTINEL, 40, 50), op("aten::add_", 41, 44),
    )  # fmt: skip
    trace = read_trace(path)
    assert trace.sentinels == [1, 0]
    assert [k.name for k in trace.gpu] == ["mine"]
    assert [e.name for e in trace.cpu] == ["work", "cudaLaunchKernel"]
    assert (trace.start, trace.end) == (10_000, 40_000)


@pytest.mark.parametrize(
    ("ended", "last"),
    [
        ([named(STEPS_END, 28, 28)], [("step 8", 17_000, 34_000)]),
        ([], []),
    ],
    ids=["ended", "cut off"],
)
def test_marks_of_steps_are_taken_out_and_what_is_open_at_the_end_is_cut(
    tmp_path: Path, ended: list[Event], last: list[tuple[str, int, int]]
) -> None:
    path = write_trace(
        tmp_path / "t.json",
        named(WAIT, 0, 3), named(SENTINEL, 4, 10), launch(1, 5), kernel(1, 6, 7),
        named(f"{STEP}7", 12, 12), op("one", 13, 16), launch(2, 14), kernel(2, 15, 25),
        named(f"{STEP}8", 17, 18), named("optimizer", 19, 90), op("two", 20, 24), launch(3, 21),
        kernel(3, 26, 34), op("other thread", 29, 90, tid=2), named("before", 26, 30),
        named(WAIT, 30, 40), cpu("cuda_runtime", "cudaDeviceSynchronize", 31, 35, correlation=9),
        named(SENTINEL, 41, 50), launch(4, 42), kernel(4, 43, 44), *ended,
        # Events of another thread, before the region and after it.
        op("early", 1, 9, tid=3), launch(5, 3, tid=3), kernel(5, 12, 13),
        op("late", 33, 39, tid=3), launch(6, 34, tid=3), kernel(6, 36, 37),
        op("lost", 60, 70, tid=3), launch(7, 65, tid=3), kernel(8, 11, 12),
    )  # fmt: skip
    trace = read_trace(path)
    assert trace.steps == [(7, 12_000), (8, 17_000)] and trace.sentinels == [1, 1]
    assert [k.correlation for k in trace.gpu] == [8, 2, 3]  # 8 has no launch in the trace
    ends = {e.name: e.end for e in trace.cpu if e.kind != "call"}
    assert ends == {
        "one": 16_000, "optimizer": 30_000, "two": 24_000, "other thread": 30_000, "before": 30_000,
    }  # fmt: skip
    attribution = Attribution(trace)
    assert audit(trace).problem is None
    assert [r.name for r in attribution.ranges(trace.gpu[2])] == ["optimizer"]
    steps, rule = find_steps(attribution)
    assert [(s.name, s.start, s.end) for s in steps] == [
        ("step 7", 12_000, 17_000 if last else 25_000), *last
    ]  # fmt: skip
    assert rule == "to the end of each step of the optimizer"


@pytest.mark.parametrize(
    "name",
    [
        'say "hi"',
        '"',
        'a", "pid": 7, "tid": 8,',
        # The names of files of code that is compiled from a text: a dict, a source.
        '{"device": "cpu", "dtype": "float32"}(12): run',
        'library = Library("mine", "IMPL")\nlibrary = {"pid": 1,\n"b": 2}\n(1): <module>',
        "torch\\cuda\\__init__.py(219): _lazy_init",  # on Windows, up to PyTorch 2.0
    ],
)
@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_names_are_read_as_pytorch_writes_them(
    tmp_path: Path, name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to PyTorch 2.11 the name shares a line with the process; so it does in the recording."""
    monkeypatch.setattr(jsonstream, "CHUNK", chunk)
    with gzip.open(RECORDED / "threads.json.gz", "rt") as file:
        text = file.read()
    path = tmp_path / "quotes.json"
    path.write_text(text.replace('"in the thread"', f'"{name}"'))
    read = read_trace(path)
    assert {e.name for e in read.cpu if e.kind == "range"} == {name.replace("\\", "/")}
    assert len(read.cpu) == len(recording("threads").cpu)
    Profile.read(path).export_chrome_trace(tmp_path / "ours.json")
    json.loads((tmp_path / "ours.json").read_text())  # JSON again


def test_memory_is_bounded_by_the_size_of_the_file(tmp_path: Path) -> None:
    """At most twice the bytes of the JSON; the bound is the same at 200 MB."""
    path = tmp_path / "big.json"
    with gzip.open(RECORDED / "stack.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    with path.open("w") as file:
        later = (e | {"ts": e.get("ts", 0) + 1e6 * again} for again in range(4) for e in events)
        file.write('{"traceEvents": [' + ",\n".join(map(json.dumps, later)) + "]}")
    tracemalloc.start()
    try:
        trace = read_trace(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(trace.kernels) == 4 * 164
    # A chunk and its decoded events take a few MB at any file size.
    assert peak < 2 * path.stat().st_size + 4 * jsonstream.CHUNK


@pytest.mark.parametrize("chunk", [1, 50, 1000])
def test_a_name_may_have_quotes_in_it(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch does not escape quotes in names; escaped quotes are read as well."""
    monkeypatch.setattr(jsonstream, "CHUNK", chunk)
    path = tmp_path / "quotes.json"
    names = ['say "hi"', '"', 'a "b" c "d"', "none", 'a ", b']
    for escape in (str, lambda name: json.dumps(name)[1:-1]):
        events = [
            f'  {{\n    "ph": "X", "cat": "cpu_op",\n    "name": "{escape(name)}",\n'
            f'    "pid": 1, "tid": 1, "ts": {at}.5, "dur": 1\n  }}'
            for at, name in enumerate(names)
        ]
        events.append(
            '  {\n    "name": "Record Window End", "ph": "i", "s": "g",\n    "ts": 9\n  }'
        )
        path.write_text('{\n  "traceEvents": [\n' + ",\n".join(events) + "\n  ]\n}")
        assert [event.name for event in read_trace(path).cpu] == names


def test_a_file_without_events_is_no_trace(tmp_path: Path) -> None:
    for text in ("{}", '{"a": 1}'):
        (tmp_path / "no.json").write_text(text)
        with pytest.raises(ValueError, match=r"no\.json must have a list traceEvents"):
            read_trace(tmp_path / "no.json")
