"""Launches of a Triton kernel without Triton's search for the compiled one.

JITFunction.run binds and specializes each argument again at every call. For our kernels a few
properties of the arguments select the compiled kernel; they are the key here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.compiler import CompiledKernel

# Absent in a torch without CUDA, which cannot launch anyway.
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class KernelCache:
    """The compiled kernels of one JIT function.

    Its integers are not specialized, the dtype of its first tensor and its constants decide
    num_warps and num_stages, and its other tensors have dtypes that follow from the first.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[Any, CompiledKernel] = {}

    def launch(self, device: int, plan: Any, tensors: tuple[Tensor | None, ...]) -> None:
        """Launch on the current stream of `device`, which is the current device.

        `plan` has programs, numbers (integers below 2^31, and floats), constants and options.
        `tensors` are the kernel's first arguments; None is a null pointer.
        """
        pointers = [0 if t is None else t.data_ptr() for t in tensors]
        bits = 0
        for pointer in pointers:
            bits |= pointer
        if bits % 16:
            self.launch_uncached(plan, tensors)
            return
        constants = tuple(plan.constants.values())
        q = tensors[0]
        assert q is not None
        key = (device, q.dtype, constants)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self.launch_uncached(plan, tensors)
            if isinstance(compiled, CompiledKernel):
                self._compiled[key] = compiled
            return
        grid = (plan.programs, 1, 1)
        compiled[grid](*pointers, *plan.numbers, *constants, stream=_current_stream(device))

    def launch_uncached(self, plan: Any, tensors: tuple[Tensor | None, ...]) -> Any:
        """Launch through Triton, which finds or compiles the kernel and returns it."""
        kernel = self._kernel[(plan.programs, 1, 1)]
        return kernel(*tensors, *plan.numbers, **plan.constants, **plan.options)
