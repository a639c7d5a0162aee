"""The timeline of real backward launches: the marks match the work that the call requires."""

from __future__ import annotations

import numpy as np
import pytest
import timeline_library
import torch

from attnscope.bench.workloads import Workload
from attnscope.timeline import library, session
from attnscope.timeline.analysis import analyse
from attnscope.timeline.backward import CONSUMER, KEYS, PRODUCER, WRITER
from attnscope.timeline.recording import Recording

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]
SHAPES = {
    "d64": {"batch": 8, "seqlen": 1024, "heads": 16, "head_dim": 64, "causal": True},
    "d64-few": {"batch": 1, "seqlen": 500, "heads": 8, "head_dim": 64},
    "d128": {"batch": 2, "seqlen": 1000, "heads": 16, "head_dim": 128},
    "d128-causal": {"batch": 3, "seqlen": 1000, "heads": 16, "head_dim": 128, "causal": True},
    "d128-gqa": {"batch": 1, "seqlen": 700, "heads_q": 8, "heads_kv": 2, "head_dim": 128},
    "d64-gqa": {"seqlen": 600, "heads_q": 8, "heads_kv": 2, "head_dim": 64, "causal": True},
    "d96-long": {"batch": 1, "seqlen_q": 2100, "seqlen_k": 700, "heads": 8, "head_dim": 96},
    "whole-heads": {"batch": 66, "seqlen": 200, "heads": 4, "head_dim": 128, "causal": True},
    "more-keys": {"seqlen_q": 100, "seqlen_k": 400, "heads": 2, "head_dim": 64, "causal": True},
}


@pytest.fixture(scope="module", autouse=True)
def built():
    return timeline_library.built("backward")


@pytest.fixture(scope="module", params=SHAPES)
def recorded(request) -> tuple[Workload, Recording]:
    work = Workload.of(**SHAPES[request.param])
    return work, session.record(work, torch.device("cuda"), mode="backward")


def pairs_seen(work: Workload, first_key: int, block: int, block_m: int) -> bool:
    """Whether a query of the block sees a key of the consumer whose keys begin there."""
    last_query = min((block + 1) * block_m, work.seqlen_q) - 1
    seen = last_query + work.seqlen_k - work.seqlen_q if work.causal else work.seqlen_k - 1
    return first_key < work.seqlen_k and seen >= first_key


def test_every_block_that_a_tile_sees_is_recorded_once(recorded):
    work, made = recorded
    block_m, block_n = made.facts["tile"]["block_m"], made.facts["tile"]["block_n"]
    seen = sorted(  # parts of a tile have some of its blocks, or of its query heads
        (batch, head, first, block)
        for at in range(len(made.blocks))
        for first_head, end_head, batch, first, begin, end, *_ in made.notes(at).tolist()
        for head in range(first_head, end_head)
        for block in range(begin, end)
    )
    assert seen == [
        (batch, head, first, block)
        for batch in range(work.batch)
        for head in range(work.heads_q)
        for first in range(0, work.seqlen_k, block_n)
        for block in range(-(-work.seqlen_q // block_m))
        if pairs_seen(work, first, block, block_m)
    ]
    assert made.lost_tiles == 0


def test_every_role_marks_every_tile_and_step_in_order(recorded):
    """`track` refuses missing marks, marks out of order and marks of no step."""
    work, made = recorded
    tile = made.facts["tile"]
    for at in range(len(made.blocks)):
        assert len(set(made.tile_counts[at])) == 1
        tracks, steps = made.tracks(at), made.steps_of_tiles(at)
        producer, writers = tracks[PRODUCER], tracks[WRITER:CONSUMER]
        for lanes, mark in (([producer], "step.IssueQ"), (writers, "step.Issue")):
            tiles = np.concatenate([track.tile[track.of(mark)] for track in lanes])
            assert (np.bincount(tiles, minlength=len(steps)) == steps).all()
        for number, track in enumerate(tracks[CONSUMER:]):
            issues = np.bincount(track.tile[track.of("step.IssueScores")], minlength=len(steps))
            assert issues.tolist() == [
                (end_head - first_head)
                * sum(
                    pairs_seen(work, first + KEYS * number, block, tile["block_m"])
                    for block in range(begin, end)
                )
                for first_head, end_head, _, first, begin, end, *_ in made.notes(at).tolist()
            ]


def test_the_marks_change_no_result_and_measures_are_possible(recorded):
    _, made = recorded
    disturbance = made.facts["disturbance"]
    assert disturbance["same_output"]
    assert 0.3 < disturbance["slowdown"] < 3
    summary = analyse(made)
    shares = summary["overlap"]
    parts = shares["tensor"] + shares["softmax_alone"] + shares["neither"]
    assert parts == pytest.approx(1)
    assert summary["floors"]["tensor_share"] <= shares["tensor"]


def test_another_tile_than_the_caller_expects_is_refused(built):
    work = Workload.of(batch=2, seqlen=300, heads=4, head_dim=128, causal=True)
    q, k, v, *_ = work.inputs("cuda", 0)
    kernel = library.InstrumentedBackward(built[0])
    words = torch.zeros(1 << 22, dtype=torch.int32, device="cuda")
    kernel.attach(words, CONSUMER + 3, 16, 64)
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    tile = library.tile_of(work, sms, "backward")
    out, lse = torch.ops.attnscope.forward(q, k, v, scale=1.0, causal=True, variant=90)
    with pytest.raises(RuntimeError, match="choose another tile than the installed build"):
        kernel.backward(out, q, k, v, out, lse, True, tile | {"block_n": tile["block_n"] + 64})
