"""A profile as files for other programs: strict JSON, CSV, and a chrome trace with rows added."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pandas

from attnscope.profile.attribution import Attribution
from attnscope.profile.document import rows_of
from attnscope.profile.efficiency import FIGURES
from attnscope.profile.jsonstream import members, open_trace
from attnscope.profile.names import category, short_name
from attnscope.profile.tables import NO_RANGE, owner_name, path_of
from attnscope.profile.trace import CpuEvent, GpuEvent, nanoseconds

if TYPE_CHECKING:
    from attnscope.profile.result import Profile

SCHEMA = 1
PROCESS = 7_000_000  # of our rows, in a trace viewer; no real process has so high a number
EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
CHUNK = 1 << 20  # characters
SORT_INDEX = 6_000_000  # below PyTorch's rows of GPUs, which are at 5,000,000


def profile_tables(profile: Profile) -> dict[str, pandas.DataFrame]:
    """Every table that has rows, by name. Raises ProfileError for those that cannot be true."""
    return {name: table for name, table in _all_tables(profile).items() if len(table)}


def _all_tables(profile: Profile) -> dict[str, pandas.DataFrame]:
    none = pandas.DataFrame()
    return {
        "operators": profile.operators(),
        "kernels": profile.kernels(),
        "stages": profile.stages(),
        "copies": profile.copies(),
        "modules": profile.modules(),
        "memory": profile.memory(),
        "allocations": allocations(profile.attribution),
        "links": profile.links(),
        "lines": profile.lines(),
        "steps": profile.steps() if profile.has_ops else none,
        "kineto": none if profile.kineto is None else profile.kineto_comparison(),
    }


def allocations(attribution: Attribution) -> pandas.DataFrame:
    """Each allocation and release in order: time_us, op, device ("cpu" or "cuda:N"), bytes (less
    than 0 for a release), allocated_bytes and reserved_bytes (in all, after it)."""
    rows = []
    for one in attribution.trace.memory:
        op = attribution.op_at(one.thread, one.time)
        device = "cpu" if one.device < 0 else f"cuda:{one.device}"
        about = (one.time / 1e3, op.name if op else None, device)
        rows.append((*about, one.bytes, one.allocated, one.reserved))
    columns = "time_us op device bytes allocated_bytes reserved_bytes".split()
    return pandas.DataFrame(rows, columns=columns)


def write_csv(profile: Profile, folder: str | os.PathLike[str]) -> list[Path]:
    """Write each table as `<name>.csv`; returns the files.

    Those of an earlier profile, whose `profile.json` is there, are removed.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    ours = (Path(folder) / "profile.json").exists()
    written = []
    for name, table in _all_tables(profile).items():
        path = Path(folder) / f"{name}.csv"
        if len(table):
            table.to_csv(path, index=False)
            written.append(path)
        elif ours:
            path.unlink(missing_ok=True)
    return written


