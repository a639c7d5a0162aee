"""The build: libraries linked, files in the wheel, parsing of compiler output."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import attnscope
from attnscope import _load
from attnscope.schemas import FORWARD

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = sorted(_load.PACKAGE.glob("_C*.so"))
TORCH_HOME = Path(torch.__file__).parent


@pytest.fixture(scope="module")
def setup_module_of_tree():
    spec = importlib.util.spec_from_file_location("setup_of_attnscope", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def ptxas(setup_module_of_tree):
    return setup_module_of_tree.ptxas


def output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_there_is_a_library():
    assert "_C.so" in [library.name for library in LIBRARIES]


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_a_library_needs_only_the_c_shim_of_torch(library):
    """No C++ symbol of torch is used, so that one build runs on every later release."""
    shim = re.compile(r"(aoti_torch_|torch_)\w+$")
    # libtorch_cpu carries a few unversioned symbols of a newer libstdc++, for old systems.
    system = re.compile(r"\S+@(GLIBC|GLIBCXX|CXXABI|GCC)_[\w.]+$|_ZNK?St(?!\w*(2at|3c10|5torch))")
    undefined = [line.split() for line in output_of("nm", "-D", "-u", str(library)).splitlines()]
    strong = [name for kind, name in undefined if kind == "U"]
    assert strong
    assert [name for name in strong if not shim.match(name) and not system.match(name)] == []


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_a_library_links_torch_and_the_system_only(library):
    dynamic = output_of("readelf", "-d", str(library))
    needed = set(re.findall(r"\(NEEDED\).*\[(\w[\w+-]*)\.so", dynamic))
    system = {"libc", "libm", "libdl", "librt", "libpthread", "libstdc++", "libgcc_s"}
    assert needed - system - {"ld-linux-x86-64"} == {"libtorch", "libtorch_cpu", "libc10"}
    assert "RPATH" not in dynamic and "RUNPATH" not in dynamic


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_a_library_keeps_its_cuda_runtime_to_itself(library):
    defined = output_of("nm", "-D", "--defined-only", str(library))
    assert re.findall(r"\b_*cuda\w+", defined) == []


@pytest.mark.long
@pytest.mark.timeout(900)
def test_one_wheel_serves_every_python(tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    command = [*pip, "wheel", str(ROOT), "--no-build-isolation", "--no-deps", "--no-index"]
    subprocess.run([*command, "-q", "-w", str(tmp_path)], check=True, stdin=subprocess.DEVNULL)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"attnscope-{attnscope.__version__}-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        archive.extractall(tmp_path / "site")
    built = {"attnscope/kernels.json", *(f"attnscope/{library.name}" for library in LIBRARIES)}
    assert built <= names
    assert {Path(name).suffix for name in names} <= {".py", ".so", ".json", ".yaml", ".j2"}
    assert all(name.startswith("attnscope/") for name in names)

    assert "attnscope/profile/render/templates/profile.html.j2" in names
    script = "import attnscope, attnscope.ops; print(attnscope.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    run = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.stdout.strip() == str(tmp_path / "site/attnscope/__init__.py"), run.stderr


PTXAS_LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN4demo12plain_kernelEPf' for 'sm_80'
ptxas info    : Function properties for _ZN4demo12plain_kernelEPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 1 barriers, 128 bytes smem, 360 bytes cmem[0]
ptxas info    : Compile time = 1.768 ms
"""
SPILLING_LOG = """\
ptxas info    : Overriding maximum register limit 256 for '_ZN4demo12spill_kernelIfLi64EEEvPT_PKS1_'
ptxas info    : Compiling entry function '_ZN4demo12spill_kernelIfLi64EEEvPT_PKS1_' for 'sm_90a'
ptxas info    : Function properties for _ZN4demo12spill_kernelIfLi64EEEvPT_PKS1_
    13000 bytes stack frame, 16024 bytes spill stores, 27136 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers, 13000 bytes cumulative stack size
"""
SERIALISED = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to insufficient register resources for the wgmma pipeline"
)


