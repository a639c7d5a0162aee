"""`attnscope env`: what is installed, which impls run, what is missing and how to get it."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from attnscope import __version__
from attnscope._load import REBUILD, library_status
from attnscope.common.console import say, show_table
from attnscope.common.tools import TOOLS, find_tool

NVIDIA_PARAMS = Path("/proc/driver/nvidia/params")
CAP_SYS_ADMIN = 21  # bit of a Linux process' capabilities


def packages(required: Sequence[str]) -> tuple[dict[str, str | None], list[str]]:
    """Versions of required packages (as in a wheel's metadata), and what is missing or too old."""
    from packaging.requirements import Requirement

    versions: dict[str, str | None] = {}
    wrong = []
    for line in required:
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = requirement.name
        try:
            versions[name] = version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
            wrong.append(f"{name} is not installed; pip install '{line}'")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{name} is {version}; pip install '{line}'")
    return versions, wrong


def gpus() -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """The CUDA devices of this process, their errors, and remarks about them."""
    import torch

    from attnscope.common.hardware.devices import current_device
    from attnscope.common.hardware.nvml import Nvml

    driver = Path("/proc/driver/nvidia/version").exists()
    if torch.version.cuda is None:
        reason = f"this torch ({torch.__version__}) has no CUDA"
        remedy = "; to use the GPU, install a torch with CUDA" if driver else ""
        return [], [], [f"no GPU: {reason}{remedy}"]
    if not torch.cuda.is_available():
        if not driver:
            return [], [], ["no GPU: no NVIDIA driver on this machine"]
        return [], ["an NVIDIA driver is there, but torch finds no GPU: driver too old?"], []
    found = []
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        props = torch.cuda.get_device_properties(device)
        card, unknown = current_device(index)
        nvml = Nvml(device)
        found.append(
            {
                "index": index,
                "name": props.name,
                "capability": f"{props.major}.{props.minor}",
                "sms": props.multi_processor_count,
                "memory_gib": round(props.total_memory / 2**30, 1),
                "l2_mib": props.L2_cache_size / 2**20,
                "peaks_of": card.name if card else f"none: {unknown}",
                **nvml.constants(),
                **nvml.read(),
            }
        )
    return found, [], []


def counters() -> str:
    """Whether this process may read the GPU's hardware counters, as ncu must."""
    try:
        admin_only = re.search(r"RmProfilingAdminOnly: (\d)", NVIDIA_PARAMS.read_text())
    except OSError:
        return "no NVIDIA driver on this machine"
    if admin_only is None:
        return f"unknown: {NVIDIA_PARAMS} has no RmProfilingAdminOnly"
    if admin_only[1] == "0":
        return "allowed for every user"
    if _has_capability(CAP_SYS_ADMIN):
        return "allowed: for CAP_SYS_ADMIN alone, which this process has"
    return (
        "not allowed: for CAP_SYS_ADMIN alone (RmProfilingAdminOnly: 1); run as root, in a "
        "container with --cap-add SYS_ADMIN, or set the option "
        "NVreg_RestrictProfilingToAdminUsers=0 of the kernel module nvidia"
    )


def _has_capability(bit: int) -> bool:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    effective = re.search(r"CapEff:\s*([0-9a-f]+)", status)
    return bool(effective and int(effective[1], 16) >> bit & 1)


def examine(impls: Callable[[bool], Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Everything `attnscope env` shows. `broken` lists what the package needs and does not have.

    `impls` takes whether a GPU is present, and returns a mapping of `name`, `about` and `missing`
    for each implementation of attention.
    """
    import torch

    devices, broken, notes = gpus()
    try:
        versions, bad = packages(importlib.metadata.requires("attnscope") or [])
    except importlib.metadata.PackageNotFoundError:
        versions, bad = {}, []
        notes.append("attnscope runs from a folder, not installed: its requirements are unchecked")
    broken += bad
    libraries = library_status()
    if devices and libraries["_C_cuda"] != "loaded":
        broken.append(f"a GPU is there, but the CUDA kernels are {libraries['_C_cuda']}; {REBUILD}")
    return {
        "attnscope": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch_cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "threads": torch.get_num_threads(),
        "packages": versions,
        "libraries": libraries,
        "gpus": devices,
        "impls": list(impls(bool(devices))),
        "tools": [asdict(find_tool(name)) for name in TOOLS],
        "counters": counters(),
        "notes": notes,
        "broken": broken,
    }


def print_examined(found: dict[str, Any]) -> None:
    say(f"attnscope {found['attnscope']}, Python {found['python']}, {found['platform']}")
    cuda = (
        f"CUDA {found['torch_cuda']}, cuDNN {found['cudnn']}" if found["torch_cuda"] else "no CUDA"
    )
    say(f"torch is built with {cuda}; {found['threads']} CPU threads")
    say(", ".join(f"{name} {version or 'missing'}" for name, version in found["packages"].items()))
    for name, status in found["libraries"].items():
        say(f"library {name}: {status}")
    for gpu in found["gpus"]:
        say(", ".join(f"{key} {value}" for key, value in gpu.items() if value is not None))
    for note in found["notes"]:
        say(note)
    lines = [(i["name"], i["missing"] or "runs", i["about"]) for i in found["impls"]]
    show_table(_table("impls", lines))
    tools = [(t["name"], t["missing"] or t["version"], t["path"] or "") for t in found["tools"]]
    show_table(_table("tools", tools))
    say(f"hardware counters (ncu): {found['counters']}")
    for line in found["broken"]:
        say(f"broken: {line}", "red")


def _table(title: str, lines: Sequence[tuple[str, str, str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", show_header=False)
    for column in range(3):
        table.add_column(overflow="fold", no_wrap=column == 0)
    for name, state, more in lines:
        table.add_row(name, escape(state), f"[dim]{escape(more)}[/]")
    return table
