"""Drives Nsight Systems: one builder of its commands, a probe for range names, named failures."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from attnscope.common.console import say
from attnscope.nsight.captures import merge
from attnscope.nsight.projection import matches, no_such_range, parse_range
from attnscope.nsight.recording import KERNEL, Recording, read_recording
from attnscope.nsight.stats_csv import read_summary, reports_of
from attnscope.nsight.tool import (
    Done,
    Failure,
    Session,
    Step,
    ToolError,
    check,
    check_program,
    locate,
    run,
    tail,
)

REPORT = "report"  # stem of the report in the folder of a run
REGISTER_ONLY = "NSYS_NVTX_PROFILER_REGISTER_ONLY"
TRACES = (
    "cuda", "cuda-hw", "nvtx", "osrt", "cublas", "cublas-verbose", "cudnn", "cusolver",
    "cusolver-verbose", "cusparse", "cusparse-verbose", "mpi", "oshmem", "ucx", "openacc", "openmp",
    "opengl", "vulkan", "nvvideo", "python-gil", "gds",
)  # fmt: skip
SAMPLES = {"none": "none", "cpu": "process-tree"}
# A recording's output has the program's own lines too: these patterns must be nsys' words.
FAILURES = (
    Failure(
        "no report",
        r"No reports were generated",
        "nsys recorded nothing",
        "record without a gate: leave out --range and --gate",
    ),
    Failure(
        "option unknown",
        r"^unrecogni[sz]ed option|^[Ii]llegal |^invalid (option|argument)|^usage: nsys",
        "this version of nsys does not take an option",
        "run attnscope nsys --dry-run, compare with nsys profile --help, update nsys",
    ),
    Failure(
        "sampling refused",
        r"perf_event_paranoid|perf event|CPU (IP|sampling).{0,40}(disabled|not supported)",
        "the kernel does not allow CPU sampling to this user",
        "leave out --sample, or set kernel.perf_event_paranoid to 1",
    ),
)

EXPORT_FAILURES = (
    Failure(
        "report unreadable",
        r"[Cc]orrupt|[Ii]nvalid (report|file)|not a valid|[Uu]nsupported (file|report) version"
        r"|newer version|does not exist|[Nn]o such file",
        "nsys cannot read this report",
        "use the nsys that recorded it or a newer one; record again if the run was cut off",
    ),
)


@dataclass(frozen=True, kw_only=True)
class NsysSettings:
    """What to record. Raises ValueError for a value that nsys would not take.

    Attributes:
        command: the program and its arguments.
        range: NVTX range that starts and ends the recording: name, name@domain or name@*.
        captures: how many such ranges are recorded.
        gate: "cuda" records between cudaProfilerStart and cudaProfilerStop.
        trace: what is traced, with commas.
        sample: "none" or "cpu".
        cuda_memory_usage: record allocations of device memory.
        graph_nodes: record the kernels of a CUDA graph one by one, not the graph as a whole.
        probe: run the program once without a gate, to learn its ranges.
        probe_s: seconds that the probe may take.
        timeout_s: seconds that the recording may take; 0 for no limit.
        nsys_args: more arguments of `nsys profile`.
    """

    command: list[str] = field(default_factory=list)
    range: str | None = None
    captures: int = 1
    gate: str | None = None
    trace: str = "cuda,nvtx"
    sample: str = "none"
    cuda_memory_usage: bool = False
    graph_nodes: bool = True
    probe: bool = True
    probe_s: float = 120.0
    timeout_s: float = 0.0
    nsys_args: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.gate not in (None, "cuda"):
            raise ValueError(
                f"gate must be cuda or left out, got {self.gate!r}. In a session.yaml of an "
                "earlier version, delete the line"
            )
        if self.range is not None:
            parse_range(self.range)
        if self.gate is not None and self.range is not None:
            raise ValueError(f"gate must be left out with a range, got {self.gate!r}")
        if self.captures < 1 or (self.captures > 1 and not self.gated):
            raise ValueError(f"captures must be 1, or more with a gate, got {self.captures}")
        unknown = [one for one in self.traces if one not in TRACES]
        if unknown or not self.traces:
            raise ValueError(f"trace must be of {', '.join(TRACES)}; got {self.trace!r}")
        if self.range is not None and "nvtx" not in self.traces:
            raise ValueError(f"trace must have nvtx where a range gates, got {self.trace!r}")
        if self.sample not in SAMPLES:
            raise ValueError(f"sample must be one of {', '.join(SAMPLES)}, got {self.sample!r}")
        for name in ("probe_s", "timeout_s"):
            if not 0 <= getattr(self, name) < 1e7:
                raise ValueError(f"{name} must be 0 or more seconds, got {getattr(self, name)}")

    @property
    def traces(self) -> list[str]:
        return [one.strip() for one in self.trace.split(",") if one.strip()]

    @property
    def gated(self) -> bool:
        return self.range is not None or self.gate is not None


def profile_step(
    settings: NsysSettings, folder: Path, nsys: str = "nsys", registered: bool = False
) -> Step:
    """The recording. `registered`: the gate's name is a registered string of NVTX.

    nsys matches registered strings alone unless REGISTER_ONLY is 0: `torch.cuda.nvtx` and plain C++
    messages are not registered.
    """
    argv = [nsys, "profile", f"--trace={','.join(settings.traces)}"]
    argv += [f"--sample={SAMPLES[settings.sample]}"]
    if settings.sample == "none":
        argv.append("--cpuctxsw=none")
    if settings.cuda_memory_usage:
        argv.append("--cuda-memory-usage=true")
    if settings.graph_nodes and "cuda" in settings.traces:
        argv.append("--cuda-graph-trace=node")
    env = {}
    if settings.gated:
        end = "stop" if settings.captures == 1 else f"repeat:{settings.captures}"
        if settings.range is not None:
            argv += ["--capture-range=nvtx", f"--nvtx-capture={settings.range}"]
            if not registered:
                env[REGISTER_ONLY] = "0"
        else:
            argv.append("--capture-range=cudaProfilerApi")
        argv.append(f"--capture-range-end={end}")
    argv += [*settings.nsys_args, "--force-overwrite=true", "-o", str(folder / REPORT)]
    # With repeat, nsys numbers the files.
    report = folder / f"{REPORT}{'.1' * (settings.captures > 1)}.nsys-rep"
    return Step(
        "profile",
        [*argv, *settings.command],
        env,
        writes=report,
        exit_codes=None,
        echo=True,
        timeout_s=settings.timeout_s or None,
    )


def probe_step(settings: NsysSettings, folder: Path, nsys: str = "nsys") -> Step:
    """A run that records the names of ranges alone, and ends after `probe_s`."""
    argv = [nsys, "profile", "--trace=nvtx", "--sample=none", "--cpuctxsw=none"]
    argv += [f"--duration={max(round(settings.probe_s), 1)}", "--force-overwrite=true"]
    argv += ["-o", str(folder / "probe"), *settings.command]
    return Step("probe", argv, writes=folder / "probe.nsys-rep", exit_codes=None)


def export_step(report: Path, nsys: str = "nsys", label: str = "export") -> Step:
    target = report.with_suffix(".sqlite")
    argv = [nsys, "export", "--type=sqlite", "--force-overwrite=true", f"--output={target}"]
    return Step(label, [*argv, str(report)], writes=target)


def reports_step(nsys: str = "nsys") -> Step:
    """Asks for the reports of this version; nsys prints them and exits with 1."""
    return Step("reports", [nsys, "stats", "--help-reports"], exit_codes=None)


def stats_step(report: Path, names: Sequence[str], nsys: str = "nsys") -> Step:
    """Summaries of a report as `<report>_<name>.csv`, from its sqlite export."""
    argv = [nsys, "stats", f"--report={','.join(names)}", "--format=csv", "--timeunit=ns"]
    argv += ["--force-overwrite=true", f"--output={report.with_suffix('')}"]
    return Step("stats", [*argv, str(report.with_suffix(".sqlite"))])


def plan(settings: NsysSettings, folder: Path) -> list[Step]:
    """The commands of a session in order."""
    steps = []
    if settings.range is not None and settings.probe:
        probe = probe_step(settings, folder)
        assert probe.writes is not None
        steps += [probe, export_step(probe.writes, label="probe-export")]
    record = profile_step(settings, folder)
    assert record.writes is not None
    kernels = ["cuda_gpu_kern_sum", "cuda_gpu_mem_time_sum", "nvtx_gpu_proj_sum", "cuda_api_sum"]
    return [*steps, record, export_step(record.writes), stats_step(record.writes, kernels)]


@dataclass(frozen=True)
class Recorded:
    """A finished session: its recording, remarks about the gate, and the program's exit code."""

    recording: Recording
    notes: list[str]
    exit_code: int


