"""Build the two libraries of attnscope with ninja: plain shared libraries, loaded through torch.

_C.so       schemas, introspection and the CPU kernels
_C_cuda.so  the CUDA kernels; built where nvcc is found, loaded where torch has CUDA
"""

import fcntl
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))
import ptxas  # noqa: E402
from build_backend import find_package  # noqa: E402

PACKAGE = Path("python/attnscope")
BUILD = Path("build/native")

# Architectures of .cu files, by name, folder or its prefix: native code for each card that the
# kernels are tuned on, and PTX where later cards can run it. Hopper takes no tile of small.cu. Only
# sm80_backward uses instructions of sm_90; the PTX of the others gives the same code there.
SMALL = ("80,code=sm_80", "80,code=compute_80")
PORTABLE, HOPPER = (*SMALL, "80,code=sm_90"), ("90a,code=sm_90a",)
ARCHITECTURES = {"small": SMALL, "sm80_backward": (*SMALL, "90,code=sm_90"), "sm80": PORTABLE}
ARCHITECTURES |= {"attn": PORTABLE, "sm90": HOPPER}
SLOWEST = "sm90_forward"  # is compiled first, so that it does not end alone
ONLY_IN_C = {"library.cpp", "introspect.cpp"}  # they register what a process registers once
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000 -DUSE_CUDA"  # the C shim of torch 2.10
COMMON = "-std=c++17 -O3 -Icsrc"
HOST = f"{COMMON} -fPIC -fvisibility=hidden -Wall -Wextra"
DEVICE = f"{COMMON} -lineinfo -Xptxas -v -Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra"
RULES = """\
rule cxx
  command = g++ $flags -MD -MF $out.d -c $in -o $out
  description = g++ $in
  depfile = $out.d
rule cuda
  command = $nvcc $flags -MD -MF $out.d -c $in -o $out > $log 2>&1 || { cat $log; exit 1; }; $
    grep -vE '^ptxas info|bytes stack frame' $log || true
  description = nvcc $in
  depfile = $out.d
rule link
  command = g++ -shared $in -o $out -Wl,--no-as-needed,--exclude-libs,ALL $libs
  description = link $out
"""


def find_nvcc() -> Path | None:
    """Find nvcc: CUDA_HOME, PATH, the default location, or the compiler packages from PyPI."""
    homes = [Path(os.environ["CUDA_HOME"])] if os.environ.get("CUDA_HOME") else []
    on_path = shutil.which("nvcc")
    candidates = [home / "bin/nvcc" for home in homes] + ([Path(on_path)] if on_path else [])
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    candidates += [path / "cu13/bin/nvcc" for path in find_package("nvidia")]
    return next((nvcc for nvcc in candidates if os.access(nvcc, os.X_OK)), None)


def cuda_home(nvcc: Path) -> Path:
    """The toolkit that nvcc itself reports; the path of nvcc may be a link or a script."""
    dry_run = [str(nvcc), "--dryrun", "-x", "cu", "/dev/null", "-o", "/dev/null"]
    said = subprocess.run(dry_run, capture_output=True, text=True).stderr
    top = re.search(r"TOP=(.*)", said)
    if top is None:
        raise SystemExit(f"{nvcc} does not work:\n{said}")
    return Path(top[1].strip()).resolve()


