"""NVTX names: Python and C++ define the same ones, and only known ranges can be pushed."""

import re
from pathlib import Path

import pytest

from attnscope import ranges

HEADER = Path(__file__).parents[2] / "csrc" / "binding" / "nvtx.h"


def test_both_sides_name_the_same_ranges():
    text = HEADER.read_text()
    names = re.search(r"kRangeNames\[\] = \{(.*?)\}", text, re.S)
    domain = re.search(r'kNvtxDomain = "(.*?)"', text)
    assert names and domain
    assert tuple(re.findall(r'"(.*?)"', names[1])) == ranges.OPS
    assert domain[1] == ranges.DOMAIN


def test_ranges_nest_and_survive_exceptions():
    with pytest.raises(KeyError), ranges.nvtx_range(ranges.CHECK):
        with ranges.nvtx_range(ranges.MEASURE):
            raise KeyError


def test_unknown_ranges_are_refused():
    with pytest.raises(
        ValueError, match="name must be one of attnscope::forward, .*, got 'decode step 7'"
    ):
        with ranges.nvtx_range("decode step 7"):
            pass