def record(settings: NsysSettings, folder: Path) -> Recorded:
    """Run a session in a new folder.

    Raises ToolError for a failure of nsys or a gate that nothing opened, ValueError for a range
    that the program does not emit.
    """
    check_program(settings.command)
    path, version = locate("nsys")
    session = Session(folder, asdict(settings), [("nsys", path, version)])
    folder = folder.resolve()  # the program may start in another one
    notes, registered = [], False
    if settings.range is not None and settings.probe:
        count, registered = _probe(session, settings, folder, path)
        if count > settings.captures:
            notes.append(
                f"only the first {settings.captures} of {count} ranges {settings.range} "
                f"{'was' if settings.captures == 1 else 'were'} recorded (--captures {count} "
                "records all)"
            )
    elif settings.gated and settings.captures == 1:
        notes.append("only the first range that opens the gate was recorded (--captures N: more)")
    step = profile_step(settings, folder, path, registered)
    try:
        done = session.run(step, FAILURES)
    except ToolError as error:
        raise _gate_error(error, settings, session.done[-1:]) from None
    if done.code:
        notes.append(f"the program ended with exit code {done.code}; what it did before is here")
    reports = _reports(step)
    for report in reports:
        session.run(export_step(report, path), EXPORT_FAILURES)
    if len(reports) < settings.captures:
        notes.append(f"{len(reports)} of {settings.captures} captures were recorded")
    try:
        recording = merge([read_recording(one.with_suffix(".sqlite")) for one in reports])
    except ValueError as error:
        raise ToolError("report unreadable", str(error)) from None
    notes += _statistics(session, reports, path, recording)
    return Recorded(recording, notes, done.code)


