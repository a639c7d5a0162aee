"""The model-by-context report from nsys: one recorded step of each configuration.

A report's folder is named by model, context and impl (`small-512-naive`) and has `report.sqlite`
and `record.json` with the wall times. A folder of plain reports with such names can be read too.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from attnscope.nsight.analysis import Analysis, union
from attnscope.nsight.nesting import NONE
from attnscope.nsight.nsys import NsysSettings, import_report, record
from attnscope.nsight.recording import Recording
from attnscope.nsight.tool import ToolError
from attnscope.profile.analysis.kernel_names import category, short_name, uses_tensor_cores
from attnscope.studies.lm.model import SIZES, TINY, ModelConfig, model_config
from attnscope.studies.lm.nsys_step import run_as_json
from attnscope.studies.lm.records import ProfiledModel, read_models
from attnscope.studies.lm.run import Run
from attnscope.studies.parts import BACKWARD, FORWARD, OUTSIDE, PARTS, PHASES
from attnscope.studies.records import Flops, GpuWork, KernelTimes, PhaseTimes, Row, Use

RECORD = "record.json"
NAME = re.compile(r"(?P<model>.+?)[-_](?:ctx|context)?(?P<context>\d+)(?:[-_](?P<impl>.+))?$")
NO_FLOPS = "nsys records no shapes; lm.json of the torch profiler beside it has none either"
_SEQUENCE = re.compile(r", seq = (\d+)")


def name_of(run: Run) -> str:
    """The name of a configuration's folder."""
    return f"{run.name}-{run.config.context}-{run.impl}"


def record_all(
    runs: Sequence[Run], folder: Path, timeout_s: float, on_done: Callable[[Row], None]
) -> None:
    """Record each configuration under nsys in its folder; one that has a record is kept.

    Raises ToolError if nsys is missing. Other failures are records.
    """
    for run in runs:
        target = folder / name_of(run)
        if target.exists():
            if not (target / RECORD).is_file():
                raise ValueError(f"{target} must have {RECORD}, got none. Move the folder away")
            continue
        on_done(_record_one(run, target, timeout_s))


def _record_one(run: Run, target: Path, timeout_s: float) -> Row:
    made = target.with_name(f".{target.name}.json")
    made.parent.mkdir(parents=True, exist_ok=True)
    made.unlink(missing_ok=True)
    command = [sys.executable, "-m", "attnscope.studies.lm.nsys_step", run_as_json(run)]
    settings = NsysSettings(
        command=[*command, str(made.resolve())], gate="cuda", timeout_s=timeout_s
    )
    failure = None
    try:
        record(settings, target)
    except ToolError as error:
        if error.exit_code == 2:  # no nsys: every other configuration would fail too
            raise
        failure = str(error).splitlines()[0]
    row: Row = run.key | {"status": "failed", "reason": failure or "its process wrote no record"}
    if made.is_file():
        row = json.loads(made.read_text())
        if row["status"] == "ok" and failure:
            row |= {"status": "failed", "reason": failure}
    target.mkdir(exist_ok=True)
    (target / RECORD).write_text(json.dumps(row, indent=1) + "\n")
    made.unlink(missing_ok=True)
    return row


# Reading


def read_folder(folder: Path, profiled: Sequence[Row] = ()) -> tuple[list[Row], dict[str, Any]]:
    """The records of a folder, with the kernels of their reports, and what they were made on.

    `profiled` are records of PyTorch's profiler; FLOPs come from the one of the same
    configuration. A report that cannot be read is a record that failed. Raises ValueError for a
    folder without reports.
    """
    found = list(_reports(folder))
    if not found:
        raise ValueError(
            f"folder must have reports named <model>-<context>-<impl>, got none in {folder}"
        )
    rows, env = [], dict[str, Any]()
    for name, report, about in found:
        try:
            row = _configuration(name, about)
        except ValueError as error:
            raise ValueError(f"{report or about}: {error}") from None
        if row["status"] == "ok":
            try:
                if report is None:
                    raise ValueError(
                        f"{name} must have report.sqlite or report.nsys-rep, got neither"
                    )
                recording = import_report(report)
                step = Step(recording)
                row |= asdict(step.work(_flops(row, profiled)))
                row |= {"no_kernels": None} | (step.walls() if "wall_ms" not in row else {})
                used = [recording.gpus.get(one, "") for one in step.of.devices]
                env = {"gpu": ", ".join(used), **_versions(report)}
            except (ValueError, ToolError) as error:
                row |= {"status": "failed", "reason": str(error).splitlines()[0]}
        rows.append(row)
    sizes = [*SIZES, TINY]
    return sorted(rows, key=lambda row: (sizes.index(row["model"]), row["context"])), env


