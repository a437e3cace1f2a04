"""Paired statistics: the same cases measured both ways, and how sure their difference is."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

RESAMPLES = 10_000
CONFIDENCE = 0.95
NORMAL_QUANTILE = 1.959964  # of the two-sided 95 %

Interval = tuple[float, float]


def mean_interval(differences: Sequence[float], seed: int = 0) -> Interval | None:
    """95 % interval of the mean difference by the bootstrap (percentiles); None where all differences are the same.

    >>> mean_interval([0.5, 0.5, 0.5]) is None  # resampling would claim to be certain
    True
    """
    if len(set(differences)) < 2:
        return None
    values = np.asarray(differences, dtype=np.float64)
    chance = np.random.default_rng(seed)
    means = np.empty(RESAMPLES)
    rows = max(1, (1 << 22) // len(values))  # resamples held in memory at a time
    for start in range(0, RESAMPLES, rows):
        part = means[start : start + rows]
        part[:] = values[chance.integers(len(values), size=(len(part), len(values)))].mean(1)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def share_interval(lost: int, gained: int, cases: int) -> Interval | None:
    """95 % interval of the change of a share of successes, from the pairs that changed (Agresti and Min, 2005).

    Half a case is added to each of the four outcomes, so that cases none of which changed still leave some doubt.

    >>> low, high = share_interval(lost=0, gained=0, cases=30)
    >>> low == -high, high < 0.07
    (True, True)
    """
    if cases < 2:
        return None
    total, down, up = cases + 2.0, lost + 0.5, gained + 0.5
    middle = (up - down) / total
    spread = NORMAL_QUANTILE * math.sqrt(max(0.0, down + up - (up - down) ** 2 / total)) / total
    return max(-1.0, middle - spread), min(1.0, middle + spread)


def sign_test(lost: int, gained: int) -> float:
    """Chance of so uneven a split of the pairs that changed, if either way were as likely (two-sided, exact).

    >>> sign_test(5, 0)
    0.0625
    """
    changed = lost + gained
    tail = sum(math.comb(changed, k) for k in range(min(lost, gained) + 1))
    return min(1.0, 2 * tail / float(2**changed))
