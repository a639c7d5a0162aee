"""Figures and tables of synthetic result files."""

import json
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from synthetic import CPU, CURVES, H200, gpu_row, lost_row, ok_row, paper, write
from typer.testing import CliRunner

from attnscope.bench.figures import STYLES, Kind, draw
from attnscope.bench.impls import IMPLS
from attnscope.bench.plots import conditions, draw_file, footnotes, kinds, plot_file
from attnscope.bench.series import Family, families, timed
from attnscope.bench.tables import put_results, results_table
from attnscope.bench.workloads import Workload, load_suite
from attnscope.cli import build
from attnscope.common.hardware.devices import find_device

Row = dict[str, Any]
H200_CARD, _ = find_device("NVIDIA H200")


def family_of(rows: list[Row]) -> Family:
    (family,) = families(timed(rows)[0])
    return family


def kinds_of(family: Family, env: Row = H200, baseline: str | None = "sdpa-flash") -> list[Kind]:
    device = find_device(str(env["gpu"]))[0] if env["gpu"] else None
    return list(kinds(env, family, device, baseline))


def figure_of(family: Family, kind: Kind) -> Figure:
    return draw(family, kind, "title", "conditions", ["note"])


def overlapping_texts(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of texts that overlap, and texts outside the figure."""
    drawn: dict[Text, None] = {}
    draw_text = Text.draw

    def draw_and_note(text: Text, *args: Any) -> None:
        drawn[text] = None
        draw_text(text, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draw", draw_and_note)
        FigureCanvasAgg(figure).draw()
    # The title ends in empty lines, which make room for the conditions.
    boxes = [
        (text.get_text(), text.get_window_extent())
        for text in drawn
        if text.get_visible() and text.get_text().strip() and not text.get_text().endswith("\n")
    ]
    frame = figure.bbox.padded(1)
    lost = [
        (text, "the edge")
        for text, box in boxes
        if not all(frame.contains(x, y) for x, y in box.corners())
    ]
    meet = [
        (a, b)
        for i, (a, box_a) in enumerate(boxes)
        for b, box_b in boxes[i + 1 :]
        if box_a.shrunk(0.96, 0.8).overlaps(box_b)
    ]
    return lost + meet


def test_every_impl_has_a_look_of_its_own() -> None:
    assert set(IMPLS) <= set(STYLES)
    gpu = [style for name, style in STYLES.items() if name != "cpu"]
    assert len({(style.colour, style.dash) for style in gpu}) == len(gpu)
    assert len({style.marker for style in gpu}) == len(gpu)
    ours = {style.colour for style in gpu if style.ours}
    assert not ours & {style.colour for style in gpu if not style.ours}


def test_paper_suite_is_one_panel_for_each_head_dim_and_mask() -> None:
    rows = [gpu_row(impl, work) for work in paper() for impl in CURVES]
    family = family_of(rows)
    assert [panel.title for panel in family.panels] == [
        f"head dim {d}, {2048 // d} heads, {mask}"
        for mask in ("not causal", "causal")
        for d in (64, 128, 256)
    ]
    assert [kind.name for kind in kinds_of(family)] == ["throughput", "ratio", "roof"]
    line = conditions(H200, family, H200_CARD)
    for part in ("H200 SXM", "bf16", "16,384 tokens", "L2 cold", "torch 2.11.0", "SM clock 16"):
        assert part in line
    figure = figure_of(family, kinds_of(family)[0])
    assert len(figure.axes) == 6
    assert not overlapping_texts(figure)
    assert [text.get_text() for text in figure.legends[0].get_texts()][:2] == [
        "cuda-sm80",
        "triton",
    ]


def test_throughput_ratio_and_roof_values() -> None:
    work = paper()[6 + 0]  # causal, head dim 64, 512: memory-bound
    rows = [ok_row("cuda-sm80", work, 0.5), ok_row("sdpa-flash", work, 1.0)]
    family = family_of(rows)
    throughput, ratio, roof = kinds_of(family)
    ours = next(point for point in family.points if point.impl == "cuda-sm80")
    value, low, high = throughput.value(ours)
    assert value == pytest.approx(work.flops_reported()[0] / 0.5e9)
    assert low < value < high
    assert ratio.value(ours)[0] == pytest.approx(2.0)
    assert ratio.value(ours)[1] < 2.0 < ratio.value(ours)[2]
    ceiling = throughput.ceiling(ours)
    assert ceiling.bound == "memory"
    assert ceiling.tflops == pytest.approx(work.flops_reported()[0] / work.bytes() * 4.8)
    assert roof.value(ours)[0] == pytest.approx(100 * value / ceiling.tflops)


def test_curves_are_broken_where_an_impl_has_no_time() -> None:
    works = paper()[:6]
    rows = [gpu_row("sdpa-flash", work) for work in works]
    rows += [gpu_row("fa3", work) for i, work in enumerate(works) if i != 2]
    rows.append(lost_row("fa3", works[2], "failed", "out of memory"))
    family = family_of(rows)
    figure = figure_of(family, kinds_of(family)[0])
    (curve,) = [
        container.lines[0].get_ydata()
        for container in figure.axes[0].containers
        if container.lines[0].get_color() == STYLES["fa3"].colour
    ]
    assert np.isnan(curve).tolist() == [False, False, True, False, False, False]


def test_rows_without_a_time_are_left_out_and_counted() -> None:
    works = paper()[:4]
    rows = [gpu_row("fa3", work) for work in works[:2]]
    rows += [gpu_row("fa3", works[2]) | {"median_ms": None}, lost_row("fa3", works[3], "wrong", "")]
    points, left_out = timed(rows)
    assert (len(points), left_out) == (2, Counter({"no time": 1, "wrong": 1}))
    family = family_of(rows)
    notes = footnotes(family, kinds_of(family)[0], H200_CARD, None, left_out)
    assert notes[-1] == "Not shown, no time in the file: 1 no time, 1 wrong."
    assert "Roof: the lower of 989.4 TFLOP/s" in notes[1]


def test_throttled_rows_and_unknown_cards_are_reported() -> None:
    family = family_of([gpu_row("fa3", work, throttled=True) for work in paper()[:3]])
    (kind,) = kinds(H200, family, None, None)
    notes = footnotes(family, kind, None, "'NVIDIA Z1' is not known", Counter())
    assert notes[1:] == ["No roof: 'NVIDIA Z1' is not known.", "3 of 3 rows ran under a throttle "
                         "reason."]  # fmt: skip


def test_mixed_suites_fall_into_curves_and_cases() -> None:
    works = load_suite("quick", "cuda")
    found = families(timed([gpu_row("cuda-sm80", work) for work in works])[0])
    curves, cases = found
    assert curves.panels and not curves.cases
    assert {work.head_dim for panel in curves.panels for work in panel.works} == {64, 128, 256}
    assert len(cases.cases) == 2 and not cases.panels
    assert {work.heads_kv for work in cases.cases} == {8, 16}
    figure = figure_of(cases, kinds_of(cases)[0])
    assert not overlapping_texts(figure)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels[1].startswith("8,192 tokens packed, 11 sequences, longest 4,096")


def test_two_batches_at_one_length_do_not_share_a_curve() -> None:
    works = [w for w in load_suite("short", "cuda") if w.causal and w.head_dim == 64]
    found = families(timed([gpu_row("fa3", work) for work in works])[0])
    assert [[work.batch for work in f.panels[0].works] for f in found] == [
        [256, 128, 64, 32],
        [1, 1],
    ]


def test_one_point_draws() -> None:
    family = family_of([gpu_row("cuda-sm80", paper()[0])])
    for kind in kinds_of(family):
        assert not overlapping_texts(figure_of(family, kind))


def test_a_cpu_run_shows_latency_and_no_roof() -> None:
    works = [w for w in load_suite("quick", "cpu") if w.dtype == "float32"]
    impls = ("cpu", "sdpa-flash", "naive")
    rows = [
        ok_row(impl, work, 2.0 + i, l2="warm") for work in works for i, impl in enumerate(impls)
    ]
    for family in families(timed(rows)[0]):
        found = kinds_of(family, CPU)
        assert [kind.name for kind in found] == ["latency", "ratio"]
        for kind in found:
            assert not overlapping_texts(figure_of(family, kind))
        assert "2 threads" in conditions(CPU, family, None)


def test_a_narrow_figure_keeps_title_and_legend_apart() -> None:
    works = [w for w in load_suite("gqa", "cuda") if w.causal]
    rows = [gpu_row(impl, work) for work in works for impl in ("sdpa-efficient", "sdpa-flash")]
    family = family_of(rows)
    env = H200 | {"gpu": "NVIDIA Some Very Long Name Of A Card 480GB Edition"}
    line = conditions(env, family, None)
    figure = draw(family, kinds_of(family)[0], "Attention forward: throughput", line, ["note"])
    assert not overlapping_texts(figure)


def test_files_are_written_and_do_not_change_between_runs(tmp_path: Path) -> None:
    rows = [gpu_row(impl, work) for work in paper()[:3] for impl in ("cuda-sm80", "sdpa-flash")]
    path = write(tmp_path / "paper-forward.json", H200, rows)
    written = plot_file(path, tmp_path / "plots")
    assert [target.name for target in written] == [
        f"paper-forward-{kind}.{suffix}"
        for kind in ("throughput", "ratio", "roof")
        for suffix in ("png", "svg")
    ]
    svg = written[1]
    ElementTree.parse(svg)
    before = svg.read_bytes()
    plot_file(path, tmp_path / "plots")
    assert svg.read_bytes() == before
    assert written[0].read_bytes().startswith(b"\x89PNG")


def test_command_distinguishes_bad_input(tmp_path: Path) -> None:
    def plot(*arguments: Any) -> tuple[int, str]:
        arguments = ("plot", *map(str, arguments), "--output-dir", str(tmp_path / "plots"))
        result = CliRunner().invoke(build("plot"), arguments)
        return result.exit_code, result.output

    empty = write(tmp_path / "empty.json", H200, [lost_row("fa3", paper()[0], "skipped", "absent")])
    code, output = plot(empty)
    assert (code, "must have a row with a time, got 1 skipped" in output) == (2, True)
    (tmp_path / "nan.json").write_text('{"schema": 1, "env": {}, "rows": [{"tflops": Infinity}]}')
    assert plot(tmp_path / "nan.json")[0] == 2
    good = write(tmp_path / "good.json", H200, [gpu_row("fa3", paper()[0])])
    code, output = plot(good, "--baseline", "fa4")
    assert (code, "got 'fa4'" in output) == (2, True)


def test_table_has_a_line_for_each_workload_and_the_best_in_bold(tmp_path: Path) -> None:
    work = paper()[0]
    rows = [
        ok_row("cuda-sm80", work, 0.5, baseline="sdpa-flash", ratio=2.0),
        ok_row("sdpa-flash", work, 1.0, baseline="sdpa-flash", ratio=1.0),
        lost_row("naive", work, "failed", "out of memory"),
    ]
    table = results_table(write(tmp_path / "r.json", H200, rows), tmp_path)
    tflops = work.flops_reported()[0] / 0.5e9
    assert f"| bf16, D 64, 32 heads, not causal, 32 x 512 | **{tflops:.3g}** |" in table
    assert (
        "| speed over sdpa-flash, geometric mean, S 512 (workloads) | 2.00x (1) | 1.00x (1) |"
        in table
    )
    assert table.endswith("S 512: 2.000, least 2.000 (1 workload; peers sdpa-flash)")
    assert "TFLOP/s on NVIDIA H200, torch 2.11.0+cu130" in table
    assert "rows without a time: 1 failed" in table


def test_many_workloads_are_folded_under_means(tmp_path: Path) -> None:
    rows = [gpu_row("fa3", work) for work in paper()]
    rows += [gpu_row("naive", work) for work in paper() if work.seqlen_q < 16384]
    table = results_table(write(tmp_path / "r.json", H200, rows), tmp_path)
    assert "<summary>All 36 workloads</summary>" in table
    head, folded = table.split("<details>")
    (line,) = [text for text in head.splitlines() if "D 128, 16 heads, causal" in text]
    assert line.endswith("| - |")  # naive has no time at the longest: no mean to compare
    assert len([text for text in folded.splitlines() if text.startswith("| bf16")]) == 36


def test_cpu_table_is_in_milliseconds(tmp_path: Path) -> None:
    work = Workload.of(head_dim=64, heads=8, seqlen=256, dtype="float32")
    path = write(tmp_path / "r.json", CPU, [ok_row("cpu", work, 12.3456, noise=0)])
    table = results_table(path, tmp_path)
    assert table.startswith("ms on Xeon, 2 threads")
    assert "**12.3**" in table


def test_results_go_between_the_marks_of_a_document(tmp_path: Path) -> None:
    path = write(tmp_path / "r.json", H200, [gpu_row("fa3", paper()[0])])
    document = tmp_path / "docs" / "page.md"
    document.parent.mkdir()
    document.write_text("before\n<!-- results:begin -->\nold\n<!-- results:end -->\nafter\n")
    arguments = ["plot", str(path), "--output-dir", str(tmp_path / "figures")]
    arguments += ["--markdown", str(document)]
    assert CliRunner().invoke(build("plot"), arguments).exit_code == 0
    text = document.read_text()
    assert text.startswith("before\n<!-- results:begin -->\n\n![r](../figures/r-throughput.png)\n")
    assert "from [../r.json](../r.json)." in text
    assert text.endswith("|\n\n<!-- results:end -->\nafter\n") and "old" not in text
    put_results(document, {path: tmp_path / "figures" / "r-throughput.png"})
    assert document.read_text() == text
    document.write_text("no marks")
    with pytest.raises(ValueError, match="results:begin"):
        put_results(document, {path: path})


def test_every_number_of_a_figure_comes_from_the_file(tmp_path: Path) -> None:
    rows = [gpu_row("fa3", work) for work in paper()[:3]]
    path = write(tmp_path / "r.json", H200, rows)
    stored = json.loads(path.read_text())["rows"]
    family = family_of(stored)
    assert [point.tflops[1] for point in family.points] == pytest.approx(
        [row["tflops"] for row in stored]
    )


def test_many_lengths_have_few_labels() -> None:
    from attnscope.bench.figures import MOST_TICKS, _ticks

    assert _ticks([512, 1024, 4096]) == [512, 1024, 4096]
    assert _ticks(range(64, 4160, 64)) == [64, 128, 256, 512, 1024, 2048, 4096]
    assert len(_ticks(range(1001, 1100))) <= MOST_TICKS


def test_intervals_of_many_rows_take_no_time() -> None:
    """Rows with equal sample counts share bootstrap draws: 7,200 intervals take seconds."""
    from attnscope.bench import statistics

    statistics._median_ranks.cache_clear()
    rng = np.random.default_rng(0)
    for _ in range(50):
        statistics.bootstrap_ratio(rng.random(20).tolist(), rng.random(20).tolist())
    assert statistics._median_ranks.cache_info().misses == 2


def test_many_workloads_that_form_no_curve_are_several_figures() -> None:
    works = [Workload.of(head_dim=64, heads=2, seqlens=[length]) for length in range(1, 100)]
    found = families(timed([ok_row("fa3", work, 1.0) for work in works])[0])
    assert [len(family.cases) for family in found] == [40, 40, 19]


@pytest.mark.parametrize(
    ("row", "env", "said"),
    [
        ({"window": None}, H200, "a row must describe a workload"),
        ({"heads_kv": "x"}, H200, "heads_kv must be an integer >= 1, got 'x'"),
        ({"flops": None}, H200, "a row with a time must have flops and bytes"),
        ({}, {}, "env must have device, gpu and torch"),
    ],
)
def test_rows_without_a_workload_or_environment_are_bad_input(
    tmp_path: Path, row: Row, env: Row, said: str
) -> None:
    work = Workload.of(head_dim=64, heads=2, seqlen=64)
    rows = [ok_row("fa3", work, 1.0) | row]
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"schema": 1, "env": env, "rows": rows}))
    result = CliRunner().invoke(build("plot"), ["plot", str(path), "--output-dir", str(tmp_path)])
    assert (result.exit_code, said in result.output.replace("\n", " ")) == (2, True), result.output
    (tmp_path / "file").touch()
    arguments = ["plot", str(path), "--output-dir", str(tmp_path / "file")]
    assert CliRunner().invoke(build("plot"), arguments).exit_code == 2


def test_modes_have_figures_of_their_own(tmp_path: Path) -> None:
    works = [work for work in paper() if work.head_dim == 64 and not work.causal]
    in_mode = {
        name: [ok_row(impl, replace(work, **change), 1.0) for work in works for impl in CURVES]
        for name, change in (
            ("forward", {}),
            ("backward", {"mode": "backward"}),
            ("backward-deterministic", {"mode": "backward", "deterministic": True}),
        )
    }
    write(tmp_path / "paper-backward.json", H200, in_mode["backward"])
    one = plot_file(tmp_path / "paper-backward.json", tmp_path)
    assert {path.stem for path in one} == {
        f"paper-backward-{kind}" for kind in ("throughput", "ratio", "roof")
    }
    text = (tmp_path / "paper-backward-throughput.svg").read_text()
    assert "Attention backward: throughput" in text
    write(tmp_path / "all.json", H200, [row for rows in in_mode.values() for row in rows])
    stems = {one.name for one in draw_file(tmp_path / "all.json")}
    assert stems == {f"all-{mode}-bf16-{kind}" for mode in in_mode for kind in
                     ("throughput", "ratio", "roof")}  # fmt: skip
    table = results_table(tmp_path / "all.json", tmp_path)
    assert "TFLOP/s (forward; backward; backward, deterministic) on" in table
    assert "backward, deterministic, S 512 to 16,384 (6)" in table
