# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Intervals for means of paired scores, by resampling the examples."""

import numpy as np
from numpy.typing import ArrayLike

RESAMPLES = 2000


def interval(scores: ArrayLike, level: float = 0.95, seed: int = 0, *, of_median: bool = False) -> tuple[float, float]:
    """Percentile bootstrap interval of a mean, or of a median (Efron 1979).

    For a paired comparison give the differences: each example is then resampled with both of its scores.
    """
    values = np.asarray(scores, dtype=float)
    draws = np.random.default_rng(seed).integers(0, len(values), size=(RESAMPLES, len(values)))
    centres = (np.median if of_median else np.mean)(values[draws], axis=1)
    low, high = np.quantile(centres, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def share_interval(parts: ArrayLike, wholes: ArrayLike, level: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Percentile bootstrap interval of the sum of some figures over that of others, paired by example."""
    pairs = np.stack([np.asarray(parts, dtype=float), np.asarray(wholes, dtype=float)], axis=1)
    draws = np.random.default_rng(seed).integers(0, len(pairs), size=(RESAMPLES, len(pairs)))
    sums = pairs[draws].sum(axis=1)
    low, high = np.quantile(sums[:, 0] / sums[:, 1], [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
