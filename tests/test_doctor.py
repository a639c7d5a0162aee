"""`attnscope env`: versions, tools, permissions, and the exit code."""

import importlib.metadata
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from attnscope import doctor
from attnscope.bench.impls import IMPLS
from attnscope.cli import build


def env(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(build("env"), ["env", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


def fake_tool(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def only_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only entry of PATH; no tool is found elsewhere."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    for name, (_, remedy) in doctor.TOOLS.items():
        monkeypatch.setitem(doctor.TOOLS, name, ((), remedy))
    return folder


def test_every_impl_runs_or_has_a_reason() -> None:
    code, output = env("--json")
    found = json.loads(output)
    assert [impl["name"] for impl in found["impls"]] == list(IMPLS)
    for impl in found["impls"]:
        assert impl["missing"] is None or len(impl["missing"]) > 10
    assert found["libraries"]["_C"] == "loaded"
    assert {tool["name"] for tool in found["tools"]} == set(doctor.TOOLS)
    assert code == (1 if found["broken"] else 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_without_a_gpu_the_cpu_impl_runs_and_nothing_is_broken() -> None:
    code, output = env("--json")
    found = json.loads(output)
    assert code == 0 and found["broken"] == []
    missing = {impl["name"]: impl["missing"] for impl in found["impls"]}
    assert missing["cpu"] is None and missing["sdpa-flash"] is None
    assert missing["cuda"] == "runs on cuda only, not on cpu"
    assert found["gpus"] == [] and found["notes"][0].startswith("no GPU: ")


@pytest.mark.gpu
def test_on_a_gpu_the_cuda_impl_runs() -> None:
    code, output = env("--json")
    found = json.loads(output)
    assert code == 0, found["broken"]
    missing = {impl["name"]: impl["missing"] for impl in found["impls"]}
    assert missing["cuda"] is None and missing["cuda-sm80"] is None and missing["naive"] is None
    assert found["gpus"][0]["sms"] > 0


def test_a_gpu_is_described_with_its_card_or_why_none_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    props = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, uuid="no-such-gpu",
        total_memory=143156 * 2**20, L2_cache_size=60 * 2**20,
    )  # fmt: skip
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: props)
    (gpu,), broken, notes = doctor.gpus()
    assert (gpu["capability"], gpu["sms"], gpu["peaks_of"]) == ("9.0", 132, "H200 SXM")
    assert (gpu["memory_gib"], gpu["l2_mib"], broken, notes) == (139.8, 60.0, [], [])
    props.multi_processor_count = 60
    assert doctor.gpus()[0][0]["peaks_of"].startswith("none: 'NVIDIA H200' has 60 SMs here")


def test_a_driver_without_a_visible_gpu_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(Path, "exists", lambda path: True)
    assert "torch finds no GPU" in doctor.gpus()[1][0]
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert doctor.gpus() == ([], [], ["no GPU: no NVIDIA driver on this machine"])


def test_text_names_libraries_impls_tools_and_counters() -> None:
    _, output = env()
    for part in ("library _C: loaded", "sdpa-flash", "compute-sanitizer", "hardware counters"):
        assert part in output


def test_something_broken_is_printed_and_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["numpy>=99", "no-such-thing"])
    code, output = env()
    assert code == 1
    assert f"numpy is {importlib.metadata.version('numpy')}; pip install 'numpy>=99'" in output
    assert "broken: no-such-thing is not installed; pip install 'no-such-thing'" in output


def test_requirements_of_extras_are_not_required() -> None:
    versions, wrong = doctor.packages(["numpy", "no-such-thing; extra == 'dev'"])
    assert list(versions) == ["numpy"] and wrong == []


@pytest.mark.parametrize(
    ("name", "said", "version"),
    [
        (
            "nvcc",
            "Cuda compilation tools, release 13.0, V13.0.88\nBuild cuda_13.0.r13.0",
            "13.0.88",
        ),
        ("ncu", "NVIDIA (R) Nsight Compute\nVersion 2025.3.1.0 (build 36398880)", "2025.3.1.0"),
        ("nsys", "NVIDIA Nsight Systems version 2025.3.2.474-253236389321v0", "2025.3.2.474"),
        ("g++", "g++ (Debian 12.2.0-14) 12.2.0\nCopyright (C) 2022", "12.2.0"),
        ("ninja", "1.13.0", "1.13.0"),
    ],
)
def test_versions_of_tools_are_read(only_here: Path, name: str, said: str, version: str) -> None:
    fake_tool(only_here, name, f"echo '{said}'")
    tool = doctor.find_tool(name)
    assert (tool.path, tool.version, tool.missing) == (str(only_here / name), version, None)


def test_tools_that_are_absent_or_do_not_run_have_a_remedy(only_here: Path) -> None:
    tool = doctor.find_tool("nvcc")
    assert tool.path is None
    assert tool.missing is not None and "pip install 'attnscope[nvcc]'" in tool.missing
    fake_tool(only_here, "ncu", "echo 'libcuda.so: no such file 12.0' >&2; exit 127")
    tool = doctor.find_tool("ncu")
    assert tool.version is None
    assert tool.missing is not None and "libcuda.so: no such file" in tool.missing


def test_a_tool_beside_path_is_found_newest_first(
    tmp_path: Path, only_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("2024.1.0", "2025.3.1"):
        fake_tool(tmp_path / version, "ncu", f"echo Version {version}")
    monkeypatch.setitem(doctor.TOOLS, "ncu", ((f"{tmp_path}/*/ncu",), "get it"))
    assert doctor.find_tool("ncu").version == "2025.3.1"
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.setitem(doctor.TOOLS, "ncu", (("2024.1.0/ncu",), "get it"))
    assert doctor.find_tool("ncu").version == "2024.1.0"


@pytest.mark.parametrize(
    ("params", "capable", "said"),
    [
        (None, False, "no NVIDIA driver"),
        ("RmProfilingAdminOnly: 0\n", False, "allowed for every user"),
        ("Other: 3\nRmProfilingAdminOnly: 1\n", True, "which this process has"),
        ("RmProfilingAdminOnly: 1\n", False, "NVreg_RestrictProfilingToAdminUsers=0"),
        ("Other: 3\n", False, "unknown"),
    ],
)
def test_permission_for_counters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, params: Any, capable: bool, said: str
) -> None:
    monkeypatch.setattr(doctor, "NVIDIA_PARAMS", tmp_path / "params")
    monkeypatch.setattr(doctor, "_has_capability", lambda bit: capable)
    if params is not None:
        (tmp_path / "params").write_text(params)
    assert said in doctor.counters()
