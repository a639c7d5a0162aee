"""Several ranks: communication of one trace, one report of many, and what was not recorded."""

import gzip
import json
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from forked import run_python
from made_trace import H200, Event, cpu, kernel, launch, named, op, write_trace
from typer.testing import CliRunner

from attnscope.cli import build
from attnscope.profile import Profile
from attnscope.profile.record.launcher import RankOf, rank_of_process

SYMBOL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ELEMENTS = 1 << 20


def run(*arguments: str, **environment: str) -> tuple[int, str]:
    result = CliRunner().invoke(build("profile"), ["profile", *arguments], env=environment)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


def all_reduce(
    number: int, start: float, duration: float, sequence: int | None = None
) -> list[Event]:
    """An all-reduce of ELEMENTS bf16 in a group of two, as PyTorch records it over NCCL."""
    about: dict[str, Any] = {
        "Collective name": "allreduce", "In msg nelems": ELEMENTS, "Out msg nelems": ELEMENTS,
        "Group size": 2, "dtype": "BFloat16", "Process Group Name": "0",
        "Process Group Description": "default_pg", "Process Group Ranks": "[0, 1]",
    }  # fmt: skip
    about |= {} if sequence is None else {"Seq": sequence}
    ids = {"External id": number}
    return [
        op("record_param_comms", start - 20, start - 5, **about, **ids),
        launch(number, start - 18, "cuLaunchKernelEx", **ids),
        kernel(number, start, start + duration, SYMBOL, stream=20, **ids),
    ]


def compute(number: int, start: float, duration: float) -> list[Event]:
    ids = {"External id": number}
    return [
        op("aten::mm", start - 20, start - 5, tid=2, **ids),
        launch(number, start - 18, tid=2, **ids),
        kernel(number, start, start + duration, "nvjet_x", **ids),
    ]


def write_rank(folder: Path, *events: Event) -> Path:
    folder.mkdir(parents=True)
    return write_trace(folder / "trace.json", *events, deviceProperties=[H200])


@pytest.fixture
def two_ranks(tmp_path: Path) -> Path:
    """Rank 1 arrives 900 us late at the first of two collectives, rank 0 50 us at the second."""
    first = [*all_reduce(1, 100, 1000), *compute(2, 700, 200), *all_reduce(3, 2000, 100)]
    write_rank(tmp_path / "rank0", *first)
    second = [*compute(2, 300, 650), *all_reduce(1, 1000, 100), *all_reduce(3, 1950, 150)]
    write_rank(tmp_path / "rank1", *second)
    return tmp_path


def test_communication_of_a_trace_has_its_bytes_bandwidth_and_exposed_time(two_ranks: Path) -> None:
    profile = Profile.read(two_ranks / "rank0" / "trace.json")
    (row,) = profile.table("communication").to_dict("records")
    assert (row["collective"], row["size"], row["dtype"]) == ("all_reduce", 2, "BFloat16")
    assert (row["calls"], row["bytes"]) == (2, 2 * 2 * ELEMENTS)
    assert (row["total_us"], row["exposed_us"], row["overlapped_us"]) == (1100, 900, 200)
    # An all-reduce of two ranks moves each byte once over the link: 2 (n - 1) / n.
    assert row["bus_gbs"] == pytest.approx(4 * ELEMENTS / 1100e3)
    code, out = run("--trace", str(two_ranks / "rank0" / "trace.json"))
    assert code == 0 and "\nCommunication\n" in out and "all_reduce" in out


def test_what_a_collective_takes_longer_than_on_the_last_rank_is_waiting(two_ranks: Path) -> None:
    code, out = run("--merge", str(two_ranks))
    assert code == 0
    merged = json.loads((two_ranks / "ranks.json").read_text())
    ranks = {row["rank"]: row for row in merged["tables"]["ranks"]}
    assert (ranks[0]["waiting_us"], ranks[1]["waiting_us"]) == (900, 50)
    assert (ranks[0]["late"], ranks[1]["late"]) == (1, 1)
    assert (ranks[0]["gpu_us"], ranks[0]["compute_us"]) == (1300, 200)
    assert (ranks[0]["communication_us"], ranks[0]["exposed_us"]) == (1100, 900)
    (row,) = merged["tables"]["communication"]
    assert (row["calls"], row["bytes"], row["time_us"]) == (2, 4 * ELEMENTS, 1350)
    assert (row["own_us"], row["waiting_us"], row["reason"]) == (400, 950, None)
    # The collectives' own time, without waiting: 100 us each.
    assert row["bus_gbs"] == pytest.approx(4 * ELEMENTS / 200e3)
    assert "for rank 1, last in 1 collectives (900 us)" in merged["verdict"]
    assert "70.4 % of it waiting" in merged["verdict"] and merged["verdict"] in out
    for name in ("ranks.html", "ranks.md"):
        assert "all_reduce" in (two_ranks / name).read_text()
    assert json.loads(run("--merge", str(two_ranks), "--json")[1]) == merged


