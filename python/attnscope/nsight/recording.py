"""Reads the sqlite export of an nsys report into arrays; times are in nanoseconds.

Columns are found by name: a version may lack optional ones. A table that is absent had no events.
Each column of a table is fetched as one text and parsed as a whole, which is several times faster
than a row at a time: reports have millions of rows.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

Array = Any  # numpy.ndarray of int64
Columns = dict[str, Array]
T = TypeVar("T")

MAGIC = b"SQLite format 3\x00"
CHUNK_ROWS = 400_000  # bounds the text of a column in memory
KERNEL, COPY, FILL = range(3)  # kinds of GPU work
PUSH_POP, START_END, DOMAIN_NAME = 59, 60, 75  # NVTX event types
UNKNOWN = -(1 << 62)  # a number that the report does not have; times may be below 0
PROCESS = 1 << 24  # globalTid = globalPid + thread; globalPid is a multiple of this
COPY_KINDS = {1: "host to device", 2: "device to host", 8: "device to device", 10: "peer to peer"}
WARNING = 2  # severity of a message
MEMORY_KINDS = (
    "pageable", "pinned", "device", "array", "managed", "device static", "managed static",
    "unknown",
)  # fmt: skip

# Calls that launch work, wait for the device, and allocate or free memory.
_LAUNCH = re.compile(r"Launch|Memcpy|Memset|^cuMem(cpy|set)")
_SYNC = re.compile(r"Synchronize$|^cu(da)?EventSynchronize|StreamWaitValue")
_ALLOCATE = re.compile(
    r"^cuda(Malloc|Free|Host(Alloc|Register|Unregister))|^cuMem(Alloc|Free|Create|Release|Map|Unmap"
    r"|Host(Alloc|Register))"
)
_VERSION = re.compile(r"(_v\d+)?(_ptsz|_ptds)?$")


class RecordingError(ValueError):
    """A file that is no usable export of nsys."""


@dataclass
class Recording:
    """GPU work, API calls and NVTX ranges of one report.

    Attributes:
        work: kernels, copies and fills, by start: `start end device stream pid correlation name
            kind bytes copy_kind src_kind dst_kind`. `name` (mangled where the report has that) is
            a key of `strings`.
        calls: launches, synchronisations and allocations, by start: `start end tid correlation
            name`.
        memory: allocations and releases of memory, where they were recorded, by start: `start
            device bytes kind` (of MEMORY_KINDS) `released` (1 or 0).
        ranges: NVTX ranges: `start end tid name domain kind` (PUSH_POP or START_END).
        texts: names of ranges and domains; `name` and `domain` of `ranges` index it.
        registered: whether the name of each range is a registered string.
        gpus: name of each device.
        messages: errors and warnings of nsys itself.
        breaks: times between captures that were joined.
    """

    path: Path
    strings: dict[int, str]
    work: Columns
    calls: Columns
    ranges: Columns
    memory: Columns
    texts: list[str]
    registered: Array
    gpus: dict[int, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    breaks: tuple[int, ...] = ()

    @property
    def kernels(self) -> int:
        return int((self.work["kind"] == KERNEL).sum())

    def name(self, key: int) -> str:
        """The text of a string id."""
        return self.strings.get(int(key), f"(string {key})")

    def call_name(self, key: int) -> str:
        """The name of an API function, without its version."""
        return _VERSION.sub("", self.name(key))

    def calls_like(self, pattern: re.Pattern[str]) -> Array:
        """Mask of the calls whose function matches."""
        keys = [key for key in np.unique(self.calls["name"]) if pattern.search(self.call_name(key))]
        return np.isin(self.calls["name"], keys)

    @property
    def allocations(self) -> Array:
        return self.calls_like(_ALLOCATE)

    @property
    def synchronisations(self) -> Array:
        return self.calls_like(_SYNC)

    def range_names(self) -> dict[str, int]:
        """`name` or `name@domain` of every range, and how many there are."""
        keys = self.ranges["name"] * len(self.texts) + self.ranges["domain"]
        found = {}
        for key, count in zip(*np.unique(keys, return_counts=True), strict=True):
            name, domain = (self.texts[at] for at in divmod(int(key), len(self.texts)))
            found[qualified(name, domain)] = int(count)
        return found


def qualified(name: str, domain: str) -> str:
    """A range as nsys selects it: `name`, or `name@domain` outside the default domain."""
    escaped = name.replace("@", r"\@")
    return f"{escaped}@{domain}" if domain else escaped


def read_recording(path: Path) -> Recording:
    """Read an sqlite export. Raises RecordingError for a file that is none, or that is damaged."""
    try:
        with path.open("rb") as file:
            head = file.read(len(MAGIC))
    except OSError as error:
        raise RecordingError(f"report must be readable, got {path}: {error.strerror}") from None
    if head != MAGIC:
        what = "an empty file" if not head else "a file of another format"
        raise RecordingError(
            f"report must be an sqlite export of nsys, got {what}: {path}. Make one with nsys "
            "export --type sqlite"
        )
    try:
        # Most of the time is spent inside sqlite, which other threads need not wait for.
        with ThreadPoolExecutor(2) as pool:
            work = pool.submit(_with_reader, path, _Reader.work)
            calls = pool.submit(_with_reader, path, _Reader.calls)
            rest = _with_reader(path, _Reader.rest)
            found = Recording(path, work=work.result(), calls=calls.result(), **rest)
        users = set(np.unique(found.calls["tid"] // PROCESS).tolist())
        found.messages = _with_reader(path, lambda reader: reader.messages(users))
        return found
    except sqlite3.DatabaseError as error:
        raise RecordingError(f"report must be an undamaged file, got {path}: {error}") from None


def _with_reader(path: Path, method: Callable[[_Reader], T]) -> T:
    """Read a part of a file over a connection of its own."""
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db:
        return method(_Reader(db, path))


class _Reader:
    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        self.db, self.path = db, path
        db.text_factory = lambda text: text.decode(errors="replace")  # names are any bytes
        rows = db.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
        self.tables = [name for (name,) in rows]
        if "StringIds" not in self.tables:
            there = ", ".join(self.tables[:20]) or "no table"
            raise RecordingError(
                f"report must have the table StringIds of nsys, got {path} with {there}"
            )

    def strings(self) -> dict[int, str]:
        return dict(self.db.execute("SELECT id, value FROM StringIds"))

    def rest(self) -> dict[str, Any]:
        """Ranges, names of GPUs, messages, strings."""
        strings = self.strings()
        ranges, texts, registered = self._ranges(strings)
        return {
            "strings": strings, "ranges": ranges, "texts": texts, "registered": registered,
            "gpus": self._gpus(), "memory": self._memory(),
        }  # fmt: skip

    def columns(
        self, table: str, names: Sequence[str], optional: Sequence[str] = (), where: str = "1"
    ) -> Columns:
        """Columns of a table as arrays; optional ones are UNKNOWN where the table lacks them.

        Raises RecordingError for a missing column, with the columns that are there.
        """
        if table not in self.tables:
            return {name: np.empty(0, np.int64) for name in (*names, *optional)}
        there = self._column_names(table)
        for name in names:
            if name not in there:
                raise RecordingError(
                    f"{self.path}: {table} must have the column {name}, got {', '.join(there)}"
                )
        order = [name for name in (*names, *optional) if name in there]
        chosen = [f"group_concat(COALESCE({name}, {UNKNOWN}))" for name in order]
        query = f"SELECT count(*), {', '.join(chosen)} FROM {table} "
        query += f"WHERE rowid > ? AND rowid <= ? AND ({where})"
        (last,) = self.db.execute(f"SELECT max(rowid) FROM {table}").fetchone()
        parts: dict[str, list[Array]] = {name: [] for name in order}
        for low in range(0, last or 0, CHUNK_ROWS):
            count, *texts = self.db.execute(query, (low, low + CHUNK_ROWS)).fetchone()
            for name, text in zip(order, texts, strict=True):
                values = np.fromstring(text or "", np.int64, sep=",")
                if len(values) != count:
                    raise RecordingError(
                        f"{self.path}: {table}.{name} must have {count} numbers, got {len(values)}"
                    )
                parts[name].append(values)
        found = {
            name: np.concatenate(arrays) if arrays else np.empty(0, np.int64)
            for name, arrays in parts.items()
        }
        size = len(next(iter(found.values())))
        absent = np.full(size, UNKNOWN, np.int64)
        return {name: found.get(name, absent) for name in (*names, *optional)}

    def _column_names(self, table: str) -> list[str]:
        return [row[1] for row in self.db.execute(f"PRAGMA table_info({table})")]

    def work(self) -> Columns:
        """Kernels, copies and fills."""
        common = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid")
        copied = ("copyKind", "srcKind", "dstKind")
        names = (*common, "demangledName")
        kernels = self.columns("CUPTI_ACTIVITY_KIND_KERNEL", names, ("mangledName",))
        copies = self.columns("CUPTI_ACTIVITY_KIND_MEMCPY", (*common, "bytes"), copied)
        fills = self.columns("CUPTI_ACTIVITY_KIND_MEMSET", (*common, "bytes"))
        # nsys writes template arguments as "(int)4"; from the mangled name they are as in PyTorch.
        mangled = kernels.pop("mangledName")
        kernels["demangledName"] = np.where(mangled == UNKNOWN, kernels["demangledName"], mangled)
        tables = (kernels, copies, fills)
        sizes = [len(one["start"]) for one in tables]
        renamed = {
            "start": "start", "end": "end", "device": "deviceId", "stream": "streamId",
            "pid": "globalPid", "correlation": "correlationId", "name": "demangledName",
            "bytes": "bytes", "copy_kind": "copyKind", "src_kind": "srcKind", "dst_kind": "dstKind",
        }  # fmt: skip
        found = {
            new: np.concatenate(
                [
                    one.get(old, np.full(size, UNKNOWN, np.int64))
                    for one, size in zip(tables, sizes, strict=True)
                ]
            )
            for new, old in renamed.items()
        }
        found["kind"] = np.repeat(np.array([KERNEL, COPY, FILL]), sizes)
        order = np.argsort(found["start"], kind="stable")
        return {name: values[order] for name, values in found.items()}

    def calls(self) -> Columns:
        """Calls that matter here; most of the others ask for attributes."""
        table = "CUPTI_ACTIVITY_KIND_RUNTIME"
        names = ("start", "end", "globalTid", "correlationId", "nameId")
        wanted = []
        for key, text in self.strings().items():
            name = _VERSION.sub("", text)
            if name.startswith("cu") and any(
                pattern.search(name) for pattern in (_LAUNCH, _SYNC, _ALLOCATE)
            ):
                wanted.append(str(key))
        found = self.columns(table, names, where=f"nameId IN ({','.join(wanted) or 'NULL'})")
        order = np.argsort(found["start"], kind="stable")
        renamed = zip(("start", "end", "tid", "correlation", "name"), names, strict=True)
        return {new: found[old][order] for new, old in renamed}

    def _ranges(self, strings: dict[int, str]) -> tuple[Columns, list[str], Array]:
        """NVTX ranges; one that is still open at the end of the recording ends with it."""
        table = "NVTX_EVENTS"
        where = f"eventType IN ({PUSH_POP}, {START_END})"
        raw = self.columns(
            table,
            ("start", "eventType", "globalTid"),
            ("end", "textId", "domainId"),
            where,
        )
        texts, index = [""], {"": 0}

        def number(text: str | None) -> int:
            key = text or ""
            if key not in index:
                index[key] = len(texts)
                texts.append(key)
            return index[key]

        ids = np.unique(raw["textId"])
        by_id = np.array([number(strings.get(int(key))) for key in ids], np.int64)
        name = by_id[np.searchsorted(ids, raw["textId"])] if len(ids) else raw["textId"]
        registered = raw["textId"] != UNKNOWN
        if table in self.tables and "text" in self._column_names(table):
            query = f"SELECT text FROM {table} WHERE {where} AND textId IS NULL ORDER BY rowid"
            if "textId" not in self._column_names(table):
                query = query.replace(" AND textId IS NULL", "")
            name[~registered] = [number(text) for (text,) in self.db.execute(query)]
        domains = self._domains(strings)
        keys = np.unique(raw["domainId"])
        numbers = np.array([number(domains.get(int(key))) for key in keys], np.int64)
        domain = numbers[np.searchsorted(keys, raw["domainId"])] if len(keys) else raw["domainId"]
        last = max(raw["end"].max(initial=0), raw["start"].max(initial=0))
        end = np.where(raw["end"] == UNKNOWN, last, raw["end"])
        columns = {
            "start": raw["start"], "end": end, "tid": raw["globalTid"], "name": name,
            "domain": domain, "kind": raw["eventType"],
        }  # fmt: skip
        return columns, texts, registered

    def _domains(self, strings: dict[int, str]) -> dict[int, str]:
        """Names of NVTX domains by id; the default domain has none."""
        if "NVTX_EVENTS" not in self.tables or "domainId" not in self._column_names("NVTX_EVENTS"):
            return {}
        query = "SELECT domainId, textId, text FROM NVTX_EVENTS WHERE eventType = ?"
        rows = self.db.execute(query, (DOMAIN_NAME,))
        return {key: strings.get(text_id) or text or "" for key, text_id, text in rows if key}

    def _memory(self) -> Columns:
        names = ("start", "deviceId", "bytes", "memKind", "memoryOperationType")
        found = self.columns("CUDA_GPU_MEMORY_USAGE_EVENTS", names)
        order = np.argsort(found["start"], kind="stable")
        renamed = zip(("start", "device", "bytes", "kind", "released"), names, strict=True)
        return {new: found[old][order] for new, old in renamed}

    def _gpus(self) -> dict[int, str]:
        if "TARGET_INFO_GPU" not in self.tables:
            return {}
        there = self._column_names("TARGET_INFO_GPU")
        key = "cuDevice" if "cuDevice" in there else "id"
        return dict(self.db.execute(f"SELECT {key}, name FROM TARGET_INFO_GPU"))

    def messages(self, users: set[int]) -> list[str]:
        """Warnings and errors of nsys about its own recording of the processes that use CUDA."""
        if "DIAGNOSTIC_EVENT" not in self.tables:
            return []
        query = "SELECT severity, text, globalPid FROM DIAGNOSTIC_EVENT ORDER BY rowid"
        rows = self.db.execute(query).fetchall()
        gated = any(text.startswith("Starting the profiling session using") for _, text, _ in rows)
        found = [
            text
            for severity, text, pid in rows
            if severity >= WARNING
            and not (gated and text.startswith("Not all "))  # what a gate is for
            and (not users or (pid or 0) // PROCESS in users)  # no compilers and other helpers
        ]
        return list(dict.fromkeys(found))
