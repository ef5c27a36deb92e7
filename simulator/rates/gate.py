"""A gate that lets all that wait in together, at most B of them, and opens again when those are served.

    q        requests that wait when the gate opens; k = min(q, B) of them enter, which takes s(k) seconds
    next q   q - k and those that arrive meanwhile; where none waits, the next to arrive enters alone, at once
    wait     by Little's law, mean number that waits / rate

The chain of q is solved as it is up to a few deviations beyond B. From there on it is a random walk with a negative
mean, and the chances fall geometrically: by the root above 1 of z^B = E z^arrivals (during a full batch). Arrivals in a
given time are Poisson, or where their stream is more or less variable negative binomial or binomial, by Panjer's
recursion. Where B is large, all are counted in equal parts of B. Sources: Bailey, On queueing processes with bulk
service (1954); Neuts, A general class of bulk queues with Poisson input (1967).

Used for batches that run to completion, for prefills with a stage of their own, and for the cycles of `rra`. Not here:
what is served (`at_rate.py`).
"""

from dataclasses import dataclass

import numpy as np

from exeplan.arrays import Floats
from exeplan.errors import Infeasible
from exeplan.simulator.rates.poisson import poisson_quantiles

_LEVELS = 200
"""Values of q up to B, at most, and about as many beyond it."""
_FEWEST_LEVELS = 16
"""Values of q up to B, at least, where B is as large."""
_RARE = 12.0
"""How far q is followed beyond B, in means of what is left over by full batches, or in deviations of the arrivals."""
_TAIL, _PARTS = 18.0, 6
"""How far the geometric tail counts, in its means, and in how many parts each mean is divided."""
_UNSEEN = 1e-7
"""Chance of states that are left out of what requests meet."""
_MOST_LOAD = 1 - 1e-6
"""Of the capacity; from there on the queue has no stationary law that numbers would tell."""
_NEWTON = 12
"""Iterations for the root of the tail."""
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
    capacity: the number of rows over the mean of the last one. Raises Infeasible where it is not, as waits would grow
    without end.
    """
    most, full = len(seconds), rate * float(seconds[-1].mean())
    if full > _MOST_LOAD * most:
        raise Infeasible(f"{rate * most / full:.6g} requests/s are sustained, {rate:.6g} come")
    variance = full * variability + rate**2 * float(seconds[-1].var())
    beyond = _RARE * min(variance / (2 * (most - full)), 1 + np.sqrt(variance))
    steps = min(most, max(_FEWEST_LEVELS, int(_LEVELS * most / max(most, beyond, _LEVELS))))
    step = most / steps
    sizes = np.floor(np.arange(1, steps + 1) * step + 0.5)
    taken = np.concatenate([seconds[:1], seconds[sizes.astype(int) - 1]])
    coming = _arrivals(rate * taken, variability, steps + int(beyond / step) + 3, step)
    reached, chance = _stationary(coming)
    levels = reached * step
    left = np.maximum(levels - most, 0.0)
    row = np.minimum(np.arange(len(levels)), steps)
    shut = taken[row]
    cycle = float(chance @ shut.mean(axis=1)) + float(chance[0]) / rate
    waiting = float(chance @ (left * shut.mean(axis=1) + rate * (shut**2).mean(axis=1) / 2)) / cycle
    by_size = np.bincount(np.maximum(row, 1) - 1, weights=chance * np.clip(levels, 1.0, most), minlength=len(sizes))
    met = _met(left, shut, chance, rate=rate, cycle=cycle, most=most, variability=variability)
    met["waits"] *= waiting / rate / max(float(met["weights"] @ met["waits"]), 1e-300)
    return Gate(wait=waiting / rate, sizes=sizes, chance=by_size / by_size.sum(), **met)


def _arrivals(mean: Floats, variability: float, count: int, step: float) -> Floats:
    """P(j steps of arrivals), [rows of `mean`, j], over its columns: the recursion P(j) = (a + b / j) P(j - 1).

    `mean` is in requests, and `variability` the variance over it. Where the law in steps is not quite that of the
    recursion, some of it is moved by one step, so that the mean is right.
    """
    # Counted in steps, the variance is less by as much.
    ratio = max(variability / step, 0.05)
    a = 1 - 1 / ratio
    b = mean / step * (1 - a) - a
    number = np.arange(count)
    ratios = np.maximum(a + b[:, :, None] / number[1:], 1e-300)
    logs = np.concatenate([np.zeros((*mean.shape, 1)), np.cumsum(np.log(ratios), axis=2)], axis=2)
    table = np.exp(logs - logs.max(axis=2, keepdims=True))
    law = (table / table.sum(axis=2, keepdims=True)).mean(axis=1)
    lacking = mean.mean(axis=1) / step - law @ number
    up = np.clip(lacking / (1 - law[:, -1]), 0.0, 1.0)[:, None] * law[:, :-1]
    down = np.clip(-lacking / np.maximum(1 - law[:, 0], 1e-300), 0.0, 1.0)[:, None] * law[:, 1:]
    law[:, 1:] += up - down
    law[:, :-1] += down - up
    return np.asarray(law)


def _stationary(arrivals: Floats) -> tuple[Floats, Floats]:
    """Values of q, and their chances; both q and the arrivals are in steps.

    `arrivals` has P(j) behind a request alone and behind batches of 1, 2, ... B steps, [1 + B, j]. The last j is where
    the geometric tail begins; its parts come with their mean q.
    """
    steps, count = len(arrivals) - 1, arrivals.shape[1]
    full, number = arrivals[-1], np.arange(count)
    decay = _decay(full, steps)
    whole = -1 / np.expm1(-decay)
    matrix = np.zeros((count, count))
    matrix[: steps + 1] = arrivals
    for state in range(steps + 1, count - 1):
        matrix[state, state - steps :] = full[: count + steps - state]
    tail = count - 1 - steps
    matrix[-1, tail:] = np.convolve(full, np.exp(-decay * number))[: count - tail]
    balance = matrix.T - np.eye(count)
    balance[-1] = np.append(np.ones(count - 1), whole)
    found = np.maximum(np.linalg.solve(balance, np.eye(count)[-1]), 0.0)
    part = int(np.ceil(1 / (_PARTS * decay)))
    begins = part * np.arange(np.ceil(_TAIL / (part * decay)))
    inside = whole - 1 - part / np.expm1(part * decay)
    parts = found[-1] * whole * np.exp(-decay * begins) * -np.expm1(-decay * part)
    chance = np.append(found[:-1], parts)
    return np.append(number[:-1], count - 1 + begins + inside), chance / chance.sum()


def _decay(arrivals: Floats, steps: int) -> float:
    """The x above 0 with log E exp(x (arrivals - steps)) = 0, by Newton's method from above: the left side
    is convex."""
    number, logs = np.arange(len(arrivals)) - steps, np.log(np.maximum(arrivals, 1e-300))

    def at(x: float) -> tuple[float, float]:
        """The left side and its derivative."""
        weights = np.exp((powers := logs + x * number) - (highest := powers.max()))
        return float(highest + np.log(weights.sum())), float(weights @ number / weights.sum())

    mean = float(arrivals @ number)
    x = -2 * mean / float(arrivals @ (number - mean) ** 2)
    while (found := at(x))[0] <= 0:
        x *= 1.5
    for _ in range(_NEWTON):
        x -= found[0] / found[1]
        found = at(x)
    return x


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
