"""From a kernel to the launch, the op, the module and the line of Python behind it, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnscope.profile.analysis.kernel_names import short_name
from attnscope.profile.attribution.owners import Attribution
from attnscope.profile.trace.events import CpuEvent, GpuEvent

if TYPE_CHECKING:
    import pandas

COLUMNS = (
    "kernel", "symbol", "kind", "gpu", "stream", "start_us", "gpu_us", "launch", "launch_us",
    "wait_us", "thread", "op", "ops", "forward_op", "range", "module", "line", "frames",
)  # fmt: skip
NO_FRAMES = (None, None, None)


def python_line(attribution: Attribution, event: CpuEvent | GpuEvent) -> str | None:
    """The innermost recorded frame outside PyTorch that led to an event, "file.py(12): function".

    The line number is where the function begins: PyTorch's profiler records no other. Backward work
    gets the frame of its forward op. None if stacks were not recorded.
    """
    frames = [frame for frame in attribution.stack(event) if ".py(" in frame]
    own = [frame for frame in frames if not _is_library(frame)]
    return (own or frames)[-1] if frames else None


def _is_library(frame: str) -> bool:
    path = frame.partition("(")[0]
    return path.startswith(("torch/", "<")) or "/site-packages/" in path or "/torch/" in path


def kernel_links(attribution: Attribution) -> pandas.DataFrame:
    """One row for each kernel, copy and fill, in order of start; unknown values are missing.

    Columns: kernel (short name), symbol, kind ("kernel", "memcpy" or "memset"), gpu, stream,
    start_us and gpu_us (its duration), launch (the CUDA call; "cudaGraphLaunch" for a replayed
    kernel), launch_us (start of that call), wait_us (from there to the start on the GPU), thread,
    op (innermost), ops ("outer > inner"), forward_op (of backward work), range ("outer/inner"),
    module, line (see `python_line`), frames (the whole stack, innermost last, one per line).
    """
    import pandas

    rows = [_row(attribution, work) for work in attribution.trace.gpu]
    return pandas.DataFrame(rows, columns=COLUMNS).astype({"launch_us": float, "wait_us": float})


def _row(attribution: Attribution, work: GpuEvent) -> tuple[object, ...]:
    trace = attribution.trace
    launch = trace.cpu[work.launch] if work.launch >= 0 else None
    op = attribution.op(work) or attribution.captured_op(work)
    forward = attribution.forward_op(op) if op else None
    ops = trace.ops_from(op) if op else []
    return (
        short_name(work.name),
        work.name,
        work.kind,
        work.device,
        work.stream,
        work.start / 1e3,
        work.duration / 1e3,
        launch.name if launch else None,
        launch.start / 1e3 if launch else None,
        (work.start - launch.start) / 1e3 if launch else None,
        launch.thread if launch else None,
        op.name if op else None,
        " > ".join(event.name for event in reversed(ops)) or None,
        forward.name if forward else None,
        "/".join(
            event.name for event in (*attribution.ranges(work), *attribution.captured_ranges(work))
        )
        or None,
        *(_python(attribution, work) if attribution.has_frames else NO_FRAMES),
    )


def _python(attribution: Attribution, work: GpuEvent) -> tuple[str | None, str | None, str | None]:
    """Module, line and frames."""
    return (
        ".".join(attribution.module(work)) or None,
        python_line(attribution, work),
        "\n".join(attribution.stack(work)) or None,
    )


def line_table(links: pandas.DataFrame) -> pandas.DataFrame:
    """GPU time by line of Python, longest first, from the rows of `kernel_links`.

    Columns: line, gpu_us, kernels (how many ran), names (of the kernels, longest first). Rows
    without a line are one row, "(no line recorded)". Copies and fills are left out.
    """
    import pandas

    kernels = links[links["kind"] == "kernel"]
    rows = []
    for line, group in kernels.groupby(kernels["line"].fillna("(no line recorded)"), sort=False):
        times = group.groupby("kernel")["gpu_us"].sum().sort_values(ascending=False, kind="stable")
        names = ", ".join(times.index)
        row = {"line": line, "gpu_us": group["gpu_us"].sum(), "kernels": len(group)}
        rows.append(row | {"names": names})
    table = pandas.DataFrame(rows, columns=["line", "gpu_us", "kernels", "names"])
    return table.sort_values("gpu_us", ascending=False, ignore_index=True)


def kernels_of_line(links: pandas.DataFrame, line: str) -> pandas.DataFrame:
    """The rows of `kernel_links` whose stack has a frame that contains `line`.

    `line` is text such as "model.py(12)" or "forward". Raises ValueError if no stack contains it.
    """
    found = links[links["frames"].fillna("").str.contains(line, regex=False)]
    if found.empty:
        lines = links["line"].dropna().unique()
        known = ", ".join(lines[:5]) if len(lines) else "none: stacks were not recorded"
        raise ValueError(
            f"line must be in a recorded stack, got {line!r}. Lines with kernels: {known}"
        )
    return found
