"""What limits a kernel, by its counters, and what could lift the limit; with the numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from attnscope.common.hardware.occupancy import (
    MAX_REGISTERS_PER_THREAD,
    WARP,
    sm_of,
    theoretical_occupancy,
)
from attnscope.nsight.metrics import LIMITERS, STALLS
from attnscope.nsight.ncu_reader import Kernel

# Percent of its peak at which a unit counts as the limit, and as busy beside another one.
SATURATED, SATURATED_MEMORY, BUSY = 75.0, 60.0, 45.0
CLOSE = 0.75  # share of the busiest unit at which another one counts as equally busy
SMALL_GRID = 0.9  # of the SMs; with fewer blocks some SMs have no work
DRAM_FIRST = 0.9  # share of the busiest memory unit at which DRAM counts as the limit
LOW_OCCUPANCY = 40.0  # percent
RARE_STALL = 3.0  # percent of the stalled warps
CONFLICTS, PARTIAL_SECTORS = 0.1, 24.0  # share of wavefronts; bytes used of a sector's 32
LSU_SHARE = 0.1  # of the L2 traffic, at which coalescing matters
SECTOR_BYTES = 32
REGISTERS, SHARED_BYTES = 65536, {(8, 0): 164, (9, 0): 228, (10, 0): 228}  # of an SM; in KiB

UNITS = {  # key -> the unit's name
    "tensor_pct": "tensor pipe",
    "mufu_pct": "MUFU (exp)",
    "fma_pct": "FMA pipe",
    "alu_pct": "ALU pipe",
    "issue_pct": "issue slots",
    "dram_pct": "DRAM",
    "l2_pct": "L2",
    "l1_pct": "L1 and shared memory",
}
MEMORY = ("dram_pct", "l2_pct", "l1_pct")
LIMIT_NAMES = dict(zip(LIMITERS, (
    "registers", "shared memory", "warp slots", "block slots", "named barriers",
), strict=True))  # fmt: skip

# Stall -> what a warp waits for, what to try. On sm_90, where the words are those of its kernels.
STALL_MEANINGS = {
    "barrier": ("other warps at a block barrier or named barrier", "fewer or later barriers; even "
                "work of the warpgroups between them"),
    "branch_resolving": ("the target of a branch", "unroll; take conditions out of the loop"),
    "dispatch_stall": ("the dispatcher, often for register-file ports", "fewer register operands "
                       "in conflict: wgmma with operands in shared memory"),
    "drain": ("stores to be written before the warp exits", "store by TMA; write less at the end"),
    "gmma": ("wgmma to accept the next product", "keep two products in flight; issue the next "
             "before waiting for the last"),
    "imc_miss": ("constants that are not in the constant cache", "pass parameters in one struct; "
                 "read each once"),
    "lg_throttle": ("the queue of global and local memory instructions", "wider loads, TMA, no "
                    "spills"),
    "long_scoreboard": ("data from global memory or L2; on sm_90 also an mbarrier of a TMA load",
                        "more stages in the ring; earlier loads; more work per load"),
    "math_pipe_throttle": ("a math pipe that is busy", "none if the tensor pipe or the MUFU is "
                           "saturated; otherwise move work to another pipe"),
    "membar": ("a memory fence", "narrower fences; fewer of them"),
    "mio_throttle": ("the queue of shared memory and special instructions", "wider shared-memory "
                     "accesses (ldmatrix x4, stmatrix); fewer shuffles"),
    "misc": ("miscellaneous", ""),
    "no_instruction": ("the instruction cache", "a shorter main loop; less unrolling"),
    "not_selected": ("nothing: another warp was issued", "none: there are warps enough"),
    "selected": ("nothing: it is issued", ""),
    "short_scoreboard": ("shared memory, MUFU or a shuffle", "batch exponentials; overlap them "
                         "with products; fewer shuffles in the row max"),
    "sleeping": ("nanosleep", "wait on an mbarrier instead"),
    "tex_throttle": ("the texture queue", "wider loads"),
    "wait": ("a fixed latency between dependent instructions, wgmma's wait included",
             "more independent instructions; another tile of softmax between the products"),
}  # fmt: skip


class Limit(NamedTuple):
    """What limits a kernel: a kind (compute, memory, latency, overlap, launch), a line, advice."""

    kind: str
    line: str
    advice: str


class Stall(NamedTuple):
    """Warps that wait, on average, per issued instruction, and their share of the stalled ones."""

    name: str
    warps: float
    percent: float
    meaning: str
    advice: str


class Residency(NamedTuple):
    """Occupancy in percent of the SM's warp slots, its limiter, and what would lift it."""

    theoretical: float | None
    achieved: float | None
    limiter: str
    lift: str


