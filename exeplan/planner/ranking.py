"""Which of two divisions of a cluster has more throughput, by replays, at a stated confidence.

Both are replayed with the same seeds, and so the same requests (common random numbers); the differences, one a seed,
have a mean and an interval by Student's law. Seeds are added until the interval leaves out zero, or no more are allowed
(sequential stopping): then the two are within noise, and the one with the higher mean is taken.

Source: paired comparison of two systems, Law and Kelton, Simulation Modeling and Analysis, section 10.2.1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
MOST_SEEDS = 8
# Quantiles of Student's law that leave 2.5 % on either side, for 1, 2 ... degrees of freedom; importing scipy for them
# takes as long as a small search.
_STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365)


@dataclass(frozen=True, slots=True)
class Order:
    """The best division and the next best one, as replayed."""

    runner_up: str
    """Its schedules."""
    behind: float
    """How much less throughput it has, relative."""
    interval: float
    """Half the width of the interval of that; infinite for a single seed."""
    num_seeds: int

    @property
    def certain(self) -> bool:
        return self.behind > self.interval

    def __str__(self) -> str:
        found = f"{100 * self.behind:.2g} % less throughput by replay"
        if math.isinf(self.interval):
            return f"the runner-up, {self.runner_up}, has {found}"
        noise = f"+- {100 * self.interval:.1g} % at {100 * CONFIDENCE:.0f} % confidence, {self.num_seeds} seeds"
        if self.certain:
            return f"the runner-up, {self.runner_up}, has {found} ({noise})"
        return f"the runner-up, {self.runner_up}, is within noise: {found} ({noise})"


def behind(best: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """How much less `other` has than `best`, relative, and half the width of that figure's interval.

    The entries are the throughputs of both with the same seeds.
    """
    less = 1.0 - np.asarray(other) / np.asarray(best)
    if len(less) < 2:
        return float(less.mean()), math.inf
    return float(less.mean()), _STUDENT[len(less) - 2] * float(less.std(ddof=1)) / math.sqrt(len(less))
