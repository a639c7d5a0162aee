"""A large JSON object read as a stream: its members one by one, one long list item by item."""

from __future__ import annotations

import errno
import gzip
import io
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from attnscope.common.child import SILENT_S, Child

CHUNK = 1 << 20
POLL_S = 0.002
# Maximum length of a JSON value in characters; no event of a profiler is longer.
LONGEST_VALUE = 1 << 24


# A name and what is around it in PyTorch's layouts. PyTorch escapes neither quotes nor line breaks,
# and up to 2.0 no backslashes: names of files on Windows, of code that is compiled from a text.
NAME = re.compile(
    r'("ph": "\w",\s*"cat": "\w*",\s*"name": ")(.{0,16384}?)'
    r'("\s*,\s*"pid": "?[^"\n]*"?,\s*"tid": "?[^"\n]*"?,\s*"ts": )',
    re.DOTALL,
)
MOST_LINES = 500  # of an event

GZIP = b"\x1f\x8b"  # the first bytes of a packed file
SPACE = re.compile(r"[ \n\r\t]+")
WORD = re.compile(r"[-\w]*\s*")  # what a literal that is cut off leaves
REMEDY = "Export the trace again"


def escape_names(text: str) -> str:
    """Whole events of a trace with their names escaped; PyTorch may write invalid JSON."""
    return NAME.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    before, name, after = found.groups()
    if name.isprintable() and '"' not in name and "\\" not in name or '"ph": "' in name:
        return found[0]
    try:
        name = decode(f'"{name}"')
    except ValueError:  # backslashes become slashes, as in later versions
        name = name.replace('\\"', '"').replace("\\", "/")
    return f"{before}{json.dumps(name, ensure_ascii=False)[1:-1]}{after}"


@contextmanager
def open_trace(path: str | os.PathLike[str], writer: Child | None = None) -> Iterator[IO[str]]:
    """Open the text of a chrome trace, packed or not, or of one that `writer` still writes."""
    # Replace invalid bytes: PyTorch may garble a name, but the rest is readable.
    how: dict[str, Any] = {"encoding": "utf-8-sig", "errors": "replace"}
    if writer is not None:
        with Growing(Path(path), writer) as raw:
            yield io.TextIOWrapper(io.BufferedReader(raw, CHUNK), **how)
        return
    with open(path, "rb") as start:  # names mislead: browsers unpack, and forget the suffix
        packed = start.read(len(GZIP)) == GZIP
    opener: Callable[..., IO[str]] = gzip.open if packed else open
    with opener(path, "rt", **how) as file:
        yield file


class Growing(io.RawIOBase):
    """A file, from its first byte on, that a child writes: it ends where the child has ended.

    PyTorch writes it as `<path>.tmp` and renames that last, or under its own name.
    """

    def __init__(self, path: Path, writer: Child) -> None:
        self.writer = writer
        while True:
            ended = writer.ended(POLL_S)
            for name in (f"{path}.tmp", path):
                with suppress(FileNotFoundError):
                    self.file = open(name, "rb", buffering=0)  # noqa: SIM115
                    return
            if ended:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.file.fileno()

    def readinto(self, buffer: Any) -> int:
        since = time.monotonic()
        while True:
            ended = self.writer.ended()
            if (count := self.file.readinto(buffer)) or ended:
                return count or 0
            if time.monotonic() - since > SILENT_S:
                self.writer.kill()
            self.writer.ended(POLL_S)

    def close(self) -> None:
        self.file.close()
        super().close()


def read_lines(file: IO[str], size: int) -> str:
    """At least `size` characters, up to the end of a line, and of an event in PyTorch's layout; ""
    at the end of the file."""
    parts = [file.read(size)]
    if parts[0] and not parts[0].endswith("\n"):
        parts.append(file.readline(LONGEST_VALUE))
    while parts[-1] and not parts[-1].endswith("},\n") and len(parts) < MOST_LINES:
        parts.append(file.readline(LONGEST_VALUE))
    return "".join(parts)


class Number(str):
    """A decimal number as written in the file; the type distinguishes it from a string."""


_DECODER = json.JSONDecoder(parse_float=Number, parse_constant=lambda token: None, strict=False)


def decode(text: str) -> Any:
    """A JSON value; numbers as in `members`. Raises ValueError for text that is not JSON."""
    return _DECODER.decode(text)