def test_resource_usage_is_read_from_ptxas(ptxas):
    kernels, warnings = ptxas.parse(PTXAS_LOG + SPILLING_LOG)
    names = ("kernel", "arch", "registers", "static_shared_bytes", "stack_bytes")
    names += ("spill_store_bytes", "spill_load_bytes")
    assert [[kernel[name] for name in names] for kernel in kernels] == [
        ["demo::plain_kernel", "sm_80", 10, 128, 0, 0, 0],
        ["demo::spill_kernel<float, 64>", "sm_90a", 32, 0, 13000, 16024, 27136],
    ]
    assert warnings == []
    assert ptxas.table(kernels).count("\n") == 2


def test_a_kernel_in_an_unnamed_namespace_keeps_its_name(ptxas):
    mangled = ["_ZN4demo12_GLOBAL__N_16kernelILi8EEEvPf", "_Z6kernelIXadL_Z4implfEEEvf"]
    assert ptxas.demangle(mangled) == [
        "demo::(anonymous namespace)::kernel<8>",
        "kernel<&(impl(float))>",
    ]


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (SPILLING_LOG, "demo::spill_kernel<float, 64> (sm_90a) spills 43160 bytes of registers"),
        (PTXAS_LOG + SERIALISED, "(C7510)"),
        (PTXAS_LOG + "ptxas warning : something it does not like", "does not like"),
    ],
    ids=["spill", "C75xx", "warning"],
)
def test_a_spill_or_a_warning_ends_the_build(ptxas, log, said, capsys, monkeypatch):
    monkeypatch.delenv("ATTNSCOPE_ALLOW_SPILLS", raising=False)
    with pytest.raises(SystemExit, match="ATTNSCOPE_ALLOW_SPILLS=1"):
        ptxas.check(*ptxas.parse(log))
    assert said in capsys.readouterr().err
    monkeypatch.setenv("ATTNSCOPE_ALLOW_SPILLS", "1")
    ptxas.check(*ptxas.parse(log))
    assert said in capsys.readouterr().err


def test_a_log_of_something_else_is_refused(ptxas):
    with pytest.raises(ValueError, match="says nothing about _Z1kv"):
        ptxas.parse("ptxas info : Compiling entry function '_Z1kv' for 'sm_80'\n")


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_nvcc_is_taken_from_cuda_home_then_from_path(setup_module_of_tree, tmp_path, monkeypatch):
    first = executable(tmp_path / "home/bin/nvcc")
    second = executable(tmp_path / "path/nvcc")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:{os.environ['PATH']}")
    assert setup_module_of_tree.find_nvcc() == first
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nothing"))
    assert setup_module_of_tree.find_nvcc() == second


def test_a_broken_nvcc_is_named(setup_module_of_tree, tmp_path):
    with pytest.raises(SystemExit, match=f"{tmp_path}/nvcc does not work"):
        setup_module_of_tree.cuda_home(executable(tmp_path / "nvcc"))


@pytest.fixture
def ninja_file(setup_module_of_tree, tmp_path, monkeypatch):
    """Write the ninja file of a tree with one kernel of each prefix."""
    for source in ("cpu/a.cpp", "binding/library.cpp", "binding/forward.cpp"):
        executable(tmp_path / "csrc" / source)
    for source in ("binding/forward_cpu.cpp", "binding/forward_cuda.cpp"):
        executable(tmp_path / "csrc" / source)
    for source in ("kernels/sm80_forward", "kernels/sm90_forward", "attn"):
        executable(tmp_path / "csrc" / source / "launch.cu")
    for source in ("kernels/sm80_backward/launch.cu", "kernels/other/small.cu"):
        executable(tmp_path / "csrc" / source)
    (tmp_path / "build/native").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(setup_module_of_tree, "cuda_home", lambda nvcc: Path("/cuda"))

    def write(nvcc: Path | None) -> tuple[str, list[Path]]:
        logs = setup_module_of_tree.write_ninja(TORCH_HOME, nvcc, Path("build/native"), "")
        return Path("build/native/build.ninja").read_text(), logs

    return write


def link_line(text: str, library: str) -> str:
    (line,) = re.findall(rf"^build build/native/{library}\.so: link (.*)$", text, re.MULTILINE)
    return line.replace("build/native/csrc/", "")


