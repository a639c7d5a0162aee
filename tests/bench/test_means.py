"""Reports of means name the peers and the lengths that were averaged."""

from dataclasses import replace
from typing import Any

import pytest
from synthetic import lost_row, ok_row

from attnscope.bench.means import by_length, over_baseline, over_fastest_peer, span
from attnscope.bench.workloads import Workload, load_suite

SHORT, LONG, LONGER = (
    Workload.of(head_dim=64, seqlen=length, tokens=4096, hidden=2048) for length in (64, 512, 1024)
)


def rows() -> list[dict[str, Any]]:
    """Rows twice as fast as the fastest peer at 64 tokens, equally fast at longer lengths."""
    return [
        ok_row("cuda", SHORT, 1.0), ok_row("fa3", SHORT, 2.0), ok_row("sdpa-cudnn", SHORT, 3.0),
        ok_row("cuda", LONG, 1.0), ok_row("fa3", LONG, 1.25), ok_row("sdpa-cudnn", LONG, 1.0),
        ok_row("cuda", LONGER, 1.0), ok_row("fa3", LONGER, 0.81), ok_row("triton", LONGER, 0.5),
        lost_row("sdpa-cudnn", LONGER, "skipped", "takes no packed batch"),
    ]  # fmt: skip


def test_means_over_the_fastest_peer_name_peers_and_lengths() -> None:
    beyond, shortest, triton = over_fastest_peer(rows())
    assert (beyond.impl, beyond.lengths, beyond.count) == ("cuda", "S 512 to 1,024", 2)
    assert beyond.ratio == pytest.approx(0.9) and beyond.least == pytest.approx(0.81)
    assert (beyond.peers, beyond.some) == (("fa3",), ("sdpa-cudnn",))
    assert (shortest.lengths, shortest.ratio) == ("S 64", pytest.approx(2.0))
    assert shortest.peers == ("fa3", "sdpa-cudnn")
    assert triton.impl == "triton" and triton.count == 1
    assert beyond.text() == (
        "cuda over the fastest peer of each workload, S 512 to 1,024: 0.900, least 0.810 "
        "(2 workloads; peers fa3; on part of them sdpa-cudnn)"
    )


def test_there_is_no_mean_without_peers() -> None:
    assert over_fastest_peer([ok_row("cuda", LONG, 1.0), ok_row("triton", LONG, 1.0)]) == []


def test_64_tokens_of_the_short_suite_stand_apart() -> None:
    assert list(by_length(load_suite("short", "cuda"))) == ["S 128 to 512", "S 64"]
    assert list(by_length(load_suite("paper", "cuda"))) == ["S 512 to 16,384"]
    assert span(load_suite("models", "cuda")) == "S 257 to 131,072"


def test_ratios_to_the_baseline_are_by_lengths() -> None:
    short, long = (
        ok_row("cuda", work, 1.0, ratio=ratio, baseline="sdpa-flash")
        for work, ratio in ((SHORT, 3.0), (LONG, 2.0))
    )
    assert over_baseline([short, long]) == (
        "sdpa-flash",
        {"S 512": {"cuda": [2.0]}, "S 64": {"cuda": [3.0]}},
    )


def test_modes_have_means_of_their_own() -> None:
    backward = replace(LONG, mode="backward")
    strict = replace(backward, deterministic=True)
    assert by_length([LONG, backward, strict, LONGER]) == {
        "S 512 to 1,024": [LONG, LONGER],
        "backward, S 512": [backward],
        "backward, deterministic, S 512": [strict],
    }
    rows = [ok_row(impl, work, 1.0) for impl in ("cuda", "fa4") for work in (LONG, backward)]
    assert [mean.lengths for mean in over_fastest_peer(rows)] == ["S 512", "backward, S 512"]
