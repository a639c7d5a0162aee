"""The CUDA and Triton kernels on a GPU: numbers, memory, streams, graphs, devices."""

from __future__ import annotations

import pytest
import torch
from forward_cases import CASES, OP_CALLS, op_call
from helpers import HEAD_DIMS, LENGTHS, MASKS, Target, assert_matches, assert_workload_passes
from torch.utils.flop_counter import FlopCounterMode
from value_cases import VALUE_CASES

from attnscope import argument_checks, attention, attention_varlen
from attnscope.attention_flops import forward_flops
from attnscope.numerics import KINDS

pytestmark = pytest.mark.gpu
BF16, FP16 = torch.bfloat16, torch.float16
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

# Triton's tests spend most of their time compiling a kernel for each dtype and head dim. So fp16
# runs only in the test below that covers both dtypes.
IMPLS = {
    "cuda-bf16": ("cuda", BF16),
    "cuda-fp16": ("cuda", FP16),
    "cuda-sm80-bf16": ("cuda-sm80", BF16),
    "triton-bf16": ("triton", BF16),
}


@pytest.fixture(params=IMPLS)
def target(request) -> Target:
    impl, dtype = IMPLS[request.param]
    return _target(impl, dtype)


@pytest.fixture(params=["cuda", "cuda-sm80", "triton"])
def bf16_target(request) -> Target:
    return _target(request.param, BF16)


def _target(impl: str, dtype: torch.dtype) -> Target:
    if impl == "triton":
        pytest.importorskip("attnscope.triton.forward")
    return Target(impl, "cuda", dtype)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_dim(target, head_dim):
    shape = {"seqlen_q": 65, "seqlen_k": 130, "heads_q": 4, "heads_kv": 2}
    assert_workload_passes(target, head_dim=head_dim, causal=True, **shape)


@pytest.mark.parametrize("impl", ["cuda", "cuda-sm80", "triton", None])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_every_impl_and_dtype(impl, dtype):
    target = _target(impl, dtype)
    assert_workload_passes(target, batch=2, seqlen=333, heads=3, head_dim=64, causal=True)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (64, 96), (8, 256), (256, 8)])
def test_value_head_dim_of_its_own(target, head_dim, head_dim_v):
    assert_workload_passes(target, seqlen=65, heads=2, head_dim=head_dim, head_dim_v=head_dim_v)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [*LENGTHS, (1000, 1000)])
def test_masks_and_lengths(target, seqlen_q, seqlen_k, mask):
    shape = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads_q": 4, "heads_kv": 2}
    assert_workload_passes(target, head_dim=64, **shape, **MASKS[mask])


@pytest.mark.parametrize("mask", ["causal", "band", "causal-softcap"])
@pytest.mark.parametrize("head_dim", [32, 96, 128, 192, 256])
def test_masks_and_head_dims(target, head_dim, mask):
    shape = {"seqlen_q": 300, "seqlen_k": 400, "heads_q": 2, "heads_kv": 1}
    assert_workload_passes(target, head_dim=head_dim, **shape, **MASKS[mask])


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(1, 1), (5, 5), (6, 2), (16, 1)])
def test_query_heads_share_keys(target, heads_q, heads_kv):
    heads = {"heads_q": heads_q, "heads_kv": heads_kv}
    assert_workload_passes(target, batch=3, seqlen=200, head_dim=64, **heads)


# Few queries and many heads: the Hopper kernel puts heads of a group side by side in a tile.
GROUPS = [(8, 2), (6, 3), (12, 1), (32, 1), (7, 1)]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("seqlen_q", [1, 5, 17, 64, 65])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_grouped_heads(target, head_dim, seqlen_q, mask):
    shape = {"batch": 18, "seqlen_q": seqlen_q, "seqlen_k": 200, "heads_q": 8, "heads_kv": 2}
    assert_workload_passes(target, head_dim=head_dim, **shape, **MASKS[mask])


