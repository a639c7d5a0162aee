"""Bad input gives a Python exception that names the argument, its value and what is allowed."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attnscope import attention, attention_varlen, functional, ops

BF16 = torch.bfloat16


def tensors(
    q=(2, 4, 4, 64), k=(2, 6, 2, 64), v=(2, 6, 2, 64), dtype=torch.float32, device="cpu"
) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype, device=device) for shape in (q, k, v)]


SHAPES = {
    "head dim 512": (
        {"q": (2, 4, 4, 512), "k": (2, 6, 2, 512)},
        "q: head dim is 512; allowed: mul",
    ),
    "head dim 12": ({"q": (2, 4, 4, 12), "k": (2, 6, 2, 12)}, "q: head dim is 12; allowed: multip"),
    "head dim 0": ({"q": (2, 4, 4, 0), "k": (2, 6, 2, 0)}, "q: head dim is 0; allowed: multiples"),
    "value head dim 264": ({"v": (2, 6, 2, 264)}, "v: head dim is 264; allowed: multiples of 8 up"),
    "key head dim": ({"k": (2, 6, 2, 32)}, "k: head dim is 32; allowed: q's head dim, 64"),
    "heads 3 to 2": ({"q": (2, 4, 3, 64)}, "q: has 3 heads; allowed: a multiple of k's 2"),
    "heads 33 to 2": ({"q": (2, 4, 33, 64)}, "q: has 33 heads; allowed: a multiple of k's 2"),
    "heads 4 to 0": (
        {"k": (2, 6, 0, 64), "v": (2, 6, 0, 64)},
        "k: has 0 heads; allowed: 1 or more",
    ),
    "heads 0 to 2": ({"q": (2, 4, 0, 64)}, "q: has 0 heads; allowed: a multiple of k's 2"),
    "value heads": ({"v": (2, 6, 4, 64)}, "v: has 4 heads; allowed: as many as k, 2"),
    "batch": ({"k": (3, 6, 2, 64), "v": (3, 6, 2, 64)}, "k: batch is 3; allowed: q's batch, 2"),
    "value length": ({"v": (2, 5, 2, 64)}, "v: shape is [2, 5, 2, 64]; allowed: k's [2, 6, 2, 64]"),
    "value batch": ({"v": (1, 6, 2, 64)}, "v: shape is [1, 6, 2, 64]; allowed: k's [2, 6, 2, 64]"),
    "three dimensions": (
        {"q": (4, 4, 64)},
        "q: shape is [4, 4, 64]; allowed: 4 dimensions, [batch",
    ),
    "no dimensions": ({"q": ()}, "q: shape is []; allowed: 4 dimensions"),
    "five dimensions": ({"v": (1, 2, 6, 2, 64)}, "v: shape is [1, 2, 6, 2, 64]; allowed: 4 dim"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name):
    shapes, message = SHAPES[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        attention(*tensors(**shapes))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": (-2, 0)}, "window: is (-2, 0); allowed: (left, right), -1 (unbounded) or"),
        ({"window": (0, -5)}, "window: is (0, -5); allowed: (left, right), -1 (unbounded) or"),
        ({"window": (1, 2, 3)}, "window: is (1, 2, 3); allowed: (left, right), -1 (unbounded)"),
        ({"window": 64}, "window: is 64; allowed: two ints, (left, right)"),
        ({"window": (1.5, 2)}, "window: is (1.5, 2); allowed: two ints, (left, right)"),
        ({"scale": math.nan}, "scale: is nan; allowed: a finite number"),
        ({"scale": -math.inf}, "scale: is -inf; allowed: a finite number"),
        ({"scale": "auto"}, "scale: is 'auto'; allowed: a finite number"),
        ({"softcap": -1.0}, "softcap: is -1.0; allowed: 0 (none) or a finite number"),
        ({"softcap": math.inf}, "softcap: is inf; allowed: 0 (none) or a finite number"),
        ({"softcap": math.nan}, "softcap: is nan; allowed: 0 (none) or a finite number"),
        ({"softcap": None}, "softcap: is None; allowed: 0 (none) or a finite number"),
        (
            {"impl": "flash"},
            "impl: is 'flash'; allowed: None, 'cpu', 'cuda', 'cuda-sm80', 'cuda-sm90', 'triton'",
        ),
        ({"impl": "cuda"}, "impl: 'cuda' takes cuda tensors; q is on cpu"),
        ({"impl": "cuda-sm80"}, "impl: 'cuda-sm80' takes cuda tensors; q is on cpu"),
    ],
)
def test_options(options, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        attention(*tensors(), **options)


def test_unknown_kernels():
    with pytest.raises(ValueError, match="kernel_name: is 'sm80'; allowed on cpu: auto"):
        ops.check_forward(*tensors(), scale=1.0, kernel_name="sm80")
    with pytest.raises(RuntimeError, match="kernel_name is 'sm80'; allowed on the CPU: auto"):
        torch.ops.attnscope.forward(*tensors(), scale=1.0, kernel_name="sm80")


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
        TypeError, match=f"{name}: dtype is torch.{got}; allowed: q's dtype, torch.{want}"
    ):
        attention(*args)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_dtypes_of_no_kernel(dtype):
    with pytest.raises(TypeError, match=f"q: dtype is {dtype}; allowed on cpu: torch.float32, "):
        attention(*tensors(dtype=dtype))


def test_what_is_no_tensor():
    q, k, v = tensors()
    with pytest.raises(TypeError, match="q: is a list; allowed: a tensor"):
        attention(q.tolist(), k, v)
    with pytest.raises(TypeError, match="v: is a NoneType; allowed: a tensor"):
        attention(q, k, None)
    with pytest.raises(TypeError, match="k: layout is torch.sparse_coo; allowed: torch.strided"):
        attention(q, k.to_sparse(), v)


def test_devices():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="k: is on meta; allowed: q's device, cpu"):
        attention(q, k.to("meta"), v)
    with pytest.raises(ValueError, match="q: is on meta; allowed: cuda, cpu"):
        attention(*tensors(device="meta"))


def check_on_cuda(dtype=BF16, **options) -> None:
    with FakeTensorMode():
        args = tensors(dtype=dtype, device="cuda")
        ops.check_forward(*args, scale=1.0, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_dtypes_that_only_the_cpu_takes(dtype):
    message = f"q: dtype is {dtype}; allowed on cuda: torch.bfloat16, torch.float16"
    with pytest.raises(TypeError, match=message):
        check_on_cuda(dtype)


def test_kernels_on_cuda():
    check_on_cuda()
    check_on_cuda(kernel_name="sm80")
    with pytest.raises(ValueError, match="kernel_name: is 'sm90x'; allowed on cuda: auto, sm80"):
        check_on_cuda(kernel_name="sm90x")


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="fake tensors need real devices")
def test_devices_that_differ_on_cuda():
    options = {"scale": 1.0, "max_seqlen_q": 4, "max_seqlen_k": 4}
    with FakeTensorMode():
        q, k, v = tensors(dtype=BF16, device="cuda:0")
        _, k_cpu, _ = tensors(dtype=BF16)
        _, _, v_other = tensors(dtype=BF16, device="cuda:1")
        packed = tensors((4, 4, 64), (6, 2, 64), (6, 2, 64), BF16, "cuda:0")
        cu, cu_cpu = (torch.zeros(2, dtype=torch.int32, device=d) for d in ("cuda:0", "cpu"))
        with pytest.raises(ValueError, match="v: is on cuda:1; allowed: q's device, cuda:0"):
            ops.check_forward(q, k, v_other, scale=1.0)
        with pytest.raises(ValueError, match="k: is on cpu; allowed: q's device, cuda:0"):
            ops.check_forward(q, k_cpu, v, scale=1.0)
        with pytest.raises(ValueError, match="cu_seqlens_k: is on cpu; allowed: q's device, cuda"):
            ops.check_forward(*packed, cu, cu_cpu, **options)


def test_cuda_tensors_without_cuda_kernels(monkeypatch):
    monkeypatch.setattr(functional, "_CUDA_STATUS", "not built: no nvcc")
    with (
        FakeTensorMode(),
        pytest.raises(RuntimeError, match="q: is on cuda:0, but the CUDA kernels"),
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
        ({"dtype": torch.int64}, TypeError, "cu_seqlens_q: dtype is torch.int64; allowed: torch"),
        ({"cu_q": None}, TypeError, "cu_seqlens_q: is a NoneType; allowed: a tensor"),
        ({"cu_k": None}, TypeError, "cu_seqlens_k: is a NoneType; allowed: a tensor"),
        ({"cu_q": ((0, 3),)}, ValueError, "cu_seqlens_q: has shape [1, 2], strides [2, 1]; allow"),
        ({"cu_q": ()}, ValueError, "cu_seqlens_q: has shape [0], strides [1]; allowed: [batch + "),
        ({"cu_k": (0, 7)}, ValueError, "cu_seqlens_k: shape is [2]; allowed: that of cu_seqlens_"),
        ({"max_q": -1}, ValueError, "max_seqlen_q: is -1; allowed: 0 or more"),
        ({"max_k": None}, TypeError, "max_seqlen_k: is a NoneType; allowed: an int"),
        ({"max_k": 7.0}, TypeError, "max_seqlen_k: is a float; allowed: an int"),
        ({"cu_q": (1, 3, 7)}, ValueError, "cu_seqlens_q: begins with 1; allowed: 0"),
        ({"cu_q": (0, 4, 3)}, ValueError, "cu_seqlens_q: goes from 4 to 3 at 2; allowed: no decr"),
        ({"cu_k": (0, 7, 10)}, ValueError, "cu_seqlens_k: ends with 10; allowed: up to k's 9 row"),
        ({"max_q": 3}, ValueError, "max_seqlen_q: is 3, but segment 1 of cu_seqlens_q has 4 rows"),
    ],
)
def test_packed_arguments(change, error, message):
    with pytest.raises(error, match=re.escape(message)):
        attention_varlen(*packed(**change))


def test_packed_tensors():
    q, k, v, *rest = packed()
    with pytest.raises(
        ValueError, match=r"q: shape is \[1, 8, 4, 64\]; allowed: 3 dimensions, \[tok"
    ):
        attention_varlen(q[None], k, v, *rest)
    with pytest.raises(ValueError, match=r"v: shape is \[8, 2, 64\]; allowed: k's \[9, 2, 64\]"):
        attention_varlen(q, k, v[1:], *rest)
    cu = torch.tensor([0, 0, 3, 3, 7, 7], dtype=torch.int32)[::2]
    with pytest.raises(
        ValueError, match=r"cu_seqlens_q: has shape \[3\], strides \[2\]; allowed: "
    ):
        attention_varlen(q, k, v, cu, *rest[1:])


def test_contents_of_cu_seqlens_on_cuda_are_read_on_request_only(monkeypatch):
    cu = torch.tensor([0, 7, 3], dtype=torch.int32)
    fake = FakeTensorMode().from_tensor(cu)
    assert ops._may_read(cu) and not ops._may_read(fake)
    monkeypatch.setattr(ops, "CHECK_CONTENTS", True)
    assert ops._may_read(cu) and not ops._may_read(fake)


def test_the_op_itself_refuses_what_its_kernels_cannot_take():
    op = torch.ops.attnscope.forward
    q, k, v = tensors()
    for args, options, message in (
        ((q, k, v[:, :5]), {}, "v: size 5 of dimension 1, k has 6"),
        ((q, k, v), {"window_left": -3}, "window_left is -3"),
        ((q, k, v), {"softcap": -1.0}, "softcap is -1"),
        ((q[:, :, :3], k, v), {}, "q: 3 heads are not a multiple of k's 2"),
        ((q.to(torch.int32), k.to(torch.int32), v.to(torch.int32)), {}, "q: dtype not supported"),
        ((q.to(BF16), k, v), {}, "dtypes differ"),
        ((q[..., :12], k[..., :12], v), {}, "head_dim is 12; allowed: multiples of 8 up to 256"),
        (
            (q[0], k[0], v[0], torch.zeros(2)),
            {},
            "cu_seqlens_q, cu_seqlens_k: give both or neither",
        ),
    ):
        with pytest.raises(RuntimeError, match=message):
            op(*args, scale=1.0, **options)
