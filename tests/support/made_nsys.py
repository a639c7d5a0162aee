"""Sqlite exports in the form of nsys 2025.3, made of a few events, or large."""

import re
import sqlite3
from pathlib import Path

PID, TID = 4000, 4000  # the main thread
GLOBAL_PID = (1 << 48) + (PID << 24)
KERNEL = (
    "start end deviceId contextId greenContextId streamId correlationId globalPid demangledName "
    "shortName mangledName launchType cacheConfig registersPerThread gridX gridY gridZ blockX "
    "blockY blockZ staticSharedMemory dynamicSharedMemory localMemoryPerThread localMemoryTotal "
    "gridId sharedMemoryExecuted graphNodeId sharedMemoryLimitConfig"
).split()
COPY = (
    "start end deviceId contextId greenContextId streamId correlationId globalPid bytes copyKind "
    "deprecatedSrcId srcKind dstKind srcDeviceId srcContextId dstDeviceId dstContextId "
    "migrationCause graphNodeId virtualAddress"
).split()
FILL = (
    "start end deviceId contextId greenContextId streamId correlationId globalPid value bytes "
    "graphNodeId memKind"
).split()
CALL = "start end eventClass globalTid correlationId nameId returnValue callchainId".split()
NVTX = (
    "start end eventType rangeId category color text globalTid endGlobalTid textId domainId "
    "uint64Value int64Value doubleValue uint32Value int32Value floatValue jsonTextId jsonText "
    "binaryData"
).split()
TABLES = {
    "CUPTI_ACTIVITY_KIND_KERNEL": KERNEL,
    "CUPTI_ACTIVITY_KIND_MEMCPY": COPY,
    "CUPTI_ACTIVITY_KIND_MEMSET": FILL,
    "CUPTI_ACTIVITY_KIND_RUNTIME": CALL,
    "NVTX_EVENTS": NVTX,
    "DIAGNOSTIC_EVENT": "timestamp timestampType source severity text globalPid".split(),
    "TARGET_INFO_GPU": "name id cuDevice smCount".split(),
}


