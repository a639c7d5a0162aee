"""Prints what the programs of a run gave, under the profiler and under nsys, as one table."""

from typing import Any

ROW = "beside nsys"  # the property of a test that is a row of the table
COLUMNS = ("program", "kernels", "nsys", "GPU time, ms", "nsys, ms", "ratio", "owned")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [one for same in terminalreporter.stats.values() for one in same]
    calls = [report for report in reports if getattr(report, "when", None) == "call"]
    rows = sorted(row for call in calls for name, row in call.user_properties if name == ROW)
    if rows:
        terminalreporter.section("the profiler beside nsys")
        lines = [COLUMNS, ("---", *["--:"] * (len(COLUMNS) - 1)), *rows]
        for line in lines:
            terminalreporter.line(f"| {' | '.join(line)} |")
