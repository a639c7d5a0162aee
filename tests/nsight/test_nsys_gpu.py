"""`attnscope nsys` for real: the gated report has the gated kernels and no others."""

import sys
from pathlib import Path

import numpy as np
import pytest

from attnscope.common.tools import find_tool
from attnscope.nsight.analysis import Analysis
from attnscope.nsight.nsys import NsysSettings, record

PROGRAM = Path(__file__).parents[1] / "support/nsys_program.py"
RANGE = "measure@attnscope"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_tool("nsys").version is None, reason="nsys is not installed"),
]


@pytest.mark.slow
def test_the_gated_report_has_the_gated_kernels_and_no_others(tmp_path):
    command = [sys.executable, str(PROGRAM), "--rest", "200"]
    whole = record(NsysSettings(command=command), tmp_path / "whole")
    gated = record(NsysSettings(command=command, range=RANGE), tmp_path / "gated")
    assert (whole.exit_code, gated.exit_code) == (0, 0)
    for one in (whole, gated):
        assert any(note.startswith("nsys stats agrees") for note in one.notes)
    everything, inside = Analysis(whole.recording), Analysis(whole.recording, RANGE)
    found = Analysis(gated.recording)

    def names(of: Analysis) -> list[str]:
        keys = of.work["name"][of.is_kernel]
        return [of.recording.name(key) for key in keys[np.argsort(of.work["start"][of.is_kernel])]]

    assert names(found) == names(inside)
    assert len(names(inside)) < len(names(everything)) / 2
    sizes = [(tmp_path / name / "report.nsys-rep").stat().st_size for name in ("whole", "gated")]
    assert sizes[1] <= sizes[0] / 2
