"""The word list finds house words in prose, names and strings, on the right line."""

import subprocess
from pathlib import Path

import pytest

import check_tree
import word_list


@pytest.fixture
def find(tmp_path, capsys):
    """Checks a tree of the given files by the rule; returns its lines."""

    def check(files: dict[str, str]) -> list[str]:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
        status = check_tree.main(tmp_path, ["words"])
        lines = capsys.readouterr().out.splitlines()
        assert status == (1 if lines else 0)
        return lines

    return check


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("The copy engine loads K.", "copy engine"),
        ("The caller is told.", "told"),
        ("It was mended.", "mended"),
        ("The name proves it.", "proves"),
        ("An unproved kernel.", "unproved"),
        ("Rows of no more than so many.", "so many"),
        ("The work of the one that waits.", "of the one"),
        ("The speed is that of cuDNN.", "that of"),
        ("The tile is of the head.", "is of the"),
        ("The table is held carefully against the trace.", "held carefully against"),
    ],
)
def test_a_house_word_is_found(find, text, phrase):
    (line,) = find({"README.md": f"# Title\n\n{text}\n"})
    assert line.startswith(f'README.md:3: "{phrase}" is a house word; write: ')


@pytest.mark.parametrize("start", ["Of", "Else"])
@pytest.mark.parametrize("before", ["", "It runs. ", "- ", "| "])
def test_a_sentence_that_starts_wrongly_is_found(find, start, before):
    (line,) = find({"docs/a.md": f"{before}{start} a sample the median is shown.\n"})
    assert line.startswith(f'docs/a.md:1: "{start}" starts a sentence; write: ')


def test_a_phrase_that_spans_lines_is_found_in_comments_and_docstrings(find):
    cpp = "int a;  // none\n// The copy\n// engine loads K.\n/* and\n * was told */\n"
    python = 'def f():\n    """Load.\n\n    It was told.\n    """\n    return 1  # proved\n'
    lines = find({"csrc/a.cuh": cpp, "python/a.py": python})
    assert [line.split(" is a ")[0] for line in lines] == [
        'csrc/a.cuh:2: "copy engine"',
        'csrc/a.cuh:5: "told"',
        'python/a.py:4: "told"',
        'python/a.py:6: "proved"',
    ]


@pytest.mark.parametrize(
    ("path", "text", "phrase"),
    [
        ("python/a.py", "def f():\n    was_told = 1\n", "told"),
        ("python/a.py", "\ndef test_lengths_are_of_the_batch():\n    pass\n", "are of the"),
        ("python/a.py", "\nclass ProvedKernel:\n    pass\n", "Proved"),
        ("python/a.py", "\nprint(f'the caller {x} was told')\n", "told"),
        ("csrc/a.cuh", "\nint proved_rows;  // counted\n", "proved"),
        ("csrc/a.cuh", '\nconst char* text = "was told";\n', "told"),
    ],
    ids=["name", "test", "class", "f-string", "C++ name", "C++ string"],
)
def test_a_house_word_in_code_is_found(find, path, text, phrase):
    (line,) = find({path: text})
    assert line.startswith(f'{path}:2: "{phrase}" is a house word; write: ')


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("README.md", "`told` [a](told.md) <img alt=told>\n\n```\ntold\n```\n"),
        ("README.md", "Improved, amended, provenance, tell-tale; a list of words.\n"),
        ("csrc/a.cuh", "int improved, atoldest;  // `told`\n"),
        ("python/a.py", 'improved = 1  # sets `told`\nname = "`told`"\nthat = of = 1\n'),
    ],
    ids=["code in Markdown", "other words", "C++ code", "Python code"],
)
def test_what_is_no_house_word_passes(find, path, text):
    assert find({path: text}) == []


def test_an_exemption_is_for_one_phrase_of_one_file(find, monkeypatch):
    monkeypatch.setattr(word_list, "EXEMPTIONS", {"docs/a.md": ("copy engine",)})
    files = {"docs/a.md": "A copy engine was told.\n", "docs/b.md": "A copy engine.\n"}
    assert [line.split(" is a ")[0] for line in find(files)] == [
        'docs/a.md:1: "told"',
        'docs/b.md:1: "copy engine"',
    ]


def test_every_exemption_is_needed():
    root = Path(check_tree.__file__).resolve().parent.parent
    for path, phrases in word_list.EXEMPTIONS.items():
        prose = word_list.PROSE[Path(path).suffix]((root / path).read_text()).lower()
        for phrase in phrases:
            assert phrase in " ".join(prose.split()), f"{path} does not use {phrase!r}"
