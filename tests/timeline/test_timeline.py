"""The timeline: reading of marks, measurements, drawing, and the SASS of the marks."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import sass
import timeline_library
import timeline_marks as marks
import torch
from timeline_shapes import SHAPES
from typer.testing import CliRunner

from attnscope import cli
from attnscope._load import PACKAGE
from attnscope.bench.workloads import Workload
from attnscope.timeline import forward, layout, library
from attnscope.timeline.analysis import analyse, overlap
from attnscope.timeline.command import block_numbers
from attnscope.timeline.drawing import draw_block, windows
from attnscope.timeline.forward import (
    CONSUMER,
    FORWARD,
    PRODUCER,
    QUERIES,
    SCHEDULER,
)
from attnscope.timeline.recording import Recording, Track
from attnscope.timeline.trace import in_flight, write_trace

ROOT = Path(__file__).resolve().parents[2]
MARKS = (ROOT / "csrc/kernels/sm90_forward/marks.cuh").read_text()


def labels(track: Track) -> list[str]:
    part = ("tile.", "step.")
    return [part[c // layout.WORDS] + FORWARD.states[track.role][c].mark for c in track.codes]


@pytest.mark.parametrize(
    ("struct", "states"),
    [
        ("SchedulerTile", forward.SCHEDULER_TILE),
        ("ProducerTile", forward.PRODUCER_TILE),
        ("ProducerStep", forward.PRODUCER_STEP),
        ("QueriesTile", forward.QUERIES_TILE),
        ("ConsumerTile", forward.CONSUMER_TILE),
        ("ConsumerStep", forward.CONSUMER_STEP),
    ],
)
def test_states_are_those_of_the_kernel(struct, states):
    (body,) = re.findall(rf"struct {struct} {{\n  enum Mark : int {{(.*?)}};", MARKS, re.DOTALL)
    names = re.findall(r"\bk(\w+)( = \d+)?", re.sub(r"//.*", "", body))
    notes = [at for at, (_, value) in enumerate(names) if value] or [len(names)]
    assert [name for name, _ in names[: notes[0]]] == [state.mark for state in states]
    if struct == "SchedulerTile":
        snake = [re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower() for name, _ in names[notes[0] :]]
        assert tuple(snake) == forward.TILE_NOTES
        assert names[notes[0]][1] == f" = {layout.NOTES}"
    assert len(states) <= layout.WORDS


def test_the_recorded_calls_use_every_tile_of_an_h200_with_as_wide_values():
    names = ("head_dim", "block_m", "block_n", "key_parts")
    every = [t for t in json.loads(torch.ops.attnscope.kernels()) if t["kernel"] == "sm90_forward"]
    assert {
        tuple(library.tile_of(Workload.of(**shape), 132)[n] for n in names)
        for shape in SHAPES.values()
    } == {tuple(t[n] for n in names) for t in every if t["head_dim"] == t["head_dim_v"]}


def test_lanes_are_those_of_the_kernel():
    (body,) = re.findall(r"struct Lane {\n  enum : int {(.*?)}", MARKS, re.DOTALL)
    assert body.split() == ["kScheduler,", "kProducer,", "kQueries,", "kConsumer"]
    assert (SCHEDULER, PRODUCER, QUERIES, CONSUMER) == (0, 1, 2, 3)


FIRST_BLOCK = [f"tile.{mark}" for mark in marks.FIRST_BLOCK]
LAST_OUTPUT = [f"tile.{mark}" for mark in marks.LAST_OUTPUT]
BEFORE = ["tile.AwaitTile", "tile.Prepare", "tile.AwaitQ", "tile.SkipFirst"]
AFTER = ["tile.SkipLast", "tile.Epilogue"]
RAISED_STEP = [f"step.{state.mark}" for state in forward.CONSUMER_STEP]
STEP = [name for name in RAISED_STEP if name != "step.RaiseMaximum"]


def test_every_state_is_read_in_the_order_and_for_the_time_it_was_in():
    made = marks.recording([[5, 2], None, [1, 3]])
    assert made.blocks.tolist() == [0, 2]
    track = made.track(1, CONSUMER + 1)
    first = [*BEFORE, *FIRST_BLOCK, *LAST_OUTPUT, *AFTER]
    second = [*BEFORE, *FIRST_BLOCK, *STEP, *STEP, *LAST_OUTPUT, *AFTER]
    assert labels(track) == [*first, *second, "tile.AwaitTile"]
    for name, cycles in zip(labels(track), track.cycles, strict=True):
        assert cycles == marks.CYCLES.get(name.partition(".")[2], 10)
    assert track.tile.tolist() == [0] * len(first) + [1] * len(second) + [2]
    assert track.step[len(first) :].tolist() == (
        [-1] * 4 + [0] * 5 + [1] * 8 + [2] * 8 + [-1] * 5 + [-1]
    )
    assert (track.begin[1:] == track.end[:-1]).all()
    assert track.begin[0] == 155  # although the clock's low word wraps in between


def test_a_new_maximum_may_come_after_the_wait_for_k():
    made = marks.recording([[1, 5]], consumers=3, block_n=64)
    before = made.track(0, CONSUMER)
    steps, at_k, at_output = made.steps[0, CONSUMER], forward.AWAIT_K, forward.AWAIT_K + 1
    (row,) = steps[np.flatnonzero(steps[:, forward.RAISE_MAXIMUM])]
    row[at_k], row[forward.RAISE_MAXIMUM] = row[forward.RAISE_MAXIMUM], int(row[at_output]) - 7
    steps[np.flatnonzero(steps[:, forward.RAISE_MAXIMUM])] = row
    after = made.track(0, CONSUMER)
    assert (after.codes != before.codes).sum() == 2
    (at,) = np.flatnonzero(after.of("step.RaiseMaximum"))
    assert labels(after)[at - 1 : at + 2] == [
        "step.AwaitK",
        "step.RaiseMaximum",
        "step.AwaitOutput",
    ]
    assert after.cycles[at] == 7
    assert len(FORWARD.costs(after)["step_raised"]) == 1


def test_blocks_that_only_others_see_have_no_marks_of_their_own():
    made = marks.recording([[1, 5]], consumers=3, block_n=64)
    assert made.steps_of_tiles(0).tolist() == [1, 5]
    assert made.own_steps(0).tolist() == [[0, 0, 1], [3, 4, 5]]
    track = made.track(0, CONSUMER)
    second = [*BEFORE, *FIRST_BLOCK, *RAISED_STEP, *STEP, *LAST_OUTPUT, *AFTER]
    assert labels(track) == [*BEFORE, *AFTER, *second, "tile.AwaitTile"]
    # Counted from the tile's first block, so that all consumers have the same number.
    assert track.step[6:].tolist() == [-1] * 4 + [2] * 5 + [3] * 9 + [4] * 8 + [-1] * 5 + [-1]
    found = FORWARD.costs(track)
    assert found["begin"].tolist() == [6 * 10 + 300 + 500] and found["end"].tolist() == [60]
    assert found["epilogue"].tolist() == [400] and found["between"].tolist() == [10, 10, 10]
    assert (len(found["step"]), len(found["step_raised"])) == (0, 1)  # from the second block on
    summary, blocks = analyse(made), 1 + 3 + 4 + 5
    softmax = [r for r in summary["roles"] if r["state"] in ("softmax", "first softmax")]
    assert sum(r["count"] for r in softmax) == blocks
    total = max(int(t.end[-1]) for t in made.tracks(0)[CONSUMER:])
    floor = 4 * 64 * 64 * 128 / 4096  # FLOPs of one consumer's block at the tensor cores' rate
    assert summary["floors"]["tensor_share"] == pytest.approx(blocks * floor / total)


def test_own_blocks_are_those_that_a_row_of_the_consumer_sees():
    made = marks.recording([[3]], consumers=4, block_n=64)
    units = [layout.NOTES + 2, layout.NOTES + 7]
    made.tiles[0, SCHEDULER, 0, units] = 130, 132  # two consumers with rows
    assert made.own_steps(0).tolist() == [[127, 128, 0, 0]]
    made.facts["workload"] = made.facts["workload"] | {"causal": False}
    assert made.own_steps(0).tolist() == [[128, 128, 0, 0]]


def test_units_of_the_heads_of_a_key_head_share_tiles():
    made = marks.recording([[3]], consumers=4, block_n=64)
    made.facts["workload"] = made.facts["workload"] | {"heads_kv": 2}
    units = [layout.NOTES + 2, layout.NOTES + 7]
    made.tiles[0, SCHEDULER, 0, units] = 261, 264  # the last of row 8320, both of row 8384
    assert made.own_steps(0).tolist() == [[127, 128, 128, 0]]


def test_own_blocks_of_rows_that_are_heads_of_a_query():
    made = marks.recording([[3]], consumers=2, block_n=64)
    made.facts["tile"] = made.facts["tile"] | {"heads": 4}
    made.tiles[0, SCHEDULER, 0, [layout.NOTES + 2, layout.NOTES + 7]] = 4 * 8336 // 64, 523
    seen = 8336 + 16 - 256, 8336 + 32 - 256  # by the last query of each consumer
    assert made.own_steps(0).tolist() == [[-(-keys // 64) for keys in seen]]


def test_own_blocks_of_heads_with_rows_of_their_own():
    made = marks.recording([[3]], consumers=2, block_n=64)
    blocks = made.own_steps(0)[0, 0]
    made.facts["tile"] = made.facts["tile"] | {"heads_per_tile": 2}
    assert made.own_steps(0).tolist() == [[blocks, blocks]]  # the same rows of two heads
    made.facts["workload"] = made.facts["workload"] | {"heads_q": 1}
    assert made.own_steps(0).tolist() == [[blocks, 0]]


def test_a_block_that_came_too_late_for_a_tile_waited():
    made = marks.recording([[2], []])
    scheduler, *others = made.tracks(1)
    assert labels(scheduler) == ["tile.AwaitRequest", "tile.Hand"]
    assert [labels(track) for track in others] == [["tile.AwaitTile"]] * 4
    assert analyse(made)["blocks"] == 2


def test_the_producer_loads_k_one_block_ahead():
    track = marks.recording([[2, 1]]).track(0, PRODUCER)
    k, v = ["step.AwaitKSlot", "step.IssueK"], ["step.AwaitVSlot", "step.IssueV"]
    wait = ["tile.AwaitTile"]
    assert labels(track) == [*wait, *k, *k, *v, *v, *wait, *k, *v, *wait]
    assert track.step.tolist() == [-1, 0, 0, 1, 1, 0, 0, 1, 1, -1, 0, 0, 0, 0, -1]


def test_queries_are_loaded_once_a_tile():
    track = marks.recording([[2, 1]]).track(0, QUERIES)
    each = ["tile.AwaitTile", "tile.AwaitSlot", "tile.Issue"]
    assert labels(track) == [*each, *each, "tile.AwaitTile"]


def test_the_scheduler_notes_what_tiles_are():
    made = marks.recording([[2, 1]])
    assert labels(made.track(0, SCHEDULER)) == [
        *(f"tile.{name}" for name in ("AwaitRequest", "Hand")),
        *(f"tile.{name}" for name in ("AwaitRequest", "Take", "AwaitSlot", "Hand")),
        *(f"tile.{name}" for name in ("AwaitRequest", "Take", "AwaitSlot", "Hand")),
    ]
    assert made.notes(0).tolist() == [[0, 0, 6, 0, 2, 0, 99, 8], [1, 0, 4, 0, 1, 0, 99, 6]]
    assert made.steps_of_tiles(0).tolist() == [2, 1]


def test_clock_and_place_come_from_the_rows_of_the_blocks():
    made = marks.recording([[3], None, [4]])
    assert made.clock_mhz == pytest.approx(2000, rel=1e-3)
    assert made.place(2) == 1
    with pytest.raises(ValueError, match="blocks must be among the 2 recorded ones, 0 to 2, got 1"):
        made.place(1)


@pytest.mark.parametrize(("tile_rows", "step_rows"), [(3, 64), (8, 14)])
def test_what_does_not_fit_is_counted_and_the_rest_is_whole(tile_rows, step_rows):
    blocks = [[5, 5, 5, 5]]
    made = marks.recording(blocks, tile_rows=tile_rows, step_rows=step_rows)
    whole, full = marks.recording(blocks).track(0, CONSUMER), made.track(0, CONSUMER)
    fit = min(tile_rows, step_rows // 5)
    lanes = 5 if tile_rows == 3 else 3  # two lanes have no steps
    assert made.lost_tiles == lanes * (4 - fit)
    assert analyse(made)["lost_tiles"] == made.lost_tiles
    count = int((whole.tile < fit).sum())
    # Where the next tile is not marked, the end of the last state is not known.
    count -= tile_rows == fit
    assert full.begin.tolist() == whole.begin[:count].tolist()
    assert full.end.tolist() == whole.end[:count].tolist()


def test_marks_that_run_backwards_are_refused():
    made = marks.recording([[5]])
    step = made.steps[0, CONSUMER, 2]
    step[[0, 4]] = step[[4, 0]]
    with pytest.raises(ValueError, match="consumer 0 of block 0 must be in order"):
        made.track(0, CONSUMER)


@pytest.mark.parametrize(
    ("lane", "part", "row", "word", "message"),
    [
        (SCHEDULER, "tiles", 1, 1, "scheduler of block 0 must have a mark Take in tile 1"),
        (SCHEDULER, "tiles", 2, 3, "scheduler of block 0 must have a mark Hand in tile 2"),
        (QUERIES, "tiles", 1, 2, "queries of block 0 must have a mark Issue in tile 1"),
        (PRODUCER, "steps", 0, 3, "producer of block 0 must have a mark IssueV in tile 0"),
        (CONSUMER, "tiles", 2, 0, "consumer 0 of block 0 must have a mark AwaitTile in tile 2"),
        (CONSUMER, "tiles", 1, 6, "consumer 0 of block 0 must have a mark AwaitScores in tile 1"),
        (CONSUMER, "steps", 4, 4, "consumer 0 of block 0 must have a mark Softmax in tile 1"),
        (CONSUMER, "steps", 4, slice(None), "consumer 0 of block 0 must have a mark IssueScores"),
    ],
)
def test_a_lost_mark_is_refused(lane, part, row, word, message):
    made = marks.recording([[1, 4]], consumers=3, block_n=64)
    getattr(made, part)[0, lane, row, word] = 0
    with pytest.raises(ValueError, match=message):
        made.track(0, lane)


@pytest.mark.parametrize(
    ("part", "row", "word", "mark"),
    [("steps", 1, 4, "Softmax"), ("steps", 3, 5, "RaiseMaximum"), ("tiles", 0, 4, "AwaitK")],
)
def test_a_mark_of_a_block_that_the_consumer_has_not_is_refused(part, row, word, mark):
    made = marks.recording([[1, 4]], consumers=3, block_n=64)
    getattr(made, part)[0, CONSUMER, row, word] = 1
    with pytest.raises(ValueError, match=f"consumer 0 of block 0 must have no mark {mark} in"):
        made.track(0, CONSUMER)


def test_counts_that_disagree_are_refused():
    made = marks.recording([[5]])
    made.ends[0, CONSUMER, layout.STEPS] = 6
    with pytest.raises(ValueError, match="consumer 0 of block 0 must have the 5 steps .*, got 6"):
        made.track(0, CONSUMER)


def test_a_recording_survives_a_file(tmp_path):
    made = marks.recording([[5, 2], [3], [4, 4, 1]])
    made.select([2, 0]).save(tmp_path / "r.npz")
    read = Recording.load(tmp_path / "r.npz")
    assert read.blocks.tolist() == [2, 0]
    assert read.facts == json.loads(json.dumps(marks.FACTS))
    for block in (0, 2):
        for lane in range(4):
            a, b = made.track(made.place(block), lane), read.track(read.place(block), lane)
            for field in ("codes", "begin", "end", "tile", "step"):
                assert (getattr(a, field) == getattr(b, field)).all()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b'{"a": 1}'])
def test_a_file_that_is_no_recording_is_refused(tmp_path, content):
    (tmp_path / "r.npz").write_bytes(content)
    with pytest.raises(ValueError, match="recording must be a file of .*, got .*r.npz"):
        Recording.load(tmp_path / "r.npz")


def track_of(*spans: tuple[str, int], begin: int = 0) -> Track:
    """A consumer's track: states and their durations."""
    names, cycles = zip(*spans, strict=True)
    at = begin + np.concatenate([[0], np.cumsum(cycles)])
    code = np.concatenate([FORWARD.codes("consumer", name) for name in names])
    zero = np.zeros(len(names), np.int32)
    return Track(FORWARD, CONSUMER, code, at[:-1], at[1:], zero, zero)


