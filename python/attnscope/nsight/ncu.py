"""Runs Nsight Compute on a program: arguments, known failures, filters that matched nothing."""

from __future__ import annotations

import re
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from attnscope.nsight.evaluator import Evaluator
from attnscope.nsight.metrics import DEFAULT, FULL, keys_of, names_on
from attnscope.nsight.ncu_reader import Kernel, read_csv, read_report
from attnscope.nsight.tool import Failure, Session, Step, ToolError, check, locate, run

REPORT, MODELS = "report.ncu-rep", "models.json"
MODELS_VARIABLE = "ATTNSCOPE_RANGE_MODELS"
TARGET = "attnscope.studies.attention"  # runs an impl under a profiler
MEASURE = "measure@attnscope"
SURVEY_LAUNCHES = 2000  # launches that are listed where a filter matched none
LISTED = 12  # names in an error
CACHES, CLOCKS, REPLAYS = ("all", "none"), ("none", "base", "boost"), ("kernel", "application")
NO_KERNELS = "no kernel matched"
# Ranges of one thread are around the kernels of all: autograd launches from its own.
TRACED = ("--target-processes", "all", "--nvtx", "--nvtx-push-pop-scope", "process")
_SPECIAL = re.compile(r"([\\@,\[\]/*+])")  # of ncu's NVTX expressions

FAILURES = (
    Failure(
        "unknown metric",
        r"[Ff]ailed to find metric|[Mm]etric.{0,80}(not found|is not (available|supported))",
        "this ncu does not know a metric on this GPU",
        "ncu --query-metrics lists the names; a suffix such as .sum or .avg is part of a name",
    ),
    Failure(
        "unknown section",
        r"[Ff]ailed to find (section|rule)|No metrics to collect found in sections",
        "this ncu has no section or set of that name",
        "ncu --list-sections and ncu --list-sets list them",
    ),
    Failure(
        NO_KERNELS,
        r"No kernels were profiled",
        "the program ran, but no launch matched the filters",
        "",
    ),
    Failure(
        "locked",
        r"[Ii]nterprocess.?[Ll]ock|[Ll]ock file|[Ff]ailed to (acquire|open|create).{0,20}lock",
        "the lock file in the temporary folder belongs to another user or another ncu",
        "set TMPDIR to a folder of your own, or wait for the other ncu to end",
    ),
    Failure(
        "cannot profile the kernel",
        r'Failed to (prepare|profile) (kernel|")|LibraryNotLoaded',
        "ncu could not replay a kernel",
        "use an ncu of the driver's CUDA release; for kernels that talk to other GPUs or to the "
        "host, --replay application",
    ),
    Failure(
        "unknown error",
        r"Unknown Error on device",
        "the driver reported an error to ncu",
        "check dmesg for Xid errors and nvidia-smi for another user of the GPU; run as root",
    ),
    Failure(
        "program failed",
        r"application returned an error code|returned an error code \(\d+\)",
        "the program itself ended with an error",
        "run it without ncu first; its output is in logs/",
    ),
)


@dataclass
class Settings:
    """What a session profiles, and how; the keys of `session.yaml`.

    Attributes:
        command: the program and its arguments; left out with `impl`.
        impl, workload, mode: an attention call to profile instead of a program.
        sets: names of `metrics.SETS`, or "full".
        metrics: further metrics by ncu's names, and its groups and regular expressions.
        ranges: NVTX ranges that kernels must be in, as `name` or `name@domain`.
        kernels: regular expressions, one of which a kernel's function name must match.
        base: what `kernels` are searched in: function, demangled or mangled.
        skip, count: launches to skip, and then to profile, of those that match; 0: all.
        cache, clock, replay: ncu's --cache-control, --clock-control and --replay-mode.
    """

    command: list[str] = field(default_factory=list)
    impl: str | None = None
    workload: str | None = None
    mode: str = "forward"
    sets: list[str] = field(default_factory=lambda: list(DEFAULT))
    metrics: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    base: str = "function"
    skip: int = 0
    count: int = 0
    cache: str = "all"
    clock: str = "none"
    replay: str = "kernel"
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        keys_of(self.sets)
        choices = {"cache": CACHES, "clock": CLOCKS, "replay": REPLAYS,
                   "base": ("function", "demangled", "mangled")}  # fmt: skip
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}"
                )
        for name in ("skip", "count"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.impl is not None and self.command:
            raise ValueError("impl must be left out where a program is given, got both")
        for text in self.ranges:
            to_expression(text)
        for pattern in self.kernels:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"kernel must be a regular expression, got {pattern!r}: {error}"
                ) from None

    def program(self) -> list[str]:
        """The command under ncu."""
        if self.impl is None:
            return list(self.command)
        call = ["--no-profile", "--iterations", "1", "--impl", self.impl]
        call += [] if self.workload is None else ["--workload", self.workload]
        return [sys.executable, "-m", TARGET, *call, "--mode", self.mode]


