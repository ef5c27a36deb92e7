"""The rate at which batches of uneven prompts pass a pipeline with a limited number in flight.

A batch enters when the first stage and one of the places are free; it releases its place some time after it has left
the last stage. Long batches delay the short ones behind them, so that the mean times of the stages do not give the
rate; a recursion over one fixed draw of batches does.

Not here: why places are limited, and what happens to the batches afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from exeplan.arrays import Floats
from exeplan.policies.interface import Clock, Cycle
from exeplan.workload.length_law import LengthLaw

_DRAWS = 128
_WARM_UP = 16
"""Batches before those that count."""
_SUMMED = 16
"""Prompts of a batch that are drawn one by one; the sum of more has the same shape."""

Seconds = Sequence[Sequence[float]]
"""Of each batch on each stage."""


class Circulation(NamedTuple):
    """Mean rate and times of the batches."""

    rate: float
    """Batches a second."""
    inside: float
    """Seconds from entering the first stage to leaving the last."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prefills:
    """Rates of the prefill stages for batches of one size; arrays over the places in use, 0 first."""

    batches: Seconds
    places: Floats
    rate: Floats
    """Batches a second, places being free at once."""
    inside: Floats
    variation: float
    """Variance over squared mean of the seconds of a batch."""
    servers: int
    """Equal pipelines side by side, among which the batches are divided."""

    def held_up(self, places: int, delay: float) -> Circulation:
        """Where a place is free only `delay` seconds after its batch has left."""
        return _held_up(self, places, delay)


@lru_cache(maxsize=128)  # As `prefills`: a search tries many ways to decode behind the same prefills.
def _held_up(line: Prefills, places: int, delay: float) -> Circulation:
    return _circulate(line.batches, places, line.servers, delay)


def _circulate(batches: Seconds, places: int, servers: int, delay: float = 0.0) -> Circulation:
    if servers == 1:
        return circulate(batches, places, delay)
    return _side_by_side(batches, places, servers, delay)


def _side_by_side(batches: Seconds, places: int, servers: int, delay: float) -> Circulation:
    """As `circulate`, where each batch goes to the server that can take it first."""
    stages = range(1, len(batches[0]))
    free = [[0.0] * len(batches[0]) for _ in range(servers)]
    back = [0.0] * places
    began = now = inside = 0.0
    for some in (batches[-_WARM_UP:], batches):
        began, inside = now, 0.0
        for seconds in some:
            own, place = min(free), min(range(places), key=back.__getitem__)
            entered = max(back[place], own[0])
            left = own[0] = entered + seconds[0]
            for stage in stages:
                left = own[stage] = max(own[stage], left) + seconds[stage]
            back[place] = left + delay
            inside += left - entered
            now = max(now, left)
    return Circulation(len(batches) / (now - began), inside / len(batches))


def circulate(batches: Seconds, places: int, delay: float = 0.0) -> Circulation:
    """The batches one after the other, over and over; a place is free `delay` seconds after its batch has left."""
    stages = range(1, len(batches[0]))
    free, back, place = [0.0] * len(batches[0]), [0.0] * places, 0
    began = now = inside = 0.0
    for some in (batches[-_WARM_UP:], batches):
        began, inside = now, 0.0
        for seconds in some:
            entered = back[place] if back[place] > free[0] else free[0]
            now = free[0] = entered + seconds[0]
            for stage in stages:
                if free[stage] > now:
                    now = free[stage]
                now += seconds[stage]
                free[stage] = now
            back[place] = now + delay
            inside += now - entered
            place = place + 1 if place + 1 < places else 0
    return Circulation(len(batches) / (now - began), inside / len(batches))


@lru_cache(maxsize=128)  # A search tries many ways to decode behind the same prefills.
def prefills(clock: Clock, prompts: LengthLaw, batch: int, places: int) -> Prefills:
    """Rates of batches of `batch` prompts, with up to `places` of them in flight."""
    servers = clock.num_prefill_servers
    batches = _draw(clock, prompts, batch)
    total = np.sum(batches, axis=1)
    powers = 2 ** np.arange(places.bit_length())
    alone = servers * len(batches[0]) == 1
    counts = [1] if alone else sorted({*powers[powers < places - 1].tolist(), places - 1, places})
    runs = [_circulate(batches, count, servers) for count in counts]
    return Prefills(
        batches=batches,
        places=np.array([0.0, *counts]),
        rate=np.array([0.0, *(run.rate for run in runs)]),
        inside=np.array([runs[0].inside, *(run.inside for run in runs)]),
        variation=float(np.var(total) / np.mean(total) ** 2),
        servers=servers,
    )


def _draw(clock: Clock, prompts: LengthLaw, batch: int) -> Seconds:
    """Batches of `batch` prompts with the law's mean and spread."""
    points = prompts.slice_means(_DRAWS)
    base, one = _prefill_seconds(clock, prompts, batch)
    seconds = points
    if len(base) > 1 and prompts.std > 0.0:
        # A prompt takes time in proportion to its tokens and to their square; a law of longer ones tells the shares.
        longer = prompts.longest_of(3)
        more = _prefill_seconds(clock, longer, batch)[1]
        moments = [[np.mean(tokens), np.mean(tokens**2)] for tokens in (points, longer.slice_means(_DRAWS))]
        shares = np.linalg.solve(np.array(moments), [one.sum(), more.sum()])
        seconds = np.stack([points, points**2], axis=1) @ np.maximum(shares, 0.0)
    deviation = _sums(seconds / seconds.mean() - 1.0, batch)
    batches: Seconds = np.maximum(base + np.outer(deviation, one), 1e-3 * base).tolist()
    return batches


def _prefill_seconds(clock: Clock, prompts: LengthLaw, batch: int) -> tuple[Floats, Floats]:
    """Of a batch on each stage of a server, and of one more prompt in it."""
    none = np.zeros(2)
    cycle = Cycle(
        num_prefill=np.array([batch, batch + 1.0]),
        num_decode=none,
        context_tokens=none,
        prompt_law=prompts,
        kv_tokens=0.0,
        kv_tokens_std=0.0,
        num_seqs=0.0,
    )
    servers, stages = clock.num_prefill_servers, clock.prefill_stages
    seconds = servers * clock.seconds(cycle)[list(stages[: len(stages) // servers])]
    return seconds[:, 0], seconds[:, 1] - seconds[:, 0]


def _sums(values: Floats, count: int) -> Floats:
    """Sums of `count` of the values, in random order, with the spread of sums of independent draws."""
    rng = np.random.default_rng(0)
    sums: Floats = np.sum([rng.permutation(values) for _ in range(min(count, _SUMMED))], axis=0)
    spread = float(np.std(sums))
    return sums * (np.sqrt(count) * np.std(values) / spread) if spread > 0.0 else sums
