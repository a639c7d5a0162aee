"""Checks that no linter has: include rules, budgets, generated files, links, white space, words
(word_list.py) and the order of imports (import_rules.py).

`python tools/check_tree.py [RULE ...]` checks the files that git knows or would add; it prints one
line per finding and exits 1 if there is any.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from import_rules import import_circles, import_order
from word_list import statements, words

# What a folder of csrc may include, besides the standard library, CUDA and this project. Device and
# CPU code must not include torch; the binding may include the stable ABI only.
TORCH_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]((?:torch|ATen|c10|pybind11|Python\.h)[^>"]*)')
STABLE_HEADERS = ("torch/csrc/stable/", "torch/headeronly/", "torch/csrc/inductor/aoti_torch/c/")

DEVICE_SUFFIXES = (".cu", ".cuh")
HOST_SUFFIXES = (".cpp", ".h")
WRITTEN_SUFFIXES = (*DEVICE_SUFFIXES, *HOST_SUFFIXES, ".py", ".md", ".toml", ".yaml", ".yml", "")
DEVICE_LINES = 450
HOST_LINES = 300
PYTHON_LINES = 400
TEST_LINES = 600
SETUP_LINES = 199
FUNCTION_LINES = 80

LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)[^()]*\)|(?:src|href)=\"([^\"]+)\"")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
GENERATED = re.compile(r"// Written by (tools/\w+\.py)")
SCHEME = re.compile(r"^[a-z][a-z+.-]*:")

Finding = tuple[Path, int, str]


def tracked_files(root: Path) -> list[Path]:
    """Files of the tree, relative to its root: what git tracks, and what it would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in sorted(listed.split("\0")) if name and (root / name).is_file()]


def rings(root: Path, files: list[Path]) -> Iterator[Finding]:
    """Includes of torch: none outside csrc/binding, only stable headers inside."""
    for path in files:
        if path.parts[0] != "csrc" or path.suffix not in DEVICE_SUFFIXES + HOST_SUFFIXES:
            continue
        allowed = STABLE_HEADERS if path.parts[1] == "binding" else ()
        for number, line in enumerate((root / path).read_text().splitlines(), 1):
            include = TORCH_INCLUDE.match(line)
            if include and not include[1].startswith(allowed):
                what = "the stable headers only" if allowed else "no torch header"
                yield path, number, f"includes {include[1]}; allowed here: {what}"


def line_budget(path: Path) -> int | None:
    if path == Path("setup.py"):
        return SETUP_LINES
    if path.parts[0] == "csrc":
        if path.suffix in DEVICE_SUFFIXES:
            return DEVICE_LINES
        return HOST_LINES if path.suffix in HOST_SUFFIXES else None
    if path.suffix == ".py":
        return TEST_LINES if path.parts[0] == "tests" else PYTHON_LINES
    return None


def is_triton_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("triton" in ast.unparse(decorator) for decorator in function.decorator_list)


def budgets(root: Path, files: list[Path]) -> Iterator[Finding]:
    """Lines of a file, and of a Python function that is no Triton kernel."""
    for path in files:
        budget = line_budget(path)
        if budget is None:
            continue
        text = (root / path).read_text()
        lines = len(text.splitlines())
        if lines > budget and not GENERATED.match(text):
            yield path, lines, f"has {lines} lines; allowed: {budget}"
        if path.suffix != ".py":
            continue
        for node in statements(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES and not is_triton_kernel(node):
                message = f"{node.name} has {length} lines; allowed: {FUNCTION_LINES}"
                yield path, node.lineno, message


def generated(root: Path, files: list[Path]) -> Iterator[Finding]:
    """Generated files, which name their script, match its output (`script --check` compares)."""
    for path in files:
        if path.suffix not in DEVICE_SUFFIXES + HOST_SUFFIXES:
            continue
        script = GENERATED.match((root / path).read_text())
        if not script:
            continue
        command = [sys.executable, str(root / script[1]), "--check"]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            yield path, 1, f"is not what {script[1]} writes: {run.stderr.strip()}"


def links(root: Path, files: list[Path]) -> Iterator[Finding]:
    """Relative links of Markdown files point to existing files and headings of the tree."""
    known = set(files)
    for path in files:
        if path.suffix != ".md":
            continue
        text = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), (root / path).read_text())
        for match in LINK.finditer(text):
            link = match[1] or match[2]
            if SCHEME.match(link):
                continue
            name, _, heading = link.partition("#")
            target = (root / path.parent / name).resolve() if name else (root / path).resolve()
            number = text.count("\n", 0, match.start()) + 1
            inside = target.is_relative_to(root.resolve())
            relative = target.relative_to(root.resolve()) if inside else None
            if relative is None or not (relative in known or is_folder(relative, known)):
                yield path, number, f"links to {link}, which is not in the tree"
            elif heading and target.suffix == ".md" and heading not in anchors(target):
                yield path, number, f"links to {link}, but there is no such heading"


def is_folder(path: Path, files: set[Path]) -> bool:
    return any(path in file.parents for file in files)


def anchors(path: Path) -> set[str]:
    """The anchors that Markdown viewers generate for headings."""
    headings = re.findall(r"^#+\s+(.*?)\s*$", FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def white_space(root: Path, files: list[Path]) -> Iterator[Finding]:
    """Handwritten files (not recorded data) have no white space at the end of a line, and end with
    one line end."""
    for path in files:
        if path.suffix not in WRITTEN_SUFFIXES:
            continue
        text = (root / path).read_bytes().decode()
        lines = text.split("\n")
        for number, line in enumerate(lines, 1):
            if line != line.rstrip():
                yield path, number, "has white space at the end of the line"
        if text and (lines[-1] or not "".join(lines[-2:]).strip()):
            yield path, len(lines), "must end with one line end"


Rule = Callable[[Path, list[Path]], Iterator[Finding]]
RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        rings,
        budgets,
        generated,
        links,
        white_space,
        words,
        import_order,
        import_circles,
    )
}


def main(root: Path, names: list[str]) -> int:
    unknown = [name for name in names if name not in RULES]
    if unknown:
        print(f"no rule {', '.join(unknown)}; there are: {', '.join(RULES)}", file=sys.stderr)
        return 2
    files = tracked_files(root)
    rules = [RULES[name] for name in names] or list(RULES.values())
    findings = [finding for rule in rules for finding in rule(root, files)]
    for path, number, message in findings:
        print(f"{path}:{number}: {message}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent, sys.argv[1:]))
