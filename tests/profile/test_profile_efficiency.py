"""Utilisation, SM efficiency, occupancy and tensor-core share by their formulas."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_trace import H200, RECORDINGS, MadeTrace, recorded

from attnscope.profile.analysis.efficiency import efficiency, filled_share, kernel_occupancy
from attnscope.profile.attribution.owners import busy_ns
from attnscope.profile.trace.events import GpuEvent

PROPERTIES = H200


def kernel(
    threads: int, registers: int, shared: int, warps_per_sm: float | None = 99.0
) -> GpuEvent:
    return GpuEvent(
        "kernel", "k", 0, 1, 0, 7, block=(threads, 1, 1), registers=registers, shared_bytes=shared,
        warps_per_sm=warps_per_sm,
    )  # fmt: skip


@pytest.mark.parametrize("events", [0, 1])
def test_a_program_that_took_no_time_has_reasons(tmp_path: Path, events: int) -> None:
    made = MadeTrace()
    for _ in range(events):
        made.range("program", 5, 0)
    found = efficiency(made.attribution(tmp_path))
    assert found.gpu_utilisation is None and found.occupancy is None
    why = "took no time" if events else "must have an op, a range or a GPU event"
    assert all(why in reason for reason in found.reasons.values()) and len(found.reasons) == 4


def test_by_hand(tmp_path: Path) -> None:
    """A program of 100 us: two kernels overlap by 10 us, the third runs alone."""
    made = MadeTrace()
    made.range("program", 0, 100)
    half = {"blocks per SM": 0.5, "est. achieved occupancy %": 20}
    made.kernel("nvjet_sm90_tst", 10, 30, stream=7, **half)
    made.kernel("a", 30, 20, stream=8, **{"blocks per SM": 0.7, "est. achieved occupancy %": 50})
    made.kernel("b", 60, 10, stream=7, **{"blocks per SM": 3.0, "est. achieved occupancy %": 100})
    found = efficiency(made.attribution(tmp_path))
    assert (found.wall_ns, found.busy_ns, found.kernel_ns) == (100_000, 50_000, 60_000)
    assert found.gpu_utilisation == pytest.approx(0.5)
    # 20 us of 0.5, 10 us of both (1.2, at most 1), 10 us of 0.7, 10 us of a full GPU.
    assert found.sm_efficiency == pytest.approx((20 * 0.5 + 10 * 1 + 10 * 0.7 + 10 * 1) / 100)
    assert found.occupancy == pytest.approx((30 * 0.2 + 20 * 0.5 + 10 * 1.0) / 60)
    assert found.tensor_core_time_share == pytest.approx(0.5)
    assert found.occupancy_from == "the profiler's for 3 kernels, estimated here for 0"
    assert found.reasons == {}


@pytest.mark.parametrize("name", RECORDINGS)
def test_recorded_traces_are_plausible(name: str) -> None:
    found = efficiency(recorded(name))
    assert found.busy_ns == busy_ns(recorded(name).trace.kernels)
    for share in (found.gpu_utilisation, found.sm_efficiency, found.occupancy):
        assert share is not None and 0 < share <= 1
    assert found.sm_efficiency is not None and found.gpu_utilisation is not None
    assert found.sm_efficiency <= found.gpu_utilisation
    assert found.tensor_core_time_share is not None and 0 <= found.tensor_core_time_share <= 1


def test_many_streams_never_pass_the_wall(tmp_path: Path) -> None:
    streams = efficiency(recorded("streams"))
    assert streams.kernel_ns > streams.busy_ns
    made = MadeTrace()
    made.range("program", 10, 100)
    for stream in range(8):
        made.kernel("k", 10, 100, launch=12 + stream, stream=stream)
    found = efficiency(made.attribution(tmp_path))
    assert (found.gpu_utilisation, found.sm_efficiency) == (1.0, 1.0)


def test_hand_written_kernels_are_tensor_core_work() -> None:
    share = efficiency(recorded("ops")).tensor_core_time_share
    assert share is not None and share > 0.9
    assert efficiency(recorded("streams")).tensor_core_time_share == 0


def test_estimate_agrees_with_the_profilers_where_it_has_one() -> None:
    compared = 0
    for name in RECORDINGS:
        trace = recorded(name).trace
        for one in trace.kernels:
            if one.occupancy is not None:
                theoretical = filled_share(one, trace.devices[0])
                assert isinstance(theoretical, float) and one.warps_per_sm is not None
                assert min(theoretical, one.warps_per_sm / 64) * 100 == pytest.approx(
                    one.occupancy, abs=0.51
                )
                compared += 1
    assert compared > 200


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "share"),
    (
        (1024, 32, 0, 1.0),  # warps: two blocks of 32 fill 64
        (128, 128, 0, 16 / 64),  # registers: 16384 // 4096 = 4 warps in each of 4 groups
        (32, 32, 0, 32 / 64),  # blocks: 32 of one warp
        (384, 168, 213268, 12 / 64),  # shared memory: one block
        (384, 168, 100 * 1024, 12 / 64),  # registers: 3 warps a group
        (100, 16, 0, 1.0),  # 4 warps each, the last warp partial
        (128, 32, 116000, 4 / 64),  # shared memory: CUDA's reserve excludes a second block
        (256, 24, 40 * 1024, 40 / 64),  # shared memory: 5 blocks of 41 KiB in 228
    ),
)
def test_theoretical_occupancy(threads: int, registers: int, shared: int, share: float) -> None:
    assert filled_share(kernel(threads, registers, shared), PROPERTIES) == share


def test_cards_that_reserve_no_shared_memory() -> None:
    """A V100, and every card before sm_80: a kernel without shared memory takes none."""
    v100 = {"computeMajor": 7, "computeMinor": 0, "sharedMemPerMultiprocessor": 98304}
    assert filled_share(kernel(256, 32, 0), PROPERTIES | v100) == 1.0
    assert filled_share(kernel(256, 32, 32768), PROPERTIES | v100) == 24 / 64  # three blocks


def test_a_small_grid_limits_occupancy() -> None:
    assert kernel_occupancy(kernel(384, 168, 213268, 3.0), PROPERTIES) == 3 / 64
    assert kernel_occupancy(kernel(384, 168, 213268, 50.0), PROPERTIES) == 12 / 64


def test_what_is_missing_has_a_reason(tmp_path: Path) -> None:
    made = MadeTrace(None)
    made.kernel("k", 10, 5, **{"est. achieved occupancy %": 0})
    found = efficiency(made.attribution(tmp_path))
    assert found.occupancy is None and "of GPU 0" in found.reasons["occupancy"]
    assert found.gpu_utilisation is not None and found.occupancy_from is None
    later = kernel_occupancy(kernel(128, 32, 0), PROPERTIES | {"computeMajor": 99})
    assert (
        later == "capability must be one of 7.0, 7.5, 8.0, 8.6, 8.7, 8.9, 9.0, 10.0, 12.0, got 99.0"
    )
    made = MadeTrace()
    made.op("aten::add", 0, 10)
    nothing = efficiency(made.attribution(tmp_path))
    assert nothing.gpu_utilisation is None and len(nothing.reasons) == 4


@pytest.mark.parametrize("key", sorted({*H200} - {"id", "name", "totalGlobalMem", "numSms"}))
def test_a_property_that_the_trace_lacks_is_named(key: str) -> None:
    properties = {name: value for name, value in PROPERTIES.items() if name != key}
    said = filled_share(kernel(128, 32, 0), properties)
    assert said == f"the trace lacks {key} of GPU 0"
