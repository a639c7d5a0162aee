"""The NVTX ranges that calls emit, as an NVTX tool receives them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import attnscope
from attnscope import ranges

SUPPORT = Path(__file__).parents[1] / "support"
PROGRAM = """
import torch
from attnscope import attention
device, dtype = {device!r}, torch.{dtype}
q = torch.randn(1, 4, 2, 16, device=device).to(dtype)
attention(q, q, q)
attention(q, q, q.mT.contiguous().mT)
attention(q.requires_grad_(), q, q).sum().backward()
if device == "cuda":
    torch.cuda.synchronize()
"""
CUDA = pytest.param("cuda", "bfloat16", marks=pytest.mark.gpu)


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles a small tool")
@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), CUDA])
def test_calls_and_copies_are_ranges_of_one_domain(tmp_path, device, dtype):
    library = Path(attnscope.__file__).parent / ("_C_cuda.so" if device == "cuda" else "_C.so")
    if b"NVTX_INJECTION64_PATH" not in library.read_bytes():
        pytest.skip("built without the NVTX headers, which come with nvcc")
    tool = tmp_path / "recorder.so"
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-o", tool, SUPPORT / "nvtx_recorder.cpp"], check=True
    )
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(device=device, dtype=dtype)],
        env=os.environ | {"NVTX_INJECTION64_PATH": str(tool)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    ours = [line for line in result.stdout.splitlines() if line.split()[1] == ranges.DOMAIN]
    call = f"push {ranges.DOMAIN} registered {ranges.FORWARD} 128"  # with q.numel()
    copy = f"push {ranges.DOMAIN} registered {ranges.COPY} 0"
    pop = f"pop {ranges.DOMAIN}"
    backward = f"push {ranges.DOMAIN} registered {ranges.BACKWARD} 128"
    forward_ranges = [call, pop, call, copy, pop, pop, call, pop]
    assert ours == [*forward_ranges, backward, copy, pop, pop]  # sum gives a dout without strides


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles a small tool")
def test_ranges_of_python_are_registered_in_the_same_domain(tmp_path):
    """With a tool attached: without one, nvtx makes dummies that take anything."""
    tool = tmp_path / "recorder.so"
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-o", tool, SUPPORT / "nvtx_recorder.cpp"], check=True
    )
    program = "from attnscope import ranges\nfor name in ranges.TRITON_OPS + ranges.PHASES:\n"
    program += "    with ranges.nvtx_range(name): pass\n"
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"NVTX_INJECTION64_PATH": str(tool)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    names = [line.split()[3] for line in result.stdout.splitlines() if line.startswith("push")]
    assert f"push {ranges.DOMAIN} registered" in result.stdout
    assert tuple(names) == ranges.TRITON_OPS + ranges.PHASES
