"""Truncated, edited or invented records of models: an error with the place, no traceback."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from step_trace import record

from attnscope.studies.lm.pair import pair_report
from attnscope.studies.lm.records import ProfiledModel, TimedModel, read_model, read_models
from attnscope.studies.lm.report import model_report
from attnscope.studies.records import Row

GPU_KEYS = ("total_us", "owned", "phases", "kernels", "flops", "softmax_flops", "efficiency")
IDENTITY = {"model", "impl", "precision", "context", "batch", "parameters", "status", "reason"}
IDENTITY |= {"d_model", "d_ff", "layers", "heads", "vocabulary"}
LOST = object()
WRONG = (LOST, None, "x", -1, 0, 1e12, float("nan"), [], {}, True)
Place = tuple[str | int, ...]


@pytest.fixture(params=["GPU", "CPU"])
def good(request: pytest.FixtureRequest, tmp_path: Path) -> Row:
    found = record(tmp_path, context=16)
    found["findings"] = [{"kind": "tiny grid", "title": "one kernel"}]
    if request.param == "CPU":
        found = {key: value for key, value in found.items() if key not in (*GPU_KEYS, "findings")}
        found |= {"no_kernels": "no GPU", "peak_memory_gib": None}
    return found


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """The places of all values in a record; for each list, only its first item."""
    keys = value if isinstance(value, dict) else range(min(1, len(value)))
    for key in keys:
        yield (*at, key)
        if isinstance(value[key], dict | list):
            yield from places(value[key], (*at, key))


def damaged(found: Row, at: Place, value: object) -> Row:
    copied: Any = copy.deepcopy(found)
    inner = copied
    for key in at[:-1]:
        inner = inner[key]
    if value is LOST:
        del inner[at[-1]]
    else:
        inner[at[-1]] = value
    return copied


def test_a_record_as_measured_is_believed(good: Row) -> None:
    (found,) = read_models([good])
    assert isinstance(found, TimedModel) and found.status == "ok"
    assert isinstance(found, ProfiledModel) == (good["no_kernels"] is None)


def test_damage_anywhere_is_refused_or_harmless(good: Row, tmp_path: Path) -> None:
    """After any loss or replacement, the record is refused or its reports can be written."""
    other = record(tmp_path, scale=2.0) | {"model": "other"}
    refused = 0
    for at in places(good):
        for value in WRONG:
            bad = damaged(good, at, value)
            try:
                row = read_models([other, bad])[1]
            except ValueError as error:
                assert at[0] in IDENTITY and "record 2" in str(error)
                continue
            if row.status == "refused":
                refused += 1
                assert str(row.reason).startswith("made 16 naive")
                continue
            model_report([other, bad], {})
            if bad["status"] == "ok" and not bad["no_backward"]:
                pair_report([other, bad], {})
    assert refused > 50


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (("phases", "backward"), LOST, ": phases must have backward, got forward, optimizer"),
        (("kernels", 0, "category"), "magic", ": kernels 0: category must be one of GEMM, "),
        (("kernels", 0, "phase"), "sideways", ": kernels 0: phase must be one of forward, "),
        (("efficiency", "gpu_utilisation"), 1.5, ": efficiency: gpu_utilisation must be at least"),
        (("wall_ms", "backward"), LOST, ": backward must have wall times above 0, got none"),
        (("wall_ms", "forward", 0), 0.0, ": forward must have wall times above 0, got none"),
        (("flops", 0, "flops"), -5, ": flops 0: flops must be at least 0, got -5"),
        (("flops", 0, "flops"), 1.5, ": flops 0: flops must be an integer, got 1.5"),
        (("owned",), LOST, " must have the key owned, got none"),
    ],
)
def test_the_reason_has_the_place(tmp_path: Path, at: Place, value: object, says: str) -> None:
    found = read_model(damaged(record(tmp_path), at, value), "record 1")
    assert found.status == "refused" and str(found.reason).startswith(f"made 8 naive{says}")


def test_rows_of_something_else_are_no_records() -> None:
    with pytest.raises(ValueError, match="record 1 must have the key model, got none"):
        read_models([{"impl": "cuda", "workload": "forward", "status": "ok"}])
    with pytest.raises(ValueError, match="record 1 must be an object, got 7"):
        read_models([7])