def test_overlap_counts_products_in_flight_and_softmax():
    wait, soft = ("step.AwaitScores", 100), ("step.Softmax", 60)
    one = track_of(wait, soft, ("step.Rescale", 40))
    two = track_of(("tile.Softmax", 50), ("tile.Epilogue", 100), begin=110)
    # One: in flight 0 to 160, softmax 100 to 160. Two: softmax 110 to 160, nothing in flight.
    assert overlap([one, two]) == {
        "total": 260, "tensor": 160, "tensor_all": 0, "softmax": 60, "softmax_two": 50,
        "softmax_own": 60, "softmax_other": 50, "softmax_alone": 0, "neither": 100,
    }  # fmt: skip
    assert overlap([two])["softmax_alone"] == 50


def test_costs_of_steps_and_tiles():
    track = marks.recording([[5, 2]]).track(0, CONSUMER)
    found = {name: cycles.tolist() for name, cycles in FORWARD.costs(track).items()}
    usual = 4 * 10 + 300 + 500 + 40 + 20
    assert found["step"] == [usual, usual]
    assert found["step_raised"] == [usual - 500 + 30 + 10]
    assert found["begin"] == [6 * 10 + 300 + 500] * 2
    assert found["end"] == [60, 60]
    assert found["epilogue"] == [400, 400]
    assert found["between"] == [10, 10, 10]


