"""The turns and parts of the Hopper backward's tiles, by its device functions on the CPU.

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
pytestmark = pytest.mark.skipif(CXX is None, reason="no g++")


def run(name: str, folder: Path) -> str:
    """What a program of the emulator prints."""
    program, emulator = folder / name, ROOT / "tests/kernels/emulator"
    command = [CXX, "-std=c++20", "-O1", "-w", "-DVECTOR_ADD=1", f"-I{emulator}"]
    command += [f"-I{ROOT / 'csrc'}", emulator / f"{name}.cpp", "-o", program]
    subprocess.run(command, check=True)
    result = subprocess.run([program], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    return result.stdout


def test_a_tile_waits_for_the_tiles_before_it_alone(tmp_path):
    """Dense and packed calls, windows, and every width of the tile order's sections."""
    said = r"(\d+) turns in order, (\d+) of them ascending, (\d+) in packed calls; "
    said += r"(\d+) parts, (\d+) heads of parts; (\d+) tiles listed\n"
    counts = re.fullmatch(said, run("sm90_turns", tmp_path)).groups()
    turns, ascending, packed, parts, heads, listed = map(int, counts)
    assert min(turns, parts, heads) > 9_000 and min(ascending, packed, listed) > 2_000, counts


def test_the_postprocess_adds_up_what_parts_have_stored(tmp_path):
    """Every tile of the table; ragged tiles, head dims and parts without a step."""
    (count,) = re.fullmatch(r"(\d+) sums\n", run("sm90_parts", tmp_path)).groups()
    assert int(count) > 1_000_000