def test_traces_that_pytorch_wrote_into_one_folder_are_merged(two_ranks: Path) -> None:
    """Their ranks are in `distributedInfo`; `tensorboard_trace_handler` names them by time."""
    log = two_ranks / "log"
    log.mkdir()
    for rank, name in enumerate(("b.pt.trace.json", "a.pt.trace.json.gz")):
        events = json.loads((two_ranks / f"rank{rank}" / "trace.json").read_text())
        text = json.dumps({"distributedInfo": {"rank": rank, "world_size": 128}} | events)
        (log / name).write_bytes(gzip.compress(text.encode()) if rank else text.encode())
    assert run("--merge", str(two_ranks))[0] == 0
    for _ in range(2):  # the second finds the first one's files beside the traces
        code, out = run("--merge", str(log))
        assert code == 0 and "no record of rank 2, 3, 4, 5, 6, 7, 8, 9 and 118 more" in out
        tables = [json.loads((at / "ranks.json").read_text())["tables"] for at in (log, two_ranks)]
        assert tables[0] == tables[1] and tables[0]["ranks"][0]["waiting_us"] == 900
    shutil.copy(log / "b.pt.trace.json", log / "later.json")
    code, out = run("--merge", str(log))
    assert code == 2 and "must have one trace of each rank, got two of rank 0" in out


def test_numbered_collectives_are_matched_by_their_number(tmp_path: Path) -> None:
    write_rank(tmp_path / "rank0", *all_reduce(1, 100, 90, 7), *all_reduce(2, 300, 50, 8))
    write_rank(tmp_path / "rank1", *all_reduce(2, 300, 40, 8))
    code, _ = run("--merge", str(tmp_path))
    (row,) = json.loads((tmp_path / "ranks.json").read_text())["tables"]["communication"]
    assert code == 0 and (row["own_us"], row["waiting_us"]) == (80, 10)


def test_collectives_that_cannot_be_matched_have_no_waiting_but_a_reason(tmp_path: Path) -> None:
    write_rank(tmp_path / "rank0", *all_reduce(1, 100, 90), *all_reduce(2, 300, 50))
    write_rank(tmp_path / "rank1", *all_reduce(1, 100, 80))
    assert run("--merge", str(tmp_path))[0] == 0
    (row,) = json.loads((tmp_path / "ranks.json").read_text())["tables"]["communication"]
    assert (row["own_us"], row["waiting_us"], row["bus_gbs"]) == (None, None, None)
    assert "could not be matched" in row["reason"]


def test_a_missing_rank_and_ranks_of_two_runs_are_reported(two_ranks: Path) -> None:
    run("--trace", str(two_ranks / "rank0" / "trace.json"), "--output", str(two_ranks / "rank0"))
    record = two_ranks / "rank0" / "profile.json"
    content = json.loads(record.read_text())
    content["run"]["rank"] = "0 of 3, started by torchrun"
    record.write_text(json.dumps(content))
    code, out = run("--merge", str(two_ranks))
    assert code == 0 and "no record of rank 2" in out
    (two_ranks / "rank1" / "profile.json").write_text(
        json.dumps(content | {"run": {"rank": "1 of 2"}})
    )
    code, out = run("--merge", str(two_ranks))
    assert code == 2 and "must be of one run, got world sizes 2, 3" in out
    record.write_text('{"schema": 1}')
    assert "must be a record of attnscope profile" in run("--merge", str(two_ranks))[1]
    code, out = run("--merge", str(two_ranks / "rank1"))
    assert code == 2 and "merge must be a folder with rank0/" in out


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, None),
        ({"RANK": "1", "WORLD_SIZE": "2"}, RankOf(1, 2, "torchrun")),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}, RankOf(3, 8, "SLURM")),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "RANK": "9", "WORLD_SIZE": "16"},
         RankOf(9, 16, "torchrun")),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"RANK": "two", "WORLD_SIZE": "2"}, None),
        ({"RANK": "2", "WORLD_SIZE": "2"}, None),
    ],
)  # fmt: skip
def test_the_rank_is_the_launchers(environment: dict[str, str], rank: RankOf | None) -> None:
    assert rank_of_process(environment) == rank


