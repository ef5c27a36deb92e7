"""Closed form of a schedule to which requests come at a rate, instead of waiting in a backlog.

With n requests in the system, in service or waiting for admission, the schedule is assumed to work as in its steady
state with batches that hold n: it serves X(n) requests/s (Little's law gives the batch). Arrivals at rate r make n a
birth-and-death chain, P(n) ~ prod r / X(k). For processor sharing, which iteration-level scheduling approximates, that
is exact for any law of the lengths (Kelly 1979, section 3.3). Beyond full batches requests queue.

    in service  a request shares the engine with n - 1 others for a part of its life proportional to n P(n), so its time
                is the harmonic mean of the times at constant n under these weights
    arriving    it meets n others with probability P(n); with n = 0 there is no wait for an admission
    even gaps   gaps with a squared coefficient of variation c below 1, as every n-th request of a stream has them,
                narrow P(n), which has the power 1 / v: v = (c + s) / (1 + s) is the variance relative to that of a
                Poisson stream, s that of the output lengths. Right without a limit on the batch for lengths all alike
                or exponential, and for processor sharing close to its capacity
    sharing     replicas that share a stream by the shortest queue hold alike many: n of them are one chain of n times
                the sizes and throughputs, and a request joins a replica of the fewest
    queue       mean number beyond full batches / rate, times (1 + c) / 2 for gaps with a c above 1
    percentiles as `request_times.py` has them, over the numbers that an arriving request meets

Not here: bursts longer than a few gaps; that even gaps put fewer prompts into one pass (mean ttft is up to a quarter
lower behind a round-robin router). The replay with arrivals has the final word.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.bounds import Bound, share_of_requests, targets_of
from exeplan.core.schedule import Estimate
from exeplan.simulator.closed_form import SteadyState, deadline_factors, estimate, weighted_quantile
from exeplan.simulator.cost import CostModel
from exeplan.simulator.request_times import times_at_rate, with_bounds
from exeplan.workload.arrivals import Arrivals, residents
from exeplan.workload.workload import Workload

_ALIKE = np.ones(1)
_LEAST_SPREAD = 0.02
"""Even where neither gaps nor lengths vary."""
_WAIT_POINTS = 9
"""Points at which the wait for an admission is spread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mix:
    """The distribution of the batch in service, as different observers see it."""

    aboard: Floats
    """Weights of the batches as requests in service see them."""
    joining: Floats
    """Weights as an arriving request sees them, itself included."""
    waiting: Floats
    """Probability of arriving while each batch runs and so waiting for the next admission; the rest finds no batch."""
    queue: float
    """Mean seconds in the queue beyond full batches."""
    queues: tuple[Floats, Floats]
    """These seconds by the number met, rising, and the chance of at most each."""


def estimate_at_rate(
    points: Sequence[SteadyState], arrivals: Arrivals, cost: CostModel, metric: str, *, bounds: Sequence[Bound] = ()
) -> Estimate:
    """The Estimate of a schedule under arrivals; `points` are its steady states with rising batches, the last one full.

    Its throughput must exceed the rate. KV cache and memory are those of full batches. Percentiles, attainment and
    goodput are those of `bounds`.
    """
    full = points[-1]
    mix = _mix(points, arrivals)
    intervals = np.array([point.admission_interval for point in points])
    waiting = mix.queue + float(mix.waiting @ intervals) / 2
    tpot = _harmonic(np.array([point.tpot for point in points]), mix.aboard)
    ttft = mix.queue + float(mix.joining @ [point.ttft for point in points] + mix.waiting @ intervals / 2)
    length = np.array([float(full.workload.output_quantile(0.99))])
    at_length = _harmonic(np.array([float(point.latency(length)[0]) for point in points]), mix.aboard) + waiting
    share = share_of_requests(metric)
    at_rate = replace(
        estimate(full, cost, metric),
        throughput=arrivals.rate,
        token_throughput=arrivals.rate * full.workload.mean_output,
        ttft=ttft,
        tpot=tpot,
        latency=at_length
        if share is None
        else _quantile(points, mix, share, factors=deadline_factors(full.workload, metric)),
        latency_p50=_quantile(points, mix, 0.5),
        latency_p99=_quantile(points, mix, 0.99),
    )
    if not targets_of(bounds):
        return at_rate
    empty = 1.0 - float(mix.waiting.sum())
    times = times_at_rate(points, cost, aboard=mix.aboard, queue=mix.queues, empty=empty)
    return with_bounds(at_rate, times, bounds)


def _mix(points: Sequence[SteadyState], arrivals: Arrivals) -> _Mix:
    sizes = np.maximum.accumulate([_in_system(point) for point in points])
    throughputs = np.maximum.accumulate([point.throughput for point in points])
    alike = arrivals.sharing
    spread = _spread(arrivals, points[-1].workload)
    chance = residents(alike * arrivals.rate, alike * sizes, alike * throughputs, spread=spread)
    number = np.arange(len(chance), dtype=float) / alike
    served = np.minimum(number, sizes[-1])
    nearest = np.stack([np.interp(served, sizes, row) for row in np.eye(len(points))])
    after = np.stack([np.interp(np.floor(served) + 1, sizes, row) for row in np.eye(len(points))])
    aboard = nearest @ (served * chance)
    beyond = float((number - served) @ chance)
    longer = (1 + max(arrivals.variability, 1.0)) / 2
    seconds = np.maximum(number + 1 - sizes[-1], 0.0) / throughputs[-1] * longer
    return _Mix(
        aboard=aboard / aboard.sum(),
        joining=after @ chance,
        waiting=nearest[:, 1:] @ chance[1:],
        queue=beyond / arrivals.rate * longer,
        queues=(seconds, np.cumsum(chance)),
    )


def _spread(arrivals: Arrivals, workload: Workload) -> float:
    """The variance of the requests in the system over that under Poisson arrivals; 1 for gaps less even than those."""
    lengths = (workload.output_law.std / workload.mean_output) ** 2
    return max((min(arrivals.variability, 1.0) + lengths) / (1.0 + lengths), _LEAST_SPREAD)


def _in_system(point: SteadyState) -> float:
    """Requests in service or waiting for admission, by Little's law."""
    law = point.workload.output_law
    return point.throughput * (
        float(law.weights @ point.latency(law.tokens.astype(float))) + point.admission_interval / 2
    )


def _harmonic(values: Floats, weights: Floats) -> float:
    """The weighted harmonic mean of values above 0; 0 where any value is 0."""
    return float(1 / (weights @ (1 / values))) if (values > 0).all() else 0.0


def _quantile(points: Sequence[SteadyState], mix: _Mix, share: float, *, factors: Floats = _ALIKE) -> float:
    """Over the length law, the batches, the waits and the factors; a batch is assumed to last as long as a request."""
    law = points[0].workload.output_law
    spread = (np.arange(_WAIT_POINTS) + 0.5) / _WAIT_POINTS
    times = [
        np.add.outer(p.latency(law.tokens.astype(float)), mix.queue + p.admission_interval * spread) for p in points
    ]
    times = [np.multiply.outer(t, factors) for t in times]
    weights = [w * np.repeat(law.weights / times[0][0].size, times[0][0].size) for w in mix.aboard]
    return weighted_quantile(np.concatenate([t.ravel() for t in times]), np.concatenate(weights), share)
