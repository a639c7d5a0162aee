"""The turns of the Hopper backward's key blocks, by its device functions on the CPU.

tests/kernels/emulator replaces the PTX wrappers. tests/stress/test_backward_model.py explores the
hand-over of a turn; this checks the numbers: a tile waits for tiles of lower numbers alone, and for
as many as add before it. Thread blocks take tiles by number, so no wait can last for ever. Parts of
a tile count as tiles here: they have its blocks, each once.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CXX = shutil.which("g++")


@pytest.mark.skipif(CXX is None, reason="no g++")
def test_a_tile_waits_for_the_tiles_before_it_alone(tmp_path):
    """Dense and packed calls, windows, and every width of the tile order's sections."""
    program, folder = tmp_path / "turns", ROOT / "tests/kernels/emulator"
    command = [
        CXX,
        "-std=c++20",
        "-O1",
        "-w",
        "-DVECTOR_ADD=1",
        f"-I{folder}",
        f"-I{ROOT / 'csrc'}",
    ]
    subprocess.run([*command, folder / "sm90_turns.cpp", "-o", program], check=True)
    result = subprocess.run([program], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    ((turns, parts),) = re.findall(r"^(\d+) turns in order, (\d+) parts$", result.stdout, re.M)
    assert int(turns) > 9_000 and int(parts) > 9_000
