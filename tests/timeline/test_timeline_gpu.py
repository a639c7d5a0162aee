"""The timeline of real launches: the marks match the work that the call requires."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import timeline_library
import torch
from helpers import assert_matches
from timeline_shapes import SHAPES

from attnscope.bench.workloads import Workload
from attnscope.timeline import layout, library, session
from attnscope.timeline.analysis import analyse
from attnscope.timeline.forward import CONSUMER, heads_together
from attnscope.timeline.recording import Recording

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]


@pytest.fixture(scope="module", autouse=True)
def built():
    return timeline_library.built()


@pytest.fixture(scope="module", params=SHAPES)
def recorded(request) -> tuple[Workload, Recording]:
    work = Workload.of(**SHAPES[request.param])
    return work, session.record(work, torch.device("cuda"))


def units_of_tiles(rows: int, heads: int, consumers: int, low: int = 0) -> list[tuple[int, int]]:
    """First unit of each tile of heads with `rows` rows each, and one past its last. Where full
    tiles have n units too many, the first n tiles have one less. `low`: heads at the end of a
    launch, whose tiles have that number of units less."""
    units = -(-rows // 64) * heads
    tiles = -(-units // (consumers - low))
    less = tiles * consumers - units
    begins = [tile * consumers - min(tile, less) for tile in range(tiles)]
    return list(zip(begins, [*begins[1:], units], strict=True))


def visible_blocks(work: Workload, first_row: int, end_row: int, block_n: int) -> int:
    """Key blocks that any of these query rows sees, without a window."""
    last_row = end_row - 1
    keys = work.seqlen_k
    if work.causal:
        keys = min(max(last_row + work.seqlen_k - work.seqlen_q + 1, 0), keys)
    return -(-keys // block_n) if first_row <= last_row else 0


def test_every_tile_with_keys_is_recorded_once_with_its_key_blocks(recorded):
    work, made = recorded
    names = ("block_m", "block_n", "heads", "heads_per_tile", "key_parts")
    block_m, block_n, group, heads_per_tile, parts = (made.facts["tile"][n] for n in names)
    together, rows = heads_together(made.facts), work.seqlen_q * group

    def blocks_of(first: int, end: int) -> int:
        first_row = 64 * (first // together)
        end_row = min(64 * ((end - 1) // together) + 64, rows)
        return visible_blocks(work, first_row // group, -(-end_row // group), block_n * parts)

    seen = defaultdict(list)
    for at in range(len(made.blocks)):
        for (head, batch, first, *_, end), blocks in zip(
            made.notes(at).tolist(), made.steps_of_tiles(at), strict=True
        ):
            seen[batch, head].append((first, end))
            assert blocks == blocks_of(first, end)
    units, is_low = block_m // 64, []
    for batch in range(work.batch):
        for head in range(0, work.heads_q, group * heads_per_tile * together):
            tiles = [
                [one for one in units_of_tiles(rows, together, units, low) if blocks_of(*one)]
                for low in range(2 if units > 2 else 1)
            ]
            is_low.append(tiles.index(sorted(seen.pop((batch, head), []))))
    assert not seen
    assert is_low == sorted(is_low)
    assert made.lost_tiles == 0


def test_every_role_marks_every_tile_and_step_in_order(recorded):
    """`track` refuses missing marks, marks out of order and marks of no tile."""
    work, made = recorded
    names = ("block_n", "heads", "consumers", "heads_per_tile", "key_parts")
    block_n, group, count, heads_per_tile, parts = (made.facts["tile"][n] for n in names)
    per_head, together = count // heads_per_tile // parts, heads_together(made.facts)
    rows = work.seqlen_q * group

    def blocks_of(unit: int) -> int:
        first = 64 * (unit // together)
        return visible_blocks(work, first // group, -(-min(first + 64, rows) // group), block_n)

    for at in range(len(made.blocks)):
        assert len(set(made.tile_counts[at])) == 1
        _, producer, _, *consumers = made.tracks(at)
        tiles = len(made.steps_of_tiles(at))
        loads = np.bincount(producer.tile[producer.of("step.IssueK")], minlength=tiles)
        assert (loads == made.steps_of_tiles(at)).all()
        for number, track in enumerate(consumers):
            issues = track.tile[track.of("tile.IssueScores", "step.IssueScores")]
            own = []
            for head, _, first, *_, end in made.notes(at).tolist():
                unit = first + number // parts % per_head
                # The last tile of a sequence may have fewer heads or units.
                has_unit = unit < end and head + number // parts // per_head < work.heads_q
                # A part has every other block.
                part = number % parts
                own.append(len(range(part, blocks_of(unit), parts)) if has_unit else 0)
            assert np.bincount(issues, minlength=tiles).tolist() == own


def test_the_marks_change_no_result_and_measures_are_possible(recorded):
    _, made = recorded
    disturbance = made.facts["disturbance"]
    assert disturbance["same_output"]
    assert 0.3 < disturbance["slowdown"] < 3  # a kernel of a few microseconds varies this much
    summary = analyse(made)
    if len(made.blocks) > 8:  # the device timer is too coarse for a few short blocks
        assert 0.5e3 < summary["clock_mhz"] < 2.5e3
    shares = summary["overlap"]
    parts = shares["tensor"] + shares["softmax_alone"] + shares["neither"]
    assert parts == pytest.approx(1)
    # Tensor cores cannot have done more than their rate allows while products were in flight.
    assert summary["floors"]["tensor_share"] <= shares["tensor"]
    floor = summary["floors"]["tensor_cores"] / made.facts["tile"]["consumers"]
    step = summary["cycles"]["step"]
    assert step["count"] == 0 or step["median"] > floor


def test_a_block_lives_on_one_sm_within_its_tile(recorded):
    _, made = recorded
    _, blocks = np.unique(made.head[:, layout.SM], return_counts=True)
    assert blocks.max() <= made.facts["tile"]["blocks_per_sm"]
    assert (made.ends[:, :, layout.SM] == made.head[:, None, layout.SM]).all()


def test_the_instrumented_kernel_matches_the_reference(built):
    work = Workload.of(batch=2, seqlen=300, heads=4, head_dim=128, causal=True)
    q, k, v, *_ = work.inputs("cuda", 0)
    kernel = library.InstrumentedForward(built[0])
    words = torch.zeros(1 << 22, dtype=torch.int32, device="cuda")
    kernel.attach(words, CONSUMER + 3, 16, 64)
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    tile = library.tile_of(work, sms)
    assert_matches(*kernel.forward(q, k, v, True, tile), q, k, v, causal=True)
    with pytest.raises(RuntimeError, match="choose another tile than the installed build"):
        kernel.forward(q, k, v, True, tile | {"consumers": tile["consumers"] + 1})


def test_what_passes_the_capacity_is_lost_and_reported(monkeypatch):
    monkeypatch.setattr(session, "MOST_STEP_ROWS", 70)
    work = Workload.of(batch=4, seqlen=2048, heads=16, head_dim=128)
    made = session.record(work, torch.device("cuda"))
    assert made.facts["disturbance"]["same_output"]
    assert made.lost_tiles > 0
    assert analyse(made)["lost_tiles"] == made.lost_tiles
    for at in range(len(made.blocks)):
        assert made.track(at, CONSUMER).tile.max() == 1  # two tiles of 32 blocks fit


def test_work_that_the_kernel_cannot_do_is_refused():
    with pytest.raises(ValueError, match="dtype must be .*got 'float32'"):
        session.record(
            Workload.of(seqlen=8, heads=1, head_dim=64, dtype="float32"), torch.device("cuda")
        )
