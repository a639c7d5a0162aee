"""`attnscope nsys` for real: the gated report has the gated kernels and no others."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from attnscope.common.tools import find_tool
from attnscope.nsight import ncu
from attnscope.nsight.analysis import Analysis
from attnscope.nsight.nsys import NsysSettings, record
from attnscope.nsight.selection import choose, pattern

PROGRAM = Path(__file__).parents[1] / "support/gated_training.py"
RANGE = "measure@attnscope"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_tool("nsys").version is None, reason="nsys is not installed"),
]


def names(of: Analysis) -> list[str]:
    """The kernels in the order in which they ran."""
    keys = of.work["name"][of.is_kernel]
    return [of.recording.name(key) for key in keys[np.argsort(of.work["start"][of.is_kernel])]]


@pytest.mark.slow
def test_the_gated_report_has_the_gated_kernels_and_no_others(tmp_path):
    command = [sys.executable, str(PROGRAM), "200"]
    whole = record(NsysSettings(command=command), tmp_path / "whole")
    gated = record(NsysSettings(command=command, range=RANGE), tmp_path / "gated")
    assert (whole.exit_code, gated.exit_code) == (0, 0)
    for one in (whole, gated):
        assert any(note.startswith("nsys stats agrees") for note in one.notes)
    everything, inside = Analysis(whole.recording), Analysis(whole.recording, RANGE)
    assert names(Analysis(gated.recording)) == names(inside)
    assert len(names(inside)) < len(names(everything)) / 100
    sizes = [(tmp_path / name / "report.nsys-rep").stat().st_size for name in ("whole", "gated")]
    assert sizes[1] <= sizes[0] / 2
    done = json.loads((tmp_path / "gated/commands.json").read_text())["commands"]
    assert [one["label"] for one in done[:3]] == ["probe", "probe-export", "profile"]


@pytest.mark.slow
def test_ncu_profiles_the_longest_kernels_that_nsys_found(tmp_path):
    """Those of the backward too, which autograd's thread launches."""
    command = [sys.executable, str(PROGRAM), "4"]
    record(NsysSettings(command=command, range=RANGE, probe=False), tmp_path / "nsys")
    chosen = choose(tmp_path / "nsys", 3, RANGE)
    settings = ncu.Settings(
        command=command, sets=["sol"], ranges=[RANGE], kernels=[pattern(chosen)], replay="kernel"
    )
    kernels = ncu.record(settings, tmp_path / "ncu", None)
    assert {one.function for one in kernels} == {one.function for one in chosen}
    assert len(kernels) == sum(one.calls for one in chosen)
