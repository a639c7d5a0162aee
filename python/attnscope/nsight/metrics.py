"""Names of hardware metrics, by short key, and the sets of them that answer one question each.

Metric names differ between chips: `names_on` gives those of one chip. Metrics of `launch__` and a
few others exist only inside ncu; all others are names of the chip's counters, which
`attnscope.nsight.evaluator` verifies without a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Chip -> its compute capability. Other chips of a generation have the same names.
CHIPS: Mapping[str, tuple[int, int]] = {"GA100": (8, 0), "GH100": (9, 0), "GB100": (10, 0)}
# Prefixes and names that ncu computes from the launch; no chip has counters of that name.
ONLY_IN_NCU = ("launch__", "sm__maximum_warps_per_active_cycle_pct", "device__attribute_")

STALLS = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle",
    "long_scoreboard", "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction",
    "not_selected", "selected", "short_scoreboard", "sleeping", "tex_throttle", "wait",
)  # fmt: skip
LIMITERS = ("registers", "shared_mem", "warps", "blocks", "barriers")
PIPES = {  # key -> the counter of its instructions or cycles, in % of its peak while SMs are active
    "tensor_pct": "sm__pipe_tensor_cycles_active",
    "mufu_pct": "sm__inst_executed_pipe_xu",
    "fma_pct": "sm__pipe_fma_cycles_active",
    "alu_pct": "sm__pipe_alu_cycles_active",
    "issue_pct": "smsp__issue_active",
    "occupancy_pct": "sm__warps_active",
}
# Tensor-core FLOPs by operand dtype; a FMA counts as 2.
TENSOR = {
    "tensor_bf16": "sm__ops_path_tensor_src_bf16_dst_fp32.sum",
    "tensor_fp16": "sm__ops_path_tensor_src_fp16.sum",
    "tensor_fp16_fp32": "sm__ops_path_tensor_src_fp16_dst_fp32.sum",
    "tensor_fp16_fp16": "sm__ops_path_tensor_src_fp16_dst_fp16.sum",
    "tensor_tf32": "sm__ops_path_tensor_src_tf32_dst_fp32.sum",
    "tensor_fp8": "sm__ops_path_tensor_src_fp8.sum",
    "tensor_fp64": "sm__ops_path_tensor_src_fp64.sum",
}
_PEAK = ".avg.pct_of_peak_sustained_active"
_ELAPSED = ".avg.pct_of_peak_sustained_elapsed"
_LOCAL = "smsp__inst_executed_op_local"
_SHARED = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared"
_WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared"
_SECTORS = "l1tex__t_sectors_pipe_lsu_mem_global_op"
_USED_BYTES = "smsp__sass_average_data_bytes_per_sector_mem_global_op"
_SCALAR = "sm__sass_thread_inst_executed_op"

NAMES: Mapping[str, str] = {
    "time_ns": "gpu__time_duration.sum",
    "clock_hz": "sm__cycles_elapsed.avg.per_second",
    "memory_clock_hz": "dram__cycles_elapsed.avg.per_second",
    "compute_sol_pct": f"sm__throughput{_ELAPSED}",
    "memory_sol_pct": f"gpu__compute_memory_throughput{_ELAPSED}",
    "dram_pct": f"gpu__dram_throughput{_ELAPSED}",
    "l2_pct": f"lts__throughput{_ELAPSED}",
    "l1_pct": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "dram_bytes": "dram__bytes.sum",
    "dram_read": "dram__bytes_read.sum",
    "dram_write": "dram__bytes_write.sum",
    "dram_peak": "dram__bytes.sum.peak_sustained",  # bytes a memory cycle
    "l2_bytes": "lts__t_bytes.sum",
    "l2_peak": "lts__t_bytes.sum.peak_sustained",  # bytes an L2 cycle
    "l2_clock_hz": "lts__cycles_elapsed.avg.per_second",
    "l2_hit_pct": "lts__t_sector_hit_rate.pct",
    "l1_hit_pct": "l1tex__t_sector_hit_rate.pct",
    **{key: f"{name}{_PEAK}" for key, name in PIPES.items()},
    **TENSOR,
    "ffma_peak": f"{_SCALAR}_ffma_pred_on.sum.peak_sustained",
    "fadd": f"{_SCALAR}_fadd_pred_on.sum",
    "fmul": f"{_SCALAR}_fmul_pred_on.sum",
    "ffma": f"{_SCALAR}_ffma_pred_on.sum",
    "instructions": "sm__inst_executed.sum",
    "wgmma": "sm__inst_executed_pipe_tensor_op_gmma.sum",
    "hmma": "sm__inst_executed_pipe_tensor_op_hmma.sum",  # on GH100 with wgmma's HGMMA
    "tma_instructions": "sm__inst_executed_pipe_tma.sum",
    "tma_read": "l1tex__m_xbar2l1tex_read_bytes_mem_global_op_tma_ld.sum",
    "local_loads": f"{_LOCAL}_ld.sum",
    "local_stores": f"{_LOCAL}_st.sum",
    "bank_conflicts": f"{_SHARED}.sum",
    "bank_conflicts_load": f"{_SHARED}_op_ld.sum",
    "bank_conflicts_store": f"{_SHARED}_op_st.sum",
    "bank_conflicts_gmma": f"{_SHARED}_op_gmma.sum",
    "shared_wavefronts": f"{_WAVEFRONTS}.sum",
    "load_sectors": f"{_SECTORS}_ld.sum",
    "store_sectors": f"{_SECTORS}_st.sum",
    "load_bytes_per_sector": f"{_USED_BYTES}_ld.ratio",  # of 32 that a sector has
    "store_bytes_per_sector": f"{_USED_BYTES}_st.ratio",
    "eligible": "smsp__warps_eligible.avg.per_cycle_active",
    "active": "smsp__warps_active.avg.per_cycle_active",
    **{
        f"stall_{stall}": f"smsp__average_warps_issue_stalled_{stall}_per_issue_active.ratio"
        for stall in STALLS
    },
    "sms": "device__attribute_multiprocessor_count",
    "registers": "launch__registers_per_thread",
    "block_size": "launch__block_size",
    "grid_size": "launch__grid_size",
    "waves": "launch__waves_per_multiprocessor",
    "shared_static": "launch__shared_mem_per_block_static",
    "shared_dynamic": "launch__shared_mem_per_block_dynamic",
    "occupancy_limit_pct": "sm__maximum_warps_per_active_cycle_pct",
    **{f"limit_{limiter}": f"launch__occupancy_limit_{limiter}" for limiter in LIMITERS},
}
KEYS = {name: key for key, name in NAMES.items()}

# Keys that a chip of the table does not have; every other chip has them.
MISSING: Mapping[str, tuple[str, ...]] = {
    "GA100": (
        "wgmma", "tma_instructions", "tma_read", "stall_gmma", "bank_conflicts_gmma",
        "tensor_fp8", "tensor_fp16",
    ),
    "GH100": ("tensor_fp16_fp32", "tensor_fp16_fp16"),
    "GB100": (
        "wgmma", "hmma", "stall_gmma", "stall_imc_miss", "bank_conflicts_gmma", "tensor_fp16",
        "tensor_fp8",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class MetricSet:
    """Keys of NAMES that answer one question, beside those that every set has."""

    question: str
    keys: tuple[str, ...]


_LAUNCH = (
    "sms", "registers", "block_size", "grid_size", "waves", "shared_static", "shared_dynamic",
)  # fmt: skip
_DRAM = ("dram_bytes", "dram_read", "dram_write", "l2_bytes", "l2_hit_pct")
_BASE = (
    "time_ns", "clock_hz", "memory_clock_hz", "instructions", "tensor_pct", "mufu_pct", "issue_pct",
    "dram_pct", *_DRAM, "dram_peak", *TENSOR, *_LAUNCH,
)  # fmt: skip

SETS: Mapping[str, MetricSet] = {
    "sol": MetricSet("Is it bound by compute or by memory?",
        ("compute_sol_pct", "memory_sol_pct", "l2_pct", "l1_pct", "fma_pct", "alu_pct"),
    ),
    "roofline": MetricSet(
        "How far is it from the roofs?",
        ("l2_peak", "l2_clock_hz", "ffma_peak", "fadd", "fmul", "ffma"),
    ),
    "stalls": MetricSet(
        "What do its warps wait for?",
        ("eligible", "active", *(f"stall_{stall}" for stall in STALLS)),
    ),
    "occupancy": MetricSet(
        "How many warps are resident, and what limits them?",
        ("occupancy_pct", "occupancy_limit_pct", *(f"limit_{name}" for name in LIMITERS)),
    ),
    "memory": MetricSet(
        "What moves, and how well?",
        (
            "l2_pct", "l1_pct", "l1_hit_pct", "tma_instructions", "tma_read", "local_loads",
            "local_stores", "bank_conflicts", "bank_conflicts_load", "bank_conflicts_store",
            "bank_conflicts_gmma", "shared_wavefronts", "load_sectors", "store_sectors",
            "load_bytes_per_sector", "store_bytes_per_sector",
        ),
    ),
    "tensor": MetricSet(
        "How busy are the tensor cores, and with what?",
        ("wgmma", "hmma", "fma_pct", "alu_pct"),
    ),
}  # fmt: skip
FULL = "full"  # every set, and ncu's own set of that name
# The others take more passes: instructions are counted by instrumented copies of the kernel.
DEFAULT = ("sol", "stalls", "occupancy", "tensor")


def chip_of(capability: tuple[int, int]) -> str | None:
    """The chip of the table with the metric names of a compute capability; None if unknown."""
    major = capability[0]
    return next((chip for chip, (own, _) in CHIPS.items() if own == major), None)


def keys_of(sets: Sequence[str]) -> list[str]:
    """The keys of some sets of SETS, in order, each once. The base of every set is in it.

    Raises ValueError for a set that does not exist.
    """
    keys = list(_BASE)
    for name in sets:
        if name != FULL and name not in SETS:
            raise ValueError(f"set must be one of {', '.join((*SETS, FULL))}, got {name!r}")
        for each in SETS if name == FULL else (name,):
            keys += SETS[each].keys
    return list(dict.fromkeys(keys))


def names_on(chip: str | None, keys: Sequence[str]) -> list[str]:
    """ncu's names of keys, without those that the chip does not have (None: only common ones)."""
    absent = {key for name in MISSING for key in MISSING[name] if chip in (name, None)}
    return [NAMES[key] for key in keys if key not in absent]
