"""A profile as files for other programs: strict JSON and CSV."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pandas

from attnscope.profile.analysis.catalog import TABLES
from attnscope.profile.analysis.efficiency import FIGURES
from attnscope.profile.analysis.kernel_names import short_name
from attnscope.profile.analysis.tables import path_of
from attnscope.profile.render.document import columns_of

if TYPE_CHECKING:
    from attnscope.profile.analysis.lint import Lint
    from attnscope.profile.analysis.result import Result

SCHEMA = 1
ROWS = 1 << 11  # rows of a table that are converted at a time


def profile_tables(profile: Result) -> dict[str, pandas.DataFrame]:
    """Every table that has rows, by name. Raises ProfileError if one contradicts the trace."""
    tables = {name: profile.table(name) for name in TABLES}
    return {name: table for name, table in tables.items() if len(table)}


def write_csv(profile: Result, folder: str | os.PathLike[str]) -> list[Path]:
    """Write each table as `<name>.csv` and return the paths.

    If the folder has a `profile.json`, CSV files of that earlier profile are removed.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    ours = (Path(folder) / "profile.json").exists()
    written = []
    for name in TABLES:
        path, table = Path(folder) / f"{name}.csv", profile.table(name)
        if len(table):
            with path.open("w", encoding="utf-8", newline="") as file:
                text = csv_text()
                file.write(",".join(map(text, table.columns)) + "\n")
                for start in range(0, len(table), ROWS):
                    part = columns_of(table.iloc[start : start + ROWS])
                    columns = [texts(column, text) for column in part]
                    file.writelines(f"{','.join(row)}\n" for row in zip(*columns, strict=True))
            written.append(path)
        elif ours:
            path.unlink(missing_ok=True)
    return written


def csv_text() -> Callable[[Any], str]:
    """A function that returns the text of one value of several in a row of CSV."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")

    def text(value: Any) -> str:
        buffer.seek(0)
        buffer.truncate()
        writer.writerow((value, None))
        return buffer.getvalue().removesuffix(",\n")

    return text


def texts(values: list[Any], text: Callable[[Any], str]) -> Iterable[str]:
    """`text` of each value; called once for a string that is repeated, and for no finite number."""
    kinds = {*map(type, values)}
    if kinds <= {str, type(None)}:
        known = {value: text(value) for value in {*values}}
        return map(known.__getitem__, values)
    if kinds <= {int, float} and all(map(math.isfinite, values)):
        return map(repr, values)
    return map(text, values)


def to_json(profile: Result, path: str | os.PathLike[str]) -> None:
    """Write the JSON of `write_json` to a file, compressed if its name ends with ".gz"."""
    with open_output(path) as file:
        write_json(profile, file)


def write_json(profile: Result, file: IO[str]) -> None:
    """Write `{"schema": 1, "name", "env", ..., "tables": {name: rows}}`; missing numbers are null.

    "env" describes this process; it is null, with a reason, for a trace read from a file. Each row
    of a table is a line.
    """
    encode = json.JSONEncoder(allow_nan=False).encode  # with an indent, json is slow for many rows
    tables = profile_tables(profile)
    file.write(json.dumps(_facts(profile), indent=1, allow_nan=False).removesuffix("\n}"))
    file.write(',\n "tables": {')
    for at, (name, table) in enumerate(tables.items()):
        file.write(f"{',' if at else ''}\n  {encode(name)}: [")
        names = ", ".join(f"{encode(name).replace('%', '%%')}: %s" for name in table.columns)
        for start in range(0, len(table), ROWS):
            columns = [texts(c, encode) for c in columns_of(table.iloc[start : start + ROWS])]
            lines = ",\n   ".join(f"{{{names}}}" % row for row in zip(*columns, strict=True))
            file.write(f"{',' if start else ''}\n   {lines}")
        file.write("\n  ]")
    file.write("\n }\n}\n")


def _facts(profile: Result) -> dict[str, Any]:
    """All of the JSON but the tables."""
    owners, audit, found = profile.attribution, profile.audit, profile.efficiency()
    return {
        "schema": SCHEMA,
        "name": profile.name,
        "run": dict(profile.run),
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
        "verdict": vars(profile.verdict),
        "lint": lint_facts(profile.lint),
        "efficiency": {key: getattr(found, key) for key in (*FIGURES, "occupancy_from")},
        "efficiency_reasons": dict(found.reasons),
        "steps": _steps(profile),
        "findings": [vars(one) for one in profile.findings()],
    }


def lint_facts(lint: Lint) -> dict[str, Any]:
    """The verdict on a trace and its faults."""
    faults = [vars(fault) for fault in lint.faults]
    return {"trusted": lint.trusted, "verdict": lint.verdict, "faults": faults}


def _environment(profile: Result) -> dict[str, Any]:
    if profile.wall_s is None:
        return {"env": None, "env_reason": "the trace was read from a file"}
    import torch

    from attnscope.common.environment import environment

    device = torch.device("cuda" if profile.trace.kernels else "cpu")
    return {"env": environment(device, {}), "env_reason": None}


def _peaks(profile: Result) -> dict[str, Any]:
    """The dense peaks that MFU refers to, and how FLOPs were counted."""
    device, found = profile.device, None
    if device is not None:
        found = {"device": device.name, "tflops": dict(device.peaks), "source": device.source}
    return {
        "dense_peaks": found,
        "dense_peaks_reason": profile.device_reason,
        "flops_rules": profile.flop_counts.rules(),
    }


def _steps(profile: Result) -> dict[str, Any]:
    """The rule that found the steps, and the extra time of the first step or why it is unknown."""
    if not profile.has_ops:
        reason = "no op and no range was recorded"
        none = dict.fromkeys(("rule", "setup_us", "mean_us", "sd_us", "counted"))
        return none | {"setup_reason": reason}
    about = profile.steps().attrs
    setup = about["setup_us"]
    return {
        "rule": about["steps"],
        "setup_us": None if setup is None else max(setup, 0.0),
        "setup_reason": about.get("setup_reason"),
        "mean_us": about["mean_us"],
        "sd_us": about["sd_us"],
        "counted": about["counted"],
    }


def open_output(path: str | os.PathLike[str]) -> IO[str]:
    opener: Callable[..., IO[str]] = gzip.open if str(path).endswith(".gz") else open
    return opener(path, "wt", encoding="utf-8")
