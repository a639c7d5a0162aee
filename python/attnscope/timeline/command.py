"""The command `attnscope timeline`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from attnscope.common.console import say, show_table
from attnscope.common.forms import TERMINAL, AsJson, Form, form_of, printed
from attnscope.common.options import (
    HEAD_DIM,
    SEQ_LEN,
    Batch,
    Causal,
    Heads,
    KvHeads,
    bad_input,
    call_sizes,
    pick_device,
)

if TYPE_CHECKING:
    from attnscope.timeline.recording import Recording

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
OVERLAP = {
    "tensor": "a product in flight, of some consumer",
    "tensor_all": "a product in flight, of every consumer",
    "softmax": "{}, of some consumer",
    "softmax_two": "{}, of two or more at once",
    "softmax_own": "{} under a product of its own consumer",
    "softmax_other": "{} under a product of another consumer",
    "softmax_alone": "{} and no product in flight",
    "neither": "neither",
}


def timeline_command(
    output: Annotated[Path, typer.Option(help="Folder for everything that is written.")] = Path(
        "timeline"
    ),
    head_dim: Annotated[int, HEAD_DIM] = 128,
    seq_len: Annotated[int, SEQ_LEN] = 4096,
    batch: Batch = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    dtype: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16",
    causal: Causal = False,
    backward: Annotated[
        bool, typer.Option("--backward", help="The backward kernel; head dims up to 128.")
    ] = False,
    blocks: Annotated[
        str,
        typer.Option(
            "--blocks",
            "--block",
            help="Thread blocks in the trace, such as 0,4-7; the first is drawn.",
        ),
    ] = "0-3",
    recording: Annotated[
        Path | None,
        typer.Option(help="A recording.npz of before, instead of a run; needs no GPU."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    device: Annotated[str | None, typer.Option(help="cuda or cuda:1.")] = None,
    form: Form = TERMINAL,
    as_json: AsJson = False,
) -> None:
    """Show what each role of a Hopper kernel does, and when, from inside the kernel.

    Compiles an instrumented copy of the kernel on first use (it needs nvcc and the source tree),
    runs it once and writes: trace.json.gz for ui.perfetto.dev, a picture of one block,
    recording.npz with the marks of the blocks named, summary.json. The measures printed are of all
    blocks that ran. Exit code 2: bad input.
    """
    with bad_input("timeline"):
        from attnscope.timeline.recording import Recording

        wanted, form = block_numbers(blocks), form_of(form, as_json)
        if recording is None:
            from attnscope.inputs import Case
            from attnscope.timeline.session import record

            work = Case(
                seqlen_q=seq_len,
                seqlen_k=seq_len,
                **call_sizes(head_dim, seq_len, batch, heads, kv_heads),
                head_dim=head_dim,
                head_dim_v=head_dim,
                dtype=DTYPES.get(dtype, dtype),
                causal=causal,
                window=(-1, -1),
                softcap=0.0,
                seqlens=None,
            )
            made = record(work, pick_device(device), seed, "backward" if backward else "forward")
        else:
            made = Recording.load(recording)
        with printed(form, "timeline") as content:
            content |= _write(made, wanted, output)


def block_numbers(text: str) -> list[int]:
    """Numbers and ranges with commas, such as 0,4-7, in their order. Raises ValueError."""
    found: dict[int, None] = {}
    for word in text.split(","):
        first, dash, last = word.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"blocks must be numbers such as 0,4-7, got {text!r}")
        found |= dict.fromkeys(range(int(first), int(last or first) + 1))
    if not found:
        raise ValueError(f"blocks must name at least one block, got {text!r}")
    return list(found)


def _write(recording: Recording, wanted: list[int], output: Path) -> dict[str, Any]:
    """Write and print everything; returns what summary.json has."""
    from attnscope.common.plotting import save
    from attnscope.timeline.analysis import analyse
    from attnscope.timeline.drawing import draw_block
    from attnscope.timeline.trace import write_trace

    kept = [block for block in wanted if block in recording.blocks]
    if not kept:
        recording.place(wanted[0])  # raises an error that lists the recorded blocks
    if absent := [block for block in wanted if block not in kept]:
        say(f"blocks not recorded: {', '.join(map(str, absent))}")
    summary = analyse(recording)
    few = recording.select(kept)
    output.mkdir(parents=True, exist_ok=True)
    few.save(output / "recording.npz")
    write_trace(few, output / "trace.json.gz")
    content = recording.facts | {"summary": summary}
    (output / "summary.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    show(recording.facts, summary)
    for name in ("trace.json.gz", "recording.npz", "summary.json"):
        say(str(output / name))
    for path in save(draw_block(recording, summary, kept[0]), output / f"block-{kept[0]}"):
        say(str(path))
    return content


def show(facts: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
    """Print the measures, after the facts that limit their accuracy."""
    from attnscope.timeline.layouts import layout_of

    say(
        "{mode} {dtype}, batch {batch}, {seqlen_q} queries, {seqlen_k} keys, heads {heads_q}:"
        "{heads_kv}, head dim {head_dim}".format_map(facts["workload"])
        + (", causal" if facts["workload"]["causal"] else "")
    )
    d, lost = facts["disturbance"], summary["lost_tiles"]
    say(
        f"disturbance: {d['instrumented_ms']:.4f} ms with marks, {d['normal_ms']:.4f} ms without: "
        f"{d['slowdown']:.3f} times; {d['registers']} registers, {d['spill_bytes']} bytes of "
        f"spills; output {'the same bits' if d['same_output'] else 'DIFFERENT'}"
    )
    if lost:
        say(f"{lost} tiles of lanes did not fit the buffer: the shares are of what did", "red")
    tile, clock, tail = facts["tile"], summary["clock_mhz"], summary["tail"]
    say(
        f"{summary['blocks']} blocks, {summary['tiles']} tiles of {tile['block_m']} x "
        f"{tile['block_n']}, {tile['consumers']} consumers; SM clock {_number(clock, '.0f')} MHz"
    )
    if tile["blocks_per_sm"] > 1:
        say(f"up to {tile['blocks_per_sm']} blocks share an SM: shares and overlap are inside each")
    kernel = layout_of(facts)
    show_table(_states_table(summary))
    show_table(_overlap_table(summary, kernel.compute))
    show_table(_costs_table(summary, kernel.costs_are))
    floors = summary["floors"]
    say(
        f"least cycles of a step of all consumers: tensor cores {floors['tensor_cores']:.0f}, "
        f"exponentials {floors['exponentials']:.0f}; tensor cores at their rate would fill "
        f"{floors['tensor_share']:.1%} of the blocks' time"
    )
    say(
        f"blocks end between {_number(tail['first_end_ns'], '.0f')} and "
        f"{_number(tail['last_end_ns'], '.0f')} ns ({_number(tail['idle_share'], '.1%')} of the "
        f"time a block's place is empty); they begin within {tail['begin_spread_ns']:.0f} ns; the "
        f"device timer moves by {_number(tail['timer_step_ns'], '.0f')} ns"
    )


def _states_table(summary: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="States of each role, cycles")
    for name in ("role", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("share of its time", "count", "p10", "median", "p90"):
        table.add_column(name, justify="right", no_wrap=True)
    last = None
    for row in summary["roles"]:
        role = row["role"] if row["role"] != last else ""
        last = row["role"]
        numbers = [_number(row[name], ".0f") for name in ("p10", "median", "p90")]
        table.add_row(role, row["state"], f"{row['share']:.1%}", str(row["count"]), *numbers)
    return table


def _overlap_table(summary: Mapping[str, Any], compute: str) -> Table:
    title = "Overlap; in flight: issued and not yet waited for"
    table = Table(box=box.SIMPLE_HEAD, title=title)
    table.add_column("at the same time", no_wrap=True)
    table.add_column("share of the blocks' time", justify="right")
    for name, what in OVERLAP.items():
        table.add_row(what.format(compute), f"{summary['overlap'][name]:.1%}")
    return table


def _costs_table(summary: Mapping[str, Any], costs: Mapping[str, str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="Cycles of a consumer")
    table.add_column("what", no_wrap=True)
    for name in ("count", "p10", "median", "p90"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, what in costs.items():
        row = summary["cycles"][name]
        table.add_row(
            what, *(_number(row[key], ".0f") for key in ("count", "p10", "median", "p90"))
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "not known" if value is None else format(value, form)
