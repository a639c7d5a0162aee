"""torch.compile and torch.export of calls whose sizes and options change."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
from helpers import Target

from attnscope import attention, attention_varlen

TARGET = Target(None, "cpu", torch.float32)
LENGTHS = (5, 6, 7, 9, 12, 20, 31)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def packed(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return TARGET.randn(2 * length, 2, 16), TARGET.cu_seqlens(0, length, 2 * length)


def longest(cu: torch.Tensor) -> int:
    return (cu[1:] - cu[:-1]).max().item()


def test_changing_max_seqlen_and_window_compile_twice_at_most():
    def user(x, cu, max_seqlen, left):
        return attention_varlen(
            x, x, x, cu, cu, max_seqlen, max_seqlen, window=(left, -1), causal=True
        )

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(user, fullgraph=True, backend=counter)
    for length in LENGTHS:
        x, cu = packed(length)
        assert torch.equal(compiled(x, cu, length, length // 2), user(x, cu, length, length // 2))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_max_seqlen_computed_inside_the_graph(backend):
    def user(x, cu):
        return attention_varlen(x, x, x, cu, cu, longest(cu), longest(cu), causal=True)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(user, fullgraph=True, dynamic=True, backend=backend)
        for length in LENGTHS[:3]:
            x, cu = packed(length)
            assert torch.equal(compiled(x, cu), user(x, cu))


class Packed(torch.nn.Module):
    def forward(self, x, cu, max_seqlen):
        return attention_varlen(x, x, x, cu, cu, max_seqlen, max_seqlen)


class PackedWithItem(torch.nn.Module):
    def forward(self, x, cu):
        return attention_varlen(x, x, x, cu, cu, longest(cu), longest(cu))


@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_the_op_and_a_symbolic_length(strict):
    x, cu = packed(9)
    dynamic = torch.export.Dim.DYNAMIC
    shapes = ({0: dynamic}, None, dynamic)
    program = torch.export.export(Packed(), (x, cu, 9), dynamic_shapes=shapes, strict=strict)
    calls = [n for n in program.graph.nodes if n.target is torch.ops.attnscope.forward.default]
    assert len(calls) == 1 and isinstance(calls[0].kwargs["max_seqlen_q"], torch.fx.Node)
    x, cu = packed(14)
    assert torch.equal(program.module()(x, cu, 14), Packed()(x, cu, 14))


def test_export_with_a_length_read_from_a_tensor():
    x, cu = packed(9)
    program = torch.export.export(PackedWithItem(), (x, cu))
    assert torch.equal(program.module()(x, cu), PackedWithItem()(x, cu))


def test_scale_and_softcap_are_constants_of_a_graph():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention, fullgraph=True, backend=counter)
    q, k, v = TARGET.qkv(1, 5, 5, 1, 1, 16)
    for scale in (0.1, 0.2, 0.3):
        assert torch.equal(compiled(q, k, v, scale=scale), attention(q, k, v, scale=scale))
    assert counter.frame_count >= 3
    (call,) = [n for n in counter.graphs[-1].graph.nodes if "attnscope" in str(n.target)]
    assert call.kwargs["scale"] == 0.3


def test_autocast_around_a_compiled_call():
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    q, k, v = TARGET.qkv(1, 5, 5, 1, 1, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out = compiled(q, k, v)
        assert out.dtype == torch.bfloat16 and torch.equal(out, attention(q, k, v))