@pytest.mark.parametrize("heads", GROUPS)
def test_groups_of_any_size(target, heads):
    heads_q, heads_kv = heads
    shape = {"batch": 27, "seqlen_q": 9, "seqlen_k": 130, "heads_q": heads_q, "heads_kv": heads_kv}
    assert_workload_passes(target, head_dim=64, causal=True, **shape)


@pytest.mark.parametrize("mask", ["full", "causal", "band"])
@pytest.mark.parametrize("heads", GROUPS)
def test_grouped_heads_of_packed_batches(target, heads, mask):
    seqlens = [(1 + i * 7 % 33 if i % 5 else 0, 11 * (i % 13)) for i in range(40)]
    heads_q, heads_kv = heads
    heads = {"heads_q": heads_q, "heads_kv": heads_kv}
    assert_workload_passes(target, seqlens=seqlens, head_dim=64, **heads, **MASKS[mask])


# Two heads in a tile of the Hopper kernel; the last one of an odd number has a tile alone.
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", [(9, 9), (8, 2)])
@pytest.mark.parametrize("seqlen_q", [65, 128])
def test_two_heads_in_a_tile(target, seqlen_q, heads, mask):
    heads_q, heads_kv = heads
    shape = {"batch": 35, "seqlen_q": seqlen_q, "heads_q": heads_q, "heads_kv": heads_kv}
    assert_workload_passes(target, seqlen_k=200, head_dim=64, **shape, **MASKS[mask])


