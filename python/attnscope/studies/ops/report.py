"""The attribution report: the operator table against raw kernels and CUDA events, call by call.

Every number comes from a record of `ops.run`, or is computed from such numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attnscope.profile.render.document import Document, Section, number
from attnscope.studies.ops.reconcile import TOLERANCE
from attnscope.studies.ops.records import Attempt, Bar, Measured, Op, Tool, read_attempts
from attnscope.studies.ops.run import DENSE, MATMUL, PACKED, RAW_BAR
from attnscope.studies.outputs import origin
from attnscope.studies.records import Row


def missed(record: Attempt) -> list[str]:
    """The failures of a record, as sentences: none if it met every bar or was skipped."""
    if record.status == "failed":
        return [str(record.reason)]
    bars = record.bars if isinstance(record, Measured) else []
    return [_sentence(bar) for bar in bars if not bar.met]


def _sentence(bar: Bar) -> str:
    value, least, most = (
        "missing" if one is None else number(one) for one in (bar.value, bar.least, bar.most)
    )
    return f"{bar.bar} must be between {least} and {most}, got {value}"


def attribution_report(rows: Sequence[Row], env: Mapping[str, Any]) -> Document:
    """The report of the rows of a result file, from one device."""
    records = read_attempts(rows)
    good = [record for record in records if isinstance(record, Measured)]
    failed = sum(bool(missed(record)) for record in records)
    lead = [
        origin(env),
        f"{len(records)} rows: {len(good)} measured, {failed} of all miss a bar or failed.",
        f"Attention: [{DENSE.batch}, {DENSE.seqlen_q}, {DENSE.heads_q}, {DENSE.head_dim}] bf16, "
        f"causal; packed: sequences of {', '.join(str(q) for q, _ in PACKED.segments())}. Matmul: "
        f"[{MATMUL}, {MATMUL}] bf16. L2 is warm.",
        f"Bars: the row is within {RAW_BAR:.0%} of the kernels of the raw trace; within "
        f"{TOLERANCE:.0%} of CUDA events, beside what events see that is no GPU work; 100 % of the "
        "GPU time is owned by ops.",
    ]
    sections = [_summary(records)]
    if good:
        sections += [_beside_kineto(good), _tools(good)]
    return Document("The operator table, compared with the trace and the clock", lead, sections)


def _summary(records: Sequence[Attempt]) -> Section:
    rows = []
    for record in records:
        if not isinstance(record, Measured):
            rows.append(record.key | {"bars": record.status, "reason": record.reason})
            continue
        calls, bars = record.calls, {bar.bar: bar for bar in record.bars}
        tools = {tool.tool: tool for tool in record.tools}
        row_us = (record.row_us + record.copy_us) / calls
        events = bars["CUDA events"].value if "CUDA events" in bars else None
        off = bars["raw kernels"].value
        why = missed(record)
        rows.append(
            record.key
            | {
                "calls": calls,
                "kernels": record.raw_kernels,
                "row, us a call": record.row_us / calls,
                "raw kernels, us a call": record.raw_us / calls,
                "row off raw kernels, percent": None if off is None else round(100 * off, 6),
                "CUDA events us": _median(tools.get("CUDA events")),
                "events off row, us": events,
                "events off row, percent": None if events is None else 100 * events / row_us,
                "allowed, us": _allowed(bars.get("CUDA events")),
                "CUDA graph us": _median(tools.get("CUDA graph")),
                "owned by ops %": None if record.share is None else 100 * record.share,
                "bars": "missed" if why else "met",
                "reason": "; ".join(why) or _no_graph(tools.get("CUDA graph")),
            }
        )
    text = (
        "The row is GPU time of the op's row in the operator table, copies apart; of several ops "
        "together. Raw kernels are summed from the chrome trace without the "
        "attribution. Events and graph are medians of a call; events are compared with the row and "
        "its copies. A cold call is the first of its process and has no time to compare with."
    )
    return Section("Rows, raw kernels, CUDA events", text, rows)


def _median(tool: Tool | None) -> float | None:
    return None if tool is None else tool.median_us


def _allowed(bar: Bar | None) -> str | None:
    if bar is None or bar.least is None or bar.most is None:
        return None
    return f"{number(bar.least)} to {number(bar.most)}"


def _no_graph(graph: Tool | None) -> str | None:
    return graph.reason if graph is not None and graph.median_us is None else None


def _beside_kineto(records: Sequence[Measured]) -> Section:
    rows = [
        record.key
        | {
            "row": row.name,
            "calls": row.calls,
            "kernels": row.kernels,
            "GPU us": row.gpu_us,
            "copies us": row.copy_us or None,
            "key_averages() us": row.kineto_us,
            "more there, us": _more(row),
            "why": row.explanation,
        }
        for record in records
        for row in record.rows
    ]
    text = (
        "The same row in PyTorch's own table, of the same run. A first call shows the most: module "
        "loading and buffer requests of the driver are in the device time of the op there."
    )
    return Section("Beside key_averages()", text, rows)


def _more(row: Op) -> float | None:
    # The trace has three decimals.
    return None if row.kineto_us is None else round(row.kineto_us - row.gpu_us, 3)


def _tools(records: Sequence[Measured]) -> Section:
    rows = [
        record.key
        | {
            "tool": tool.tool,
            "median us": tool.median_us,
            "p20 us": tool.p20_us,
            "p80 us": tool.p80_us,
            "samples": tool.samples,
            "off profiler, us": tool.difference_us,
            "least us": tool.least_us,
            "most us": tool.most_us,
            "agrees": tool.agrees,
            "reason": tool.reason,
        }
        for record in records
        for tool in record.tools
    ]
    text = (
        "Times of one call. The reference is the sum of a call's kernels and copies in the "
        "profile; every other tool sees that and something more, which the reason names."
    )
    return Section("The same call by several tools", text, rows)
