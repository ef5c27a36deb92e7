"""Batches of alike lengths where requests come at a rate: a few queues of random requests, served side by side.

What waits at a time decides which batch is next, and its time how many come meanwhile: numbers and lengths hang
together, so that a chain of numbers alone, with the mean batch of each, has waits up to twice as long. A batch takes
its prefill, padded to its longest prompt, and as many decode iterations as its longest output has, at the mean of its
tokens. Queues begin near the length that they will have, and settle before their batches count.

Not here: requests that do not fit into the KV cache, and several micro-batches.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from exeplan.arrays import Floats
from exeplan.policies.interface import Clock, Cycle, Served
from exeplan.policies.shared.cutting import around, best_begins
from exeplan.workload.length_law import Ints, LengthLaw
from exeplan.workload.workload import Workload

_SETTLING, _SEEN = 24, 48
"""Batches of a queue until it has settled, and those that count."""
_TOGETHER, _QUEUES = 4096, (16, 512)
"""Places in the batches of all queues together, about, and the fewest and most queues."""
_LEAST_VARIABILITY = 0.01
"""Of gaps that are all alike, about."""
_SIZES, _LENGTHS = 8, 8
"""Batch sizes and numbers of tokens at which passes are timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutting:
    """How waiting requests are cut: at most `size` a batch, of the first `lookahead` of them."""

    size: int
    overhead: int
    lookahead: int


