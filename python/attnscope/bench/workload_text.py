"""A workload from its short name, such as b2-s8192-h16-d128-causal."""

from __future__ import annotations

import re
from typing import Any

from attnscope.bench.workloads import DTYPE_SHORT, MODES, Workload

# Letters of a number -> the field of Workload.of; as in Workload.id, and s for both lengths.
_NUMBERS = {
    "b": "batch", "s": "seqlen", "q": "seqlen_q", "k": "seqlen_k", "h": "heads_q",
    "kv": "heads_kv", "d": "head_dim", "dv": "head_dim_v",
}  # fmt: skip
_PART = re.compile(r"([a-z]+)(\d+)")
_WINDOW = re.compile(r"w(\d+|-1),(\d+|-1)")
_CAP = re.compile(r"cap(\d+(?:\.\d+)?)")
FORM = "b2-s8192-h16-kv4-d128-causal-bf16, of which b, kv, causal and the dtype may be left out"


def parse_workload(text: str, mode: str = "forward") -> Workload:
    """The workload of a short name or of an id of `Workload.id`; a mode in the text comes first.

    Raises ValueError for a part that is no field, for a field given twice, and for sizes that no
    call has. Packed batches have no short name.
    """
    options: dict[str, Any] = {"mode": mode}
    given: set[str] = set()
    dtypes = {short: name for name, short in DTYPE_SHORT.items()}
    # A window may contain a minus: "w-1,0".
    for part in re.split(r"-(?!1\b(?:,|-|$))", text.strip()):
        name, value = _field(part, dtypes)
        if name is None or name in given:
            what = "each part once" if name in given else "known parts only"
            raise ValueError(f"workload must have {what}, got {part!r} in {text!r}. Write {FORM}")
        given.add(name)
        options[name] = value
    try:
        return Workload.of(**options)
    except (ValueError, KeyError) as error:
        raise ValueError(f"workload must be a call, got {text!r}: {error}. Write {FORM}") from None


def _field(part: str, dtypes: dict[str, str]) -> tuple[str | None, Any]:
    if part in ("causal", "deterministic"):
        return part, True
    if part in MODES:
        return "mode", part
    if part in dtypes:
        return "dtype", dtypes[part]
    if match := _WINDOW.fullmatch(part):
        return "window", (int(match[1]), int(match[2]))
    if match := _CAP.fullmatch(part):
        return "softcap", float(match[1])
    match = _PART.fullmatch(part)
    return (None, None) if match is None else (_NUMBERS.get(match[1]), int(match[2]))
