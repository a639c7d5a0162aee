"""torch.compile of training steps."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
from backward_reference import leaves
from forward_cases import OP_CALLS, op_call
from functorch.compile import aot_function, min_cut_rematerialization_partition
from helpers import Target

from attnscope import attention, attention_varlen

TARGET = Target(None, "cpu", torch.float32)
BACKWARD = torch.ops.attnscope.backward.default


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def step(loss, inputs):
    inputs = leaves(*inputs)
    loss(*inputs).backward()
    return [x.grad for x in inputs]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", [n for n in OP_CALLS if not n.startswith("no ")])
def test_a_training_step_is_one_graph(name, dynamic):
    (q, k, v, *cu), _ = op_call(TARGET, name)

    def loss(q, k, v):
        if cu:
            out, lse = attention_varlen(q * 2, k, v, *cu, 7, 7, causal=True, return_lse=True)
        else:
            out, lse = attention(q * 2, k, v, causal=True, window=(5, -1), return_lse=True)
        return out.square().sum() + lse.sin().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for got, want in zip(step(compiled, (q, k, v)), step(loss, (q, k, v)), strict=True):
        torch.testing.assert_close(got, want)


def test_inductor_runs_a_training_step():
    def loss(q, k, v):
        return attention(q.relu(), k, v, causal=True).square().sum()

    compiled = torch.compile(loss, fullgraph=True)
    qkv = TARGET.qkv(2, 33, 33, 4, 2, 16)
    for got, want in zip(step(compiled, qkv), step(loss, qkv), strict=True):
        torch.testing.assert_close(got, want)


def test_changing_lengths_are_compiled_once_more_only():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def loss(q, k, v):
        return attention(q, k, v, causal=True).sum()

    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for seqlen in (5, 9, 33, 70):
        qkv = TARGET.qkv(2, seqlen, seqlen + 3, 4, 2, 16)
        for got, want in zip(step(compiled, qkv), step(loss, qkv), strict=True):
            assert torch.equal(got, want)
    assert counter.frame_count <= 2


def backward_graphs(loss, inputs) -> list[torch.fx.Node]:
    """The backward ops in the graphs of a compiled step."""
    calls = []

    def record(graph, _):
        calls.extend(node for node in graph.graph.nodes if node.target is BACKWARD)
        return graph

    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(fw_compiler=record, bw_compiler=record)
    step(torch.compile(loss, fullgraph=True, backend=backend), inputs)
    return calls


@pytest.mark.parametrize("request_by", ["nobody", "argument", "torch"])
def test_deterministic_reaches_the_backward_of_a_graph(request_by):
    def loss(q, k, v):
        return attention(q, k, v, deterministic=request_by == "argument").sum()

    torch.use_deterministic_algorithms(request_by == "torch")
    try:
        (call,) = backward_graphs(loss, TARGET.qkv(1, 5, 5, 2, 2, 16))
    finally:
        torch.use_deterministic_algorithms(False)
    assert call.kwargs.get("deterministic", False) == (request_by != "nobody")


def test_deterministic_gradients_of_a_packed_graph():
    q, k, v = (x[0] for x in TARGET.qkv(1, 12, 12, 2, 2, 16))
    cu = TARGET.cu_seqlens(0, 5, 12)

    def loss(q, k, v):
        return attention_varlen(q, k, v, cu, cu, 7, 7, deterministic=True).square().sum()

    compiled = torch.compile(loss, fullgraph=True)
    for got, want in zip(step(compiled, (q, k, v)), step(loss, (q, k, v)), strict=True):
        torch.testing.assert_close(got, want)
    with torch.no_grad():
        torch.testing.assert_close(compiled(q, k, v), loss(q, k, v))


def test_one_tensor_in_three_places():
    def loss(x):
        return attention(x, x, x, deterministic=True).square().sum()

    x = TARGET.randn(1, 5, 2, 16)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(step(compiled, [x]), step(loss, [x]))  # three terms, in any order


def test_compiled_autograd_takes_the_backward():
    compiled_autograd = pytest.importorskip("torch._dynamo.compiled_autograd")
    inputs = leaves(*TARGET.qkv(1, 5, 5, 2, 2, 16))
    want = leaves(*inputs)
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        attention(*inputs, causal=True).sum().backward()
    attention(*want, causal=True).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(inputs, want, strict=True))


def test_the_forward_is_not_computed_twice():
    calls = []

    def record(graph, _):
        calls.extend(n for n in graph.graph.nodes if n.target is TARGET.op)
        return graph

    traced = aot_function(
        lambda q, k, v: attention(q.sin(), k, v).cos(),
        fw_compiler=record,
        bw_compiler=record,
        partition_fn=min_cut_rematerialization_partition,
    )
    traced(*leaves(*TARGET.qkv(1, 5, 5, 2, 2, 16))).sum().backward()
    assert len(calls) == 1


def test_autocast_around_a_compiled_step():
    def loss(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return attention(q, k, v).float().square().sum()

    qkv = TARGET.qkv(1, 5, 5, 2, 2, 16)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for got, want in zip(step(compiled, qkv), step(loss, qkv), strict=True):
        assert got.dtype == torch.float32 and torch.equal(got, want)


def test_checkpoint_inside_a_graph():
    from torch.utils.checkpoint import checkpoint

    def loss(q, k, v):
        return checkpoint(attention, q * 2, k, v, use_reentrant=False).sum()

    qkv = TARGET.qkv(1, 5, 5, 2, 2, 16)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for got, want in zip(step(compiled, qkv), step(loss, qkv), strict=True):
        torch.testing.assert_close(got, want)
