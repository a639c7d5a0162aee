"""The build backend: setuptools, but builds with the installed torch if there is one.

If build-system.requires named torch, each isolated build would download it again.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403


def find_package(name: str) -> list[Path]:
    """Locate an installed package without importing it; pip's build isolation hides it."""
    spec = importlib.util.find_spec(name)
    if spec and spec.submodule_search_locations:
        return [Path(p) for p in spec.submodule_search_locations]
    probe = (
        f"import importlib.util as u, json; s = u.find_spec({name!r});"
        "print(json.dumps(list(s.submodule_search_locations) if s else []))"
    )
    result = subprocess.run([sys.executable, "-E", "-c", probe], capture_output=True, text=True)
    return [Path(p) for p in json.loads(result.stdout or "[]")]


def _torch_if_missing() -> list[str]:
    return [] if find_package("torch") else ["torch>=2.10"]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return build_meta.get_requires_for_build_wheel(config_settings) + _torch_if_missing()


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return build_meta.get_requires_for_build_editable(config_settings) + _torch_if_missing()
