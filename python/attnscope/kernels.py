"""What every CUDA kernel of this build uses, and how many of its warps fit on an SM."""

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from attnscope._load import build_report, library_status

WARP = 32
MAX_THREADS_PER_BLOCK = 1024
MAX_REGISTERS_PER_THREAD = 255
SUBPARTITIONS = 4  # of an SM; each has a quarter of the registers and of the warp slots
REGISTER_UNIT = 256  # registers are given to a warp in units of this many
SHARED_UNIT = 128  # shared memory is given to a block in units of this many bytes
SHARED_RESERVED = 1024  # bytes that the driver takes in each block


@dataclasses.dataclass(frozen=True)
class SM:
    """Limits of one streaming multiprocessor (CUDA programming guide, compute capabilities)."""

    warps: int
    blocks: int
    registers: int
    shared_bytes: int


SMS = {
    "sm_80": SM(warps=64, blocks=32, registers=65536, shared_bytes=164 * 1024),
    "sm_90": SM(warps=64, blocks=32, registers=65536, shared_bytes=228 * 1024),
}


class Occupancy(NamedTuple):
    """Warps that live on an SM at once, their share of its warp slots, and what allows no more."""

    warps_per_sm: int
    fraction: float
    limiter: str


def theoretical_occupancy(registers: int, threads: int, shared_bytes: int, arch: str) -> Occupancy:
    """Occupancy of blocks of `threads` threads with `registers` registers each and `shared_bytes`
    (static and dynamic) of shared memory per block, on `arch` (`sm_80`, `sm_90` or `sm_90a`).

    A block that does not fit at all has 0 warps. The limiter is one or several of `warps`,
    `blocks`, `registers`, `shared memory`, joined by " and ".
    """
    sm = SMS.get(arch.removesuffix("a"))
    if sm is None:
        raise ValueError(f"arch is {arch!r}; allowed: {', '.join(SMS)}, sm_90a")
    if not 1 <= threads <= MAX_THREADS_PER_BLOCK:
        raise ValueError(f"threads is {threads}; allowed: 1 to {MAX_THREADS_PER_BLOCK}")
    if not 1 <= registers <= MAX_REGISTERS_PER_THREAD:
        raise ValueError(f"registers is {registers}; allowed: 1 to {MAX_REGISTERS_PER_THREAD}")
    if shared_bytes < 0:
        raise ValueError(f"shared_bytes is {shared_bytes}; allowed: 0 or more")

    warps = _units(threads, WARP)
    warp_registers = _units(registers * WARP, REGISTER_UNIT) * REGISTER_UNIT
    # A launch is refused as if a block took registers in all subpartitions alike.
    block_registers = warp_registers * _units(warps, SUBPARTITIONS) * SUBPARTITIONS
    resident = sm.registers // SUBPARTITIONS // warp_registers * SUBPARTITIONS
    block_shared = _units(shared_bytes + SHARED_RESERVED, SHARED_UNIT) * SHARED_UNIT
    limits = {
        "warps": sm.warps // warps,
        "blocks": sm.blocks,
        "registers": resident // warps if block_registers <= sm.registers else 0,
        "shared memory": sm.shared_bytes // block_shared,
    }
    blocks = min(limits.values())
    limiter = " and ".join(name for name, limit in limits.items() if limit == blocks)
    return Occupancy(blocks * warps, blocks * warps / sm.warps, limiter)


def _units(amount: int, unit: int) -> int:
    return -(-amount // unit)


def symbol_matches(symbol: str, tile: dict[str, Any]) -> bool:
    """Whether a demangled symbol is an instance of `tile`: the kernel's folder ("sm80_forward")
    names the namespace and the function; of the template arguments the first integer is the head
    dim, the second, where there is one, the query rows."""
    arch, _, operation = tile["kernel"].partition("_")
    found = re.search(rf"\b{arch}::{operation}_kernel<(.*)>", symbol)
    integers = [int(i) for i in re.findall(r"(?<![\w:])\d+", found[1])] if found else []
    return bool(integers) and integers == [tile["head_dim"], tile["block_m"]][: len(integers)]


def join(tiles: Sequence[dict[str, Any]], usage: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each tile and architecture: the tile, the most that any of its instances uses,
    and the occupancy with that. A tile without an instance in the build is a row with `missing`."""
    rows = []
    for tile in tiles:
        mine = [u for u in usage if symbol_matches(u["kernel"], tile)]
        if not mine:
            rows.append({**tile, "arch": None, "missing": "no instance in this build"})
        for arch in sorted({u["arch"] for u in mine}):
            instances = [u for u in mine if u["arch"] == arch]
            most = {
                key: max(u[key] for u in instances)
                for key in ("registers", "static_shared_bytes", "stack_bytes")
            }
            spills = max(u["spill_store_bytes"] + u["spill_load_bytes"] for u in instances)
            shared = tile["shared_bytes"] + most["static_shared_bytes"]
            occupancy = theoretical_occupancy(most["registers"], tile["threads"], shared, arch)
            rows.append(
                {
                    **tile,
                    **most,
                    **occupancy._asdict(),
                    "arch": arch,
                    "instances": len(instances),
                    "spill_bytes": spills,
                    "missing": None,
                }
            )
    return rows


def kernel_rows() -> list[dict[str, Any]]:
    """`join` for the tile tables and the resource usage of this build."""
    return join(json.loads(torch.ops.attnscope.kernels()), build_report()["kernels"])


def kernels_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="CUDA kernels: worst instance of each tile")
    table.add_column("kernel", no_wrap=True)
    table.add_column("arch", no_wrap=True)
    for name in ("head dim", "tile", "threads", "stages", "regs", "spills", "smem KiB", "warps/SM"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("limited by", "why this tile"):
        table.add_column(name)
    for row in rows:
        tile = [str(row["head_dim"]), f"{row['block_m']}x{row['block_n']}"]
        tile += [str(row["threads"]), str(row["stages"])]
        if row["missing"]:
            table.add_row(row["kernel"], "-", *tile, *["-"] * 4, row["missing"], row["reason"])
            continue
        shared = (row["shared_bytes"] + row["static_shared_bytes"]) / 1024
        warps = f"{row['warps_per_sm']} ({row['fraction']:.0%})"
        used = [str(row["registers"]), str(row["spill_bytes"]), f"{shared:.1f}", warps]
        table.add_row(row["kernel"], row["arch"], *tile, *used, row["limiter"], row["reason"])
    return table


def kernels_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Tiles of every CUDA kernel: registers, spills, shared memory, occupancy and its limiter."""
    rows = kernel_rows()
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    console = Console()
    if not console.is_terminal:
        console.width = 160
    console.print(kernels_table(rows))
    console.print(f"_C_cuda: {library_status()['_C_cuda']}", highlight=False)
