"""Impls: reasons for missing ones, correct calls of other packages, verified kernels."""

import importlib
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from attnscope import numerics
from attnscope.bench.impls import ALIASES, BASELINES, DEFAULTS, IMPLS, Limits, Unsupported, resolve
from attnscope.bench.verification import names_of
from attnscope.bench.workloads import Workload
from attnscope.reference import attention_reference

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BASE = dict(seqlen=64, heads=2, head_dim=64)


def work(**options) -> Workload:
    return Workload.of(**(BASE | options))


def test_names_aliases_and_defaults_resolve():
    assert [impl.name for impl in resolve(["flash", "cuda", "sdpa-flash"])] == [
        "sdpa-flash",
        "cuda",
    ]
    for names in (ALIASES.values(), *DEFAULTS.values(), BASELINES.values()):
        resolve(list(names))
    assert not set(ALIASES) & set(IMPLS)
    with pytest.raises(
        ValueError, match="impl must be one of cuda, .*flash .= sdpa-flash.* got 'fash'"
    ):
        resolve(["fash"])


def test_every_impl_names_its_devices():
    for impl in IMPLS.values():
        if "cpu" not in impl.ran:
            assert impl.cannot(work(), CPU) == "runs on cuda only, not on cpu"
    assert IMPLS["cpu"].cannot(work(), CUDA) == "runs on cpu only, not on cuda"


@pytest.mark.parametrize(
    ("limits", "options", "reason"),
    [
        (dict(dtypes=("float16",)), {}, "dtype bfloat16: takes float16"),
        (dict(head_dim=32), {}, "head dim 64: takes at most 32"),
        (dict(head_dim=64), dict(head_dim_v=128), "head dim 128: takes at most 64"),
        (dict(head_dim_step=8), dict(head_dim=20), "head dim 20: takes multiples of 8"),
        (dict(own_head_dim_v=False), dict(head_dim_v=32), "head_dim_v 32: must equal"),
        (dict(window=False), dict(window=(3, -1)), "takes no sliding window"),
        (dict(softcap=False), dict(softcap=5.0), "takes no softcap"),
        (dict(packed=False), dict(seqlens=[64]), "takes no packed batch"),
        (dict(offset_causal=False), dict(seqlen_k=70, causal=True), "equal lengths only"),
    ],
)
def test_limits_are_reported(limits, options, reason):
    assert reason in str(Limits(**limits).broken_by(work(**options), CPU))
    assert Limits().broken_by(work(**options), CPU) is None


def test_limits_are_not_reported_where_they_do_not_matter():
    tight = Limits(window=False, softcap=False, packed=False, offset_causal=False)
    assert tight.broken_by(work(causal=True), CPU) is None
    assert tight.broken_by(work(seqlen_k=70), CPU) is None


def test_absent_packages_are_named():
    for name, package in (("fa2", "flash-attn"), ("fa3", "flash-attn-3"), ("fa4", "flash-attn-4")):
        absent = IMPLS[name].absent()
        if absent is not None:
            assert f"package {package}" in absent and "is not installed" in absent


MASKS = [
    {},
    dict(causal=True),
    dict(causal=True, seqlen_q=20, seqlen_k=33),
    dict(causal=True, seqlen_q=33, seqlen_k=20),
    dict(window=(5, 2)),
    dict(window=(4, -1), causal=True, seqlen_k=70),
    dict(heads_q=4, heads_kv=2, causal=True),
    dict(head_dim_v=32),
]


@pytest.mark.parametrize("name", ["naive", "sdpa-math", "sdpa-flash"])
@pytest.mark.parametrize("options", MASKS, ids=str)
def test_pytorch_is_asked_for_the_same_mask_as_we_mean(name, options):
    case = work(dtype="float64", **options)
    impl = IMPLS[name]
    assert impl.cannot(case, CPU) is None
    inputs = case.inputs(CPU, seed=1)
    try:
        out, lse = impl.make(case, inputs)()
    except Unsupported as refusal:
        assert name == "sdpa-flash" and "SDPA: " in str(refusal)
        return
    expected, _ = attention_reference(*inputs, causal=case.causal, window=case.window)
    assert lse is None
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)


