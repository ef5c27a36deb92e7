"""Intervals of the figures of a record: of a share, of a median, of a mean."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t for 95 %, two-sided, by degrees of freedom from 1."""


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """The interval of a share in which 95 % of such intervals hold it."""
    z, share = 1.96, successes / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def of_median(values: Sequence[float]) -> tuple[float, float] | None:
    """The narrowest pair of order statistics, equally far from both ends, that holds the median of the law in at least
    95 % of the cases, whatever the law; None for fewer than six values, of which no pair does.

    Source: the sign test; the number of values below the median is binomial with one half.
    """
    n, ordered = len(values), sorted(values)
    below, tail = -1, 0.0
    while tail + math.comb(n, below + 1) / 2**n <= 0.025:
        below += 1
        tail += math.comb(n, below) / 2**n
    return None if below < 0 else (ordered[below], ordered[n - 1 - below])


def half_width(values: ArrayLike) -> float:
    """Half of the 95 % interval of the mean of independent values, at least two (Student's t)."""
    found = np.asarray(values, dtype=float)
    n = found.size
    if n < 2:
        raise ValueError(f"an interval of a mean needs at least 2 values, found {n}")
    t = _T95[n - 2] if n - 2 < len(_T95) else 1.96
    return float(t * found.std(ddof=1) / math.sqrt(n))