def to_expression(range_: str) -> str:
    """ncu's NVTX expression of a push/pop range, from `name` or `name@domain`.

    Raises ValueError for an empty name or for any domain.
    """
    name, at, domain = range_.rpartition("@")
    name, domain = (name, domain) if at else (domain, "")
    if not name or (at and domain in ("", "*")):
        raise ValueError(
            f"range must be a name or name@domain with one domain, got {range_!r}. ncu cannot "
            "match a name in every domain; give --range once for each"
        )
    prefix = f"{_escape(domain)}@" if domain else ""
    return f"{prefix}{_escape(name)}"


def _escape(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", text)


def profile_step(settings: Settings, ncu: str, folder: Path, chip: str | None) -> Step:
    """The command that profiles the program and writes the report."""
    keys = keys_of(settings.sets)
    argv = [ncu, *TRACED, *_filters(settings)]
    argv += ["--cache-control", settings.cache, "--clock-control", settings.clock]
    argv += ["--replay-mode", settings.replay]
    argv += ["--set", "full"] if FULL in settings.sets else []
    argv += ["--metrics", ",".join([*names_on(chip, keys), *settings.metrics])]
    argv += ["-f", "-o", str(folder / "report"), *settings.program()]
    report = folder / REPORT
    return Step("profile", argv, _environment(settings, folder), report, echo=True,
                timeout_s=settings.timeout_s)  # fmt: skip


def _filters(settings: Settings) -> list[str]:
    argv: list[str] = []
    for one in settings.ranges or ([MEASURE] if settings.impl else []):
        # A push/pop range has the slash; without it, the name means a start/end range.
        argv += ["--nvtx-include", f"{to_expression(one)}/", "--nvtx-include", to_expression(one)]
    if settings.kernels:
        argv += ["--kernel-name-base", settings.base]
        argv += ["--kernel-name", f"regex:{'|'.join(settings.kernels)}"]
    argv += ["--launch-skip", str(settings.skip)] if settings.skip else []
    return argv + (["--launch-count", str(settings.count)] if settings.count else [])


def _environment(settings: Settings, folder: Path) -> dict[str, str]:
    return {MODELS_VARIABLE: str(folder.absolute() / MODELS)}


def survey_step(settings: Settings, ncu: str, folder: Path) -> Step:
    """The command that lists the first launches, with their ranges and without counters."""
    log = folder / "survey.csv"
    argv = [ncu, *TRACED, "--metrics", "launch__grid_size"]
    argv += ["--launch-count", str(SURVEY_LAUNCHES), "--csv", "--page", "raw"]
    argv += ["--print-kernel-base", "mangled"]
    argv += ["--log-file", str(log), *settings.program()]
    return Step("survey", argv, writes=log, timeout_s=settings.timeout_s)


def import_step(ncu: str, report: Path) -> Step:
    """The command that prints a report as CSV."""
    argv = [ncu, "--import", str(report), "--csv", "--page", "raw"]
    argv += ["--print-units", "base", "--print-fp", "--print-kernel-base", "mangled"]
    return Step("import", argv)


def record(settings: Settings, folder: Path, chip: str | None) -> list[Kernel]:
    """Profile the program, write the report to `folder`, and return its kernels.

    Raises ToolError with the named failure; where filters matched nothing, it lists the kernels and
    ranges that the program has.
    """
    path, version = locate("ncu")
    session = Session(folder, asdict(settings), [("ncu", path, version)])
    try:
        session.run(profile_step(settings, path, folder, chip), FAILURES)
    except ToolError as error:
        if error.name == NO_KERNELS:
            raise _nothing_matched(settings, session, path, error) from None
        if error.name == "unknown metric":
            raise _with_similar(error, chip) from None
        raise
    done = session.run(import_step(path, folder / REPORT), FAILURES)
    (folder / "kernels.csv").write_text(done.stdout)
    return must_be_whole(read_csv(done.stdout.splitlines(), str(folder / REPORT)), settings, chip)


def _nothing_matched(settings: Settings, session: Session, ncu: str, error: ToolError) -> ToolError:
    """The error with what there is to match. It runs the program again, without counters."""
    asked = [f"range {one}" for one in settings.ranges] + [
        f"kernel {one}" for one in settings.kernels
    ]
    try:
        step = survey_step(settings, ncu, session.folder)
        session.run(step, FAILURES)
        assert step.writes is not None
        seen = read_csv(step.writes.read_text().splitlines(), str(step.writes))
    except (ToolError, ValueError) as failure:
        return ToolError(NO_KERNELS, f"{error.cause}. A survey failed too: {failure}", "",
                         error.lines)  # fmt: skip
    if not seen:
        return ToolError(
            "no kernels", "the program launched no CUDA kernels",
            "check that it runs on the GPU, and that its work is in this process or its children",
            error.lines,
        )  # fmt: skip
    ranges = Counter(name for kernel in seen for name in dict.fromkeys(kernel.ranges))
    functions = Counter(kernel.function for kernel in seen)
    return ToolError(
        NO_KERNELS,
        f"none of {len(seen)} launches matched {' and '.join(asked) or 'the filters'}",
        "give one of these by --range or --kernel",
        [*error.lines, f"ranges: {_listed(ranges)}", f"kernels: {_listed(functions)}"],
    )


def _listed(names: Mapping[str, int]) -> str:
    shown = sorted(names, key=lambda name: -names[name])
    more = f", and {len(shown) - LISTED} more" if len(shown) > LISTED else ""
    return ", ".join(f"{name} ({names[name]})" for name in shown[:LISTED]) + more or "none"


def _with_similar(error: ToolError, chip: str | None) -> ToolError:
    """The error with metrics of similar names, where CUPTI can list them."""
    names = re.findall(r"\w+__[\w.]+", " ".join(error.lines))
    try:
        evaluator = Evaluator.of(chip or "GH100")
    except LookupError:
        return error
    lines = [
        f"similar to {name}: {', '.join(similar)}"
        for name in dict.fromkeys(names)
        if (similar := evaluator.similar(name))
    ]
    return ToolError(error.name, error.cause, error.remedy, [*error.lines, *lines])


def must_be_whole(kernels: Sequence[Kernel], settings: Settings, chip: str | None) -> list[Kernel]:
    """The kernels. Raises ToolError where there is none, or a metric that was asked is not finite.

    A metric that only some chips have, and CUPTI verified, may be missing.
    """
    if not kernels:
        raise ToolError(NO_KERNELS, "the report has no kernels", "loosen --range and --kernel")
    asked = set(names_on(chip, keys_of(settings.sets)))
    for kernel in kernels:
        if bad := [name for name in kernel.not_finite if name in asked]:
            raise ToolError(
                "not finite",
                f"{bad[0]} of kernel {kernel.number} has no finite value"
                + (f", and {len(bad) - 1} more" if len(bad) > 1 else ""),
                "the tool and the driver do not fit together: use an ncu of the driver's CUDA "
                "release",
            )
    return list(kernels)


def unmatched(kernels: Sequence[Kernel], ranges: Sequence[str]) -> list[str]:
    """The ranges that no kernel of a report is in."""
    seen = {name for kernel in kernels for name in kernel.ranges}
    return [one for one in ranges if one not in seen]


def read(path: Path) -> list[Kernel]:
    """The kernels of a folder of a session, a .ncu-rep or a raw page as .csv.

    A .ncu-rep is read by NVIDIA's module ncu_report where installed, otherwise by ncu.
    Raises ValueError for another file, ToolError where ncu is missing or fails.
    """
    if path.is_dir():
        names = (path / "kernels.csv", path / REPORT)
        path = next((one for one in names if one.is_file()), path)
    if path.suffix == ".csv" and path.is_file():
        return read_csv(path.read_text(errors="replace").splitlines(), str(path))
    if path.suffix != ".ncu-rep" or not path.is_file():
        raise ValueError(
            f"report must be a folder of attnscope ncu, a .ncu-rep or a raw .csv, got {path}. "
            "ncu --import REPORT --csv --page raw writes a raw .csv"
        )
    try:
        return read_report(path)
    except ImportError:
        pass
    ncu, _ = locate("ncu")
    with tempfile.TemporaryDirectory() as folder:
        done = run(import_step(ncu, path), Path(folder) / "import")
    check(done, FAILURES)
    return read_csv(done.stdout.splitlines(), str(path))
