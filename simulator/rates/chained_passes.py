"""The passes that an arriving request meets where prompts join passes that decode: a few chains of them are drawn.

    T_k   of the k-th pass on every stage: that of its rows, and of the prompts that came since the pass before began
    on stage 0 it begins when the pass before has left it, and its own group's last pass has left all stages
    on the others when it has left the stage before, and the pass before it this one: behind a long pass all wait

More come during a long pass, and make the next one long. A limit on tokens leaves prompts over to the pass behind. A
request that comes waits for the next pass to begin, and has its first token at the end of the pass in which its prompt
ends, longer by that prompt.

Not here: slots that are full (`at_rate.py`), and what a pass takes (`closed_form.py`).
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from exeplan.arrays import Floats
from exeplan.workload.length_law import Ints, LengthLaw

PROMPTS = np.array([0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 128.0])
"""Mean prompts of a pass whose seconds are given."""
_CHAINS, _SETTLING, _PASSES = 64, 16, 48
"""Chains, passes until they have settled, and passes in all."""
_LENGTHS, _APART = 2048, 4096.0
"""Requests of each chain, after which none come, and more than the mean gaps that they take."""
_LEAST_VARIABILITY = 0.01
"""Of gaps that are all alike, about."""
_PICKED = (np.arange(3) + 0.5) / 3
"""Of those that came between two passes, by their place."""
_LEAST_COME = 0.05
"""Requests a pass: with fewer, too few would come while passes are looked at."""
_POINTS, _LAST = 64, 1e-3
"""Shares of what is met, ever smaller towards this last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chained:
    """What a request meets that comes while passes run, with a free slot."""

    wait: float
    """Mean seconds until its pass begins."""
    first: float
    """Mean seconds from there to its first token."""
    both: Floats
    """[points] Rising seconds of both, less the mean of the second, of a prompt of mean length."""
    shares: Floats
    """[points] How likely each is."""


def chained(
    *, rate: float, seconds: Floats, law: LengthLaw, stages: int, groups: Ints, room: Floats, variability: float
) -> list[Chained]:
    """At `rate` requests/s, of prompts of this law, for several kinds of passes.

    `seconds`, [kinds, prompts], are those of a pass on a stage with each of `PROMPTS`; `groups`, [kinds], take turns, a
    pass has `room`, [kinds], tokens for prompts. `variability` is the squared coefficient of variation of the gaps.
    """
    summed, arrivals = _drawn(law, variability)
    kinds, every = np.arange(len(seconds))[:, None], np.arange(_CHAINS)
    shape = len(seconds), _CHAINS
    rates = np.maximum(rate, _LEAST_COME / seconds[:, :1])
    ends = np.zeros((_PASSES, stages, *shape))
    begins, taken, queued = np.zeros((3, _PASSES, *shape))
    numbers, left, before = np.zeros((_PASSES, *shape), dtype=int), np.zeros(shape), ends[0]
    for k in range(_PASSES):
        begin = before[0]
        if k:
            own = np.maximum(k - groups, 0)
            begin = np.maximum(begin, np.where((k >= groups)[:, None], ends[own, -1, kinds[:, 0]], 0.0))
        # All chains in one search: each has its arrivals between two multiples of `_APART`.
        come = np.searchsorted(arrivals, np.minimum(rates * begin, _APART) + every * _APART) - every * _LENGTHS
        tokens = summed[every, come] - summed[every, numbers[k - 1]]
        begins[k], queued[k], numbers[k] = begin, left, come
        taken[k] = np.minimum(left + tokens, room[:, None])
        left = left + tokens - taken[k]
        time = _between(taken[k] / law.mean, seconds)
        ends[k, 0] = end = begin + time
        for stage in range(1, stages):
            ends[k, stage] = end = np.maximum(end, before[stage]) + time
        before = ends[k]
    number = numbers[_SETTLING - 1 : -1]
    count = numbers[_SETTLING:] - number
    interval = (begins[-1] - begins[_SETTLING]) / (_PASSES - 1 - _SETTLING)
    waits, firsts, lengths = [], [], []
    for share in _PICKED:
        # One of those that came: when, the tokens up to its own, the passes that these fill, and its own ones.
        picked = np.minimum(number + (share * count).astype(int), _LENGTHS - 1)
        waits.append(begins[_SETTLING:] - (arrivals[picked + every * _LENGTHS] - every * _APART) / rates)
        tokens = queued[_SETTLING:] + summed[every, picked + 1] - summed[every, number]
        length = summed[every, picked + 1] - summed[every, picked]
        behind = np.maximum(np.ceil(tokens / room[:, None]).astype(int) - 1, 0)
        # Its next part is in its group's next pass.
        behind += np.maximum(np.ceil(length / room[:, None]).astype(int) - 1, 0) * (groups[:, None] - 1)
        own = np.minimum(np.arange(_SETTLING, _PASSES)[:, None, None] + behind, _PASSES - 1)
        beyond = np.arange(_SETTLING, _PASSES)[:, None, None] + behind - own
        firsts.append(ends[own, -1, kinds, every] + beyond * interval - begins[_SETTLING:])
        lengths.append(length - law.mean)
    counts = np.array([count] * len(_PICKED))
    found = [np.moveaxis(np.array(each), 2, 0) for each in (waits, firsts, lengths, counts)]
    return [_of(*(each.ravel() for each in of_kind)) for of_kind in zip(*found, strict=True)]


