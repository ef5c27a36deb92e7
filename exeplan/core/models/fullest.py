"""What the fullest of several alike holds: expected maxima, by which a pass waits for its slowest rank.

Not here: what a rank does with it (`exeplan/simulator`), and how experts are chosen (`sparse_layers.py`).
"""

from functools import cache

import numpy as np

from exeplan.arrays import Floats

_COUNTED = 64
"""Things to deal out up to which the maximum is exact."""
_POINTS = 4001
"""At which the density of a maximum is summed, over eight standard deviations to either side."""


@cache
def normal_maximum(count: int) -> float:
    """The expected maximum of so many independent standard normal numbers: 0 of one, 0.56 of two, 1.42 of eight."""
    x = np.linspace(-8.0, 8.0, _POINTS)
    density = np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)
    below = (np.cumsum(density) - density / 2) * (x[1] - x[0])
    return float((x * count * density * below ** (count - 1)).sum() * (x[1] - x[0])) if count > 1 else 0.0


def fullest(count: Floats | float, ranks: int) -> Floats:
    """Of `count` things dealt out to `ranks` at random, those of the rank that has the most, on average; elementwise.

    Exact for whole numbers up to 64, between them a straight line; beyond, by the normal distribution.
    """
    given = np.asarray(count, dtype=float)
    if ranks == 1:
        return given
    exact = _fullest(ranks)
    spread = normal_maximum(ranks) * np.sqrt(np.maximum(given, 0.0) * (ranks - 1)) / ranks
    above = exact[-1] - _COUNTED / ranks - normal_maximum(ranks) * np.sqrt(_COUNTED * (ranks - 1)) / ranks
    found = np.interp(given, np.arange(_COUNTED + 1), exact)
    return np.where(given > _COUNTED, given / ranks + spread + above, found)


@cache
def _fullest(ranks: int) -> Floats:
    """For 0 to `_COUNTED` things: the sum over m of the chance that some rank has more than m.

    Numbers of independent Poisson laws, given their sum, are dealt out at random.
    """
    counts = np.arange(_COUNTED + 1)
    mean = _COUNTED / (2 * ranks)
    logs = counts * np.log(mean) - mean - np.concatenate([[0.0], np.cumsum(np.log(counts[1:]))])
    law = np.exp(logs)
    all_of = _power(law, ranks)
    expected = np.zeros(_COUNTED + 1)
    for most in counts:
        expected += 1.0 - _power(np.where(counts <= most, law, 0.0), ranks) / all_of
    return np.maximum.accumulate(np.maximum(expected, 0.0))


def _power(law: Floats, times: int) -> Floats:
    """The law of the sum of so many numbers, up to `_COUNTED`."""
    found = np.zeros(_COUNTED + 1)
    found[0] = 1.0
    for _ in range(times):
        found = np.convolve(found, law)[: _COUNTED + 1]
    return found
