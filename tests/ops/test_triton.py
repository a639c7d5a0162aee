"""The Triton forward without a GPU: interpreted, traced, and compiled for sm_90 and sm_80.

test_forward_gpu.py runs it on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels do not compile", allow_module_level=True)

from compiled_triton import Compiled, compile_kernel  # noqa: E402

from attnscope import attention  # noqa: E402
from attnscope.triton import forward as op  # noqa: E402
from attnscope.triton.forward_kernel import triton_forward  # noqa: E402


@pytest.mark.long
def test_interpreted_kernels():
    """Forward and backward in one new process: the interpreter is chosen when Triton loads."""
    support = Path(__file__).parents[1] / "support"
    tests = [str(support / f"interpreted_triton{part}.py") for part in ("", "_backward")]
    # The matrices are small: numpy's threads would cost more time than they save.
    settings = {"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
        env=os.environ | settings,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]


def compile_for(arch: int, head_dim: int, head_dim_v: int, **flags: Any) -> Compiled:
    config, padded, padded_v = op.tile(head_dim, head_dim_v, large=arch >= 90)
    constants = {
        "PACKED": False, "HAS_LEFT": False, "HAS_RIGHT": False, "SCORES": "raw",
        "D": head_dim, "DV": head_dim_v, "BLOCK_D": padded, "BLOCK_DV": padded_v,
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
    } | flags  # fmt: skip
    if not constants["PACKED"]:
        constants |= {"cu_seqlens_q": None, "cu_seqlens_k": None}
    pointers = {"lse": "*fp32", "cu_seqlens_q": "*i32", "cu_seqlens_k": "*i32"}
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return compile_kernel(triton_forward, arch, pointers, constants, options)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_hopper_code(head_dim, causal):
    code = compile_for(90, head_dim, head_dim, HAS_RIGHT=causal)
    assert code.ptx.count("wgmma.mma_async") >= 4 and code.in_loops("HGMMA")
    assert not code.in_loops("LDL") and not code.in_loops("STL"), "the main loop spills"
    # At head dim 128 a few values are spilled once per tile, for the loop of doubtful tiles.
    if head_dim < 256:
        most = 8 if head_dim == 128 else 0
        assert code.count("LDL") <= most and code.count("STL") <= most
    # The loop loads by asynchronous copies of 16 bytes; single elements would use plain loads.
    assert code.in_loops("LDGSTS") and all("128" in text for text in code.in_loops("LDGSTS"))
    assert code.shared_bytes <= 227 << 10
    mask = "causal_or_right" if causal else "full"
    assert code.name == f"attnscope_triton_forward_bf16_d{head_dim}_dv{head_dim}_{mask}"


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(8, 8), (72, 40), (192, 128), (256, 256)])
def test_every_option_compiles(head_dim, head_dim_v, arch):
    flags = {"PACKED": True, "HAS_LEFT": True, "HAS_RIGHT": True, "SCORES": "capped"}
    code = compile_for(arch, head_dim, head_dim_v, **flags)
    assert not code.in_loops("LDL") and not code.in_loops("STL")
    assert code.shared_bytes <= (227 if arch == 90 else 99) << 10


def test_schema_matches_the_op_without_its_variants():
    ours, theirs = (
        str(namespace.forward.default._schema).split(" -> ")[0]
        for namespace in (torch.ops.attnscope_triton, torch.ops.attnscope)
    )
    assert ours.replace("attnscope_triton", "attnscope") == theirs.replace(", int variant=0", "")


def test_cpu_tensors_are_refused_with_the_way_out():
    q = torch.zeros(1, 4, 2, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match="q must be on CUDA .*, got cpu. Set TRITON_INTERPRET=1"):
        attention(q, q, q, impl="triton")


def test_launch_arguments_are_in_the_order_of_the_kernel():
    q = torch.zeros(2, 100, 4, 72, dtype=torch.half)
    launch = op.plan_launch(q, q[:, :, :2], q[:, :, :2, :40], scale=0.5, causal=True)
    names = triton_forward.arg_names
    tensors, numbers = names[:7], names[7 : 7 + len(launch.numbers)]
    assert tensors == ["q", "k", "v", "out", "lse", "cu_seqlens_q", "cu_seqlens_k"]
    assert names[7 + len(launch.numbers) :] == list(launch.constants)
    values = dict(zip(numbers, launch.numbers, strict=True))
    assert [values[name] for name in ("q_batch", "q_row", "q_head")] == [3600, 36, 9]
    assert [values[name] for name in ("group", "blocks_m", "left", "right")] == [2, 2, -1, 0]


class TestOnFakeCuda:
    """Trace the op as torch.compile does, without a device."""

    @pytest.fixture(autouse=True)
    def some_hopper(self, monkeypatch):
        monkeypatch.setattr(op.plan, "is_large", lambda device: True)

    def test_shapes_and_flops(self):
        with FakeTensorMode(), FlopCounterMode(display=False) as counter:
            q, k, v = (
                torch.empty(2, 60, heads, dim, device="cuda", dtype=torch.half)
                for heads, dim in ((4, 64), (2, 64), (2, 40))
            )
            out, lse = torch.ops.attnscope_triton.forward(q, k, v, scale=1.0)
        assert (out.shape, out.dtype, out.device.type) == ((2, 60, 4, 40), torch.half, "cuda")
        assert (lse.shape, lse.dtype) == ((2, 4, 60), torch.float32)
        assert counter.get_total_flops() == 2 * 2 * 4 * 60 * 60 * (64 + 40)

    @pytest.mark.parametrize("dynamic", [DimDynamic.STATIC, DimDynamic.DYNAMIC])
    def test_the_kernel_is_in_the_traced_graph(self, dynamic):
        def user(q, k, v):
            return torch.ops.attnscope_triton.forward(q * 2, k, v, scale=0.1, causal=True)

        mode = FakeTensorMode(shape_env=ShapeEnv())
        context = StatelessSymbolicContext(dynamic_sizes=[dynamic] * 4)
        like = mode.from_tensor(torch.empty(2, 100, 4, 72), symbolic_context=context)
        with mode:
            q = torch.empty(like.shape, device="cuda", dtype=torch.bfloat16)
            graph = make_fx(dispatch_functionalize(user))(q, q, q)
        kernels = [n for n in graph.graph.nodes if "triton_kernel_wrapper" in str(n.target)]
        assert len(kernels) == 1
        arguments = kernels[0].kwargs["kwargs"]
        assert (arguments["D"], arguments["BLOCK_D"], arguments["HAS_RIGHT"]) == (72, 128, True)

    def test_lengths_that_are_not_known_while_tracing(self):
        def user(x, cu):
            max_seqlen = cu.diff().max().item()
            return torch.ops.attnscope_triton.forward(
                x, x, x, cu, cu, scale=0.1, causal=True, max_seqlen_q=max_seqlen,
                max_seqlen_k=max_seqlen,
            )  # fmt: skip

        with FakeTensorMode(shape_env=ShapeEnv()):
            x = torch.empty(100, 4, 64, device="cuda", dtype=torch.bfloat16)
            cu = torch.empty(5, device="cuda", dtype=torch.int32)
            graph = make_fx(dispatch_functionalize(user))(x, cu)
        kernels = [n for n in graph.graph.nodes if "triton_kernel_wrapper" in str(n.target)]
        assert len(kernels) == 1
        assert kernels[0].kwargs["kwargs"].keys() >= {"q", "cu_seqlens_q", "seqlen_q"}
