"""Workloads: exact FLOPs and bytes, round trips, errors that name the field, suites."""

import json
import math
import random
from dataclasses import replace

import pytest

from attnscope.bench.workloads import Workload, expand, load_suite, suite_names


def brute_pairs(work: Workload) -> int:
    left, right = work.window
    right = 0 if work.causal else right
    return sum(
        1
        for len_q, len_k in work.segments()
        for i in range(len_q)
        for j in range(len_k)
        if (left < 0 or j >= i + len_k - len_q - left)
        and (right < 0 or j <= i + len_k - len_q + right)
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (0, -1), (3, 2), (-1, 1), (100, 100)])
@pytest.mark.parametrize("lengths", [(4, 4), (5, 3), (3, 5), (1, 7), (0, 4), (4, 0), (33, 17)])
def test_visible_pairs_are_counted_exactly(lengths, window, causal):
    work = Workload.of(
        batch=2, seqlen_q=lengths[0], seqlen_k=lengths[1], heads=1, head_dim=8,
        causal=causal, window=window,
    )  # fmt: skip
    assert work.visible_pairs() == brute_pairs(work)


def test_visible_pairs_of_packed_segments():
    work = Workload.of(seqlens=[(0, 6), (5, 0), 4, "3x2"], heads=1, head_dim=8, causal=True)
    assert work.segments() == ((0, 6), (5, 0), (4, 4), (2, 2), (2, 2), (2, 2))
    assert (work.batch, work.seqlen_q, work.seqlen_k) == (6, 5, 6)
    assert work.visible_pairs() == brute_pairs(work) == 10 + 3 * 3


def test_flops_by_both_rules():
    full = Workload.of(seqlen=4, heads=1, head_dim=64)
    causal = Workload.of(seqlen=4, heads=1, head_dim=64, causal=True)
    assert full.flops() == full.flops_half_convention() == 4096
    assert causal.flops() == 2560
    assert causal.flops_half_convention() == 2048
    assert causal.flops_reported() == (2048, "causal=half")
    assert full.flops_reported() == (4096, "full")


def test_backward_is_two_and_a_half_forwards_where_head_dims_are_equal():
    shape = dict(seqlen=4, heads=1, head_dim=64)
    assert Workload.of(**shape, mode="backward").flops() == 2.5 * 4096
    assert Workload.of(**shape, mode="both").flops() == 3.5 * 4096
    wide = dict(seqlen=4, heads=1, head_dim=64, head_dim_v=32)
    assert Workload.of(**wide).flops() == 2 * 16 * (64 + 32)
    assert Workload.of(**wide, mode="backward").flops() == 2 * 16 * (3 * 64 + 2 * 32)
    assert Workload.of(**wide, mode="both").flops_half_convention() == 2 * 16 * (4 * 64 + 3 * 32)


@pytest.mark.parametrize(
    "options", [dict(window=(2, -1), seqlen=8), dict(causal=True, seqlen_q=3, seqlen_k=8)]
)
def test_masks_that_the_convention_does_not_describe_are_counted(options):
    work = Workload.of(heads=2, head_dim=8, **options)
    assert work.flops_reported() == (work.flops(), "visible pairs")


def test_bytes_count_keys_and_values_once_per_kv_head():
    work = Workload.of(
        batch=2, seqlen_q=3, seqlen_k=5, heads_q=8, heads_kv=2, head_dim=16, head_dim_v=32
    )
    query, key, value, out = 2 * 3 * 8 * 16, 2 * 5 * 2 * 16, 2 * 5 * 2 * 32, 2 * 3 * 8 * 32
    lse = 4 * 2 * 3 * 8
    assert work.bytes() == 2 * (query + key + value + out) + lse
    # q, k, v, out, dout and lse in; dq, dk and dv out.
    backward = 2 * (2 * query + 2 * key + 2 * value + 2 * out) + lse
    assert replace(work, mode="backward").bytes() == backward
    assert replace(work, mode="both").bytes() == work.bytes() + backward


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(seqlen=8, heads_q=3, heads_kv=2, head_dim=8),
            "heads_q must be a multiple of heads_kv .2., got 3",
        ),
        (dict(seqlen=-1, heads=1, head_dim=8), "seqlen_q must be an integer >= 0, got -1"),
        (dict(seqlen=8, heads=0, head_dim=8), "heads_q must be an integer >= 1, got 0"),
        (dict(seqlen=8, heads=1, head_dim=8, dtype="bf8"), "dtype must be one of .* got 'bf8'"),
        (
            dict(seqlen=8, heads=1, head_dim=8, mode="sideways"),
            "mode must be one of .* got 'sideways'",
        ),
        (
            dict(seqlen=8, heads=1, head_dim=8, deterministic=True),
            "deterministic must be used with mode b",
        ),
        (
            dict(seqlen=8, heads=1, head_dim=8, mode="both", deterministic=1),
            "must be true or false, got 1",
        ),
        (dict(seqlen=8, heads=1, head_dim=8, window=(-2, 0)), r"window must be .* got \(-2, 0\)"),
        (
            dict(seqlen=8, heads=1, head_dim=8, softcap=-1),
            "softcap must be finite and >= 0, got -1",
        ),
        (
            dict(seqlen=8, heads=1, head_dim=8, softcap=float("nan")),
            "softcap must be finite and >= 0, got nan",
        ),
        (dict(seqlen=8, heads=1, head_dim=8, colour="red"), "got 'colour'"),
        (dict(seqlen=8, heads=1), "head_dim must be given"),
        (
            dict(seqlen=100, tokens=512, heads=1, head_dim=8),
            "tokens must be a multiple of seqlen .100., got 512",
        ),
        (
            dict(seqlen=8, hidden=100, head_dim=64),
            "hidden must be a multiple of head_dim .64., got 100",
        ),
        (dict(seqlens=[(1, 2, 3)], heads=1, head_dim=8), "seqlens"),
    ],
)
def test_bad_fields_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Workload.of(**options)


