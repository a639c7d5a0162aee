"""The tiles of every CUDA kernel: what each uses, and which one serves a call."""

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import typer
from rich import box
from rich.table import Table

from attnscope.common.console import say, show_table
from attnscope.common.forms import JSON, TERMINAL, AsJson, Form, form_of, printed
from attnscope.common.hardware.occupancy import sm_of_arch, theoretical_occupancy
from attnscope.common.options import (
    HEAD_DIM,
    SEQ_LEN,
    Batch,
    Causal,
    Heads,
    KvHeads,
    bad_input,
    call_sizes,
    parse_window,
)
from attnscope.common.tile_columns import COLUMNS, queries_served, tile_head_dim, tile_size

ARCHITECTURES = {"sm80": (80, 108), "sm90": (90, 132)}  # compute capability and SMs: A100, H100


def symbol_matches(symbol: str, tile: dict[str, Any]) -> bool:
    """Whether a demangled symbol is an instance of `tile`.

    The kernel's folder ("sm80_forward") is the name of the namespace and of the function, which may
    begin with "wide_". The integer template arguments are the number of the row if the tile has
    one. Otherwise they are the head dim, and if there are more, the query rows and the keys.
    Tiles that divide keys, and those for grouped heads only, have configurations of their own.
    """
    arch, _, operation = tile["kernel"].partition("_")
    found = re.search(rf"\b{arch}::(?:wide_)?{operation}_kernel<(.*)>", symbol)
    if ("SplitForwardConfig<" in symbol) != (tile.get("key_parts", 1) > 1):
        return False
    if ("::Grouped" in symbol) != tile.get("grouped_only", False):
        return False
    integers = [int(i) for i in re.findall(r"(?<![\w:])\d+", found[1])] if found else []
    names = ("row",) if "row" in tile else ("head_dim", "block_m", "block_n")
    return bool(integers) and integers == [tile[name] for name in names][: len(integers)]


