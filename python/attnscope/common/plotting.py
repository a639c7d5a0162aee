"""The look of every figure, and how one is written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RC: Any = {
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "savefig.dpi": 200,
    "svg.hashsalt": "attnscope",
}
INK = "#555555"


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write a figure as `<stem>.png` and `<stem>.svg`; the same bytes for the same numbers."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    targets = [stem.with_name(stem.name + suffix) for suffix in (".png", ".svg")]
    with matplotlib.rc_context(RC):  # not by savefig, which draws a figure twice
        figure.dpi = RC["savefig.dpi"]
        FigureCanvasAgg(figure).print_png(targets[0])
        FigureCanvasSVG(figure).print_svg(targets[1], metadata={"Date": None})
    return targets
