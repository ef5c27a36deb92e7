"""What replays with several seeds show, at a stated confidence: which of two divisions of a cluster has more
throughput, and whether bounds hold at a rate of arrivals.

Both are replayed with the same seeds, and so the same requests (common random numbers); the differences, one a seed,
have a mean and an interval by Student's law. Seeds are added until the interval leaves out zero, or no more are allowed
(sequential stopping): then the two are within noise, and the one with the higher mean is taken. As it is looked at
after every seed, each look has its share of the error that the confidence leaves, the same of all.

Requests that come by chance make a replay of ten thousand of them err by 1 to 3 % in latencies, and near the capacity
by up to 40 % in percentiles of ttft, so that a single one proves a bound, or that it breaks, only if it is far from it.
Otherwise the mean over seeds is what has to keep it, and replays go on until the mean's interval does too, or is all
above it, looked at twice: each time an error of 2.5 % is left on either side, 5 % in all.

Source: paired comparison of two systems, Law and Kelton, Simulation Modeling and Analysis, section 10.2.1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from exeplan.core.bounds import MAX_ITL
from exeplan.core.schedule import Estimate, Figure

CONFIDENCE = 0.95
MOST_SEEDS = 8
# Quantiles of Student's law that leave 2.5 % or 5 % on either side, for 1, 2 ... degrees of freedom; importing scipy
# for them takes as long as a small search.
_STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365)
_STUDENT_90 = (6.314, 2.92, 2.353, 2.132, 2.015, 1.943, 1.895)
_LOOK_BY_LOOK = (57.87, 9.456, 5.645, 4.479, 3.936, 3.627, 3.429)
"""Quantiles that leave 1.1 % in all: of two that are alike, 4.8 % are told apart by one of seven looks (simulated, of
differences by a normal law; a test repeats it)."""
FAR = 0.5
"""A single replay that uses no bound by more than this proves them, chance would have to double it; one that exceeds a
bound by as large a factor disproves it."""
_WELL = 0.05
"""Half the interval of a mean ttft that is known well, over it."""
_LOOKS = (3, MOST_SEEDS)
"""Numbers of seeds after which an interval is looked at."""


@dataclass(frozen=True, slots=True)
class Order:
    """The best division and the next best one, as replayed."""

    runner_up: str
    """Its schedules."""
    behind: float
    """How much less throughput it has, relative."""
    interval: float
    """Half the width of the interval of that, at a confidence that counts all looks up to this one; infinite for a
    single seed."""
    num_seeds: int

    @property
    def certain(self) -> bool:
        return self.behind > self.interval

    @property
    def alike(self) -> bool:
        """The two ran alike to the last digit with several seeds, as one schedule under two names does: more of them
        tell nothing."""
        return self.behind == self.interval == 0.0

    def __str__(self) -> str:
        if self.alike:
            return f"the runner-up, {self.runner_up}, has the same throughput by replay"
        found = f"{100 * self.behind:.2g} % less throughput by replay"
        if math.isinf(self.interval):
            return f"the runner-up, {self.runner_up}, has {found}"
        noise = f"+- {100 * self.interval:.1g} % at {100 * CONFIDENCE:.0f} % confidence, {self.num_seeds} seeds"
        if self.certain:
            return f"the runner-up, {self.runner_up}, has {found} ({noise})"
        return f"the runner-up, {self.runner_up}, is within noise: {found} ({noise})"


def behind(best: Sequence[float], other: Sequence[float], *, look_by_look: bool = False) -> tuple[float, float]:
    """How much less `other` has than `best`, relative, and half the width of that figure's interval.

    The entries are the throughputs of both with the same seeds. `look_by_look` is for an interval that decides, after
    every seed, whether there is another one; otherwise their number was chosen before.
    """
    less = 1.0 - np.asarray(other) / np.asarray(best)
    return float(less.mean()), half_interval(less.tolist(), _LOOK_BY_LOOK if look_by_look else _STUDENT)


def half_interval(values: Sequence[float], quantiles: Sequence[float] = _STUDENT) -> float:
    """Half the width of the interval of their mean; infinite for a single one."""
    if len(values) < 2:
        return math.inf
    return quantiles[len(values) - 2] * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def decided(replays: Sequence[Sequence[float]]) -> bool:
    """Whether no further seed is needed to tell if bounds hold; where one is but none is left, the mean decides.

    The entries are the utilizations of all bounds, by seed.
    """
    by_bound = list(zip(*replays, strict=True))
    if len(replays) == 1:
        return max(replays[0]) <= FAR or max(replays[0]) >= 1 / FAR
    return len(replays) in _LOOKS and (certain(by_bound) or certainly_broken(by_bound))


def seeds_to_decide(num_seeds: int) -> int:
    """How many there are when it is looked at next, after so many; as many where it is looked at no more."""
    return next((look for look in _LOOKS if look > num_seeds), num_seeds)


def certain(by_bound: Sequence[Sequence[float]]) -> bool:
    """Whether every bound, of these utilizations by seed, holds at the confidence and not only in the mean."""
    return all(float(np.mean(values)) + half_interval(values) <= 1 for values in by_bound)


def certainly_broken(by_bound: Sequence[Sequence[float]]) -> bool:
    """Whether a bound breaks at the confidence and not only in the mean."""
    return any(float(np.mean(values)) - half_interval(values) > 1 for values in by_bound)


def known_well(replays: Sequence[Estimate]) -> bool:
    """Whether the interval of their mean ttft is narrow enough to tell it, which that of one replay near the capacity
    often is not."""
    found = mean_estimate(replays).evidence.get("ttft")
    return found is None or (found.low is not None and found.value - found.low <= _WELL * found.value)


def mean_estimate(replays: Sequence[Estimate]) -> Estimate:
    """The mean of replays with several seeds, in every figure but the longest gap; one that a replay lacks is None.

    Intervals are those of the mean, at 90 % as within a replay.
    """
    if len(replays) == 1:
        return replays[0]

    def mean(values: Sequence[float | None]) -> Any:
        given = [value for value in values if value is not None]
        return float(np.mean(given)) if len(given) == len(values) else None

    names = [f.name for f in fields(Estimate) if f.name not in ("percentiles", "evidence", "notes")]
    figures: dict[str, Any] = {name: mean([getattr(one, name) for one in replays]) for name in names}
    values = {name: [one.percentiles[name] for one in replays] for name in replays[0].percentiles}
    percentiles = {name: max(each) if name == MAX_ITL else mean(each) for name, each in values.items()}
    evidence = {}
    for name in replays[0].evidence:
        each = values[name] if name in values else [getattr(one, name) for one in replays]
        if name != MAX_ITL and None not in each:
            middle, half = mean(each), half_interval(each, _STUDENT_90)
            evidence[name] = Figure(
                value=middle, low=middle - half, high=middle + half, num_observations=len(replays), of="replays"
            )
    return replace(replays[0], **figures, percentiles=percentiles, evidence=evidence)