def test_kernels_are_compiled_for_the_cards_of_their_folder(ninja_file):
    text, logs = ninja_file(Path("/cuda/bin/nvcc"))
    edges = dict(re.findall(r"cuda csrc/(?:kernels/)?(\w+)/\w+.cu\n((?:  .*\n)*)", text))
    portable = re.findall(r"-gencode (\S+)", edges["sm80_forward"])
    assert portable == [
        "arch=compute_80,code=sm_80",
        "arch=compute_80,code=compute_80",
        "arch=compute_80,code=sm_90",
    ]
    assert re.findall(r"-gencode (\S+)", edges["sm90_forward"]) == ["arch=compute_90a,code=sm_90a"]
    assert "torch" not in "".join(edges.values())
    assert "fast_math" not in text
    assert re.findall(r"-gencode (\S+)", edges["attn"]) == portable
    backward = re.findall(r"-gencode (\S+)", edges["sm80_backward"])
    assert backward == [*portable[:2], "arch=compute_90,code=sm_90"]
    assert re.findall(r"-gencode (\S+)", edges["other"]) == portable[:2]
    assert len(logs) == 5
    shared = "binding/forward.o"
    assert link_line(text, "_C").split() == [
        "cpu/a.o",
        shared,
        "binding/forward_cpu.o",
        "binding/library.o",
    ]
    assert link_line(text, "_C_cuda").split()[:2] == [shared, "binding/forward_cuda.o"]


def test_without_nvcc_there_is_the_cpu_library_alone(ninja_file):
    text, logs = ninja_file(None)
    assert logs == []
    assert "_C_cuda" not in text and "_cuda.cpp" not in text
    assert "binding/forward_cpu.o" in link_line(text, "_C")


@pytest.fixture
def empty_package(tmp_path, monkeypatch):
    monkeypatch.setattr(_load, "PACKAGE", tmp_path)
    return tmp_path


def test_a_missing_library_is_an_error_with_the_remedy(empty_package):
    with pytest.raises(ImportError, match=r"_C\.so is not built; run `make build`"):
        _load._load()


def test_a_library_that_does_not_load_is_an_error_with_the_reason(empty_package):
    (empty_package / "_C.so").write_text("not a library")
    with pytest.raises(
        ImportError, match=rf"does not load in torch {re.escape(torch.__version__)}"
    ):
        _load._load()


@pytest.mark.parametrize(
    ("op", "schema", "difference"),
    [
        ("rearward", FORWARD, "it has no op rearward"),
        (
            "forward",
            FORWARD.replace("SymInt max_seqlen_k", "int max_seqlen_k"),
            "its op forward must have 'int max_seqlen_k=0', got 'SymInt max_seqlen_k=0'",
        ),
        (
            "forward",
            FORWARD.replace("window_left=-1", "window_left=0"),
            "its op forward must have 'SymInt window_left=0', got 'SymInt window_left=-1'",
        ),
        (
            "forward",
            FORWARD.replace(", int variant=0", ""),
            r"must have 'float softcap=0.\) -> \(Tensor out', got 'float softcap=0.'",
        ),
    ],
)
def test_a_library_of_other_sources_is_stale(monkeypatch, op, schema, difference):
    monkeypatch.setattr(_load, "OPS", {"kernels": "() -> str", op: schema})
    with pytest.raises(ImportError, match=f"is stale: .*{difference}.* run `make build`"):
        _load._load()


def test_a_library_that_was_not_built_has_a_reason(empty_package):
    (empty_package / "_C.so").symlink_to(LIBRARIES[0].resolve())
    (empty_package / "kernels.json").write_text(json.dumps({"not_built": "no nvcc", "kernels": []}))
    assert _load._load() == {"_C": "loaded", "_C_cuda": "not built: no nvcc"}


def test_the_status_of_this_build_matches_its_files():
    status = _load.library_status()
    assert status["_C"] == "loaded"
    if len(LIBRARIES) == 1:
        assert status["_C_cuda"].startswith("not built: ")
    elif torch.version.cuda is None:
        assert status["_C_cuda"] == "built, not loaded: this torch has no CUDA"
    else:
        assert status["_C_cuda"] == "loaded"


def test_the_version_is_the_same_everywhere():
    assert f'version = "{attnscope.__version__}"' in (ROOT / "pyproject.toml").read_text()
