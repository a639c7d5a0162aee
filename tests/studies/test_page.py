"""attnscope report: one page of results of several commands, opened in a browser where one is."""

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_nsys import MadeReport
from made_trace import RECORDED
from typer.testing import CliRunner

from attnscope import cli
from attnscope.profile.api import Profile

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "benchmarks/results/h200/gqa-forward.json"
NCU = ROOT / "tests/support/ncu/attention.csv"


class Page(HTMLParser):
    """References of a page to anything outside it, its headings and its figures."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.anchors: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and value and not value.startswith("#"):
                self.outside.append(value)
            if tag == "h2" and name == "id" and value:
                self.anchors.append(value)


def command(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.build("report"), ["report", *arguments])
    return done.exit_code, re.sub(r"\s+", " ", done.output)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    Profile.read(RECORDED / "train.json.gz").to_json(folder / "profile.json")
    path, nsys = folder / "page.html", folder / "nsys"
    nsys.mkdir()
    made = MadeReport()
    made.range("forward", 0, 100)
    made.kernel("void ns::gemm<float>(int)", 10, 20, 60)
    made.kernel("relu", 30, 60, 70)
    made.save(nsys / "report.sqlite")
    results = map(str, (BENCH, folder, NCU, NCU, nsys))
    code, text = command(*results, "--output", str(path))
    assert code == 0, text
    return path


def test_the_page_has_every_part_and_needs_no_other_file(page: Path) -> None:
    text = page.read_text()
    found = Page(text)
    assert not found.outside and "@import" not in text and not re.search(r"url\((?!#)", text)
    assert len(found.anchors) == len(set(found.anchors)), "two results may have the same titles"
    assert found.tags.count("svg") >= 4
    for part in (
        "attention-forward:-throughput", "operators", "gpu-kernels", "what-limits-each-kernel",
        "roofline", "model-against-counters", "environment",
    ):  # fmt: skip
        assert any(anchor.startswith(part) for anchor in found.anchors), part
    assert "Attributed to ops:" in text and "latency-bound: the busiest unit" in text
    assert "NVIDIA H200" in text and "report.sqlite" in text and "gemm" in text


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"x": 1}')
    (tmp_path / "b.json").write_text("{")
    for name in ("a.json", "b.json", "c.json", "."):
        code, text = command(str(tmp_path / name), "--output", str(tmp_path / "page.html"))
        assert code == 2 and str(tmp_path) in text
    code, text = command(str(NCU), "--output", str(tmp_path))
    assert code == 2 and "output must be a file" in text
    assert not (tmp_path / "page.html").exists()


def test_the_page_opens_in_a_browser(page: Path, tmp_path: Path) -> None:
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        pytest.skip("no chromium or chrome on PATH")
    log = tmp_path / "log"
    with log.open("w") as errors:
        done = subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
             f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=2000", "--dump-dom",
             page.as_uri()],
            stdout=subprocess.PIPE, stderr=errors, text=True, timeout=120,
        )  # fmt: skip
    assert done.returncode == 0
    assert "CONSOLE" not in log.read_text(), "the page's script raises nothing"
    assert len(Page(done.stdout).anchors) == len(Page(page.read_text()).anchors)
