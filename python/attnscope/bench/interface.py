"""What an implementation of attention is to the bench, and what it supports."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from attnscope.bench.peers import Call, Inputs
from attnscope.bench.workloads import Workload

ALL_DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What an impl supports; the defaults allow the most."""

    dtypes: tuple[str, ...] = ALL_DTYPES
    head_dim: int | None = None  # largest
    head_dim_step: int = 1
    own_head_dim_v: bool = True  # head_dim_v may differ from head_dim
    window: bool = True
    softcap: bool = True
    packed: bool = True
    offset_causal: bool = True  # a causal mask where lengths differ, aligned to the bottom right
    capability: tuple[int, int] | None = None  # the one compute capability it was built for

    def broken_by(self, work: Workload, device: torch.device) -> str | None:
        """The first limit that the workload exceeds, as a sentence; None if it exceeds none."""
        offset = any(len_q != len_k for len_q, len_k in work.segments())
        if work.dtype not in self.dtypes:
            return f"dtype {work.dtype}: takes {', '.join(self.dtypes)}"
        if self.head_dim and max(work.head_dim, work.head_dim_v) > self.head_dim:
            return f"head dim {max(work.head_dim, work.head_dim_v)}: takes at most {self.head_dim}"
        if work.head_dim % self.head_dim_step or work.head_dim_v % self.head_dim_step:
            return f"head dim {work.head_dim}: takes multiples of {self.head_dim_step}"
        if work.head_dim_v != work.head_dim and not self.own_head_dim_v:
            return f"head_dim_v {work.head_dim_v}: must equal head_dim ({work.head_dim})"
        if work.window != (-1, -1) and not self.window:
            return "takes no sliding window"
        if work.softcap and not self.softcap:
            return "takes no softcap"
        if work.seqlens is not None and not self.packed:
            return "takes no packed batch"
        if work.causal and offset and not self.offset_causal:
            return "its causal mask is for equal lengths only"
        if self.capability and device.type == "cuda":
            have = torch.cuda.get_device_capability(device)
            if have != self.capability:
                want = ".".join(map(str, self.capability))
                return f"built for compute capability {want}, this card has {have[0]}.{have[1]}"
        return None


@dataclass(frozen=True, kw_only=True)
class Impl:
    """One way to compute attention.

    `make(work, inputs)` returns a callable without arguments that returns (out, lse or None) in the
    op's layouts. `ran` maps each supported device type to a pattern: at least one kernel name
    (CUDA) or op name (CPU) of a call must match it. No name may match `not_ran`. `absent()` is why
    the impl is not available here at all; `left_out(work)` is what its installed build lacks.

    Gradients are those of autograd through that callable (`attnscope.bench.calls`). `ran_backward`
    is as `ran`, for a backward call. `deterministic` is whether the impl can repeat their bits:
    `make` then passes on what `work.deterministic` asks for, or `scope(work)`, which is entered
    around the forward and the backward of calls with gradients, does.
    """

    name: str
    about: str
    make: Callable[[Workload, Inputs], Call]
    ran: Mapping[str, str]
    ran_backward: Mapping[str, str] = field(default_factory=dict)
    deterministic: bool = False
    scope: Callable[[Workload], AbstractContextManager[Any]] = lambda work: nullcontext()
    not_ran: str | None = None
    limits: Limits = field(default_factory=Limits)
    absent: Callable[[], str | None] = lambda: None
    left_out: Callable[[Workload], str | None] = lambda work: None

    def cannot(self, work: Workload, device: torch.device) -> str | None:
        """Why this workload cannot run here; None if it can."""
        if device.type not in self.ran:
            return f"runs on {' and '.join(self.ran)} only, not on {device.type}"
        if work.mode != "forward" and device.type not in self.ran_backward:
            return "has no backward"
        if work.deterministic and not self.deterministic:
            return "has no deterministic backward"
        return self.absent() or self.limits.broken_by(work, device) or self.left_out(work)

    def mismatch(self, names: Sequence[str], device_type: str, mode: str = "forward") -> str | None:
        """Why the kernel or op names of one call do not match this impl; None if they do."""
        if not names:
            return "no kernel was seen in a profiled call (is another profiler attached?)"
        seen = ", ".join(names)
        patterns = {"forward": [self.ran], "backward": [self.ran_backward]}
        for ran in patterns.get(mode, [self.ran, self.ran_backward]):
            pattern = ran[device_type]
            if not any(re.search(pattern, name) for name in names):
                return f"{self.name} ran {seen}; expected one that matches /{pattern}/"
        if self.not_ran and any(re.search(self.not_ran, name) for name in names):
            return f"{self.name} ran {seen}; expected none that matches /{self.not_ran}/"
        return None
