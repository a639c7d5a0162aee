"""Detects that this process runs under another tool that uses CUPTI.

PyTorch's profiler must not run beside such a tool: they lose each other's events, or fail. The
tools are detected by environment variables that they set for their target. The variables are
undocumented; the names are from Nsight Systems and Nsight Compute 2022 to 2026 and
compute-sanitizer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

# Tool, prefixes of the variables that it sets, libraries that it injects.
_TOOLS = (
    ("compute-sanitizer", ("NV_SANITIZER_",), ("libsanitizer-collection",)),
    ("nsys", ("NSYS_PROFILING_SESSION_ID",), ("libToolsInjection",)),
    (
        "ncu",
        ("NV_COMPUTE_PROFILER_", "NV_NSIGHT_INJECTION_"),
        ("libcuda-injection", "TreeLauncher"),
    ),
)
_INJECTION = ("LD_PRELOAD", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH")


def attached_tool(environment: Mapping[str, str] | None = None) -> tuple[str, str] | None:
    """The tool that started this process and how it was detected; None if there is none.

    Variables that users set for a tool (NSYS_NVTX_PROFILER_REGISTER_ONLY) are ignored. An unknown
    CUDA injection library is reported as "a CUDA injection".
    """
    found = os.environ if environment is None else environment
    for tool, names, libraries in _TOOLS:
        for variable in found:
            if variable.startswith(names):
                return tool, f"{variable} is set"
        for variable in _INJECTION:
            if library := next((one for one in libraries if one in found.get(variable, "")), None):
                return tool, f"{variable} names {library}"
    if path := found.get("CUDA_INJECTION64_PATH"):
        return "a CUDA injection", f"CUDA_INJECTION64_PATH is {path}"
    return None