def test_floors_are_the_throughputs_of_the_sm():
    assert FORWARD.step_floors(marks.TILE) == {"tensor_cores": 2048, "exponentials": 1024}


def test_the_analysis_is_json_and_its_shares_add_up():
    summary = analyse(marks.recording([[5, 5], [3], [5]], consumers=3))
    json.dumps(summary, allow_nan=False)
    for role in ("scheduler", "producer", "queries", "consumer"):
        assert sum(r["share"] for r in summary["roles"] if r["role"] == role) == pytest.approx(1)
    shares = summary["overlap"]
    parts = shares["tensor"] + shares["softmax_alone"] + shares["neither"]
    assert parts == pytest.approx(1)
    assert summary["blocks"] == 3 and summary["tiles"] == 4 and summary["lost_tiles"] == 0
    softmax = [r for r in summary["roles"] if r["state"] == "softmax"]
    assert [r["median"] for r in softmax] == [500] and softmax[0]["count"] == 3 * (8 + 2 + 4)


def test_products_in_flight_end_where_they_are_waited_for():
    track = marks.recording([[3]]).track(0, CONSUMER)
    scores, output = in_flight(track, "S"), in_flight(track, "P V")
    assert [end - begin for begin, end in scores] == [310, 330, 330]
    assert [end - begin for begin, end in output] == [10 + 300 + 500 + 10 + 40] * 2 + [50]
    assert scores[1][0] + 20 == output[0][0]


