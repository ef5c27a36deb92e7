"""A stream whose gaps vary more than those of a Poisson stream, or less: what comes near an arrival, and what it meets.

Gaps are taken to be of a gamma law, of mean 1 / rate and a squared coefficient of variation c.

    clustered   m(t) others come within t of an arrival on either side, a renewal function, and not rate * t: long
                after it (c - 1) / 2 more, and soon after it already many of these, as short gaps follow each other
    residents   how many an arrival meets, and how many there are: gaps of two exponential laws with the first three
                moments of the gamma law, so that number and kind of gap are a Markov chain. Its solution goes from full
                batches down, where it is geometric; each number needs the probability of one kind of gap

An arrival meets more than there are in the mean. Source of the chain: Neuts, Matrix-geometric solutions (1981),
chapter 3; its rates R have rank one here, as each arrival draws a new gap. Not here: bursts longer than a few gaps.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from exeplan.arrays import Floats
from exeplan.workload.arrivals import MOST_RESIDENTS, NEGLIGIBLE

_EXPECTED = np.geomspace(1e-4, 1.0, 48)
"""Arrivals in a time, over those after which the asymptote holds, at which a table is made."""
_FAR = 20.0
"""These, over c."""


class Residents(NamedTuple):
    """Entry n of both is of n requests in the system."""

    chance: Floats
    """At any time."""
    met: Floats
    """By an arriving request, itself not counted."""


def clustered(come: float, variability: float) -> float:
    """Others that come in the same time as an arrival, beyond the `come` that are expected in any such time.

    The arrival is anywhere in it: 2 / T times the integral of m(t) - rate t to T.
    """
    if variability == 1.0 or come <= 0.0:
        return 0.0
    far = _FAR * max(variability, 1.0)
    if come >= far:
        return (variability - 1) * (1 - (variability + 1) / (6 * come))
    return float(np.interp(math.log(come / far), np.log(_EXPECTED), _near(variability)))


@lru_cache(maxsize=64)
def _near(variability: float) -> Floats:
    """Of all `_EXPECTED`: the chance of n gaps within T is a gamma law's, and so is its integral."""
    from scipy.special import gammainc  # Importing it takes as long as a small search.

    shape = 1 / max(variability, 0.02)
    within = _EXPECTED[:, None] * _FAR * max(variability, 1.0)
    most = float(within[-1, 0])
    gaps = np.arange(1.0, math.ceil(most + 10 * math.sqrt(max(variability, 1.0) * most) + 10 * variability) + 1)
    integral = within * gammainc(gaps * shape, shape * within) - gaps * gammainc(gaps * shape + 1, shape * within)
    return np.asarray(2 * integral.sum(axis=1) / within[:, 0] - within[:, 0])


def residents_in_bursts(rate: float, sizes: Floats, throughputs: Floats, variability: float) -> Residents:
    """In a system as of `arrivals.residents`: the last throughput has to exceed the rate. `variability` is above 1."""
    long, rates = _two_gaps(variability)
    often, seldom = (rate * each for each in rates)
    most = float(throughputs[-1])
    tail = often + seldom - most
    root = math.sqrt(tail**2 / 4 + most * (long * often + (1 - long) * seldom) - often * seldom) - tail / 2
    ratio = 1 - root / most  # Of full batches.
    number = np.arange(1, min(int(sizes[-1] + math.log(NEGLIGIBLE) / math.log(ratio)) + 2, MOST_RESIDENTS))
    served = np.interp(number, sizes, throughputs)
    below = min(math.ceil(float(sizes[-1])), len(number))
    share = np.full(len(number), (ratio * most - often) / (seldom - often))
    share[: below - 1] = _shares(served[: below - 1].tolist(), float(share[-1]), long, seldom, often)
    flow = np.log(share * seldom + (1 - share) * often) - np.log(served)
    before = np.concatenate([[0.0], np.cumsum(flow)])
    before = np.exp(before - before.max())
    none = before[0] * (share[0] / seldom + (1 - share[0]) / often)
    chance = np.append(none, before[:-1] / served)
    return Residents(chance=chance / chance.sum(), met=before / before.sum())


def _shares(served: list[float], above: float, long: float, seldom: float, often: float) -> list[float]:
    """The probability of a long gap at each number: from the one above it, at rates of `seldom` and `often`."""
    found = []
    for rate in reversed(served):
        slow, fast = 1 / (seldom + rate), 1 / (often + rate)
        drawn = long * slow * seldom + (1 - long) * fast * often
        again = drawn / (rate * (above * slow + (1 - above) * fast))
        above = rate * slow * (long + again * above)
        found.append(above)
    return found[::-1]


def _two_gaps(variability: float) -> tuple[float, tuple[float, float]]:
    """The chance of a long gap, and the rates of short and long ones, of a mean of 1."""
    middle = (1 + variability) / 3
    apart = math.sqrt(middle**2 - middle / 2)
    short, long = middle - apart, middle + apart
    return (1 - short) / (long - short), (1 / short, 1 / long)
