"""Kernel symbols: short names keep kernels apart, categories and tensor cores are right."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest
from made_trace import RECORDED, recorded

from attnscope.profile.names import (
    CATEGORIES,
    LONGEST,
    category,
    short_name,
    uses_tensor_cores,
)

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


@cache
def symbols() -> tuple[str, ...]:
    """Symbols of every recorded trace and of the results of record."""
    found = {work.name for name in RECORDED for work in recorded(name).trace.gpu}
    for path in RESULTS.glob("*/*.json"):
        for row in json.loads(path.read_text())["rows"]:
            found.update(row.get("kernels") or ())
    return tuple(sorted(found))


def having(*parts: str) -> list[str]:
    """The recorded symbols that have all the parts; one at least."""
    hits = [symbol for symbol in symbols() if all(part in symbol for part in parts)]
    assert hits, parts
    return hits


def test_every_recorded_symbol_has_a_short_name_of_its_own() -> None:
    assert len(symbols()) > 60
    names = [short_name(symbol) for symbol in symbols()]
    assert len(set(names)) == len(names)
    for name in names:
        assert name and len(name) <= LONGEST
        assert "::" not in name and "void " not in name and "anonymous" not in name
        assert name == " ".join(name.split())


NAMES = {
    ("sm90::ForwardConfig<__nv_bfloat16, 128, 128>",): "attnscope sm90 forward bf16 D128 M128",
    ("sm90::ForwardConfig<__nv_bfloat16, 64, 192>",): "attnscope sm90 forward bf16 D64 M192",
    ("sm80::ForwardConfig<__nv_bfloat16, 256>",): "attnscope sm80 forward bf16 D256",
    ("attnscope_triton_forward", "d64_dv64_causal"): (
        "attnscope triton forward bf16 D64 causal_or_right"
    ),
    ("CUDAFunctor_add<c10::BFloat16>",): "elementwise add<bf16> vec8",
    ("elementwise_kernel<4, at::native::BinaryFunctor", "MulFunctor"): (
        "elementwise mul<fp32> vec4"
    ),
    ("elementwise_kernel<128, 2", "BUnaryFunctor"): "elementwise mul scalar<fp32> strided",
    ("GeluBackward",): "elementwise GeluBackward<bf16> vec8",
    ("unrolled_elementwise_kernel",): "elementwise direct_copy<fp32> unrolled",
    ("FillFunctor<long>",): "elementwise fill<i64> vec2",
    ("reduce_kernel<128", "sum_functor"): "reduce sum<bf16>",
    ("reduce_kernel<512", "MeanOps"): "reduce Mean<fp32>",
    ("UnaryOpFunctor", "Sqrt"): "multi_tensor UnaryOp Sqrt<bf16>",
    ("vectorized_layer_norm_kernel",): "vectorized_layer_norm<bf16, fp32, false>",
    ("fprop_wgmma_f16_knob_7_64x128x64",): (
        "cuDNN sdpa sm90 forward f16 knob 7 64x128x64 4x1x1 cga1x1x1"
    ),
    ("compute_dot_do_o",): "cuDNN sdpa compute_dot_do_o",
    ("cute::C<192>, cute::C<128>, cute::C<64>",): "FA3 forward bf16 D64 tile 192x128 causal",
    ("CollectiveMainloopFwdSm90<2, cute::tuple<cute::C<2>", "C<128>, cute::C<176>, cute::C<128>"): (
        "FA3 forward bf16 D128 tile 128x176 cluster 2"
    ),
    ("C<128>, cute::C<176>, cute::C<128>", "VarlenDynamic"): (
        "FA3 forward bf16 D128 tile 128x176 varlen"
    ),
    ("flash_fwd_kernel<", "traits<64, 128, 128", " >, false, true, false, false, false"): (
        "torch FA2 forward bf16 D64 tile 128x128 causal"
    ),
    ("flash_fwd_kernel<", "traits<64, 128, 128", " >, false, false, false, false, true"): (
        "torch FA2 forward bf16 D64 tile 128x128 even"
    ),
    ("flash_fwd_splitkv_kernel<", "traits<64, 64, 256"): (
        "torch FA2 forward split-kv bf16 D64 tile 64x256 causal even"
    ),
    ("xmma_gemm", "_nn_n_tilesize128x64x8"): (
        "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_128x64x8_stage3_ffma"
    ),
    ("FillFunctor<bool>",): "elementwise fill<bool> vec4",
    ("nvjet_sm90_tst_128x64",): "nvjet_sm90_tst_128x64_64x8_1x2_h_bz_NNT",
    ("raw_add",): "raw_add",
    ("Device -> Pinned",): "Memcpy DtoH (Device -> Pinned)",
}


@pytest.mark.parametrize("parts", NAMES, ids=lambda parts: parts[0][:30])
def test_short_name(parts: tuple[str, ...]) -> None:
    assert [short_name(symbol) for symbol in having(*parts)] == [NAMES[parts]]


def test_names_of_cute_kernels() -> None:
    for symbol in having("flash_attncute"):
        assert re.fullmatch("FA4 forward sm90 layouts [0-9a-f]{7}", short_name(symbol))


def test_long_names_are_cut_and_stay_apart() -> None:
    base = "void my::kernel<" + ", ".join(["some::Type"] * 30)
    names = {short_name(f"{base}, {last}>(int)") for last in ("A", "B")}
    assert len(names) == 2 and all(len(name) == LONGEST for name in names)
    assert short_name(f"{base}>(int)") == short_name(f"{base}>(int)")


OTHERS = {
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x64_64x3_nn_align8>"
    "(cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x64_64x3_nn_align8::Params)": (
        "cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x64_64x3_nn", "GEMM", True,
    ),
    "ampere_sgemm_128x64_tn": ("ampere_sgemm_128x64_tn", "GEMM", False),
    "ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x4_nn": (
        "ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x4_nn", "GEMM", True,
    ),
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_"
    "segment_k_off_kernel__5x_cublas": (
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_128x128x64_warpgroupsize1x1x1", "GEMM", True,
    ),
    "sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x16_stage4_warpsize2x2x1_"
    "tensor16x8x8_execute_kernel__5x_cublas": (
        "sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_128x128x16_stage4_tensor16x8x8", "GEMM", True,
    ),
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, false>(int)": (
        "splitKreduce<32, 16, i32, fp32, bf16, false>", "GEMM", False,
    ),
    "void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, 8, "
    "false, false>(c10::BFloat16*, c10::BFloat16 const*, int, int, int, bool const*, int, bool)": (
        "softmax_warp_forward<bf16, bf16, fp32, 8, false, false>", "softmax", False,
    ),
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<"
    "cutlass::bfloat16_t, cutlass::arch::Sm80, true, 64, 64, 64, true, true>::Params)": (
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention", True,
    ),
    "void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64, 128, "
    "128, 8, 4, 4, 4, false, false, cutlass::bfloat16_t, Flash_kernel_traits<64, 128, 128, 8, "
    "cutlass::bfloat16_t> >, false, true, false, false, false, true, false>(Flash_bwd_params)": (
        "FA2 backward dq dk dv loop seqk parallel bf16 D64 tile 128x128 causal", "attention", True,
    ),
    "triton_poi_fused_add_mul_0": ("triton_poi_fused_add_mul_0", "elementwise", False),
    "triton_poi_fused__scaled_dot_product_flash_attention_clone_1": (
        "triton_poi_fused__scaled_dot_product_flash_attention_clone_1", "elementwise", False,
    ),
    "triton_per_fused__softmax_2": ("triton_per_fused__softmax_2", "softmax", False),
    "triton_red_fused_native_layer_norm_3": (
        "triton_red_fused_native_layer_norm_3", "norm", False,
    ),
    "triton_red_fused_sum_4": ("triton_red_fused_sum_4", "reduction", False),
    "triton_tem_fused_mm_5": ("triton_tem_fused_mm_5", "GEMM", True),
    "triton_tem_fused_flex_attention_6": ("triton_tem_fused_flex_attention_6", "attention", True),
    "_Z9my_kernelPfi": ("_Z9my_kernelPfi", "other", False),
}  # fmt: skip


@pytest.mark.parametrize("symbol", OTHERS, ids=lambda symbol: symbol[:40])
def test_symbols_of_libraries(symbol: str) -> None:
    name, kind, tensor_cores = OTHERS[symbol]
    assert (short_name(symbol), category(symbol)) == (name, kind)
    assert uses_tensor_cores(symbol) is tensor_cores


def test_categories_of_recorded_kernels() -> None:
    assert {category(symbol) for symbol in symbols()} <= set(CATEGORIES)
    assert [symbol for symbol in symbols() if category(symbol) == "other"] == ["raw_add"]
    expected = {
        "GEMM": ("nvjet_sm90_tst_128x64", "xmma_gemm"),
        "attention": (
            "attnscope_triton",
            "compute_dot_do_o",
            "convert_dq",
            "splitkv_combine",
            "fmha_cutlassF",
            "flash_attncute",
            "prepare_varlen",
        ),
        "norm": ("GammaBetaBackward", "layer_norm_grad_input", "vectorized_layer_norm"),
        "reduction": ("MeanOps", "sum_functor"),
        "memory": ("CatArrayBatchedCopy", "unrolled_elementwise", "FillFunctor<long>", "Pageable"),
        "softmax": ("softmax_warp_forward", "cunn_SoftMaxForward"),
        "elementwise": ("CUDAFunctor_add<", "LerpFunctor", "GeluBackward", "pow_tensor_scalar"),
    }
    for kind, parts in expected.items():
        for part in parts:
            assert {category(symbol) for symbol in having(part)} == {kind}, part


def test_hand_written_matrix_kernels_count_as_tensor_core_work() -> None:
    using = {symbol for symbol in symbols() if uses_tensor_cores(symbol)}
    for part in (
        "attnscope::sm90", "attnscope::sm80", "FlashAttnFwdSm90", "nvjet", "wgmma", "fmha_cutlassF",
        "flash_attncute",
    ):  # fmt: skip
        assert set(having(part)) <= using, part
    for part in (
        "ffma",
        "at::native",
        "combine_kernel",
        "dot_do_o",
        "convert_dq",
        "Memcpy",
        "Memset",
    ):
        assert not set(having(part)) & using, part
