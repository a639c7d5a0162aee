"""The CUDA and Triton backwards on a GPU: numbers, memory, streams, graphs, devices."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from backward_cases import BACKWARD_CALLS, CASES, backward_call, backward_op
from backward_reference import (
    assert_gradients_match,
    gradients,
    leaves,
    naive_gradients,
    skip_if_refused,
    upstream,
)
from helpers import HEAD_DIMS, LENGTHS, MASKS, Target
from torch.utils.flop_counter import FlopCounterMode

from attnscope import attention, attention_varlen
from attnscope.attention_flops import forward_flops
from attnscope.kernels import Call, choose_backward

pytestmark = pytest.mark.gpu
BF16, FP16 = torch.bfloat16, torch.float16
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
DIMS = tuple(sorted({*HEAD_DIMS, 112}))

IMPLS = {
    "cuda-sm80-bf16": ("cuda-sm80", BF16),
    "cuda-sm80-fp16": ("cuda-sm80", FP16),
    "cuda-sm90-bf16": ("cuda-sm90", BF16),
    "cuda-sm90-fp16": ("cuda-sm90", FP16),
    "triton-bf16": ("triton", BF16),  # compiling takes most of its time: fp16 in one test only
}


def make_target(impl: str | None, dtype: torch.dtype) -> Target:
    if impl == "triton":
        pytest.importorskip("attnscope.triton.forward")  # both register their ops
        pytest.importorskip("attnscope.triton.backward")
    if impl == "cuda-sm90" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper device")
    return Target(impl, "cuda", dtype)


@pytest.fixture(params=IMPLS)
def target(request) -> Target:
    return make_target(*IMPLS[request.param])


@pytest.fixture(params=["cuda-sm80", "cuda-sm90", "triton"])
def bf16_target(request) -> Target:
    return make_target(request.param, BF16)


def assert_match_with_and_without_turns(target: Target, *qkv: torch.Tensor, **options: Any) -> None:
    for deterministic in (False, True):
        assert_gradients_match(target, *qkv, deterministic=deterministic, **options)


@pytest.mark.parametrize("head_dim", DIMS)
def test_every_head_dim(target, head_dim):
    assert_gradients_match(target, *target.qkv(1, 165, 230, 4, 2, head_dim), causal=True)


@pytest.mark.parametrize("impl", ["cuda", "cuda-sm80", "cuda-sm90", "triton", None])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_every_target(impl, dtype):
    target = make_target(impl, dtype)
    assert_gradients_match(target, *target.qkv(2, 333, 333, 3, 3), causal=True)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(192, 128), (128, 192), (64, 96), (8, 256), (256, 8)]
)
def test_value_head_dim_of_its_own(target, head_dim, head_dim_v):
    q, k, _ = target.qkv(1, 130, 130, 4, 2, head_dim)
    assert_gradients_match(target, q, k, target.randn(1, 130, 2, head_dim_v), causal=True)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [*LENGTHS, (1000, 1000)])
def test_masks_and_lengths(bf16_target, seqlen_q, seqlen_k, mask):
    assert_gradients_match(
        bf16_target, *bf16_target.qkv(1, seqlen_q, seqlen_k, 4, 2), **MASKS[mask]
    )


@pytest.mark.parametrize("mask", ["causal", "band", "causal-softcap"])
@pytest.mark.parametrize("head_dim", [32, 96, 128, 192, 256])
def test_masks_and_head_dims(bf16_target, head_dim, mask):
    assert_gradients_match(
        bf16_target, *bf16_target.qkv(1, 300, 400, 2, 1, head_dim), **MASKS[mask]
    )


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(1, 1), (5, 5), (6, 2), (16, 1), (7, 1)])
def test_query_heads_share_keys(bf16_target, heads_q, heads_kv):
    qkv = bf16_target.qkv(3, 200, 200, heads_q, heads_kv)
    assert_gradients_match(bf16_target, *qkv, use_dlse=False, causal=True)


# Long enough for several tiles of every kernel, and for more tiles than SMs.
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_long_sequences(bf16_target, head_dim, mask):
    assert_gradients_match(
        bf16_target,
        *bf16_target.qkv(1, 4161, 4225, 512 // head_dim, 256 // head_dim, head_dim),
        **MASKS[mask],
    )


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "head_dim", "dtype", "causal"),
    [
        (2048, 333, 128, FP16, False),
        (2081, 700, 72, BF16, False),
        (8225, 2100, 128, BF16, True),  # rows without keys too
    ],
)
def test_blocks_of_80_queries(seqlen_q, seqlen_k, head_dim, dtype, causal):
    target = make_target("cuda-sm90", dtype)
    q, k, v = target.qkv(1, seqlen_q, seqlen_k, 4, 2, head_dim)
    assert_match_with_and_without_turns(target, q, k, v, causal=causal)


# Few tiles, and a last block of each size; test_packed_batches has packed ones at head dim 64.
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("queries", [2048, 2024, 1974, 1921])
def test_blocks_of_128_queries(queries, mask):
    target = make_target("cuda-sm90", BF16)
    qkv = target.qkv(1, queries, 500, 32, 32, 40)
    if mask in ("full", "left"):  # the others may take blocks of 64
        assert choice_of(*qkv, **MASKS[mask])["tile"]["block_m"] == 128
    assert_match_with_and_without_turns(target, *qkv, **MASKS[mask])


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_blocks_of_80_queries_of_packed_batches(mask):
    """The rows of a sequence's last block that are the next sequence's hold NaN."""
    target = make_target("cuda-sm90", BF16)
    lengths = [(2100, 300), (1, 1), (0, 40), (8200, 500), (79, 2000), (2049, 1)]
    assert_gradients_match(target, *packed_call(target, lengths, 128), **MASKS[mask])


@pytest.mark.parametrize("head_dim", [64, 128])
def test_more_tiles_than_sms(bf16_target, head_dim):
    assert_gradients_match(
        bf16_target, *bf16_target.qkv(8, 517, 517, 32, 16, head_dim), causal=True
    )


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize(("seqlen_k", "head_dim"), [(197, 64), (130, 64), (90, 64), (128, 128)])
def test_heads_of_one_tile_or_two(seqlen_k, head_dim, mask):
    """Hopper: a head of one tile stores dq itself."""
    target = make_target("cuda-sm90", BF16)
    for heads in (2, 150):  # some SMs, or more heads than SMs
        qkv = target.qkv(1, 197, seqlen_k, heads, heads, head_dim)
        assert_match_with_and_without_turns(target, *qkv, **MASKS[mask])


@pytest.mark.parametrize("mask", ["full", "causal", "causal-softcap"])
@pytest.mark.parametrize(("head_dim", "group"), [(64, 1), (64, 2), (128, 1)])
def test_short_heads_that_fill_the_card(bf16_target, head_dim, group, mask):
    """Hopper: a thread block takes all tiles of a head and stores dq itself, in one order."""
    heads = torch.cuda.get_device_properties(0).multi_processor_count
    qkv = bf16_target.qkv(2, 200, 333, heads * group, heads, head_dim)
    assert_match_with_and_without_turns(bf16_target, *qkv, **MASKS[mask])


PARTS = {  # batch, queries, keys, heads, key heads, head dim
    "one tile": (1, 1000, 180, 8, 4, 64),
    "192 keys": (1, 700, 517, 16, 4, 64),
    "128 keys": (1, 500, 517, 8, 2, 64),
    "128 queries": (1, 1000, 1000, 16, 4, 64),
    "64 queries": (1, 1000, 700, 8, 2, 128),
    "80 queries": (2, 4200, 333, 3, 3, 96),
    "wide": (1, 1000, 333, 8, 2, 256),
    "less wide": (1, 700, 1000, 4, 1, 192),
    "more keys than queries": (1, 333, 2000, 4, 1, 128),
}
ALTERNATES = {
    "192 keys": (2, 1030, 1100, 30, 30, 64),
    "128 keys": (1, 300, 300, 50, 50, 64),
    "128 queries": (3, 1345, 2690, 12, 3, 64),
    "64 queries": (1, 1100, 1100, 32, 16, 128),
    "80 queries": (1, 4200, 4300, 10, 5, 96),
    "wide": (1, 1100, 1200, 16, 8, 256),
    "less wide": (3, 700, 900, 4, 4, 192),
    "more keys than queries": (1, 333, 2500, 10, 10, 128),
    "rows without keys": (2, 2000, 1000, 12, 12, 128),
    "four heads a tile": (1, 1030, 1030, 64, 16, 128),
    "four heads a tile, wide": (1, 900, 1100, 32, 8, 256),
    "seven heads a tile": (5, 600, 650, 49, 7, 64),
}
# More causal tiles than SMs, and the longest one takes longer than all tiles would on all SMs.
SPLITS_LONGEST = {
    "64 queries": (1, 1100, 1100, 32, 16, 128),
    "80 queries": (1, 4200, 4300, 10, 5, 96),
    "wide": (1, 2100, 2100, 16, 4, 256),
}
PARTS_OF_HEADS = {
    "192 keys": (1, 1000, 1100, 32, 8, 40),
    "128 queries": (1, 7720, 3860, 2, 1, 64),
    "64 queries": (1, 1000, 1000, 14, 2, 128),
    "more waves": (1, 2100, 2100, 28, 4, 128),
    "80 queries": (1, 4200, 4300, 10, 2, 96),
    "wide": (1, 1500, 1400, 12, 2, 256),
    "less wide": (2, 700, 900, 5, 1, 192),
}
SPLITS_WAVES = {  # without a mask the last of several waves is split
    "narrow wave": (1, 2100, 700, 25, 25, 128),
    "short wave": (1, 3000, 2051, 25, 25, 64),
    "wide wave": (1, 1000, 700, 12, 12, 256),
}


def choice_of(
    q, k, v, causal=False, window=(-1, -1), softcap=0.0, deterministic=False
) -> dict[str, Any]:
    device = torch.cuda.get_device_properties(q.device)
    call = Call(
        q.shape[-1], v.shape[-1], q.shape[1], k.shape[1], len(q), q.shape[2], k.shape[2], causal,
        window, False, softcap, device.multi_processor_count, 10 * device.major + device.minor,
        deterministic,
    )  # fmt: skip
    return choose_backward(call)


def checked_choice(
    shape: tuple[int, ...], deterministic: bool = False, **options: Any
) -> dict[str, Any]:
    """The choice of Hopper's kernels for a call, whose gradients are right in any case."""
    target = make_target("cuda-sm90", BF16)
    qkv = target.qkv(*shape)
    assert_match_with_and_without_turns(target, *qkv, **options)
    return choice_of(*qkv, **options, deterministic=deterministic)


