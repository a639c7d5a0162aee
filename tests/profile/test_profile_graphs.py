"""CUDA graphs: replayed kernels belong to the ops and ranges that captured them."""

from pathlib import Path

import pytest
from made_trace import RECORDED, Event, cpu, kernel, launch, named, op, write_trace

from attnscope.profile import Profile
from attnscope.profile.analysis.tables import REPLAY
from attnscope.profile.render.terminal import attribution_line

OPS = ("aten::mm", "aten::relu")


def capture(at: float, ops: tuple[str, ...] = OPS) -> list[Event]:
    """A capture of one launch of each op, 90 us from `at`, with a range around the second."""
    events = [cpu("cuda_runtime", "cudaStreamBeginCapture", at, at + 1, correlation=int(at) + 1)]
    for number, name in enumerate(ops):
        start = at + 20 * number + 5
        events += [op(name, start, start + 15), launch(int(start), start + 2)]
    events.append(named("inner", at + 24, at + 41))
    end = cpu("cuda_runtime", "cudaStreamEndCapture", at + 85, at + 86, correlation=int(at) + 86)
    return [*events, end]


def replay(correlation: int, at: float, *kernels: Event) -> list[Event]:
    return [launch(correlation, at, "cudaGraphLaunch"), *kernels]


def profile(folder: Path, *events: Event) -> Profile:
    return Profile.read(write_trace(folder / "t.json", *events))


def owners(found: Profile) -> dict[str, tuple[int, float]]:
    rows = found.operators().to_dict("records")
    return {row["name"]: (row["kernels"], row["self_gpu_us"]) for row in rows if row["kernels"]}


def test_replays_of_a_recorded_capture_are_credited_to_its_ops() -> None:
    found = Profile.read(RECORDED / "graph_both.json.gz")
    rows = found.operators().set_index("name")
    assert rows.kernels[["attnscope::forward", "aten::mm", "aten::clamp_min"]].tolist() == [3] * 3
    kernels = {row.symbol: row for row in found.kernels().itertuples()}
    product = next(row for symbol, row in kernels.items() if symbol.startswith("nvjet"))
    assert rows.self_gpu_us["aten::mm"] == pytest.approx(product.total_us)
    assert product.op == "aten::mm" and product.range == "replay"
    assert REPLAY not in rows.index and found.attribution.replayed_ns == 0
    assert found.attribution.captured_ns == found.attribution.total_ns - 1727
    assert "by ops that captured it into CUDA graphs" in attribution_line(found.attribution)
    # One captured call ran three times: its mean and its FLOPs are not those of a call.
    assert rows.gpu_mean_us.isna()["aten::mm"]
    assert "replayed by a CUDA graph" in rows.flops_reason["aten::mm"]


def test_kernels_of_one_stream_are_in_the_order_of_the_capture(tmp_path: Path) -> None:
    found = profile(
        tmp_path, *capture(0), named("replays", 95, 200),
        *replay(500, 100, kernel(500, 110, 120, "a"), kernel(500, 121, 141, "b")),
        *replay(501, 105, kernel(501, 150, 161, "a"), kernel(501, 162, 183, "b")),
    )  # fmt: skip
    assert owners(found) == {"aten::mm": (2, 21), "aten::relu": (2, 41)}
    stages = found.stages().set_index("path")
    assert stages.gpu_us["replays"] == 62 and stages.gpu_self_us["replays"] == 21
    inner = stages.loc["replays/inner"]
    assert (inner.gpu_us, inner.kernels, inner.idle_us) == (41, 2, 0)
    assert set(found.links()["range"]) == {"replays", "replays/inner"}


def test_numbers_of_nodes_order_kernels_of_several_streams(tmp_path: Path) -> None:
    nodes = [{"graph node id": number} for number in (1 << 32, (1 << 32) + 1)]
    late = kernel(500, 130, 140, "a", 7, **nodes[0]), kernel(500, 110, 115, "b", 8, **nodes[1])
    found = profile(tmp_path, *capture(0), *replay(500, 100, *late))
    assert owners(found) == {"aten::mm": (1, 10), "aten::relu": (1, 5)}
    unnumbered = kernel(500, 130, 140, "a", 7), kernel(500, 110, 115, "b", 8)
    found = profile(tmp_path, *capture(0), *replay(500, 100, *unnumbered))
    assert owners(found) == {REPLAY: (2, 15)}


def test_marks_of_nodes_are_stages(tmp_path: Path) -> None:
    marked = kernel(500, 110, 120, "a", **{"graph node id": 7, "str": "projection"})
    plain = kernel(500, 121, 125, "b", **{"graph node id": 8})
    found = profile(tmp_path, named("loop", 90, 200), *replay(500, 100, marked, plain))
    stages = found.stages().set_index("path")
    assert stages.gpu_self_us.to_dict() == {"loop": 4, "loop/projection": 10}
    found = profile(tmp_path, *replay(500, 100, marked, plain))
    assert found.stages().set_index("path").gpu_self_us.to_dict() == {
        "projection": 10,
        "(in no range)": 4,
    }


@pytest.mark.parametrize(
    ("second", "kernels", "known"),
    [
        (OPS, 2, True),  # whichever it is, the ops are the same
        (("aten::mm", "aten::add"), 2, False),
        (("aten::mm", "aten::relu", "aten::add"), 2, True),  # of another length
        (OPS, 3, False),  # a replay of a graph that is not in the trace
    ],
)
def test_a_replay_that_may_be_of_several_captures_belongs_to_the_replay(
    second: tuple[str, ...], kernels: int, known: bool, tmp_path: Path
) -> None:
    work = [kernel(500, 210 + 10 * i, 219 + 10 * i, f"k{i}") for i in range(kernels)]
    found = profile(tmp_path, *capture(0), *capture(100, second), *replay(500, 200, *work))
    assert (REPLAY not in owners(found)) == known and found.attribution.share == 1