def _probe(session: Session, settings: NsysSettings, folder: Path, nsys: str) -> tuple[int, bool]:
    """How many ranges the gate matches in a run without it, and whether all are registered."""
    assert settings.range is not None
    say(f"probe: looking for the range {settings.range} (--no-probe skips this)", stderr=True)
    step = probe_step(settings, folder, nsys)
    assert step.writes is not None
    done = session.run(step, FAILURES)
    session.run(export_step(step.writes, nsys, "probe-export"), EXPORT_FAILURES)
    found = read_recording(step.writes.with_suffix(".sqlite"))
    chosen = matches(found, settings.range)
    if not chosen.any():
        message = no_such_range(settings.range, found.range_names())
        if done.seconds >= settings.probe_s:
            message += (
                f". Only the first {settings.probe_s:g} s were searched: --probe-s, --no-probe"
            )
        elif done.code:
            message += f". The program ended with exit code {done.code}"
        raise ValueError(message)
    return int(chosen.sum()), bool(found.registered[chosen].all())


def _gate_error(error: ToolError, settings: NsysSettings, done: Sequence[Done]) -> ToolError:
    """The error of a gated run without a report: the gate did not open, or the program failed."""
    if error.name != "no report" or not settings.gated:
        return error
    if done and done[0].code:
        return ToolError(
            "program failed",
            f"it ended with exit code {done[0].code} before the gate opened",
            "run it without nsys",
            tail(done[0].stderr) or tail(done[0].stdout),
        )
    if settings.range is None:
        return ToolError(
            "no matching range",
            "the program ended without a call of cudaProfilerStart",
            "call torch.cuda.profiler.start() and stop() around the part, or leave out --gate",
            error.lines,
        )
    return ToolError(
        "no matching range",
        f"no range {settings.range} began while the program ran",
        f"check the name and the domain ({settings.range.partition('@')[0]}@* takes any domain); "
        "leave out --no-probe for a list of the ranges; leave out --range to record everything",
        error.lines,
    )


def _reports(step: Step) -> list[Path]:
    """The files of a recording, by their number; a single one has none."""
    assert step.writes is not None
    if not step.writes.name.startswith(f"{REPORT}.1."):
        return [step.writes]

    def number(path: Path) -> int:
        return int(path.name.split(".")[1])

    found = step.writes.parent.glob(f"{REPORT}.*.nsys-rep")
    return sorted((one for one in found if re.match(rf"{REPORT}\.\d+\.", one.name)), key=number)


def _statistics(
    session: Session, reports: Sequence[Path], nsys: str, recording: Recording
) -> list[str]:
    """Write the summaries of `nsys stats`, and compare its kernels with the recording's.

    The reports are those that this version lists. A failure here loses nothing but the summaries.
    """
    try:
        listed = session.run(reports_step(nsys))
        names = reports_of(listed.output)
        if "kernels" not in names:
            return ["nsys stats lists no summary of kernels that is known here"]
        total = count = 0.0
        for report in reports:
            session.run(stats_step(report, list(names.values()), nsys), FAILURES)
            path = Path(f"{report.with_suffix('')}_{names['kernels']}.csv")
            if not path.is_file():  # nsys writes no file for a report without rows
                continue
            rows = read_summary(path)
            total += sum(row.total_ns for row in rows)
            count += sum(row.count for row in rows)
    except (ToolError, ValueError) as error:
        return [f"no summaries of nsys stats: {error}"]
    work = recording.work
    kernels = work["kind"] == KERNEL
    ours = int((work["end"] - work["start"])[kernels].sum())
    if count == kernels.sum() and abs(total - ours) <= 1e-6 * ours + 1:
        return [f"nsys stats agrees: {int(count)} kernels, {ours / 1e6:.4g} ms"]
    return [
        f"nsys stats differs: {int(count)} kernels, {total / 1e6:.4g} ms; here "
        f"{int(kernels.sum())}, {ours / 1e6:.4g} ms"
    ]


def import_report(path: Path) -> Recording:
    """Read an existing .nsys-rep or .sqlite. The first is exported beside it unless it has been.

    Raises ValueError for another file, ToolError where nsys cannot export it.
    """
    if not path.is_file():
        raise ValueError(f"import must be a file, got {path}")
    if path.suffix == ".sqlite":
        return read_recording(path)
    if path.suffix != ".nsys-rep":
        raise ValueError(f"import must be a .nsys-rep or .sqlite file, got {path}")
    target = path.with_suffix(".sqlite")
    if not target.is_file() or target.stat().st_mtime < path.stat().st_mtime:
        nsys, _ = locate("nsys")
        with tempfile.TemporaryDirectory() as logs:
            check(run(export_step(path, nsys), Path(logs) / "export"), EXPORT_FAILURES)
    return read_recording(target)
