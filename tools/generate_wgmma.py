"""Write csrc/ptx/wgmma_shapes.cuh: the operand lists of the wgmma shapes that the kernels use.

`python tools/generate_wgmma.py` writes the file; --check only compares.
"""

from __future__ import annotations

import sys
from pathlib import Path

TARGET = Path(__file__).parent.parent / "csrc" / "ptx" / "wgmma_shapes.cuh"
SCORE_COLUMNS = (64, 80, 128)  # blocks of keys or queries: A and B from shared memory
GRADIENT_COLUMNS = (64, 128)  # of dQ: A and B from shared memory, B transposed
TRANSPOSED_COLUMNS = (80,)  # of dQ transposed: A and B from shared memory, A transposed
OUTPUT_COLUMNS = (64, 80, 96, 128, 192, 256)  # head dims: A from registers, B transposed
TYPES = (("__nv_bfloat16", "bf16"), ("__half", "f16"))

HEAD = """\
// Written by tools/generate_wgmma.py. PTX ISA 9.7.15.5 (wgmma.mma_async), sm_90a.
// clang-format off
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace attnscope::ptx {

// d [64, N] (+)= a [64, 16] b [16, N] of a warpgroup, fp32 in registers; a and b are descriptors of
// K-major tiles in shared memory. `accumulate` 0 overwrites d.
template <class Element, int kColumns>
struct WgmmaShared;

// The same with b a descriptor of an N-major tile.
template <class Element, int kColumns>
struct WgmmaSharedNMajor;

// The same with a a descriptor of an M-major tile, and b of a K-major one.
template <class Element, int kColumns>
struct WgmmaSharedMMajor;

// d [64, N] += a b with a in registers and b a descriptor of an N-major tile.
template <class Element, int kColumns>
struct WgmmaRegister;
"""


def operands(first: int, count: int) -> str:
    names = [f"%{i}" for i in range(first, first + count)]
    lines = [", ".join(names[i : i + 16]) for i in range(0, count, 16)]
    return ', "\n        "'.join(lines)


def registers(count: int) -> str:
    items = [f'"+f"(d[{i}])' for i in range(count)]
    lines = [", ".join(items[i : i + 6]) for i in range(0, count, 6)]
    return ",\n          ".join(lines)


def shared(element: str, ptx: str, columns: int, m_major: int = 0, n_major: int = 0) -> str:
    n = columns // 2
    suffix = "MMajor" if m_major else "NMajor" if n_major else ""
    return f"""
template <>
struct WgmmaShared{suffix}<{element}, {columns}> {{
  static __device__ __forceinline__ void mma(float (&d)[{n}], uint64_t a, uint64_t b,
                                             int accumulate) {{
    asm volatile(
        "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{n + 2}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{ptx}.{ptx} {{"
        "{operands(0, n)}}}, "
        "%{n}, %{n + 1}, p, 1, 1, {m_major}, {n_major};\\n}}\\n"
        : {registers(n)}
        : "l"(a), "l"(b), "r"(accumulate));
  }}
}};
"""


def register(element: str, ptx: str, columns: int) -> str:
    n = columns // 2
    return f"""
template <>
struct WgmmaRegister<{element}, {columns}> {{
  static __device__ __forceinline__ void mma(float (&d)[{n}], const uint32_t* a, uint64_t b) {{
    asm volatile(
        "{{\\n.reg .pred p;\\nsetp.ne.b32 p, 1, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{ptx}.{ptx} {{"
        "{operands(0, n)}}}, "
        "{{%{n}, %{n + 1}, %{n + 2}, %{n + 3}}}, %{n + 4}, p, 1, 1, 1;\\n}}\\n"
        : {registers(n)}
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }}
}};
"""


def render() -> str:
    parts = [HEAD]
    for element, ptx in TYPES:
        parts += [shared(element, ptx, columns) for columns in SCORE_COLUMNS]
        parts += [shared(element, ptx, columns, n_major=1) for columns in GRADIENT_COLUMNS]
        parts += [shared(element, ptx, columns, m_major=1) for columns in TRANSPOSED_COLUMNS]
        parts += [register(element, ptx, columns) for columns in OUTPUT_COLUMNS]
    parts.append("\n}  // namespace attnscope::ptx\n")
    return "".join(parts)


def main() -> int:
    text = render()
    if "--check" in sys.argv[1:]:
        if TARGET.read_text() == text:
            return 0
        print(f"{TARGET} is not what tools/generate_wgmma.py writes; run it", file=sys.stderr)
        return 1
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
