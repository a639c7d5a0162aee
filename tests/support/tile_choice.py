"""The row of the Hopper tile table for a call: the launcher's function, on the host."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from attnscope.inputs import Case

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM = """
#include <cstdio>
#include "kernels/sm90_forward/config.cuh"
using namespace attnscope::sm90;
int main() {
  printf("%d\\n", kForwardTileCount);
  int head_dim, head_dim_v, queries, heads_q, heads_kv, batch, causal, packed, keys, total_q;
  int window;
  while (scanf("%d %d %d %d %d %d %d %d %d %d %d", &head_dim, &head_dim_v, &queries, &heads_q,
               &heads_kv, &batch, &causal, &packed, &keys, &total_q, &window) == 11) {
    const ForwardCall call{{head_dim, head_dim_v}, queries, keys, heads_q, heads_kv, batch,
                           causal != 0, packed != 0, total_q, window};
    const ForwardChoice c = choose_forward(call, 132);
    const ForwardTile& t = kForwardTiles[c.row];
    printf("%d %d %lld %d\\n", c.row, c.grouping, tiles_of(t, c.grouping, call).count(),
           t.blocks_per_sm * 132);
  }
}
"""


@dataclass(frozen=True)
class Choice:
    """A row of the table, with 1 << grouping heads side by side; `tiles` counts a dense call's."""

    row: int
    grouping: int
    tiles: int
    max_blocks: int  # resident on 132 SMs

    @property
    def reuses_tile_slots(self) -> bool:
        """Whether a thread block takes more tiles than the tile ring has slots."""
        return self.tiles > 2 * self.max_blocks


@cache
def _run(text: str) -> list[str]:
    with TemporaryDirectory() as folder:
        program = f"{folder}/choice"
        build = ["g++", "-std=c++17", "-x", "c++", f"-I{ROOT / 'csrc'}", "-o", program, "-"]
        subprocess.run(build, input=PROGRAM, text=True, check=True)
        run = subprocess.run([program], input=text, capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


def _window(case: Case) -> int:
    """The keys that a row sees at most; as the launcher has it, where there is no window."""
    left, right = case.window[0], 0 if case.causal else case.window[1]
    return left + 1 + right if left >= 0 and right >= 0 else 2**31 - 1


def tile_choices(cases: Sequence[Case]) -> tuple[list[Choice], int]:
    """The choice for each case on 132 SMs, and the number of rows of the table."""
    calls = [
        (c.head_dim, c.head_dim_v, c.seqlen_q, c.heads_q, c.heads_kv, c.batch,
         int(c.window[0] < 0 and (c.causal or c.window[1] >= 0)), int(c.seqlens is not None),
         c.seqlen_k, sum(q for q, _ in c.seqlens or ()), _window(c))
        for c in cases
    ]  # fmt: skip
    count, *lines = _run("\n".join(" ".join(map(str, call)) for call in calls))
    return [Choice(*map(int, line.split())) for line in lines], int(count)