def join(tiles: Sequence[dict[str, Any]], usage: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each tile and architecture.

    A row has the tile, the highest resource usage of its instances, and the occupancy at that
    usage. A tile without an instance in the build is a row with `missing`.
    """
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
    """The tiles as a table, with the stages of Q and of K and V as "2/3"."""
    table = Table(box=box.SIMPLE_HEAD, title="CUDA kernels: worst instance of each tile")
    table.add_column("kernel", no_wrap=True)
    table.add_column("arch", no_wrap=True)
    for name in ("head dim", "heads x tile"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("queries", justify="right", max_width=12)
    for name in ("threads", "stages", "S kept", "regs", "spills", "smem KiB", "warps/SM"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("limited by", "why this tile"):
        table.add_column(name)
    for row in rows:
        stages = f"{row['q_stages']}/{row['stages']}" if "q_stages" in row else str(row["stages"])
        kept = {True: "yes", False: "no", None: "-"}[row.get("scores_live")]
        tile = [tile_head_dim(row), tile_size(row), queries_served(row), str(row["threads"])]
        tile += [stages, kept]
        if row["missing"]:
            table.add_row(row["kernel"], "-", *tile, *["-"] * 4, row["missing"], row["reason"])
            continue
        shared = (row["shared_bytes"] + row["static_shared_bytes"]) / 1024
        warps = f"{row['warps_per_sm']} ({row['fraction']:.0%})"
        used = [str(row["registers"]), str(row["spill_bytes"]), f"{shared:.1f}", warps]
        table.add_row(row["kernel"], row["arch"], *tile, *used, row["limiter"], row["reason"])
    return table


class Call(NamedTuple):
    """Sizes of a call of `attnscope::forward`, and the device that it runs on.

    Attributes:
        seqlen_q, seqlen_k: queries and keys; of a packed batch, the longest.
        window: keys to the left and to the right of the diagonal, -1 for all.
        softcap: 0 for none.
        sms: streaming multiprocessors of the device.
        capability: its compute capability, 10 * major + minor.
        deterministic: whether gradients must have the same bits every time. It changes no forward.
    """

    head_dim: int
    head_dim_v: int
    seqlen_q: int
    seqlen_k: int
    batch: int
    heads_q: int
    heads_kv: int
    causal: bool
    window: tuple[int, int]
    packed: bool
    softcap: float
    sms: int
    capability: int
    deterministic: bool = False


def choose_forward(call: Call) -> dict[str, Any]:
    """Return which kernel and which tile serve a call whose tensors have no stride of zero.

    Keys: `kernel`; `tile`, its row of the table (see `COLUMNS`); `rule`, how the row was chosen;
    `heads_side_by_side`, the heads of a group in one tile; `causal`, whether later rows see more
    keys; `not_sm90`, why the Hopper kernel does not serve the call, or None; `tiles`; thread
    `blocks`; `resident_blocks`, at a time on the whole device; `waves`. A packed batch may have
    fewer tiles and blocks. Raises ValueError for sizes that no call has.
    """
    return _choose("choose_forward", call)


def choose_backward(call: Call) -> dict[str, Any]:
    """Return which kernel and which tile serve the backward of a call, as `choose_forward` does.

    Both ops take the Hopper kernels by the same rule. `tiles` are of keys. `turns`: those of a head
    add to dq in a fixed order, as a deterministic call asks for. Hopper kernels split the
    last `split_tiles` of them in `parts` each, which have some of their `parts_of`: queries, or
    query heads. A call that takes heads whole (docs/kernels/sm90_backward.md) may have fewer thread
    blocks, and has no parts.
    """
    return _choose("choose_backward", call)


def _choose(op: str, call: Call) -> dict[str, Any]:
    import torch

    from attnscope import _load  # noqa: F401  the op exists from here on

    options = call._asdict()
    options["window_left"], options["window_right"] = options.pop("window")
    try:
        return json.loads(getattr(torch.ops.attnscope, op)(**options))
    except RuntimeError as error:
        message = re.sub(r"^\w+, \S+:\d+, ", "", str(error)).splitlines()[0]
        raise ValueError(message) from None


def choice_table(tile: dict[str, Any]) -> Table:
    """The row of a tile, a line for each column."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("column", no_wrap=True)
    table.add_column("value", justify="right", max_width=60)
    table.add_column("meaning")
    for name, meaning in COLUMNS.items():
        if name in tile:
            value = tile[name]
            shown = "any" if value is None else str(value).lower()
            table.add_row(name, tile[name] if name == "reason" else shown, meaning)
    return table


def print_choice(call: Call, choice: dict[str, Any]) -> None:
    """Print the tile that serves a call, its row, the reason, and the number of tiles and waves."""
    tile = choice["tile"]
    major, minor = divmod(call.capability, 10)
    kernel, rule = choice["kernel"], choice["rule"]
    say(f"{kernel}, tile {tile_size(tile)} at head dim {tile_head_dim(tile)}: {rule}")
    if choice["not_sm90"]:
        say(f"not sm90_{kernel.partition('_')[2]}: {choice['not_sm90']}")
    show_table(choice_table(tile))
    at_most = "at most " if call.packed else ""
    waves = choice["tiles"] * tile.get("cluster", 1) / choice["resident_blocks"]
    size = f"{tile['block_n']} keys"
    if "heads_per_tile" in tile:
        size = f"{tile['block_m'] * tile['heads_per_tile']} rows"
    if (heads := choice["heads_side_by_side"]) > 1:
        say(f"{heads} query heads of a key head share a tile: a row is a (query, head) pair")
    say(
        f"{at_most}{choice['tiles']:,} tiles of up to {size}, {at_most}{choice['blocks']:,} "
        f"thread blocks; {call.sms} SMs of compute capability {major}.{minor} keep "
        f"{choice['resident_blocks']:,}: {at_most}{choice['waves']:,} waves ({waves:.2f})"
    )
    if choice.get("turns"):
        say("tiles of a head add to dq in turns")
    if split := choice.get("split_tiles", 0):
        parts, shares = choice["parts"], choice["parts_of"]
        say(f"the last {split:,} tiles are split over their {shares}, in {parts} parts")


def device_facts(arch: str | None, sms: int | None) -> tuple[int, int]:
    """Compute capability (10 * major + minor) and SMs: as given, else the GPU's, else an H100's."""
    import torch

    if arch is None and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        capability = 10 * properties.major + properties.minor
        return capability, properties.multi_processor_count if sms is None else sms
    arch = "sm90" if arch is None else arch
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch must be one of {', '.join(ARCHITECTURES)}, got {arch!r}")
    capability, usual = ARCHITECTURES[arch]
    return capability, usual if sms is None else sms


def kernels_command(
    head_dim: Annotated[int | None, HEAD_DIM] = None,
    seq_len: Annotated[int | None, SEQ_LEN] = None,
    head_dim_v: Annotated[
        int | None, typer.Option(help="Head dim of v alone. Left out: as of q and k.")
    ] = None,
    kv_seq_len: Annotated[
        int | None, typer.Option(help="Keys of a sequence. Left out: as many as queries.")
    ] = None,
    batch: Batch = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    causal: Causal = False,
    window: Annotated[
        str, typer.Option(help="LEFT,RIGHT: keys around the diagonal; -1 for all of a side.")
    ] = "-1,-1",
    packed: Annotated[
        bool, typer.Option("--packed", help="Packed batch, all sequences as long as --seq-len.")
    ] = False,
    softcap: Annotated[float, typer.Option(help="0 for none.")] = 0.0,
    sms: Annotated[
        int | None, typer.Option(help="SMs. Left out: of this GPU, or 132 (sm90), 108 (sm80).")
    ] = None,
    arch: Annotated[
        str | None, typer.Option(help="sm80 or sm90. Left out: of this GPU, or sm90.")
    ] = None,
    backward: Annotated[
        bool, typer.Option("--backward", help="The tile that serves the call's backward.")
    ] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="With --backward: the same bits every time.")
    ] = False,
    form: Form = TERMINAL,
    as_json: AsJson = False,
) -> None:
    """Show the tiles of every CUDA kernel, or the tile that serves a call.

    Without options: registers, spills, shared memory, occupancy and its limiter of each tile. With
    --head-dim and --seq-len: which tile serves that call, why, and how many tiles and waves it
    makes; this needs no GPU. Exit code 2: bad input.
    """
    with bad_input("kernels"):
        form = form_of(form, as_json)
        if head_dim is None and seq_len is None:
            others = (head_dim_v, kv_seq_len, batch, heads, kv_heads, sms, arch)
            given = causal or packed or backward or deterministic or softcap or window != "-1,-1"
            if given or any(other is not None for other in others):
                raise ValueError("head-dim, seq-len must be given with these options, got neither")
            print_kernels(form)
            return
        if head_dim is None or seq_len is None:
            raise ValueError("head-dim, seq-len must be given together, got one of them")
        if deterministic and not backward:
            raise ValueError("deterministic must be given with --backward, got it alone")
        capability, sms = device_facts(arch, sms)
        call = Call(
            head_dim=head_dim, head_dim_v=head_dim if head_dim_v is None else head_dim_v,
            seqlen_q=seq_len, seqlen_k=seq_len if kv_seq_len is None else kv_seq_len,
            **call_sizes(head_dim, seq_len, batch, heads, kv_heads), causal=causal,
            window=parse_window(window), packed=packed, softcap=softcap, sms=sms,
            capability=capability, deterministic=deterministic,
        )  # fmt: skip
        choice = choose_backward(call) if backward else choose_forward(call)
    with printed(form, "kernels") as facts:
        facts |= {"call": call._asdict(), **choice}
        print_choice(call, choice)


def print_kernels(form: str) -> None:
    """Print the tile table of this build, and whether its CUDA library is loaded."""
    from attnscope._load import library_status

    rows = kernel_rows()
    if form == JSON:
        print(json.dumps(rows, indent=1))
        return
    with printed(form, "kernels"):
        show_table(kernels_table(rows))
        say("The tile that serves a call: attnscope kernels --head-dim 128 --seq-len 1024")
        say(f"_C_cuda: {library_status()['_C_cuda']}")
