"""Requests as TCB's evaluation draws them: Poisson arrivals, 3 to 100 tokens, normal around 20 with a variance.

The paper leaves two things open. Outputs: here as many tokens as the input has, as in translation. Deadlines: here
evenly spread between one and three times what a full batch of rows takes.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

SHORTEST, LONGEST, MEAN = 3, 100, 20


@dataclass(frozen=True, slots=True)
class Load:
    """Requests in order of arrival, one array entry each; seconds and tokens."""

    arrivals: NDArray[np.float64]
    tokens: NDArray[np.int64]
    deadlines: NDArray[np.float64]
    weights: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def utilities(self) -> NDArray[np.float64]:
        """Of each: weight over tokens, 1 / length in the paper."""
        return self.weights / self.tokens

    def at_once(self) -> "Load":
        """All requests waiting from the start, without deadlines: a backlog."""
        return replace(self, arrivals=np.zeros(len(self)), deadlines=np.full(len(self), np.inf))


def poisson(rate: float, seconds: float, *, variance: float, batch_seconds: float, seed: int) -> Load:
    """The requests that arrive within `seconds`."""
    rng = np.random.default_rng(seed)
    count = rng.poisson(rate * seconds)
    arrivals = np.sort(rng.uniform(0, seconds, count))
    deadlines = arrivals + rng.uniform(1, 3, count) * batch_seconds
    return Load(arrivals, lengths(rng, count, variance), deadlines, np.ones(count))


def lengths(rng: np.random.Generator, count: int, variance: float) -> NDArray[np.int64]:
    """Draws of the truncated normal law, by rejection."""
    found = np.zeros(0)
    while len(found) < count:
        drawn = np.rint(rng.normal(MEAN, variance**0.5, 2 * count + 8))
        found = np.concatenate([found, drawn[(drawn >= SHORTEST) & (drawn <= LONGEST)]])
    return found[:count].astype(np.int64)
