"""SASS of the Hopper kernels, read from the built library. Needs no GPU."""

from __future__ import annotations

import json
import re

import pytest
import sass
import torch

from attnscope._load import PACKAGE
from attnscope.kernels import symbol_matches

LIBRARY = PACKAGE / "_C_cuda.so"
TILES = [
    tile for tile in json.loads(torch.ops.attnscope.kernels()) if tile["kernel"] == "sm90_forward"
]
ELEMENTS = {"__nv_bfloat16": ".F32.BF16", "__half": ".F32"}

pytestmark = [
    pytest.mark.skipif(not LIBRARY.exists(), reason="_C_cuda.so is not built"),
    pytest.mark.skipif(sass.cuobjdump() is None, reason="no cuobjdump: no Triton, no toolkit"),
]


def code_of(tile: dict, element: str) -> str:
    kernels = sass.functions(LIBRARY, "sm_90a")
    (name,) = (n for n in kernels if symbol_matches(n, tile) and element in n)
    return kernels[name]


def name_of(tile: dict) -> str:
    return f"{tile['head_dim']}-{tile['block_m']}x{tile['block_n']}"


each_kernel = pytest.mark.parametrize(
    ("tile", "element"),
    [(tile, element) for tile in TILES for element in ELEMENTS],
    ids=[f"{name_of(tile)}-{element}" for tile in TILES for element in ELEMENTS],
)


@each_kernel
def test_products_are_as_wide_as_the_tile(tile, element):
    """One instruction of S = Q K^T covers all keys of a step; of O += P V, the head dim."""
    shapes = re.findall(r"HGMMA\.64x(\d+)x16(\S*)", code_of(tile, element))
    assert {kind for _, kind in shapes} == {ELEMENTS[element]}
    assert {int(width) for width, _ in shapes} == {tile["block_n"], tile["head_dim_v"]}
    # At any unrolling of the loop, each product covers its whole depth.
    scores, output = tile["head_dim"] // 16, tile["block_n"] // 16
    widths = [int(width) for width, _ in shapes]
    assert widths.count(tile["block_n"]) % scores == 0
    assert widths.count(tile["head_dim_v"]) % output == 0


@each_kernel
def test_no_register_is_spilled(tile, element):
    assert re.findall(r"\b(?:STL|LDL)\b.*", code_of(tile, element)) == []


@each_kernel
def test_tma_copies_and_registers_are_moved(tile, element):
    code = code_of(tile, element)
    assert "UTMALDG.4D" in code
    assert "USETMAXREG" in code


@each_kernel
def test_exponentials_stand_before_the_wait_for_the_output(tile, element):
    """EX2 comes after the wait for S (one pending product) and before the wait for P V (none)."""
    code = code_of(tile, element)
    events = re.findall(r"DEPBAR\.LE gsb0, 0x([01])|MUFU\.(EX2)|HGMMA\.(64x)", code)
    words = ["".join(event) for event in events]
    text = re.sub(r"(64x|EX2)( \1)+", r"\1", " ".join(words))
    assert "1 EX2 0" in text
    assert not re.search(r"64x 1 0", text), "a wait for P V comes before its softmax"


@each_kernel
def test_nothing_in_the_main_loop_waits_for_a_uniform_value(tile, element):
    """Descriptors and slots stay on the uniform datapath; otherwise REDUX precedes products."""
    loop = sass.main_loop(code_of(tile, element))
    widths = {int(width) for width in re.findall(r"HGMMA\.64x(\d+)x16", loop)}
    assert widths == {tile["block_n"], tile["head_dim_v"]}
    # One REDUX per copy of the step, where a row max increases, and one for the descriptors of Q if
    # these do not fit in uniform registers; none right before a step's products.
    steps = re.split(r"WARPGROUP\.ARRIVE", loop)
    assert all("REDUX" not in part[:2000] for part in steps[1:])
    assert loop.count("REDUX") <= (4 if tile["head_dim"] > 128 else 2)
    # A branch around a release moved ring positions off the uniform datapath: 48 R2UR per loop.
    assert loop.count("R2UR") == 0


def test_every_tile_has_both_dtypes():
    kernels = [name for name in sass.functions(LIBRARY, "sm_90a") if "sm90::forward" in name]
    assert len(kernels) == len(TILES) * len(ELEMENTS)