# Long enough that the Hopper kernel uses its tiles for long sequences.
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_long_sequences(target, head_dim, mask):
    shape = {"seqlen_q": 4161, "seqlen_k": 4225, "heads_q": 2, "heads_kv": 1}
    assert_workload_passes(target, head_dim=head_dim, **shape, **MASKS[mask])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("seqlen", "causal"), [(700, True), (1100, False)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_hard_inputs(target, head_dim, seqlen, causal, kind):
    assert_workload_passes(
        target, kind, batch=2, seqlen=seqlen, heads=4, head_dim=head_dim, causal=causal
    )


@pytest.mark.parametrize("mask", MASKS)
def test_packed_batches(target, mask):
    seqlens = [(65, 65), (1, 130), (0, 9), (1000, 300), (7, 0), (640, 1280)]
    heads = {"heads_q": 4, "heads_kv": 2}
    assert_workload_passes(target, seqlens=seqlens, head_dim=64, **heads, **MASKS[mask])


@pytest.mark.parametrize("mask", ["full", "causal", "band"])
def test_packed_batches_of_many_sequences(target, mask):
    seqlens = [(37 * (i % 9), 11 * (i % 13)) for i in range(100)]
    heads = {"heads_q": 4, "heads_kv": 2}
    assert_workload_passes(target, seqlens=seqlens, head_dim=64, **heads, **MASKS[mask])


@pytest.mark.parametrize("mask", ["full", "causal", "band"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_batches_of_long_sequences(target, head_dim, mask):
    seqlens = [(65, 65), (0, 9), (4200, 4100), (7, 0), (1100, 1500)]
    heads = {"heads_q": 2, "heads_kv": 1}
    assert_workload_passes(target, seqlens=seqlens, head_dim=head_dim, **heads, **MASKS[mask])


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("heads", [12, 40])
def test_packed_batches_of_two_sequences_with_most_rows(target, heads, mask):
    seqlens = [(2304, 700), (2290, 90)]  # both may have lower tiles at their end
    heads = {"heads_q": heads, "heads_kv": heads}
    assert_workload_passes(target, seqlens=seqlens, head_dim=128, **heads, **MASKS[mask])


@pytest.mark.parametrize("case", CASES)
def test_behaviour(target, case):
    case(target)


@pytest.mark.parametrize("case", VALUE_CASES)
def test_values(target, case):
    case(target)


def test_offsets_pass_two_to_the_31(bf16_target):
    # q, k and v are slices of one buffer: (S - 1) * row stride is above 2^31 elements.
    seqlen, row_stride = 100_000, 24_576
    try:
        buffer = torch.empty(seqlen * row_stride, dtype=BF16, device="cuda")
    except torch.OutOfMemoryError:
        pytest.skip("no 5 GB free on the GPU")
    q, k, v = (
        buffer.as_strided((1, seqlen, 2, 128), (0, row_stride, 128, 1), 256 * i).normal_()
        for i in range(3)
    )
    rows = torch.arange(seqlen - 200, seqlen)
    out, lse = bf16_target(q, k, v)
    assert_matches(out[:, rows], lse[..., rows], q, k, v, rows=rows)


def test_same_bits_at_every_call(target):
    q, k, v = target.qkv(3, 1000, 1000, 8, 2)
    first, first_lse = target(q, k, v, causal=True)
    for _ in range(10):
        out, lse = target(q, k, v, causal=True)
        assert torch.equal(out, first) and torch.equal(lse, first_lse)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_replays_in_a_cuda_graph(bf16_target, packed):
    q, k, v = bf16_target.qkv(1, 300, 300, 4, 2)
    packing = ()
    if packed:
        cu = bf16_target.cu_seqlens(0, 100, 100, 290)
        q, k, v, packing = q[0], k[0], v[0], (cu, cu, 190, 190)
    fresh = [torch.randn_like(x) for x in (q, k, v)]
    want = bf16_target(*fresh, *packing, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = bf16_target(q, k, v, *packing, causal=True)
    for x, y in zip((q, k, v), fresh, strict=True):
        x.copy_(y)
    for _ in range(2):
        out.fill_(7.0)
        graph.replay()
        assert torch.equal(out, want[0]) and torch.equal(lse, want[1])


def test_runs_on_the_current_stream(bf16_target):
    q, k, v = bf16_target.qkv(1, 128, 128, 2, 2)
    late = torch.randn_like(q)
    want, _ = bf16_target(late, k, v)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)  # some 30 ms, in which a launch on another stream would run
        q.copy_(late)
        out, _ = bf16_target(q, k, v)
    torch.cuda.synchronize()
    assert torch.equal(out, want)


def test_two_streams_at_once(bf16_target):
    inputs = [bf16_target.qkv(2, 700, 700, 4, 2) for _ in range(2)]
    want = [bf16_target(*qkv, causal=True)[0] for qkv in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    got: list[list[torch.Tensor]] = [[], []]
    for _ in range(10):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[i].append(bf16_target(*inputs[i], causal=True)[0])
    torch.cuda.synchronize()
    for outs, right in zip(got, want, strict=True):
        assert all(torch.equal(out, right) for out in outs)


@TWO_GPUS
def test_device_that_is_not_the_current_one(bf16_target):
    q, k, v = bf16_target.qkv(1, 200, 200, 4, 2)
    want, _ = bf16_target(q, k, v)
    out, lse = bf16_target(*(x.to("cuda:1") for x in (q, k, v)))
    assert (out.device.index, lse.device.index, torch.cuda.current_device()) == (1, 1, 0)
    assert torch.equal(out.to("cuda:0"), want)


@TWO_GPUS
def test_devices_that_differ(bf16_target):
    q, k, v = bf16_target.qkv(1, 20, 20, 4, 2)
    with pytest.raises(ValueError, match="k must be on q's device cuda:0, got cuda:1"):
        bf16_target(q, k.to("cuda:1"), v)


def test_memory_holds_the_outputs_only(bf16_target):
    def extra(seqlen: int) -> int:
        q, k, v = bf16_target.qkv(1, seqlen, seqlen, 32, 2, 128)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out, lse = bf16_target(q, k, v, causal=True)
        return torch.cuda.max_memory_allocated() - before - out.nbytes - lse.nbytes

    extra(128)
    for seqlen in (8192, 16384):
        assert extra(seqlen) < 1 << 20


@pytest.mark.parametrize("name", OP_CALLS)
def test_opcheck(bf16_target, name):
    args, kwargs = op_call(bf16_target, name)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(bf16_target.op, args, kwargs, test_utils=tests)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_into_one_graph(bf16_target, dynamic):
    def user(q, k, v):
        return attention(q * 2, k, v, causal=True, impl=bf16_target.impl).relu()

    torch._dynamo.reset()
    compiled = torch.compile(user, fullgraph=True, dynamic=dynamic)
    for seqlen in (65, 130) if dynamic else (65,):
        q = bf16_target.randn(2, 4, seqlen, 64).transpose(1, 2)
        _, k, v = bf16_target.qkv(2, 1, seqlen + 3, 1, 2)
        torch.testing.assert_close(compiled(q, k, v), user(q, k, v))


def test_flop_counter_counts_calls(bf16_target):
    q, k, v = bf16_target.qkv(2, 60, 90, 4, 2)
    cu = bf16_target.cu_seqlens(0, 30, 60)
    with FlopCounterMode(display=False) as counter:
        bf16_target(q, k, v, causal=True)
        bf16_target(q[0], k[0, :60], v[0, :60], cu, cu, 30, 30)
    want = forward_flops([(60, 90)] * 2, 4, 64, 64, causal=True)
    assert counter.get_total_flops() == want + forward_flops([(30, 30)] * 2, 4, 64, 64)


def test_profiler_credits_the_op_with_its_kernel(bf16_target):
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    q, k, v = bf16_target.qkv(2, 1000, 1000, 8, 8)
    bf16_target(q, k, v)
    torch.cuda.synchronize()
    name = bf16_target.op._schema.name
    for _ in range(3):  # the profiler can miss the first kernels of a process
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(5):
                bf16_target(q, k, v)
            torch.cuda.synchronize()
        calls = [event for event in profile.events() if event.name == name]
        launched = [kernel for call in calls for kernel in call.kernels]
        if len(launched) == 5:
            break
    assert len(launched) == 5 and all(kernel.duration > 0 for kernel in launched), launched
    row = next(row for row in profile.key_averages() if row.key == name)
    assert row.device_time_total > 0


def test_autocast_casts_like_torch_does(bf16_target):
    q, k, v = (x.float() for x in bf16_target.qkv(1, 70, 70, 2, 2))
    with torch.autocast("cuda", BF16):
        out, lse = bf16_target(q, k, v.half())
    assert (out.dtype, lse.dtype) == (BF16, torch.float32)
    want, _ = bf16_target(q.to(BF16), k.to(BF16), v.half().to(BF16))
    assert torch.equal(out, want)


def test_input_that_the_kernels_do_not_take(bf16_target):
    q, k, v = bf16_target.qkv(1, 8, 8, 2, 2)
    with pytest.raises(TypeError, match="q must have one of the dtypes .* on cuda, got torch.flo"):
        bf16_target(q.double(), k.double(), v.double())
    with pytest.raises(TypeError, match="k must have q's dtype torch.bfloat16, got torch.float32"):
        bf16_target(q, k.float(), v)
    with pytest.raises(ValueError, match="k must be on q's device cuda:0, got cpu"):
        bf16_target(q, k.cpu(), v)
    with pytest.raises(ValueError, match="q must be on cuda for impl|k must be on q's device cpu"):
        bf16_target(q.cpu(), k, v)
    with pytest.raises(ValueError, match="k must be on q's device cpu, got cuda:0"):
        attention(q.cpu(), k, v)
    with pytest.raises(ValueError, match="head dim that is a multiple of 8 up to 256, got 512"):
        bf16_target(*bf16_target.qkv(1, 8, 8, 2, 2, 512))
    cu = bf16_target.cu_seqlens(0, 8)
    with pytest.raises(ValueError, match="cu_seqlens_k must be on q's device cuda:0, got cpu"):
        bf16_target(q[0], k[0], v[0], cu, cu.cpu(), 8, 8)
    with pytest.raises(ValueError, match="q must be on cpu for impl 'cpu', got cuda:0"):
        attention(q, k, v, impl="cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 7e-46}, "scale must be 0 or a normal float32 number"),
        ({"softcap": 1e-40}, "softcap must be 0 or a normal float32 number"),
        ({"window": (-2, 0)}, "window must be"),
    ],
)
def test_options_that_the_kernels_do_not_take(bf16_target, options, message):
    with pytest.raises(ValueError, match=message):
        bf16_target(*bf16_target.qkv(1, 8, 8, 2, 2), **options)


def test_sizes_beyond_32_bits_are_refused(bf16_target):
    q = bf16_target.randn(1, 1, 1, 8)
    with pytest.raises(ValueError, match="batch \\* heads_q must be <= 2147483647, got 2293760000"):
        bf16_target(*[q.expand(70000, 1, 32768, 8)] * 3)
    with pytest.raises(ValueError, match="k must have <= 2147482624 rows of a sequence"):
        bf16_target(q, *[q.expand(1, 2**31, 1, 8)] * 2)


@pytest.mark.sm90
def test_the_sm90_kernel_names_what_it_cannot_run():
    target = Target("cuda-sm90", "cuda", BF16)
    q, k, v = target.qkv(1, 8, 8, 2, 2)
    with pytest.raises(RuntimeError, match="variant must be 0 or 80 for this call, got 90: "):
        target(q, k[:, :1].expand(-1, 8, -1, -1), v)
    assert target.op(q, k, v, scale=0.1, variant=80)[0].isfinite().all()


@pytest.mark.parametrize("grad", [False, True])
def test_modes_of_autograd(bf16_target, grad):
    q, k, v = bf16_target.qkv(2, 70, 70, 4, 2)
    want, _ = bf16_target(q, k, v)
    out, _ = bf16_target(q.clone().requires_grad_(grad), k, v)
    assert out.requires_grad == grad and torch.equal(out, want)
    with torch.inference_mode():
        assert torch.equal(bf16_target(q, k, v)[0], want)
    with pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
        torch.func.jvp(lambda a: bf16_target(q, k, a)[0], (v,), (v,))


def test_contents_of_cu_seqlens_are_checked_on_request(bf16_target, monkeypatch):
    q, k, v = (x[0] for x in bf16_target.qkv(1, 8, 8, 2, 2))
    cu = bf16_target.cu_seqlens(0, 6, 3, 8)
    out = attention_varlen(q, k, v, cu, cu, 8, 8, impl=bf16_target.impl)
    assert out.isfinite().all()
    monkeypatch.setattr(argument_checks, "CHECK_CONTENTS", True)
    with pytest.raises(ValueError, match="cu_seqlens_q must not decrease, got 6, 3 at 2"):
        attention_varlen(q, k, v, cu, cu, 8, 8, impl=bf16_target.impl)


def test_triton_launches_follow_every_fact_of_a_call():
    """Calls that differ in one property each, in an order that could reuse a wrong launch."""
    target = _target("triton", BF16)
    q, k, v = target.qkv(2, 70, 70, 4, 2)
    buffer = torch.empty(q.numel() + 1, dtype=BF16, device="cuda")
    shifted = buffer[1:].view(q.shape).copy_(q)
    other = torch.cuda.Stream()
    for _ in range(3):
        for options in ({}, {"causal": True}, {"window": (3, 5)}, {"scale": 0.3}, {"softcap": 2.0}):
            assert_matches(*target(q, k, v, **options), q, k, v, **options)
        assert torch.equal(target(shifted, k, v)[0], target(q, k, v)[0])
        half = [x.half() for x in (q, k, v)]
        assert_matches(*target(*half), *half)
        assert_matches(*target(q[:, :33], k, v), q[:, :33], k, v)
        last = q.mT.contiguous().mT
        assert torch.equal(target(last, k, v)[0], target(q, k, v)[0])
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            on_other = target(q, k, v)[0]
        torch.cuda.current_stream().wait_stream(other)
        assert torch.equal(on_other, target(q, k, v)[0])


@TWO_GPUS
def test_triton_launches_on_each_device():
    target = _target("triton", BF16)
    q, k, v = target.qkv(1, 70, 70, 2, 2)
    want = target(q, k, v)[0]
    for _ in range(2):
        assert torch.equal(target(*(x.to("cuda:1") for x in (q, k, v)))[0].cpu(), want.cpu())
        assert torch.equal(target(q, k, v)[0], want)
