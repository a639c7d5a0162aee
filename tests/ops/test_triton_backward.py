"""The Triton backward without a GPU: traced, compiled, and its launches.

test_triton.py runs it in the interpreter.
"""

from __future__ import annotations

import os
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

from attnscope.triton import backward as op  # noqa: E402
from attnscope.triton import backward_kernel as kernels  # noqa: E402
from attnscope.triton import (  # noqa: E402
    forward,  # noqa: F401  registers autograd
    plan,
)

OPTIONS: dict[str, Any] = {"scale": 0.25, "causal": True}


def compile_for(arch: int, kind: str, head_dim: int, head_dim_v: int, **flags: Any) -> Compiled:
    of_dq, of_dkdv = op.tiles(head_dim, head_dim_v, large=arch >= 90)
    tile = of_dq if kind == "dq" else of_dkdv
    padded, padded_v = plan.padded_dims(head_dim, head_dim_v)
    constants = {
        "PACKED": False, "HAS_LEFT": False, "HAS_RIGHT": False, "SCORES": "raw",
        "D": head_dim, "DV": head_dim_v, "BLOCK_D": padded, "BLOCK_DV": padded_v,
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
    } | flags  # fmt: skip
    if not constants["PACKED"]:
        constants |= {"cu_seqlens_q": None, "cu_seqlens_k": None}
    pointers = {"stats": "*fp32", "cu_seqlens_q": "*i32", "cu_seqlens_k": "*i32"}
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    kernel = kernels.backward_dq if kind == "dq" else kernels.backward_dkdv
    return compile_kernel(kernel, arch, pointers, constants, options)


@pytest.mark.parametrize(
    ("kind", "head_dim", "causal"),
    [("dq", 64, True), ("dq", 128, True), *(("dkdv", dim, dim == 64) for dim in (64, 128))],
)
def test_hopper_code(kind, head_dim, causal):
    code = compile_for(90, kind, head_dim, head_dim, HAS_RIGHT=causal)
    assert len(code.in_loops("HGMMA")) >= 12
    # backward_dkdv at head dim 128 has no register to spare: some versions of Triton reload a few
    # values that the loop does not change.
    most = 20 if (kind, head_dim) == ("dkdv", 128) else 0
    assert code.count("LDL") <= most and code.count("STL") <= most
    assert len(code.in_loops("STL")) <= 2, "the main loop spills"
    # The loop loads by asynchronous copies of 16 bytes; single elements would use plain loads.
    assert code.in_loops("LDGSTS") and all("128" in text for text in code.in_loops("LDGSTS"))
    # The rows' statistics come two at a time, a register pair for each eight query rows.
    statistics = code.in_loops("LDG")
    assert all(".64" in text for text in statistics) and (kind == "dq") == (not statistics)
    assert code.shared_bytes <= 227 << 10
    mask = "causal_or_right" if causal else "full"
    assert code.name == f"attnscope_triton_backward_{kind}_bf16_d{head_dim}_dv{head_dim}_{mask}"


@pytest.mark.parametrize("kind", ["dq", "dkdv"])
@pytest.mark.parametrize(("arch", "head_dim", "head_dim_v"), [(80, 256, 256), (90, 192, 256)])
def test_every_option_compiles(arch, head_dim, head_dim_v, kind):
    flags = {"PACKED": True, "HAS_LEFT": True, "HAS_RIGHT": True, "SCORES": "capped"}
    code = compile_for(arch, kind, head_dim, head_dim_v, **flags)
    assert not code.in_loops("LDL") and not code.in_loops("STL")
    assert code.shared_bytes <= (227 if arch == 90 else 99) << 10


@pytest.mark.parametrize("head_dim_v", [64, 256])
def test_statistics_compile(head_dim_v):
    block = 32 if head_dim_v > 128 else 64
    constants = {"PACKED": True, "HAS_DLSE": True, "DV": head_dim_v, "BLOCK_M": block}
    pointers = dict.fromkeys(("lse", "dlse", "stats"), "*fp32") | {"cu_seqlens_q": "*i32"}
    code = compile_kernel(
        kernels.backward_stats, 90, pointers, constants | {"BLOCK_DV": head_dim_v}, {"num_warps": 4}
    )
    assert code.count("LDL") == 0
    wide = [text for _, text in code.sass if "LDG.E.128" in text]
    assert len(wide) == 2 * block * head_dim_v // 8 // 128, "rows are not loaded 16 bytes at a time"
    assert code.name == f"attnscope_triton_backward_stats_bf16_dv{head_dim_v}"


def test_schema_matches_the_op_without_its_variants():
    ours, theirs = (
        str(namespace.backward.default._schema).split(" -> ")[0]
        for namespace in (torch.ops.attnscope_triton, torch.ops.attnscope)
    )
    assert ours.replace("attnscope_triton", "attnscope") == theirs.replace(", int variant=0", "")


