"""Output for people and scripts: Markdown, JSON, budgets, units, the page in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from made_trace import RECORDED, RECORDINGS, kernel, launch, named, op, write_trace
from typer.testing import CliRunner

from attnscope.cli import build
from attnscope.profile import Profile, profile
from attnscope.profile.analysis.budgets import parse_budget
from attnscope.profile.analysis.kernel_names import CATEGORIES
from attnscope.profile.render.figures import CATEGORY_COLOURS, stacked_bars
from attnscope.profile.render.html import write_html
from attnscope.profile.render.markdown import MOST_LINES, as_markdown

TRAIN = str(RECORDED / "train.json.gz")


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(build("profile"), ["profile", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("name", RECORDINGS)
def test_markdown_has_at_most_60_lines(name: str) -> None:
    text = as_markdown(Profile.read(RECORDED / f"{name}.json.gz"))
    lines = text.splitlines()
    assert len(lines) <= MOST_LINES and lines[0].startswith("**the GPU w")
    assert "can be trusted" in text and "| kernel | calls | GPU | share | op |" in lines


def test_json_and_markdown_are_alone_on_stdout(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch\nprint('its own output')\ntorch.ones(4) + 1\n")
    code, out, errors = run("--json", "--output", str(tmp_path / "out"), str(script))
    content = json.loads(out)
    assert code == 0 and "its own output" in errors and "wrote" in errors
    assert content["run"].keys() >= {"command", "date", "versions", "peak memory"}
    assert content["tables"]["operators"]
    code, out, _ = run("--format", "markdown", str(script))
    assert code == 0 and out.startswith("**no GPU work; aten::") and "its own" not in out
    assert run("--format", "yaml", str(script))[0] == 2


@pytest.mark.parametrize(
    ("budget", "code", "shown"),
    [
        ("attention > 35%", 0, "within budget: not attention > 35%; got 12.1 %"),
        ("attention > 10%", 1, "OVER BUDGET: not attention > 10%; got 12.1 %"),
        ("gpu > 0.6 ms", 1, "got 651.9 us"),
        ("idle > 99%", 0, "within budget"),
        ("idle > 50 %", 1, "OVER BUDGET"),
        ("step > 10 ms", 1, "got 11.09 ms"),
        ("unowned > 0%", 0, "got 0.00 %"),
        ("op aten::mm > 90us", 1, "got 93.18 us"),
        ("kernel nvjet > 1%", 1, "OVER BUDGET"),
        ("stage optimizer < 1 us", 0, "got 155.2 us"),
    ],
)
def test_budgets(budget: str, code: int, shown: str) -> None:
    got, _, errors = run("--trace", TRAIN, "--fail-if", budget)
    assert got == code and shown in errors


def test_every_budget_is_reported() -> None:
    code, _, errors = run("--trace", TRAIN, "--fail-if", "GEMM > 1%", "--fail-if", "memory > 99%")
    assert code == 1 and "OVER BUDGET" in errors and "within budget" in errors


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("attention", "must be NAME > NUMBER UNIT"),
        ("attention > 35", "must be NAME > NUMBER UNIT"),
        ("atention > 35%", "fail-if must be about one of gpu, idle, step"),
        ("op > 35%", "fail-if must be about one of"),
        ("step > 35%", "fail-if must give step in us, ms or s"),
    ],
)
def test_what_is_no_budget(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        parse_budget(text)
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    code, out, errors = run("--fail-if", text, str(script))
    assert code == 2 and said in errors and "ran" not in out


def test_a_budget_for_a_name_that_is_not_there() -> None:
    code, _, errors = run("--trace", TRAIN, "--fail-if", "op aten::nn > 1%")
    assert code == 2 and "fail-if must name ops of the profile, got 'aten::nn'" in errors


def test_operators_are_sorted_by_self_time_and_hashes_are_cut(tmp_path: Path) -> None:
    graph = f"## Call CompiledFxGraph f{'a1b2' * 12} ##"
    events = [op("outer", 0, 100), op(graph, 10, 90), launch(1, 20), kernel(1, 30, 80)]
    events += [op("small", 200, 250), launch(2, 210), kernel(2, 220, 230)]
    _, out, _ = run("--trace", str(write_trace(tmp_path / "t.json", *events)))
    table = out[out.index("\nOperators") :].splitlines()
    assert [line.split("  ")[0] for line in table[4:7]] == [
        "## Call CompiledFxGraph fa1b2a1… ##", "small", "outer",
    ]  # fmt: skip
    assert max(map(len, out[out.index("\nOperators") :].split("\nSteps")[0].splitlines())) <= 120


def test_times_get_units_that_fit(tmp_path: Path) -> None:
    events = [named("long", 0, 3e6), op("a", 1, 100), launch(1, 5), kernel(1, 10, 2.5e6, "k")]
    found = Profile.read(write_trace(tmp_path / "t.json", *events))
    write_html(found, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    heads = re.findall(r'<button type="button">([^<]*)</button>', text)
    assert "GPU ms" in heads and "self CPU us" in heads and "total ms" in heads
    assert "kernel time, ms" in text and "ms after the first kernel" in text
    assert 'data-key="2499.99">2,500' in text


def test_the_page_names_what_ran(tmp_path: Path) -> None:
    import torch

    with profile("made") as found:
        torch.ones(4) + 1
    found.to_html(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    for label in ("command", "date", "versions", "peak memory", "lint"):
        assert f"<dt>{label}</dt>" in text
    assert f"torch {torch.__version__}" in text and found.run["command"]


def test_a_legend_is_whole() -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    bars = {"stage": dict.fromkeys(CATEGORIES, 1.0)}
    figure = stacked_bars(bars, CATEGORY_COLOURS, "kernel time, us")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (legend,) = figure.legends
    box = legend.get_window_extent(canvas.get_renderer())
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1


CLICKS = """
<script>
const log = [];
const nodes = document.querySelectorAll(".node");
log.push(nodes.length);
nodes[2].click();
log.push(nodes[2].style.width, nodes[0].style.width);
const find = document.getElementById("find");
find.value = "mm";
find.dispatchEvent(new Event("input"));
log.push(document.getElementById("found").textContent.includes("boxes"));
const table = document.querySelectorAll("table")[1];
table.querySelectorAll("th button")[1].click();
const keys = [...table.tBodies[0].rows].map((row) => Number(row.cells[1].dataset.key));
log.push(keys.every((key, at) => at === 0 || keys[at - 1] >= key), keys.length);
document.getElementById("verdict").querySelector("summary").click();
log.push(document.getElementById("verdict").open);
log.push([...document.querySelectorAll("figure svg")].every((svg) =>
  [...svg.querySelectorAll("text")].every((text) =>
    text.getBoundingClientRect().right <= svg.getBoundingClientRect().right + 1)));
document.body.setAttribute("data-clicked", JSON.stringify(log));
</script>
"""


def test_the_page_works_in_a_browser(tmp_path: Path) -> None:
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(names)} is installed")
    write_html(Profile.read(TRAIN), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text().replace("</body>", f"{CLICKS}</body>")
    (tmp_path / "page.html").write_text(page)
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}/user",
    ]
    command = [browser, *options, "--dump-dom", (tmp_path / "page.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    logged = re.search(r'data-clicked="([^"]*)"', done.stdout)
    assert logged is not None, done.stderr[-2000:]
    boxes, zoomed, whole, found, sorted_, rows, opened, inside = json.loads(
        logged[1].replace("&quot;", '"')
    )
    assert boxes > 50 and (zoomed, whole) == ("100%", "100%") and found and sorted_ and opened
    assert rows == len(Profile.read(TRAIN).operators()) and inside