def _reports(folder: Path) -> Iterator[tuple[str, Path | None, Path | None]]:
    """Name, report and record of each configuration of a folder, by name."""
    stems: dict[Path, tuple[str, Path | None]] = {}
    for path in sorted(folder.glob("*")):
        if path.is_dir() and NAME.fullmatch(path.name) and not path.name.startswith("."):
            about = path / RECORD
            stems[path / "report"] = (path.name, about if about.is_file() else None)
        elif path.suffix in (".sqlite", ".nsys-rep") and NAME.fullmatch(path.stem):
            stems[path.with_suffix("")] = (path.stem, None)
    for stem, (name, record_file) in stems.items():
        files = [Path(f"{stem}{suffix}") for suffix in (".sqlite", ".nsys-rep")]
        report = next((one for one in files if one.is_file()), None)
        if report is not None or record_file is not None:
            yield name, report, record_file


def _configuration(name: str, about: Path | None) -> Row:
    """The record beside a report, or what its name contains."""
    if about is not None:
        return json.loads(about.read_text())
    match = NAME.fullmatch(name)
    assert match is not None
    if match["model"] not in (*SIZES, TINY):
        raise ValueError(
            f"model must be one of {', '.join([*SIZES, TINY])}, got {match['model']!r}"
        )
    config: ModelConfig = model_config(match["model"], int(match["context"]))
    row = Run(name=match["model"], config=config, impl=match["impl"] or "unknown").key
    return row | {"status": "ok", "reason": None, "no_backward": None, "peak_memory_gib": None}


def _flops(row: Row, profiled: Sequence[Row]) -> Row:
    """FLOPs of the same configuration from PyTorch's profiler."""
    keys = ("model", "context", "impl", "precision", "batch")
    for one in profiled:
        if all(one.get(key) == row.get(key) for key in keys) and "flops" in one:
            return {"flops": one["flops"], "softmax_flops": one["softmax_flops"]}
    return {"flops": [], "softmax_flops": {}}


def _versions(report: Path) -> dict[str, Any]:
    """What `attnscope nsys` wrote beside its report: versions, and when the run started."""
    path, commands = report.with_name("versions.json"), report.with_name("commands.json")
    if not (path.is_file() and commands.is_file()):
        return {}
    found, started = json.loads(path.read_text()), json.loads(commands.read_text())["started"]
    nsys = found["tools"].get("nsys", {}).get("version")
    return {"torch": found["packages"].get("torch"), "nsys": nsys, "time": started}


