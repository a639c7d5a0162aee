"""What ran in one call: the names of its kernels (GPU) or of its aten ops (CPU)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Ops that move no data, or only create or copy tensors: they do not identify an impl.
_TRIVIAL = (
    "view", "_unsafe_view", "transpose", "expand", "unsqueeze", "squeeze", "alias", "detach", "t",
    "as_strided", "empty", "empty_like", "empty_strided", "scalar_tensor", "slice", "select",
)  # fmt: skip
_ATTEMPTS = 3


class _OpNames(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name().split(".")[0]
        if name.removeprefix("aten::") not in _TRIVIAL:
            self.seen[name] = None
        return func(*args, **(kwargs or {}))


def names_of(call: Callable[[], Any], device: torch.device) -> list[str]:
    """Distinct kernel names of one call, in order of launch; on a CPU the names of its ops.

    Warm the call up first; otherwise its compilation and allocations are recorded too. The profiler
    can miss the first kernels of a process, so an empty result is retried once, then returned.
    """
    if device.type == "cpu":
        with _OpNames() as names:
            call()
        return list(names.seen)
    for _ in range(_ATTEMPTS):
        if found := _kernels(call, device):
            return found
    return []


def _kernels(call: Callable[[], Any], device: torch.device) -> list[str]:
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it reports its start and end on stderr
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize(device)
    events = [
        event
        for event in profiler.events() or ()
        if event.device_type == DeviceType.CUDA
        and not getattr(event, "is_user_annotation", False)
        and not event.name.startswith(("Memcpy", "Memset"))
    ]
    events.sort(key=lambda event: event.time_range.start)
    return list(dict.fromkeys(event.name for event in events))
