"""Reads the kernels of an ncu report: NVIDIA's module ncu_report, or ncu's raw page as CSV.

Columns are read by name, in any order; unknown ones are kept as metrics. Values come in base units
(bytes, ns, Hz), whatever unit the file has.
"""

from __future__ import annotations

import csv
import ctypes
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnscope.nsight.metrics import NAMES, TENSOR
from attnscope.profile.analysis.kernel_names import short_name

# Columns of the raw page that are no metrics; older versions have fewer.
NEEDED = ("ID", "Kernel Name")
_FACTS = (
    "ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream",
    "Block Size", "Grid Size", "Device", "CC", "Section Name",
)  # fmt: skip
_DEVICE = "device__attribute_display_name"  # "Device" is its number
_RANGE = re.compile(r"Push/Pop_Range|Start/(?:Stop|End)_Range")
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_TIMES = {"n": 1.0, "u": 1e3, "m": 1e6, "": 1e9}  # to ns
_GAPS = ("", "n/a", "nan", "-nan", "inf", "-inf", "no data")


@dataclass(frozen=True)
class Kernel:
    """One profiled launch.

    Attributes:
        number: its place in the report, from 0.
        symbol: the demangled name.
        grid, block: their sizes, such as "(132, 1, 1)".
        ranges: the NVTX ranges around the launch, in no order, as `name@domain`.
        values: metrics by ncu's names, in base units; those that are not finite are missing.
        not_finite: names of metrics whose value was not finite.
    """

    number: int
    symbol: str
    grid: str = ""
    block: str = ""
    device: str = ""
    capability: tuple[int, int] | None = None
    ranges: tuple[str, ...] = ()
    values: Mapping[str, float] = field(default_factory=dict)
    not_finite: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """A short readable name, as in the tables of `attnscope profile`."""
        return short_name(self.symbol)

    @property
    def function(self) -> str:
        """The function without namespaces, templates and arguments: ncu's base "function"."""
        plain = re.sub(r"\(anonymous namespace\)|<unnamed>", "unnamed", self.symbol)
        return re.split(r"[<(]", plain)[0].split("::")[-1].split(" ")[-1].strip()

    def get(self, key: str) -> float | None:
        """The value of a key of `metrics.NAMES`; None where the report does not have it."""
        return self.values.get(NAMES[key])

    @property
    def flops(self) -> tuple[float, float] | None:
        """(all, in tensor cores) FLOPs; a FMA is 2. None without counters of tensor cores."""
        tensor = self.sum(*TENSOR)
        if tensor is None:
            return None
        scalar = (self.sum("fadd", "fmul") or 0.0) + 2 * (self.get("ffma") or 0.0)
        return tensor + scalar, tensor

    def sum(self, *keys: str) -> float | None:
        """The sum of the values that are there; None if none is."""
        found = [value for value in map(self.get, keys) if value is not None]
        return math.fsum(found) if found else None


def read_csv(lines: Sequence[str], source: str) -> list[Kernel]:
    """The kernels of a raw page. A header without kernels is an empty list.

    Raises ValueError, with the header found, where there is no header or a column is missing.
    """
    rows = csv.reader(_table(lines, source))
    header = next(rows)
    if missing := [name for name in NEEDED if name not in header]:
        raise ValueError(
            f"{source} must have the column {missing[0]!r}, got the columns {', '.join(header)}. "
            "Write it with ncu --import REPORT --csv --page raw"
        )
    body = [row for row in rows if row and not row[0].startswith("==")]
    at = {name: number for number, name in enumerate(header)}
    units: Sequence[str] = [""] * len(header)
    if body and not body[0][at["ID"]].strip():  # the row of units
        units, *body = body
    return [_kernel(number, header, units, row) for number, row in enumerate(body)]


def _table(lines: Sequence[str], source: str) -> Sequence[str]:
    """The lines from the header on; what the program and ncu printed before it is left out."""
    for number, line in enumerate(lines):
        cells = next(csv.reader([line]), [])
        if "ID" in cells or "Kernel Name" in cells or "Process ID" in cells:
            return lines[number:]
    shown = next((line.strip() for line in lines if line.strip()), "an empty file")
    raise ValueError(f"{source} must be a raw page of ncu as CSV, got {shown[:120]!r}")


def _kernel(number: int, header: Sequence[str], units: Sequence[str], row: Sequence[str]) -> Kernel:
    if len(row) != len(header):
        raise ValueError(
            f"row {number + 1} must have {len(header)} cells, as the header, got {len(row)}: the "
            "file is cut off"
        )
    cells = dict(zip(header, row, strict=True))
    values: dict[str, float] = {}
    bad: list[str] = []
    for name, unit, text in zip(header, units, row, strict=True):
        if name in _FACTS or name == _DEVICE or _RANGE.search(name):
            continue
        value = to_number(text)
        if value is not None:
            values[name] = value * to_base(unit)
        elif text.strip().lower() in _GAPS[2:]:
            bad.append(name)
    return Kernel(
        number=number,
        symbol=demangle(cells["Kernel Name"]),
        grid=cells.get("Grid Size", ""),
        block=cells.get("Block Size", ""),
        device=cells.get(_DEVICE, ""),
        capability=_capability(cells.get("CC", "")),
        ranges=tuple(_ranges(header, row)),
        values=values,
        not_finite=tuple(bad),
    )