def test_a_trace_has_a_thread_for_each_role_and_spans_that_nest(tmp_path):
    made = marks.recording([[5, 2], [3]])
    write_trace(made, tmp_path / "t.json.gz")
    with gzip.open(tmp_path / "t.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "block 0, SM 100", 1: "block 1, SM 101"}
    threads = [e["args"]["name"] for e in events if e["name"] == "thread_name" and not e["pid"]]
    consumers = [f"consumer {i}{part}" for i in (0, 1) for part in ("", ": S", ": P V")]
    assert threads == ["scheduler", "producer", "queries", *consumers]
    spans = [e for e in events if e["ph"] == "X"]
    count = Counter(e["name"] for e in spans if e["pid"] == 0)
    assert count["softmax"] == 2 * (4 + 1) and count["load K"] == 7 and count["tile 1"] == 5
    softmax = next(e for e in spans if e["name"] == "softmax")
    assert softmax["dur"] == 0.25 and softmax["cat"] == "softmax"
    for pid, tid in {(e["pid"], e["tid"]) for e in spans}:
        open_until: list[int] = []
        mine = [e for e in spans if (e["pid"], e["tid"]) == (pid, tid)]
        for e in sorted(mine, key=lambda e: e["ts"]):
            begin, end = round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3)
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1], e
            open_until.append(end)


