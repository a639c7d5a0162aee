"""Result files: `{"schema": 1, "env": {...}, "rows": [...]}`, strict JSON, written atomically."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnscope.common.environment import RECORDS

SCHEMA = 1
STATUSES = ("ok", "wrong", "skipped", "failed")
# Every row has these keys, null if there is no value; numbers are ms, 1e12 FLOP/s, 1e9 byte/s.
ROW_KEYS = (
    "impl", "workload", "label", "mode", "dtype", "batch", "seqlen_q", "seqlen_k", "heads_q",
    "heads_kv", "head_dim", "head_dim_v", "causal", "window", "softcap", "varlen", "seqlens",
    "deterministic", "status", "reason",
    "median_ms", "p20_ms", "p80_ms", "samples_ms", "host_us", "layout", "layouts_ms", "timer",
    "l2",
    "flops", "flops_exact", "flops_rule", "bytes", "tflops", "gbps", "pct_peak",
    "baseline", "ratio", "ratio_ci",
    "max_abs_err", "baseline_err", "err_ratio", "margin", "checked", "repeatable", "gradients",
    "kernels", "counters",
    "sm_clock_mhz", "power_w", "temperature_c", "throttled", "nvml",
)  # fmt: skip
# A row that lacks one of these describes no call.
_NEEDED = {
    "impl", "status", "dtype", "batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv", "head_dim",
    "head_dim_v",
}  # fmt: skip
# A file is continued only if these agree: all its rows then come from the same experiment.
SAME_TO_RESUME = ("device", "gpu", "cpu", "threads", "torch", "attnscope", "settings")


@dataclass
class Results:
    """One result file in memory; `save` replaces the file in one step."""

    path: Path
    env: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def create(cls, path: Path, env: dict[str, Any], resume: bool) -> Results:
        """Start a file, or go on with it.

        An older file that is not resumed is kept as `<name>.bak`. Raises ValueError if the file to
        resume is not a result file, or comes from another experiment (device, versions, settings),
        and for a result of record (in benchmarks/results) whose code has no commit.
        """
        if path.is_dir():
            raise ValueError(f"output must be a file, got the folder {path}")
        same: tuple[str, ...] = SAME_TO_RESUME
        if RECORDS in path.resolve().parent.as_posix():
            _check_committed(path, env)
            same = (*same, "git_sha")
        if resume and path.exists():
            old = read_record(path)
            for key in same:
                if old["env"].get(key) != env.get(key):
                    raise ValueError(
                        f"resume: {key} must be {old['env'].get(key)!r}, as in {path}, got "
                        f"{env.get(key)!r}. Write to another file"
                    )
            return cls(path, old["env"], old["rows"])
        if path.exists():
            os.replace(path, backup(path))
        return cls(path, env)

    def finished(self) -> set[tuple[str, str]]:
        """(workload id, impl) of the rows that need no second try: all but the failed ones."""
        return {(row["workload"], row["impl"]) for row in self.rows if row["status"] != "failed"}

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Put rows in, in place of rows of the same workload and impl, and save the file."""
        for row in map(strict_row, rows):
            same = (row["workload"], row["impl"])
            at = [i for i, old in enumerate(self.rows) if (old["workload"], old["impl"]) == same]
            if at:
                self.rows[at[0]] = row
            else:
                self.rows.append(row)
        self.save()

    def save(self) -> None:
        """Write to a temporary file beside it, flush to the disk, rename."""
        content = {"schema": SCHEMA, "env": self.env, "rows": self.rows}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("w") as file:
                json.dump(content, file, indent=1, allow_nan=False)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)


def _check_committed(path: Path, env: Mapping[str, Any]) -> None:
    """Raises ValueError unless the code of this process has a commit without changes."""
    if env.get("git_sha") is None or env.get("git_dirty"):
        got = "changes that are not committed" if env.get("git_sha") else "no commit"
        raise ValueError(
            f"output must be outside {RECORDS} unless the code is committed, got {path} and {got}. "
            "Commit first"
        )


def backup(path: Path) -> Path:
    """Where an older result file is kept."""
    return path.with_name(path.name + ".bak")


def read_results(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A result file of `attnscope bench` as a dict with `schema`, `env` and `rows`.

    Raises ValueError as `read_record`, and where a row does not describe a call.
    """
    content = read_record(path)
    for number, row in enumerate(content["rows"], start=1):
        if not _NEEDED <= set(row):
            raise ValueError(
                f"{path}: row {number} must have every key of a call, got a part of them: it lacks "
                f"{', '.join(sorted(_NEEDED - set(row)))}"
            )
    return content


def read_record(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A file of rows, of any kind, as a dict with `schema`, `env` and `rows`.

    Raises ValueError for a file that is not strict JSON, not a result file, or of another schema.
    """

    def refuse(token: str) -> float:
        raise ValueError(f"{token} is not JSON")

    try:
        content = json.loads(Path(path).read_text(), parse_constant=refuse)
    except OSError as error:
        raise ValueError(f"file must be readable, got {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} must be a result file in JSON, got an error: {error}") from None
    if not isinstance(content, dict) or not {"schema", "env", "rows"} <= set(content):
        raise ValueError(f"{path} must be a result file with schema, env and rows, got another")
    if content["schema"] != SCHEMA:
        raise ValueError(f"{path} must have schema {SCHEMA}, got schema {content['schema']!r}")
    if not isinstance(content["env"], dict) or not isinstance(content["rows"], list):
        raise ValueError(f"{path}: env must be an object, and rows a list, got other types")
    for number, row in enumerate(content["rows"], start=1):
        if not isinstance(row, dict):
            raise ValueError(f"{path}: row {number} must be an object, got {row!r:.40}")
    return content


def strict_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with every key of the schema and no NaN or infinity.

    A number that is not finite becomes None, and `reason` names it.
    """
    unknown = sorted(set(row) - set(ROW_KEYS))
    if unknown:
        raise ValueError(f"keys of a row must be in the schema, got {unknown[0]!r}")
    if row["status"] not in STATUSES:
        raise ValueError(f"status must be one of {', '.join(STATUSES)}, got {row['status']!r}")
    lost: list[str] = []
    strict = {key: _finite(row.get(key), key, lost) for key in ROW_KEYS}
    if lost:
        strict["reason"] = "; ".join(filter(None, [strict["reason"], *lost]))
    return strict


def _finite(value: Any, name: str, lost: list[str]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        lost.append(f"{name} was {value}")
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item, f"{name}.{key}", lost) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item, f"{name}[{i}]", lost) for i, item in enumerate(value)]
    return value


def export(path: Path, target: Path) -> int:
    """Write the rows of a result file as .csv or .parquet; lists and mappings become JSON text.

    Returns how many rows there are.

    Raises ValueError for another suffix, or for parquet without pyarrow.
    """
    import pandas as pd

    if target.suffix not in (".csv", ".parquet"):
        raise ValueError(f"target must end in .csv or .parquet, got {target}")
    if target.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ValueError(f"target must be .csv without pyarrow, got {target}. pip install pyarrow")
    rows = read_results(path)["rows"]
    if not target.parent.is_dir():
        raise ValueError(f"target must be in a folder that exists, got {target}")
    flat = [
        {key: json.dumps(v) if isinstance(v, list | dict) else v for key, v in row.items()}
        for row in rows
    ]
    table = pd.DataFrame(flat, columns=list(ROW_KEYS))
    if target.suffix == ".csv":
        table.to_csv(target, index=False)
    else:
        table.to_parquet(target, index=False)
    return len(rows)
