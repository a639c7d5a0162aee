"""compute-sanitizer on the kernels: memory, races, barriers, uninitialised memory.

racecheck sees an mbarrier arrival for the arriving lane only, and no TMA copy. It therefore runs on
a variant of the library in which every reading lane arrives (csrc/attn/faults.cuh).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sanitized_calls
from tile_choice import tile_choices

from attnscope.common.tools import find_tool
from attnscope.inputs import Case
from attnscope.kernels import Call, choose_backward
from attnscope.stress.library import build

SCRIPT = Path(sanitized_calls.__file__)
NO_ERRORS = "ERROR SUMMARY: 0 errors"
CLEAN = {
    "memcheck": NO_ERRORS,
    "racecheck": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
    "synccheck": NO_ERRORS,
    "initcheck": NO_ERRORS,
}
# initcheck: `values` reads outputs written by TMA, which the tool does not see. synccheck: the two
# groups of the portable backward reach a barrier of all threads at different instructions, which
# the tool reports and PTX allows.
LEFT_OUT = {
    ("initcheck", "cuda", "values"),
    ("initcheck", "cuda-sm80", "values"),
    ("synccheck", "cuda-sm80", "gradients"),
    ("synccheck", "cuda-sm80", "turns"),
}
# dQ leaves the Hopper backward by bulk copies. 2025.3 does not see these, and reports the reads of
# calls that are clean with 2026.4. By its release notes 2025.4 is the first one that sees them.
SEES_BULK_COPIES = (2025, 4)
RUNS = [
    (tool, impl, part, share)
    for tool in CLEAN
    for impl in ("cuda", "cuda-sm80")
    for part in sanitized_calls.PARTS
    if (tool, impl, part) not in LEFT_OUT
    for share in range(sanitized_calls.SHARES[part])
]


def sees_bulk_copies() -> bool:
    version = find_tool("compute-sanitizer").version
    assert version is not None
    return tuple(map(int, version.split(".")[:2])) >= SEES_BULK_COPIES


def sanitize(
    tool: str, impl: str, part: str, share: int, library: Path | None = None
) -> subprocess.CompletedProcess[str]:
    sanitizer = shutil.which("compute-sanitizer")
    assert sanitizer is not None
    command = [sanitizer, f"--tool={tool}", "--error-exitcode=99", "--kernel-name=kns=attnscope"]
    environment = dict(os.environ)
    if part != "graph":  # a capture needs the cache
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    if library is not None:
        environment["ATTNSCOPE_CUDA_LIBRARY"] = str(library)
    return subprocess.run(
        [*command, sys.executable, str(SCRIPT), impl, part, str(share)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_the_calls_use_every_tile_of_the_table_and_its_slots_again():
    choices, count = tile_choices(list(sanitized_calls.reuse()))
    estimated, grouped_only = {8, 13}, {9, 10, 11}
    rows = [row for row in range(count) if row not in {*estimated, *grouped_only}]
    assert [choice.row for choice in choices[::3]] == rows
    assert all(choice.reuses_tile_slots for choice in choices)
    assert {choice.row for choice in choices} == set(rows)
    (handover,), _ = tile_choices(list(sanitized_calls.handover()))
    assert handover.reuses_tile_slots
    shapes, _ = tile_choices(list(sanitized_calls.shapes()))
    assert {c.row for c in shapes if c.grouping} == {2, 4, 5, *grouped_only, 15, 16}
    assert estimated <= {c.row for c in shapes}


def test_the_tensors_of_every_call_are_in_the_pool():
    for part in sanitized_calls.PARTS.values():
        for c in part():
            lengths = c.seqlens or ((c.seqlen_q, c.seqlen_k),) * c.batch
            queries, keys = (sum(pair[i] for pair in lengths) + 5 for i in (0, 1))
            most = max(queries * c.heads_q, keys * c.heads_kv) * c.head_dim
            assert most <= sanitized_calls.POOL, c


def backward_tile(c: Case, kernel: str) -> tuple[int, int, int]:
    """(head dim, queries, keys) of the tile that serves the backward of a case on an H200."""
    call = Call(
        c.head_dim, c.head_dim, c.seqlen_q, c.seqlen_k, c.batch, c.heads_q, c.heads_kv, c.causal,
        c.window, c.seqlens is not None, c.softcap, 132, 90,
    )  # fmt: skip
    if kernel == "sm80":  # a softcap that the Hopper kernels leave to the portable one
        call = call._replace(softcap=300.0)
    choice = choose_backward(call)
    assert choice["kernel"] == f"{kernel}_backward"
    return choice["tile"]["head_dim"], choice["tile"]["block_m"], choice["tile"]["block_n"]


# The portable table's other rows are for cards with less shared memory: the emulator runs them.
@pytest.mark.parametrize("part", sanitized_calls.BACKWARD)
@pytest.mark.parametrize(
    ("kernel", "tiles"),
    [
        (
            "sm90",
            {
                (64, 64, 192),
                (64, 64, 128),
                (64, 128, 128),
                (128, 80, 128),
                (128, 64, 128),
                (192, 64, 128),
                (256, 64, 128),
            },
        ),
        (
            "sm80",
            {(64, 128, 128), (96, 64, 128), (128, 64, 128), (192, 64, 64), (256, 64, 64)},
        ),
    ],
)
def test_the_backward_calls_use_every_tile_of_an_h200(kernel, tiles, part):
    cases = list(sanitized_calls.PARTS[part]())
    assert {backward_tile(c, kernel) for c in cases} == tiles
    softcap = {backward_tile(c, kernel)[0] for c in cases if c.softcap and c.head_dim <= 64}
    assert kernel == "sm80" or softcap == {128}, "head dim 64 with softcap takes another row"


@pytest.mark.gpu
@pytest.mark.sanitizer
@pytest.mark.parametrize(("tool", "impl", "part", "share"), RUNS)
def test_compute_sanitizer_finds_nothing(tool, impl, part, share):
    reads_bulk_copies = impl == "cuda" and part in sanitized_calls.BACKWARD
    if tool == "initcheck" and reads_bulk_copies and not sees_bulk_copies():
        pytest.skip("initcheck of compute-sanitizer 2025.3 does not see bulk copies")
    variant = build("racecheck") if tool == "racecheck" and impl == "cuda" else None
    result = sanitize(tool, impl, part, share, variant)
    found = [line for line in result.stdout.splitlines() if line.startswith("=========")]
    assert result.returncode == 0, "\n".join([*found[:60], result.stderr[-2000:]])
    assert CLEAN[tool] in result.stdout
    (done,) = re.findall(r"\d+ calls done in \d+ s", result.stdout)
    print(done)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.sanitizer
@pytest.mark.slow
def test_racecheck_finds_a_planted_race():
    """The variant whose scheduler does not wait for the readers of a tile's description."""
    result = sanitize("racecheck", "cuda", "handover", 0, build("planted-race"))
    assert "calls done" in result.stdout, result.stdout[-2000:] + result.stderr[-2000:]
    (hazards,) = re.findall(r"RACECHECK SUMMARY: (\d+) hazards? displayed", result.stdout)
    assert int(hazards) > 0
    assert "scheduler.cuh" in result.stdout
