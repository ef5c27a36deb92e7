"""Deadlines: how long after its arrival the answer to a request is of use.

One length for all requests, or evenly spread between two, as services of several kinds have them. A bound
`p99-deadline` says that 99 % of the requests have their whole answer by then. Its latency is the time a request takes,
scaled by its own deadline to the mean one, so that it can be compared with that.

Not here: which request expires (`exeplan.scheduling.scheduler`).
"""

from dataclasses import dataclass

import numpy as np

from exeplan.arrays import Floats
from exeplan.errors import InputError
from exeplan.units import seconds

_POINTS = 9
EXPIRED = 2.0
"""An expired request counts as one that took this many times its deadline."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds from arrival to deadline, evenly spread from `low` to `high`."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high < float("inf"):
            raise InputError(f"a deadline must be a time such as 2s, or two, the lower first; found {self}")

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    @property
    def factors(self) -> Floats:
        """What scales a request's time to the mean deadline: equally likely points."""
        if self.low == self.high:
            return np.ones(1)
        return self.mean / (self.low + (self.high - self.low) * (np.arange(_POINTS) + 0.5) / _POINTS)

    def draw(self, num_requests: int, *, seed: int) -> Floats:
        """Seconds from arrival to deadline, one a request."""
        return np.random.default_rng([seed, num_requests, 1]).uniform(self.low, self.high, num_requests)

    def __str__(self) -> str:
        times = (self.low,) if self.low == self.high else (self.low, self.high)
        return ",".join(f"{value!r}s" for value in times)


def parse_deadlines(text: str, name: str = "--deadline") -> Deadlines:
    """`2s`, or `1s,4s` for any time between. Raises InputError naming the option."""
    words = text.split(",")
    if len(words) > 2:
        raise InputError(f"{name} must be a time such as 2s, or two such as 1s,4s, found '{text}'")
    times = [seconds(word, name) for word in words]
    return Deadlines(times[0], times[-1])