def test_a_key_block_has_the_same_number_for_every_consumer_that_sees_it(tmp_path):
    write_trace(marks.recording([[4]], consumers=3, block_n=64), tmp_path / "t.json.gz")
    with gzip.open(tmp_path / "t.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[str, list[int]] = {}
    for e in events:
        if e["name"].startswith("key block"):
            found.setdefault(names[e["tid"]], []).append(e["args"]["key_block"])
    assert found == {
        "consumer 0": [1, 0], "consumer 1": [2, 1, 0], "consumer 2": [3, 2, 1, 0],
    }  # fmt: skip


def test_windows_show_the_steady_state_and_a_change_of_tiles():
    steady, change = windows(marks.recording([[9, 9]]).track(0, CONSUMER))
    assert (steady.title, change.title) == ("Inside a tile", "From one tile to the next")
    assert steady.end - steady.begin == pytest.approx(4.5 * 920, rel=0.2)
    (only,) = windows(marks.recording([[1, 1]]).track(0, CONSUMER))
    assert only.title == "From one tile to the next"
    *_, end = windows(marks.recording([[9]]).track(0, CONSUMER))
    assert end.end > end.begin


@pytest.mark.parametrize("block_n", [None, 64])
@pytest.mark.parametrize("blocks", [[9, 9], [1], [1, 2]])
def test_a_picture_of_any_block_can_be_drawn(blocks, block_n):
    made = marks.recording([blocks], consumers=3, block_n=block_n)
    figure = draw_block(made, analyse(made), 0)
    texts = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    assert texts == ["scheduler", "producer", "queries", *(f"consumer {i}" for i in range(3))]
    figure.draw_without_rendering()


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.build("timeline"), ["timeline", *arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_the_command_writes_a_trace_a_picture_and_a_summary(tmp_path):
    marks.recording([[5, 2], [3], [4, 4, 1]]).save(tmp_path / "r.npz")
    output = tmp_path / "out"
    options = ["--recording", str(tmp_path / "r.npz"), "--output", str(output)]
    code, out = run(*options, "--blocks", "2,0")
    assert code == 0, out
    assert sorted(path.name for path in output.iterdir()) == [
        "block-2.png", "block-2.svg", "recording.npz", "summary.json", "trace.json.gz",
    ]  # fmt: skip
    assert Recording.load(output / "recording.npz").blocks.tolist() == [2, 0]
    content = json.loads((output / "summary.json").read_text())
    assert content["summary"]["blocks"] == 3 and content["tile"]["block_m"] == 128
    assert "1.050 times" in out and "the same bits" in out and "wait for P V" in out
    assert "tensor cores 2048, exponentials 1024" in out
    assert "did not fit" not in out


def test_the_command_reports_what_was_lost_and_what_differs(tmp_path):
    made = marks.recording([[5, 5, 5, 5]], step_rows=14)
    made.facts["disturbance"] = made.facts["disturbance"] | {"same_output": False}
    made.save(tmp_path / "r.npz")
    code, out = run("--recording", str(tmp_path / "r.npz"), "--output", str(tmp_path / "out"))
    assert code == 0
    assert "6 tiles of lanes did not fit the buffer" in out and "DIFFERENT" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--blocks", "x"], "blocks must be numbers such as 0,4-7, got 'x'"),
        (["--blocks", "4-"], "blocks must be numbers such as 0,4-7, got '4-'"),
        (["--blocks", "4-2"], "blocks must name at least one block, got '4-2'"),
        (
            ["--recording", "none.npz"],
            "a file of attnscope timeline, got none.npz",
        ),
        (["--dtype", "fp8", "--device", "cpu"], "dtype must be bfloat16 or float16, got 'fp8'"),
        (["--device", "cpu"], "device must be a Hopper GPU (H100, H200, GH200), got cpu"),
        (["--heads", "3", "--kv-heads", "2", "--device", "cpu"], "heads must be a multiple of kv"),
    ],
)
def test_bad_input_is_explained_with_exit_code_2(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out = run(*arguments)
    assert code == 2 and message in out
    assert not list(tmp_path.iterdir())


def test_block_numbers_are_lists_and_ranges():
    assert block_numbers("3,0-2, 1") == [3, 0, 1, 2]


def test_without_the_source_tree_the_command_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "PACKAGE", tmp_path / "site-packages/attnscope")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="working folder must be attnscope's source tree"):
        library.source_tree()
    monkeypatch.chdir(ROOT)
    assert library.source_tree() == ROOT