@lru_cache(maxsize=32)  # Asked for again and again with the rate of a plan.
def served(
    workload: Workload,
    clock: Clock,
    cutting: Cutting,
    together: float,
    interval: float,
    rate: float,
    variability: float,
) -> Served:
    """Requests of the batches that run; `variability` is that of the gaps.

    Under a backlog batches have `together` requests in the mean and take `interval` seconds; the rate is below that.
    """
    times = _Times(clock, workload, cutting.size)
    queues = int(np.clip(_TOGETHER // cutting.size, *_QUEUES))
    count = (_SETTLING + _SEEN) * cutting.size + 2 * cutting.lookahead
    inputs, outputs = (x.reshape(queues, count) for x in workload.sample(queues * count, seed=0, stratified=False))
    rng = np.random.default_rng(1)
    uneven = max(variability, _LEAST_VARIABILITY)
    arrivals = np.cumsum(rng.gamma(1 / uneven, uneven / rate, (queues, count)), axis=1)
    every = np.arange(queues)
    # Those that come during a full batch, and what full batches leave over, about.
    full = rate * interval
    first = full + variability * full / (2 * (together - full)) * rng.exponential(size=queues)
    now = arrivals[every, np.minimum(first, count // 2).astype(int)]
    done, found = np.zeros((queues, count), dtype=bool), []
    for turn in range(_SETTLING + _SEEN):
        now = np.maximum(now, np.where(done, np.inf, arrivals).min(axis=1))
        waiting, counts = _waiting(~done & (arrivals <= now[:, None]), cutting.lookahead)
        batch = batch_of_first(np.take_along_axis(inputs, waiting, axis=1), counts, cutting)
        rows, columns = np.nonzero(batch)
        members = waiting[rows, columns]
        prefill, pace, steps = times.of(rows, inputs[rows, members], outputs[rows, members], queues)
        if turn >= _SETTLING:
            held = np.bincount(rows, inputs[rows, members] + outputs[rows, members], minlength=queues)
            waits = now[rows] - arrivals[rows, members]
            found.append((waits, prefill[rows], pace[rows], outputs[rows, members], held[rows]))
        done[rows, members] = True
        now = now + prefill + steps * pace
    return Served(*(np.concatenate(part) for part in zip(*found, strict=True)))


def _waiting(there: np.ndarray, lookahead: int) -> tuple[Ints, Ints]:
    """Of each queue the first that wait, in order of arrival, [queues, waiting], and how many they are."""
    rows, columns = np.nonzero(there)
    totals = np.bincount(rows, minlength=len(there))
    counts = np.minimum(totals, lookahead)
    places = np.arange(len(rows)) - np.repeat(np.cumsum(totals) - totals, totals)
    first = places < lookahead
    waiting = np.zeros((len(there), int(counts.max())), dtype=np.int64)
    waiting[rows[first], places[first]] = columns[first]
    return waiting, counts


def batch_of_first(lengths: Ints, counts: Ints, cutting: Cutting) -> np.ndarray:
    """Which of those that wait, [queues, waiting], are in the batch of the first of them."""
    there = np.arange(lengths.shape[1]) < counts[:, None]
    lengths = np.where(there, lengths, lengths.max())
    # What is not there comes last, also among equal lengths.
    order = np.lexsort((lengths, ~there))
    begins = best_begins(np.take_along_axis(lengths, order, axis=1), cutting.size, cutting.overhead)
    begin, end = around(begins, (order == 0).argmax(axis=1), counts)
    rank = np.argsort(order, axis=1)
    return (rank >= begin[:, None]) & (rank < end[:, None])


class _Times:
    """Seconds of batches, between those of some sizes and numbers of tokens."""

    def __init__(self, clock: Clock, workload: Workload, size: int) -> None:
        law = workload.input_law
        self.first_tokens = 1 if clock.first_token_from_prefill else 0
        self.sizes = np.unique(np.geomspace(1, size, _SIZES).astype(int)).astype(float)
        self.lengths = np.unique(np.geomspace(law.tokens[0], law.tokens[-1], _LENGTHS).astype(int))
        none, prefills = 0.0 * self.sizes, []
        for length in self.lengths:
            alike = LengthLaw(np.array([length]), np.ones(1))
            passes = _padded(self.sizes, none, none, alike)
            prefills.append(clock.seconds(passes).sum(axis=0))
        self.prefills = np.stack(prefills, axis=1)
        self.tokens = np.linspace(1.0, float(workload.longest), _LENGTHS)
        rows = np.repeat(self.sizes, _LENGTHS)
        passes = _padded(0.0 * rows, rows, rows * np.tile(self.tokens, len(self.sizes)), law)
        self.paces = clock.seconds(passes).sum(axis=0).reshape(len(self.sizes), _LENGTHS)

    def of(self, rows: Ints, inputs: Ints, outputs: Ints, queues: int) -> tuple[Floats, Floats, Floats]:
        """Of the batch of each queue, from its requests and the queues in which they are: seconds of its prefill and of
        a decode iteration, and how many iterations it takes."""
        size = np.bincount(rows, minlength=queues).astype(float)
        longest, last = np.zeros(queues), np.zeros(queues)
        np.maximum.at(longest, rows, inputs)
        np.maximum.at(last, rows, outputs)
        generated = outputs * (1.0 - outputs / (2.0 * last[rows]))  # Mean over the iterations, finished rows stay.
        context = np.bincount(rows, inputs + generated, minlength=queues) / size
        prefill = _between(self.sizes, self.lengths, self.prefills, size, longest)
        return prefill, _between(self.sizes, self.tokens, self.paces, size, context), last - self.first_tokens


def _padded(prefills: Floats, rows: Floats, context_tokens: Floats, prompts: LengthLaw) -> Cycle:
    return Cycle(
        num_prefill=prefills,
        num_decode=rows,
        context_tokens=context_tokens,
        prompt_law=prompts,
        padded=True,
        kv_tokens=0.0,
        kv_tokens_std=0.0,
        num_seqs=0.0,
    )


def _between(xs: Floats, ys: Floats | Ints, table: Floats, x: Floats, y: Floats) -> Floats:
    """Linear between the values of a table, [xs, ys]."""

    def neighbours(values: Floats | Ints, at: Floats) -> tuple[Ints, Ints, Floats]:
        place = np.interp(at, values, np.arange(len(values)))
        low = np.floor(place).astype(int)
        return low, np.minimum(low + 1, len(values) - 1), place - low

    (left, right, across), (low, high, up) = neighbours(xs, x), neighbours(ys, y)
    lower = (1 - across) * table[left, low] + across * table[right, low]
    upper = (1 - across) * table[left, high] + across * table[right, high]
    return np.asarray((1 - up) * lower + up * upper)
