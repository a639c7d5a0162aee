"""The portable backward kernels on the CPU: every tile, compared with fp64.

tests/kernels/emulator replaces the PTX wrappers and CUDA headers. It runs each thread of a block as
a coroutine, warps in random order, with NaN in shared memory and in rows that no call may read.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CXX = shutil.which("g++")
TILES = 9  # rows of kBackwardTiles

# See `Case` in sm80_backward.cpp. Each row of the tile table once, then packed batches, whose
# sequences have the lengths 0, more than max_seqlen, 2/3, 1, 0, 1/3 of it, and empty calls.
CASES = (
    "row=0,D=64,Sq=150,Sk=140,B=2,right=0",
    "row=1,D=40,Dv=64,Sq=140,Sk=150,Hq=2,Hkv=1,det=1",
    "row=2,D=80,Dv=96,Sq=100,Sk=150,left=50,right=9,half=1",
    "row=3,D=128,Sq=70,Sk=140,Hq=2,Hkv=1,dlse=1",
    "row=4,D=128,Sq=70,Sk=90,right=0,cap=10",
    "row=5,D=192,Dv=128,Sq=70,Sk=90,right=0,half=1,cap=300",
    "row=6,D=256,Sq=70,Sk=90,scale=-0.05",
    "row=7,D=256,Dv=8,Sq=70,Sk=90,right=0,det=1,cap=15",
    "row=8,D=256,Sq=70,Sk=50,left=20,right=0,det=1",
    "row=0,D=64,packed=1,B=6,Sq=130,Sk=150,left=10,right=10,det=1",
    "row=4,D=128,packed=1,B=6,Sq=90,Sk=60,right=0,Hq=2,Hkv=1",
    "D=64,Sq=0,Sk=40",
    "D=64,Sq=40,Sk=0",
)
# dQ in the accumulators' order of devices without vector reductions (before sm_90).
SCALAR_CASES = (
    "row=1,D=64,Sq=70,Sk=90,right=0",
    "row=7,D=256,Sq=40,Sk=50,Hq=2,Hkv=1,det=1",
)


@pytest.mark.long
@pytest.mark.skipif(CXX is None, reason="no g++")
@pytest.mark.parametrize(
    ("vector_add", "cases"), [(1, CASES), (0, SCALAR_CASES)]
)  # without optimization: compiling takes as long as running
def test_gradients_of_every_tile(vector_add, cases, tmp_path):
    program = tmp_path / "sm80_backward"
    folder = ROOT / "tests/kernels/emulator"
    command = [CXX, "-std=c++17", "-O0", "-w", f"-DVECTOR_ADD={vector_add}"]
    command += [f"-I{folder}", f"-I{ROOT / 'csrc'}", folder / "sm80_backward.cpp", "-o", program]
    subprocess.run(command, check=True)
    result = subprocess.run([program, *cases], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    lines = result.stdout.splitlines()
    assert len(lines) == len(cases)
    assert all(re.search(r"dq \d\.\d+ dk \d\.\d+ dv \d\.\d+$", line) for line in lines), lines


def test_the_cases_name_every_tile():
    table = (ROOT / "csrc/kernels/sm80_backward/config.cuh").read_text()
    rows = table.partition("kBackwardTiles[] = {")[2].partition("};")[0].count("    {")
    assert rows == TILES
    assert {int(c.partition(",")[0][4:]) for c in CASES if c.startswith("row=")} == set(range(rows))