@pytest.mark.skipif(not (PACKAGE / "_C_cuda.so").exists(), reason="_C_cuda.so is not built")
def test_nothing_of_it_is_in_the_normal_build():
    assert b"g_timeline" not in (PACKAGE / "_C_cuda.so").read_bytes()


@pytest.fixture(scope="module")
def built() -> tuple[Path, list[dict], float]:
    return timeline_library.built()


@pytest.mark.long
def test_the_instrumented_kernel_compiles_and_spills_little(built):
    """Within the register budget of the normal kernel, without a ptxas warning (`build`)."""
    path, usage, seconds = built
    assert b"g_timeline" in path.read_bytes()
    kernels = [u for u in usage if "forward_kernel" in u["kernel"]]
    tiles = [t for t in json.loads(torch.ops.attnscope.kernels()) if t["kernel"] == "sm90_forward"]
    for tile in tiles:
        assert library.usage_of(usage, tile, "forward")["spill_store_bytes"] <= 128
    assert len(kernels) == len(tiles)
    assert seconds < 120  # parallel to other tests; 20 s alone


def test_the_tile_of_a_call_has_what_a_recording_needs():
    work = Workload.of(
        batch=64, seqlen_q=16, seqlen_k=300, heads_q=8, heads_kv=2, head_dim=64, causal=True
    )
    assert library.tile_of(work, 132) == {
        "head_dim": 64, "block_m": 64, "block_n": 64, "q_stages": 2, "stages": 3,
        "blocks_per_sm": 3, "consumers": 1, "scores_live": 1, "heads_per_tile": 1, "key_parts": 1,
        "heads": 4,
    }  # fmt: skip
    pairs = Workload.of(batch=64, seqlen=100, heads=8, head_dim=64)
    assert library.tile_of(pairs, 132)["heads_per_tile"] == 2


