"""The kernel table: theoretical occupancy, and tiles joined with the build's ptxas numbers."""

import json
import math
import re

import pytest
import torch
from typer import Typer
from typer.testing import CliRunner

from attnscope import _load, kernels
from attnscope.common.hardware.occupancy import sm_of_arch, theoretical_occupancy


# Results of NVIDIA's occupancy calculator (cuda_occupancy.h): blocks per SM, and the limiter.
@pytest.mark.parametrize(
    ("arch", "registers", "threads", "shared", "blocks", "limiter"),
    [
        ("sm_80", 32, 128, 0, 16, "warps and registers"),
        ("sm_80", 32, 32, 0, 32, "blocks"),
        ("sm_80", 40, 256, 0, 6, "registers"),
        ("sm_80", 128, 128, 32768, 4, "registers and shared memory"),
        ("sm_80", 168, 128, 32768, 3, "registers"),
        ("sm_80", 255, 128, 65536, 2, "registers and shared memory"),
        ("sm_80", 255, 256, 98304, 1, "registers and shared memory"),
        ("sm_80", 168, 384, 166912, 1, "registers and shared memory"),
        ("sm_80", 168, 384, 166913, 0, "shared memory"),
        ("sm_90", 16, 1024, 0, 2, "warps"),
        ("sm_90", 72, 96, 0, 9, "registers"),
        ("sm_90", 168, 384, 200000, 1, "registers and shared memory"),
        ("sm_90a", 168, 384, 232448, 1, "registers and shared memory"),
        ("sm_90a", 168, 384, 232449, 0, "shared memory"),
        ("sm_90", 168, 512, 0, 0, "registers"),
        ("sm_90", 64, 160, 16384, 6, "registers"),
    ],
)
def test_occupancy_matches_nvidias_calculator(arch, registers, threads, shared, blocks, limiter):
    warps = blocks * -(-threads // 32)
    found = theoretical_occupancy(registers, threads, shared, sm_of_arch(arch))
    assert found == (warps, warps / 64, limiter)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((64, 128, 0, "sm_70"), "arch must be one of sm_80, sm_90, sm_90a; got 'sm_70'"),
        ((64, 0, 0, "sm_80"), "threads must be 1 to 1024, got 0"),
        ((64, 1056, 0, "sm_80"), "threads must be 1 to 1024, got 1056"),
        ((256, 128, 0, "sm_80"), "registers must be 1 to 255, got 256"),
        ((64, 128, -1, "sm_80"), "shared_bytes must be 0 or more, got -1"),
    ],
)
def test_occupancy_refuses_what_no_kernel_has(arguments, message):
    *numbers, arch = arguments
    with pytest.raises(ValueError, match=message):
        theoretical_occupancy(*numbers, sm_of_arch(arch))


BASE = kernels.Call(
    head_dim=128, head_dim_v=128, seqlen_q=4096, seqlen_k=4096, batch=4, heads_q=16, heads_kv=16,
    causal=False, window=(-1, -1), packed=False, softcap=0.0, sms=132, capability=90,
)  # fmt: skip

TILE = {
    "kernel": "sm80_forward",
    "head_dim": 128,
    "block_m": 128,
    "block_n": 64,
    "threads": 128,
    "stages": 2,
    "shared_bytes": 65536,
    "reason": "measured",
}


def usage(symbol: str, arch: str = "sm_90", registers: int = 200, spills: int = 0) -> dict:
    return {
        "kernel": symbol,
        "arch": arch,
        "registers": registers,
        "static_shared_bytes": 16,
        "stack_bytes": 0,
        "spill_store_bytes": spills,
        "spill_load_bytes": spills,
    }


def symbol(head_dim: int, dtype: str = "__half", folder: str = "sm80", op: str = "forward") -> str:
    config = f"attnscope::{folder}::ForwardConfig<{dtype}, {head_dim}>"
    return f"attnscope::{folder}::{op}_kernel<{config} >"


