"""Means of ratios, and confidence intervals of medians."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

LEAST_SAMPLES = 5  # fewer give no interval
RESAMPLES = 2000
CONFIDENCE = 0.95


def bootstrap_ratio(
    a_ms: Sequence[float], b_ms: Sequence[float], seed: int = 0
) -> tuple[float, float]:
    """95 % interval of median(a_ms) / median(b_ms), by resampling both sides; seeded."""
    rng = np.random.default_rng(seed)
    a, b = (
        np.median(rng.choice(np.asarray(side, float), (RESAMPLES, len(side))), axis=1)
        for side in (a_ms, b_ms)
    )
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(a / b, [tail, 1 - tail])
    return float(low), float(high)


def geometric_mean(values: Iterable[float]) -> float:
    """Geometric mean of positive values; NaN of none."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan
