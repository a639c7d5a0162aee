"""Results in the repository, of this and of older versions, are read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnscope.bench.consistency import contradictions
from attnscope.bench.tables import results_table
from attnscope.common.results import read_results
from attnscope.studies.llama.records import read_attempts as read_llama
from attnscope.studies.lm.records import read_models
from attnscope.studies.ops.records import read_attempts as read_ops

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks/results").rglob("*.json"))
REPORTS = {
    "lm": read_models, "lm-nsys": read_models, "pair": read_models, "transformers": read_llama,
    "attribution": read_ops,
}  # fmt: skip


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_of_the_benchmark_are_read(path: Path) -> None:
    assert not any(contradictions(row) for row in read_results(path)["rows"])
    assert "over the fastest peer of each workload" in results_table(path, ROOT)


@pytest.mark.parametrize("name", REPORTS)
def test_records_of_the_reports_are_read(name: str) -> None:
    read: Callable[..., list[Any]] = REPORTS[name]
    rows = json.loads((ROOT / f"docs/reports/h200/{name}.json").read_text())["rows"]
    assert {one.status for one in read(rows)} <= {"ok", "skipped", "failed"}
