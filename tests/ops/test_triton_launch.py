"""The launcher's cache across Triton calls, with a stand-in for the compiled kernel."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not launched", allow_module_level=True)

from attnscope.triton import forward as op  # noqa: E402
from attnscope.triton import launcher  # noqa: E402

OPTIONS = {"scale": 0.25, "causal": True}


class Compiled:
    """Stands in for triton.compiler.CompiledKernel."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, stream: self.calls.append(("cached", grid, args, stream))


class Jit:
    """Stands in for a JITFunction: each call returns the compiled kernel."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **constants: Any) -> Compiled:
            self.calls.append(("searched", grid, args, constants))
            return Compiled(self.calls)

        return launch

    @property
    def ways(self) -> list[str]:
        return [call[0] for call in self.calls]


@pytest.fixture
def jit(monkeypatch) -> Jit:
    stand_in = Jit()
    monkeypatch.setattr(launcher, "CompiledKernel", Compiled)
    monkeypatch.setattr(launcher, "_current_stream", lambda device: 7)
    monkeypatch.setattr(op.plan, "INTERPRETED", True)  # CPU tensors pass the check
    monkeypatch.setattr(op, "_KERNELS", launcher.KernelCache(stand_in))
    monkeypatch.setattr(op, "_PLANS", {})
    return stand_in


def tensors(seqlen: int = 70, dim: int = 64, dtype: torch.dtype = torch.half) -> list[torch.Tensor]:
    return [torch.zeros(2, seqlen, 4, dim, dtype=dtype) for _ in range(3)]


def launch(q, k, v, cu_q=None, cu_k=None, **options):
    return op._launch(0, q, k, v, cu_q, cu_k, OPTIONS | options)


def test_the_second_call_of_a_kind_launches_what_the_first_found(jit):
    q, k, v = tensors()
    launch(q, k, v)
    out, lse = launch(k, v, q)
    assert jit.ways == ["searched", "cached"]
    (_, grid, first, constants), (_, grid_again, second, stream) = jit.calls
    assert grid == grid_again == (8, 1, 1) and stream == 7
    pointers = [t.data_ptr() for t in (k, v, q, out, lse)]
    assert list(second[:7]) == [*pointers, 0, 0]
    names = op.triton_forward.arg_names
    assert len(second) == len(names)
    assert second[7 : len(first)] == first[7:]
    found = dict(zip(names[len(first) :], second[len(first) :], strict=True))
    assert found == {name: constants[name] for name in found}


@pytest.mark.parametrize(
    "change",
    [{"dtype": torch.bfloat16}, {"dim": 72}, {"dim": 256}],
    ids=str,
)
def test_another_kernel_is_searched_for(jit, change):
    launch(*tensors())
    launch(*tensors(**change))
    launch(*tensors())
    assert jit.ways == ["searched", "searched", "cached"]


@pytest.mark.parametrize("options", [{"causal": False}, {"window_left": 3}, {"softcap": 1.0}])
def test_another_mask_or_score_has_a_kernel_of_its_own(jit, options):
    for given in ({}, options, {}, options):
        launch(*tensors(), **given)
    assert jit.ways == ["searched", "searched", "cached", "cached"]
    assert jit.calls[2][2] != jit.calls[3][2]


def test_other_lengths_and_scales_run_the_same_kernel_with_other_numbers(jit):
    launch(*tensors())
    launch(*tensors(seqlen=200))
    launch(*tensors(), scale=0.5)
    assert jit.ways == ["searched", "cached", "cached"]
    assert jit.calls[1][1] == (16, 1, 1)
    scale = op.triton_forward.arg_names.index("outer_scale")
    assert jit.calls[2][2][scale] == pytest.approx(2 * jit.calls[0][2][scale])


def test_unaligned_pointers_are_left_to_triton(jit):
    q, k, v = tensors()
    shifted = torch.zeros(q.numel() + 4, dtype=q.dtype)[4:].view(q.shape)
    for _ in range(2):
        launch(q, k, v)
        launch(shifted, k, v)
    assert jit.ways == ["searched", "searched", "cached", "searched"]


def test_integers_beyond_32_bits_are_left_to_triton(jit):
    q, k, v = tensors(seqlen=1)
    q, k, v = q[:1], k[:1], v[:1]
    far = q.as_strided(q.shape, (8 * 2**31, 256, 64, 1))  # an unused stride
    for _ in range(2):
        launch(q, k, v)
        launch(far, k, v)
    assert jit.ways == ["searched", "searched", "cached", "searched"]


def test_a_copied_input_is_copied_in_each_call(jit):
    q, k, v = tensors()
    last = q.mT.contiguous().mT
    launch(last, k, v)
    launch(last, k, v)
    launch(q, k, v)
    assert jit.ways == ["searched", "cached", "cached"]
    assert last.data_ptr() not in jit.calls[1][2] and q.data_ptr() in jit.calls[2][2]


def test_refused_calls_are_refused_each_time(jit):
    q, k, v = tensors()
    launch(q, k, v)
    for _ in range(2):
        with pytest.raises(TypeError, match="k must have q's dtype"):
            launch(q, k.float(), v)
        with pytest.raises(ValueError, match="scale must be 0 or a normal"):
            launch(q, k, v, scale=1e-45)
    assert jit.ways == ["searched"]


def test_packed_batches_have_rows_of_no_segment(jit):
    q, k, v = (x[0] for x in tensors())
    cu = torch.tensor([0, 30, 60], dtype=torch.int32)
    for _ in range(2):
        out, lse = launch(q, k, v, cu, cu, max_seqlen_q=30, max_seqlen_k=30)
        assert (out == 0).all() and (lse == -torch.inf).all()
    assert jit.ways == ["searched", "cached"]
    assert cu.data_ptr() in jit.calls[1][2]
    with pytest.raises(TypeError, match="cu_seqlens_k must have dtype torch.int32"):
        launch(q, k, v, cu, cu.long(), max_seqlen_q=30, max_seqlen_k=30)


def test_calls_without_programs_launch_nothing(jit):
    q, k, v = tensors()
    assert launch(q[:0], k[:0], v[:0])[0].shape == (0, 70, 4, 64)
    assert jit.ways == []


def test_plans_are_bounded(jit, monkeypatch):
    monkeypatch.setattr(op, "_MAX_PLANS", 3)
    for seqlen in range(1, 9):
        launch(*tensors(seqlen))
        assert len(op._PLANS) <= 3
