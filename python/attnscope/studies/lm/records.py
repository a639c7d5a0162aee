"""Records of language models: configurations, with wall times, with GPU work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from attnscope.studies.parts import FORWARD, PHASES
from attnscope.studies.records import GpuWork, Number, Row, Size, Status, load


@dataclass(frozen=True, kw_only=True)
class Model:
    """A configuration, and what became of it. `columns` are the fields that distinguish it from the
    others of a report."""

    model: str
    impl: str
    precision: str
    context: Size
    batch: Size
    parameters: Size
    d_model: Size
    d_ff: Size
    layers: Size
    heads: Size
    vocabulary: Size
    status: Status
    reason: str | None
    columns: tuple[str, ...] = ("model", "context", "impl")

    @property
    def key(self) -> Row:
        return {name: getattr(self, name) for name in self.columns}

    @property
    def label(self) -> str:
        return " ".join(map(str, self.key.values()))

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.context


@dataclass(frozen=True, kw_only=True)
class TimedModel(Model):
    """A measured configuration: `wall_ms` has the samples of each phase, taken without the
    profiler. `no_backward` and `no_kernels` are reasons."""

    wall_ms: dict[str, list[Number]]
    no_backward: str | None
    no_kernels: str | None
    peak_memory_gib: Number | None

    @property
    def phase_names(self) -> tuple[str, ...]:
        return PHASES if self.no_backward is None else (FORWARD,)

    def wall(self, phase: str) -> float:
        """The median, in milliseconds."""
        return median(self.wall_ms[phase])

    def check_walls(self, at: str) -> None:
        """Raises ValueError for a phase without a wall time."""
        for phase in self.phase_names:
            if min(self.wall_ms.get(phase) or [0.0]) <= 0:
                raise ValueError(f"{at}: {phase} must have wall times above 0, got none")


@dataclass(frozen=True, kw_only=True)
class ProfiledModel(TimedModel, GpuWork):
    """A measured configuration with the GPU work of one profiled step."""

    def check(self, at: str) -> None:
        if lost := [phase for phase in self.phase_names if phase not in self.phases]:
            raise ValueError(f"{at}: phases must have {lost[0]}, got {', '.join(self.phases)}")
        super().check(at)


def read_model(row: object, at: str) -> Model:
    """A row as a Model, with status "ok" as a TimedModel or a ProfiledModel.

    One that lacks data or contradicts itself is a Model with status "refused" and the reason.
    Raises ValueError for a row without a configuration.
    """
    found = load(Model, row, at)
    if found.status != "ok":
        return found
    assert isinstance(row, dict)
    try:
        if row.get("no_kernels") is not None:
            timed = load(TimedModel, row, found.label)
        else:
            timed = load(ProfiledModel, row, found.label)
            timed.check(found.label)
        timed.check_walls(found.label)
    except ValueError as error:
        return replace(found, status="refused", reason=str(error))
    return timed


def read_models(rows: Sequence[object]) -> list[Model]:
    """The rows of a file, with the columns that distinguish them. Raises as `read_model`."""
    models = [read_model(row, f"record {number}") for number, row in enumerate(rows, 1)]
    more = [name for name in ("precision", "batch") if len({getattr(m, name) for m in models}) > 1]
    return [replace(one, columns=(*one.columns, *more)) for one in models]
