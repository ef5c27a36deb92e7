"""Figures of one run of the drift benchmark: shares within the bound, by windows, and throughput."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

AHEAD = 96
"""Waiting requests, enough to fill every batch of a plan."""


@dataclass(frozen=True, slots=True)
class Served:
    """One request; seconds on any one clock."""

    start: float
    end: float


def figures_of(served: Sequence[Served], bound: float, dwell: float) -> dict[str, Any]:
    """Shares and requests a second; windows of one dwell time by the start of their requests."""
    starts, ends = (np.array([getattr(one, name) for one in served]) for name in ("start", "end"))
    ends, starts = ends - starts.min(), starts - starts.min()
    within = ends - starts <= bound
    steady = np.sort(ends)[:-AHEAD]  # Without the last requests, whose batches are not full.
    windows = [within[(starts >= t) & (starts < t + dwell)] for t in np.arange(0, starts.max(), dwell)]
    return {
        "in_bound": float(within.mean()),
        "windows": [round(float(window.mean()), 4) for window in windows if len(window)],
        "last_in_bound": float(within[starts >= starts.max() / 3].mean()),
        "throughput": float(len(steady) / steady[-1]),
        "seconds": float(ends.max()),
    }
