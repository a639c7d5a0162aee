"""The documentation site: links have the same targets as in the tree; broken links are found."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import make_site
import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def site(tmp_path):
    """A site of a small tree."""
    root = tmp_path / "tree"
    files = {
        "README.md": "# Tree\n\n[Docs](docs/index.md#top) ![](docs/a.png)\n\n```\n[x](y.md)\n```\n",
        "CONTRIBUTING.md": "# Contributing\n",
        "docs/index.md": "# Top\n",
        "docs/kernels/k.md": "[a](../../csrc/k/a.cuh) [k](../../csrc/k) [r](../../r.json)\n",
        "docs/a.png": "png",
        "csrc/k/a.cuh": "int a;\n",
        "csrc/k/b.cu": "int b;\n",
        "r.json": "{}",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return make_site.Site(root, tmp_path / "stage")


@pytest.mark.parametrize(
    ("target", "source", "page", "link"),
    [
        ("docs/index.md#top", "README.md", "overview.md", "index.md#top"),
        ("../README.md", "docs/index.md", "index.md", "overview.md"),
        ("../../CONTRIBUTING.md", "docs/kernels/k.md", "kernels/k.md", "../contributing.md"),
        ("../a.png", "docs/kernels/k.md", "kernels/k.md", "../a.png"),
        ("../../csrc/k/a.cuh", "docs/kernels/k.md", "kernels/k.md", "../source/csrc-k-a.cuh.md"),
        ("#top", "README.md", "overview.md", "#top"),
        ("https://example.org/a.md", "README.md", "overview.md", "https://example.org/a.md"),
    ],
)
def test_a_link_leads_to_the_page_of_its_target(site, target, source, page, link):
    assert site.link(target, source, page) == link


def test_pages_are_staged_with_the_files_that_they_link_to(site):
    site.add_docs()
    site.add_page("README.md", "overview.md")
    site.add_sources()
    text = (site.stage / "overview.md").read_text()
    assert "[Docs](index.md#top) ![](a.png)" in text and "[x](y.md)" in text
    assert (site.stage / "a.png").read_text() == "png"
    assert (site.stage / "source/r.json").read_text() == "{}"
    assert "[csrc/k/b.cu](csrc-k-b.cu.md)" in (site.stage / "source/csrc-k.md").read_text()
    assert "int b;" in (site.stage / "source/csrc-k-b.cu.md").read_text()


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('<a href="b.html#there">', None),
        ('<a href="#here"><p id="here">', None),
        ('<a href="https://example.org"><img src="data:image/png;base64,AA">', None),
        ('<a href="c.html">', "a.html: links to c.html, which is not on the site"),
        ('<img src="c.png">', "a.html: links to c.png, which is not on the site"),
        ('<a href="b.html#no">', "a.html: links to b.html#no, but the page has no such anchor"),
        ('<script src="https://cdn.org/x.js">', "a.html: loads https://cdn.org/x.js from the net"),
        ('<link rel="stylesheet" href="//cdn.org/x.css">', "a.html: loads //cdn.org/x.css from"),
    ],
)
def test_the_check_finds_broken_links_and_the_network(tmp_path, body, problem):
    (tmp_path / "a.html").write_text(body)
    (tmp_path / "b.html").write_text('<p id="there">')
    problems = list(make_site.check(tmp_path))
    assert len(problems) == (problem is not None)
    assert all(line.startswith(problem) for line in problems)


def test_public_names_are_in_all_or_defined_in_the_module():
    def mine():
        pass

    mine.__module__ = "m"
    members = {"mine": mine, "_private": mine, "Path": Path, "NUMBER": 1, "__name__": "m"}
    assert make_site.public_names(SimpleNamespace(**members)) == ["mine"]
    chosen = SimpleNamespace(__all__=["Path", "NUMBER"], **members)
    assert make_site.public_names(chosen) == ["Path"]


def test_every_page_of_docs_is_in_the_navigation():
    entries = [
        entry.split("<")[-1].rstrip(">") for part in make_site.NAVIGATION.values() for entry in part
    ]
    pages = {
        path.relative_to(ROOT / "docs").with_suffix("").as_posix()
        for path in ROOT.glob("docs/**/*.md")
    }
    assert pages - {"index"} <= set(entries)