@lru_cache(maxsize=32)
def _drawn(law: LengthLaw, variability: float) -> tuple[Floats, Floats]:
    """[chains, arrivals] Sums of the drawn lengths, from none of them on; and [chains * arrivals] the times of arrival
    at one request a second, those of each chain `_APART` later."""
    shares, times = _even_draws(variability)
    lengths = law.quantiles(shares).reshape(_CHAINS, _LENGTHS)
    return np.concatenate([np.zeros((_CHAINS, 1)), np.cumsum(lengths, axis=1)], axis=1), times


@lru_cache(maxsize=8)  # The same for all laws of lengths, of which headroom looks at many.
def _even_draws(variability: float) -> tuple[Floats, Floats]:
    """[chains * arrivals] Shares of a law of lengths in random order, and the times of arrival of `_drawn`."""
    rng = np.random.default_rng(0)
    shares = (rng.permutation(_CHAINS * _LENGTHS) + 0.5) / (_CHAINS * _LENGTHS)
    uneven = max(variability, _LEAST_VARIABILITY)
    gaps = rng.gamma(1 / uneven, uneven, (_CHAINS, _LENGTHS))
    gaps[:, 0] *= rng.random(_CHAINS)  # The first passes begin anywhere between two.
    times = np.minimum(np.cumsum(gaps, axis=1), _APART) + _APART * np.arange(_CHAINS)[:, None]
    return shares, times.ravel()


def _between(prompts: Floats, seconds: Floats) -> Floats:
    """[..., kinds, chains] Linear between the `seconds`, [kinds, prompts], of `PROMPTS`."""
    right = np.searchsorted(PROMPTS, prompts).clip(1, len(PROMPTS) - 1)
    kinds = np.arange(len(seconds))[:, None]
    share = (prompts - PROMPTS[right - 1]) / (PROMPTS[right] - PROMPTS[right - 1])
    low, high = seconds[kinds, right - 1], seconds[kinds, right]
    return np.asarray(low + share * (high - low))


def _of(waits: Floats, firsts: Floats, lengths: Floats, counts: Ints) -> Chained:
    """Of requests that were picked from so many; what their own `lengths` over the mean make of it is left out."""
    likely = counts / max(int(counts.sum()), 1)
    apart = lengths - float(likely @ lengths)
    slope = float(likely @ (firsts * apart)) / max(float(likely @ apart**2), 1e-12)
    alike = firsts - slope * lengths
    first = float(likely @ alike)
    both = waits + alike - first
    order = np.argsort(both)
    reached, mass = (np.append(0.0, np.cumsum(x[order])) for x in (likely, likely * both))
    edges = np.append(1 - np.geomspace(1, _LAST, _POINTS), 1.0)
    shares = np.diff(edges)
    return Chained(
        wait=float(likely @ waits), first=first, both=np.diff(np.interp(edges, reached, mass)) / shares, shares=shares
    )
