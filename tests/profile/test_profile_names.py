"""Kernel symbols: distinct short names, correct categories and tensor core use."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest
from made_trace import RECORDED, RECORDINGS, recorded

from attnscope.profile.analysis.kernel_names import (
    CATEGORIES,
    LONGEST,
    category,
    short_name,
    uses_tensor_cores,
)

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@cache
def symbols() -> tuple[str, ...]:
    """Symbols of every recorded trace and result, and of impls that some results lack."""
    found = {work.name for name in RECORDINGS for work in recorded(name).trace.gpu}
    found.update((RECORDED / "symbols.txt").read_text().splitlines())
    for path in RESULTS.glob("*/*.json"):
        for row in json.loads(path.read_text())["rows"]:
            found.update(row.get("kernels") or ())
    return tuple(sorted(found))


def having(pattern: str) -> list[str]:
    """The recorded symbols that match the pattern; at least one."""
    hits = [symbol for symbol in symbols() if re.search(pattern, symbol)]
    assert hits, pattern
    return hits


def test_every_recorded_symbol_has_a_short_name_of_its_own() -> None:
    assert len(symbols()) > 60
    names = [short_name(symbol) for symbol in symbols()]
    assert len(set(names)) == len(names)
    for name in names:
        assert name and len(name) <= LONGEST
        assert "::" not in name and "void " not in name and "anonymous" not in name
        assert name == " ".join(name.split())


# Pattern of symbols -> expected name, with the pattern's groups. More symbols may be recorded, so a
# pattern contains every part of the name: all symbols that match it have that name.
FA2 = (
    r"^void pytorch_flash::flash_fwd{}_kernel<Flash_fwd_kernel_traits<(\d+), (\d+), (\d+), "
    r"[^<>]*cutlass::bfloat16_t, [^>]*> >, {}>"
)
FA3 = (
    r"FwdSm90<2, cute::tuple<cute::C<{}>, cute::C<1>, cute::C<1> >, cute::tuple<cute::C<(\d+)>, "
    r"cute::C<(\d+)>, cute::C<(\d+)> >, \d+, cutlass::bfloat16_t, float, cutlass::arch::Sm90, {}, "
    r"(?:true|false), true, false, false, false>, flash::CollectiveEpilogue"
)
ELEMENTWISE = r"^void at::native::{}elementwise_kernel<{}"
NAMES = {
    r"sm90::ForwardConfig<__nv_bfloat16, (\d+), (\d+)>": r"attnscope sm90 forward bf16 D\1 M\2",
    r"sm90::SplitForwardConfig<__nv_bfloat16, (\d+), (\d+), (\d+)>": (
        r"attnscope sm90 forward bf16 D\1 M\2 N\3 divided keys"
    ),
    r"sm90::ForwardConfig<__nv_bfloat16, (\d+), (\d+), (\d+)>": (
        r"attnscope sm90 forward bf16 D\1 M\2 N\3"
    ),
    r"sm90::GroupedForwardConfig<__nv_bfloat16, (\d+), (\d+), (\d+)>": (
        r"attnscope sm90 forward bf16 D\1 M\2 N\3 grouped"
    ),
    r"sm90::GroupedSplitForwardConfig<__nv_bfloat16, (\d+), (\d+), (\d+)>": (
        r"attnscope sm90 forward bf16 D\1 M\2 N\3 grouped divided keys"
    ),
    r"sm80::ForwardConfig<__nv_bfloat16, (\d+)>": r"attnscope sm80 forward bf16 D\1",
    r"^attnscope_triton_forward_bf16_d(\d+)_dv\1_(full|causal\w*)$": (
        r"attnscope triton forward bf16 D\1 \2"
    ),
    FA2.format("", "false, false, false, false, false, true, false, false"): (
        r"torch FA2 forward bf16 D\1 tile \2x\3"
    ),
    FA2.format("", "false, true, false, false, false, true, false, false"): (
        r"torch FA2 forward bf16 D\1 tile \2x\3 causal"
    ),
    FA2.format("", "false, true, false, false, true, true, false, false"): (
        r"torch FA2 forward bf16 D\1 tile \2x\3 causal even"
    ),
    FA2.format("_splitkv", "true, false, false, true, true, false, true, false"): (
        r"torch FA2 forward split-kv bf16 D\1 tile \2x\3 causal even"
    ),
    FA2.format("_splitkv_combine", r"\d+, 1, true"): (
        r"torch FA2 forward split-kv combine bf16 D\1 tile \2x\3 2 splits"
    ),
    FA3.format(1, "false, false, false, false, false, false, false"): (
        r"FA3 forward bf16 D\3 tile \1x\2"
    ),
    FA3.format(1, "true, false, false, false, false, false, false"): (
        r"FA3 forward bf16 D\3 tile \1x\2 causal"
    ),
    FA3.format(1, "true, false, false, true, false, false, false"): (
        r"FA3 forward bf16 D\3 tile \1x\2 causal varlen"
    ),
    FA3.format(2, "false, false, false, false, false, false, false"): (
        r"FA3 forward bf16 D\3 tile \1x\2 cluster 2"
    ),
    r"^fmha_cutlassF_bf16_aligned_(\d+x\d+)_(rf|gmem)_(sm\d+)\(": (
        r"efficient attention forward bf16 tile \1 \2 \3"
    ),
    r"^cudnn_\w*_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_(\w+x\w+)_4x1x1_cga1x1x1_kernel0_0$": (
        r"cuDNN sdpa sm90 forward f16 knob 7 \1 4x1x1 cga1x1x1"
    ),
    r"^void cudnn::fusion::compute_dot_do_o<": "cuDNN sdpa compute_dot_do_o",
    r"^void cudnn::fusion::compute_dot_do_o_specialized<true, (\d+)>": (
        r"cuDNN sdpa compute_dot_do_o_specialized D\1"
    ),
    ELEMENTWISE.format("vectorized_", r"(\d+), at::native::CUDAFunctor_add<c10::BFloat16>"): (
        r"elementwise add<bf16> vec\1"
    ),
    ELEMENTWISE.format("vectorized_", r"(\d+), at::native::BinaryFunctor<float, .*::MulFunctor<"): (
        r"elementwise mul<fp32> vec\1"
    ),
    ELEMENTWISE.format("vectorized_", r"(\d+), at::native::BinaryFunctor<bool, .*BitwiseAndFunc"): (
        r"elementwise bitwise_and<bool> vec\1"
    ),
    ELEMENTWISE.format("vectorized_", r"(\d+), at::native::AUnaryFunctor<float, .*CompareEqFunc"): (
        r"elementwise compare_eq scalar<fp32> vec\1"
    ),
    ELEMENTWISE.format("", r"128, \d, [\w:]+<at::native::BUnaryFunctor<float, .*MulFunctor"): (
        "elementwise mul scalar<fp32> strided"
    ),
    ELEMENTWISE.format("", r"128, \d, .*CompareFunctor<long>"): "elementwise compare<i64> strided",
    ELEMENTWISE.format("", r"128, \d, .*where_kernel_impl.*lambda\(bool, float, float\)"): (
        "elementwise where<fp32> strided"
    ),
    ELEMENTWISE.format("", r"128, \d, .*::masked_fill_kernel.*lambda\(c10::BFloat16, bool\)"): (
        "elementwise masked_fill<bf16> strided"
    ),
    ELEMENTWISE.format("vectorized_", r"(\d+), at::native::GeluBackward.*lambda\(c10::BFloat16"): (
        r"elementwise GeluBackward<bf16> vec\1"
    ),
    ELEMENTWISE.format("unrolled_", r"at::native::direct_copy_kernel.*lambda\(float\)"): (
        "elementwise direct_copy<fp32> unrolled"
    ),
    ELEMENTWISE.format("vectorized_", r"(\d+), at::native::FillFunctor<long>"): (
        r"elementwise fill<i64> vec\1"
    ),
    ELEMENTWISE.format("vectorized_", r"(\d+), at::native::FillFunctor<(bool)>"): (
        r"elementwise fill<\2> vec\1"
    ),
    r"^void at::native::triu_tril_kernel<bool, int, (\w+), (\d+), (\w+)>": (
        r"triu_tril<bool, i32, \1, \2, \3>"
    ),
    r"::reduce_kernel<\d+, ([2-9]), .*?sum_functor<c10::BFloat16": r"reduce sum<bf16> vec\1",
    r"::reduce_kernel<\d+, 1, .*?MeanOps<float": "reduce Mean<fp32>",
    r"::reduce_kernel<\d+, 1, .*?<bool, at::native::and_kernel_cuda": "reduce and<bool>",
    r"::multi_tensor_apply_kernel<.*?::UnaryOpFunctor<c10::BFloat16, .*?native::Sqrt<float>": (
        "multi_tensor UnaryOp Sqrt<bf16>"
    ),
    r"::vectorized_layer_norm_kernel<c10::BFloat16, float, (\w+)>": (
        r"vectorized_layer_norm<bf16, fp32, \1>"
    ),
    r"::softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, (\d+), (\w+), (\w+)>": (
        r"softmax_warp_forward<bf16, bf16, fp32, \1, \2, \3>"
    ),
    r"^(sm80_xmma_gemm_f32f32_f32f32_f32_\w\w_n)_tilesize(\w+)_stage(\d)_warpsize\w+?_ffma_align": (
        r"\1_\2_stage\3_ffma"
    ),
    r"^(nvjet_\w{1,66}|raw_\w{1,66}|Mem(?:cpy|set).{1,66})$": r"\1",
}


@pytest.mark.parametrize("pattern", NAMES)
def test_short_name(pattern: str) -> None:
    for symbol in having(pattern):
        found = re.search(pattern, symbol)
        assert found is not None and short_name(symbol) == found.expand(NAMES[pattern])


def test_names_of_cute_kernels() -> None:
    for symbol in having("FlashAttention(Forward|Backward)Sm"):
        assert re.fullmatch(r"FA4 (forward|backward) sm\d+ layouts [0-9a-f]{7}", short_name(symbol))


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
        "efficient attention forward bf16 tile 64x64 rf sm80", "attention", True,
    ),
    "fmha_cutlassB_f32_notaligned_64x64_k32_dropout_sm80(PyTorchMemEffAttention::Attention"
    "BackwardKernel<cutlass::arch::Sm80, float, false, true, false, 64, 64, 32>::Params)": (
        "efficient attention backward fp32 tile 64x64 k32 dropout sm80 unaligned",
        "attention", True,
    ),
    "fmha_cutlassF_f32_aligned_64x64_rf_sm70(PyTorchMemEffAttention::AttentionKernel<float, "
    "cutlass::arch::Sm70, true, 64, 64, 64, true, true>::Params)": (
        "efficient attention forward fp32 tile 64x64 rf sm70", "attention", False,
    ),
    "kernel_cutlass_kernel_flash_attncuteflash_fwd_combineFlashAttentionForwardCombine_object": (
        "FA4 forward combine layouts b16ca30", "attention", False,
    ),
    "void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64, 128, "
    "128, 8, 4, 4, 4, false, false, cutlass::bfloat16_t, Flash_kernel_traits<64, 128, 128, 8, "
    "cutlass::bfloat16_t> >, false, true, false, false, false, true, false>(Flash_bwd_params)": (
        "FA2 backward dq dk dv loop seqk parallel bf16 D64 tile 128x128 causal", "attention", True,
    ),
    "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 64, 4, false, false, "
    "cutlass::half_t, Flash_kernel_traits<64, 128, 64, 4, cutlass::half_t> >, true, false, true, "
    "true, false, false, false, false>(flash::Flash_fwd_params)": (
        "FA2 forward fp16 D64 tile 128x64 dropout local alibi uneven D", "attention", True,
    ),
    "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4, false, false, "
    "cutlass::half_t, Flash_kernel_traits<128, 64, 128, 4, cutlass::half_t> >, false, false, "
    "false, false, true, false, false, true>(flash::Flash_fwd_params)": (
        "FA2 forward split-kv fp16 D128 tile 64x128 one split append", "attention", True,
    ),
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::"
    "CollectiveMainloopFwdSm90<2, cute::tuple<cute::C<1>, cute::C<1>, cute::C<1> >, cute::tuple<"
    "cute::C<128>, cute::C<128>, cute::C<128> >, 128, cutlass::half_t, float, cutlass::arch::Sm90, "
    "false, true, true, false, true, false, false, true, true, true, true, false>, ...>(Params)": (
        "FA3 forward fp16 D128 tile 128x128 local softcap paged pack-gqa split", "attention", True,
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
# All kernels of a backward: those with products, and those before and after them.
OURS = "void attnscope::{0}::{1}_kernel<{2}>(attnscope::BackwardParams)"
BACKWARDS = {
    OURS.format("sm80", "backward", "attnscope::sm80::BackwardConfig<__half, 64, 128, 64> "): (
        "attnscope sm80 backward fp16 D64 M128 N64", True,
    ),
    OURS.format("sm80", "preprocess", "__half"): ("attnscope sm80 backward preprocess fp16", False),
    OURS.format("sm80", "postprocess", "__nv_bfloat16"): (
        "attnscope sm80 backward postprocess bf16", False,
    ),
    OURS.format("sm90", "backward", "attnscope::sm90::BackwardConfig<__nv_bfloat16, 1> "): (
        "attnscope sm90 backward bf16 tile 1", True,
    ),
    OURS.format("sm90", "backward_preprocess", "attnscope::sm90::BackwardConfig<__half, 0> "): (
        "attnscope sm90 backward preprocess fp16 tile 0", False,
    ),
    OURS.format("sm90", "backward_postprocess", "attnscope::sm90::BackwardConfig<__half, 0> "): (
        "attnscope sm90 backward postprocess fp16 tile 0", False,
    ),
    OURS.format(
        "sm90", "backward",
        "attnscope::sm90::WithParts<attnscope::sm90::BackwardConfig<__half, 3> > ",
    ): ("attnscope sm90 backward fp16 tile 3 parts", True),
    OURS.format(
        "sm90", "wide_postprocess",
        "attnscope::sm90::WithParts<attnscope::sm90::WideConfig<__nv_bfloat16, 5> > ",
    ): ("attnscope sm90 backward wide postprocess bf16 tile 5 parts", False),
    OURS.format("sm90", "wide_backward", "attnscope::sm90::WideConfig<__nv_bfloat16, 2> "): (
        "attnscope sm90 backward wide bf16 tile 2", True,
    ),
    OURS.format("sm90", "wide_postprocess", "attnscope::sm90::WideConfig<__nv_bfloat16, 3> "): (
        "attnscope sm90 backward wide postprocess bf16 tile 3", False,
    ),
    "attnscope_triton_backward_dq_bf16_d64_dv64_full": (
        "attnscope triton backward dq bf16 D64 full", True,
    ),
    "attnscope_triton_backward_dkdv_fp16_d128_dv64_causal_or_right_packed": (
        "attnscope triton backward dkdv fp16 D128 Dv64 causal_or_right_packed", True,
    ),
    "attnscope_triton_backward_stats_bf16_dv64": (
        "attnscope triton backward stats bf16 Dv64", False,
    ),
    "void cutlass::device_kernel<flash::FlashAttnBwdPreprocess<cute::tuple<cute::C<128>, "
    "cute::C<64> >, cutlass::bfloat16_t, float, cutlass::arch::Sm90, true, false> >(Params)": (
        "FA3 backward preprocess bf16 D64 tile 128", False,
    ),
    "void cutlass::device_kernel<flash::FlashAttnBwdPostprocessConvertdQ<cute::tuple<cute::C<80>, "
    "cute::C<128> >, cutlass::half_t, float, cutlass::arch::Sm90, 256, cute::TiledMMA<x>, false> "
    ">(Params)": ("FA3 backward postprocess fp16 D128 tile 80", False),
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x128x64_4x1x1_"
    "kernel0_0": (
        "cuDNN sdpa sm90 backward f16 knob 7 64x128x64 4x1x1", True,
    ),
    "triton_tem_fused_flex_attention_backward_3": (
        "triton_tem_fused_flex_attention_backward_3", True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("symbol", BACKWARDS, ids=lambda symbol: symbol[:60])
def test_kernels_of_a_backward_are_attention(symbol: str) -> None:
    assert category(symbol) == "attention"
    assert (short_name(symbol), uses_tensor_cores(symbol)) == BACKWARDS[symbol]


@pytest.mark.parametrize("symbol", OTHERS, ids=lambda symbol: symbol[:40])
def test_symbols_of_libraries(symbol: str) -> None:
    name, kind, tensor_cores = OTHERS[symbol]
    assert (short_name(symbol), category(symbol)) == (name, kind)
    assert uses_tensor_cores(symbol) is tensor_cores


def test_categories_of_recorded_kernels() -> None:
    assert {category(symbol) for symbol in symbols()} <= set(CATEGORIES)
    # Only a program's handwritten kernels and a spin wait have no known category.
    others = {short_name(symbol) for symbol in symbols() if category(symbol) == "other"}
    assert {name for name in others if not name.startswith("raw_")} == {"spin"}
    expected = {
        "GEMM": ("nvjet", "xmma_gemm", "cutlass_80_simt_sgemm"),
        "attention": (
            "attnscope_triton", "compute_dot_do_o", "convert_dq", "splitkv_combine",
            "fmha_cutlass", "flash_attncute", "prepare_varlen", "FlashAttnFwd", "flash_fwd_kernel",
        ),
        "norm": ("GammaBetaBackward", "layer_norm_grad_input", "vectorized_layer_norm"),
        "reduction": ("MeanOps", "sum_functor", "and_kernel_cuda", "MaxNanFunctor"),
        "memory": ("CatArrayBatchedCopy", "direct_copy_kernel", "FillFunctor<", "^Mem(cpy|set)"),
        "softmax": ("softmax_warp_forward", "cunn_SoftMaxForward"),
        "elementwise": (
            "CUDAFunctor_add<", "LerpFunctor", "GeluBackward", "pow_tensor_scalar",
            "triu_tril", "where_kernel", "masked_fill", "Compare(Eq)?Functor", "arange",
        ),
    }  # fmt: skip
    for kind, patterns in expected.items():
        for pattern in patterns:
            assert {category(symbol) for symbol in having(pattern)} == {kind}, pattern


KINDS = {
    "communication": (
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)",
        "void multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*, unsigned long)",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)",
        "nvshmemi_transfer_rma_kernel",
    ),
    "attention": (
        "_attn_fwd",
        "_attn_bwd_dkdv",
        "void flashinfer::BatchPrefillWithPagedKVCacheKernel<(flashinfer::PosEncodingMode)0>(P)",
        "void flashinfer::BatchDecodeWithPagedKVCacheKernel<(flashinfer::PosEncodingMode)0>(P)",
        "void flash_mla::decode::kernel<cutlass::bfloat16_t>(Params)",
    ),
    "GEMM": (
        "fused_moe_kernel",
        "cudnn_infer_volta_scudnn_128x64_relu_medium_nn_v1",
        "void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(Params)",
        "volta_sgemm_128x32_nt",
    ),
    "other": (
        "void fbgemm_gpu::permute_2D_data_kernel<false, int, int>(int, int, int const*)",
        "void causal_conv1d_fwd_kernel<Causal_conv1d_fwd_kernel_traits<128, 4>>(ConvParamsBase)",
        "void fft2d_r2c_32x32<float>(float2*, float const*, cudnn::reduced_divisor)",
    ),
    "elementwise": ("triton_poi_fused_all_gather_into_tensor_0",),
    "memory": ("void cudnn::ops::nchwToNhwcKernel<float, float>(Params)",),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_of_other_projects(kind: str) -> None:
    assert {symbol: category(symbol) for symbol in KINDS[kind]} == dict.fromkeys(KINDS[kind], kind)


@pytest.mark.parametrize(
    ("symbol", "name", "multiplies"),
    [
        ("dkdv_bf16_d64_dv64_full_left", "dkdv bf16 D64 full_left", True),
        ("dq_fp16_d72_dv40_causal_or_right", "dq fp16 D72 Dv40 causal_or_right", True),
        ("stats_bf16_dv64", "stats bf16 Dv64", False),
    ],
)
def test_triton_backward_kernels(symbol: str, name: str, multiplies: bool) -> None:
    symbol = f"attnscope_triton_backward_{symbol}"
    assert short_name(symbol).replace("backward ", "") == f"attnscope triton {name}"
    assert uses_tensor_cores(symbol) == multiplies


@pytest.mark.parametrize(
    "pattern",
    [
        "attnscope::sm[0-9]+::forward_kernel", "^attnscope_triton_forward", "FlashAttnFwdSm90",
        "flash_fwd(_splitkv)?_kernel", "FlashAttention(Forward|Backward)Sm", "wgmma",
        "fmha_cutlass._[a-z0-9]+_aligned_.*_sm80", "^nvjet",
    ],
)  # fmt: skip
def test_hand_written_matrix_kernels_count_as_tensor_core_work(pattern: str) -> None:
    assert all(uses_tensor_cores(symbol) for symbol in having(pattern))


@pytest.mark.parametrize(
    "pattern",
    [
        "ffma", "simt", "at::native", "(?i)softmax", "triu_tril", "combine_kernel", "dot_do_o",
        "convert_dq", "prepare_varlen", "^Mem(cpy|set)",
    ],
)  # fmt: skip
def test_other_kernels_do_not_count_as_tensor_core_work(pattern: str) -> None:
    assert not any(uses_tensor_cores(symbol) for symbol in having(pattern))
