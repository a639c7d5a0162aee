"""What every CUDA kernel of this build uses, and how many of its warps fit on an SM."""

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from attnscope.common.console import console, say
from attnscope.common.hardware.occupancy import sm_of_arch, theoretical_occupancy


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
            occupancy = theoretical_occupancy(
                most["registers"], tile["threads"], shared, sm_of_arch(arch)
            )
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
    import torch

    from attnscope._load import build_report

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
    from attnscope._load import library_status

    console().print(kernels_table(rows))
    say(f"_C_cuda: {library_status()['_C_cuda']}")
