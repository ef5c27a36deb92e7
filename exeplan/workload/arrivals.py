"""Requests that come at a rate instead of waiting in a backlog: when they come, and how many are there at a time.

    admission_interval  seconds between two admissions, over which arrivals are evenly spread
    residents   how many are there at a time: a birth-and-death chain; `simulator/rates/at_rate.py` makes times of it

The search asks which schedule carries the highest rate within the bounds with full batches, the admission interval
included, as that rises with every knob. With fewer requests batches are smaller, at lower latency; how much they
and the queue vary the Estimate says, and the replay with arrivals, which must keep the bounds, too.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from exeplan.arrays import Floats
from exeplan.errors import InputError
from exeplan.workload.length_law import Ints
from exeplan.workload.workload import Workload

SPARE_SIGMAS = 3.0
"""Places beyond a batch, in square roots of it: the residents of a Poisson stream spread that much."""
_NEGLIGIBLE = 1e-9
_LONGEST_QUEUE = 100_000
"""Requests of it that are looked at, next to those in service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """When requests come."""

    rate: float
    """Requests a second, the mean."""
    variability: float = 1.0
    """Squared coefficient of variation of the gaps; 1 for a Poisson stream, less for every n-th request of one."""
    of_trace: bool = False
    """At the times of the workload's own trace: no law says them, so that what they bring is replayed."""
    sharing: int = 1
    """Replicas among which a stream of `sharing * rate` goes, each request to the one with the fewest."""
    share: float = 1.0
    """Of a trace's requests, those that come here: evenly taken, as a router that balances takes them."""

    def __post_init__(self) -> None:
        check_rate(self.rate)

    def draw(self, workload: Workload, num_requests: int, *, seed: int) -> tuple[Ints, Ints, Floats]:
        """Input tokens, output tokens and arrival seconds of so many requests, or of the first ones of the trace.

        Gaps are scaled to the rate itself, as near the capacity a chance of 1 % in it is one of 10 % in waits.
        """
        if self.of_trace:
            trace = workload.trace
            assert trace is not None
            assert trace.arrival_s is not None
            whole = np.floor(self.share * np.arange(len(trace.inputs) + 1) + 1e-9)
            here = np.flatnonzero(np.diff(whole))[:num_requests]
            return trace.inputs[here], trace.outputs[here], trace.arrival_s[here] - trace.arrival_s[0]
        inputs, outputs = workload.sample(num_requests, seed=seed)
        rng, even = np.random.default_rng([seed, num_requests]), self.variability < 1
        gaps = rng.gamma(1 / self.variability, size=num_requests) if even else rng.exponential(size=num_requests)
        times = np.cumsum(gaps)
        return inputs, outputs, times * (num_requests / (self.rate * times[-1]))

    def split(self, replicas: int, router: str, *, share: float | None = None) -> "Arrivals":
        """The arrivals at one of several replicas, by the law of the router; `share` of all, where they are not equal.

        Of a stream's requests, one in n at random leaves a Poisson stream, and every n-th makes the sum of n gaps one
        gap. Requests that go to the shortest queue keep all queues alike: the replicas work as one system of
        that many times the throughput.
        """
        share = 1 / replicas if share is None else share
        if router == "random":
            return replace(self, rate=self.rate * share, share=share)
        if router == "round-robin":
            return replace(self, rate=self.rate * share, variability=self.variability * share, share=share)
        return replace(self, rate=self.rate * share, sharing=replicas, share=share)

    def __str__(self) -> str:
        return f"{self.rate:.3g} requests/s ({'as in the trace' if self.of_trace else 'Poisson'})"


@dataclass(frozen=True, slots=True)
class Wait:
    """From arrival to the start of the prefill: `queue` seconds, and uniformly up to `admission_interval` more."""

    queue: float = 0.0
    admission_interval: float = 0.0

    @property
    def mean(self) -> float:
        return self.queue + self.admission_interval / 2


def check_rate(rate: object) -> float:
    """The rate itself. Raises InputError unless it is a positive number of requests a second."""
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf:
        raise InputError(f"an arrival rate must be a positive number of requests a second, found {rate!r}")
    return rate


def parse_rate(text: str, name: str) -> float:
    """`20` or `0.5`, requests a second. Raises InputError naming the option."""
    try:
        rate = float(text)
    except ValueError:
        raise InputError(f"{name} must be a number of requests a second such as 20, found '{text}'") from None
    if not 0 < rate < math.inf:
        raise InputError(f"{name} must be a positive number of requests a second, found '{text}'")
    return rate


def parse_arrivals(rate: str | None, workload: Workload, *, of_trace: bool = False) -> Arrivals | None:
    """Poisson arrivals at a rate, those of the trace, or None for a backlog."""
    if of_trace:
        return trace_arrivals(workload)
    return None if rate is None else Arrivals(rate=parse_rate(rate, "--arrival-rate"))


def trace_arrivals(workload: Workload) -> Arrivals:
    """The arrivals of a workload's own trace. Raises InputError when it has none."""
    times = workload.trace.arrival_s if workload.trace is not None else None
    if times is None:
        raise InputError(f"workload '{workload.name}' has no arrival times; give an arrival rate instead")
    if len(times) < 2 or times[-1] <= times[0]:
        raise InputError(f"the arrivals of workload '{workload.name}' span no time; give an arrival rate instead")
    return Arrivals(rate=float((len(times) - 1) / (times[-1] - times[0])), of_trace=True)


def residents(rate: float, sizes: Floats, throughputs: Floats, *, spread: float = 1.0) -> Floats:
    """P(n) for n = 0, 1, ... requests in a system that serves `throughputs` requests/s with `sizes` in it, both rising.

    Between sizes it is interpolated, below the first and beyond the last it stays. The last has to exceed the rate.
    `spread` is the variance of their number over that under Poisson arrivals.
    """
    load = rate / float(throughputs[-1])
    queue = min(spread * math.log(_NEGLIGIBLE) / math.log(load), _LONGEST_QUEUE)
    number = np.arange(1, int(sizes[-1] + queue) + 2)
    logs = np.concatenate([[0.0], np.cumsum(math.log(rate) - np.log(np.interp(number, sizes, throughputs)))])
    chance = np.exp((logs - logs.max()) / spread)
    return np.asarray(chance / chance.sum())


def with_spare_places(batch: int) -> int:
    """The batch to allow where `batch` is what the rate needs on average."""
    return batch + math.ceil(SPARE_SIGMAS * math.sqrt(batch))
