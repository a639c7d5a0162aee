"""Import rules of python/attnscope: the order of its parts, and no import cycles.

Imports inside functions and under TYPE_CHECKING count too, because they also couple modules. The
package's `__init__` is outside the order: it imports names lazily.
"""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from word_list import statements

PACKAGE = "attnscope"
FOLDER = Path("python") / PACKAGE
Finding = tuple[Path, int, str]

# From the bottom up. A part may import lower parts, and parts of its level if `shared` is true.
LEVELS: tuple[tuple[str, bool, tuple[str, ...]], ...] = (
    ("ground", True, ("common", "schemas", "_load", "ranges", "counters")),
    (
        "ops",
        True,
        ("ops", "argument_checks", "attention_flops", "autograd", "functional", "reference")
        + ("numerics", "inputs", "kernels", "triton"),
    ),
    ("tools", False, ("bench", "profile", "timeline", "stress", "doctor", "integrations")),
    ("old names", False, ("transformers",)),
    ("sessions", False, ("nsight",)),
    ("studies", False, ("studies",)),
    ("command line", True, ("cli", "__main__")),
)
# Inside profile, from the bottom up; a module may import the modules before it.
PROFILE = (
    ("errors", "trace", "attribution", "analysis", "render", "api", "record", "script")
    + ("options", "reports", "command")
)  # fmt: skip
# Parts that never import the parts named here, whatever their levels.
APART = {"nsight": ("bench", "timeline", "stress", "integrations", "transformers")}
_LEVEL = {part: at for at, (_, _, parts) in enumerate(LEVELS) for part in parts}


def modules(files: Sequence[Path]) -> dict[str, Path]:
    """Dotted names of the package's modules (without the package's name), and their files."""
    found = {}
    for path in files:
        if path.suffix == ".py" and path.is_relative_to(FOLDER):
            parts = path.relative_to(FOLDER).with_suffix("").parts
            found[".".join(parts).removesuffix("__init__").removesuffix(".")] = path
    return found


def imports(text: str, known: dict[str, Path]) -> Iterator[tuple[str, int]]:
    """Modules of the package that a file imports, without the package itself, and the lines."""
    for node in statements(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            joined = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [
                name if name.removeprefix(f"{PACKAGE}.") in known else node.module
                for name in joined
            ]
        for name in dict.fromkeys(names):
            if name.startswith(f"{PACKAGE}."):
                yield name.removeprefix(f"{PACKAGE}."), node.lineno  # type: ignore[attr-defined]


def import_order(root: Path, files: list[Path]) -> Iterator[Finding]:
    """Imports of python/attnscope go down the order: command line, studies, sessions, tools, ops,
    ground; inside profile from the command to the trace."""
    known = modules(files)
    for name, path in known.items():
        part = name.partition(".")[0]
        if not part:
            continue
        if part not in _LEVEL:
            yield path, 1, f"{part} has no place in LEVELS of tools/import_rules.py"
            continue
        for target, line in imports((root / path).read_text(), known):
            if reason := _forbidden(name, target):
                yield path, line, f"imports {target}: {reason}"


def _forbidden(name: str, target: str) -> str | None:
    (part, _, rest), (other, _, inner) = name.partition("."), target.partition(".")
    if part == other == "profile":
        mine, theirs = rest.partition(".")[0], inner.partition(".")[0]
        if not mine or not theirs:  # the package's own names
            return None if not mine else "a part of profile imports the module, not the package"
        if mine not in PROFILE:
            return f"{mine} has no place in PROFILE of tools/import_rules.py"
        above = theirs not in PROFILE or PROFILE.index(theirs) > PROFILE.index(mine)
        return f"{theirs} comes after {mine} in profile" if above else None
    if part == other or other not in _LEVEL:
        return None
    if other in APART.get(part, ()):
        return f"{part} does not import {other}"
    level, shared, _ = LEVELS[_LEVEL[part]]
    if _LEVEL[other] > _LEVEL[part]:
        return f"level '{LEVELS[_LEVEL[other]][0]}' is above level '{level}'"
    if _LEVEL[other] == _LEVEL[part] and not shared:
        return f"parts of level '{level}' do not import each other"
    return None


def import_circles(root: Path, files: list[Path]) -> Iterator[Finding]:
    """Modules of python/attnscope have no import cycle."""
    known = modules(files)
    targets = {
        name: [one for one, _ in imports((root / path).read_text(), known) if one in known]
        for name, path in known.items()
    }
    done: set[str] = set()
    for name in sorted(known):
        if circle := _circle(name, targets, [], done):
            yield known[circle[0]], 1, f"imports in a circle: {' -> '.join([*circle, circle[0]])}"


def _circle(
    name: str, targets: dict[str, list[str]], path: list[str], done: set[str]
) -> list[str] | None:
    if name in path:
        return path[path.index(name) :]
    if name in done:
        return None
    found = None
    for target in sorted(targets[name]):
        found = found or _circle(target, targets, [*path, name], done)
    done.add(name)
    return found
