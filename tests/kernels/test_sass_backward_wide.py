"""SASS of the Hopper backward kernels for wide heads, read from the built library. No GPU."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import sass

from attnscope._load import PACKAGE

LIBRARY = PACKAGE / "_C_cuda.so"
ROWS = {5: 192, 6: 256}  # of kBackwardTiles: head dim
ELEMENTS = {"__nv_bfloat16": ".F32.BF16", "__half": ".F32"}

pytestmark = [
    pytest.mark.skipif(not LIBRARY.exists(), reason="_C_cuda.so is not built"),
    pytest.mark.skipif(sass.cuobjdump() is None, reason="no cuobjdump: no Triton, no toolkit"),
    pytest.mark.parametrize("element", ELEMENTS),
    pytest.mark.parametrize("row", ROWS),
    pytest.mark.parametrize("parts", [False, True], ids=["whole", "parts"]),
]


def code_of(row: int, element: str, parts: bool) -> str:
    kernels = sass.functions(LIBRARY, "sm_90a")
    config = f"attnscope::sm90::WideConfig<{element}, {row}>"
    if parts:
        config = f"attnscope::sm90::WithParts<{config}"
    symbol = f"wide_backward_kernel<{config}"
    (name,) = (name for name in kernels if symbol in name)
    return kernels[name]


def test_every_product_is_there_once(row, element, parts):
    """Except S and dP, which the first block has outside of the loops."""
    head_dim, queries, keys = ROWS[row], 64, 128
    products = re.findall(
        r"HGMMA\.64x(\d+)x16(\S*) R\d+, (R\d+, )?gdesc", code_of(row, element, parts)
    )
    assert {kind for _, kind, _ in products} == {ELEMENTS[element]}
    counts = Counter((int(width), bool(register)) for width, _, register in products)
    slices = 2 if head_dim == 256 else 1
    wanted = Counter({(queries, False): 4 * head_dim // 16})  # S and dP, twice each
    wanted += Counter({(64, False): keys // 16})  # dQ, a column block at a time
    wanted += Counter({(head_dim // slices, True): 2 * slices * queries // 16})  # dV, dK
    assert counts == wanted


def test_no_register_is_spilled(row, element, parts):
    assert re.findall(r"\b(?:STL|LDL)\b.*", code_of(row, element, parts)) == []


def test_groups_of_products_are_not_serialised(row, element, parts):
    """One ARRIVE before each group: S, S, dV; dP, dP, dK; dQ. Head dim 256: dV and dP in halves."""
    assert code_of(row, element, parts).count("WARPGROUP.ARRIVE") == (10 if ROWS[row] == 256 else 7)


def test_each_role_has_its_registers(row, element, parts):
    """The compiler ignores all of them if one is too small for its role."""
    code = code_of(row, element, parts)
    found = re.findall(r"USETMAXREG\.\S+ (?:UP\d, )?(0x\w+)", code)
    assert sorted(int(count, 16) for count in found) == [32, 64, 208, 208]


def test_copies_go_to_both_blocks(row, element, parts):
    """Q and dO by multicast, dS and the next tile's index from block to block, dQ by reductions of
    contiguous bytes, at head dim 256 from registers."""
    code, is_256 = code_of(row, element, parts), ROWS[row] == 256
    assert code.count("UTMALDG.4D.MULTICAST") == 6  # column blocks; at 256 dO comes in a loop
    assert code.count("UBLKCP.S.S") == 2
    assert code.count("UBLKRED.G.S.ADD.F32") == (0 if is_256 else 2)
    assert len(re.findall(r"\bREDG?\.E\.ADD\.F32x4\S*", code)) == (8 if is_256 else 0)
