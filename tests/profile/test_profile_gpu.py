"""The profiler on a GPU: compared with CUDA events and with the raw trace, op by op."""

import ctypes
import json
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnscope import attention
from attnscope.profile import Profile, ProfileError, annotate, profile
from attnscope.profile.analysis.kernel_names import short_name
from attnscope.profile.analysis.tables import NO_OP, REPLAY
from attnscope.profile.attribution.owners import busy_ns
from attnscope.profile.render.terminal import attribution_line
from attnscope.profile.trace.markers import SENTINEL

pytestmark = pytest.mark.gpu

CALLS = 30


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def raw_kernels(found: Profile) -> list[dict[str, Any]]:
    """Kernels of PyTorch's raw trace, parsed as plain JSON, without the profiler's kernels."""
    events = json.loads(found.source.read_text())["traceEvents"]
    own = [
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("name") == SENTINEL and e.get("cat") == "user_annotation"
    ]
    assert len(own) == 2
    launched = {
        e["args"]["correlation"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver")
        and any(start <= e["ts"] < end for start, end in own)
    }
    return [
        e for e in events if e.get("cat") == "kernel" and e["args"]["correlation"] not in launched
    ]


def raw_us(found: Profile) -> float:
    return sum(e["dur"] for e in raw_kernels(found))


def row(found: Profile, name: str) -> Any:
    return found.operators().set_index("name").loc[name]


def flash_attention_3(q: torch.Tensor) -> Any:
    fa3 = pytest.importorskip("fa3_fwd_interface")
    return fa3.flash_attn_func(q, q, q, causal=True)


def sdpa(q: torch.Tensor) -> Any:
    t = q.transpose(1, 2)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(t, t, t, is_causal=True)


@cache
def kept_graph(q: torch.Tensor, impl: str) -> tuple[torch.Tensor, ...]:
    """out of a call and its inputs, for backwards without a forward."""
    qkv = [q.detach().clone().requires_grad_() for _ in range(3)]
    return attention(*qkv, causal=True, impl=impl), *qkv


def backward(q: torch.Tensor, impl: str) -> None:
    out, *qkv = kept_graph(q, impl)
    torch.autograd.grad(out, qkv, q, retain_graph=True)


# Function called with q [2, 8192, 16, 128] -> the row that must have all of its GPU time.
OPS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "cuda": (lambda q: attention(q, q, q, causal=True), "attnscope::forward"),
    "cuda-sm80": (
        lambda q: torch.ops.attnscope.forward(q, q, q, scale=0.1, causal=True, variant=80),
        "attnscope::forward",
    ),
    "triton": (
        lambda q: attention(q, q, q, causal=True, impl="triton"),
        "attnscope_triton::forward",
    ),
    "backward": (lambda q: backward(q, "cuda"), "attnscope::backward"),
    "backward-sm80": (lambda q: backward(q, "cuda-sm80"), "attnscope::backward"),
    "backward-triton": (lambda q: backward(q, "triton"), "attnscope_triton::backward"),
    "matmul": (lambda q: q.view(8192, -1)[:, :4096] @ q.view(8192, -1)[:, :4096].T, "aten::mm"),
    "sdpa-flash": (sdpa, "aten::_scaled_dot_product_flash_attention"),
    "fa3": (flash_attention_3, "fa3_fwd::fwd"),
}


@pytest.mark.timing
@pytest.mark.parametrize("name", OPS)
def test_time_of_an_op_matches_its_kernels_and_cuda_events(name: str) -> None:
    call, op = OPS[name]
    q = randn(2, 8192, 16, 128)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        call(q)
    with profile(name) as found:
        call(q)  # the GPU is busy while the first timed call is launched
        begin.record()
        for _ in range(CALLS - 1):
            call(q)
        end.record()
    events_us = begin.elapsed_time(end) * 1e3
    mine, raw = row(found, op), sorted(raw_kernels(found), key=lambda kernel: kernel["ts"])
    assert mine.calls == CALLS
    assert mine.gpu_us == pytest.approx(raw_us(found), rel=0.01)
    timed_us = sum(kernel["dur"] for kernel in raw[len(raw) // CALLS :])
    assert timed_us == pytest.approx(events_us, rel=0.03)
    assert found.attribution.share == 1.0
    assert attribution_line(found.attribution).startswith("100.00 % of ")
    assert found.attribution.disagreements == []
    found.expect(op, len(raw_kernels(found)))
    if name == "matmul":
        assert 0.1 < mine.mfu < 1 or found.device is None


class Attention(torch.nn.Module):
    def __init__(self, impl: str) -> None:
        super().__init__()
        self.qkv, self.impl = torch.nn.Linear(128, 384), impl

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 64)).unbind(2)
        return attention(q, k, v, causal=True, impl=self.impl).flatten(2)