def test_a_tile_shows_the_worst_of_its_instances_on_each_architecture():
    measured = [
        usage(symbol(128), "sm_80", registers=168),
        usage(symbol(128), registers=200),
        usage(symbol(128, "__nv_bfloat16"), registers=255, spills=8),
        usage(symbol(64), registers=32),
    ]
    portable, hopper = kernels.join([TILE], measured)
    assert (portable["arch"], portable["instances"], portable["registers"]) == ("sm_80", 1, 168)
    assert (hopper["arch"], hopper["instances"], hopper["registers"]) == ("sm_90", 2, 255)
    assert (portable["spill_bytes"], hopper["spill_bytes"]) == (0, 16)
    assert (hopper["warps_per_sm"], hopper["limiter"]) == (8, "registers")


def test_tiles_of_one_head_dim_differ_by_their_rows():
    short, long = ({**TILE, "kernel": "sm90_forward", "block_m": rows} for rows in (128, 192))
    used = "attnscope::sm90::forward_kernel<attnscope::sm90::ForwardConfig<__half, 128, 192> >"
    missing, found = kernels.join([short, long], [usage(used, "sm_90a")])
    assert missing["missing"] == "no instance in this build" and found["instances"] == 1


def test_backward_tiles_differ_by_their_keys_or_are_named_by_their_row():
    portable = [
        {**TILE, "kernel": "sm80_backward", "head_dim": 256, "block_m": 32, "block_n": keys}
        for keys in (64, 32)
    ]
    used = "attnscope::sm80::backward_kernel<attnscope::sm80::BackwardConfig<__half, 256, 32, 32> >"
    missing, found = kernels.join(portable, [usage(used)])
    assert missing["missing"] == "no instance in this build" and found["instances"] == 1
    hopper = [{**TILE, "kernel": "sm90_backward", "row": row} for row in (2, 3, 4)]
    symbols = [
        "attnscope::sm90::backward_kernel<attnscope::sm90::BackwardConfig<__half, 2> >",
        "attnscope::sm90::wide_backward_kernel<attnscope::sm90::WideConfig<__nv_bfloat16, 3> >",
        "attnscope::sm90::backward_preprocess_kernel<attnscope::sm90::BackwardConfig<__half, 4> >",
    ]
    rows = kernels.join(hopper, [usage(name, "sm_90a") for name in symbols])
    assert [row["missing"] is None for row in rows] == [True, True, False]


@pytest.mark.parametrize(
    "other",
    [symbol(64), symbol(128, folder="sm90"), symbol(128, op="backward"), "cub::sort_kernel<128>"],
)
def test_a_tile_without_an_instance_is_a_row_with_the_reason(other):
    (row,) = kernels.join([TILE], [usage(other)])
    assert row["arch"] is None
    assert row["missing"] == "no instance in this build"


def test_every_tile_of_this_build_has_an_instance_and_none_spills():
    if _load.build_report()["not_built"]:
        pytest.skip(_load.library_status()["_C_cuda"])
    rows = kernels.kernel_rows()
    assert rows
    for row in rows:
        assert row["missing"] is None, row
        assert row["spill_bytes"] == 0, row
        # Some tiles of sm80_backward are for architectures with more shared memory than sm_80.
        sm = sm_of_arch(row["arch"])
        fits = row["shared_bytes"] + sm.reserved_shared_bytes <= sm.shared_bytes
        assert fits or row["kernel"] == "sm80_backward", row
        assert (row["warps_per_sm"] > 0) == fits, row


def test_no_kernel_of_a_backward_call_spills():
    if _load.build_report()["not_built"]:
        pytest.skip(_load.library_status()["_C_cuda"])
    steps = ("preprocess_kernel", "backward_kernel", "postprocess_kernel")
    used = [
        u
        for u in _load.build_report()["kernels"]
        if "::sm80::p" in u["kernel"] or re.search(r"::\w*(backward|wide)_\w*kernel", u["kernel"])
    ]
    for step in steps:
        assert any(step in u["kernel"] for u in used), step
    for u in used:
        assert u["spill_store_bytes"] == u["spill_load_bytes"] == u["stack_bytes"] == 0, u


def test_the_command_prints_every_tile():
    app = Typer()
    app.command()(kernels.kernels_command)
    shown = CliRunner().invoke(app, [])
    assert shown.exit_code == 0
    for kernel in ("sm80_forward", "sm90_forward", "sm80_backward", "sm90_backward"):
        assert kernel in shown.output
    assert _load.library_status()["_C_cuda"] in shown.output
    rows = json.loads(CliRunner().invoke(app, ["--json"]).output)
    assert [row["kernel"] for row in rows] == [row["kernel"] for row in kernels.kernel_rows()]


