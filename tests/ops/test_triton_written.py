"""Which tensors torch.compile finds written by the Triton kernels. It copies those before a call.

A process of its own: Triton's driver is replaced by one that only names an architecture.
"""

import importlib.util
import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, logging, torch, triton
from torch._higher_order_ops import triton_kernel_wrap as wrap
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from attnscope.triton import backward_kernel, forward_kernel

class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

triton.runtime.driver.set_active(Driver())
HALF = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
FP32 = ("lse", "dlse", "stats")
CONSTANTS = {"PACKED": False, "HAS_LEFT": False, "HAS_RIGHT": True, "SCORES": "raw"}

def argument(name, kernel):
    parameter = kernel.params[kernel.arg_names.index(name)]
    if name in CONSTANTS:
        return CONSTANTS[name]
    if parameter.is_constexpr:
        return 64
    if name in HALF:
        return torch.empty(16, dtype=torch.bfloat16)
    if name in FP32:
        return torch.empty(16)
    if name.startswith("cu_seqlens"):
        return None
    return 0.5 if name in ("inner_scale", "cap", "outer_scale", "scale") else NUMBER

def written(kernel):
    with FakeTensorMode():
        given = {name: argument(name, kernel) for name in kernel.arg_names}
    if hasattr(wrap, "identify_mutated_tensors"):  # before PyTorch 2.13
        return wrap.identify_mutated_tensors(kernel, given, {})
    accesses = wrap.identify_accessed_tensors(kernel, given, {})
    return [dep.name for dep in accesses.read_writes.writes]

found = {}
for NUMBER in (1, 2):  # torch.compile passes 2 for a dynamic size
    for kernel in (
        forward_kernel.triton_forward, backward_kernel.backward_stats,
        backward_kernel.backward_dq, backward_kernel.backward_dkdv,
    ):
        found[f"{kernel.fn.__name__} {NUMBER}"] = sorted(written(kernel))
print(json.dumps(found))
"""
WRITTEN = {
    "triton_forward": ["lse", "out"],
    "backward_stats": ["stats"],
    "backward_dq": ["dq"],
    "backward_dkdv": ["dk", "dv"],
}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
def test_torch_compile_finds_the_results_alone_written():
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found == {f"{name} {i}": names for name, names in WRITTEN.items() for i in (1, 2)}
