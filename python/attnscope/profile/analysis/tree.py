"""Kernel time as a tree: ranges contain ops, ops contain kernels; one node per path."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attnscope.profile.analysis.kernel_names import category, short_name
from attnscope.profile.analysis.tables import owner_name
from attnscope.profile.attribution.backward import ENGINE
from attnscope.profile.attribution.owners import Attribution
from attnscope.profile.errors import ProfileError
from attnscope.profile.trace.events import GpuEvent

SMALLEST = 1 / 3000  # share of all kernel time; smaller nodes of one parent are merged


@dataclass
class Node:
    """A place in the tree. kind: "all", "stage", "op", "kernel" or "rest" (several small nodes)."""

    name: str
    kind: str
    ns: int = 0
    kernels: int = 0
    category: str | None = None  # of kernels
    children: dict[tuple[str, str], Node] = field(default_factory=dict)

    def child(self, kind: str, name: str) -> Node:
        return self.children.setdefault((kind, name), Node(name, kind))

    def add(self, ns: int, kernels: int) -> None:
        self.ns += ns
        self.kernels += kernels

    def prune(self, least_ns: float) -> None:
        """Merge children below `least_ns` into one node; no time is lost."""
        small = [key for key, node in self.children.items() if node.ns < least_ns]
        if len(small) > 1:
            gone = [self.children.pop(key) for key in small]
            rest = self.child("rest", f"({len(gone)} smaller)")
            rest.ns, rest.kernels = sum(n.ns for n in gone), sum(n.kernels for n in gone)
        for node in self.children.values():
            node.prune(least_ns)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: name, kind, us, kernels, category, children (longest first)."""
        found: dict[str, Any] = {"name": self.name, "kind": self.kind, "us": self.ns / 1e3}
        found["kernels"] = self.kernels
        if self.category:
            found["category"] = self.category
        if self.children:
            order = sorted(self.children.values(), key=lambda node: -node.ns)
            found["children"] = [node.as_dict() for node in order]
        return found


def icicle(attribution: Attribution) -> Node:
    """The tree of all kernels, without copies and fills.

    Raises ProfileError if the children of a node take longer than the node.
    """
    root = Node("all kernels", "all")
    paths: dict[tuple[Any, ...], list[int]] = {}  # nanoseconds and number of kernels
    for kernel in attribution.trace.kernels:
        sums = paths.setdefault((*_path(attribution, kernel), kernel.name), [0, 0])
        sums[0] += kernel.end - kernel.start
        sums[1] += 1
    for (*path, symbol), (ns, kernels) in paths.items():
        node = root
        node.add(ns, kernels)
        for kind, name in (*path, ("kernel", short_name(symbol))):
            node = node.child(kind, name)
            node.add(ns, kernels)
        node.category = category(symbol)
    _check(root)
    root.prune(root.ns * SMALLEST)
    _check(root)
    return root


def _path(attribution: Attribution, kernel: GpuEvent) -> list[tuple[str, str]]:
    """The ranges and ops around a kernel, outermost first."""
    stages = [("stage", event.name) for event in attribution.ranges(kernel)]
    op = attribution.op(kernel)
    around = [op, *attribution.trace.ancestors(op)] if op else []
    names = [event.name for event in reversed(around) if event.kind == "op"]
    # The engine's own event adds nothing to the op that it runs.
    names = [n.removeprefix(ENGINE) for n in names if not n.startswith(ENGINE) or n == names[-1]]
    ops = [("op", name) for name in names or [owner_name(attribution, kernel)]]
    return stages + ops


def _check(node: Node) -> None:
    inside = sum(child.ns for child in node.children.values())
    if node.children and inside != node.ns:
        raise ProfileError(
            f"{node.name} must have at least the {inside} ns of its parts, got {node.ns} ns"
        )
    for child in node.children.values():
        _check(child)
