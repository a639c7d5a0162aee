"""A large JSON object read as a stream: its members one by one, one long list item by item."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

CHUNK = 1 << 20
# Maximum length of a JSON value in characters; no event of a profiler is longer.
LONGEST_VALUE = 1 << 24


# A name with quotes, which PyTorch does not escape. The name is alone on its line (a line with more
# members does not match), or precedes the process id (up to PyTorch 2.11).
NAME = re.compile(
    r'^([ \t]*"name": ")(?!.*",[ \t]*"[^"\n]*":)([^"\n]*"[^\n]*)("[ \t]*(?:,[ \t]*)?)$'
    r'|^([ \t]*"ph": "\w", "cat": "\w*", "name": ")(?!.*",[ \t]*"(?!pid"|tid")[^"\n]*":)'
    r'([^"\n]*"[^\n]*)(", "pid": "?[^"\n]*"?, "tid": "?[^"\n]*"?,)$',
    re.MULTILINE,
)


REMEDY = "Export the trace again"


class Text(Protocol):
    def read(self, size: int, /) -> str: ...


class NameEscaper:
    """The text of a trace with quotes in names escaped; PyTorch's own text may be invalid JSON."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def read(self, size: int, /) -> str:
        """At least `size` characters, up to the end of a line; "" at the end of the file."""
        text = self._file.read(size)
        if text and not text.endswith("\n"):
            text += self._file.readline(LONGEST_VALUE)
        return NAME.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    before, name, after = (part for part in found.groups() if part is not None)
    name = name.replace('\\"', '"').replace('"', '\\"')
    return f"{before}{name}{after}"


@contextmanager
def open_trace(path: str | os.PathLike[str]) -> Iterator[Text]:
    """Open the text of a chrome trace, `.json` or `.json.gz`."""
    opener: Callable[..., IO[str]] = gzip.open if str(path).endswith(".gz") else open
    # Replace invalid bytes: PyTorch may garble a name, but the rest is readable.
    with opener(path, "rt", encoding="utf-8", errors="replace") as file:
        yield NameEscaper(file)


class Number(str):
    """A decimal number as written in the file; the type distinguishes it from a string."""


def plain(value: Any) -> Any:
    """A JSON value with its decimal numbers as floats, None for a number out of float's range."""
    if isinstance(value, Number):
        return number if math.isfinite(number := float(value)) else None
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def members(file: Text, path: Path, key: str) -> Iterator[tuple[str, Any]]:
    """Keys and values of the object in a file; the list under `key` is yielded item by item.

    Decimal numbers become `Number`; NaN and Infinity, which are not JSON, become None. Raises
    ValueError, with `path` and the position, for text that is truncated, is not JSON, or is not an
    object with a list under `key`.
    """
    text = _Text(file, path)
    text.expect("{", f"an object with {key}")
    found = False
    while not text.accept("}"):
        name = text.value()
        if not isinstance(name, str):
            raise text.wrong(f"{name!r:.40} where a key is expected")
        text.expect(":", "after a key")
        if name == key:
            found = True
            text.expect("[", f"{key} is a list")
            if not text.accept("]"):
                yield key, text.value()
                while text.accept(","):
                    yield key, text.value()
                text.expect("]", "after an item")
        else:
            yield name, text.value()
        if not text.accept(","):
            text.expect("}", "after a value")
            break
    if text.peek():
        raise text.wrong("text after the end of the object")
    if not found:
        raise ValueError(f"{path} must have a list {key}, got an object without it. {REMEDY}")


class _Text:
    """JSON tokens of a file that is read in chunks."""

    def __init__(self, file: Text, path: Path) -> None:
        self.file, self.path = file, path
        self.decoder = json.JSONDecoder(
            parse_float=Number, parse_constant=lambda token: None, strict=False
        )
        self.text, self.at, self.before = "", 0, 0

    def more(self) -> bool:
        """Drop parsed text, read at least as much as is left; False at the end of the file."""
        left = self.text[self.at :]
        added = self.file.read(max(CHUNK, len(left)))
        self.before += self.at
        self.text, self.at = left + added, 0
        return bool(added)

    def wrong(self, what: str) -> ValueError:
        at = self.before + self.at
        return ValueError(f"{self.path} must be JSON, got {what}, at character {at}. {REMEDY}")

    def peek(self) -> str:
        """The next character that is not white space; "" at the end."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in " \n\r\t":
                self.at += 1
            if self.at < len(self.text) or not self.more():
                return self.text[self.at : self.at + 1]

    def accept(self, token: str) -> bool:
        if self.peek() != token:
            return False
        self.at += 1
        return True

    def expect(self, token: str, why: str) -> None:
        if not self.accept(token):
            if not self.peek():
                raise self.cut()
            raise self.wrong(f"{self.peek()!r} where {token!r} is expected ({why})")

    def cut(self) -> ValueError:
        end = self.before + len(self.text)
        if not end:
            return ValueError(f"{self.path} must be a trace, got an empty file. {REMEDY}")
        return ValueError(
            f"{self.path} must be whole, got a file that is cut off at character {end}. {REMEDY}"
        )

    def value(self) -> Any:
        self.peek()
        while True:
            try:
                value, end = self.decoder.raw_decode(self.text, self.at)
                rest = self.text[end : end + 3]
                if rest.lstrip(".eE+-"):
                    self.at = end
                    return value
                # A number at the end of a chunk may continue in the next chunk.
                if not self.more():
                    if rest:
                        raise self.cut()
                    self.at = len(self.text)
                    return value
            except json.JSONDecodeError as error:
                if len(self.text) - self.at > LONGEST_VALUE:
                    raise self.wrong(f"no value ({error.msg})") from None
                if not self.more():
                    raise self.cut() from None
