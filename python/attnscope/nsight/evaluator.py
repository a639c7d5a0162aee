"""The metric names of a chip, by the evaluator in CUPTI; it needs no GPU."""

from __future__ import annotations

import ctypes
import difflib
import os
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

# Where wheels and toolkits have CUPTI. Triton's copy for Blackwell lacks the evaluator's data.
_PLACES = (
    "nvidia/cu*/lib/libcupti.so*",
    "nvidia/cuda_cupti/lib/libcupti.so*",
    "triton/backends/nvidia/lib/cupti/libcupti.so",
)
_TOOLKIT = ("lib64/libcupti.so", "lib/libcupti.so", "extras/CUPTI/lib64/libcupti.so")
_KINDS = 3  # counters, ratios, throughputs
_SIZE, _POINTER, _TEXT = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_char_p


def _params(name: str, *fields: tuple[str, Any]) -> type[ctypes.Structure]:
    """A parameter struct of cupti_profiler_host.h: every one begins with its size."""
    body = [("structSize", _SIZE), ("pPriv", _POINTER), *fields]
    return type(name, (ctypes.Structure,), {"_fields_": body})


_Initialize = _params(
    "Initialize",
    ("kind", ctypes.c_int),
    ("chip", _TEXT),
    ("availability", _POINTER),
    ("host", _POINTER),
)
_BaseMetrics = _params(
    "BaseMetrics",
    ("host", _POINTER),
    ("kind", ctypes.c_int),
    ("names", ctypes.POINTER(_TEXT)),
    ("count", _SIZE),
)
_Properties = _params(
    "Properties",
    ("host", _POINTER),
    ("name", _TEXT),
    ("description", _TEXT),
    ("unit", _TEXT),
    ("dimension", _TEXT),
    ("kind", ctypes.c_int),
)


class Evaluator:
    """The metrics of one chip, such as "GH100". `of` makes one."""

    def __init__(self, library: Any, chip: str) -> None:
        self._library, self.chip = library, chip
        made = self._call("Initialize", _Initialize(chip=chip.encode()))
        self._host = made.host

    @classmethod
    def of(cls, chip: str) -> Evaluator:
        """Raises LookupError where no CUPTI is installed, or it does not know the chip."""
        for path in _libraries():
            try:
                return cls(ctypes.CDLL(str(path)), chip)
            except (OSError, AttributeError, LookupError):
                continue
        raise LookupError(
            f"no installed CUPTI evaluates metrics of {chip}. pip install triton has one"
        )

    def has(self, name: str) -> bool:
        """Whether the chip has a metric, with its suffixes, such as dram__bytes.sum."""
        try:
            self._call("GetMetricProperties", _Properties(host=self._host, name=name.encode()))
        except LookupError:
            return False
        return True

    @cache  # noqa: B019 (a few evaluators in a process)
    def names(self) -> tuple[str, ...]:
        """The names of the chip's metrics without suffixes, sorted."""
        found: set[str] = set()
        for kind in range(_KINDS):
            got = self._call("GetBaseMetrics", _BaseMetrics(host=self._host, kind=kind))
            found |= {got.names[at].decode() for at in range(got.count)}
        return tuple(sorted(found))

    def similar(self, name: str, most: int = 5) -> list[str]:
        """Names of metrics that look like `name`, the closest first."""
        base = name.partition(".")[0]
        return difflib.get_close_matches(base, self.names(), n=most, cutoff=0.6)

    def _call(self, function: str, params: Any) -> Any:
        last, kind = params._fields_[-1]
        params.structSize = getattr(type(params), last).offset + ctypes.sizeof(kind)
        if code := getattr(self._library, f"cuptiProfilerHost{function}")(ctypes.byref(params)):
            raise LookupError(f"CUPTI's {function} returned {code} for {self.chip}")
        return params


def _libraries() -> Iterator[Path]:
    for folder in map(Path, sys.path):
        for pattern in _PLACES:
            yield from sorted(folder.glob(pattern))
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if home:
            yield from filter(Path.is_file, (Path(home) / name for name in _TOOLKIT))


def unknown(chip: str, names: Sequence[str]) -> dict[str, list[str]]:
    """The metrics that a chip does not have, each with similar names. Raises LookupError."""
    evaluator = Evaluator.of(chip)
    return {name: evaluator.similar(name) for name in names if not evaluator.has(name)}
