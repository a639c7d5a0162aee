"""`attnscope nsys` for real: the gated report has the gated kernels and no others."""

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from attnscope import cli
from attnscope.common.tools import find_tool
from attnscope.nsight import ncu
from attnscope.nsight.analysis import Analysis
from attnscope.nsight.nsys import NsysSettings, record
from attnscope.nsight.selection import choose

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
    program = [sys.executable, str(PROGRAM), "4", "1"]
    record(NsysSettings(command=program, range=RANGE, probe=False), tmp_path / "nsys")
    chosen = choose(tmp_path / "nsys", 3, RANGE)
    arguments = ["--top", "3", "--from", str(tmp_path / "nsys"), "--range", RANGE, "--set", "sol"]
    arguments += ["--output", str(tmp_path / "ncu"), "--", *program]
    done = CliRunner().invoke(cli.build("ncu"), ["ncu", *arguments])
    assert done.exit_code == 0, done.output
    assert all(f"{one.shown}, " in done.output for one in chosen)
    kernels = ncu.read(tmp_path / "ncu")
    assert Counter(one.name for one in kernels) == {one.shown: one.calls for one in chosen}


@pytest.mark.slow
def test_the_captures_asked_for_are_analysed_together(tmp_path):
    command = [sys.executable, str(PROGRAM), "4", "1"]
    settings = NsysSettings(command=command, range="step@attnscope", captures=2)
    found = record(settings, tmp_path / "two")
    of = Analysis(found.recording)
    assert [(one.names[-1][0], one.count) for one in of.stages] == [("step", 2)]
    assert "only the first 2 of 5 ranges step@attnscope were recorded" in found.notes[0]
    assert len(names(of)) % 2 == 0 and len(list((tmp_path / "two").glob("*.nsys-rep"))) == 3


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["nsys", "ncu"])
def test_a_range_that_no_kernel_is_in_is_an_error_with_those_that_exist(tool, tmp_path):
    arguments = ["--range", "absent", "--output", str(tmp_path / "run"), "--", sys.executable]
    done = CliRunner().invoke(cli.build(tool), [tool, *arguments, str(PROGRAM), "4", "1"])
    assert done.exit_code in (1, 2)
    assert "absent" in done.output and "measure@attnscope" in done.output
