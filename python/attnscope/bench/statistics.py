"""Means of ratios, and confidence intervals of medians."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

LEAST_SAMPLES = 5  # fewer give no interval
RESAMPLES = 2000
CONFIDENCE = 0.95


def bootstrap_ratio(
    a_ms: Sequence[float], b_ms: Sequence[float], seed: int = 0
) -> tuple[float, float]:
    """95 % interval of median(a_ms) / median(b_ms), by resampling both sides; seeded."""
    a, b = (
        np.sort(np.asarray(side, float))[_median_ranks(len(side), seed, which)].mean(axis=1)
        for which, side in enumerate((a_ms, b_ms))
    )
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(a / b, [tail, 1 - tail])
    return float(low), float(high)


@lru_cache(maxsize=128)
def _median_ranks(size: int, seed: int, side: int) -> np.ndarray:
    """Ranks of the two middle samples, for RESAMPLES resamples of `size` sorted samples."""
    drawn = np.random.default_rng((seed, side)).integers(size, size=(RESAMPLES, size))
    return np.sort(drawn, axis=1)[:, [(size - 1) // 2, size // 2]]


def geometric_mean(values: Iterable[float]) -> float:
    """Geometric mean of positive values; NaN of none."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan
