"""The kernels that have marks."""

from attnscope.timeline import backward
from attnscope.timeline.forward import FORWARD
from attnscope.timeline.layout import Facts, Layout


def layout_of(facts: Facts) -> Layout:
    """The layout of a recording with these facts."""
    if facts["workload"]["mode"] == "forward":
        return FORWARD
    return backward.EARLY if backward.has_early_values(facts["tile"]) else backward.LATE