class MadeReport:
    """Events with times in microseconds; `save` writes them as an sqlite file."""

    def __init__(self) -> None:
        self.strings: dict[str, int] = {}
        self.rows: dict[str, list[tuple]] = {name: [] for name in TABLES}
        self.correlation = 0
        self.add("TARGET_INFO_GPU", name="NVIDIA H200", id=0, cuDevice=0, smCount=132)

    def string(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings) + 1)

    def add(self, table: str, **values) -> None:
        self.rows[table].append(tuple(values.get(name) for name in TABLES[table]))

    def tid(self, thread: int = TID, pid: int = PID) -> int:
        return (1 << 48) + (pid << 24) + thread

    def domain(self, name: str) -> int:
        """The id of a domain, created by its event; 0 is the default domain."""
        if not name:
            return 0
        key = self.string(name)
        if not any(row[2] == 75 and row[9] == key for row in self.rows["NVTX_EVENTS"]):
            self.add("NVTX_EVENTS", start=0, eventType=75, textId=key, domainId=1000 + key)
        return 1000 + key

    def range(self, name, start, end, domain="", registered=True, thread=TID, pid=PID, kind=59):
        text = {"textId": self.string(name)} if registered else {"text": name}
        times = {"start": round(start * 1e3), "end": None if end is None else round(end * 1e3)}
        tid = {"globalTid": self.tid(thread, pid), "domainId": self.domain(domain)}
        self.add("NVTX_EVENTS", **times, **text, **tid, eventType=kind)

    def call(self, name, start, end, correlation=None, thread=TID, pid=PID) -> int:
        if correlation is None:
            self.correlation += 1
            correlation = self.correlation
        self.add(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            start=round(start * 1e3), end=round(end * 1e3), eventClass=0,
            globalTid=self.tid(thread, pid), correlationId=correlation, nameId=self.string(name),
            returnValue=0,
        )  # fmt: skip
        return correlation

    def _work(self, table, name, launched, start, end, how, call, thread, **values):
        pid = values.pop("pid", PID)
        correlation = values.pop("correlation", None)
        if launched is not None:
            correlation = self.call(call, launched, launched + 2, correlation, thread, pid)
        place = {"deviceId": 0, "contextId": 1, "streamId": 7, "correlationId": correlation}
        times = {"start": round(start * 1e3), "end": round(end * 1e3)}
        process = {"globalPid": (1 << 48) + (pid << 24)}
        self.add(table, **(times | place | process | how | values))

    def kernel(self, name, launched, start, end, thread=TID, call="cudaLaunchKernel_v7000", **more):
        keys = {
            "demangledName": self.string(name),
            "shortName": self.string(re.split(r"[<(]", name)[0].split("::")[-1].split(" ")[-1]),
        }
        stream = {"streamId": more.pop("stream", 7), "deviceId": more.pop("device", 0)}
        table = "CUPTI_ACTIVITY_KIND_KERNEL"
        self._work(table, name, launched, start, end, keys | stream, call, thread, **more)

    def copy(self, kind, size, launched, start, end, source=0, target=2, thread=TID, **more):
        how = {"bytes": size, "copyKind": kind, "srcKind": source, "dstKind": target}
        table, call = "CUPTI_ACTIVITY_KIND_MEMCPY", "cudaMemcpyAsync_v3020"
        self._work(table, "", launched, start, end, how, call, thread, **more)

    def save(self, path: Path, without=(), drop_columns=()) -> Path:
        path.unlink(missing_ok=True)
        db = sqlite3.connect(path)
        db.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
        db.executemany(
            "INSERT INTO StringIds VALUES (?, ?)", [(k, t) for t, k in self.strings.items()]
        )
        for table, names in TABLES.items():
            if table in without:
                continue
            kept = [name for name in names if name not in drop_columns]
            db.execute(f"CREATE TABLE {table} ({', '.join(kept)})")
            picked = [[row[names.index(name)] for name in kept] for row in self.rows[table]]
            db.executemany(f"INSERT INTO {table} VALUES ({','.join('?' * len(kept))})", picked)
        db.commit()
        db.close()
        return path


def large_report(path: Path, kernels: int) -> Path:
    """A report of steps with 200 kernels each: nested ranges, two other calls for each launch."""
    report = MadeReport()
    names = [f"void kernel_{i}<float>(float*)" for i in range(60)]
    for name in names:
        report.string(name)
    launch, other = report.string("cudaLaunchKernel_v7000"), report.string("cudaGetDevice_v3020")
    step, layer = report.string("step"), report.string("layer")
    domain, tid = report.domain("attnscope"), report.tid()
    for at in range(kernels):
        t = 1_000_000 + at * 5_000
        key = at % 60 + 1
        report.rows["CUPTI_ACTIVITY_KIND_KERNEL"].append(
            (t + 3000, t + 7000, 0, 1, None, 7, at + 1, GLOBAL_PID, key, key, key, 0, 0, 64, 132, 1)
            + (1, 256, 1, 1, 0, 65536, 0, 0, at, 65536, None, 0)
        )
        report.rows["CUPTI_ACTIVITY_KIND_RUNTIME"] += [
            (t, t + 1500, 0, tid, at + 1, launch, 0, None),
            (t + 1600, t + 1700, 0, tid, kernels + at, other, 0, None),
        ]
        if at % 200 == 0:
            report.add(
                "NVTX_EVENTS", start=t - 50, end=t + 999_900, eventType=59, globalTid=tid,
                textId=step, domainId=domain,
            )  # fmt: skip
        report.add(
            "NVTX_EVENTS", start=t - 20, end=t + 4_000, eventType=59, globalTid=tid, textId=layer,
            domainId=domain,
        )  # fmt: skip
    return report.save(path)