def test_each_rank_writes_a_folder_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "one.py"
    script.write_text("import torch\ntorch.ones(3) + 1\n")
    out = tmp_path / "out"
    for rank in (0, 1):
        code, text = run("--output", str(out), str(script), RANK=str(rank), WORLD_SIZE="2")
        assert code == 0 and f"rank {rank} of 2 (torchrun)" in text
        assert str(out / f"rank{rank}") in text.replace("\n", "")
        assert ("aten::add" in text) == (rank == 0)
    assert not (out / "profile.json").exists()
    record = json.loads((out / "rank1" / "profile.json").read_text())
    assert record["run"]["rank"] == "1 of 2, started by torchrun"
    code, text = run("--merge", str(out))
    assert code == 0 and "2 ranks, no communication recorded" in text


DDP = """
import os, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
rank, store = int(os.environ["RANK"]), os.path.abspath("store")
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
model = DDP(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    time.sleep(0.4 * dist.get_rank())
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
"""


@pytest.mark.timeout(120)
def test_ddp_over_gloo_on_two_ranks_ends_and_its_late_rank_is_found(tmp_path: Path) -> None:
    (tmp_path / "ddp.py").write_text(DDP)

    def start(rank: int) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": "2"}
        command = ("-m", "attnscope", "profile", "--output", "out", "ddp.py")
        return run_python(*command, cwd=tmp_path, env=environment)

    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(start, (0, 1)):
            assert done.returncode == 0, done.stderr[-2000:]
    code, out = run("--merge", str(tmp_path / "out"))
    assert code == 0
    merged = json.loads((tmp_path / "out" / "ranks.json").read_text())
    ranks = {row["rank"]: row for row in merged["tables"]["ranks"]}
    assert all(row["state"] == "complete" for row in ranks.values())
    # Rank 1 sleeps 1.2 s in all; rank 0 waits for most of it in its all-reduces.
    assert ranks[0]["waiting_us"] > 600_000 > ranks[1]["waiting_us"]
    assert "most of it for rank 1" in merged["verdict"]
    reduced = [r for r in merged["tables"]["communication"] if r["collective"] == "all_reduce"]
    assert [(row["calls"], row["bytes"]) for row in reduced] == [(3, 3 * 4 * 65 * 64)]


def test_gloo_is_communication_on_the_cpu(tmp_path: Path) -> None:
    gloo = cpu("user_annotation", "gloo:all_reduce", 10, 50, tid=3)
    gloo["args"] = {"Input Dims": [[4, 8]], "Input type": ["float"], "Concrete Inputs": [""]}
    busy = op("aten::mm", 5, 20)
    path = write_trace(tmp_path / "t.json", busy, op("c10d::allreduce_", 22, 49), gloo)
    (row,) = Profile.read(path).table("communication").to_dict("records")
    assert (row["collective"], row["bytes"]) == ("all_reduce", 4 * 8 * 4)
    assert (row["total_us"], row["exposed_us"]) == (40, 30)


def test_children_that_were_not_recorded_are_reported(tmp_path: Path) -> None:
    script = tmp_path / "starts.py"
    script.write_text(
        "import subprocess, sys, torch\ntorch.ones(2)\n"
        "subprocess.run([sys.executable, '-c', 'import time\\n"
        "while time.process_time() < 0.8: pass'])\n"
    )
    code, out = run(str(script))
    assert code == 0 and "child processes took" in out and "None of them was recorded" in out
    script.write_text("import torch\ntorch.ones(2)\n")
    # In a process without children: this one may have a server that forks programs.
    alone = run_python("-m", "attnscope", "profile", str(script))
    assert alone.returncode == 0 and "recorded: data loaders" not in alone.stderr
    code, out = run("-m", "torch.distributed.run", "--nproc-per-node", "2", "x.py")
    assert code == 2 and "torchrun --no-python attnscope profile" in out


def test_names_of_ranges_are_no_communication(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.json", named("all_reduce of mine", 0, 9), op("a", 1, 2))
    assert not len(Profile.read(path).table("communication"))
