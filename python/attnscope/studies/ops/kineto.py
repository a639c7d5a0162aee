"""PyTorch's own table, `key_averages()`, beside the attribution, with each difference explained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas

from attnscope.profile.api import Profile
from attnscope.profile.attribution.owners import Attribution
from attnscope.profile.errors import LostEvents
from attnscope.profile.record.recorder import Options, Recorder
from attnscope.profile.trace.markers import SENTINEL, STEP, WAIT

SLACK_US = 0.01  # kineto's microseconds have three decimals
ANNOTATION = "annotation row: from the first to the last kernel of the range, gaps included"
KERNEL_ROW = "double row: a kernel, counted once more under its op"
COPY_ROW = "double row: a copy or fill, counted once more under its op"
UNOWNED_ROW = "device row: no op owns it"
OVERHEAD = "overhead of the driver or the profiler, counted as device time; no kernel"
RANGE = "a range: see the stage table"
CALL = "a CUDA call: no op"
FRAME = "a Python frame: no op; see the tables of modules and lines"


@dataclass(frozen=True)
class Averages:
    """Rows of `key_averages()`, or why there are none.

    Keys of a row: key, count, dev ("DeviceType.CPU" ...), self_dev, dev_total, cpu (microseconds),
    ua (is it a user annotation).
    """

    rows: Sequence[Mapping[str, Any]] | None = None
    reason: str | None = None

    @classmethod
    def of(cls, torch_profiler: Any) -> Averages:
        """The rows of a stopped torch profiler."""
        try:
            table = torch_profiler.key_averages()
        except UnicodeDecodeError as error:  # PyTorch kept the name of a frame that is gone
            return cls(reason=f"key_averages() failed in PyTorch: {error}")
        return cls(
            [
                {
                    "key": row.key,
                    "count": row.count,
                    "dev": str(row.device_type),
                    "self_dev": row.self_device_time_total,
                    "dev_total": row.device_time_total,
                    "cpu": row.cpu_time_total,
                    "ua": row.is_user_annotation,
                }
                for row in table
            ]
        )


def record_with_averages(name: str, region: Callable[[], Any]) -> tuple[Profile, Averages]:
    """Run a region under the profiler: its profile, and PyTorch's own table of the same run.

    Raises LostEvents where the profile is incomplete, and what the region raises.
    """
    recorder = Recorder(name, Options(shapes=False), averages=True)
    recorder.start()
    try:
        region()
    except BaseException:
        recorder.cancel()
        raise
    profile = recorder.stop()
    if profile.incomplete:
        raise LostEvents(f"{name}: {profile.incomplete}")
    return profile, Averages.of(recorder.torch_profiler)


def comparison(attribution: Attribution, rows: Iterable[Mapping[str, Any]]) -> pandas.DataFrame:
    """Device time of kineto's rows and of ours, in microseconds, longest of kineto's first.

    Columns: name, row ("CPU", "CUDA"), kineto_us, ours_us (kernels of the op and of the ops in it;
    None where the row is no op), difference_us, explanation. `rows` are those of `Averages`; those
    without device time on either side are left out.
    """
    kernels, copies, again = _device_time(attribution)
    overhead = {one.name for one in attribution.trace.overhead}
    symbols = {work.name: work for work in attribution.trace.gpu}
    frames = {event.name for event in attribution.trace.cpu if event.kind == "python"}
    rows = list(rows)
    phantom = sum(row["self_dev"] for row in rows if row["key"] in overhead)
    found = []
    for row in rows:
        name, total = row["key"], row["dev_total"]
        on_cpu = row["dev"].endswith("CPU")
        is_op = on_cpu and not row["ua"] and name not in overhead
        ours = kernels.get(name) if is_op else None
        if not total and not ours or _is_own(name) and name not in symbols:
            continue
        if ours is not None:
            explanation = _explain(
                total, ours / 1e3, copies[name] / 1e3, again[name] / 1e3, phantom
            )
        elif row["ua"]:
            explanation = RANGE if on_cpu else ANNOTATION
        elif name in overhead:
            explanation = OVERHEAD
        elif name in symbols:
            work = symbols[name]
            explanation = KERNEL_ROW if work.kind == "kernel" else COPY_ROW
            explanation = explanation if attribution.op(work) else UNOWNED_ROW
        else:
            explanation = FRAME if name in frames else CALL
        found.append(
            {
                "name": name,
                "row": row["dev"].removeprefix("DeviceType."),
                "kineto_us": total,
                "ours_us": None if ours is None else ours / 1e3,
                "difference_us": None if ours is None else round(total - ours / 1e3, 3),
                "explanation": explanation,
            }
        )
    columns: Sequence[str] = "name row kineto_us ours_us difference_us explanation".split()
    table = pandas.DataFrame(found, columns=columns)
    return table.sort_values("kineto_us", ascending=False, kind="stable", ignore_index=True)


def _is_own(name: str) -> bool:
    """Whether a row belongs to the profiler's sentinels, which are not in the trace."""
    return name in (SENTINEL, WAIT) or name.startswith(STEP) or "spin_kernel" in name


def _explain(kineto: float, kernels: float, copies: float, again: float, phantom: float) -> str:
    """Why a row of an op differs; all in microseconds. `again` is work that kineto counts twice,
    `phantom` the device time of kineto's overhead rows."""
    rest = kineto - kernels
    if abs(rest) <= SLACK_US:
        return "same"
    if copies and abs(rest - copies) <= SLACK_US:
        return "copies and fills; ours are in the table of copies"
    if again and abs(rest - copies - again) <= SLACK_US:
        return "an op inside one of its own name: its work is counted for both"
    rest -= copies
    also = " and copies" if copies else ""
    if 0 < rest <= phantom + SLACK_US:
        return f"{rest:.2f} us of overhead{also} counted as device time (module loading, buffers)"
    return "kineto has less: kernels that it did not link" if rest < 0 else "not explained"


def _device_time(
    attribution: Attribution,
) -> tuple[dict[str, int], Counter[str], Counter[str]]:
    """Nanoseconds by op name, nested ops included: kernels; copies and fills; and what kineto
    counts twice because the op is nested in an op of the same name."""
    trace = attribution.trace
    outer = trace.outer_ops
    kernels: dict[str, int] = {e.name: 0 for e in trace.cpu if e.kind == "op"}
    copies: Counter[str] = Counter()
    again: Counter[str] = Counter()
    for work in trace.gpu:
        op = attribution.op(work)
        at = op.index if op else -1
        seen: set[str] = set()
        while at >= 0:
            name = trace.cpu[at].name
            if name in seen:
                again[name] += work.duration
            elif work.kind == "kernel":
                kernels[name] += work.duration
            else:
                copies[name] += work.duration
            seen.add(name)
            at = outer[at]
    return kernels, copies, again
