"""Large traces: time and memory from the file to the report, and the two ways to read an event."""

import contextlib
import gc
import io
import json
import re
import time
import tracemalloc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from made_trace import RECORDED, RECORDINGS
from rich.console import Console
from token_loop import LAYERS, OPS, write_token_loop

from attnscope.common import console
from attnscope.profile import Profile
from attnscope.profile.analysis.catalog import TABLES
from attnscope.profile.render import chrome_trace
from attnscope.profile.render.formats import write_all
from attnscope.profile.trace import json_stream, reader
from attnscope.profile.trace.events import Trace


def report(path: Path, folder: Path) -> Profile:
    """Read a trace, print it and write every file: all that the command does after a program."""
    profile = Profile.read(path)
    with contextlib.redirect_stdout(io.StringIO()):
        write_all(profile, folder)
        profile.print()
    return profile


def test_memory_of_a_report_is_at_most_one_and_a_half_times_the_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two sizes, so that imports and buffers of a constant size do not count."""
    for module in (json_stream, chrome_trace):
        monkeypatch.setattr(module, "CHUNK", 1 << 16)
    report(write_token_loop(tmp_path / "first.json", 1), tmp_path / "out")
    peaks, sizes = [], []
    for tokens in (3, 9):
        path = write_token_loop(tmp_path / "loop.json", tokens)
        tracemalloc.start()
        try:
            profile = report(path, tmp_path / "out")
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        sizes.append(path.stat().st_size)
        assert len(profile.trace.kernels) == tokens * LAYERS * len(OPS)
        assert profile.attribution.share == 1 and not profile.attribution.disagreements
    times = (peaks[1] - peaks[0]) / (sizes[1] - sizes[0])
    assert times < 1.5, f"{times:.2f} times the JSON"


def test_time_of_a_report_grows_with_the_trace_and_not_faster(tmp_path: Path) -> None:
    seconds = []
    for tokens in (1, 1, 4, 16):
        path = write_token_loop(tmp_path / "loop.json", tokens)
        begin = time.process_time()
        report(path, tmp_path / "out")
        seconds.append(time.process_time() - begin)
    # The first also imports modules. A pass over pairs of events would take 17 times as long.
    _, constant, few, many = seconds
    assert many - constant < 10 * max(few - constant, 0.1), seconds


def test_a_dropped_profile_is_freed_without_the_collector(tmp_path: Path) -> None:
    profile = Profile.read(write_token_loop(tmp_path / "loop.json", 1))
    tables = [profile.table(name) for name in TABLES]
    parts = [weakref.ref(one) for one in (profile, profile.attribution, profile.flop_counts)]
    gc.disable()
    try:
        del profile
        assert tables and not any(part() for part in parts)
    finally:
        gc.enable()


def parts(trace: Trace) -> tuple[object, ...]:
    return trace.cpu, trace.gpu, trace.memory, trace.overhead, trace.arrows, trace.origin


@pytest.mark.parametrize("name", ["token loop", *RECORDINGS])
def test_events_are_the_same_with_and_without_the_short_cut(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = RECORDED / f"{name}.json.gz"
    if name == "token loop":
        path = write_token_loop(tmp_path / "loop.json", 1, quote=' "a"')
    known: list[object] = []
    add_known = reader._Builder.add_known
    monkeypatch.setattr(
        reader._Builder, "add_known", lambda self, m: known.append(m) or add_known(self, m)
    )
    quick = reader.read_trace(path)
    count = len(quick.cpu) + len(quick.gpu)
    assert len(known) > 0.9 * count
    monkeypatch.setattr(reader, "EVENT", re.compile("(?!)"))
    assert parts(quick) == parts(reader.read_trace(path)) and count > 10
    assert quick.repaired == (name == "token loop")


def test_a_trace_with_our_rows_can_be_read_and_extended_again(tmp_path: Path) -> None:
    path = write_token_loop(tmp_path / "loop.json", 1)
    first = Profile.read(path)
    first.export_chrome_trace(tmp_path / "first.json")
    second = Profile.read(tmp_path / "first.json")
    assert parts(second.trace) == parts(first.trace)
    rows = json.loads((tmp_path / "first.json").read_text())["traceEvents"]
    stage = next(row for row in rows if row.get("cat") == "attnscope_stage")
    kernel = next(row for row in rows if row.get("cat") == "kernel")
    assert stage["ts"] == pytest.approx(kernel["ts"], abs=1e-3)


def test_reading_and_writing_show_a_bar_in_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.StringIO()
    terminal: Callable[..., Console] = lambda stderr=False: Console(  # noqa: E731
        file=shown if stderr else io.StringIO(), force_terminal=True, width=100
    )
    monkeypatch.setattr(console, "console", terminal)
    monkeypatch.setattr(json_stream, "CHUNK", 1 << 16)
    report(write_token_loop(tmp_path / "loop.json", 2), tmp_path / "out")
    assert (
        "reading loop.json" in shown.getvalue() and f"writing {tmp_path}"[:20] in shown.getvalue()
    )
    assert re.search(r"\d+%", shown.getvalue())
