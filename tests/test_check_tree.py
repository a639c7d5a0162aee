"""Tree checks find each violation, and nothing in a tree that follows the rules."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def check_tree():
    sys.path.insert(0, str(ROOT / "tools"))  # as for a script, which finds the modules beside it
    spec = importlib.util.spec_from_file_location("check_tree", ROOT / "tools/check_tree.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def findings(check_tree, tmp_path, capsys):
    """Check a tree of the given files by one rule; return the lines of output."""

    def check(rule: str, files: dict[str, str]) -> list[str]:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
        status = check_tree.main(tmp_path, [rule])
        lines = capsys.readouterr().out.splitlines()
        assert status == (1 if lines else 0)
        return lines

    return check


@pytest.mark.parametrize(
    "path",
    [
        "csrc/ptx/mma.cuh",
        "csrc/attn/params.h",
        "csrc/kernels/sm80_forward/launch.cu",
        "csrc/cpu/forward.cpp",
    ],
)
@pytest.mark.parametrize(
    "include",
    ["<torch/csrc/stable/tensor.h>", "<ATen/ATen.h>", '"c10/util/Half.h"', "<pybind11/pybind11.h>"],
)
def test_only_the_binding_meets_torch(findings, path, include):
    (line,) = findings("rings", {path: f"#pragma once\n#include {include}\n"})
    assert line == f"{path}:2: includes {include[1:-1]}; allowed here: no torch header"


@pytest.mark.parametrize("include", ["torch/extension.h", "ATen/ATen.h", "c10/cuda/CUDAStream.h"])
def test_the_binding_meets_the_stable_headers_only(findings, include):
    (line,) = findings("rings", {"csrc/binding/forward.cpp": f"#  include <{include}>\n"})
    assert line.endswith(f":1: includes {include}; allowed here: the stable headers only")


def test_rings_that_are_kept_pass(findings):
    stable = "#include <torch/csrc/stable/library.h>\n#include <torch/headeronly/core/Dtype.h>\n"
    shim = "#include <torch/csrc/inductor/aoti_torch/c/shim.h>\n"
    device = '#include <cuda_bf16.h>\n#include "attn/params.h"\n// not for <torch/extension.h>\n'
    files = {"csrc/binding/library.cpp": stable + shim, "csrc/kernels/k/launch.cu": device}
    assert findings("rings", files) == []


@pytest.mark.parametrize(
    ("path", "budget"),
    [
        ("csrc/kernels/sm80_forward/kernel.cuh", 450),
        ("csrc/ptx/mma.cuh", 450),
        ("csrc/binding/forward.cpp", 300),
        ("csrc/cpu/forward.h", 300),
        ("python/attnscope/bench/runner.py", 400),
        ("tools/check_tree.py", 400),
        ("tests/test_forward.py", 600),
        ("setup.py", 199),
    ],
)
def test_a_file_has_a_budget_of_lines(findings, path, budget):
    line = "a = 1\n"
    assert findings("budgets", {path: line * budget}) == []
    over = findings("budgets", {path: line * (budget + 1)})
    assert over == [f"{path}:{budget + 1}: has {budget + 1} lines; allowed: {budget}"]


def function(lines: int, decorator: str = "") -> str:
    return f"{decorator}def long():\n" + "    a = 1\n" * (lines - 1)


def test_a_function_has_a_budget_of_lines(findings):
    files = {"python/attnscope/a.py": "import triton\n\n\n" + function(81)}
    assert findings("budgets", files) == ["python/attnscope/a.py:4: long has 81 lines; allowed: 80"]


@pytest.mark.parametrize("text", [function(80), function(200, "@triton.jit\n")])
def test_short_functions_and_triton_kernels_pass(findings, text):
    assert findings("budgets", {"python/attnscope/a.py": text}) == []


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("", None),
        ("raise SystemExit('stale')", "is not what tools/make_shapes.py writes: stale"),
        (None, "is not what tools/make_shapes.py writes: "),
    ],
    ids=["fresh", "stale", "no script"],
)
def test_a_generated_file_is_as_its_script_writes_it(findings, script, problem):
    head = "// Written by tools/make_shapes.py.\n"
    files = {"csrc/ptx/shapes.cuh": head + "int a;\n" * 1000}
    if script is not None:
        files["tools/make_shapes.py"] = script
    assert findings("budgets", files) == []
    found = findings("generated", files)
    assert [line.startswith(f"csrc/ptx/shapes.cuh:1: {problem}") for line in found] == (
        [True] if problem else []
    )


@pytest.mark.parametrize(
    ("link", "problem"),
    [
        ("[a](missing.md)", "links to missing.md, which is not in the tree"),
        ("![a](plots/x.png)", "links to plots/x.png, which is not in the tree"),
        ('<img src="x.png">', "links to x.png, which is not in the tree"),
        ("[a](../../outside.md)", "links to ../../outside.md, which is not in the tree"),
        ("[a](other.md#nowhere)", "links to other.md#nowhere, but there is no such heading"),
        ("[a](#nowhere)", "links to #nowhere, but there is no such heading"),
    ],
)
def test_a_link_that_leads_nowhere_is_found(findings, link, problem):
    files = {"docs/index.md": f"# Docs\n\n{link}\n", "docs/other.md": "# Other\n"}
    assert findings("links", files) == [f"docs/index.md:3: {problem}"]


def test_links_that_lead_somewhere_pass(findings):
    text = "# Docs\n\n## How it's `built`\n\n[a](other.md) [b](../csrc) [c](#how-its-built)\n"
    text += "[d](other.md#two-words) [e](https://example.org/x.md) [f](other.md 'title')\n"
    text += "\n```\n[not a link](nowhere.md)\n```\n"
    files = {"docs/index.md": text, "docs/other.md": "# Two words\n", "csrc/a.h": "\n"}
    assert findings("links", files) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a \nb\n", "1: has white space at the end of the line"),
        ("a\r\n", "1: has white space at the end of the line"),
        ("a\nb", "2: must end with one line end"),
        ("a\n\n", "3: must end with one line end"),
    ],
)
def test_stray_white_space_is_found(findings, text, problem):
    assert findings("white_space", {"README.md": text}) == [f"README.md:{problem}"]


def test_ignored_files_and_recorded_data_are_left_alone(findings, tmp_path):
    (tmp_path / "x.png").write_bytes(b"\x89PNG \n\xff")
    files = {".gitignore": "/build/\n", "build/a.py": "a \n", "b.py": "", "tests/c.csv": "a \n"}
    assert findings("white_space", files) == []


@pytest.mark.parametrize(
    ("path", "line", "problem"),
    [
        ("common/console.py", "import attnscope.ops", "ops: level 'ops' is above level 'ground'"),
        ("ops.py", "from attnscope.bench import runner", "bench: level 'tools' is above"),
        (
            "timeline/a.py",
            "    from attnscope.bench.x import y",
            "bench.x: parts of level 'tools'",
        ),
        ("bench/a.py", "from attnscope.studies.lm import b", "studies.lm: level 'studies' is"),
        ("nsight/a.py", "from attnscope.bench import b", "bench: nsight does not import bench"),
        ("profile/api.py", "from attnscope.nsight import b", "nsight: level 'sessions' is"),
        ("studies/a.py", "from attnscope import cli", "cli: level 'command line' is"),
        (
            "profile/trace/a.py",
            "from attnscope.profile.api import b",
            "profile.api: api comes",
        ),
        ("profile/render/a.py", "from attnscope.profile import b", "profile: a part of profile"),
    ],
)
def test_an_import_against_the_order_is_found(findings, path, line, problem):
    text = f"def function():\n{line}\n" if line.startswith(" ") else f"\n{line}\n"
    files = {f"python/attnscope/{path}": text, "python/attnscope/cli.py": "\n"}
    (found,) = findings("import_order", files)
    assert found.startswith(f"python/attnscope/{path}:2: imports {problem}")


def test_a_module_without_a_place_in_the_order_is_found(findings):
    (found,) = findings("import_order", {"python/attnscope/new/a.py": "import torch\n"})
    assert found.endswith("a.py:1: new has no place in LEVELS of tools/import_rules.py")


def test_imports_down_the_order_pass(findings):
    files = {
        "python/attnscope/__init__.py": "from attnscope.functional import attention\n",
        "python/attnscope/cli.py": "from attnscope.bench import a\nimport attnscope.doctor\n",
        "python/attnscope/studies/a.py": "from attnscope.bench.a import b\n",
        "python/attnscope/bench/a.py": "from attnscope import __version__, ops, ranges\n",
        "python/attnscope/profile/__init__.py": "from attnscope.profile.api import Profile\n",
        "python/attnscope/profile/api.py": "from attnscope.profile.render.html import page\n",
        "python/attnscope/ops.py": "from attnscope.functional import x\n",
        "python/attnscope/nsight/a.py": "from attnscope.profile.render.html import page\n",
    }
    assert findings("import_order", files) == []
    assert findings("import_circles", files) == []


def test_a_circle_of_imports_is_found_once(findings):
    under = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from attnscope.ops import x\n"
    files = {
        "python/attnscope/ops.py": "def f():\n    from attnscope.functional import x\n",
        "python/attnscope/functional.py": "from attnscope import reference\n",
        "python/attnscope/reference.py": under,
        "python/attnscope/kernels.py": "from attnscope.ops import x\n",
    }
    (found,) = findings("import_circles", files)
    assert found == (
        "python/attnscope/functional.py:1: imports in a circle: "
        "functional -> reference -> ops -> functional"
    )


def test_an_unknown_rule_is_named(check_tree, tmp_path, capsys):
    assert check_tree.main(tmp_path, ["ring"]) == 2
    assert (
        "no rule ring; there are: rings, budgets, generated, links, white_space, words, "
        in capsys.readouterr().err
    )
