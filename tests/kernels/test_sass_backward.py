"""SASS of the Hopper backward kernels, read from the built library. Needs no GPU."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import sass

from attnscope._load import PACKAGE

LIBRARY = PACKAGE / "_C_cuda.so"
# Head dim, queries and keys of the rows of kBackwardTiles.
ROWS = {
    0: (64, 64, 192),
    1: (64, 64, 128),
    2: (64, 128, 128),
    3: (128, 80, 128),
    4: (128, 64, 128),
}
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
    config = f"attnscope::sm90::BackwardConfig<{element}, {row}>"
    if parts:
        config = f"attnscope::sm90::WithParts<{config}"
    symbol = f"::backward_kernel<{config}"
    (name,) = (name for name in kernels if symbol in name)
    return kernels[name]


def test_every_product_is_there_once(row, element, parts):
    """With 80 queries dQ is transposed, in two halves of the head dim."""
    head_dim, queries, keys = ROWS[row]
    products = re.findall(
        r"HGMMA\.64x(\d+)x16(\S*) R\d+, (R\d+, )?gdesc", code_of(row, element, parts)
    )
    assert {kind for _, kind, _ in products} == {ELEMENTS[element]}
    counts = Counter((int(width), bool(register)) for width, _, register in products)
    wanted = Counter({(queries, False): 2 * head_dim // 16})  # S, dP
    if queries == 80:  # dQ
        wanted += Counter({(queries, False): head_dim // 64 * keys // 16})
    else:
        wanted += Counter({(head_dim, False): queries // 64 * keys // 16})
    wanted += Counter({(head_dim, True): 2 * queries // 16})  # dV, dK
    assert counts == wanted


def test_no_register_is_spilled(row, element, parts):
    assert re.findall(r"\b(?:STL|LDL)\b.*", code_of(row, element, parts)) == []


def test_groups_of_products_are_not_serialised(row, element, parts):
    """One ARRIVE before each group: S, dP, dV, dK, dQ; with more than 64 queries dQ is two."""
    assert code_of(row, element, parts).count("WARPGROUP.ARRIVE") == (
        5 if ROWS[row][1] == 64 else 6
    )


def test_dq_leaves_by_bulk_reductions(row, element, parts):
    """One TMA instruction for a block; no addition of floats by ordinary threads."""
    code = code_of(row, element, parts)
    # Without turns, with turns, and of whole heads, which blocks of 80 and 128 queries never are.
    assert code.count("UBLKRED.G.S.ADD.F32") == (3 if ROWS[row][1] == 64 else 2)
    assert "REDG.E.ADD.F32" not in code
    assert "UTMALDG.4D" in code and "STSM.16.MT88.4" in code