def test_what_ran_on_a_cpu_is_verified_by_op_names():
    case = work(dtype="float32", causal=True)
    inputs = case.inputs(CPU, seed=0)
    names = {n: names_of(IMPLS[n].make(case, inputs), CPU) for n in DEFAULTS["cpu"]}
    assert names["cpu"] == ["attnscope::forward"]
    for ran, seen in names.items():
        for claimed in DEFAULTS["cpu"]:
            mismatch = IMPLS[claimed].mismatch(seen, "cpu")
            same = ran == claimed or {ran, claimed} == {"naive", "sdpa-math"}
            assert (mismatch is None) == same, (ran, claimed, seen)


def test_a_backend_that_refuses_is_a_reason():
    case = work(dtype="float32")
    with pytest.raises(Unsupported, match="SDPA: .*No viable backend"):
        IMPLS["sdpa-efficient"].make(case, case.inputs(CPU, seed=0))


KERNELS = {
    "cuda-sm80": "void attnscope::sm80::forward_kernel<attnscope::sm80::Config<__half, 64> >(...)",
    "triton": "attnscope_triton_forward_bf16_d64_dv64_causal_or_right",
    "sdpa-flash": "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128,"
    " 128, 64, 4, false, false, cutlass::bfloat16_t> >(pytorch_flash::Flash_fwd_params)",
    "sdpa-efficient": "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::"
    "AttentionKernel<cutlass::bfloat16_t, cutlass::arch::Sm80, true, 64, 64, 64>::Params)",
    "sdpa-cudnn": "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128",
    "fa2": "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64> >(flash::Flash_fwd_params)",
    "fa3": "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<"
    "flash::CollectiveMainloopFwdSm90<2, cute::tuple<cute::C<1> > > > > >(Params)",
    "naive": "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT",
}


@pytest.mark.parametrize("ran", KERNELS)
@pytest.mark.parametrize("claimed", KERNELS)
def test_kernel_names_match_one_impl_and_no_other(ran, claimed):
    mismatch = IMPLS[claimed].mismatch([KERNELS[ran], "void at::native::fill(int)"], "cuda")
    if ran == claimed:
        assert mismatch is None
    else:
        assert mismatch is not None and KERNELS[ran] in mismatch


def test_no_kernel_at_all_matches_nothing():
    assert "no kernel was seen" in str(IMPLS["cuda"].mismatch([], "cuda"))


# A stand-in that computes correctly and records its arguments.
FAKE = """
    import torch
    from attnscope.reference import attention_reference

    calls = []

    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1),
                        softcap=0.0, {returns}=False):
        calls.append(("dense", window_size, {returns}))
        window = tuple(-1 if side is None else side for side in window_size)
        return attention_reference(q, k, v, causal=causal, window=window, softcap=softcap)

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
                               max_seqlen_k=None, softmax_scale=None, causal=False,
                               window_size=(-1, -1), softcap=0.0, {returns}=False):
        calls.append(("packed", max_seqlen_q, max_seqlen_k))
        window = tuple(-1 if side is None else side for side in window_size)
        return attention_reference(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal,
                                   window=window, softcap=softcap)
"""


# The private functions of FlashAttention-3 that the public ones call.
FAKE_METADATA = """
    class fa3_fwd_cuda:
        @staticmethod
        def get_scheduler_metadata(batch, max_q, max_k, heads_q, heads_kv, dim, dim_v, dtype,
                                   lengths_k, cu_q, cu_k, cu_new, used_q, leftpad, page, max_new,
                                   causal, left, right, chunk, softcap, splits, pack_gqa, margin):
            calls.append(("metadata", batch, max_q, max_k, lengths_k.tolist(), causal, softcap))
            return "the metadata"

    def _flash_attn_forward(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                            softmax_scale, causal, window_size_left, window_size_right,
                            attention_chunk, softcap, scheduler_metadata, num_splits, pack_gqa,
                            sm_margin):
        calls.append(("forward", scheduler_metadata, num_splits))
        window = window_size_left, window_size_right
        return *attention_reference(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal,
                                    window=window, softcap=softcap, scale=softmax_scale), None, None
"""


