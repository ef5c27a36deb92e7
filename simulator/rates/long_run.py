"""The waits of a replay's requests, as a stream without end has them.

Near the capacity queues follow chance for thousands of requests, and a replay begins without one. A queue of as many
servers as the engine has slots, each of which takes a fixed time a token, waits nearly as long with the same requests,
where admission is slot by slot. It takes no passes, so that its own long run is soon known. What it lacks in the
replay's requests against its long run, the engine lacks as well:

    wait of a request + slope (G(its wait in the queue) - its wait in the queue)

G maps the quantiles of the queue's waits in the replay to those in its long run, and the slope is that of the engine's
waits over the queue's. In the mean this is a control variate. The mean of the long run itself is known better by yet
another one, the waits behind a single server of the same work, of which the mean is known (Pollaczek and Khinchine).
Where the two do not wait alike (batches that run to completion, cycles of `rra`), requests stay as they are.

How much of the work prompts are is what makes the two most alike. Source: control variates, Law and Kelton, Simulation
Modeling and Analysis, section 11.4. What it brings: `python -m benchmarks.planner.rates`. Not here: how long a replay
is, and what becomes of its requests (`exeplan/planner/problems/replays.py`).
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapreplace

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.runs.metrics import Requests
from exeplan.workload.length_law import Ints
from exeplan.workload.workload import Workload

_ALIKE = 0.9
"""Correlation of the waits of single requests below which the queue says nothing of the engine."""
_PROMPTS = (0.0, 0.25, 0.5, 0.75)
"""Shares of the work that prompts may be."""
_FEW = 30
"""Requests that wait, below which there is nothing to learn from."""
_MOST_LOAD = 0.97
"""Of the capacity, beyond which the long run is too short as well."""
_LONG = 300_000
"""Requests of the long run, and below in how many blocks their means are taken."""
_BLOCKS = 60
_FILLING_UP = 0.1
"""Share of the long run that does not count, as it begins without a queue."""
_SEED = 271_828
"""No replay has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotQueue:
    """Requests that come as a Poisson stream to so many slots; each holds one for a fixed time a token."""

    rate: float
    """Requests/s that come."""
    capacity: float
    """Requests/s with all slots full."""
    slots: int
    prompts: float = 0.0
    """Share of the work that prompts are, by their tokens; answers are the rest."""

    def seconds(self, workload: Workload, inputs: Ints, outputs: Ints) -> Floats:
        """For which each request would have all slots to itself, by its tokens."""
        of_prompts = self.prompts * (inputs / workload.mean_input) if self.prompts else 0.0
        return (of_prompts + (1 - self.prompts) * (outputs / workload.mean_output)) / self.capacity

    def waits(self, arrivals: Floats, seconds: Floats) -> Floats:
        """Seconds until each has a slot, first come first served; times of arrival rise."""
        free, found = [0.0] * self.slots, []
        for come, taken in zip(arrivals.tolist(), (self.slots * seconds).tolist(), strict=True):
            first = free[0]
            begins = first if first > come else come
            found.append(begins - come)
            heapreplace(free, begins + taken)
        return np.array(found)


def in_the_long_run(requests: Requests, queue: SlotQueue, workload: Workload) -> tuple[Requests, float]:
    """Requests that have come earlier or later by what they would wait more or less in a long run, and the share of the
    error of their mean wait that is left; 1 where the requests are as they were. They are in order of arrival.
    """
    if queue.rate > _MOST_LOAD * queue.capacity:
        return requests, 1.0
    counted = slice(int(_FILLING_UP * len(requests)), None)
    in_engine = (requests.first_tokens - requests.arrivals)[counted]
    alike, slope, queue, in_queue = max(
        (_alike(requests, replace(queue, prompts=share), workload, counted) for share in _PROMPTS),
        key=lambda found: found[0],
    )
    if alike < _ALIKE:
        return requests, 1.0
    order = np.lexsort((in_engine, in_queue))
    lacking = np.empty(len(in_queue))
    lacking[order] = _quantiles(_long_run(queue, workload), len(in_queue)) - in_queue[order]
    arrivals = requests.arrivals.copy()
    arrivals[counted] = np.minimum(arrivals[counted] - slope * lacking, requests.starts[counted])
    return replace(requests, arrivals=arrivals), float(np.sqrt(1 - alike**2))


def _alike(
    requests: Requests, queue: SlotQueue, workload: Workload, counted: slice
) -> tuple[float, float, SlotQueue, Floats]:
    """The correlation of the engine's waits with the queue's, 0 where few wait, and the slope of the former over the
    latter; the queue and its waits."""
    seconds = queue.seconds(workload, requests.input_tokens, requests.output_tokens)
    waits = queue.waits(requests.arrivals, seconds)[counted]
    if np.count_nonzero(waits) < _FEW:
        return 0.0, 0.0, queue, waits
    in_engine = (requests.first_tokens - requests.arrivals)[counted]
    (_, both), (_, own) = np.cov(in_engine, waits)
    return float(both / np.sqrt(own * in_engine.var(ddof=1))), float(both / own), queue, waits


def _quantiles(rising: Floats, number: int) -> Floats:
    """So many, evenly spread."""
    ranks = (np.arange(number) + 0.5) / number * len(rising) - 0.5
    return np.interp(ranks, np.arange(len(rising)), rising)


@lru_cache(maxsize=256)
def _long_run(queue: SlotQueue, workload: Workload) -> Floats:
    """Waits of many requests, rising; their mean is that of a stream without end, as nearly as it is known."""
    rng = np.random.default_rng(_SEED)
    seconds = queue.seconds(workload, *workload.sample(_LONG, seed=_SEED, stratified=False))
    arrivals = np.cumsum(rng.exponential(1 / queue.rate, _LONG))
    counted = slice(int(_FILLING_UP * _LONG), None)
    waits, behind_one = queue.waits(arrivals, seconds)[counted], _behind_one(arrivals, seconds)[counted]
    blocks, of_one = (each.reshape(_BLOCKS, -1).mean(axis=1) for each in (waits, behind_one))
    (_, both), (_, own) = np.cov(blocks, of_one)
    mean = waits.mean() + both / own * (_mean_behind_one(queue, workload) - behind_one.mean()) if own > 0 else 0.0
    # The queue's longest waits are what a long run lacks or has too much of: all waits by one factor.
    return np.sort(waits) * (max(mean, 0.0) / waits.mean() if waits.any() else 1.0)


def _behind_one(arrivals: Floats, seconds: Floats) -> Floats:
    """Waits behind a single server, first come first served (Lindley's recursion)."""
    ahead = np.concatenate([[0.0], seconds[:-1]]) - np.diff(arrivals, prepend=0.0)
    level = np.cumsum(ahead)
    return level - np.minimum.accumulate(np.minimum(level, 0.0))


def _mean_behind_one(queue: SlotQueue, workload: Workload) -> float:
    """Of a Poisson stream: rate x E[seconds^2] / 2 / (1 - load)."""
    weights = workload.weights / workload.weights.sum()
    seconds = queue.seconds(workload, workload.inputs, workload.outputs)
    return float(queue.rate * (weights @ seconds**2) / 2 / (1 - queue.rate / queue.capacity))
