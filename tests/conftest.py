"""Marks and settings shared by all tests."""

import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

# Workers share the cores, also with the processes that their tests start.
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if WORKERS > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // WORKERS)))

import torch  # noqa: E402  after the number of its threads

# Inductor's cache key has no op schema, so Inductor would run a graph cached by another build.
for cache in ("TORCHINDUCTOR_FX_GRAPH_CACHE", "TORCHINDUCTOR_AUTOGRAD_CACHE"):
    os.environ.setdefault(cache, "0")

NEED_GPU = {"gpu", "sm90", "sanitizer"}
NO_GPU = "no CUDA device, or this torch has no CUDA"


def pytest_report_header() -> str | None:
    return None if torch.cuda.is_available() else f"{NO_GPU}: tests that need one are left out"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """A file test_*_gpu.py needs a GPU in all of its thousands of tests."""
    gpu_only = collection_path.match("test_*_gpu.py")
    return True if gpu_only and not torch.cuda.is_available() else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu, kept, left_out = torch.cuda.is_available(), [], []
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if marks & {"slow", "sanitizer"} and "timeout" not in marks:
            item.add_marker(pytest.mark.timeout(1800))
        (kept if gpu or not marks & NEED_GPU else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    # One worker begins with the long tests, so that short ones are left for the end.
    items[:] = sorted(kept, key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    gc.freeze()  # the collector passes over what the imports made: 200 ms each time


def pytest_sessionfinish() -> None:
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    marks = {mark.name for mark in item.iter_markers()}
    if "sm90" in marks and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip(f"needs a Hopper device, this one is {torch.cuda.get_device_name()}")
    if "timing" in marks and WORKERS > 1:
        pytest.skip("measures time, which other workers disturb: run -m timing without -n")
    if "sanitizer" in marks and shutil.which("compute-sanitizer") is None:
        pytest.skip("no compute-sanitizer on PATH")


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # without the stack that torch.manual_seed keeps for a device: 2 ms
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def default_stream() -> Iterator[None]:
    """Fail a test that leaves another stream current, on which later tests would run."""
    yield
    if torch.cuda.is_initialized():
        left, default = torch.cuda.current_stream(), torch.cuda.default_stream()
        torch.cuda.set_stream(default)
        assert left == default, f"the current stream must be the default one, got {left}"
