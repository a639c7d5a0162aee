"""Impossible tables are refused; possible tables are accepted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_trace import (
    RECORDED,
    RECORDINGS,
    MadeTrace,
    check_tables,
    kernel,
    launch,
    named,
    op,
    recorded,
    write_trace,
)

from attnscope.profile import ProfileError
from attnscope.profile.analysis import invariants as checks
from attnscope.profile.analysis.catalog import TABLES
from attnscope.profile.analysis.efficiency import efficiency
from attnscope.profile.analysis.flops import FlopCounts, trace_device
from attnscope.profile.analysis.links import kernel_links, line_table
from attnscope.profile.analysis.steps import step_breakdown
from attnscope.profile.analysis.tables import (
    copies_table,
    kernel_table,
    memory_table,
    module_table,
    operator_table,
    stage_table,
)
from attnscope.profile.api import Profile
from attnscope.profile.attribution.owners import Attribution
from attnscope.profile.trace.reader import read_trace

Table = pandas.DataFrame


def tables(owners: Attribution) -> dict[str, Table]:
    counts = FlopCounts(owners)
    card = (*trace_device(owners.trace), 1830.0)
    return {
        "operators": operator_table(owners, counts, *card),
        "kernels": kernel_table(owners),
        "stages": stage_table(owners, counts, *card),
    }


def plant(table: Table, key: str, column: str, value: Any) -> None:
    """Set a number of the first row whose first column is `key`."""
    at = table.index[table.iloc[:, 0] == key][0]
    table[column] = table[column].astype(float)
    table.loc[at, column] = value(table.loc[at, column]) if callable(value) else value


FORWARD, MM = "forward", "aten::mm"


@pytest.mark.parametrize(
    ("name", "key", "column", "value", "said"),
    [
        ("stages", "attention", "gpu_us", 200.0, "gpu_us must be at most .*, as in forward"),
        ("stages", "attention", "gpu_busy_us", 200.0, "at most .*, as in forward around it"),
        ("stages", "attention", "kernels", 60, "kernels must be at most .*, as in forward"),
        ("stages", "mlp", "gpu_us", 64.0, "forward: gpu_us must be at least 149.5.*, the sum of"),
        ("stages", FORWARD, "gpu_us", 1e6, "at most .*, all kernels, got 1000000.000. Record"),
        ("stages", FORWARD, "gpu_busy_us", 7000.0, "gpu_busy_us must be at most .* gpu_span_us"),
        ("stages", "backward", "gpu_busy_us", 800.0, "at most .*, all GPU work, got 800.000"),
        ("stages", FORWARD, "idle_us", -3.0, "forward: idle_us must be finite .*, got -3.000"),
        ("stages", FORWARD, "idle_us", 1e7, "idle_us must be at most .*, gpu_span_us, got"),
        ("stages", FORWARD, "wall_us", 1e9, "wall_us must be at most .*, the whole trace"),
        ("stages", FORWARD, "kernels", 1e6, "kernels must be at most .*, all kernels"),
        ("stages", FORWARD, "mfu", 3.0, "forward: mfu must be at most 100%, got 300.00%"),
        ("operators", MM, "mfu", 3.0, "aten::mm: mfu must be at most 100%, got 300.00%"),
        ("operators", MM, "mfu_at_clock", 1.01, "mfu_at_clock must be .*, got 101.00%"),
        ("operators", MM, "tflops", float("inf"), "aten::mm: tflops must be finite .*, got inf"),
        ("operators", MM, "flops", -1, "flops must be finite and 0 or more, got -1.000"),
        ("operators", MM, "self_cpu_us", -3.0, "aten::mm: self_cpu_us must be .*, got -3.000"),
        ("operators", MM, "backward_gpu_us", 1e4, "backward_gpu_us must be .*, all kernels"),
        ("operators", MM, "gpu_us", 1e4, "gpu_us must be .*, all kernels, got 10000.000"),
        ("operators", MM, "gpu_us", lambda us: us + 9, "gpu_share must be gpu_us .*got 14.29%"),
        ("operators", MM, "gpu_mean_us", 1e3, "gpu_mean_us must be at most .*, gpu_us, got"),
        ("operators", MM, "copy_us", 1e3, "copy_us must be at most .*, all copies"),
        ("operators", MM, "cpu_us", 1e9, "cpu_us must be at most .*, the whole trace"),
        ("operators", MM, "kernels", 1e6, "kernels must be at most .*, all kernels"),
        ("operators", MM, "calls", -1, "cpu_us must be at most -.*, the whole trace"),
        ("operators", MM, "self_gpu_us", lambda us: us + 0.5, "the sum of self_gpu_us must be"),
    ],
)
def test_an_operator_or_a_stage_that_cannot_be_true_is_refused(
    name: str, key: str, column: str, value: Any, said: str
) -> None:
    owners = recorded("train")
    made_of = tables(owners)
    check_tables(owners, *made_of.values())
    plant(made_of[name], key, column, value)
    with pytest.raises(ProfileError, match=f"^{name}: .*{said}"):
        check_tables(owners, *made_of.values())


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("min_us", 1e4, "min_us must be at most .*, mean_us, got"),
        ("mean_us", 1e4, "mean_us must be at most .*, max_us, got"),
        ("max_us", 1e4, "max_us must be at most .*, total_us, got"),
        ("min_us", -1.0, "min_us must be finite and 0 or more, got -1.000"),
        ("share", 1.2, "share must be at most 100%, got 120.00%"),
        ("share", 0.9, "share must be total_us over all kernels, .*, got 90.00%"),
        ("calls", 1e4, "the sum of calls must be 164.000, all kernels"),
    ],
)
def test_a_kernel_that_cannot_be_true_is_refused(column: str, value: float, said: str) -> None:
    owners = recorded("train")
    made_of = tables(owners)
    plant(made_of["kernels"], made_of["kernels"].loc[0, "kernel"], column, value)
    with pytest.raises(ProfileError, match=f"^kernels: .*{said}"):
        check_tables(owners, *made_of.values())


def lines_of(owners: Attribution) -> Table:
    return line_table(kernel_links(owners))


@pytest.mark.parametrize(
    ("make", "check", "column", "value", "said"),
    [
        (copies_table, checks.check_copies, "total_us", 1e6, "copies: the sum of total_us must"),
        (copies_table, checks.check_copies, "calls", 1e3, "sum of calls must be .*, all copies"),
        (copies_table, checks.check_copies, "mean_us", 1e6, "mean_us must be .*, total_us, got"),
        (copies_table, checks.check_copies, "bytes", -8, "bytes must be .* 0 or more, got -8.000"),
        (copies_table, checks.check_copies, "gbs", float("inf"), "gbs must be .*, got inf"),
        (module_table, checks.check_modules, "gpu_us", 1e6, "gpu_us must be .*, all kernels"),
        (module_table, checks.check_modules, "gpu_us", 1.0, "at most 1.000, forward and backward"),
        (module_table, checks.check_modules, "forward_gpu_us", 0.0, "forward and backward, got"),
        (module_table, checks.check_modules, "kernels", 1e6, "kernels must be .*, all kernels"),
        (module_table, checks.check_modules, "kernels", 1, "kernels must be at most 1.000, as in"),
        (module_table, checks.check_modules, "kernels", -1, "kernels must be .*, got -1.000"),
        (memory_table, checks.check_memory, "allocations", 1e6, "memory: .*allocations"),
        (memory_table, checks.check_memory, "allocated_bytes", 1, "memory: .*allocated_bytes"),
        (memory_table, checks.check_memory, "released_bytes", -1, "memory: .*released_bytes"),
        (step_breakdown, checks.check_steps, "kernel_us", 1e6, "the sum of the parts must be"),
        (step_breakdown, checks.check_steps, "other_us", -5.0, "other_us must be .*, got -5.000"),
        (kernel_links, checks.check_links, "gpu_us", 1e6, "links: the sum of gpu_us must be"),
        (lines_of, checks.check_lines, "gpu_us", 1e6, "lines: the sum of gpu_us must be"),
        (lines_of, checks.check_lines, "kernels", 1, "lines: the sum of kernels must be"),
    ],
)
def test_what_else_cannot_be_true_is_refused(
    make: Callable[[Attribution], Table],
    check: Callable[[Attribution, Table], None],
    column: str,
    value: float,
    said: str,
) -> None:
    owners = recorded("stack")
    table = make(owners)
    check(owners, table)
    plant(table, table.iloc[0, 0], column, value)
    with pytest.raises(ProfileError, match=said):
        check(owners, table)


def test_ids_that_contradict_the_launch_times_are_refused(tmp_path: Path) -> None:
    """The id of the second launch names an op that had ended; its time is in no op."""
    events = [
        op("a", 0, 50, **{"External id": 3}), launch(1, 10),
        kernel(1, 60, 159, **{"External id": 3}), launch(2, 9000),
        kernel(2, 9010, 9011, **{"External id": 3}),
    ]  # fmt: skip
    found = Profile.read(write_trace(tmp_path / "t.json", *events))
    assert [k.start for k in found.attribution.disagreements] == [9_010_000]
    assert [k.start for k in found.attribution.unowned] == [9_010_000]
    events[-1] = kernel(2, 9010, 9020, **{"External id": 3})
    with pytest.raises(ProfileError, match=r"ids must be of the op .*, got others for 0.010 of"):
        Profile.read(write_trace(tmp_path / "t.json", *events)).operators()


def test_external_ids_that_repeat_correlation_ids_name_no_op(tmp_path: Path) -> None:
    """As in traces of 2023: launch 2 has the number of the op `later`."""
    path = write_trace(
        tmp_path / "t.json",
        op("first", 0, 50, **{"External id": 1}), launch(2, 10, **{"External id": 2}),
        kernel(2, 60, 70, **{"External id": 2}),
        op("later", 9000, 9050, **{"External id": 2}), launch(3, 9010, **{"External id": 3}),
        kernel(3, 9060, 9070, **{"External id": 3}),
    )  # fmt: skip
    owners = Profile.read(path).attribution
    assert [op.name for op in map(owners.op, owners.trace.kernels) if op] == ["first", "later"]
    assert not owners.disagreements


def test_links_that_miss_a_kernel_or_end_before_they_start_are_refused() -> None:
    owners = recorded("train")
    table = kernel_links(owners)
    with pytest.raises(ProfileError, match="links: rows must be 176, .*, got 175"):
        checks.check_links(owners, table.head(-1))
    table.loc[0, "gpu_us"] -= 1e3
    table.loc[1, "gpu_us"] += 1e3
    with pytest.raises(ProfileError, match="gpu_us must be .* 0 or more, got -"):
        checks.check_links(owners, table)


def test_steps_that_outlast_the_program_are_refused() -> None:
    owners = recorded("train")
    table = step_breakdown(owners)
    table[["wall_us", "other_us"]] += 1e6
    with pytest.raises(ProfileError, match="steps: the sum of wall_us must be at most"):
        checks.check_steps(owners, table)


@pytest.mark.parametrize("value", [1.02, -0.1])
def test_an_efficiency_figure_that_is_no_share_is_refused(value: float) -> None:
    found = efficiency(recorded("ops"))
    checks.check_figures(found)
    with pytest.raises(ProfileError, match="efficiency: occupancy must be"):
        checks.check_figures(dataclasses.replace(found, occupancy=value))


@pytest.mark.parametrize(
    "table",
    ["operators", "kernels", "stages", "copies", "modules", "memory", "steps", "lines", "links"],
)
def test_a_profile_gives_no_table_out_unchecked(
    table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise ProfileError("refused")

    monkeypatch.setitem(TABLES, table, dataclasses.replace(TABLES[table], check=refuse))
    with pytest.raises(ProfileError, match="refused"):
        getattr(Profile.read(RECORDED / "stack.json.gz"), table)()


# Possible tables


@pytest.mark.parametrize("name", RECORDINGS)
def test_recordings_pass(name: str) -> None:
    found = Profile.read(RECORDED / f"{name}.json.gz")
    assert len(found.operators()) and len(found.kernels())
    found.stages(), found.copies(), found.modules(), found.memory(), found.steps(), found.lines()
    assert found.efficiency().gpu_utilisation


def test_gpu_work_may_outlast_its_range_and_streams_overlap(tmp_path: Path) -> None:
    made = MadeTrace()
    made.range("short", 0, 10)
    made.op("a", 1, 8)
    for stream in range(3):
        made.kernel("k", 20, 500, launch=2, stream=stream)
    owners = made.attribution(tmp_path)
    stages = tables(owners)["stages"]
    assert stages.loc[0, "gpu_busy_us"] == 500 > stages.loc[0, "wall_us"] == 10
    assert stages.loc[0, "gpu_us"] == 1500
    check_tables(owners, *tables(owners).values())


def test_a_range_that_outlasts_its_outer_range_may_have_more(tmp_path: Path) -> None:
    events = [named("a", 0, 100), named("b", 50, 150), op("x", 110, 120), launch(1, 111)]
    path = write_trace(tmp_path / "t.json", *events, kernel(1, 115, 125))
    stages = Profile.read(path).stages()
    assert list(stages["path"]) == ["a", "a/b"] and list(stages["gpu_us"]) == [0, 10]


def _cross(one: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
    """Ops of one thread are disjoint or nested; ranges may overlap."""
    (a, b, thread), (c, d, another) = one, other
    return thread == another and (a < c < b < d or c < a < d < b)


def test_work_in_two_crossing_ranges_of_one_path_counts_once(tmp_path: Path) -> None:
    events = [named("a", 0, 2), named("a", 1, 9), named("a", 2, 5), launch(1, 3)]
    path = write_trace(tmp_path / "t.json", *events, kernel(1, 10, 20))
    stages = Profile.read(path).stages()
    assert list(stages["path"]) == ["a", "a/a"] and list(stages["calls"]) == [1, 2]
    assert list(stages["gpu_us"]) == [0, 10] and list(stages["kernels"]) == [0, 1]


SPAN = st.tuples(st.integers(0, 200), st.integers(0, 80))


@settings(max_examples=100, deadline=None)
@given(
    ranges=st.lists(st.tuples(SPAN, st.sampled_from("abc"), st.integers(1, 2)), max_size=8),
    ops=st.lists(st.tuples(SPAN, st.sampled_from(["x", "y"]), st.integers(1, 2)), max_size=8),
    work=st.lists(st.tuples(st.integers(0, 280), SPAN, st.integers(1, 2)), max_size=10),
)
def test_no_made_up_program_is_refused(tmp_path_factory, ranges, ops, work) -> None:
    events = [named(n, s, s + d, tid) for (s, d), n, tid in ranges]
    kept: list[tuple[int, int, int]] = []
    for (start, length), name, tid in ops:
        if not any(_cross((start, start + length, tid), other) for other in kept):
            kept.append((start, start + length, tid))
            events.append(op(name, *kept[-1]))
    for number, (at, (wait, length), tid) in enumerate(work, 1):
        start = at + 2 + wait
        events += [launch(number, at, tid=tid), kernel(number, start, start + length, stream=tid)]
    path = write_trace(tmp_path_factory.mktemp("made") / "t.json", *events)
    owners = Attribution(read_trace(path))
    check_tables(owners, *tables(owners).values())
    checks.check_modules(owners, module_table(owners))
    if events:
        checks.check_steps(owners, step_breakdown(owners))
    checks.check_figures(efficiency(owners))
