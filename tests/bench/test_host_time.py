"""`attnscope host-time`: blocks of calls, by impl and by mode."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from attnscope import cli
from attnscope.bench import host_time
from attnscope.bench.host_time import measure_host_time

CPU = torch.device("cpu")
EAGER = host_time.MODES[:-1]


@pytest.fixture(autouse=True)
def short_warmup(monkeypatch):
    monkeypatch.setattr(host_time, "WARMUP_S", 0.0)


def test_every_impl_is_timed_in_every_mode():
    rows = measure_host_time(CPU, modes=EAGER, calls=3, blocks=5)
    assert [(row.impl, row.mode) for row in rows] == [
        (impl, mode) for impl in ("cpu", "sdpa-flash") for mode in EAGER
    ]
    assert all(0 < row.p20_us <= row.median_us < 1e6 for row in rows)
    base = {row.mode: row.median_us for row in rows if row.impl == "sdpa-flash"}
    for row in rows:
        assert row.ratio == pytest.approx(row.median_us / base[row.mode])


def test_a_call_is_timed_in_the_mode_that_its_row_names(monkeypatch):
    seen = set()

    def call(q, k, v, impl):
        seen.add((q.requires_grad, torch.is_grad_enabled(), torch.is_inference_mode_enabled()))

    monkeypatch.setattr("attnscope.attention", call)
    for mode, want in {
        "plain": (False, True, False),
        "no_grad": (False, False, False),
        "inference_mode": (False, False, True),
        "grad needed": (True, True, False),
    }.items():
        seen.clear()
        measure_host_time(CPU, ("cpu",), (mode,), calls=1, blocks=1)
        assert seen == {want}, mode


def test_a_training_call_is_a_forward_and_its_backward(monkeypatch):
    calls = []

    def call(q, k, v, impl):
        assert q.requires_grad and k.requires_grad and v.requires_grad
        calls.append("forward")
        out = q + k + v
        out.register_hook(lambda grad: calls.append("backward"))
        return out

    monkeypatch.setattr("attnscope.attention", call)
    measure_host_time(CPU, ("cpu",), ("training",), calls=2, blocks=1)
    assert calls[:4] == ["forward", "backward"] * 2


def test_compiled_calls_are_timed():
    (row,) = measure_host_time(CPU, ("cpu",), ("compiled",), calls=2, blocks=2)
    assert row.mode == "compiled" and row.median_us > 0 and row.ratio is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"impls": ("triton",)}, "impl must be one of cpu, sdpa-flash, got 'triton'"),
        ({"modes": ("fast",)}, "mode must be one of plain, .*, got 'fast'"),
        ({"calls": 0}, "calls and blocks must be >= 1, got 0, 50"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ValueError, match=message):
        measure_host_time(CPU, **options)


def test_command(tmp_path):
    path = tmp_path / "host.json"
    arguments = ["--device", "cpu", "--mode", "plain,no_grad", "--calls", "2", "--blocks", "2"]
    command = cli.build("host-time")
    result = CliRunner().invoke(command, ["host-time", *arguments, "--output", str(path)])
    assert result.exit_code == 0, result.output
    assert "1x8x2x16 float32, 2 blocks of 2 calls" in result.output
    written = json.loads(path.read_text())
    assert [row["impl"] for row in written["rows"]] == ["cpu", "cpu", "sdpa-flash", "sdpa-flash"]
    result = CliRunner().invoke(command, ["host-time", "--device", "cpu", "--mode", "fast"])
    assert result.exit_code == 2 and "mode must be one of" in result.output
