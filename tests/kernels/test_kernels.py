"""The kernel table: theoretical occupancy, and tiles joined with what the build measured."""

import json

import pytest
from typer import Typer
from typer.testing import CliRunner

from attnscope import _load, kernels
from attnscope.common.hardware.occupancy import sm_of_arch, theoretical_occupancy


# What NVIDIA's occupancy calculator (cuda_occupancy.h) says: blocks per SM, and the limiter.
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
def test_occupancy_is_that_of_the_calculator(arch, registers, threads, shared, blocks, limiter):
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


def test_tiles_of_one_head_dim_are_told_apart_by_their_rows():
    short, long = ({**TILE, "kernel": "sm90_forward", "block_m": rows} for rows in (128, 192))
    used = "attnscope::sm90::forward_kernel<attnscope::sm90::ForwardConfig<__half, 128, 192> >"
    missing, found = kernels.join([short, long], [usage(used, "sm_90a")])
    assert missing["missing"] == "no instance in this build" and found["instances"] == 1


@pytest.mark.parametrize(
    "other",
    [symbol(64), symbol(128, folder="sm90"), symbol(128, op="backward"), "cub::sort_kernel<128>"],
)
def test_a_tile_without_an_instance_is_a_row_that_says_so(other):
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
        assert row["warps_per_sm"] > 0, row


def test_the_command_prints_every_tile():
    app = Typer()
    app.command()(kernels.kernels_command)
    shown = CliRunner().invoke(app, [])
    assert shown.exit_code == 0
    assert "sm80_forward" in shown.output
    assert _load.library_status()["_C_cuda"] in shown.output
    rows = json.loads(CliRunner().invoke(app, ["--json"]).output)
    assert [row["kernel"] for row in rows] == [row["kernel"] for row in kernels.kernel_rows()]