@pytest.mark.long
def test_the_instrumented_library_refuses_another_tile(built):
    """The sources' tile table may differ from the installed build's; the launch compares them."""
    assert b"the sources choose another tile than the installed build" in built[0].read_bytes()
    assert library.InstrumentedForward(built[0]) is not None  # it exports what Python calls


@pytest.mark.long
@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm")
def test_libraries_side_by_side_share_no_table(built):
    """The dynamic linker merges `inline` variables of all libraries in a process: both libraries
    would use one tile table."""
    libraries = [built[0], *PACKAGE.glob("_C*.so")]
    for path in libraries:
        command = ["nm", "--dynamic", "--demangle", "--defined-only", path]
        symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        shared = [s for s in symbols.splitlines() if " u " in s and "attnscope::" in s]
        assert not shared, path


@pytest.mark.long
@pytest.mark.skipif(sass.cuobjdump() is None, reason="no cuobjdump")
@pytest.mark.parametrize("rows", [128, 192])
def test_marks_stand_where_states_begin(built, rows):
    """In the SASS of the tiles for head dim 128, each part of a step is between its marks, and the
    loop has no spill."""
    kernels = sass.functions(built[0], "sm_90a")
    name = f"sm90::ForwardConfig<__nv_bfloat16, 128, {rows}, 64>"
    (code,) = (c for n, c in kernels.items() if name in n)
    events = re.findall(r"SR_CLOCKLO|MUFU\.EX2|TRYWAIT|DEPBAR\.LE|HGMMA\.64x|UTMALDG", code)
    text = re.sub(r"(\S+)(?: \1)+", r"\1", " ".join(events)).replace("SR_CLOCKLO", "|")
    step = (
        "| HGMMA.64x | TRYWAIT | HGMMA.64x | DEPBAR.LE | MUFU.EX2 | TRYWAIT | MUFU.EX2 | DEPBAR.LE "
    )
    assert text.count(step + "| HGMMA.64x") >= 1 and text.count(step) >= 2, text
    assert not re.search(r"\b(STL|LDL)\b", sass.main_loop(code))