def to_number(text: str) -> float | None:
    """A number as ncu prints it, thousands separators included; None for any other text."""
    cleaned = text.strip().replace(",", "").replace("\u202f", "").replace("\xa0", "")
    try:
        value = float(cleaned)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def to_base(unit: str) -> float:
    """The factor from a unit of ncu to its base: bytes, ns, Hz, and everything else unchanged."""
    main, _, per = unit.strip().partition("/")
    factor = 1.0
    if match := re.fullmatch(r"([KMGTP]?)bytes?", main, re.IGNORECASE):
        factor = _PREFIXES[match[1].lower()]
    elif match := re.fullmatch(r"([num]?)s(?:econds?)?", main):
        factor = _TIMES[match[1]]
    elif match := re.fullmatch(r"([KMGT]?)hz", main, re.IGNORECASE):
        factor = _PREFIXES[match[1].lower()]
    if match := re.fullmatch(r"([num]?)s(?:econds?)?", per):
        factor *= 1e9 / _TIMES[match[1]]  # a rate is per second
    return factor


def _capability(text: str) -> tuple[int, int] | None:
    match = re.fullmatch(r"(\d+)\.(\d+)", text.strip())
    return (int(match[1]), int(match[2])) if match else None


def _ranges(header: Sequence[str], row: Sequence[str]) -> Iterator[str]:
    """Ranges as ncu prints them: `domain:name:...` for each, in quotes where there are several."""
    for name, text in zip(header, row, strict=True):
        if not _RANGE.search(name):
            continue
        for one in re.findall(r'"([^"]*)"', text) or text.splitlines():
            yield from _range(one)


def _range(text: str) -> Iterator[str]:
    """`name@domain` of a range, or the name alone in the default domain."""
    # domain:name:payload type:payload:colour type:colour:message type:message. The message is the
    # name, or "none"; names may contain colons.
    for message in (r"\2", "[^:]*"):
        form = rf"(<[^>]*>|[^:]*):(.+?)(?::[^:]*){{5}}:{message}"
        if match := re.fullmatch(form, text.strip(), re.DOTALL):
            yield match[2] if match[1].startswith("<") else f"{match[2]}@{match[1]}"
            return


def demangle(symbol: str) -> str:
    """A C++ symbol as its declaration; any other name unchanged. ncu's own omits namespaces."""
    if not symbol.startswith("_Z"):
        return symbol
    try:
        library = ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return symbol
    library.__cxa_demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    found = library.__cxa_demangle(symbol.encode(), None, None, ctypes.byref(status))
    if not found:
        return symbol
    text = ctypes.string_at(found).decode(errors="replace")
    ctypes.CDLL(None).free(ctypes.c_void_p(found))
    return text


def read_report(path: Path) -> list[Kernel]:
    """The kernels of a .ncu-rep by NVIDIA's module. Raises ImportError where it is missing.

    Raises ValueError for a file that it cannot read.
    """
    import ncu_report

    try:
        context = ncu_report.load_report(str(path))
    except Exception as error:  # its own exception types, by version
        raise ValueError(f"report must be readable by ncu_report, got {path}: {error}") from None
    actions = [
        context[at][number] for at in range(len(context)) for number in range(len(context[at]))
    ]
    return [_from_action(number, action) for number, action in enumerate(actions)]


def _from_action(number: int, action: Any) -> Kernel:
    values: dict[str, float] = {}
    bad: list[str] = []
    for name in action.metric_names():
        metric = action[name]
        value = metric.value()
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if math.isfinite(value):
            values[name] = value * to_base(metric.unit() or "")
        else:
            bad.append(name)
    return Kernel(
        number=number,
        symbol=demangle(action.name(action.NameBase_MANGLED)),
        grid=_size(values, "launch__grid_dim"),
        block=_size(values, "launch__block_dim"),
        device=str(action[_DEVICE].value()) if _DEVICE in action.metric_names() else "",
        capability=_attribute(values),
        ranges=tuple(_action_ranges(action)),
        values=values,
        not_finite=tuple(bad),
    )


def _size(values: Mapping[str, float], name: str) -> str:
    sizes = [values.get(f"{name}_{axis}") for axis in "xyz"]
    return "" if None in sizes else f"({', '.join(f'{size:.0f}' for size in sizes)})"


def _attribute(values: Mapping[str, float]) -> tuple[int, int] | None:
    name = "device__attribute_compute_capability"
    parts = [values.get(f"{name}_{part}") for part in ("major", "minor")]
    return None if None in parts else (int(parts[0] or 0), int(parts[1] or 0))


def _action_ranges(action: Any) -> Iterator[str]:
    state = action.nvtx_state()
    for identifier in state.domains() if state else ():
        domain = state.domain_by_id(identifier)
        own = domain.name()
        suffix = "" if own.startswith("<") or not own else f"@{own}"
        for name in (*domain.push_pop_ranges(), *domain.start_end_ranges()):
            yield f"{name}{suffix}"
