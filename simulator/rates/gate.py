"""A gate that lets all that wait in together, at most B of them, and opens again when those are served.

    q        requests that wait when the gate opens; k = min(q, B) of them enter, which takes s(k) seconds
    next q   q - k and those that arrive meanwhile; where none waits, the next to arrive enters alone, at once
    wait     by Little's law, mean number that waits / rate

The chain of q is solved as it is, no state left out but those too rare to count. Arrivals in a given time are Poisson,
or where their stream is more or less variable negative binomial or binomial, by Panjer's recursion. Sources: Bailey, On
queueing processes with bulk service (1954); Neuts, A general class of bulk queues with Poisson input (1967).

Used for batches that run to completion, for prefills with a stage of their own, and for the cycles of `rra`. Not here:
what is served (`at_rate.py`).
"""

from dataclasses import dataclass

import numpy as np

from exeplan.arrays import Floats
from exeplan.simulator.rates.poisson import poisson_quantiles

_LEVELS = 200
"""Values of q up to B, and beyond it, at most."""
_RARE = 12.0
"""How far q reaches beyond B, in means of what is left over by full batches."""
_UNSEEN = 1e-7
"""Chance of states that are left out of what requests meet."""
_MOMENTS = 6
"""Points of the time between two openings at which an arrival is looked at."""
_NUMBERS, _SHARES = np.array([0.219, 0.594, 0.844, 0.969]), np.array([0.4375, 0.3125, 0.1875, 0.0625])
"""Quantiles of the number that has come before it meanwhile, with small shares of large numbers, where percentiles
lie."""
_SPREAD = np.sqrt(1.5) * np.array([-1.0, 0.0, 1.0])
"""Points with mean 0 and variance 1, of equal weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """The steady state at a rate of arrivals."""

    wait: float
    """Mean seconds of a request until it enters."""
    sizes: Floats
    """1, 2, ... B."""
    chance: Floats
    """Of a request: that it enters with so many, itself included."""
    waits: Floats
    """Seconds of an arriving request, by what it meets; `together` enter with it, and `weights` say how likely."""
    together: Floats
    weights: Floats


def gate(rate: float, seconds: Floats, *, variability: float = 1.0) -> Gate:
    """The gate that is shut for any of `seconds[k - 1]` when k enter, all equally likely; at most as many as there are
    rows do.

    `variability` is the squared coefficient of variation of the gaps between arrivals. The rate has to be below the
    number of rows over the mean of the last one.
    """
    most, full = len(seconds), rate * float(seconds[-1].mean())
    beyond = _RARE * (full * variability + rate**2 * float(seconds[-1].var())) / (2 * (most - full))
    step = max(1, -(-most // _LEVELS), int(beyond / _LEVELS))
    sizes = np.unique(np.append(np.arange(0, most, step), most))[1:].astype(float)
    taken = seconds[sizes.astype(int) - 1]
    levels = np.append(0.0, np.append(sizes, np.arange(most + step, most + beyond + 2 * step, step)))
    left = np.maximum(levels - most, 0.0)
    row = np.minimum(np.arange(len(levels)), len(sizes)) - 1
    row[0] = 0
    coming = _arrivals(rate * taken, variability, len(levels), step)
    chance = _stationary(left, coming[row], step)
    shut = taken[row]
    cycle = float(chance @ shut.mean(axis=1)) + float(chance[0]) / rate
    waiting = float(chance @ (left * shut.mean(axis=1) + rate * (shut**2).mean(axis=1) / 2)) / cycle
    by_size = np.bincount(row, weights=chance * np.clip(levels, 1.0, most), minlength=len(sizes))
    met = _met(left, shut, chance, rate=rate, cycle=cycle, most=most, variability=variability)
    met["waits"] *= waiting / rate / max(float(met["weights"] @ met["waits"]), 1e-300)
    return Gate(wait=waiting / rate, sizes=sizes, chance=by_size / by_size.sum(), **met)


def _arrivals(mean: Floats, variability: float, count: int, step: int) -> Floats:
    """P(j steps of arrivals), [rows of `mean`, j], over its columns: the recursion P(j) = (a + b / j) P(j - 1).

    `variability` is the variance over the mean.
    """
    # Counted in steps, the variance is less by as much.
    ratio = max(variability / step, 0.05)
    a = 1 - 1 / ratio
    b = mean / step * (1 - a) - a
    ratios = np.maximum(a + b[:, :, None] / np.arange(1, count), 1e-300)
    logs = np.concatenate([np.zeros((*mean.shape, 1)), np.cumsum(np.log(ratios), axis=2)], axis=2)
    table = np.exp(logs - logs.max(axis=2, keepdims=True))
    return np.asarray((table / table.sum(axis=2, keepdims=True)).mean(axis=1))


def _stationary(left: Floats, arrivals: Floats, step: int) -> Floats:
    """Of the chain that goes from what is left to that and the arrivals; beyond the last level it stays there."""
    count, matrix = len(left), np.zeros((len(left), len(left)))
    for state, at in enumerate((left / step).tolist()):
        first, share = int(at), at % 1.0
        for begin, part in ((first, 1.0 - share), (first + 1, share)):
            if part > 0.0 and begin < count:
                matrix[state, begin:] += part * arrivals[state, : count - begin]
        matrix[state, -1] += 1.0 - matrix[state].sum()
    balance = matrix.T - np.eye(count)
    balance[-1] = 1.0
    found = np.maximum(np.linalg.solve(balance, np.eye(count)[-1]), 0.0)
    return np.asarray(found / found.sum())


def _met(
    left: Floats, shut: Floats, chance: Floats, *, rate: float, cycle: float, most: int, variability: float
) -> dict[str, Floats]:
    """What arriving requests meet: a shut gate at an even moment, more often while it is shut long, or an open one.

    The waits are scaled to their mean, from which a few points of the numbers that come are a little off.
    """
    some = chance > _UNSEEN
    held, often = shut[some, :, None, None], chance[some, None, None, None]
    share = (np.arange(_MOMENTS)[:, None] + 0.5) / _MOMENTS
    mean = rate * held * share
    come = poisson_quantiles(_NUMBERS, mean)
    ahead = left[some, None, None, None] + np.maximum(mean + np.sqrt(variability) * (come - mean), 0.0)
    whole = np.floor(ahead / most)
    full, apart = float(shut[-1].mean()), float(shut[-1].std())
    # Each moment meets every spread of the full batches, with other numbers.
    spread = _SPREAD[np.indices(whole.shape[1:]).sum(axis=0) % len(_SPREAD)]
    waits = held * (1 - share) + np.maximum(whole * full + np.sqrt(whole) * apart * spread, 0.0)
    together = np.clip(ahead + rate * held * (1 - share) + 1 - whole * most, 1.0, most)
    weights = often * held / cycle / _MOMENTS / shut.shape[1] * _SHARES + 0.0 * waits
    total = float(weights.sum() + chance[0] / rate / cycle)
    return {
        "waits": np.append(0.0, waits.ravel()),
        "together": np.append(1.0, together.ravel()),
        "weights": np.append(chance[0] / rate / cycle, weights.ravel()) / total,
    }
