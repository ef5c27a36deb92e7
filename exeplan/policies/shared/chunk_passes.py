"""The passes of one group under chunked prefill: how many rows decode in them and how many prompt tokens ride along.

What a pass leaves over of its prompts makes a Markov chain; nothing in it depends on time.

    b, C       slots of the group, tokens a pass
    L          prompt tokens left over by the passes before: of a prompt that was cut, and of slots without room so far
    w(L)       slots that wait for them
    k          prompts that are new in a pass: each of the other b - w slots starts one with probability 1/mu (renewal)
    n          rows that decode: b - w - k
    next L     what is left of L and the k new prompts after C - n tokens of them

w(L) is an expectation: one prompt is cut, and of a queue of L tokens before a server that is always busy L / E[I] more
wait, or fewer where few slots are left to ask. The prompts completed a pass are those of
a simulation of single requests to 0.2 % in the median and 2 % at the 95th percentile, over random laws, slots and
budgets (tests/policies/test_chunked.py).
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from exeplan.arrays import Floats
from exeplan.workload.length_law import LengthLaw, added_up

_LEVELS = 32
"""Values of L."""
_POINTS = 9
"""Values of a prompt's length, and of the sum of several."""
_PARTLY_FULL = 8
"""Kinds of passes with prompt tokens and room for more."""
SPREAD = np.sqrt(1.5) * np.array([-1.0, 0.0, 1.0])
"""Points with mean 0 and variance 1, of equal weight."""
_RESTART = 1e-9
"""Probability with which the chain restarts, so that it has one steady state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPasses:
    """Arrays over kinds of passes: the first without prompts, the last full, between them prompt tokens rise."""

    probability: Floats
    rows: Floats
    """Rows that decode."""
    prompt_tokens: Floats
    num_prompts: Floats
    """Prompts of which the pass computes something."""
    completed: float
    """Prompts completed a pass."""
    left_over: float
    """Probability that prompt tokens are left over."""
    waiting_std: float
    """Standard deviation of w."""
    crowded_rows: float
    """Rows that decode in a pass that finds prompt tokens left over."""
    fresh_rows: float
    """Rows that decode in a pass that finds none."""
    fresh_tokens: float
    """Its new prompt tokens."""


@lru_cache(maxsize=4096)
def chunk_passes(prompts: LengthLaw, steps: float, slots: float, budget: float) -> ChunkPasses:
    """The steady state where requests occupy a slot for `steps` passes from the one that completes their prompt.

    `slots` may be the mean over groups, and no whole number. Remembered, as it is the same on every placement.
    """
    slots = min(slots, _enough(prompts, steps, budget))
    lengths = prompts.slice_means(_POINTS)
    levels = _levels(lengths, prompts, steps, slots, budget)
    waiting = _waiting(levels, prompts.mean, steps, slots, budget)
    new, chance = binomials(slots - waiting, 1 / steps)
    # The sum of k prompts spreads like one prompt times sqrt(k).
    sums = np.maximum(new[:, None] * prompts.mean + np.sqrt(new)[:, None] * (lengths - prompts.mean), new[:, None])
    rows = np.maximum((slots - waiting)[:, None] - new, 0.0)
    wanted = levels[:, None, None] + sums
    taken = np.minimum(wanted, np.maximum(budget - rows, 0.0)[:, :, None])
    moves = np.repeat(chance[:, :, None] / _POINTS, _POINTS, axis=2)
    level_chance = stationary(levels, wanted - taken, moves)
    kinds = _kinds(level_chance[:, None, None] * moves, rows, taken, waiting[:, None] + new, budget, prompts.mean)
    mean_waiting = float(level_chance @ waiting)
    return ChunkPasses(
        probability=kinds[0],
        rows=kinds[1],
        prompt_tokens=kinds[2],
        num_prompts=kinds[3],
        completed=float(level_chance @ chance @ new),
        left_over=float(level_chance[1:].sum()),
        waiting_std=float(np.sqrt(level_chance @ (waiting - mean_waiting) ** 2)),
        crowded_rows=_crowded_rows(level_chance, (slots - waiting) * (1 - 1 / steps)),
        fresh_rows=slots * (1 - 1 / steps),
        fresh_tokens=slots / steps * prompts.mean,
    )


def _crowded_rows(level_chance: Floats, rows: Floats) -> float:
    crowded = float(level_chance[1:].sum())
    return float(level_chance[1:] @ rows[1:]) / crowded if crowded > 1e-9 else float(rows[0])


def _full_rate(mean: float, steps: float, budget: float) -> float:
    """Requests a pass where every pass is full."""
    return budget / (mean + steps - 1)


def _enough(prompts: LengthLaw, steps: float, budget: float) -> float:
    """Slots beyond which every pass is full: five standard deviations of w above what full passes occupy."""
    return _full_rate(prompts.mean, steps, budget) * steps + 5 * _waiting_std(prompts, steps, budget) + 2


@lru_cache(maxsize=4096)  # Asked for with every point of a search.
def most_resident(prompts: LengthLaw, steps: float, budget: float) -> int:
    """Slots that a pass may find taken where every pass is full; of prompts that cannot be cut one at least enters."""
    taken = max(_full_rate(prompts.mean, steps, budget), 1.0) * steps
    return math.ceil(taken + 5 * _waiting_std(prompts, steps, budget) + 2)


def _waiting_std(prompts: LengthLaw, steps: float, budget: float) -> float:
    """Of w around its mean where all passes are full: arrivals spread it, rows that become fewer draw it back."""
    decodes = _full_rate(prompts.mean, steps, budget) * (steps - 1)
    square = prompts.std**2 + prompts.mean**2
    return float(np.sqrt(decodes * square / prompts.mean / (2 * (prompts.mean + steps - 1))))


def _levels(lengths: Floats, prompts: LengthLaw, steps: float, slots: float, budget: float) -> Floats:
    """Values of L, denser towards 0."""
    mean_waiting = max(slots - _full_rate(prompts.mean, steps, budget) * steps, 0.0)
    most = (mean_waiting + 4 * _waiting_std(prompts, steps, budget)) * prompts.mean + 3 * lengths[-1]
    # w(L) leaves a chance for a new prompt even where all slots would wait.
    return np.asarray(min((slots + 1) * lengths[-1], most) * np.linspace(0, 1, _LEVELS) ** 2)


def _waiting(levels: Floats, mean: float, steps: float, slots: float, budget: float) -> Floats:
    """w(L)."""
    rate = min(slots / steps, _full_rate(mean, steps, budget))
    # Prompt tokens that one slot asks for while the server, always busy, computes one.
    asked = mean / steps / max(budget - rate * (steps - 1), 1.0) * levels / mean
    some = np.minimum(1 + levels / mean, (1 + slots * asked) / (1 + asked))
    return np.where(levels > 0, np.minimum(some, slots), 0.0)


def binomials(trials: Floats, chance: float) -> tuple[Floats, Floats]:
    """Values k and their probabilities under Binomial(trials[i], chance), [trials, values].

    Between two whole numbers of trials, the mixture of both that has the right mean.
    """
    mean = trials.max() * chance
    k = np.arange(min(np.ceil(trials.max()), np.ceil(mean + 6 * np.sqrt(mean) + 3)) + 1)
    low = np.floor(trials + 1e-9)
    share = np.maximum(trials - low, 0.0)[:, None]
    table = (1 - share) * _binomial(low, chance, k) + share * _binomial(low + 1, chance, k)
    return k, table / table.sum(axis=1, keepdims=True)


def _binomial(trials: Floats, chance: float, k: Floats) -> Floats:
    if chance >= 1.0:
        return np.asarray(np.minimum(trials, k[-1])[:, None] == k, dtype=float)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, trials.max() + 1)))])
    n, rest = trials.astype(int), trials[:, None] - k
    log_choose = log_factorial[n][:, None] - log_factorial[k.astype(int).clip(max=n.max())]
    log_choose = log_choose - log_factorial[np.maximum(rest, 0).astype(int)]
    log_chance = log_choose + k * np.log(chance) + rest * np.log1p(-chance)
    return np.where(rest >= 0, np.exp(np.minimum(log_chance, 0.0)), 0.0)


def stationary(levels: Floats, following: Floats, moves: Floats) -> Floats:
    """Steady probabilities of the levels; a move that ends between two of them goes to both, its mean kept."""
    count = len(levels)
    if levels[-1] <= 0:
        return np.eye(count)[0]
    ends = np.minimum(following, levels[-1]).ravel()
    right = np.searchsorted(levels, ends).clip(1, count - 1)
    up = (ends - levels[right - 1]) / (levels[right] - levels[right - 1])
    start = np.repeat(np.arange(count) * count, moves[0].size)
    weights = moves.ravel()
    flat = added_up(start + right, up * weights, minlength=count**2)
    flat += added_up(start + right - 1, (1 - up) * weights, minlength=count**2)
    matrix = (1 - _RESTART) * flat.reshape(count, count).T
    matrix[0] += _RESTART
    balance = matrix - np.eye(count)
    balance[-1] = 1.0
    return np.maximum(np.linalg.solve(balance, np.eye(count)[-1]), 0.0)


def _kinds(
    chance: Floats, rows: Floats, taken: Floats, prompts: Floats, budget: float, mean: float
) -> tuple[Floats, Floats, Floats, Floats]:
    """Probability, and means of decode rows, prompt tokens and prompts, of every kind of pass."""
    full = (taken > 0) & (taken >= (budget - rows)[:, :, None] - 1e-9)
    some = (taken > 0) & ~full
    weight = chance * some
    total = max(float(weight.sum()), 1e-300)
    middle = float((weight * taken).sum()) / total
    width = max(float(np.sqrt((weight * (taken - middle) ** 2).sum() / total)), 1e-9) * 5 / _PARTLY_FULL
    between = np.floor((taken - middle) / width + _PARTLY_FULL / 2).clip(0, _PARTLY_FULL - 1) + 1
    kind = np.where(full, _PARTLY_FULL + 1, np.where(some, between, 0)).astype(int).ravel()
    # A full pass cuts a prompt at its end, and others still wait.
    present = np.where(full, np.minimum(prompts[:, :, None], 1 + taken / mean), prompts[:, :, None])
    sums = [
        added_up(kind, (chance * values).ravel(), minlength=_PARTLY_FULL + 2)
        for values in (np.ones_like(taken), np.broadcast_to(rows[:, :, None], taken.shape), taken, present)
    ]
    average = [float(total.sum()) for total in sums]
    probability = sums[0]
    # What never happens is irrelevant, but must be finite.
    means = [
        np.where(probability > 1e-12, total / np.maximum(probability, 1e-300), mean_of_all)
        for total, mean_of_all in zip(sums[1:], average[1:], strict=True)
    ]
    means[1][0] = means[2][0] = 0.0
    return probability / probability.sum(), means[0], means[1], means[2]
