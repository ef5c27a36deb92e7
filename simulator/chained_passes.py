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
_LENGTHS = 512
"""Drawn for each chain, which takes them again and again."""
_MOMENTS = (np.arange(3) + 0.5) / 3
"""Between two passes, at which requests come."""
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
    pass has `room`, [kinds], tokens for prompts. `variability` is the variance over the mean of a number that comes in
    a given time.
    """
    summed, noise = _drawn(law)
    kinds, every = np.arange(len(seconds))[:, None], np.arange(_CHAINS)
    shape = len(seconds), _CHAINS
    ends = np.zeros((_PASSES, stages, *shape))
    begins, taken, queued, new = np.zeros((4, _PASSES, *shape))
    number, left, before, began = np.zeros(shape, dtype=int), np.zeros(shape), ends[0], begins[0]
    for k in range(_PASSES):
        begin = before[0]
        if k:
            own = np.maximum(k - groups, 0)
            begin = np.maximum(begin, np.where((k >= groups)[:, None], ends[own, -1, kinds[:, 0]], 0.0))
        expected = rate * (begin - began)
        count = np.maximum(np.rint(expected + np.sqrt(variability * expected) * noise[k]), 0.0).astype(int)
        tokens = summed[every, number + np.minimum(count, _LENGTHS)] - summed[every, number]
        number = (number + count) % _LENGTHS
        begins[k], queued[k], new[k] = begin, left, tokens
        taken[k] = np.minimum(left + tokens, room[:, None])
        left = left + tokens - taken[k]
        time = _between(taken[k] / law.mean, seconds)
        ends[k, 0] = end = begin + time
        for stage in range(1, stages):
            ends[k, stage] = end = np.maximum(end, before[stage]) + time
        before, began = ends[k], begin
    between = np.diff(begins, axis=0)[_SETTLING - 1 :]
    waits, firsts = [], []
    for moment in _MOMENTS:
        # The prompts before its own, and the passes that all of them fill.
        ahead = queued[_SETTLING:] + moment * new[_SETTLING:] + law.mean
        behind = np.maximum(np.ceil(ahead / room[:, None]).astype(int) - 1, 0)
        own = np.minimum(np.arange(_SETTLING, _PASSES)[:, None, None] + behind, _PASSES - 1)
        time = _between(np.minimum(taken[own, kinds, every] + law.mean, room[:, None]) / law.mean, seconds)
        end = begins[own, kinds, every] + time
        for stage in range(1, stages):
            end = np.maximum(end, ends[own - 1, stage, kinds, every]) + time
        waits.append((1 - moment) * between)
        firsts.append(end - begins[_SETTLING:])
    return [
        _of(np.array(waits)[:, :, kind], np.array(firsts)[:, :, kind], np.array([between[:, kind]] * len(_MOMENTS)))
        for kind in range(len(seconds))
    ]


@lru_cache(maxsize=32)
def _drawn(law: LengthLaw) -> tuple[Floats, Floats]:
    """[chains, lengths] Sums of drawn lengths, twice as many as are drawn, so that any number of them may begin
    anywhere; and [passes, chains] normal variables. Both have the mean of their law."""
    rng = np.random.default_rng(0)
    shares = (rng.permutation(_CHAINS * _LENGTHS) + 0.5) / (_CHAINS * _LENGTHS)
    lengths = np.tile(law.quantiles(shares).reshape(_CHAINS, _LENGTHS), 2)
    noise = rng.standard_normal((_PASSES, _CHAINS // 2))
    noise = np.concatenate([noise, -noise], axis=1)
    return np.concatenate([np.zeros((_CHAINS, 1)), np.cumsum(lengths, axis=1)], axis=1), noise / noise.std()


def _between(prompts: Floats, seconds: Floats) -> Floats:
    """[..., kinds, chains] Linear between the `seconds`, [kinds, prompts], of `PROMPTS`."""
    right = np.searchsorted(PROMPTS, prompts).clip(1, len(PROMPTS) - 1)
    kinds = np.arange(len(seconds))[:, None]
    share = (prompts - PROMPTS[right - 1]) / (PROMPTS[right] - PROMPTS[right - 1])
    low, high = seconds[kinds, right - 1], seconds[kinds, right]
    return np.asarray(low + share * (high - low))


def _of(waits: Floats, firsts: Floats, between: Floats) -> Chained:
    """Of passes as they are met: more requests come between those far apart."""
    waits, firsts, likely = waits.ravel(), firsts.ravel(), between.ravel() / between.sum()
    first = float(likely @ firsts)
    both = waits + firsts - first
    order = np.argsort(both)
    reached, mass = (np.append(0.0, np.cumsum(x[order])) for x in (likely, likely * both))
    edges = np.append(1 - np.geomspace(1, _LAST, _POINTS), 1.0)
    shares = np.diff(edges)
    return Chained(
        wait=float(likely @ waits), first=first, both=np.diff(np.interp(edges, reached, mass)) / shares, shares=shares
    )
