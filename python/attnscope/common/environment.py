"""What numbers depend on besides the code: card, versions, settings."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RECORDS = "benchmarks/results"  # results of record, in the repository
# Packages whose versions are recorded with the numbers.
PACKAGES = ("flash-attn", "flash-attn-3", "fa3-fwd", "flash-attn-4", "nvidia-cutlass-dsl")


def environment(device: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What the numbers depend on besides the code: card, versions, settings of this run.

    Facts that are not available are null.
    """
    import torch

    from attnscope import __version__
    from attnscope._load import library_status

    # Results that a sweep has written so far change no number.
    others = ("--", ":(top)", f":(top,exclude){RECORDS}")
    changed = _git("status", "--porcelain", "--untracked-files=no", *others)
    env: dict[str, Any] = {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "attnscope": __version__,
        "git_sha": _git("rev-parse", "HEAD"),
        "git_dirty": None if changed is None else changed != "",
        "libraries": library_status(),
        "device": device.type,
        "gpu": None,
        "gpu_sms": None,
        "gpu_memory_gib": None,
        "l2_mib": None,
        "power_limit_w": None,
        "driver": None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "triton": _version("triton"),
        "packages": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "settings": dict(settings),
    }
    if device.type == "cuda":
        from attnscope.common.hardware.nvml import Nvml

        props = torch.cuda.get_device_properties(device)
        env |= {
            "gpu": props.name,
            "gpu_sms": props.multi_processor_count,
            "gpu_memory_gib": round(props.total_memory / 2**30, 1),
            "l2_mib": props.L2_cache_size / 2**20,
        }
        env |= Nvml(device).constants()
    return env


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """Output of git in this package's folder; None where that folder is not tracked by git."""
    here = Path(__file__).parent
    try:
        subprocess.run(
            ["git", "-C", here, "ls-files", "--error-unmatch", Path(__file__).name],
            check=True, capture_output=True, timeout=10,
        )  # fmt: skip
        done = subprocess.run(
            ["git", "-C", here, *arguments], check=True, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or None)