def assert_named(name: str, choice: dict[str, Any]) -> None:
    """The tile has as many queries or keys as a call's name says."""
    count, _, what = name.partition(" ")
    sizes = {"queries": "block_m", "keys": "block_n"}
    assert what not in sizes or choice["tile"][sizes[what]] == int(count)


def slots_of(choice: dict[str, Any]) -> int:
    """Thread blocks, or clusters, that the device runs at once."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    return sms // choice["tile"]["cluster"]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", PARTS)
def test_parts_of_few_tiles(name, mask):
    """Hopper: thread blocks that share a tile add up their dK and dV, always in one order."""
    choice = checked_choice(PARTS[name], **MASKS[mask])
    assert choice["parts"] > 1
    if mask == "full":
        assert_named(name, choice)


@pytest.mark.parametrize("name", SPLITS_WAVES)
def test_parts_of_the_last_wave(name):
    assert checked_choice(SPLITS_WAVES[name])["parts"] > 1


@pytest.mark.parametrize("name", SPLITS_LONGEST)
def test_parts_of_more_causal_tiles_than_sms(name):
    choice = checked_choice(SPLITS_LONGEST[name], causal=True)
    assert choice["split_tiles"] == choice["tiles"] > slots_of(choice)


@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("name", PARTS_OF_HEADS)
def test_parts_of_query_heads(name, softcap):
    """Hopper: one or several waves of parts, and parts with fewer heads than others."""
    choice = checked_choice(PARTS_OF_HEADS[name], deterministic=True, causal=True, softcap=softcap)
    assert (choice["parts"] > 1, choice["parts_of"]) == (True, "query heads")
    if not softcap:
        assert_named(name, choice)


@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("name", ALTERNATES)
def test_turns_that_ascend_and_descend(name, softcap):
    """Hopper: causal calls with more tiles than fit at once; an odd number of heads too."""
    choice = checked_choice(ALTERNATES[name], causal=True, softcap=softcap)
    assert choice["tiles"] > slots_of(choice)
    if not softcap:
        assert_named(name, choice)


def test_grouped_heads_take_turns_unasked():
    """Hopper: where a call is faster with turns, its gradients have the same bits in every call."""
    target = make_target("cuda-sm90", BF16)
    q, k, v = target.qkv(4, 1100, 1100, 32, 8, 128)
    assert choice_of(q, k, v, causal=True)["turns"]
    results = [
        gradients(target, q, k, v, dout=torch.ones_like(q), causal=True, deterministic=asked)
        for asked in (False, True, False)
    ]
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def packed_call(
    target: Target, lengths: list[tuple[int, int]], head_dim: int, heads: tuple[int, int] = (4, 2)
):
    """q, k, v, then the packing, of segments of these lengths and rows after the last."""
    bounds = [torch.tensor([0, *x]).cumsum(0).tolist() for x in zip(*lengths, strict=True)]
    cu_q, cu_k = (target.cu_seqlens(*b) for b in bounds)
    q = target.randn(bounds[0][-1] + 7, heads[0], head_dim)
    k, v = (target.randn(bounds[1][-1] + 3, heads[1], head_dim) for _ in range(2))
    return q, k, v, cu_q, cu_k, *(max(x) for x in zip(*lengths, strict=True))


PACKED = {
    "one sequence": [(900, 1300)],
    "alike": [(600, 700)] * 4,
    "one is longer": [(65, 65), (2100, 2200), (0, 5), (130, 40), (9, 0)],
}


@pytest.mark.parametrize("mask", ["full", "causal", "band"])
@pytest.mark.parametrize("heads", [(14, 2), (3, 3), (40, 20)], ids=lambda h: "{}:{}".format(*h))
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", PACKED)
def test_parts_of_packed_batches(name, head_dim, heads, mask):
    """Hopper: parts of query heads, whole tiles in one wave, and in several."""
    target = make_target("cuda-sm90", BF16)
    call = packed_call(target, PACKED[name], head_dim, heads)
    assert_match_with_and_without_turns(target, *call, **MASKS[mask])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_batches(target, head_dim, mask):
    lengths = [(65, 65), (1, 130), (0, 9), (1000, 300), (7, 0), (640, 1280)]
    assert_gradients_match(target, *packed_call(target, lengths, head_dim), **MASKS[mask])


@pytest.mark.parametrize("mask", ["full", "causal", "band"])
def test_packed_batches_of_many_sequences(bf16_target, mask):
    lengths = [(37 * (i % 9), 11 * (i % 13)) for i in range(100)]
    assert_gradients_match(bf16_target, *packed_call(bf16_target, lengths, 64), **MASKS[mask])


@pytest.mark.parametrize("case", CASES)
def test_behaviour(target, case):
    case(target)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_deterministic_calls_give_the_same_bits(target, head_dim, packed):
    call = (*target.qkv(4, 1000, 1000, 8, 2, head_dim),)
    if packed:
        call = packed_call(target, [(700, 900), (0, 5), (1300, 1100), (65, 65)], head_dim)
    dout, dlse = upstream(target, call[0], call[2])
    results = [
        gradients(target, *call, dout=dout, dlse=dlse, causal=True, deterministic=True)
        for _ in range(8)
    ]
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_every_element_is_written_into_poisoned_memory(bf16_target):
    q, k, v, *packing = packed_call(bf16_target, [(65, 65), (0, 9), (100, 0), (40, 170)], 64)
    dout, _ = upstream(bf16_target, q, v)
    tensors = (q, k, v, dout, torch.zeros(4, len(q), device="cuda"))
    want = naive_gradients(torch.float64, tensors, tuple(packing))
    for _ in range(3):
        memory = [torch.full((n,), float("nan"), device="cuda") for n in (1 << 18, 1 << 22) * 8]
        del memory  # what the allocator gives next
        grads = gradients(bf16_target, q, k, v, *packing, dout=dout)
        for g, w in zip(grads, want, strict=True):
            torch.testing.assert_close(g.double(), w, atol=5e-2, rtol=5e-2)
        assert (grads[0][205:] == 0).all() and (grads[1][244:] == 0).all()


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_replays_in_a_cuda_graph(bf16_target, packed):
    call = (*bf16_target.qkv(1, 300, 300, 4, 2),)
    if packed:
        call = packed_call(bf16_target, [(100, 100), (0, 0), (190, 230)], 64)
    q, k, v, *packing = call
    dout, _ = upstream(bf16_target, q, v)
    fresh = [torch.randn_like(x) for x in (q, k, v, dout)]
    options = {"causal": True, "deterministic": True}
    want = gradients(bf16_target, *fresh[:3], *packing, dout=fresh[3], **options)
    gradients(bf16_target, q, k, v, *packing, dout=dout, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = gradients(bf16_target, q, k, v, *packing, dout=dout, **options)
    for x, y in zip((q, k, v, dout), fresh, strict=True):
        x.copy_(y)
    for _ in range(2):
        for g in grads:
            g.fill_(7.0)
        graph.replay()
        assert all(torch.equal(g, w) for g, w in zip(grads, want, strict=True))


def test_runs_on_the_current_stream(bf16_target):
    q, k, v = bf16_target.qkv(1, 128, 128, 2, 2)
    dout, late = bf16_target.randn(*q.shape), bf16_target.randn(*q.shape)
    options = {"scale": 0.125, "deterministic": True, **bf16_target.forced}
    forward_options = {"scale": 0.125, **bf16_target.forced}
    out, lse = bf16_target.op(q, k, v, **forward_options)
    op = backward_op(bf16_target)
    with skip_if_refused():
        want = op(late, q, k, v, out, lse, **options)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)  # some 30 ms, in which a launch on another stream would run
        dout.copy_(late)
        grads = op(dout, q, k, v, out, lse, **options)
    torch.cuda.synchronize()
    assert all(torch.equal(g, w) for g, w in zip(grads, want, strict=True))


def test_the_first_cuda_call_of_a_thread(bf16_target):
    """Tensor maps need a current context, which a new thread does not have."""

    def in_new_thread(call):
        found = []
        thread = threading.Thread(target=lambda: found.append(call()))
        thread.start()
        thread.join()
        return found[0]

    (dout, *tensors), options = backward_call(bf16_target, "plain")
    op = backward_op(bf16_target)
    for call in (
        lambda: bf16_target.op(*tensors[:3], **options)[:1],
        lambda: op(dout, *tensors, **options)[1:],  # dq is a sum in any order
    ):
        want = call()
        assert all(torch.equal(a, b) for a, b in zip(in_new_thread(call), want, strict=True))


@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "turns"])
@pytest.mark.parametrize("heads", [2, 32])  # tiles of one wave, and of several
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_descending_bounds_do_not_hang(bf16_target, head_dim, heads, deterministic):
    """The contents of cu_seqlens are not trusted: any may be wrong, none may hang."""
    q, k, v = (x.flatten(0, 1) for x in bf16_target.qkv(1, 700, 700, heads, heads, head_dim))
    cu = torch.tensor([0, 600, 100, 500, 50, 700], dtype=torch.int32, device="cuda")
    out = attention_varlen(
        *leaves(q, k, v), cu, cu, 700, 700, causal=True, deterministic=deterministic,
        impl=bf16_target.impl,
    )  # fmt: skip
    out.sum().backward()
    torch.cuda.synchronize()
    # A later call is not affected.
    assert_gradients_match(bf16_target, *bf16_target.qkv(1, 165, 230, 4, 2, head_dim), causal=True)


def test_two_streams_at_once(bf16_target):
    inputs = [(bf16_target.qkv(2, 700, 700, 4, 2), bf16_target.randn(2, 700, 4, 64)) for _ in "ab"]
    options = {"causal": True, "deterministic": True}
    want = [gradients(bf16_target, *qkv, dout=dout, **options) for qkv, dout in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    got: list[list] = [[], []]
    for _ in range(10):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                qkv, dout = inputs[i]
                got[i].append(gradients(bf16_target, *qkv, dout=dout, **options))
    torch.cuda.synchronize()
    for results, right in zip(got, want, strict=True):
        for grads in results:
            assert all(torch.equal(g, w) for g, w in zip(grads, right, strict=True))


@TWO_GPUS
def test_device_that_is_not_the_current_one(bf16_target):
    q, k, v = bf16_target.qkv(1, 200, 200, 4, 2)
    dout = bf16_target.randn(*q.shape)
    want = gradients(bf16_target, q, k, v, dout=dout, deterministic=True)
    other = [x.to("cuda:1") for x in (q, k, v, dout)]
    grads = gradients(bf16_target, *other[:3], dout=other[3], deterministic=True)
    assert torch.cuda.current_device() == 0
    for g, w in zip(grads, want, strict=True):
        assert g.device.index == 1 and torch.equal(g.to("cuda:0"), w)


def test_offsets_pass_two_to_the_31(bf16_target):
    # Slices of one buffer: (S - 1) * row stride is above 2^31 elements.
    seqlen, row_stride = 100_000, 24_576
    try:
        buffer = torch.empty(seqlen * row_stride, dtype=BF16, device="cuda")
    except torch.OutOfMemoryError:
        pytest.skip("no 5 GB free on the GPU")
    q, k, v, dout = (
        buffer.as_strided((1, seqlen, 2, 64), (0, row_stride, 64, 1), 128 * i).normal_()
        for i in range(4)
    )
    options = {"window": (300, 0), "deterministic": True}
    got = gradients(bf16_target, q, k, v, dout=dout, **options)
    copies = [x.contiguous() for x in (q, k, v, dout)]
    want = gradients(bf16_target, *copies[:3], dout=copies[3], **options)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_memory_is_linear_in_the_length(bf16_target):
    def extra(seqlen: int) -> int:
        q, k, v = leaves(*bf16_target.qkv(1, seqlen, seqlen, 32, 2, 64))
        out, _ = bf16_target(q, k, v, causal=True)
        dout = torch.ones_like(out)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with skip_if_refused():
            out.backward(dout)
        grads = sum(x.grad.nbytes for x in (q, k, v))
        return torch.cuda.max_memory_allocated() - before - grads

    extra(128)
    short, long = extra(4096), extra(8192)
    assert long <= 2.2 * short + (1 << 20)


@pytest.mark.parametrize("name", BACKWARD_CALLS)
def test_opcheck(bf16_target, name):
    args, kwargs = backward_call(bf16_target, name)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    options = kwargs | {"deterministic": True}
    with skip_if_refused():
        backward_op(bf16_target)(*args, **options)
    torch.library.opcheck(backward_op(bf16_target), args, options, test_utils=tests)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_training_step_is_one_graph(bf16_target, dynamic):
    def loss(q, k, v):
        out = attention(q * 2, k, v, causal=True, impl=bf16_target.impl, deterministic=True)
        return out.float().square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic)
    for seqlen in (65, 130) if dynamic else (65,):
        got = leaves(*bf16_target.qkv(2, seqlen, seqlen, 4, 2))
        want = leaves(*got)
        with skip_if_refused():
            loss(*want).backward()
        compiled(*got).backward()
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g.grad, w.grad, atol=3e-2, rtol=3e-2)


def test_flop_counter_counts_forward_and_backward(bf16_target):
    q, k, v = leaves(*bf16_target.qkv(2, 60, 90, 4, 2))
    with FlopCounterMode(display=False) as counter:
        with skip_if_refused():
            bf16_target(q, k, v, causal=True)[0].sum().backward()
    assert counter.get_total_flops() == 3.5 * forward_flops([(60, 90)] * 2, 4, 64, 64, causal=True)


def test_autocast(bf16_target):
    q, k, v = leaves(*(x.float() for x in bf16_target.qkv(1, 70, 70, 2, 2)))
    with torch.autocast("cuda", BF16):
        out, _ = bf16_target(q, k, v, deterministic=True)
    with skip_if_refused():
        out.float().square().sum().backward()
    want = leaves(*(x.detach().to(BF16) for x in (q, k, v)))
    bf16_target(*want, deterministic=True)[0].float().square().sum().backward()
    for a, b in zip((q, k, v), want, strict=True):
        assert a.grad.dtype == torch.float32 and torch.equal(a.grad, b.grad.float())
