"""RequestTimes: the times of single requests, which percentiles, joint attainment and goodput are taken over.

    ttft        start (with arrivals: arrival) to the first token
    tpot        (last token - first token) / (output tokens - 1), of requests with at least two tokens
    latency     start to the last token
    length      start to the last token, or to token n of an output longer than n, the planned 99th-percentile length
    due         latency scaled by the request's own deadline to the mean one
    percentile  pNN: the smallest time that NN % of the requests do not exceed; of tpot, of those with two tokens
    attainment  share of the requests each of which keeps every bound with its own times; a single token keeps any tpot
    goodput     such requests a second: throughput times attainment

A bound on a mean counts here by its seconds, as any other: a request keeps it when its own time does.
Not here: where times come from (`metrics.py`: runs; `simulator/rates/request_times.py`: closed form).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from exeplan.arrays import Floats
from exeplan.core.bounds import Bound, percentile, targets_of


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class RequestTimes:
    """One array entry a request, all equally likely; seconds, infinite for what never came."""

    ttft: Floats
    tpot: Floats
    """0 where there is a single token."""
    latency: Floats
    length: Floats
    due: Floats | None = None
    """None without deadlines."""
    single: NDArray[np.bool_]
    """True for requests of a single token, which have no tpot."""

    def of(self, quantity: str) -> Floats:
        """The times of a quantity by its name."""
        found = getattr(self, quantity)
        return self.latency if found is None else found

    def value(self, bound: Bound) -> float:
        """What a bound on a percentile limits, in seconds.

        For pNN-all it is the time of the first target with which, all targets scaled alike, NN % keep all of them.
        """
        found = percentile(bound.metric)
        assert found is not None
        quantity, share = found
        if quantity == "all":
            return quantile(self.utilizations(bound.targets), share) * bound.targets[0][1]
        times = self.tpot[~self.single] if quantity == "tpot" else self.of(quantity)
        return quantile(times, share)

    def utilizations(self, targets: Sequence[tuple[str, float]]) -> Floats:
        """The largest of time / target of each request: at most 1 where it keeps all."""
        return np.max([self.of(quantity) / seconds for quantity, seconds in targets], axis=0)

    def attainment(self, bounds: Sequence[Bound]) -> float | None:
        """The share that keeps all bounds; None where no bound is finite."""
        targets = targets_of(bounds)
        return float(np.mean(self.utilizations(targets) <= 1)) if targets else None

    def percentiles(self, bounds: Sequence[Bound]) -> Mapping[str, float]:
        """The value of each bound on a percentile of ttft or tpot or of all together, by its metric."""
        return {bound.metric: self.value(bound) for bound in bounds if percentile(bound.metric)}


def quantile(values: Floats, share: float) -> float:
    """The smallest value that a share of at least `share` does not exceed; 0 of no values."""
    if not len(values):
        return 0.0
    rank = int(np.ceil(share * len(values) - 1e-9))
    return float(np.partition(values, rank - 1)[rank - 1])
