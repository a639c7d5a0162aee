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
# What does not decode within this is not JSON; no event of a profiler is longer.
LONGEST_VALUE = 1 << 24


# A name with quotes in it: PyTorch writes them as they are. It stands on a line of its own (a line
# with more members than the name is not one), or before the process, as up to PyTorch 2.11.
NAME = re.compile(
    r'^([ \t]*"name": ")(?!.*",[ \t]*"[^"\n]*":)([^"\n]*"[^\n]*)("[ \t]*(?:,[ \t]*)?)$'
    r'|^([ \t]*"ph": "\w", "cat": "\w*", "name": ")(?!.*",[ \t]*"(?!pid"|tid")[^"\n]*":)'
    r'([^"\n]*"[^\n]*)(", "pid": "?[^"\n]*"?, "tid": "?[^"\n]*"?,)$',
    re.MULTILINE,
)


class Text(Protocol):
    def read(self, size: int, /) -> str: ...


class Mended:
    """The text of a trace with quotes in names escaped, which else is not JSON."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def read(self, size: int, /) -> str:
        """About so many characters, to the end of a line; "" at the end of the file."""
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
    """The text of a chrome trace, `.json` or `.json.gz`, from its beginning."""
    opener: Callable[..., IO[str]] = gzip.open if str(path).endswith(".gz") else open
    # A name that PyTorch garbled is no reason to lose the rest.
    with opener(path, "rt", encoding="utf-8", errors="replace") as file:
        yield Mended(file)


class Number(str):
    """A decimal number as it stands in the file, told from text by its type."""


def plain(value: Any) -> Any:
    """A JSON value with its decimal numbers as floats, None for one that no float holds."""
    if isinstance(value, Number):
        return number if math.isfinite(number := float(value)) else None
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def members(file: Text, path: Path, key: str) -> Iterator[tuple[str, Any]]:
    """Keys and values of the object in a file; of the list under `key`, item by item.

    Decimal numbers come as `Number`; NaN and Infinity, which are not JSON, as None. Raises
    ValueError, naming `path` and the place, for text that is cut off, is not JSON, or is no object
    with a list under `key`.
    """
    text = _Text(file, path)
    text.expect("{", f"an object with {key}")
    found = False
    while not text.accept("}"):
        name = text.value()
        if not isinstance(name, str):
            raise text.wrong(f"a key is expected, not {name!r:.40}")
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
        raise text.wrong("it goes on after the end of the object")
    if not found:
        raise ValueError(f"{path}: it has no {key}")


class _Text:
    """JSON tokens of a file that is held a chunk at a time."""

    def __init__(self, file: Text, path: Path) -> None:
        self.file, self.path = file, path
        self.decoder = json.JSONDecoder(
            parse_float=Number, parse_constant=lambda token: None, strict=False
        )
        self.text, self.at, self.before = "", 0, 0

    def more(self) -> bool:
        """Drop what is done, read at least as much again as is left."""
        left = self.text[self.at :]
        added = self.file.read(max(CHUNK, len(left)))
        self.before += self.at
        self.text, self.at = left + added, 0
        return bool(added)

    def wrong(self, what: str) -> ValueError:
        return ValueError(f"{self.path}: not JSON at character {self.before + self.at}: {what}")

    def peek(self) -> str:
        """The next character that is no white space; "" at the end."""
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
            raise self.wrong(f"{token!r} is expected, {why}; found {self.peek()!r}")

    def cut(self) -> ValueError:
        end = self.before + len(self.text)
        if not end:
            return ValueError(f"{self.path}: it is empty")
        return ValueError(f"{self.path}: cut off at character {end}: it was not written to its end")

    def value(self) -> Any:
        self.peek()
        while True:
            try:
                value, end = self.decoder.raw_decode(self.text, self.at)
                rest = self.text[end : end + 3]
                if rest.lstrip(".eE+-"):
                    self.at = end
                    return value
                # A number at the end of the chunk may go on in the next one.
                if not self.more():
                    if rest:
                        raise self.cut()
                    self.at = len(self.text)
                    return value
            except json.JSONDecodeError as error:
                if len(self.text) - self.at > LONGEST_VALUE:
                    raise self.wrong(error.msg) from None
                if not self.more():
                    raise self.cut() from None