@pytest.mark.parametrize("impl", ["cuda", "cuda-sm80", "triton"])
def test_a_training_step_credits_every_kernel_of_attention(impl: str) -> None:
    net = torch.nn.Sequential(Attention(impl), Attention(impl)).to("cuda", torch.bfloat16)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = randn(2, 512, 128)

    def step() -> None:
        with annotate("forward"):
            loss = net(x).float().square().mean()
        with annotate("backward"):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with profile(stacks=True) as found:
        for _ in range(3):
            step()
    owners, namespace = found.attribution, "attnscope" + "_triton" * (impl == "triton")
    assert owners.share == 1.0
    raw = raw_kernels(found)
    whole = {}
    for kind in ("forward", "backward"):
        # Every kernel of the op, before, in and after its products; nothing else is named so.
        mine = [k["dur"] for k in raw if f" {kind} " in name_of_ours(k["name"])]
        op = row(found, f"{namespace}::{kind}")
        found.expect(f"{namespace}::{kind}", 6 * (3 if kind == "backward" else 1))
        assert (op.calls, op.kernels) == (6, len(mine))
        assert op.gpu_us == op.self_gpu_us == pytest.approx(sum(mine), rel=1e-6)
        assert op.flops == 6 * (10 if kind == "backward" else 4) * 64 * 2 * 2 * (512 * 513 // 2)
        whole[kind] = op.gpu_us
    assert row(found, f"{namespace}::forward").backward_gpu_us == pytest.approx(whole["backward"])
    stages = found.stages().set_index("path")
    assert stages.loc["backward"].gpu_us > whole["backward"]
    modules = found.modules().set_index("module")
    inside = [modules.loc[f"Sequential_0/Attention_{at}"].backward_gpu_us for at in (0, 1)]
    assert min(inside) > 0 and sum(inside) > whole["backward"]


def name_of_ours(symbol: str) -> str:
    name = short_name(symbol)
    return f"{name} " if name.startswith("attnscope ") else ""


def test_an_op_called_twenty_times_is_counted_twenty_times() -> None:
    q = randn(1, 256, 4, 64)
    attention(q, q, q)
    with profile() as found:
        for _ in range(20):
            attention(q, q, q)
    found.expect("attnscope::forward", 20)
    with pytest.raises(ProfileError, match="name must match an op or kernel, got"):
        found.expect("attnscope::forwrd", 20)
    assert found.audit.launches == 20 and len(found.audit.sentinels) == 2


def test_idle_time_before_the_region_loses_nothing() -> None:
    x = randn(64)
    time.sleep(3)
    with profile() as found:
        for _ in range(50):
            x.neg()
    found.expect("aten::neg", 50)


def test_a_cold_start_counts_kernels_and_not_module_loading(tmp_path: Path) -> None:
    script = tmp_path / "cold.py"
    script.write_text(
        textwrap.dedent(
            """
            import json, sys, torch
            from attnscope import attention
            from attnscope.studies.ops.kineto import comparison, record_with_averages
            def region():
                a = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
                q = torch.randn(1, 512, 4, 64, device="cuda", dtype=torch.bfloat16)
                a @ a
                attention(q, q, q)
            found, averages = record_with_averages("cold", region)
            beside = comparison(found.attribution, averages.rows)
            rows = found.operators().set_index("name").gpu_us
            json.dump([found.attribution.share, rows["aten::mm"], rows["attnscope::forward"],
                       sorted(set(beside.explanation))], sys.stdout)
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    share, mm, forward, explanations = json.loads(done.stdout.splitlines()[-1])
    assert share == 1.0
    assert 1 < mm < 100 and 1 < forward < 1000
    assert not any(e.startswith(("not explained", "kineto has less")) for e in explanations)


def test_many_streams_are_busy_at_most_all_the_time() -> None:
    inputs = [randn(1024, 1024, dtype=torch.float32) for _ in range(4)]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()

    def call() -> None:
        for _ in range(10):
            for stream, x in zip(streams, inputs, strict=True):
                with torch.cuda.stream(stream):
                    x @ x

    call()
    with profile() as found, annotate("streams"):
        call()
        torch.cuda.synchronize()
    assert len({k.stream for k in found.trace.kernels}) == 4
    window = found.trace.end - found.trace.start
    assert busy_ns(found.trace.gpu) <= window
    assert found.attribution.total_ns > busy_ns(found.trace.gpu)
    stage = found.stages().iloc[0]
    assert stage.gpu_busy_us <= stage.wall_us + 50 and stage.kernels == 40
    assert 0 < found.efficiency().gpu_utilisation <= 1
    assert found.attribution.share == 1.0


def test_kernels_of_about_a_microsecond_are_all_there() -> None:
    one = torch.zeros(1, device="cuda")
    one.add_(1)
    with profile() as found:
        for _ in range(200):
            one.add_(1)
    mine = row(found, "aten::add_")
    assert (mine.calls, mine.kernels) == (200, 200)
    assert 0.2 < mine.gpu_mean_us < 5
    assert mine.gpu_us == pytest.approx(raw_us(found), rel=1e-6)


def test_nested_and_overlapping_ranges_hold_what_ran_in_them() -> None:
    x = randn(1024)
    with profile() as found:
        with annotate("outer"):
            x.neg()
            with annotate("inner"):
                x.cos()
        first, second = (torch.profiler.record_function(n) for n in ("first", "second"))
        first.__enter__()
        x.sin()
        second.__enter__()
        x.exp()
        first.__exit__(None, None, None)
        x.tan()
        second.__exit__(None, None, None)
    kernels = found.stages().set_index("path").kernels
    assert (kernels["outer"], kernels["outer/inner"], kernels["first"]) == (2, 1, 2)
    assert kernels["first/second"] == 2
    by_op = {
        found.attribution.op(k).name: [r.name for r in found.attribution.ranges(k)]  # type: ignore[union-attr]
        for k in found.trace.kernels
    }
    assert by_op["aten::exp"] == ["first", "second"] and by_op["aten::tan"] == ["second"]


def test_an_exception_keeps_the_kernels_before_it() -> None:
    x = randn(1024)
    with pytest.raises(RuntimeError, match="mine"):
        with profile() as found:
            x.neg()
            raise RuntimeError("mine")
    assert row(found, "aten::neg").kernels == 1
    assert found.interrupted == "RuntimeError: mine" and found.incomplete is None


def test_a_second_session_counts_the_same() -> None:
    a = randn(512, 512)
    counts = []
    for _ in range(2):
        with profile() as found:
            for _ in range(5):
                a @ a
        assert found.attribution.share == 1.0
        assert row(found, "aten::mm").gpu_us == pytest.approx(raw_us(found), rel=1e-6)
        counts.append(row(found, "aten::mm").kernels)
    assert counts[0] == counts[1]


def test_a_decorated_function_reports_what_the_profiler_costs() -> None:
    a = randn(4096, 4096)

    @profile(warmup=3)
    def call() -> None:
        for _ in range(10):
            a @ a

    call()
    found = call.profile
    # Both calls wait for the same kernels; beside other work on the host they may take any longer.
    least = 0.5e-9 * found.attribution.total_ns
    assert found.wall_s > least and found.unprofiled_wall_s > least


def test_replayed_kernels_belong_to_the_ops_that_captured_them() -> None:
    q = randn(1, 256, 4, 64)
    graph = torch.cuda.CUDAGraph()
    attention(q, q, q)
    torch.cuda.synchronize()
    with profile() as found:
        with annotate("capture"), torch.cuda.graph(graph):
            attention(q, q, q)
            q.neg()
        with annotate("replay"):
            for _ in range(3):
                graph.replay()
    assert found.audit.captured >= 2 and found.incomplete is None
    assert [row(found, op).kernels for op in ("attnscope::forward", "aten::neg")] == [3, 3]
    assert found.attribution.share == 1.0 and found.attribution.replayed_ns == 0
    assert "by ops that captured it" in attribution_line(found.attribution)
    assert found.stages().set_index("path").loc["replay"].kernels == 6


def test_a_captured_backward_is_no_loss() -> None:
    x = randn(1024, dtype=torch.float32).requires_grad_()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.autograd.grad((x * x).sum(), x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with profile() as found:
        with torch.cuda.graph(graph):
            torch.autograd.grad((x * x).sum(), x)
        graph.replay()
    assert found.incomplete is None and found.audit.captured >= 3
    assert found.attribution.replayed_ns == 0 < found.attribution.captured_ns
    with profile() as later:
        graph.replay()
    assert row(later, REPLAY).kernels >= 3  # this record does not show the capture


PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry ctypes_kernel() { ret; }
"""


@contextmanager
def driver_kernel() -> Iterator[Callable[[], None]]:
    """A kernel launched through ctypes, outside PyTorch and Triton."""
    cuda = ctypes.CDLL("libcuda.so.1")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    assert cuda.cuModuleLoadData(ctypes.byref(module), PTX) == 0
    assert cuda.cuModuleGetFunction(ctypes.byref(function), module, b"ctypes_kernel") == 0
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

    def launch() -> None:
        sizes = (1, 1, 1, 32, 1, 1, 0)
        assert cuda.cuLaunchKernel(function, *sizes, stream, None, None) == 0

    yield launch
    torch.cuda.synchronize()
    cuda.cuModuleUnload(module)


def test_launches_past_pytorch_are_listed_and_not_owned() -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def raw_triton(x, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(x + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)

    x = randn(4096, dtype=torch.float32)
    raw_triton[(4,)](x, x.numel(), 1024)
    with driver_kernel() as launch:
        launch()
        with profile() as found:
            with annotate("mine"):
                raw_triton[(4,)](x, x.numel(), 1024)
                launch()
            launch()
            x.neg()
    assert sorted(k.name for k in found.attribution.unowned) == [
        "ctypes_kernel", "ctypes_kernel", "raw_triton",
    ]  # fmt: skip
    line = attribution_line(found.attribution)
    assert "1 x raw_triton" in line and "in range mine" in line and "in no range" in line
    assert row(found, NO_OP).kernels == 3
    assert found.operators().self_gpu_us.sum() == pytest.approx(raw_us(found), rel=1e-6)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(256, 512), torch.nn.Linear(512, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


@pytest.mark.parametrize("stacks", [False, True])
def test_backward_is_credited_to_range_op_and_module(stacks: bool) -> None:
    net, x = Net().cuda(), randn(128, 256, dtype=torch.float32)
    net(x).sum().backward()  # so that gradients exist and are accumulated
    done = threading.Event()
    # With stacks, this thread's Python frames are recorded.
    idle = threading.Thread(target=done.wait, daemon=True)
    idle.start()
    with profile(stacks=stacks, memory=stacks) as found:
        with annotate("forward"):
            loss = net(x).sum()
        with annotate("backward"):
            loss.backward()
    done.set()
    idle.join()
    owners = found.attribution
    assert owners.share == 1.0
    linear = row(found, "aten::addmm")
    assert linear.kernels >= 2 and linear.backward_gpu_us > 0
    stages = found.stages().set_index("path").kernels
    outside = [
        (k.name[:60], owners.op(k), found.trace.cpu[k.launch])
        for k in found.trace.kernels
        if not owners.ranges(k)
    ]
    assert not outside
    assert stages["forward"] + stages["backward"] == len(found.trace.kernels)
    backward = [k for k in owners.trace.kernels if owners.forward_op(owners.op(k))]  # type: ignore[arg-type]
    assert backward and all([r.name for r in owners.ranges(k)] == ["backward"] for k in backward)
    if stacks:
        modules = found.modules().set_index("module")
        assert modules.loc["Net_0"].backward_gpu_us > modules.loc["Net_0/Linear_0"].backward_gpu_us
        assert modules.loc["Net_0/Linear_1"].backward_gpu_us > 0
        assert any("test_profile_gpu.py" in f for k in backward for f in owners.stack(k))
        assert set(found.memory().device) >= {"cuda:0"}


def test_ops_of_other_threads_own_their_kernels() -> None:
    x = randn(1024)

    def work() -> None:
        with annotate("thread"):
            x.cosh()
        torch.cuda.synchronize()

    with profile() as found:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        x.neg()
    assert found.attribution.share == 1.0
    assert row(found, "aten::cosh").kernels == 1
    assert found.stages().set_index("path").loc["thread"].kernels == 1


def test_copies_and_fills_are_apart() -> None:
    x = randn(1 << 20)
    with profile() as found:
        x.cpu()
        torch.zeros(1 << 20, device="cuda")
    copies = found.copies()
    assert copies["bytes"].sum() >= 2 << 20
    assert row(found, "aten::copy_").gpu_us == 0 < row(found, "aten::copy_").copy_us


def test_every_file_of_a_run_is_written_and_the_trace_reads_back(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch
            from attnscope.profile import annotate
            net = torch.nn.Linear(64, 64).cuda()
            for _ in range(3):
                with annotate("step"):
                    net(torch.ones(8, 64, device="cuda")).sum().backward()
            """
        )
    )
    folder = tmp_path / "out"
    command = [sys.executable, "-m", "attnscope", "profile", "--stacks", "--memory"]
    command += ["--output", str(folder), str(script)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "100.00 % of " in done.stdout and "complete: each of " in done.stdout
    for name in ("profile.json", "profile.html", "trace.json", "operators.csv", "kernels.csv"):
        assert (folder / name).stat().st_size > 0
    again = Profile.read(folder / "trace.json")
    assert again.attribution.share == 1.0 and again.incomplete is None
    assert len(again.audit.sentinels) == 2
    assert again.stages().set_index("path").loc["step"].calls == 3


def test_threads_that_come_after_one_another_own_their_kernels() -> None:
    """A new thread often reuses an ended thread's pthread id; the trace then has the old id."""
    square = torch.randn(64, 64, device="cuda")
    ids = set()

    def work() -> None:
        ids.add(threading.get_ident())
        with annotate("in the thread"):
            square @ square

    for _ in range(4):
        with profile() as found:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        assert found.attribution.share == 1.0 and not found.attribution.disagreements
        assert found.stages().set_index("range")["gpu_us"]["in the thread"] > 0
    assert len(ids) < 4, "no thread had the id of another one: this shows nothing"
