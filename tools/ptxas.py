"""Parse the output of `ptxas -v`, and refuse kernels that spill."""

import os
import re
import subprocess
import sys
from typing import Any

Kernel = dict[str, Any]

_ENTRY = re.compile(r"ptxas info\s*: Compiling entry function ")
_WARNING = re.compile(r"ptxas warning|\(C75\d\d\)")  # C75xx: wgmma that ptxas serialised
_STACK = (
    r"properties for {}\s+(\d+) bytes stack frame, "
    r"(\d+) bytes spill stores, (\d+) bytes spill loads"
)


def demangle(names: list[str]) -> list[str]:
    """Readable symbols, without return type and parameters."""
    filtered = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout
    # A parameter list starts at the first parenthesis that is not inside template arguments.
    return [_strip_parameters(name.removeprefix("void ")) for name in filtered.splitlines()]


def _strip_parameters(name: str) -> str:
    depth = 0
    for position, character in enumerate(name):
        depth += {"<": 1, ">": -1}.get(character, 0)
        if character == "(" and depth == 0 and not name.startswith("(anonymous", position):
            return name[:position]
    return name


def parse(log: str) -> tuple[list[Kernel], list[str]]:
    """Resource usage of each kernel for each architecture, and the warnings of ptxas in the log."""
    kernels: list[Kernel] = []
    for entry in _ENTRY.split(log)[1:]:
        symbol = re.match(r"'(\S+)' for '(\w+)'", entry)
        if symbol is None:
            raise ValueError(f"not the output of ptxas -v: {entry[:200]!r}")
        stack = re.search(_STACK.format(re.escape(symbol[1])), entry)
        used = re.search(r"Used (\d+) registers(?:.*?, (\d+) bytes smem)?", entry)
        if stack is None or used is None:
            raise ValueError(f"ptxas -v says nothing about {symbol[1]}: {entry[:200]!r}")
        kernels.append(
            {
                "kernel": symbol[1],
                "arch": symbol[2],
                "registers": int(used[1]),
                "static_shared_bytes": int(used[2] or 0),
                "stack_bytes": int(stack[1]),
                "spill_store_bytes": int(stack[2]),
                "spill_load_bytes": int(stack[3]),
            }
        )
    for kernel, name in zip(kernels, demangle([k["kernel"] for k in kernels]), strict=True):
        kernel["kernel"] = name
    return kernels, [line.strip() for line in log.splitlines() if _WARNING.search(line)]


def table(kernels: list[Kernel]) -> str:
    """One line per kernel and architecture."""
    lines = [f"{'arch':<7} {'regs':>4} {'smem':>6} {'stack':>5} {'spills':>6}  kernel"]
    for k in kernels:
        spills = k["spill_store_bytes"] + k["spill_load_bytes"]
        lines.append(
            f"{k['arch']:<7} {k['registers']:>4} {k['static_shared_bytes']:>6} "
            f"{k['stack_bytes']:>5} {spills:>6}  {k['kernel']}"
        )
    return "\n".join(lines)


def check(kernels: list[Kernel], warnings: list[str]) -> None:
    """End the build on a spill or a warning; ATTNSCOPE_ALLOW_SPILLS=1 only prints them."""
    problems = list(warnings)
    for k in kernels:
        spills = k["spill_store_bytes"] + k["spill_load_bytes"]
        if spills:
            problems.append(f"{k['kernel']} ({k['arch']}) spills {spills} bytes of registers")
    if problems:
        print("\n".join(problems), file=sys.stderr)
        if os.environ.get("ATTNSCOPE_ALLOW_SPILLS") != "1":
            raise SystemExit("attnscope: see above; ATTNSCOPE_ALLOW_SPILLS=1 builds all the same")
