"""Calls free all the memory that they allocate."""

from __future__ import annotations

import ctypes

import pytest
from forked import run_python

PROGRAM = """
import ctypes, gc, torch
from attnscope import attention, attention_varlen

torch.set_num_threads(1)
fields = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
          "fordblks", "keepcost"]
info = type("mallinfo2", (ctypes.Structure,), dict(_fields_=[(f, ctypes.c_size_t) for f in fields]))
mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = info

q = torch.randn(1, 2, 1, 8)
cu = torch.tensor([0, 2], dtype=torch.int32)
g = q.clone().requires_grad_()
def grow(call, calls):
    for _ in range(500): call()
    gc.collect()
    before = mallinfo2().uordblks
    for _ in range(calls): call()
    gc.collect()
    return (mallinfo2().uordblks - before) / calls
print(grow(lambda: attention(q, q, q), 5_000))
print(grow(lambda: torch.ops.attnscope.forward(q, q, q, scale=0.3, variant=0, causal=True), 5_000))
print(grow(lambda: attention_varlen(q[0], q[0], q[0], cu, cu, 2, 2), 5_000))
print(grow(lambda: attention(g, q, q), 5_000))
g3 = [q.clone().requires_grad_() for _ in range(3)]
o = torch.ones_like(q)
print(grow(lambda: torch.autograd.grad(attention(*g3, causal=True), g3, o), 5_000))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
def test_calls_do_not_leak(tmp_path):
    program = tmp_path / "calls.py"
    program.write_text(PROGRAM)
    result = run_python(str(program))
    assert result.returncode == 0, result.stderr
    grown = [float(line) for line in result.stdout.split()]
    assert len(grown) == 5 and all(bytes_a_call < 1 for bytes_a_call in grown), grown