def limit(kernel: Kernel) -> Limit:
    """What limits the kernel, in one line with the numbers."""
    busy = {key: value for key in UNITS if (value := kernel.get(key)) is not None}
    if not busy:
        return Limit("unknown", "unknown: the report has no utilisation of any unit", "collect sol")
    key, value = max(busy.items(), key=lambda item: item[1])
    if key in MEMORY and busy.get("dram_pct", 0.0) >= DRAM_FIRST * value:
        key, value = "dram_pct", busy["dram_pct"]  # L2 and L1 carry the same bytes
    least = SATURATED_MEMORY if key in ("dram_pct", "l2_pct") else SATURATED
    if (short := _small_grid(kernel)) and value < least:
        return Limit(
            "launch", f"too few blocks: {short}; the busiest unit is {_busy(key, value)}",
            "split the work: smaller tiles, split-KV, or a larger batch",
        )  # fmt: skip
    if value >= least:
        return _saturated(kernel, key, value)
    together = [
        one for one in busy
        if one not in ("l1_pct", "fma_pct", "alu_pct")
        and busy[one] >= max(BUSY, CLOSE * value)
    ]  # fmt: skip
    if len(together) > 1:
        units = " and ".join(_busy(one, busy[one]) for one in together)
        loads = any(one in MEMORY for one in together)
        return Limit(
            "overlap",
            f"overlap-bound: no unit is saturated, {units}; each waits for the other in turn",
            "load further ahead: more stages in the ring" if loads
            else "let the softmax of one tile run beside the products of another",
        )  # fmt: skip
    waits = stalls(kernel)
    first = f"; warps wait for {waits[0].meaning} ({waits[0].percent:.0f} %)" if waits else ""
    return Limit(
        "latency",
        f"latency-bound: the busiest unit is {_busy(key, value)}{first}",
        waits[0].advice if waits else "more warps or more independent instructions; collect stalls",
    )


def _saturated(kernel: Kernel, key: str, value: float) -> Limit:
    if key in MEMORY:
        moved, time = kernel.get("dram_bytes"), kernel.get("time_ns")
        below_l1 = key != "l1_pct"
        rate = f", {moved / time:,.0f} GB/s of DRAM traffic" if moved and time and below_l1 else ""
        hit = kernel.get("l2_hit_pct")
        hits = f", L2 hit rate {hit:.0f} %" if hit is not None and below_l1 else ""
        advice = "move fewer bytes: fuse, narrower dtypes, keys and values shared by a head group"
        if key == "l2_pct":
            advice = "read less from L2: larger tiles, TMA multicast in a cluster"
        if key == "l1_pct":
            advice = "fewer shared-memory accesses: operands in registers, larger tiles"
        return Limit("memory", f"memory-bound: {_busy(key, value)}{rate}{hits}", advice)
    advice = {
        "tensor_pct": "fewer FLOPs: skip masked tiles; a narrower dtype; otherwise at the limit",
        "mufu_pct": "fewer exponentials: emulate a part of exp2 by polynomials on the FMA pipe",
        "issue_pct": "fewer instructions: wider accesses, packed arithmetic, less masking",
    }.get(key, "move work to another pipe")
    return Limit("compute", f"compute-bound: {_busy(key, value)}", advice)


def _busy(key: str, value: float) -> str:
    return f"{UNITS[key]} {value:.0f} %"


def _small_grid(kernel: Kernel) -> str:
    """Why the grid cannot fill the card; empty if it can, or the report does not say."""
    grid, sms = kernel.get("grid_size"), kernel.get("sms")
    if grid is None or sms is None or grid >= SMALL_GRID * sms:
        return ""
    return f"{grid:.0f} on {sms:.0f} SMs"


def stalls(kernel: Kernel) -> list[Stall]:
    """Why warps wait, most frequent first; without `selected` and what is below RARE_STALL."""
    warps = {name: kernel.get(f"stall_{name}") or 0.0 for name in STALLS if name != "selected"}
    total = sum(warps.values())
    ranked = sorted(warps, key=lambda name: -warps[name])
    return [
        Stall(name, warps[name], 100 * warps[name] / total, *STALL_MEANINGS[name])
        for name in ranked
        if total and 100 * warps[name] / total >= RARE_STALL
    ]


