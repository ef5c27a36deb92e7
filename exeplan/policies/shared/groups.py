"""Shared by orca and chunked: groups of slots run one after the other, each slot serves request after request."""

from functools import cache, lru_cache

import numpy as np

from exeplan.arrays import Floats
from exeplan.policies.shared.circulation import Seconds, circulate
from exeplan.workload.length_law import Ints
from exeplan.workload.workload import Workload

_SLICES, _ORDERS = 128, 4
"""Of the times of passes: slices of equal probability, and the orders in which they are drawn."""


def round_seconds(seconds: Floats, probability: Floats, groups: int) -> float:
    """Seconds in which every group has one pass, from times of passes [stages, kinds, equally likely points].

    Groups follow each other through the stages and none overtakes: a long pass holds up those that catch up with it,
    which fewer groups than stages seldom do. With draws t of the passes' times, pass n of m groups leaves stage s at

        C(n, s) = max(C(n, s - 1), C(n - 1, s)) + t(n, s), and enters the first one after C(n - m, S)

    a recursion in max and plus without a formula for its rate (Baccelli, Cohen, Olsder, Quadrat: Synchronization and
    Linearity, 1992, section 7.1). It runs over fixed draws with the law's mean on every stage.
    """
    if groups == 1:
        return float(probability @ seconds.sum(axis=0).mean(axis=1))
    if len(seconds) == 1:
        return groups * float(probability @ seconds[0].mean(axis=1))
    return groups / circulate(_drawn(seconds, probability), groups).rate


def _drawn(seconds: Floats, probability: Floats) -> Seconds:
    """Passes in random order: means of slices of equal probability, cut by the time on the slowest stage."""
    flat = seconds.reshape(len(seconds), -1)
    order = np.argsort(flat.max(axis=0), kind="stable")
    weights = np.repeat(probability / seconds.shape[2], seconds.shape[2])[order]
    below = np.concatenate([[0.0], np.cumsum(weights)])
    edges = np.linspace(0.0, below[-1], _SLICES + 1)
    mass = [np.interp(edges, below, np.concatenate([[0.0], np.cumsum(weights * row)])) for row in flat[:, order]]
    slices = np.diff(mass).T * (_SLICES / below[-1])
    drawn: Seconds = slices[_shuffled()].tolist()
    return drawn


@cache
def _shuffled() -> Ints:
    """The slices in several random orders, one after the other."""
    rng = np.random.default_rng(0)
    return np.concatenate([rng.permutation(_SLICES) for _ in range(_ORDERS)])


@lru_cache(maxsize=64)
def resident_tokens(workload: Workload) -> tuple[float, float]:
    """Mean and mean square of the tokens that one slot holds after an iteration; its ages are uniform over a life."""
    law = workload.decode_law()
    k = np.arange(1, len(law.survival) + 1)
    tokens = workload.mean_input + float(law.input_sum.sum() + (k * law.survival).sum())
    square = workload.input_law.std**2 + workload.mean_input**2
    square += float((law.input_square + 2 * k * law.input_sum + k**2 * law.survival).sum())
    return tokens / workload.mean_output, square / workload.mean_output
