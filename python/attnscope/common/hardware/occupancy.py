"""How many warps of a kernel fit on a streaming multiprocessor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

WARP = 32
MAX_THREADS_PER_BLOCK = 1024
MAX_REGISTERS_PER_THREAD = 255
SUBPARTITIONS = 4  # of an SM; each has a quarter of the registers and of the warp slots
REGISTER_UNIT = 256  # a warp gets registers in multiples of this
SHARED_UNIT = 128  # bytes; a block gets shared memory in multiples of this
# Most resident blocks per SM, by compute capability (CUDA programming guide, technical
# specifications). Neither a trace nor the device properties of torch have it.
BLOCKS_PER_SM = {
    (7, 0): 32, (7, 5): 16, (8, 0): 32, (8, 6): 16, (8, 7): 16, (8, 9): 24,
    (9, 0): 32, (10, 0): 32, (12, 0): 24,
}  # fmt: skip


@dataclass(frozen=True)
class SM:
    """Limits of one streaming multiprocessor.

    Attributes:
        warps: most resident warps.
        blocks: most resident blocks.
        registers: 32-bit registers.
        shared_bytes: shared memory of all resident blocks together.
        reserved_shared_bytes: what the driver takes of it for each block.
    """

    warps: int
    blocks: int
    registers: int
    shared_bytes: int
    reserved_shared_bytes: int = 1024


def sm_of(capability: tuple[int, int], warps: int, registers: int, shared_bytes: int) -> SM:
    """An SM of a compute capability, with the limits that the device reports.

    Raises ValueError for a capability whose most blocks per SM are unknown here.
    """
    if capability not in BLOCKS_PER_SM:
        major, minor = capability
        known = ", ".join(f"{high}.{low}" for high, low in BLOCKS_PER_SM)
        raise ValueError(f"capability must be one of {known}, got {major}.{minor}")
    reserved = 1024 if capability >= (8, 0) else 0
    return SM(warps, BLOCKS_PER_SM[capability], registers, shared_bytes, reserved)


# The architectures that kernels of this package are compiled for.
SMS = {
    "sm_80": sm_of((8, 0), warps=64, registers=65536, shared_bytes=164 * 1024),
    "sm_90": sm_of((9, 0), warps=64, registers=65536, shared_bytes=228 * 1024),
}


def sm_of_arch(arch: str) -> SM:
    """The SM of `sm_80`, `sm_90` or `sm_90a`. Raises ValueError for any other."""
    sm = SMS.get(arch.removesuffix("a"))
    if sm is None:
        raise ValueError(f"arch must be one of {', '.join(SMS)}, sm_90a; got {arch!r}")
    return sm


class Occupancy(NamedTuple):
    """Resident warps of an SM, their share of its warp slots, and the occupancy limiter."""

    warps_per_sm: int
    fraction: float
    limiter: str


def theoretical_occupancy(registers: int, threads: int, shared_bytes: int, sm: SM) -> Occupancy:
    """Occupancy of one kernel on one SM, as NVIDIA's occupancy calculator counts it.

    Args:
        registers: of a thread.
        threads: of a block.
        shared_bytes: of a block, static and dynamic.
        sm: the limits.

    A block that does not fit at all has 0 warps. The limiter is one or several of `warps`,
    `blocks`, `registers`, `shared memory`, joined by " and ". Raises ValueError for a block that no
    card runs.
    """
    if not 1 <= threads <= MAX_THREADS_PER_BLOCK:
        raise ValueError(f"threads must be 1 to {MAX_THREADS_PER_BLOCK}, got {threads}")
    if not 1 <= registers <= MAX_REGISTERS_PER_THREAD:
        raise ValueError(f"registers must be 1 to {MAX_REGISTERS_PER_THREAD}, got {registers}")
    if shared_bytes < 0:
        raise ValueError(f"shared_bytes must be 0 or more, got {shared_bytes}")

    warps = _units(threads, WARP)
    warp_registers = _units(registers * WARP, REGISTER_UNIT) * REGISTER_UNIT
    # A launch is refused as if a block took registers in all subpartitions alike.
    block_registers = warp_registers * _units(warps, SUBPARTITIONS) * SUBPARTITIONS
    resident = sm.registers // SUBPARTITIONS // warp_registers * SUBPARTITIONS
    block_shared = _units(shared_bytes + sm.reserved_shared_bytes, SHARED_UNIT) * SHARED_UNIT
    limits = {
        "warps": sm.warps // warps,
        "blocks": sm.blocks,
        "registers": resident // warps if block_registers <= sm.registers else 0,
        "shared memory": sm.shared_bytes // max(1, block_shared),  # 0 before sm_80
    }
    blocks = min(limits.values())
    limiter = " and ".join(name for name, limit in limits.items() if limit == blocks)
    return Occupancy(blocks * warps, blocks * warps / sm.warps, limiter)


def _units(amount: int, unit: int) -> int:
    return -(-amount // unit)