def call(*rows: int, heads: int = 4, dim: int = 64, device: str = "cpu") -> list[torch.Tensor]:
    """dout, q, k, v, out, lse of a call with q of shape [*rows, heads, dim]."""
    tensors = [torch.zeros(*rows, heads, dim, dtype=torch.half, device=device) for _ in range(5)]
    return [*tensors, torch.zeros(*rows[:-1], heads, rows[-1], device=device)]


def test_cpu_tensors_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match="attnscope_triton::backward, got cpu. Set TRITON_INTERP"):
        torch.ops.attnscope_triton.backward(*call(1, 4), scale=1.0)


def test_launch_arguments_are_in_the_order_of_the_kernels():
    q = torch.zeros(2, 100, 4, 72, dtype=torch.half)
    k, v, dout = q[:, :, :2], q[:, :, :2, :40], q[..., :40]
    launches = op.plan_launches(dout, q, k, v, has_dlse=True, **OPTIONS)
    for kernel, launch in zip(
        (kernels.backward_stats, kernels.backward_dq, kernels.backward_dkdv),
        launches[:3],
        strict=True,
    ):
        names = kernel.arg_names
        first = len(names) - len(launch.constants) - len(launch.numbers)
        last = first + len(launch.numbers)
        assert "cu_seqlens" in names[first - 1] and names[last:] == list(launch.constants)
        values = dict(zip(names[first:last], launch.numbers, strict=True))
        assert [values[name] for name in ("do_batch", "do_row", "do_head")] == [3600, 36, 9]
        assert [values[name] for name in ("stats_rows", "stats_size")] == [128, 1024]
    assert [values[name] for name in ("group", "blocks", "left", "right")] == [2, 1, -1, 0]
    assert values["scale"] == 0.25 and values["outer_scale"] == pytest.approx(0.25 * plan.LOG2E)


class TestOnFakeCuda:
    """Trace the op as torch.compile does, without a device."""

    @pytest.fixture(autouse=True)
    def some_hopper(self, monkeypatch):
        monkeypatch.setattr(plan, "is_large", lambda device: True)

    def test_shapes_and_flops(self):
        with FakeTensorMode(), FlopCounterMode(display=False) as counter:
            q, k, v, dout, out = (
                torch.empty(2, 60, heads, dim, device="cuda", dtype=torch.half)
                for heads, dim in ((4, 64), (2, 64), (2, 40), (4, 40), (4, 40))
            )
            lse = torch.empty(2, 4, 60, device="cuda")
            grads = torch.ops.attnscope_triton.backward(dout, q, k, v, out, lse, scale=1.0)
        assert [g.shape for g in grads] == [t.shape for t in (q, k, v)]
        assert all(g.dtype == torch.half and g.device.type == "cuda" for g in grads)
        assert counter.get_total_flops() == 2 * 2 * 4 * 60 * 60 * (3 * 64 + 2 * 40)

    @pytest.mark.parametrize("dynamic", [DimDynamic.STATIC, DimDynamic.DYNAMIC])
    def test_the_kernels_are_in_the_traced_graph(self, dynamic):
        def user(q, lse):
            return torch.ops.attnscope_triton.backward(q, q, q, q, q, lse, scale=0.1, causal=True)

        mode = FakeTensorMode(shape_env=ShapeEnv())
        context = StatelessSymbolicContext(dynamic_sizes=[dynamic] * 4)
        like = mode.from_tensor(torch.empty(2, 100, 4, 72), symbolic_context=context)
        with mode:
            q = torch.empty(like.shape, device="cuda", dtype=torch.bfloat16)
            lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], device="cuda")
            graph = make_fx(dispatch_functionalize(user))(q, lse)
        nodes = [n for n in graph.graph.nodes if "triton_kernel_wrapper" in str(n.target)]
        assert len(nodes) == 3
        arguments = nodes[-1].kwargs["kwargs"]
        assert (arguments["D"], arguments["BLOCK_D"], arguments["HAS_RIGHT"]) == (72, 128, True)

    def test_lengths_that_are_not_known_while_tracing(self):
        def user(x, lse, cu):
            longest = cu.diff().max().item()
            return torch.ops.attnscope_triton.backward(
                x, x, x, x, x, lse, None, cu, cu, scale=0.1, max_seqlen_q=longest,
                max_seqlen_k=longest,
            )  # fmt: skip

        with FakeTensorMode(shape_env=ShapeEnv()):
            x = torch.empty(100, 4, 64, device="cuda", dtype=torch.bfloat16)
            lse = torch.empty(4, 100, device="cuda")
            cu = torch.empty(5, device="cuda", dtype=torch.int32)
            graph = make_fx(dispatch_functionalize(user))(x, lse, cu)
        nodes = [n for n in graph.graph.nodes if "triton_kernel_wrapper" in str(n.target)]
        assert len(nodes) == 3