def test_seqlens_must_agree_with_the_shape():
    with pytest.raises(ValueError, match="as in seqlens, got"):
        Workload(
            batch=3, seqlen_q=4, seqlen_k=4, heads_q=1, heads_kv=1, head_dim=8, head_dim_v=8,
            seqlens=((4, 4),),
        )  # fmt: skip


@pytest.mark.parametrize("suite", suite_names())
def test_suites_load_and_survive_json(suite):
    for device in ("cuda", "cpu"):
        try:
            works = load_suite(suite, device)
        except ValueError as error:
            assert "must have cases for cpu" in str(error)
            continue
        assert works
        assert len({work.id for work in works}) == len(works)
        for work in works:
            assert Workload.from_dict(json.loads(json.dumps(work.to_dict()))) == work


def test_the_paper_suite_is_the_papers():
    works = load_suite("paper", "cuda")
    assert len(works) == 3 * 2 * 6
    assert {work.head_dim for work in works} == {64, 128, 256}
    assert {work.seqlen_q for work in works} == {512 << n for n in range(6)}
    assert all(work.batch * work.seqlen_q == 16384 for work in works)
    assert all(work.heads_q * work.head_dim == 2048 for work in works)


def test_the_tiny_suite_is_what_its_seed_draws():
    rng = random.Random(0)

    def spread(least: int, most: int) -> int:
        return round(math.exp(rng.uniform(math.log(least), math.log(most))))

    works = load_suite("tiny", "cuda")
    assert len(works) == 12
    for work in works:
        sequences = spread(3, 200)
        drawn = [(1 + int(70 * rng.random()), spread(70, 2300)) for _ in range(sequences)]
        assert work.seqlens == tuple(drawn)
        assert (work.heads_q, work.heads_kv, work.head_dim, work.causal) == (32, 8, 128, True)


def test_every_cell_of_the_models_suite_is_named_after_its_model():
    works = load_suite("models", "cuda")
    assert all(work.label for work in works)
    assert {work.dtype for work in works} == {"bfloat16", "float16"}
    names = " ".join(str(work.label) for work in works)
    for model in ("Llama", "Qwen", "Gemma 2", "Gemma 3", "Mistral", "gpt-oss", "DeepSeek", "ViT"):
        assert model in names


def test_a_label_is_no_part_of_what_is_computed():
    plain = dict(seqlen=8, heads=1, head_dim=8)
    labelled = Workload.of(**plain, label="Llama")
    assert labelled == Workload.of(**plain) and labelled.id == Workload.of(**plain).id
    assert Workload.from_dict(labelled.to_dict()).label == "Llama"
    with pytest.raises(ValueError, match="label must be text, got ''"):
        Workload.of(**plain, label="")


def test_ids_distinguish_fields():
    base = dict(seqlen=64, heads_q=4, heads_kv=2, head_dim=64)
    others = [
        dict(causal=True), dict(window=(3, -1)), dict(softcap=5.0), dict(head_dim_v=32),
        dict(dtype="float16"), dict(seqlens=[64]), dict(seqlens=[64, 64]), dict(batch=2),
        dict(mode="backward"), dict(mode="both"), dict(mode="backward", deterministic=True),
    ]  # fmt: skip
    ids = {Workload.of(**{**base, **other}).id for other in [{}, *others]}
    assert len(ids) == len(others) + 1
    assert Workload.of(**base).id == "forward-bf16-b1-q64-k64-h4-kv2-d64"


def test_phases_name_what_is_not_a_plain_forward():
    base = dict(seqlen=64, heads=4, head_dim=64)
    assert Workload.of(**base).phase == ""
    assert Workload.of(**base, mode="both").phase == "forward and backward"
    strict = Workload.of(**base, mode="backward", deterministic=True)
    assert strict.phase == "backward, deterministic"
    assert Workload.from_dict(json.loads(json.dumps(strict.to_dict()))) == strict


def test_lists_are_multiplied_out_and_list_valued_fields_are_not():
    works = expand(dict(seqlen=[1, 2], heads=1, head_dim=8, window=[3, 4]))
    assert [(work.seqlen_q, work.window) for work in works] == [(1, (3, 4)), (2, (3, 4))]
    works = expand(dict(seqlen=1, heads=1, head_dim=8, window=[[3, 4], [-1, 0]]))
    assert [work.window for work in works] == [(3, 4), (-1, 0)]
    (work,) = expand(dict(seqlens=[[1, 2], [3, 4]], heads=1, head_dim=8))
    assert work.seqlens == ((1, 2), (3, 4))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cuda: [{seqlen: 8, heads: 1}]", "cuda case 1: head_dim must be given"),
        ("cuda: [{seqlen: 8, heads: 1, head_dim: x}]", "head_dim must be an integer >= 1, got 'x'"),
        ("[1, 2]", "suite must be a mapping with any, cpu, cuda, description"),
        ("gpu: []", "suite must be a mapping with"),
        ("a: [", "suite must be YAML"),
        (
            "cpu: [{seqlen: 8, heads: 1, head_dim: 8}]",
            "suite must have cases for cuda, got .* with cpu",
        ),
    ],
)
def test_bad_suite_files_are_explained(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_suite(str(path), "cuda")


def test_a_suite_that_is_not_there_lists_those_that_are():
    with pytest.raises(ValueError, match="suite must be one of .*paper.*, or a YAML file"):
        load_suite("papers", "cuda")
