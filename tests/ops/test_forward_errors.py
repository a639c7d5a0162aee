"""Bad input raises a Python exception that names the argument, the rule and the value."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch
import torch._dynamo
from torch._subclasses.fake_tensor import FakeTensorMode

from attnscope import argument_checks, attention, attention_varlen, functional

BF16 = torch.bfloat16


def tensors(
    q=(2, 4, 4, 64), k=(2, 6, 2, 64), v=(2, 6, 2, 64), dtype=torch.float32, device="cpu"
) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype, device=device) for shape in (q, k, v)]


SHAPES = {
    "head dim 512": (
        {"q": (2, 4, 4, 512), "k": (2, 6, 2, 512)},
        "q must have a head dim that is a multiple of 8 up to 256, got 512",
    ),
    "head dim 12": (
        {"q": (2, 4, 4, 12), "k": (2, 6, 2, 12)},
        "q must have a head dim that is a multiple of 8 up to 256, got 12. Pad it",
    ),
    "head dim 0": ({"q": (2, 4, 4, 0), "k": (2, 6, 2, 0)}, "multiple of 8 up to 256, got 0"),
    "value head dim 264": ({"v": (2, 6, 2, 264)}, "v must have a head dim that is a multiple of"),
    "key head dim": ({"k": (2, 6, 2, 32)}, "k must have q's head dim 64, got 32"),
    "heads 3 to 2": ({"q": (2, 4, 3, 64)}, "q must have a multiple of k's 2 heads, got 3"),
    "heads 33 to 2": ({"q": (2, 4, 33, 64)}, "q must have a multiple of k's 2 heads, got 33"),
    "heads 4 to 0": (
        {"k": (2, 6, 0, 64), "v": (2, 6, 0, 64)},
        "k must have at least 1 head, got 0",
    ),
    "heads 0 to 2": ({"q": (2, 4, 0, 64)}, "q must have a multiple of k's 2 heads, got 0"),
    "value heads": ({"v": (2, 6, 4, 64)}, "v must have as many heads as k, 2, got 4"),
    "batch": ({"k": (3, 6, 2, 64), "v": (3, 6, 2, 64)}, "k must have q's batch 2, got 3"),
    "value length": (
        {"v": (2, 5, 2, 64)},
        "v must have k's shape [2, 6, 2, 64] in all but the last dimension, got [2, 5, 2, 64]",
    ),
    "value batch": (
        {"v": (1, 6, 2, 64)},
        "v must have k's shape [2, 6, 2, 64] in all but the last dimension, got [1, 6, 2, 64]",
    ),
    "three dimensions": (
        {"q": (4, 4, 64)},
        "q must have 4 dimensions, [batch, seq, heads, dim], got shape [4, 4, 64]",
    ),
    "no dimensions": (
        {"q": ()},
        "q must have 4 dimensions, [batch, seq, heads, dim], got shape []",
    ),
    "five dimensions": ({"v": (1, 2, 6, 2, 64)}, "v must have 4 dimensions, [batch, seq, heads"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name):
    shapes, message = SHAPES[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        attention(*tensors(**shapes))


OPTIONS = (
    ({"window": (-2, 0)}, "window must be (left, right), both >= -1, got (-2, 0)"),
    ({"window": (0, -5)}, "window must be (left, right), both >= -1, got (0, -5)"),
    ({"window": (1, 2, 3)}, "window must be (left, right), got (1, 2, 3)"),
    ({"window": 64}, "window must be two ints, (left, right), got 64"),
    ({"window": (1.5, 2)}, "window must be two ints, (left, right), got (1.5, 2)"),
    ({"window": (None, 0)}, "window must be two ints, (left, right), got (None, 0)"),
    ({"scale": math.nan}, "scale must be 0 or a normal float32 number (1.18e-38 to 3.4e+38), got"),
    ({"scale": -math.inf}, "scale must be 0 or a normal float32 number"),
    ({"scale": 7e-46}, "scale must be 0 or a normal float32 number"),
    ({"scale": -4e38}, "scale must be 0 or a normal float32 number"),
    ({"scale": 3e38}, "scale * log2(e) must be 0 or a normal float32 number"),
    ({"scale": "auto"}, "scale must be a number, got 'auto'"),
    ({"softcap": -1.0}, "softcap must be 0 (none) or a positive number, got -1.0"),
    ({"softcap": math.inf}, "softcap must be 0 or a normal float32 number"),
    ({"softcap": math.nan}, "softcap must be 0 (none) or a positive number, got nan"),
    ({"softcap": 1e-40}, "softcap must be 0 or a normal float32 number"),
    ({"softcap": 3e38}, "softcap * 2 log2(e) must be 0 or a normal float32 number"),
    ({"softcap": 1e20, "scale": 1e-20}, "2 log2(e) * scale / softcap must be 0 or a normal"),
    ({"softcap": 1e-20, "scale": 1e20}, "2 log2(e) * scale / softcap must be 0 or a normal"),
    ({"softcap": None}, "softcap must be a number, got None"),
    ({"causal": "yes"}, "causal must be a bool, got 'yes'"),
    ({"causal": None}, "causal must be a bool, got None"),
    (
        {"impl": "flash"},
        "impl must be one of None, 'cpu', 'cuda', 'cuda-sm80', 'cuda-sm90', 'triton', got 'flash'",
    ),
    ({"impl": "cuda"}, "q must be on cuda for impl 'cuda', got cpu"),
    ({"impl": "cuda-sm80"}, "q must be on cuda for impl 'cuda-sm80', got cpu"),
)


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_options(options, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        attention(*tensors(), **options)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1.2e-38, 2.3e38, -2.3e38, 5])
def test_scales_that_float32_represents(scale):
    assert attention(*tensors(), scale=scale).isfinite().all()


def test_the_op_and_its_explanation_refuse_the_same_numbers():
    values = [0.0, 7e-46, 1e-40, 1.17e-38, 1.18e-38, 1e-30, 1.0, 1.1e38, 1.3e38, 2.3e38, 2.4e38]
    values += [3.5e38, math.inf, math.nan]
    q, k, v = tensors()
    for scale, softcap in itertools.product([*values, *(-x for x in values)], values):

        def refused(call, scale=scale, softcap=softcap):
            try:
                call(q, k, v, scale=scale, softcap=softcap)
            except (ValueError, RuntimeError):
                return True
            return False

        op, check = torch.ops.attnscope.forward, argument_checks.check_forward
        assert refused(op) == refused(check), (scale, softcap)


def test_unknown_variants():
    with pytest.raises(ValueError, match="variant must be one of 0, got 80"):
        argument_checks.check_forward(*tensors(), scale=1.0, variant=80)
    with pytest.raises(RuntimeError, match="variant must be 0 on the CPU, got 80"):
        torch.ops.attnscope.forward(*tensors(), scale=1.0, variant=80)


# Expanded tensors: sizes beyond any memory, in a few bytes.
SIZES = {
    "heads of all batches": (
        {"q": (70000, 1, 32768, 8), "k": (70000, 1, 32768, 8)},
        "batch * heads_q must be <= 2147483647, got 2293760000",
    ),
    "rows of q": (
        {"q": (1, 2**31, 1, 8), "k": (1, 1, 1, 8)},
        "q must have <= 2147482624 rows of a sequence, got 2147483648",
    ),
    "rows of k": (
        {"q": (1, 1, 1, 8), "k": (1, 2**31 - 1023, 1, 8)},
        "k must have <= 2147482624 rows of a sequence, got 2147482625",
    ),
    "rows of both": (
        {"q": (1, 2**30, 1, 8), "k": (1, 2**30, 1, 8)},
        "q and k must have <= 2147482624 rows of a sequence, got 2147483648",
    ),
    "tiles": (
        {"q": (2**15, 65, 2**14, 8), "k": (2**15, 1, 1, 8)},
        "q must have <= 1073741823 tiles of 64 rows of a head, got 1073741824",
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_beyond_32_bits(name):
    shapes, message = SIZES[name]
    q, k = (torch.zeros(1, 1, 1, 8).expand(shapes[side]) for side in "qk")
    with pytest.raises(ValueError, match=re.escape(message)):
        attention(q, k, k)
    with pytest.raises(RuntimeError, match="must be <= "):
        torch.ops.attnscope.forward(q, k, k, scale=1.0)


def test_sizes_of_packed_batches():
    cu = torch.zeros(2**16 + 1, dtype=torch.int32)
    q = torch.zeros(1, 1, 8).expand(64, 2**15, 8)
    k = torch.zeros(1, 1, 8).expand(64, 1, 8)
    with pytest.raises(ValueError, match="batch \\* heads_q must be <= 2147483647, got 2147483648"):
        attention_varlen(q, k, k, cu, cu, 1, 1)
    cu = torch.zeros(2**15 + 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="tiles of 64 rows of a head, got 1073741824"):
        attention_varlen(q, k, k, cu, cu, 1, 1)


@pytest.mark.parametrize("position", range(3))
def test_mixed_dtypes(position):
    args = tensors()
    args[position] = args[position].to(BF16)
    name, got, want = (
        ("k", "float32", "bfloat16")
        if position == 0
        else ("kv"[position - 1], "bfloat16", "float32")
    )
    with pytest.raises(
        TypeError, match=f"{name} must have q's dtype torch.{want}, got torch.{got}"
    ):
        attention(*args)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_dtypes_of_no_kernel(dtype):
    with pytest.raises(TypeError, match=f"q must have one of the dtypes .* on cpu, got {dtype}"):
        attention(*tensors(dtype=dtype))


def test_what_is_no_tensor():
    q, k, v = tensors()
    with pytest.raises(TypeError, match="q must be a tensor, got list"):
        attention(q.tolist(), k, v)
    with pytest.raises(TypeError, match="v must be a tensor, got NoneType"):
        attention(q, k, None)
    with pytest.raises(TypeError, match="k must have layout torch.strided, got torch.sparse"):
        attention(q, k.to_sparse(), v)


def test_devices():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="k must be on q's device cpu, got meta"):
        attention(q, k.to("meta"), v)
    with pytest.raises(ValueError, match="k must be on q's device meta, got cpu"):
        attention(q.to("meta"), k, v)


def test_the_meta_device_gives_shapes():
    out, lse = attention(*tensors(device="meta"), return_lse=True)
    assert (out.shape, out.device.type, lse.shape) == ((2, 4, 4, 64), "meta", (2, 4, 4))


def check_on_cuda(dtype=BF16, **options) -> None:
    with FakeTensorMode():
        args = tensors(dtype=dtype, device="cuda")
        argument_checks.check_forward(*args, scale=1.0, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_dtypes_that_only_the_cpu_takes(dtype):
    message = f"dtypes torch.bfloat16, torch.float16 on cuda, got {dtype}"
    with pytest.raises(TypeError, match=message):
        check_on_cuda(dtype)


def test_variants_on_cuda():
    check_on_cuda()
    check_on_cuda(variant=80)
    with pytest.raises(ValueError, match="variant must be one of 0, 80, 90, got 91"):
        check_on_cuda(variant=91)


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="fake tensors need real devices")
def test_devices_that_differ_on_cuda():
    options = {"scale": 1.0, "max_seqlen_q": 4, "max_seqlen_k": 4}
    with FakeTensorMode():
        q, k, v = tensors(dtype=BF16, device="cuda:0")
        _, k_cpu, _ = tensors(dtype=BF16)
        _, _, v_other = tensors(dtype=BF16, device="cuda:1")
        packed = tensors((4, 4, 64), (6, 2, 64), (6, 2, 64), BF16, "cuda:0")
        cu, cu_cpu = (torch.zeros(2, dtype=torch.int32, device=d) for d in ("cuda:0", "cpu"))
        with pytest.raises(ValueError, match="v must be on q's device cuda:0, got cuda:1"):
            argument_checks.check_forward(q, k, v_other, scale=1.0)
        with pytest.raises(ValueError, match="k must be on q's device cuda:0, got cpu"):
            argument_checks.check_forward(q, k_cpu, v, scale=1.0)
        with pytest.raises(ValueError, match="cu_seqlens_k must be on q's device cuda"):
            argument_checks.check_forward(*packed, cu, cu_cpu, **options)


def test_cuda_tensors_without_cuda_kernels(monkeypatch):
    monkeypatch.setattr(functional, "_CUDA_STATUS", "not built: no nvcc")
    with (
        FakeTensorMode(),
        pytest.raises(
            RuntimeError,
            match="q must be on the CPU, got cuda:0: the CUDA kernels are not built: no nvcc",
        ),
    ):
        attention(*tensors(dtype=BF16, device="cuda:0"))


def packed(cu_q=(0, 3, 7), cu_k=(0, 2, 9), max_q=4, max_k=7, dtype=torch.int32):
    q, k, v = torch.zeros(8, 4, 64), torch.zeros(9, 2, 64), torch.zeros(9, 2, 64)
    cu_q, cu_k = (torch.tensor(cu, dtype=dtype) if cu is not None else cu for cu in (cu_q, cu_k))
    return q, k, v, cu_q, cu_k, max_q, max_k


def test_packed_arguments_that_are_right():
    attention_varlen(*packed())
    attention_varlen(*packed(cu_q=(0, 0), cu_k=(0, 0), max_q=0, max_k=0))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dtype": torch.int64}, TypeError, "cu_seqlens_q must have dtype torch.int32, got torch"),
        ({"cu_q": None}, TypeError, "cu_seqlens_q must be a tensor, got NoneType"),
        ({"cu_k": None}, TypeError, "cu_seqlens_k must be a tensor, got NoneType"),
        ({"cu_q": ((0, 3),)}, ValueError, "cu_seqlens_q must be contiguous, of shape [batch + 1]"),
        ({"cu_q": ()}, ValueError, "cu_seqlens_q must be contiguous, of shape [batch + 1], got sh"),
        (
            {"cu_k": (0, 7)},
            ValueError,
            "cu_seqlens_k must have the shape of cu_seqlens_q, [3], got",
        ),
        ({"max_q": -1}, ValueError, "max_seqlen_q must be >= 0, got -1"),
        ({"max_k": None}, TypeError, "max_seqlen_k must be an int, got NoneType"),
        ({"max_k": 7.0}, TypeError, "max_seqlen_k must be an int, got float"),
        ({"max_q": torch.tensor(4)}, TypeError, "max_seqlen_q must be an int, got Tensor. Read it"),
        ({"cu_q": (1, 3, 7)}, ValueError, "cu_seqlens_q must begin with 0, got 1"),
        ({"cu_q": (0, 4, 3)}, ValueError, "cu_seqlens_q must not decrease, got 4, 3 at 2"),
        ({"cu_k": (0, 7, 10)}, ValueError, "cu_seqlens_k must end with at most k's 9 rows, got 10"),
        (
            {"max_q": 3},
            ValueError,
            "max_seqlen_q must be >= the longest segment, got 3, but segmen",
        ),
    ],
)
def test_packed_arguments(change, error, message):
    with pytest.raises(error, match=re.escape(message)):
        attention_varlen(*packed(**change))


def test_packed_tensors():
    q, k, v, *rest = packed()
    with pytest.raises(
        ValueError, match=r"q must have 3 dimensions, \[tokens, .*, got shape \[1, 8, 4, 64\]"
    ):
        attention_varlen(q[None], k, v, *rest)
    with pytest.raises(ValueError, match=r"v must have k's shape \[9, 2, 64\] .* got \[8, 2, 64\]"):
        attention_varlen(q, k, v[1:], *rest)
    cu = torch.tensor([0, 0, 3, 3, 7, 7], dtype=torch.int32)[::2]
    with pytest.raises(
        ValueError, match=r"cu_seqlens_q must be contiguous, .* got shape \[3\], strides \[2\]"
    ):
        attention_varlen(q, k, v, cu, *rest[1:])


def test_contents_of_cu_seqlens_on_cuda_are_read_on_request_only(monkeypatch):
    cu = torch.tensor([0, 7, 3], dtype=torch.int32)
    fake = FakeTensorMode().from_tensor(cu)
    reads_contents = argument_checks.reads_contents
    assert reads_contents(cu) and not reads_contents(fake)
    monkeypatch.setattr(argument_checks, "CHECK_CONTENTS", True)
    assert reads_contents(cu) and not reads_contents(fake)


def test_what_the_dispatcher_refuses_is_explained_alone():
    with pytest.raises(TypeError, match="scale must be a number") as caught:
        attention(*tensors(), scale="auto")
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_an_exception_that_no_argument_explains_is_passed_on(monkeypatch):
    class Fault(Exception):
        pass

    def fail(*args, **options):
        raise Fault

    monkeypatch.setattr(functional, "_FORWARD", fail)
    with pytest.raises(Fault):
        attention(*tensors())


def test_compiled_calls_are_checked_while_tracing():
    torch._dynamo.reset()
    compiled = torch.compile(attention, backend="eager")
    with pytest.raises(Exception, match="q must have a multiple of k's 2 heads, got 3"):
        compiled(*tensors(q=(2, 4, 3, 64)))


def test_the_op_itself_refuses_what_its_kernels_cannot_take():
    op = torch.ops.attnscope.forward
    q, k, v = tensors()
    ints = [x.to(torch.int32) for x in (q, k, v)]
    cu = torch.zeros(2, dtype=torch.int32)
    packed = (q[0], k[0], v[0])
    for args, options, message in (
        ((q, k, v[:, :5]), {}, "v must have k's size 6 in dimension 1, got 5"),
        ((q, k[:1], v[:1]), {}, "k must have q's batch, 2, got 1"),
        ((q, k[..., :32], v), {}, "k must have q's head_dim, 64, got 32"),
        ((q, k[0], v), {}, "q, k, v must have 4 dimensions, got 4, 3, 4"),
        ((q, k, v), {"window_left": -3}, "window_left must be >= -1, got -3"),
        ((q, k, v), {"window_right": -2}, "window_right must be >= -1, got -2"),
        ((q, k, v), {"softcap": -1.0}, "softcap must be >= 0 .*, got -1"),
        ((q[:, :, :3], k, v), {}, "q must have a multiple of k's 2 heads, got 3"),
        ((q[:, :, :0], k, v), {}, "q must have a multiple of k's 2 heads, got 0"),
        (ints, {}, "q must have dtype float16, bfloat16, float32 or float64"),
        ((q.to(BF16), k, v), {}, "must have one dtype"),
        ((q[..., :12], k[..., :12], v), {}, "head_dim must be a multiple of 8 up to 256, got 12"),
        ((*packed, cu), {}, "cu_seqlens_q, cu_seqlens_k must be given together"),
        ((*packed, cu, cu[:1]), {}, r"cu_seqlens_k must have shape \[batch \+ 1\]"),
        ((*packed, cu.long(), cu), {}, "cu_seqlens_q must have dtype int32"),
        ((*packed, cu, cu), {"max_seqlen_k": -1}, "must be >= 0, got 0, -1"),
    ):
        with pytest.raises(RuntimeError, match=message):
            op(*args, scale=options.pop("scale", 1.0), **options)