class TestLaunches:
    """The launcher across calls, with stand-ins for the kernels."""

    @pytest.fixture(autouse=True)
    def launched(self, monkeypatch) -> list[Any]:
        calls: list[Any] = []

        class Cache:
            def __init__(self, name: str) -> None:
                self.name = name

            def launch(self, device: int, launch: Any, tensors: Any) -> None:
                calls.append((self.name, launch, tensors))

            def launch_uncached(self, launch: Any, tensors: Any) -> None:
                calls.append((f"uncached {self.name}", launch, tensors))

        monkeypatch.setattr(op, "_KERNELS", tuple(map(Cache, ("stats", "dq", "dkdv"))))
        monkeypatch.setattr(op, "_PLANS", {})
        monkeypatch.setattr(plan, "INTERPRETED", True)  # CPU tensors pass the check
        return calls

    def launch(self, tensors: Any, *rest: Any, **options: Any) -> Any:
        return op._launch(0, (*tensors, *rest, *(None,) * (3 - len(rest))), OPTIONS | options)

    def test_a_call_of_a_known_kind_runs_the_same_launches(self, launched):
        first, second = call(2, 70), call(2, 70)
        self.launch(first)
        gradients = self.launch(second)
        assert [name for name, *_ in launched] == ["stats", "dq", "dkdv"] * 2
        for (_, one, _), (_, other, _) in zip(launched[:3], launched[3:], strict=True):
            assert one is other
        dout, q, k, v, out, lse = second
        (*_, of_stats), (*_, of_dq), (*_, of_dkdv) = launched[3:]
        stats = of_stats[4]
        assert stats.numel() >= 2 * 2 * 4 * 128 and stats.dtype == torch.float32
        want = (
            (out, dout, lse, None, stats, None),
            (q, k, v, dout, stats, gradients[0], None, None),
            (q, k, v, dout, stats, *gradients[1:], None, None),
        )
        for got, expected in zip((of_stats, of_dq, of_dkdv), want, strict=True):
            assert len(got) == len(expected)
            assert all(a is b for a, b in zip(got, expected, strict=True))

    def test_dlse_has_a_launch_of_its_own(self, launched):
        tensors = call(2, 70)
        for dlse in (None, tensors[-1], None):
            self.launch(tensors, dlse)
        flags = [launch.constants["HAS_DLSE"] for name, launch, _ in launched if name == "stats"]
        assert flags == [False, True, False]
        assert launched[3][2][3] is tensors[-1]

    def test_inputs_in_other_layouts_are_copied_in_each_call(self, launched):
        dout, *rest, lse = call(2, 70)
        for _ in range(2):
            self.launch((dout.mT.contiguous().mT, *rest, lse), torch.zeros(()).expand(lse.shape))
        for _, _, (out, dout, lse, dlse, *_) in launched[::3]:
            assert all(t.is_contiguous() for t in (out, dout, lse, dlse))

    def test_rows_of_a_stride_that_takes_64_bits_are_not_cached(self, launched):
        dout, q, *rest = call(1, 1)
        far = q.as_strided(q.shape, (8 * 2**31, 256, 64, 1))  # an unused stride
        self.launch((dout, far, *rest))
        assert [name for name, *_ in launched] == ["stats", "uncached dq", "uncached dkdv"]

    def test_gradients_of_packed_batches_begin_as_zeros(self, launched):
        tensors = call(70)
        cu = torch.tensor([0, 30, 60], dtype=torch.int32)
        rubbish = [torch.full_like(tensors[0], torch.nan) for _ in range(6)]
        del rubbish
        gradients = self.launch(tensors, None, cu, cu, max_seqlen_q=30, max_seqlen_k=30)
        assert all((g == 0).all() for g in gradients)
        assert all(arguments[-1] is cu for _, _, arguments in launched)

    def test_kernels_without_programs_are_not_launched(self, launched):
        assert self.launch(call(0, 70))[0].shape == (0, 70, 4, 64)
        assert launched == []
        dout, q, k, v, out, lse = call(2, 70)
        self.launch((dout[:, :0], q[:, :0], k, v, out[:, :0], lse[..., :0]))
        assert [name for name, *_ in launched] == ["dkdv"]  # dk and dv are zeros that it writes

    def test_refused_calls_are_refused_each_time(self, launched):
        dout, *rest = call(2, 70)
        for _ in range(2):
            with pytest.raises(TypeError, match="dout must have dtype torch.float16"):
                self.launch((dout.float(), *rest))
        assert launched == []

    def test_plans_are_bounded(self, monkeypatch):
        monkeypatch.setattr(op, "_MAX_PLANS", 3)
        for seqlen in range(1, 9):
            self.launch(call(1, seqlen))
            assert len(op._PLANS) <= 3
