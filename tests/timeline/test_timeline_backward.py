"""The timeline of the Hopper backward: reading of marks, measurements, and the marks' code."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import backward_marks as marks
import pytest
import timeline_library
import torch
from typer.testing import CliRunner

from attnscope import cli
from attnscope.bench.workloads import Workload
from attnscope.timeline import backward, layout, library
from attnscope.timeline.analysis import analyse
from attnscope.timeline.backward import CONSUMER, PRODUCER, SCHEDULER, WRITER
from attnscope.timeline.drawing import draw_block
from attnscope.timeline.trace import in_flight, write_trace

ROOT = Path(__file__).resolve().parents[2]
MARKS = (ROOT / "csrc/kernels/sm90_backward/marks.cuh").read_text()
STRUCTS = {
    "SchedulerTile": backward.SCHEDULER_TILE, "ProducerTile": backward.PRODUCER_TILE,
    "ProducerStep": backward.PRODUCER_STEP, "WriterTile": backward.WRITER_TILE,
    "WriterStep": backward.WRITER_STEP, "ConsumerTile": backward.CONSUMER_TILE,
    "ConsumerStep": backward.CONSUMER_STEP,
}  # fmt: skip
CALLS = {
    "full": {}, "causal": {"causal": True, "seqlen_q": 512, "seqlen_k": 512},
    "grouped": {"causal": True, "seqlen_q": 300, "seqlen_k": 700, "group": 3},
    "few keys": {"seqlen_q": 700, "seqlen_k": 30},
}  # fmt: skip


@pytest.fixture(params=CALLS)
def call(request):
    return CALLS[request.param]


@pytest.mark.parametrize("struct", STRUCTS)
def test_states_are_those_of_the_kernel(struct):
    pattern = rf"struct Backward{struct} {{\n  enum Mark : int {{(.*?)}};"
    (body,) = re.findall(pattern, MARKS, re.DOTALL)
    names = re.findall(r"\bk(\w+)( = \d+)?", re.sub(r"//.*", "", body))
    notes = [at for at, (_, value) in enumerate(names) if value] or [len(names)]
    assert [name for name, _ in names[: notes[0]]] == [state.mark for state in STRUCTS[struct]]
    if struct == "SchedulerTile":
        snake = [re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower() for name, _ in names[notes[0] :]]
        assert tuple(snake) == backward.TILE_NOTES
        assert names[notes[0]][1] == f" = {layout.NOTES}"
    assert len(STRUCTS[struct]) <= layout.WORDS


def test_lanes_are_those_of_the_kernel():
    (body,) = re.findall(r"struct BackwardLane {\n  enum : int {(.*?)}", MARKS, re.DOTALL)
    first = {"Scheduler": SCHEDULER, "Producer": PRODUCER, "Writer": WRITER, "Consumer": CONSUMER}
    assert re.findall(r"k(\w+)", body) == list(first)
    assert tuple(first.values()) == (0, 1, 2, 4) and "kConsumer = 4" in body
    assert [role.capitalize() for role in backward.EARLY.roles] == re.findall(r"k(\w+)", body)


@pytest.mark.parametrize("tile", marks.TILES)
def test_every_state_is_read_in_the_order_it_was_in(tile, call):
    """`track` refuses marks that are missing, out of order, or of no step."""
    made = marks.recording(tile, **call)
    for track in made.tracks(0):
        assert len(track.codes) and (track.begin[1:] == track.end[:-1]).all()
    assert made.lost_tiles == 0


def test_a_consumer_passes_over_what_its_keys_do_not_see():
    made = marks.recording("d128", causal=True, seqlen_q=512, seqlen_k=512)
    first, second = made.tracks(0)[CONSUMER:]
    # The last tile is taken first: keys 384 to 511, blocks of queries 6 and 7.
    assert made.notes(0)[0].tolist() == [0, 1, 0, 384, 6, 8, 6, 128]
    assert first.tile[first.of("step.PassOver")].tolist() == []
    assert second.tile[second.of("step.PassOver")].tolist() == [0, 1, 2, 3]
    assert made.own_steps(0).tolist() == [[2, 1], [4, 3], [6, 5], [8, 7]]


@pytest.mark.parametrize("tile", marks.TILES)
def test_consumers_take_turns_at_dq(tile):
    made = marks.recording(tile, seqlen_k=700)
    total = int(made.steps_of_tiles(0).sum())
    turns = [int(track.of("step.AwaitOthers").sum()) for track in made.tracks(0)[CONSUMER:]]
    assert sum(turns) == total and max(turns) - min(turns) <= 1


def test_k_of_one_buffer_is_loaded_in_the_first_step():
    made = marks.recording("d128-long", seqlen_q=800)
    producer = made.track(0, PRODUCER)
    loads = producer.of("step.IssueK")
    assert producer.step[loads].tolist() == [0, 0, 0] and not producer.of("tile.IssueK").any()


@pytest.mark.parametrize(
    ("tile", "end", "changed", "message"),
    [
        ("d128", ["AwaitScoreSlot", "Store", "Sync"], {"Sync": 0}, "must have a mark Sync"),
        ("d64", ["Store"], {"Sync": 1}, "must have no mark Sync"),
        ("d64", ["Store"], {"AwaitScoreSlot": 1}, "must have no mark AwaitScoreSlot"),
    ],
)
def test_the_end_of_a_tile_is_one_state_where_it_leaves_by_tma(tile, end, changed, message):
    made = marks.recording(tile)
    track = made.track(0, CONSUMER)
    states = track.layout.states["consumer"]
    names = [states[code].mark for code in track.codes[track.tile == 0]]
    assert names[-len(end) :] == end and not set(end) & set(names[: -len(end)])
    for mark, value in changed.items():
        word = [state.mark for state in backward.CONSUMER_TILE].index(mark)
        made.tiles[0, CONSUMER, 0, word] = value
    with pytest.raises(ValueError, match=f"consumer 0 of block 0 {message} in tile 0"):
        made.track(0, CONSUMER)


@pytest.mark.parametrize(
    ("lane", "part", "row", "word", "message"),
    [
        (CONSUMER, "steps", 1, 3, "consumer 0 of block 0 must have a mark Probabilities in tile 0"),
        (CONSUMER, "steps", 0, 11, "consumer 0 of block 0 must have a mark IssueGradient"),
        (PRODUCER, "steps", 2, 1, "producer of block 0 must have a mark IssueQ in tile 0"),
        (WRITER, "steps", 2, 2, "writer 0 of block 0 must have a mark Issue in tile 0"),
        (SCHEDULER, "tiles", 1, 3, "scheduler of block 0 must have a mark Take in tile 1"),
    ],
)
def test_a_lost_mark_is_refused(lane, part, row, word, message):
    made = marks.recording()
    getattr(made, part)[0, lane, row, word] = 0
    with pytest.raises(ValueError, match=message):
        made.track(0, lane)


def test_a_mark_of_another_consumers_turn_is_refused():
    made = marks.recording()
    made.steps[0, CONSUMER, 1, 10] = made.steps[0, CONSUMER, 1, 8]
    with pytest.raises(ValueError, match="must have no mark AwaitOthers in tile 0, got one"):
        made.track(0, CONSUMER)


@pytest.mark.parametrize(("tile", "early"), [("d128", True), ("d64", False)])
def test_products_in_flight_end_where_they_are_waited_for(tile, early):
    made = marks.recording(tile, seqlen_q=128, seqlen_k=60)
    track = made.track(0, CONSUMER)
    scores, keys, dq = (in_flight(track, product) for product in track.layout.products)
    # From the issue of S and dP to the end of the wait for dP; dV begins before dS, or with dK.
    wait = 10 + 100 + 300 + (10 if early else 0) + 40
    assert [end - begin for begin, end in scores] == [wait] * 2
    assert [end - begin for begin, end in keys] == [10 + 40 + 200 + 20 if early else 20] * 2
    assert [end - begin for begin, end in dq] == [30]


def test_floors_are_the_throughputs_of_the_sm():
    floors = backward.EARLY.step_floors(marks.TILES["d128"])
    assert floors == {"tensor_cores": 10 * 128 * 64 * 128 / 4096, "exponentials": 128 * 64 / 16}


def test_costs_of_steps_turns_and_tiles():
    made = marks.recording("d128", seqlen_q=512, seqlen_k=128)
    costs = backward.EARLY.costs(made.track(0, CONSUMER))
    own = 5 * 10 + 100 + 300 + 40 + 200
    turn = 10 * len(marks.TURN)
    assert costs["step"].tolist() == [own] * 3 and costs["step_turn"].tolist() == [own + turn] * 4
    assert costs["turn"].tolist() == [turn] * 4 and costs["end"].tolist() == [30]


def test_the_analysis_is_json_and_its_shares_add_up(call):
    found = analyse(marks.recording("d64", **call))
    json.dumps(found, allow_nan=False)
    for role in backward.LATE.roles:
        shares = [row["share"] for row in found["roles"] if row["role"] == role]
        assert sum(shares) == pytest.approx(1)


def test_a_trace_names_query_blocks_and_a_picture_is_drawn(tmp_path):
    made = marks.recording("d128", causal=True, seqlen_q=512, seqlen_k=512, group=2)
    write_trace(made, tmp_path / "trace.json.gz")
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    blocks = [e["args"] for e in events if e["name"].startswith("query block")]
    assert {(b["head"], b["query_block"]) for b in blocks} == {
        (head, block) for head in (0, 1) for block in range(8)
    }
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"writer 0", "writer 1", "consumer 1", "consumer 1: S, dP", "consumer 0: dQ"} <= names
    figure = draw_block(made, analyse(made), 0)
    assert "Hopper backward, D 128, S 512, causal" in figure.get_suptitle()


def test_the_command_draws_a_recording_of_the_backward(tmp_path):
    marks.recording("d64", seqlen_k=700).save(tmp_path / "recording.npz")
    arguments = ["--recording", str(tmp_path / "recording.npz"), "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(cli.build("timeline"), ["timeline", *arguments, "--blocks", "0"])
    assert result.exit_code == 0, result.output
    assert (
        "a step with a turn at dQ" in result.output and "P, dS, of some consumer" in result.output
    )
    assert (tmp_path / "out/block-0.svg").exists()


def test_head_dims_of_the_wide_kernel_are_refused(tmp_path):
    arguments = ["timeline", "--backward", "--head-dim", "256", "--output", str(tmp_path)]
    result = CliRunner().invoke(cli.build("timeline"), [*arguments, "--seq-len", "512"])
    assert result.exit_code == 2
    assert "head_dim must be a multiple of 8 from 8 to 128, got 256" in result.output


def test_the_tile_of_a_call_has_what_a_recording_needs():
    work = Workload.of(batch=32, seqlen=512, heads=32, head_dim=64)
    assert library.tile_of(work, 132, "backward") == {
        "row": 0, "head_dim": 64, "block_m": 64, "block_n": 192, "stages": 3, "blocks_per_sm": 1,
        "consumers": 3,
    }  # fmt: skip


@pytest.mark.long
def test_the_instrumented_kernel_compiles_and_spills_little():
    path, usage, _ = timeline_library.built("backward")
    assert b"g_timeline" in path.read_bytes()
    assert library.InstrumentedBackward(path) is not None  # it exports what Python calls
    tiles = json.loads(torch.ops.attnscope.kernels())
    for tile in (t for t in tiles if t["kernel"] == "sm90_backward" and t["head_dim"] <= 128):
        assert library.usage_of(usage, tile, "backward")["spill_store_bytes"] <= 128


def test_a_call_has_the_fields_that_the_kernel_reads():
    text = (ROOT / "csrc/kernels/sm90_backward/record.cuh").read_text()
    (body,) = re.findall(r"struct TimelineBackward {(.*?)};", text, re.DOTALL)
    names = re.findall(r"\*?(\w+)(?=[,;])", body)
    assert names == [name for name, _ in library.Backward._fields_]