def test_the_table_shows_the_heads_of_a_tile_and_its_queries():
    tiles = {t["head_dim"]: [] for t in json.loads(torch.ops.attnscope.kernels())}
    for tile in json.loads(torch.ops.attnscope.kernels()):
        if tile["kernel"] == "sm90_forward":
            tiles[tile["head_dim"]].append((kernels.tile_size(tile), kernels.queries_served(tile)))
    assert tiles[64] == [
        ("2 x 128x64", "65-128"), ("256x64", "129-1024, causal -4096"), ("64x64", "1-128"),
        ("192x128", "any"),
    ]  # fmt: skip
    assert tiles[128][0] == ("192x64", "257+")
    table = kernels.kernels_table(kernels.kernel_rows())
    assert "2 x 128x64" in list(table.columns[3].cells)


def test_every_column_of_every_tile_has_a_meaning():
    for tile in json.loads(torch.ops.attnscope.kernels()):
        assert set(tile) - {"kernel"} <= set(kernels.COLUMNS), tile
        assert tile["shared_bytes"] > 0 and tile["reason"]


# What differs from BASE -> (tile, rule, heads side by side, tiles, blocks, waves).
CHOICES = {
    "long": ({}, ("192x64", "first row", 1, 60 * 22 + 4 * 32, 132, 11)),
    "few": ({"seqlen_q": 128, "batch": 1}, ("64x64x2", "least time", 1, 32, 32, 1)),
    "empty": ({"seqlen_q": 0}, ("64x64", "first row", 1, 0, 0, 0)),
    "grouped": (
        {"seqlen_q": 16, "batch": 64, "heads_kv": 4},
        ("64x64x2", "grouped", 4, 64 * 4, 132, 2),
    ),
    "pairs": (
        {"head_dim": 64, "head_dim_v": 64, "seqlen_q": 100, "heads_q": 9, "heads_kv": 9}
        | {"batch": 100},
        ("2 x 128x64", "first row", 1, 500, 132, 4),
    ),
    "packed": (
        {"head_dim": 64, "head_dim_v": 64, "seqlen_q": 100, "batch": 100, "packed": True},
        ("64x64", "first row", 1, 3200, 396, 9),
    ),
    "wide v": ({"head_dim": 64, "seqlen_q": 8192}, ("192x64", "first row", 1, 64 * 43, 132, 21)),
    "other head dim": (
        {"head_dim": 72, "head_dim_v": 72},
        ("192x64", "first row", 1, 60 * 22 + 4 * 32, 132, 11),
    ),
    "narrow v": ({"head_dim": 192}, ("192x64", "first row", 1, 60 * 22 + 4 * 32, 132, 11)),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_tile_that_serves_a_call(name):
    changes, (size, rule, side_by_side, tiles, blocks, waves) = CHOICES[name]
    found = kernels.choose_forward(BASE._replace(**changes))
    assert (found["kernel"], found["not_sm90"]) == ("sm90_forward", None)
    assert kernels.tile_size(found["tile"]) == size
    assert found["rule"].startswith(rule)
    assert found["heads_side_by_side"] == side_by_side
    assert (found["tiles"], found["blocks"], found["waves"]) == (tiles, blocks, waves)


def test_a_causal_call_is_one_without_a_left_bound():
    """The binding drops window bounds beyond every key; the tile choice must match."""
    call = BASE._replace(head_dim=64, head_dim_v=64, seqlen_q=2048, seqlen_k=2048, batch=64)
    sizes = {
        (causal, window): kernels.tile_size(
            kernels.choose_forward(call._replace(causal=causal, window=window))["tile"]
        )
        for causal in (False, True)
        for window in ((-1, -1), (1500, -1), (4096, -1), (-1, 0))
    }
    is_causal = {key for key, size in sizes.items() if size == "256x64"}
    assert is_causal == {
        (True, (-1, -1)), (True, (4096, -1)), (True, (-1, 0)), (False, (-1, 0)),
    }  # fmt: skip


def test_other_devices_have_the_portable_kernel_and_other_sm_counts():
    portable = kernels.choose_forward(BASE._replace(capability=86, sms=84))
    assert portable["kernel"] == "sm80_forward" and "8.6; the Hopper" in portable["not_sm90"]
    assert portable["tile"]["head_dim"] == 128 and portable["resident_blocks"] == 168
    assert portable["tiles"] == portable["blocks"] == 4 * 16 * 32
    capped = kernels.choose_forward(BASE._replace(softcap=256.0))
    assert (capped["kernel"], capped["not_sm90"]) == ("sm80_forward", "softcap is 256 or more")
    assert kernels.choose_forward(BASE._replace(softcap=50.0))["kernel"] == "sm90_forward"
    short = BASE._replace(head_dim=64, head_dim_v=64, seqlen_q=512, seqlen_k=512, causal=True)
    short = short._replace(batch=1, heads_q=32, heads_kv=32)
    sizes = [
        kernels.tile_size(kernels.choose_forward(short._replace(sms=sms))["tile"])
        for sms in (132, 64)
    ]
    assert sizes == ["64x64", "256x64"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 12}, "head_dim must be a multiple of 8 up to 256, got 12"),
        ({"head_dim_v": 264}, "head_dim must be a multiple of 8 up to 256, got 264"),
        ({"seqlen_q": -1}, "seqlen_q, seqlen_k must be 0 to 2147482624, got -1"),
        ({"batch": -1}, "batch must be 0 to 2147483647, got -1"),
        ({"heads_kv": 3}, "heads_q must be a multiple of heads_kv, got 16 and 3"),
        ({"heads_kv": 0}, "heads_q must be a multiple of heads_kv, got 16 and 0"),
        ({"sms": 0}, "sms must be 1 to 65535, got 0"),
        ({"capability": 75}, "capability must be >= 80"),
        ({"window": (-2, 0)}, "window_left must be >= -1, got -2"),
        ({"softcap": -1.0}, "softcap must be >= 0 (0: none), got -1"),
        ({"softcap": float("nan")}, "softcap must be >= 0"),
        ({"batch": 1 << 30}, "batch * heads_q must be <= 2147483647, got 1073741824 * 16"),
    ],
)
def test_sizes_that_no_call_has_are_refused(changes, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        kernels.choose_forward(BASE._replace(**changes))


# What differs from BASE -> (kernel, tile, head dim, tiles of keys, blocks, waves).
BACKWARD_CHOICES = {
    "long": ({}, ("sm90_backward", "80x128", 128, 2048, 132, 16)),
    "causal": (
        {"causal": True, "seqlen_q": 4095},
        ("sm90_backward", "64x128", 128, 2048, 132, 16),
    ),
    "long causal": (
        {"causal": True, "seqlen_q": 4096},
        ("sm90_backward", "80x128", 128, 2048, 132, 16),
    ),
    "window": (
        {"window": (9, -1), "seqlen_q": 8192},
        ("sm90_backward", "64x128", 128, 2048, 132, 16),
    ),
    "short head dim": (
        {"head_dim": 64, "head_dim_v": 40, "seqlen_k": 100, "heads_kv": 4},
        ("sm90_backward", "64x128", 64, 16, 128, 1),
    ),
    "many short tiles": (
        {"head_dim": 64, "head_dim_v": 64},
        ("sm90_backward", "64x192", 64, 1408, 132, 11),
    ),
    "few short tiles": (
        {"head_dim": 64, "head_dim_v": 64, "seqlen_k": 512, "batch": 2},
        ("sm90_backward", "128x128", 64, 128, 128, 1),
    ),
    "softcap": (
        {"head_dim": 64, "head_dim_v": 64, "softcap": 30.0},
        ("sm90_backward", "64x128", 128, 2048, 132, 16),
    ),
    "wide": ({"head_dim_v": 200}, ("sm90_backward", "64x128", 256, 2048, 132, 32)),
    "capped": ({"softcap": 256.0}, ("sm80_backward", "64x128", 128, 2048, 2048, 16)),
    "A100": (
        {"head_dim": 256, "capability": 80, "sms": 108},
        ("sm80_backward", "32x64", 256, 4096, 4096, 38),
    ),
    "Ada": ({"capability": 89, "sms": 128}, ("sm80_backward", "32x64", 128, 4096, 4096, 32)),
    "packed": (
        {"seqlen_k": 256, "packed": True},
        ("sm90_backward", "80x128", 128, 128, 132, 1),
    ),
    "no keys": ({"seqlen_k": 0}, ("sm90_backward", "80x128", 128, 0, 0, 0)),
}


@pytest.mark.parametrize("name", BACKWARD_CHOICES)
def test_the_tile_that_serves_a_backward_call(name):
    changes, (kernel, size, head_dim, tiles, blocks, waves) = BACKWARD_CHOICES[name]
    found = kernels.choose_backward(BASE._replace(**changes))
    tile = found["tile"]
    assert (found["kernel"], kernels.tile_size(tile), tile["head_dim"]) == (kernel, size, head_dim)
    assert (found["tiles"], found["blocks"], found["waves"]) == (tiles, blocks, waves)


# What differs from BASE -> (tiles that are split, parts of each, what a part has).
PARTS = {
    "last wave": ({}, (68, 3, "queries")),
    "last wave of clusters": ({"head_dim": 256}, (2, 16, "queries")),
    "short tiles": ({"seqlen_q": 200}, (0, 1, "queries")),
    "causal": ({"causal": True}, (0, 1, "queries")),
    "causal, few tiles": ({"causal": True, "batch": 1, "heads_kv": 2}, (64, 4, "query heads")),
    "causal, few heads": (
        {"causal": True, "batch": 1, "heads_q": 2, "heads_kv": 2},
        (64, 4, "queries"),
    ),
    "few tiles": ({"seqlen_k": 128, "heads_kv": 4}, (16, 8, "queries")),
    "packed": ({"packed": True}, (0, 1, "queries")),
    "packed, few tiles": ({"packed": True, "batch": 1, "heads_kv": 2}, (66, 2, "query heads")),
    "no queries": ({"seqlen_q": 0}, (0, 1, "queries")),
    "one SM": ({"sms": 1, "head_dim": 256}, (0, 1, "queries")),
}


@pytest.mark.parametrize("name", PARTS)
def test_the_parts_of_a_backward_call(name):
    changes, parts = PARTS[name]
    found = kernels.choose_backward(BASE._replace(**changes))
    assert (found["split_tiles"], found["parts"], found["parts_of"]) == parts


def run(*arguments: str):
    app = Typer()
    app.command()(kernels.kernels_command)
    return CliRunner().invoke(app, arguments)


def test_the_command_shows_the_tile_of_a_call():
    options = ("--head-dim", "64", "--seq-len", "128", "--causal", "--arch", "sm90")
    shown = run(*options)
    assert shown.exit_code == 0
    assert shown.output.startswith("sm90_forward, tile 2 x 128x64 at head dim 64: first row")
    assert re.search(r"heads_per_tile +2 +heads of a tile", shown.output)
    assert "2,048 tiles of up to 256 rows, 132 thread blocks" in shown.output
    assert "16 waves (15.52)" in shown.output
    found = json.loads(run(*options, "--sms", "66", "--json").output)
    assert (found["call"]["sms"], found["waves"]) == (66, 32)
    portable = run("--head-dim", "64", "--seq-len", "128", "--arch", "sm80")
    assert "not sm90_forward: the device has compute capability 8.0" in portable.output
    assert "108 SMs of compute capability 8.0" in portable.output
    backward = run(*options, "--backward")
    assert backward.output.startswith("sm90_backward, tile 64x128 at head dim 64: least estimated")
    assert "4,096 tiles of up to 128 keys, 132 thread blocks" in backward.output
    assert "the last 4 tiles are split" not in backward.output  # two blocks of queries are few
    long = run("--head-dim", "128", "--seq-len", "4096", "--arch", "sm90", "--backward")
    assert "the last 68 tiles are split over their queries, in 3 parts" in long.output
    few = "--head-dim 128 --seq-len 2048 --batch 1 --heads 28 --kv-heads 4 --causal --arch sm90"
    shown = run(*few.split(), "--backward", "--deterministic").output
    assert "the last 64 tiles are split over their query heads, in 4 parts" in shown
    assert "over their queries" in run(*few.split(), "--backward").output
    portable = run("--head-dim", "64", "--seq-len", "128", "--arch", "sm80", "--backward")
    assert "not sm90_backward: the device has compute capability 8.0" in portable.output
    packed = run("--head-dim", "64", "--seq-len", "128", "--packed", "--arch", "sm90")
    assert "at most 8,192 tiles" in packed.output


@pytest.mark.parametrize(
    "options",
    [
        ("--head-dim", "64"),
        ("--seq-len", "64"),
        ("--causal",),
        ("--backward",),
        ("--deterministic",),
        ("--head-dim", "64", "--seq-len", "64", "--deterministic"),
        ("--sms", "132"),
        ("--head-dim", "64", "--seq-len", "64", "--window", "3"),
        ("--head-dim", "64", "--seq-len", "64", "--arch", "sm70"),
        ("--head-dim", "60", "--seq-len", "64"),
    ],
)
def test_the_command_refuses_what_is_no_call(options):
    assert run(*options).exit_code == 2


GPU_CALLS = ("long", "few", "grouped", "pairs", "wide v", "other head dim")


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("name", GPU_CALLS)
@pytest.mark.parametrize("variant", [80, 90])
def test_a_launch_is_the_kernel_and_the_grid_of_the_choice(name, variant, tmp_path):
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    call = BASE._replace(**CHOICES[name][0], sms=sms, capability=variant)
    q = torch.randn(
        call.batch, call.seqlen_q, call.heads_q, call.head_dim, device="cuda", dtype=torch.bfloat16
    )
    k = torch.randn(
        call.batch, call.seqlen_k, call.heads_kv, call.head_dim, device="cuda", dtype=torch.bfloat16
    )
    v = torch.randn(*k.shape[:3], call.head_dim_v, device="cuda", dtype=torch.bfloat16)

    options = {"scale": 0.1, "causal": call.causal, "variant": variant}
    (kernel,) = launched(lambda: torch.ops.attnscope.forward(q, k, v, **options), tmp_path)
    check_launch(kernel, kernels.choose_forward(call))


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("name", ["long", "short head dim", "softcap", "wide"])
@pytest.mark.parametrize("variant", [80, 90])
def test_a_backward_launch_is_the_kernel_and_the_grid_of_the_choice(name, variant, tmp_path):
    call = BASE._replace(**{"seqlen_q": 500, "seqlen_k": 700, **BACKWARD_CHOICES[name][0]})

    def rows(length, heads, dim):
        return torch.randn(call.batch, length, heads, dim, device="cuda", dtype=torch.bfloat16)

    q = rows(call.seqlen_q, call.heads_q, call.head_dim)
    k = rows(call.seqlen_k, call.heads_kv, call.head_dim)
    v = rows(call.seqlen_k, call.heads_kv, call.head_dim_v)
    options = {"scale": 0.1, "softcap": call.softcap, "variant": variant}
    out, lse = torch.ops.attnscope.forward(q, k, v, **options)
    found = launched(
        lambda: torch.ops.attnscope.backward(out, q, k, v, out, lse, **options), tmp_path
    )
    # The portable kernel of this device: the tiles that Hopper's shared memory has room for.
    changes = {"sms": torch.cuda.get_device_properties("cuda").multi_processor_count}
    if variant == 80:
        changes["capability"] = 100
    choice = kernels.choose_backward(call._replace(**changes))
    (kernel,) = (e for e in found if kernels.symbol_matches(e["name"], choice["tile"]))
    assert len(found) == 3
    check_launch(kernel, choice)


def launched(launch, tmp_path):
    """The kernels of attnscope that `launch` runs, as events of a trace."""
    launch()
    for attempt in range(3):  # the profiler can miss the first kernels of a process
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            launch()
            torch.cuda.synchronize()
        path = tmp_path / f"{attempt}.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
        found = [e for e in events if e.get("cat") == "kernel" and "attnscope" in e["name"]]
        if found:
            return found
    return []


def check_launch(kernel, choice):
    assert kernels.symbol_matches(kernel["name"], choice["tile"])
    assert math.prod(kernel["args"]["grid"]) == choice["blocks"]
    assert math.prod(kernel["args"]["block"]) == choice["tile"]["threads"]
