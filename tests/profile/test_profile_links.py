"""From kernels to launches, ops and lines of Python, and back."""

from __future__ import annotations

import pytest
from made_trace import RECORDINGS, recorded

from attnscope.profile.analysis.links import COLUMNS, kernel_links, kernels_of_line, line_table


@pytest.mark.parametrize("name", RECORDINGS)
def test_every_piece_of_gpu_work_has_one_row(name: str) -> None:
    attribution = recorded(name)
    links = kernel_links(attribution)
    assert tuple(links.columns) == COLUMNS
    assert list(links["symbol"]) == [work.name for work in attribution.trace.gpu]
    kernels = links[links["kind"] == "kernel"]
    assert kernels["gpu_us"].sum() == pytest.approx(attribution.total_ns / 1e3)
    assert links["launch"].notna().all() and (links["wait_us"] > 0).all()


def test_from_kernel_to_launch_op_range_and_line() -> None:
    links = kernel_links(recorded("stack"))
    norm = links[links["kernel"].str.startswith("vectorized_layer_norm")].iloc[0]
    assert norm["launch"] == "cudaLaunchKernel"
    assert norm["op"] == "aten::native_layer_norm"
    assert norm["ops"] == "aten::layer_norm > aten::native_layer_norm"
    assert norm["range"] == "forward/attention"
    assert norm["module"] == "Sequential_0.Block_0.LayerNorm_0"
    assert norm["line"] == "traces.py(44): forward"
    frames = norm["frames"].split("\n")
    assert frames[0] == "traces.py(105): <module>" and frames.index(norm["line"]) == 6
    assert "torch/nn/functional.py(2914): layer_norm" in frames[7:]


def test_backward_leads_to_the_forward_op_and_its_line() -> None:
    links = kernel_links(recorded("stack"))
    back = links[links["range"].eq("backward") & links["op"].eq("aten::mm")]
    assert len(back) == 32 and set(back["forward_op"]) == {"aten::addmm"}
    assert set(back["line"]) == {"traces.py(44): forward"}
    assert back["module"].str.contains("Linear").all()
    assert links[links["range"].eq("optimizer")]["forward_op"].isna().all()


def test_launches_outside_ops() -> None:
    raw = kernel_links(recorded("raw"))
    plain = raw[raw["kernel"] == "raw_add"]
    assert plain["op"].isna().all() and set(plain["launch"]) == {"cuLaunchKernelEx"}
    assert [None if r != r else r for r in plain["range"]] == ["outer", "outer/inner", None]
    replayed = kernel_links(recorded("graph"))
    assert set(replayed["launch"]) == {"cudaGraphLaunch"}


def test_lines_back_to_kernels() -> None:
    attribution = recorded("stack")
    links = kernel_links(attribution)
    lines = line_table(links)
    assert list(lines["line"])[:2] == ["traces.py(44): forward", "traces.py(53): f"]
    assert lines["gpu_us"].sum() == pytest.approx(attribution.total_ns / 1e3)
    assert lines["kernels"].sum() == len(attribution.trace.kernels)
    found = kernels_of_line(links, "traces.py(37)")
    assert set(found["kernel"]) == {"elementwise mul<bf16> vec8"}
    assert len(kernels_of_line(links, "adam.py")) > len(found)
    # Both directions must agree.
    assert set(found["line"]) == {"traces.py(37): forward"}


def test_without_stacks() -> None:
    links = kernel_links(recorded("train"))
    assert links["line"].isna().all() and links["frames"].isna().all()
    assert list(line_table(links)["line"]) == ["(no line recorded)"]
    with pytest.raises(ValueError, match="stacks were not recorded"):
        kernels_of_line(links, "traces.py")