def residency(kernel: Kernel) -> Residency:
    """Theoretical and achieved occupancy, the limiter, and what would let another block in."""
    limits = {name: kernel.get(f"limit_{name}") for name in LIMITERS}
    known = {name: value for name, value in limits.items() if value is not None}
    blocks = min(known.values(), default=0.0)
    limiting = [name for name, value in known.items() if value == blocks]
    return Residency(
        kernel.get("occupancy_limit_pct"),
        kernel.get("occupancy_pct"),
        " and ".join(LIMIT_NAMES[name] for name in limiting),
        "; ".join(filter(None, (_lift(kernel, name, int(blocks)) for name in limiting))),
    )


def _lift(kernel: Kernel, limiter: str, blocks: int) -> str:
    """What would let one more block on an SM past one limiter."""
    threads = kernel.get("block_size")
    if threads is None:
        return ""
    if limiter == "registers" and (registers := kernel.get("registers")):
        fits = _registers_for(blocks + 1, int(threads), kernel.capability or (9, 0))
        return f"at most {fits} registers a thread, now {registers:.0f}" if fits else ""
    if limiter == "shared_mem" and kernel.capability in SHARED_BYTES:
        used = (kernel.get("shared_static") or 0) + (kernel.get("shared_dynamic") or 0)
        room = SHARED_BYTES[kernel.capability] / (blocks + 1) - 1  # 1 KiB is the driver's
        return f"at most {room:.1f} KiB of shared memory a block, now {used / 1024:.1f}"
    if limiter == "warps":
        return "smaller blocks" if threads > WARP else ""
    return "larger blocks" if limiter == "blocks" else ""


def _registers_for(blocks: int, threads: int, capability: tuple[int, int]) -> int:
    """Most registers a thread with which `blocks` blocks are resident; 0 if none is enough."""
    sm = sm_of(capability, 64, REGISTERS, 2**20)
    warps = blocks * -(-threads // WARP)
    for registers in range(MAX_REGISTERS_PER_THREAD, 15, -1):
        if theoretical_occupancy(registers, threads, 0, sm).warps_per_sm >= warps:
            return registers
    return 0


def findings(kernel: Kernel) -> Iterator[tuple[str, str]]:
    """(what was seen with its numbers, what to try) for each thing that the counters support."""
    room = residency(kernel)
    kind = limit(kernel).kind
    if (
        room.achieved is not None
        and room.achieved < LOW_OCCUPANCY
        and kind == "latency"
        and not (kernel.get("tma_instructions") or 0)
        and room.lift
    ):
        yield f"occupancy {room.achieved:.0f} %, limited by {room.limiter}", room.lift
    if room.achieved and room.theoretical and room.achieved < 0.7 * room.theoretical:
        yield (
            f"occupancy {room.achieved:.0f} % of {room.theoretical:.0f} % possible",
            "even the work of the blocks: a dynamic tile scheduler, longest tiles first",
        )
    if local := kernel.sum("local_loads", "local_stores"):
        yield (
            f"{local:,.0f} local-memory instructions",
            "spills or arrays indexed at run time; ptxas -v and attnscope kernels show which",
        )
    conflicts, wavefronts = kernel.get("bank_conflicts"), kernel.get("shared_wavefronts")
    if conflicts and wavefronts and conflicts > CONFLICTS * wavefronts:
        share = 100 * conflicts / wavefronts
        yield (
            f"shared-memory bank conflicts in {share:.0f} % of {wavefronts:,.0f} wavefronts",
            "swizzle or pad the shared-memory layout",
        )
    yield from _coalescing(kernel)


def _coalescing(kernel: Kernel) -> Iterator[tuple[str, str]]:
    """Partly used sectors of global loads and stores. TMA traffic is not in these counters."""
    traffic = kernel.get("l2_bytes")
    for what in ("load", "store"):
        used, sectors = kernel.get(f"{what}_bytes_per_sector"), kernel.get(f"{what}_sectors")
        if not used or not sectors or not traffic or used >= PARTIAL_SECTORS:
            continue
        if sectors * SECTOR_BYTES >= LSU_SHARE * traffic:
            yield (
                f"global {what}s use {used:.0f} of {SECTOR_BYTES} bytes of a sector",
                "neighbouring lanes on neighbouring addresses, 16 bytes a lane",
            )