def to_json(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write `{"schema": 1, "name", "env", ..., "tables": {name: rows}}`; missing numbers are null.

    env is of this process, null with a reason for a trace that was read from a file.
    """
    owners, audit, found = profile.attribution, profile.audit, profile.efficiency()
    content = {
        "schema": SCHEMA,
        "name": profile.name,
        **_environment(profile),
        "devices": profile.trace.devices,
        **_peaks(profile),
        "wall_s": profile.wall_s,
        "unprofiled_wall_s": profile.unprofiled_wall_s,
        "unprofiled_reason": profile.unprofiled_reason,
        "sm_clock_mhz": profile.sm_clock_mhz,
        "sm_clock_reason": profile.sm_clock_reason,
        "interrupted": profile.interrupted,
        "incomplete": profile.incomplete,
        "attribution": {
            "kernels": len(profile.trace.kernels),
            "total_us": owners.total_ns / 1e3,
            "owned_us": owners.owned_ns / 1e3,
            "replayed_us": owners.replayed_ns / 1e3,
            "share": owners.share,
            "unowned": [
                {"kernel": short_name(k.name), "range": path_of(owners.ranges(k)) or None}
                | {"us": k.duration / 1e3}
                for k in owners.unowned
            ],
        },
        "audit": {
            "launches": audit.launches,
            "captured": audit.captured,
            "lost": len(audit.lost),
            "orphans": len(audit.orphans),
            "sentinels": audit.sentinels,
        },
        "efficiency": {key: getattr(found, key) for key in (*FIGURES, "occupancy_from")},
        "efficiency_reasons": dict(found.reasons),
        "steps": _steps(profile),
        "findings": [vars(one) for one in profile.findings()],
        "tables": {name: rows_of(table) for name, table in profile_tables(profile).items()},
    }
    with _open(path) as file:
        json.dump(content, file, indent=1, allow_nan=False)
        file.write("\n")


def _environment(profile: Profile) -> dict[str, Any]:
    import torch

    from attnscope.common.environment import environment

    if profile.wall_s is None:
        return {"env": None, "env_reason": "the trace was read from a file"}
    device = torch.device("cuda" if profile.trace.kernels else "cpu")
    return {"env": environment(device, {}), "env_reason": None}


def _peaks(profile: Profile) -> dict[str, Any]:
    """The dense peaks that MFU is a share of, and how FLOPs were counted."""
    device, found = profile.device, None
    if device is not None:
        found = {"device": device.name, "tflops": dict(device.peaks), "source": device.source}
    return {
        "dense_peaks": found,
        "dense_peaks_reason": profile.device_reason,
        "flops_rules": profile.flop_counts.rules(),
    }


def _steps(profile: Profile) -> dict[str, Any]:
    """How steps were told, and what the first one took more than the others, or why not known."""
    if not profile.has_ops:
        return {"rule": None, "setup_us": None, "setup_reason": "no op and no range was recorded"}
    about = profile.steps().attrs
    setup = about["setup_us"]
    return {
        "rule": about["steps"],
        "setup_us": None if setup is None else max(setup, 0.0),
        "setup_reason": about.get("setup_reason"),
    }


def write_chrome_trace(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write PyTorch's trace with a process `attnscope` added; it opens in Perfetto.

    The process has two tracks for each stream with kernels, aligned to GPU time: the stage and the
    op that own what ran then. Neighbouring kernels of one call of an op, or of one entry of a
    range, are one slice, which says how many they are and how long they ran. The file is copied
    piece by piece, so a large trace needs no memory. Raises ValueError where `path` is the trace
    that the profile was read from: it is kept.
    """
    if Path(path).exists() and Path(path).samefile(profile.source):
        raise ValueError(f"path: {path} is the trace that this profile was read from")
    rows = [json.dumps(row, allow_nan=False) for row in _added(profile.attribution, profile.source)]
    with open_trace(profile.source) as file, _open(path) as out:
        head = ""
        while not (begin := EVENTS.search(head)):
            if not (more := file.read(CHUNK)):
                raise ValueError(f"{profile.source}: holds no traceEvents")
            head += more
        # A trace with kernels has events, which ours go in front of.
        out.write(head[: begin.end()] + "".join(f"{row},\n" for row in rows))
        out.write(head[begin.end() :])
        while more := file.read(CHUNK):
            out.write(more)


def _open(path: str | os.PathLike[str]) -> IO[str]:
    opener: Callable[..., IO[str]] = gzip.open if str(path).endswith(".gz") else open
    return opener(path, "wt", encoding="utf-8")


def _added(attribution: Attribution, source: Path) -> Iterator[dict[str, Any]]:
    kernels = attribution.trace.kernels
    if not kernels:
        return
    origin = _origin(kernels, source)
    yield _meta("process_name", 0, name="attnscope")
    yield _meta("process_sort_index", 0, sort_index=SORT_INDEX)
    streams = sorted({(kernel.device, kernel.stream) for kernel in kernels})
    for number, stream in enumerate(streams):
        mine = [kernel for kernel in kernels if (kernel.device, kernel.stream) == stream]
        where = f"GPU {stream[0]} stream {stream[1]}"
        for track, kind in ((2 * number + 1, "stage"), (2 * number + 2, "op")):
            yield _meta("thread_name", track, name=f"{kind}, {where}")
            yield _meta("thread_sort_index", track, sort_index=track)
            groups = _neighbours(attribution, mine, kind)
            for at, (name, group) in enumerate(groups):
                # Kernels of one stream may overlap by a little; slices of one track may not.
                last = max(kernel.end for kernel in group)
                after = groups[at + 1][1][0].start if at + 1 < len(groups) else last
                start, end = group[0].start, min(last, after)
                yield {
                    "ph": "X",
                    "cat": f"attnscope_{kind}",
                    "name": name,
                    "pid": PROCESS,
                    "tid": track,
                    "ts": (origin + start) / 1e3,
                    "dur": max(0, end - start) / 1e3,
                    "args": _about(attribution, group, kind),
                }


def _neighbours(
    attribution: Attribution, kernels: list[GpuEvent], kind: str
) -> list[tuple[str, list[GpuEvent]]]:
    """Runs of kernels with the same owner, and its name."""
    groups: list[tuple[str, list[GpuEvent]]] = []
    before: Any = None
    for kernel in kernels:
        ranges, op = attribution.ranges(kernel), attribution.op(kernel)
        owner: CpuEvent | None = (ranges[-1] if ranges else None) if kind == "stage" else op
        key = owner.index if owner else -1
        if not groups or key != before:
            name = path_of(ranges) or NO_RANGE
            groups.append((name if kind == "stage" else owner_name(attribution, kernel), []))
        groups[-1][1].append(kernel)
        before = key
    return groups


def _about(attribution: Attribution, group: list[GpuEvent], kind: str) -> dict[str, Any]:
    about: dict[str, Any] = {
        "kernels": len(group),
        "kernel us": sum(kernel.duration for kernel in group) / 1e3,
        "categories": ", ".join(dict.fromkeys(category(kernel.name) for kernel in group)),
    }
    op = attribution.op(group[0])
    if kind == "op" and op:
        forward = attribution.forward_op(op)
        about["stage"] = path_of(attribution.ranges(group[0]))
        about["forward op"] = forward.name if forward else None
        about["module"] = ".".join(attribution.module(group[0]))
    return {key: value for key, value in about.items() if value}


def _origin(kernels: list[GpuEvent], source: Path) -> int:
    """Nanoseconds of the file's clock at the trace's zero: the first kernel is in both."""
    known = {kernel.correlation for kernel in kernels}
    with open_trace(source) as file:
        starts = [
            nanoseconds(event["ts"])
            for key, event in members(file, source, "traceEvents")
            if key == "traceEvents"
            and event.get("cat") == "kernel"
            and event["args"].get("correlation", 0) in known
        ]
    return min(starts) - kernels[0].start


def _meta(what: str, track: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": PROCESS, "tid": track, "args": arguments}
