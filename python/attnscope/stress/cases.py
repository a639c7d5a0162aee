"""The calls of the stress test: tiles, masks, lengths, packed batches, grouped heads."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from attnscope.inputs import Case

HEAD_DIMS = (40, 64, 80, 96, 128, 192, 256)
BACKWARD_HEAD_DIMS = (64, 128, 192, 256)  # one for each row of the tile table
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (100, 30)},
    "narrow": {"causal": True, "window": (40, 0)},
    "softcap": {"causal": True, "softcap": 20.0},
}
# (queries, keys): one tile, several, more keys than queries and fewer.
LENGTHS = ((65, 65), (300, 300), (512, 512), (1, 700), (700, 300), (2048, 2048))
PACKED = (((65, 65), (1, 130), (0, 9), (1000, 300), (7, 0), (640, 1280)),)


def case(
    batch: int = 2, seqlen_q: int = 0, seqlen_k: int = 0, heads_q: int = 4, heads_kv: int = 2,
    head_dim: int = 128, dtype: str = "bfloat16", causal: bool = False,
    window: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    seqlens: tuple[tuple[int, int], ...] | None = None, head_dim_v: int | None = None,
) -> Case:  # fmt: skip
    if seqlens is not None:
        batch = len(seqlens)
        seqlen_q, seqlen_k = (max(pair[i] for pair in seqlens) for i in (0, 1))
    return Case(
        batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim,
        head_dim if head_dim_v is None else head_dim_v, dtype, causal, window, softcap, seqlens,
    )  # fmt: skip


def label(c: Case) -> str:
    """A case in a few words, such as `d128 s512x512 causal`."""
    mask = next((name for name, options in MASKS.items() if _options(options) == c.options), "")
    shape = f"packed {c.batch}" if c.seqlens else f"b{c.batch} s{c.seqlen_q}x{c.seqlen_k}"
    dtype = {"bfloat16": "bf16", "float16": "fp16"}[c.dtype]
    dims = str(c.head_dim) if c.head_dim == c.head_dim_v else f"{c.head_dim}:{c.head_dim_v}"
    return f"{dtype} d{dims} h{c.heads_q}:{c.heads_kv} {shape} {mask}"


def _options(options: dict[str, Any]) -> dict[str, Any]:
    return {"causal": False, "window": (-1, -1), "softcap": 0.0} | options


def all_cases(mode: str = "forward") -> Iterator[Case]:
    """Every case of the stress, in a fixed order."""
    yield from _cases_of_every_mode(HEAD_DIMS if mode == "forward" else BACKWARD_HEAD_DIMS)
    if mode == "backward":
        for head_dim in (40, 96, 136):  # columns past the head dim
            yield case(seqlen_q=300, seqlen_k=512, head_dim=head_dim, causal=True)
        for options in MASKS.values():  # eight query heads of a key head, one after the other
            yield case(2, 512, 512, 8, 1, 128, **options)
        # Tiles of 192 keys: more than fit the SMs at once, and a dQ that is not zeroed before.
        for name in ("full", "window", "narrow"):
            yield case(24, 300, 300, 8, 8, 64, **MASKS[name])
        yield case(heads_q=8, heads_kv=8, seqlens=PACKED[0] * 4, head_dim=64, causal=True)
        # Blocks of 80 queries: several tiles a thread block, the last block not full.
        yield case(2, 2048, 1100, 20, 10)
        yield case(1, 2100, 700, 4, 2, 96, "float16")
        yield case(1, 8192, 1300, 2, 1, causal=True)
        # Blocks of 128 queries: the last one not full, more tiles than SMs, and parts.
        yield case(2, 500, 500, 30, 15, 64)
        yield case(8, 129, 200, 12, 3, 64)
        yield case(3, 1345, 2690, 12, 3, 64, causal=True)
        yield case(1, 1000, 1000, 16, 4, 64)
        # More causal tiles than fit the SMs at once: turns ascend in every other section of heads.
        yield case(2, 1100, 1100, 30, 30, 64, causal=True)
        yield case(1, 4200, 4200, 5, 5, causal=True)
        lengths = ((2100, 2200), (65, 65), (0, 9), (700, 300))
        for head_dim in (64, 128, 256):
            yield case(heads_q=34, heads_kv=17, head_dim=head_dim, seqlens=lengths, causal=True)
        # Parts of a tile that have query heads, some more than others.
        yield case(1, 2100, 2100, 14, 2, causal=True)
        yield case(seqlens=((2100, 300), (1, 1), (0, 40), (79, 2000), (2049, 1)))
        return
    # Two heads in a tile, and an odd number of them.
    for options in MASKS.values():
        yield case(50, 100, 130, 5, 5, 64, **options)
    yield case(24, 500, 500, 8, 8, 64, causal=True)  # tiles of 256 rows
    for options in MASKS.values():  # V is narrower than K
        yield case(seqlen_q=700, seqlen_k=700, head_dim=192, head_dim_v=128, **options)
        yield case(seqlens=PACKED[0], head_dim=192, head_dim_v=128, **options)
    yield case(1, 65, 16384, 70, 7)  # 128 keys a step
    # Lower tiles at the end of a launch, also of a sequence that has most rows of a packed batch.
    yield case(1, 2304, 700, 12, 12)
    yield case(heads_q=12, heads_kv=12, seqlens=((2304, 700), *((64, 64),) * 20))
    yield case(heads_q=12, heads_kv=12, seqlens=((2304, 700), (2290, 90)))
    # Grouped heads, few tiles and more; sequences of all lengths.
    for count in (9, 40):
        seqlens = ((70, 500), (20, 90), (30, 1500), (1, 64)) * count
        yield case(heads_q=8, seqlens=seqlens, causal=True)
    yield case(150, 40, 70, 8, 2, causal=True)


def _cases_of_every_mode(head_dims: tuple[int, ...]) -> Iterator[Case]:
    for head_dim in head_dims:
        for options in MASKS.values():
            for seqlen_q, seqlen_k in LENGTHS:
                yield case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim, **options)
            for seqlens in PACKED:
                yield case(seqlens=seqlens, head_dim=head_dim, **options)
        yield case(seqlen_q=512, seqlen_k=512, head_dim=head_dim, dtype="float16", causal=True)
        # More tiles than thread blocks: slots of the tile ring are used again and again.
        yield case(24, 300, 300, 8, 8, head_dim, causal=True)
        # Query heads side by side in a tile.
        yield case(40, 9, 130, 16, 2, head_dim, causal=True)
    # Long sequences and more tiles than SMs: the tiles for many queries.
    for head_dim in (64, 128, 256):
        yield case(1, 4200, 4200, 8, 4, head_dim, causal=True)


def turns() -> Iterator[Case]:
    """Deterministic backward calls in which many key blocks add to the same queries."""
    for head_dim in (64, 128, 256):
        for name in ("full", "causal", "window"):
            yield case(2, 700, 1000, 4, 2, head_dim, **MASKS[name])
    yield case(seqlens=PACKED[0], causal=True)


def plans(seed: int, count: int, cycles: int, kinds: int) -> Iterator[tuple[int, int, int, int]]:
    """(seed, kinds, rate, cycles) of `count` launches; every fifth has a single kind."""
    generator = random.Random(seed)
    bits = [bit for bit in range(32) if kinds >> bit & 1]
    for number in range(count):
        chosen = generator.sample(bits, 1 if number % 5 == 0 else generator.randint(1, len(bits)))
        rate = int(65536 * generator.choice((0.02, 0.1, 0.3, 1.0)))
        limit = generator.choice((cycles // 16, cycles // 4, cycles))
        yield generator.getrandbits(32), sum(1 << bit for bit in chosen), rate, max(limit, 1)
