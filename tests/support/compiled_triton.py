"""Triton kernels compiled for an architecture without a GPU, and their SASS."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_FLOATS = ("scale", "inner_scale", "cap", "outer_scale")


class Compiled(NamedTuple):
    name: str
    ptx: str
    sass: list[tuple[int, str]]  # address, instruction
    shared_bytes: int

    def count(self, opcode: str) -> int:
        return sum(bool(re.match(rf"(@!?U?P\d+ )?{opcode}\b", text)) for _, text in self.sass)

    def in_loops(self, opcode: str) -> list[str]:
        """Instructions of an opcode between a backward branch and its target."""
        jumps = [(at, re.search(r"BRA.* 0x([0-9a-f]+)", text)) for at, text in self.sass]
        loops = [(int(to[1], 16), at) for at, to in jumps if to and int(to[1], 16) < at]
        return [
            text
            for at, text in self.sass
            if re.search(rf"\b{opcode}\b", text) and any(a <= at <= b for a, b in loops)
        ]


def compile_kernel(
    kernel: Any,
    arch: int,
    pointers: dict[str, str],
    constants: dict[str, Any],
    options: dict[str, int],
) -> Compiled:
    """The code of a kernel for bf16 tensors and 32-bit integers.

    `pointers` has the types of pointers that are not "*bf16"; pointers in `constants` are null.
    """
    names = kernel.arg_names
    tensors = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
    types = dict.fromkeys(tensors, "*bf16") | dict.fromkeys(_FLOATS, "fp32") | pointers
    types |= dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*")
    }
    places = {(names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(
        ASTSource(kernel, signature, places, aligned),
        target=GPUTarget("cuda", arch, 32),
        options=options,
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        dump = subprocess.run(
            [CUOBJDUMP, "-sass", cubin.name], capture_output=True, text=True, check=True
        ).stdout
    sass = re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);", dump)
    lines = [(int(at, 16), text.strip()) for at, text in sass]
    return Compiled(compiled.metadata.name, compiled.asm["ptx"], lines, compiled.metadata.shared)