def plain(value: Any) -> Any:
    """A JSON value with its decimal numbers as floats, None for a number out of float's range."""
    if isinstance(value, Number):
        return number if math.isfinite(number := float(value)) else None
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


class JsonText:
    """JSON of a file that is read in chunks.

    Decimal numbers become `Number`; NaN and Infinity, which are not JSON, become None. `repaired`
    is True once quotes in a name had to be escaped.
    """

    def __init__(
        self, file: IO[str], path: Path, read: Callable[[], object] = lambda: None
    ) -> None:
        """`read` is called each time that a part of the file has been read."""
        self.file, self.path, self.read = file, path, read
        self.text, self.at, self.before = "", 0, 0
        self.escaped = 0  # the text up to here has its names escaped
        self.repaired = False

    def members(
        self,
        key: str,
        known: re.Pattern[str] | None = None,
        take: Callable[[re.Match[str]], bool] = lambda match: True,
    ) -> Iterator[tuple[str, Any]]:
        """Keys and values of the object in the file; the value of `key` is a list.

        That list is an iterator, to be exhausted before the next member. An item of it that the
        pattern `known` matches is left out and not decoded, unless `take` returns False for its
        match.
        Raises ValueError, with the path and the position, for text that is truncated, is not JSON,
        or is not an object with a list under `key`.
        """
        self.expect("{", f"an object with {key}")
        found = False
        while not self.accept("}"):
            name = self.value()
            if not isinstance(name, str):
                raise self.wrong(f"{name!r:.40} where a key is expected")
            self.expect(":", "after a key")
            if name == key:
                found = True
                self.expect("[", f"{key} is a list")
                yield key, self.items(known, take)
            else:
                yield name, self.value()
            if not self.accept(","):
                self.expect("}", "after a value")
                break
        if self.peek():
            raise self.wrong("text after the end of the object")
        if not found:
            raise ValueError(
                f"{self.path} must have a list {key}, got an object without it. {REMEDY}"
            )

    def more(self) -> bool:
        """Drop parsed text, read at least as much as is left; False at the end of the file."""
        left = self.text[self.at :]
        added = read_lines(self.file, max(CHUNK, len(left)))
        self.read()
        self.before += self.at
        self.text, self.at, self.escaped = left + added, 0, max(0, self.escaped - self.at)
        return bool(added)

    def escape(self) -> bool:
        """Escape quotes in names of the text that is not parsed yet; False if nothing changed."""
        begin = max(self.at, self.escaped)
        # The part starts at a line of the file, or in one that no name begins in.
        text = self.text[:begin] + escape_names(self.text[begin:])
        changed, self.text, self.escaped = text != self.text, text, len(text)
        self.repaired |= changed
        return changed

    def items(
        self, known: re.Pattern[str] | None, take: Callable[[re.Match[str]], bool]
    ) -> Iterator[Any]:
        """The items of a list, up to its closing bracket, that `take` does not take."""
        if self.accept("]"):
            return
        while True:
            if known:
                text, at, comma = self.text, self.at, True
                while comma and (match := known.match(text, at)) and take(match):
                    at = match.end()
                    comma = text.startswith(",", at)
                    at += comma
                self.at = at
                if not comma:
                    if self.accept(","):
                        continue
                    break
            yield self.value()
            if not self.accept(","):
                break
        self.expect("]", "after an item")

    def wrong(self, what: str) -> ValueError:
        at = self.before + self.at
        return ValueError(f"{self.path} must be JSON, got {what}, at character {at}. {REMEDY}")

    def peek(self) -> str:
        """The next character that is not white space; "" at the end."""
        while True:
            if space := SPACE.match(self.text, self.at):
                self.at = space.end()
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
                value, end = _DECODER.raw_decode(self.text, self.at)
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
                if self.escape():
                    continue
                inside = error.msg.startswith(("Unterminated string", "Invalid \\u"))
                cut = inside or WORD.fullmatch(self.text, error.pos)
                if not cut or len(self.text) - self.at > LONGEST_VALUE:
                    self.at = error.pos
                    raise self.wrong(f"no value ({error.msg})") from None
                if not self.more():
                    raise self.cut() from None
            except RecursionError:
                raise self.wrong("values nested too deeply") from None
