"""Words that a CUDA engineer would not use, and what to write instead.

The rule reads prose (Markdown without its code, docstrings, comments) and the code of Python and
C++: strings and names, in which `_` and a capital separate words. Names in backquotes are free.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

# Not covered: the list itself with its tests.
EXCLUDED = ("tools/word_list.py", "tests/test_word_list.py")
# Path -> phrases that it may use, in lower case.
EXEMPTIONS: dict[str, tuple[str, ...]] = {"docs/ops.md": ("as it is",)}

# Pattern -> what to write. A space matches any white space, so phrases may span lines.
WORDS = {
    r"copy engines?": "TMA; the copy engine is the unit behind cudaMemcpyAsync",
    r"feeding warp(?:group)?s?": "producer warpgroup",
    r"machine code": "SASS",
    r"exponential unit": "MUFU",
    r"mend(?:s|ed|ing)?": "fix",
    r"(?:un)?told": "report, pass, detect or distinguish",
    r"tells?": "report, print or show",
    r"(?:un)?prove[sd]?|proving|proofs?": "verify, verification, check",
    r"judge[sd]?|witness(?:es|ed)?": "check, compare",
    r"h(?:eld|olds?|olding) (?:\S+ ){0,4}?against": "compare with",
    r"so many": "a name or a number",
    r"of the one": "name the noun",
    r"that of": "repeat the noun",
    r"(?:is|are|was|were) of (?:the|a|an|its|th[aeio]\w+|no|one)": "a verb",
    r"as (?:it is|they are)(?=\s*[.,;:)])": "unchanged",
    r"no sooner": "not before",
}
SENTENCES = {r"Of": "the subject first", r"Else": "Otherwise, or `if not`"}
_BODY = "|".join(f"(?P<w{i}>{p})" for i, p in enumerate(WORDS)).replace(" ", r"\s+")
_START = "|".join(f"(?P<s{i}>{p})" for i, p in enumerate(SENTENCES))
PHRASE = re.compile(rf"(?<![\w`-])(?:{_BODY})(?![\w`-])", re.IGNORECASE)
SENTENCE = re.compile(rf"(?:^[\s|>*#-]*|[.!?:]\s+|\|\s*)(?:{_START})\b", re.MULTILINE)
ADVICE = {f"w{i}": text for i, text in enumerate(WORDS.values())}
ADVICE |= {f"s{i}": text for i, text in enumerate(SENTENCES.values())}

# What is no prose in Markdown: code, link targets, HTML tags.
MARKDOWN_CODE = re.compile(
    r"^```.*?^```|`[^`\n]+`|\]\([^()\s]*\)|<[^<>\n]+>", re.MULTILINE | re.DOTALL
)
# Strings come first, so that what looks like a comment inside one is none.
CPP_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
CODE_NAME = re.compile(r"`[^`\n]+`")

Finding = tuple[Path, int, str]


def blank(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)


def markdown_prose(text: str) -> str:
    return MARKDOWN_CODE.sub(lambda code: blank(code[0]), text)


def cpp_prose(text: str) -> str:
    """The comments of a C++ file, on their lines; everything else is blank."""
    prose, end = [], 0
    for match in CPP_COMMENT.finditer(text):
        comment = match[0] if match[0].startswith("/") else blank(match[0])
        marks = re.sub(r"^\s*(?://+|/\*+|\*+/?)|\*/$", lambda m: blank(m[0]), comment, flags=re.M)
        prose += [blank(text[end : match.start()]), marks]
        end = match.end()
    return "".join([*prose, blank(text[end:])])


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """A module's statements, nested ones included, and the module: `ast.walk` without what is
    inside statements."""
    yield node
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, field, ()):
            yield from statements(child)


@lru_cache(1)
def tokens(text: str) -> list[tokenize.TokenInfo]:
    return list(tokenize.generate_tokens(io.StringIO(text).readline))


@lru_cache(1)
def docstring_lines(text: str) -> set[int]:
    """The lines of a Python file that docstrings are on, from 0."""
    lines: set[int] = set()
    for node in statements(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                first = node.body[0]
                lines.update(range(first.lineno - 1, first.end_lineno or first.lineno))
    return lines


def python_prose(text: str) -> str:
    """The comments and docstrings of a Python file, on their lines; everything else is blank."""
    lines = text.splitlines()
    prose = [""] * len(lines)
    for token in tokens(text):
        if token.type == tokenize.COMMENT:
            prose[token.start[0] - 1] = token.string.lstrip("#")
    for at in docstring_lines(text):
        prose[at] = lines[at].replace('"""', "   ")
    return "\n".join(CODE_NAME.sub(lambda name: blank(name[0]), line) for line in prose)


PROSE = {".md": markdown_prose, ".py": python_prose}
PROSE |= dict.fromkeys((".cu", ".cuh", ".cpp", ".h"), cpp_prose)


def spell_out(code: str) -> str:
    """Code with the words of its names apart, as many lines as before."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", code)


def cpp_code(text: str) -> str:
    """The code of a C++ file without its comments."""
    code = CPP_COMMENT.sub(lambda part: blank(part[0]) if part[0][0] == "/" else part[0], text)
    return spell_out(code)


def python_code(text: str) -> str:
    """The names and strings of a Python file, on their lines, without docstrings and comments."""
    documented = docstring_lines(text)
    lines = [""] * len(text.splitlines())
    strings = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for token in tokens(text):
        for at, line in enumerate(token.string.splitlines(), token.start[0] - 1):
            if token.type == tokenize.NAME:
                lines[at] += f" {spell_out(line)};"  # phrases end with a name
            elif token.type in strings and at not in documented:
                lines[at] += f" {line}"
    return "\n".join(CODE_NAME.sub(lambda name: blank(name[0]), line) for line in lines)


CODE = {".py": python_code, **dict.fromkeys((".cu", ".cuh", ".cpp", ".h"), cpp_code)}


def find_words(root: Path, path: Path) -> Iterator[Finding]:
    """What the list finds in one file: in its prose, then in its code."""
    text = (root / path).read_text()
    prose = PROSE[path.suffix](text)
    yield from _findings(path, prose, [*PHRASE.finditer(prose), *SENTENCE.finditer(prose)])
    if path.suffix in CODE:
        code = CODE[path.suffix](text)
        yield from _findings(path, code, [*PHRASE.finditer(code)])


def _findings(path: Path, text: str, matches: list[re.Match[str]]) -> Iterator[Finding]:
    for match in sorted(matches, key=lambda found: found.start(found.lastgroup or 0)):
        group = match.lastgroup or ""
        phrase = " ".join(match[group].split())
        if phrase.lower() not in EXEMPTIONS.get(path.as_posix(), ()):
            number = text.count("\n", 0, match.start(group)) + 1
            where = "starts a sentence" if group in ("s0", "s1") else "is a house word"
            yield path, number, f'"{phrase}" {where}; write: {ADVICE[group]}'


def words(root: Path, files: list[Path]) -> Iterator[Finding]:
    """House words in Markdown, Python and C++."""
    for path in files:
        if path.suffix in PROSE and not any(path.is_relative_to(name) for name in EXCLUDED):
            yield from find_words(root, path)
