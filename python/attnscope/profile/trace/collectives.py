"""What PyTorch records about a collective, and the bytes that it moves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

# The first that is found in a name (of an op, a range or a kernel) is the collective.
_KINDS = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("all_reduce", r"all_?reduce"),
        ("all_gather", r"all_?gather"),
        ("reduce_scatter", r"reduce_?scatter"),
        ("all_to_all", r"all_?to_?all"),
        ("broadcast", r"broadcast"),
        ("barrier", r"barrier"),
        ("send/recv", r"send|recv"),
        ("reduce", r"reduce"),
        ("gather", r"gather"),
        ("scatter", r"scatter"),
    )
)
# By c10's names, and by the names of C++ types that are recorded with shapes.
_BYTES = {
    "Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2, "Char": 1,
    "Byte": 1, "Bool": 1, "double": 8, "long int": 8, "float": 4, "int": 4, "short int": 2,
    "signed char": 1, "unsigned char": 1, "bool": 1,
}  # fmt: skip


class Collective(NamedTuple):
    """One collective as one rank recorded it; None for what is unknown.

    Attributes:
        kind: "all_reduce", "all_gather" and so on, or the recorded name.
        group: the name of its process group.
        members: the global ranks of the group, as text; long lists are cut by PyTorch.
        size: number of ranks in the group.
        dtype: c10's name, such as "BFloat16".
        bytes: of the larger of its input and its output on one rank.
        sequence: number of the collective in its group.
    """

    kind: str
    group: str | None = None
    members: str | None = None
    size: int | None = None
    dtype: str | None = None
    bytes: int | None = None
    sequence: int | None = None


def collective_of(arguments: Mapping[str, Any]) -> Collective:
    """The collective in the arguments of `record_param_comms`, or of its kernel."""
    dtype = arguments.get("dtype")
    elements = [arguments[key] for key in ("In msg nelems", "Out msg nelems") if key in arguments]
    size = element_bytes(dtype)
    return Collective(
        kind_of(arguments["Collective name"]),
        arguments.get("Process Group Name"),
        str(arguments["Process Group Ranks"]) if "Process Group Ranks" in arguments else None,
        arguments.get("Group size"),
        dtype,
        max(elements) * size if elements and size else None,
        arguments.get("Seq"),
    )


def kind_of(name: str) -> str:
    """The kind of collective that a name names; the name itself if it names none."""
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), name)


def element_bytes(dtype: str | None) -> int | None:
    """Bytes of an element, by c10's name or the C++ type's; None if unknown."""
    name = str(dtype).removeprefix("c10::")
    return 1 if name.startswith("Float8") else _BYTES.get(name)


def bus_factor(kind: str, size: int | None) -> float | None:
    """Bytes over the busiest link for each byte of the collective, as nccl-tests counts them.

    None if the group's size is unknown, or if it moves no data.
    """
    if kind == "barrier" or not size:
        return None
    share = (size - 1) / size
    return {
        "all_reduce": 2 * share,
        "all_gather": share,
        "reduce_scatter": share,
        "all_to_all": share,
        "gather": share,
        "scatter": share,
    }.get(kind, 1.0)