def write_ninja(torch: Path, nvcc: Path | None, folder: Path, defines: str) -> list[Path]:
    """Write build.ninja into the folder; return the paths of the ptxas logs of the build."""
    include = f"-isystem {torch}/include -isystem {torch}/include/torch/csrc/api/include"
    libs = f"-L{torch}/lib -ltorch -ltorch_cpu -lc10 -lpthread"
    home = cuda_home(nvcc) if nvcc else None
    nvtx = f"-isystem {home}/include" if home else ""
    lines = [f"builddir = {folder}", RULES]
    objects: dict[str, list[Path]] = {"_C": [], "_C_cuda": []}
    kernels, logs = [], []

    def compile_cpp(source: Path, flags: str) -> Path:
        out = folder / source.with_suffix(".o")
        lines.append(f"build {out}: cxx {source}\n  flags = {flags}")
        return out

    sources = sorted(Path("csrc").rglob("*.cu")) if nvcc else []
    for source in sorted(sources, key=lambda s: s.parent.name != SLOWEST):
        out = folder / source.with_suffix(".o")
        names = (source.stem, source.parent.name, source.parent.name.partition("_")[0])
        targets = next(ARCHITECTURES[name] for name in names if name in ARCHITECTURES)
        codes = [f"-gencode arch=compute_{target}" for target in targets]
        flags = " ".join([DEVICE, defines, *codes])
        logs.append(out.with_suffix(".ptxas"))
        lines.append(f"build {out} | {logs[-1]}: cuda {source}\n  log = {logs[-1]}")
        lines.append(f"  nvcc = {nvcc}\n  flags = {flags}")
        kernels.append(out)
    for source in sorted(Path("csrc/cpu").glob("*.cpp")):
        objects["_C"].append(compile_cpp(source, HOST))
    for source in sorted(Path("csrc/binding").glob("*.cpp")):
        cuda_only = source.stem.endswith("_cuda")
        if cuda_only and not nvcc:
            continue
        out = compile_cpp(source, f"{HOST} {STABLE_ABI} {include} {nvtx}")
        if not cuda_only:
            objects["_C"].append(out)
        if not source.stem.endswith("_cpu") and source.name not in ONLY_IN_C:
            objects["_C_cuda"].append(out)
    objects["_C_cuda"] += kernels

    lines.append(f"build {folder}/_C.so: link {' '.join(map(str, objects['_C']))}\n  libs = {libs}")
    if nvcc:
        cudart = " ".join(f"-L{home}/{d}" for d in ("lib64", "lib", "targets/x86_64-linux/lib"))
        lines.append(f"build {folder}/_C_cuda.so: link {' '.join(map(str, objects['_C_cuda']))}")
        lines.append(f"  libs = {libs} {cudart} -lcudart_static -lrt -ldl")
    (folder / "build.ninja").write_text("\n".join(lines) + "\n")
    return logs


def run_ninja(folder: Path) -> None:
    ninja = [sys.executable, "-m", "ninja"] if importlib.util.find_spec("ninja") else ["ninja"]
    jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
    # Targets of a kernel in parallel. Not in the command: ninja recompiles when a command changes.
    flags = f"{os.environ.get('NVCC_APPEND_FLAGS', '')} --threads {jobs}"
    environment = {**os.environ, "NVCC_APPEND_FLAGS": flags}
    command = [*ninja, "-f", str(folder / "build.ninja"), "-j", jobs]
    if subprocess.run(command, env=environment).returncode:
        raise SystemExit("attnscope: the build failed; the compiler's words are above")


class BuildLibraries(build_ext):
    def run(self) -> None:
        os.chdir(ROOT)
        # --define builds an experimental variant in a separate folder; it is not installed.
        defines = " ".join(f"-D{name}" for name, _ in self.define or [])
        folder = Path(self.build_temp) if defines else BUILD
        folder.mkdir(parents=True, exist_ok=True)
        torch = next(iter(find_package("torch")), None)
        if torch is None:
            raise SystemExit("attnscope: no torch to build against; run: pip install 'torch>=2.10'")
        nvcc, missing = find_nvcc(), None
        if nvcc is None:
            missing = "no nvcc (CUDA_HOME, PATH, /usr/local/cuda or pip install 'attnscope[nvcc]')"
        elif not any(Path("csrc/kernels").glob("*/*.cu")):
            nvcc, missing = None, "no CUDA kernels in csrc/kernels"
        print(f"attnscope: CPU library only: {missing}" if missing else f"attnscope: using {nvcc}")
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            logs = write_ninja(torch, nvcc, folder, defines)
            run_ninja(folder)
            if defines:
                return
            kernels, warnings = ptxas.parse("\n".join(log.read_text() for log in logs))
            report = json.dumps({"not_built": missing, "kernels": kernels}, indent=1) + "\n"
            written = BUILD / "kernels.json"
            if kernels and not (written.exists() and written.read_text() == report):
                print(ptxas.table(kernels))
            ptxas.check(kernels, warnings)
            written.write_text(report)
            target = PACKAGE if self.inplace else Path(self.build_lib) / "attnscope"
            self.copy_to(target, ["_C.so", "kernels.json", *(["_C_cuda.so"] if nvcc else [])])

    def copy_to(self, target: Path, files: list[str]) -> None:
        target.mkdir(parents=True, exist_ok=True)
        if "_C_cuda.so" not in files:
            (target / "_C_cuda.so").unlink(missing_ok=True)
        for name in files:  # replace, do not overwrite: a process may have it mapped
            shutil.copy2(BUILD / name, target / f".{name}.new")
            os.replace(target / f".{name}.new", target / name)

    def get_outputs(self) -> list[str]:
        return [str(p) for p in (Path(self.build_lib) / "attnscope").glob("_C*.so")]


class CleanBuildPy(build_py):
    def run(self) -> None:  # files deleted from the package must leave build/lib
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class Py3Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":
    setup(
        ext_modules=[Extension("attnscope._C", [])],
        cmdclass={"build_ext": BuildLibraries, "build_py": CleanBuildPy, "bdist_wheel": Py3Wheel},
    )
