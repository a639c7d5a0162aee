"""Settings of a session: a YAML file that a user can write, overridden by the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

T = TypeVar("T")
_NAMES = {str: "a text", int: "an integer", float: "a number", bool: "true or false"}


def read_settings(kind: type[T], config: Path | None, given: Mapping[str, Any]) -> T:
    """Settings of a dataclass: its defaults, then the keys of `config`, then `given` without None.

    A folder of an earlier session has a `session.yaml` that can be passed again. Raises ValueError
    for an unreadable file, an unknown key, and a value of another type.
    """
    found = {} if config is None else _read(kind, config)
    return kind(**found | {key: value for key, value in given.items() if value is not None})


def _read(kind: type[T], path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ValueError(f"config must be readable, got {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        place = " ".join(str(error).split())
        raise ValueError(f"config must be YAML, got {path}: {place}") from None
    if not isinstance(content, dict):
        raise ValueError(f"config must be a mapping of settings, got {type(content).__name__}")
    hints = get_type_hints(kind)
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for key, value in content.items():
        if key not in known:
            raise ValueError(f"config: keys must be of {', '.join(known)}; got {key!r}")
        if not _fits(hints[key], value):
            raise ValueError(f"config: {key} must be {_name(hints[key])}, got {value!r:.60}")
    return content


def _fits(kind: Any, value: Any) -> bool:
    origin, of = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(one, value) for one in of)
    if origin is list:
        return isinstance(value, list) and all(_fits(of[0], item) for item in value)
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind


def _name(kind: Any) -> str:
    origin, of = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(_name(one) for one in of if one is not type(None))
    if origin is list:
        return f"a list, each item {_name(of[0])}"
    return _NAMES[kind]
