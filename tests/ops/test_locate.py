"""Where a result goes wrong: planted NaN, overflow, leaks, masks, by element, tile and cause."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from attnscope import cli
from attnscope.bench import checks
from attnscope.bench.impls import resolve
from attnscope.bench.locating import locate
from attnscope.bench.workloads import Workload
from attnscope.numerics.locate import Location, locate_backward, locate_forward
from attnscope.reference import attention_reference, naive_attention, naive_attention_backward

BLOCK = (16, 32)


def tensors(dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 48, 4, 32, generator=generator)
    k, v = (torch.randn(2, 64, 2, 32, generator=generator) for _ in range(2))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def forward(*inputs: Tensor, **options: object) -> Location | None:
    return locate_forward(*inputs, causal=True, block=BLOCK, **options)  # type: ignore[arg-type]


def test_a_result_equal_to_fp64_has_no_location() -> None:
    q, k, v = tensors(torch.float64)
    assert forward(q, k, v, *attention_reference(q, k, v, causal=True)) is None


def test_an_input_that_is_not_finite() -> None:
    q, k, v = tensors()
    q[1, 20, 3, 7] = math.inf
    found = forward(q, k, v, *naive_attention(q, k, v, causal=True))
    assert found is not None
    assert (found.tensor, found.index[:3]) == ("out", (1, 20, 3))
    assert found.cause == "an input: q[1, 20, 3, 7] is inf"
    assert found.tile == "query tile 1 (rows 16 to 31)"
    assert found.fp32.startswith("no")


def test_a_value_that_the_row_does_not_see_and_that_leaks() -> None:
    q, k, v = tensors()
    v[0, 60, 1, 3] = math.nan  # rows up to 43 do not see key 60
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) * 32**-0.5
    scores.masked_fill_(torch.ones(48, 64).triu(17).bool(), -math.inf)
    leaking = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.repeat_interleave(2, 2))
    found = forward(q, k, v, leaking)
    assert found is not None and found.index == (0, 0, 2, 3)
    assert found.cause.startswith("a leak: v[0, 60, 1, 3] is nan, which the row does not see")
    assert found.want == pytest.approx(
        float(attention_reference(q, k, v, causal=True)[0][0, 0, 2, 3])
    )
    assert found.fp32.startswith("yes: finite")


def test_overflow_of_the_scores() -> None:
    q, k, v = tensors()
    q, k = q * 200, k * 200
    naive = (q.transpose(1, 2) @ k.repeat_interleave(2, 2).permute(0, 2, 3, 1)) * 32**-0.5
    out = (naive.softmax(-1) @ v.repeat_interleave(2, 2).transpose(1, 2)).transpose(1, 2)
    found = locate_forward(q, k, v, out, block=BLOCK)
    assert found is not None
    assert re.match(r"overflow of q k in float16: -?\d+(\.\d+)?(e\+\d+)? at key \d+, key tile [01] "
                    r"\(rows \d+ to \d+\), the end is 65504", found.cause)  # fmt: skip
    assert found.fp32.startswith("yes: finite")


def test_overflow_of_the_weights() -> None:
    q, k, v = tensors()
    q = q * 12
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) * 32**-0.5
    weights = scores.exp()  # without the row max
    out = weights @ v.repeat_interleave(2, 2).transpose(1, 2) / weights.sum(-1, keepdim=True)
    found = locate_forward(q, k, v, out.transpose(1, 2).contiguous(), block=BLOCK)
    assert found is not None and found.cause.startswith("overflow of P in float16: the score")
    assert "past 11.09" in found.cause and found.fp32.startswith("yes: finite")


def test_scores_so_large_that_a_step_of_fp32_moves_the_result() -> None:
    q, k, v = tensors()
    q, k = q * 400, k * 400
    k[:, 1::2] = k[:, ::2]  # two keys share each row's weight
    of_group = k.repeat_interleave(2, 2).double()
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), of_group) * 32**-0.5
    steps = scores.abs() * torch.finfo(torch.float32).eps
    weights = (scores + steps * (-1.0) ** torch.arange(64)).softmax(-1)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v.repeat_interleave(2, 2).double())
    found = locate_forward(q, k, v, out.half(), block=BLOCK)
    assert found is not None and found.fp32.startswith("yes: finite")
    assert re.match(r"rounding of the scores in fp32: at .* a step is 0\.\d+, which", found.cause)


def test_an_element_that_no_number_explains() -> None:
    q, k, v = tensors()
    out, lse = naive_attention(q, k, v, causal=True)
    lse[1, 2, 40] = math.nan
    found = forward(q, k, v, out, lse)
    assert found is not None
    assert (found.tensor, found.index) == ("lse", (1, 2, 40))
    assert found.tile == "query tile 2 (rows 32 to 47)"
    assert found.cause.startswith("not in the numbers of this row")


def test_rows_without_keys() -> None:
    q, k, v = tensors()
    short = k[:, :32], v[:, :32]
    out, lse = naive_attention(q, *short, causal=True)
    found = forward(q, *short, out, lse)
    assert found is not None and math.isfinite(found.error), "-inf and 0 are right there"
    out[0, 3] = math.nan
    found = forward(q, *short, out, lse)
    assert found is not None and found.cause.startswith("the row sees no key: 0 / 0")


def test_rounding_differs_from_a_wrong_mask() -> None:
    q, k, v = tensors()
    right = naive_attention(q, k, v, causal=True)[0]
    found = forward(q, k, v, right)
    assert found is not None and re.match("rounding|loss of precision", found.cause)
    wrong = locate_forward(q, k, v, right, causal=False)
    assert wrong is not None and wrong.cause.startswith("not rounding: every step in float16")
    assert wrong.tile == "" and wrong.error > 0.1


def test_scores_in_the_dtype_lose_precision() -> None:
    q, k, v = tensors()
    q = q * 30
    narrow = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) * 32**-0.5
    out = narrow.softmax(-1) @ v.repeat_interleave(2, 2).transpose(1, 2)
    found = locate_forward(q, k, v, out.transpose(1, 2).contiguous())
    assert found is not None and found.cause.startswith(
        "loss of precision: scores and P in float16"
    )


def test_shapes_that_do_not_fit() -> None:
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"out must have the shape \[2, 48, 4, 32\] of the call"):
        forward(q, k, v, q[:, :4])
    with pytest.raises(ValueError, match="dense with 4 dimensions, got"):
        forward(q[0], k[0], v[0], q[0])


@pytest.mark.parametrize("which", [0, 1, 2])
def test_gradients(which: int) -> None:
    q, k, v = tensors()
    dout = torch.randn_like(q)
    grads = list(naive_attention_backward(dout, q, k, v, causal=True))
    small = locate_backward(dout, q, k, v, tuple(grads), causal=True)  # type: ignore[arg-type]
    assert small is not None and re.match("rounding|loss of precision", small.cause)
    grads[which][1, 33, 1, 5] = math.nan
    found = locate_backward(dout, q, k, v, tuple(grads), causal=True, block=BLOCK)  # type: ignore[arg-type]
    assert found is not None
    assert (found.tensor, found.index) == (("dq", "dk", "dv")[which], (1, 33, 1, 5))
    tile = "query tile 2 (rows 32 to 47)" if which == 0 else "key tile 1 (rows 32 to 63)"
    assert found.tile == tile
    assert found.cause.startswith("not in the numbers of the call")
    dout[0, 0, 0, 0] = math.inf
    found = locate_backward(dout, q, k, v, tuple(grads), causal=True)  # type: ignore[arg-type]
    assert found is not None and found.cause == "an input: dout[0, 0, 0, 0] is inf"


def command(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.build("check"), ["check", *arguments, "--device", "cpu"])
    return done.exit_code, re.sub(r"\s+", " ", done.output)


def test_the_command_on_saved_tensors(tmp_path: Path) -> None:
    q, k, v = tensors(torch.float32)
    v[0, 40, 1, 2] = math.inf
    torch.save({"q": q, "k": k, "v": v}, tmp_path / "call.pt")
    code, text = command("--locate", "--inputs", str(tmp_path / "call.pt"), "--impl", "cpu",
                         "--causal")  # fmt: skip
    assert code == 1 and "cause: an input: v[0, 40, 1, 2] is inf" in text
    (tmp_path / "other.pt").write_text("x")
    code, text = command("--locate", "--inputs", str(tmp_path / "other.pt"))
    assert code == 2 and "inputs must be a file of torch.save" in text
    code, text = command("--locate", "--inputs", str(tmp_path / "call.pt"), "--impl", "cpu",
                         "--json")  # fmt: skip
    (found,) = json.loads(text)["results"]
    assert code == 1 and not found["finite"] and found["location"]["want"] == "inf"
    code, text = command("--inputs", str(tmp_path / "call.pt"))
    assert code == 2 and "--inputs must be with --locate" in text


def test_the_command_on_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    built = checks.build_call

    def broken(*arguments: object) -> object:
        call = built(*arguments)  # type: ignore[arg-type]

        def run() -> object:
            out, lse = call()
            out[0, 37, 1, 4] = math.nan
            return out, lse

        return run

    monkeypatch.setattr(checks, "build_call", broken)
    monkeypatch.setattr("attnscope.bench.locating.build_call", broken)
    code, text = command("--seq-lengths", "64", "--head-dim", "32", "--heads", "2", "--impl",
                         "naive", "--no-causal", "--locate")  # fmt: skip
    assert code == 1
    assert "out[0, 37, 1, 4] is nan, fp64 has" in text and "cause: not in the numbers" in text
    code, text = command("--seq-lengths", "64", "--head-dim", "32", "--heads", "2", "--impl",
                         "naive", "--no-causal", "--locate", "--json")  # fmt: skip
    (found,) = json.loads(text)["results"]
    assert code == 1 and not found["passed"]
    assert found["location"]["index"] == [0, 37, 1, 4] and found["location"]["got"] == "nan"


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["forward", "both"])
def test_the_tile_of_our_kernel_is_named(mode: str) -> None:
    work = Workload.of(seqlen=300, heads=2, head_dim=128, causal=True, mode=mode)
    device = torch.device("cuda")
    dout = None if mode == "forward" else work.output_gradient(device, 0)
    found = locate(*resolve(["cuda"]), work, work.inputs(device, 0), dout)
    assert found is not None and found.error < 0.1
    assert re.match(r"(query|key) tile \d+ \(rows \d+ to \d+\)", found.tile)
    assert re.match("rounding|loss of precision", found.cause)