@pytest.fixture
def fake_peers(tmp_path: Path, monkeypatch):
    """Stand-ins for the packages of FlashAttention 2 to 4 on the import path."""
    for module, returns in (
        ("flash_attn/__init__", "return_attn_probs"),
        ("flash_attn/flash_attn_interface", "return_attn_probs"),
        ("flash_attn/cute/__init__", "return_lse"),
        ("flash_attn/cute/interface", "return_lse"),
        ("fa3_fwd_interface", "return_attn_probs"),
    ):
        path = tmp_path / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(FAKE).format(returns=returns))
    with (tmp_path / "fa3_fwd_interface.py").open("a") as file:
        file.write(textwrap.dedent(FAKE_METADATA))
    flags = {"FLASHATTENTION_DISABLE_LOCAL": True, "FLASHATTENTION_DISABLE_FP16": True}
    (tmp_path / "fa3_fwd_config.py").write_text(f"CONFIG = {{'build_flags': {flags}}}")
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("flash_attn", "fa3_fwd")):
            del sys.modules[name]


@pytest.mark.parametrize("name", ["fa2", "fa3", "fa4"])
def test_packages_are_called_as_they_document(fake_peers, name):
    impl = IMPLS[name]
    assert impl.absent() is None
    module = {"fa2": "flash_attn", "fa3": "fa3_fwd_interface", "fa4": "flash_attn.cute"}[name]
    for options in (dict(causal=True, softcap=3.0), dict(window=(5, -1)), dict(seqlens=[40, 9])):
        case = work(dtype="float32", **options)
        out, lse = impl.make(case, case.inputs(CPU, seed=0))()

        def again(*inputs, out=out, lse=lse):
            return out.float(), lse.float()

        assert numerics.check_forward_fn(again, case, device="cpu", seed=0).passed
    calls = sys.modules[module].calls
    no = None if name == "fa4" else -1
    assert calls == [("dense", (no, no), True), ("dense", (5, no), True), ("packed", 40, 40)]


def test_metadata_of_flash_attention_3_is_made_once_and_used_by_every_call(fake_peers):
    impl = IMPLS["fa3-metadata"]
    case = work(dtype="float32", causal=True, softcap=3.0, seqlens=[(40, 50), (9, 9)])
    call = impl.make(case, case.inputs(CPU, seed=0))
    for _ in range(3):
        out, lse = call()
    verdict = numerics.check_forward_fn(
        lambda *inputs: (out.float(), lse.float()), case, device="cpu", seed=0
    )
    assert verdict.passed, verdict.reason
    calls = sys.modules["fa3_fwd_interface"].calls
    assert calls == [
        ("metadata", 2, 40, 50, [50, 9], True, True),
        *[("forward", "the metadata", 1)] * 3,
    ]


def test_metadata_is_for_packed_batches_and_needs_the_functions_below(fake_peers):
    impl = IMPLS["fa3-metadata"]
    assert "this one is dense" in str(impl.left_out(work()))
    packed = work(dtype="float32", seqlens=[8])
    assert impl.left_out(packed) is None
    names = ["prepare_varlen_num_blocks_kernel", KERNELS["fa3"]]
    assert "expected none that matches" in str(impl.mismatch(names, "cuda"))
    assert impl.mismatch(names[1:], "cuda") is None
    importlib.import_module("fa3_fwd_interface")
    del sys.modules["fa3_fwd_interface"]._flash_attn_forward
    with pytest.raises(Unsupported, match="has no get_scheduler_metadata or _flash_attn_forward"):
        impl.make(packed, packed.inputs(CPU, seed=0))


def test_a_build_that_lacks_a_feature_is_a_reason(fake_peers):
    left_out = IMPLS["fa3"].left_out
    assert "compiled with FLASHATTENTION_DISABLE_LOCAL" in str(left_out(work(window=(3, -1))))
    assert "FLASHATTENTION_DISABLE_FP16" in str(left_out(work(dtype="float16")))
    assert left_out(work(causal=True, softcap=1.0)) is None


def test_a_namespace_of_another_package_is_not_taken_for_flash_attention_2(tmp_path, monkeypatch):
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "interface.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    assert "no module flash_attn.flash_attn_interface" in str(IMPLS["fa2"].absent())
    assert IMPLS["fa4"].absent() is None
    sys.modules.pop("flash_attn", None)
    sys.modules.pop("flash_attn.cute", None)