class Step:
    """The GPU work of one training step, by phase and part of the model."""

    def __init__(self, recording: Recording) -> None:
        self.of = Analysis(recording)
        projection = self.of.projection
        paths = range(int(projection.path.max(initial=-1)) + 1)
        names = [[name for name, _ in projection.names_of(path)] for path in paths]
        self._phase_of_path = [next((n for n in ns if n in PHASES), OUTSIDE) for ns in names]
        self._part_of_path = [
            next((n for n in reversed(ns) if n in PARTS), OUTSIDE) for ns in names
        ]
        self._last_of_path = [ns[-1] for ns in names]
        self._first_of_path = [ns[-1] not in ns[:-1] for ns in names]

    def work(self, flops: Mapping[str, Any]) -> GpuWork:
        """The step as a record. Raises ValueError where no kernel is in a phase."""
        of = self.of
        kernels = np.flatnonzero(of.is_kernel)
        places = self.places
        if not any(phase in PHASES for phase, _ in places):
            raise ValueError(
                f"{of.recording.path} must have kernels in {', '.join(PHASES)}, got none"
            )
        calls: Counter[tuple[Any, ...]] = Counter()
        times: Counter[tuple[Any, ...]] = Counter()
        for at in kernels.tolist():
            name = of.names[int(of.work["name"][at])]
            key = (*places[at], short_name(name), category(name), uses_tensor_cores(name))
            calls[key] += 1
            times[key] += int(of.duration[at])
        columns = ("phase", "part", "kernel", "category", "tensor_cores")
        inside = sum(ns for key, ns in times.items() if key[0] != OUTSIDE)
        counted = [Flops(**one) for one in flops["flops"]]
        return GpuWork(
            total_us=of.kernel_ns / 1e3,
            owned=inside / of.kernel_ns,
            phases=self._phases(),
            kernels=[
                KernelTimes(
                    **dict(zip(columns, key, strict=True)), calls=calls[key], total_us=ns / 1e3
                )
                for key, ns in times.most_common()
            ],
            flops=counted or [_no_flops(phase, part) for phase, part in set(places)],
            softmax_flops=flops["softmax_flops"],
            efficiency=Use(gpu_utilisation=None, tensor_core_time_share=None),
            findings=[],
        )

    def walls(self) -> Row:
        """Wall times of the phases in the recorded step, for a report without a record."""
        return {"wall_ms": {name: [one.wall_us / 1e3] for name, one in self._phases().items()}}

    @cached_property
    def places(self) -> list[tuple[str, str]]:
        """Phase and part of each piece of work. Backward work belongs to the part of the forward
        op with its autograd number."""
        projection = self.of.projection
        sequences = self._sequences()
        forward: dict[int, str] = {}
        order = np.argsort(self.of.recording.ranges["start"], kind="stable")
        for one in order.tolist():
            path = int(projection.path[one])
            if path != NONE and sequences[one] >= 0 and self._phase_of_path[path] == FORWARD:
                forward.setdefault(int(sequences[one]), self._part_of_path[path])
        found = []
        for inner in self.of.inner.tolist():
            if inner == NONE:
                found.append((OUTSIDE, OUTSIDE))
                continue
            path = int(projection.path[inner])
            phase, part = self._phase_of_path[path], self._part_of_path[path]
            if phase == BACKWARD and part == OUTSIDE:
                part = forward.get(int(sequences[inner]), OUTSIDE)
            found.append((phase, part))
        return found

    def _sequences(self) -> np.ndarray:
        """The autograd number of each range, of the nearest range around it that has one."""
        recording, projection = self.of.recording, self.of.projection
        by_text = [
            int(match[1]) if (match := _SEQUENCE.search(text)) else NONE for text in recording.texts
        ]
        found = np.array(by_text, np.int64)[recording.ranges["name"]]
        for depth in range(1, int(projection.depth.max(initial=0)) + 1):
            here = np.flatnonzero((projection.depth == depth) & (found == NONE))
            here = here[projection.parent[here] != NONE]
            found[here] = found[projection.parent[here]]
        return found

    def _phases(self) -> dict[str, PhaseTimes]:
        of, ranges = self.of, self.of.recording.ranges
        phase = np.array([one for one, _ in self.places])
        wall: Counter[str] = Counter()
        for path, ns in zip(
            of.projection.path.tolist(), (ranges["end"] - ranges["start"]).tolist(), strict=True
        ):
            if path != NONE and self._first_of_path[path] and self._last_of_path[path] in PHASES:
                wall[self._last_of_path[path]] += ns
        found = {}
        for name in PHASES:
            here = phase == name
            if not here.any():
                continue
            kernels = here & of.is_kernel
            start, end = of.work["start"], of.work["end"]
            found[name] = PhaseTimes(
                wall_us=wall[name] / 1e3,
                kernel_us=int(of.duration[kernels].sum()) / 1e3,
                busy_us=union(start[kernels], end[kernels]) / 1e3,
                span_us=int(end[here].max() - start[here].min()) / 1e3,
                copy_us=int(of.duration[here & ~of.is_kernel].sum()) / 1e3,
                kernels=int(kernels.sum()),
            )
        return found


def _no_flops(phase: str, part: str) -> Flops:
    return Flops(phase=phase, part=part, flops=None, reason=NO_FLOPS)


# Beside PyTorch's profiler


def compare_rows(rows: Sequence[Row], profiled: Sequence[Row]) -> list[Row]:
    """Kernel times of the phases by nsys and by PyTorch's profiler, with the reason where they
    differ by more than 0.5 %."""
    theirs = {one.label: one for one in read_models(profiled) if isinstance(one, ProfiledModel)}
    found = []
    for mine in read_models(rows):
        other = theirs.get(mine.label)
        if not isinstance(mine, ProfiledModel) or other is None:
            continue
        for name in mine.phase_names:
            one, two = mine.phases[name], other.phases.get(name)
            if two is not None:
                found.append(
                    mine.key
                    | {"phase": name, "nsys ms": one.kernel_us / 1e3}
                    | {"profiler ms": two.kernel_us / 1e3, "ratio": one.kernel_us / two.kernel_us}
                    | {"nsys kernels": one.kernels, "profiler kernels": two.kernels}
                    | {"difference": _difference(mine, other, name)}
                )
    return found


def _difference(mine: ProfiledModel, other: ProfiledModel, phase: str) -> str | None:
    """What makes the kernel times of a phase differ; None within 0.5 %."""
    one, two = mine.phases[phase].kernel_us, other.phases[phase].kernel_us
    if abs(one / two - 1) <= 0.005:
        return None
    times: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for model, sign in ((mine, 1), (other, -1)):
        for row in model.kernels:
            if row.phase == phase:
                times[row.kernel] += sign * row.total_us
                calls[row.kernel] += sign * row.calls
    other_calls = {name: count for name, count in calls.items() if count}
    if other_calls:
        name, count = max(other_calls.items(), key=lambda item: abs(times[item[0]]))
        return f"other kernels: {count:+d} x {name}"
    name, time = max(times.items(), key=lambda item: abs(item[1]))
    return f"the same kernels, other times (two runs, two clocks): most {time:+.1f} us in {name}"
