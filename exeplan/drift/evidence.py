"""Evidence: whether two laws of lengths differ by more than chance, how far a tail may be from its sample, and whether
requests come faster than planned.

    G(t)       n kl(p, r) + m kl(q, r): twice of it is the likelihood ratio that the shares p of n and q of m requests
               longer than t have one value r; kl is the Kullback-Leibler divergence of two coins
    Chernoff   Pr(n kl(p, r) >= x and p > r) <= exp(-x), for any n; it needs no normal law, so it holds in the far tail

The largest G over some lengths t, shared equally between them (union bound), is the evidence. Lengths of successive
requests are not independent (a client repeats similar requests), so the number of requests is divided by the ratio of
the variance of block means to that of shuffled requests; by successive differences (von Neumann), because a law that
moves slowly must not look like dependence.

Not here: what a change does to a plan (`watch.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from exeplan.arrays import Floats
from exeplan.workload.length_law import Ints, LengthLaw
from exeplan.workload.workload import Workload

LEVELS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
"""Shares at whose quantiles two laws are compared: of inputs, of outputs."""
_LEVELS = np.array(LEVELS)
_NUM_BLOCKS, _LEAST_BLOCK = 20, 8
_CERTAIN = 1e5
"""Most requests that a law counts as known from: an event that it has never had may still happen once."""


def divergence(p: Floats | float, r: Floats | float) -> Floats:
    """kl(p, r) of coins that fall with these chances, elementwise."""
    p, r = np.asarray(p, dtype=float), np.asarray(r, dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        heads = np.where(p > 0, p * np.log(p / r), 0.0)
        tails = np.where(p < 1, (1 - p) * np.log((1 - p) / (1 - r)), 0.0)
    return np.maximum(heads + tails, 0.0)


@dataclass(frozen=True, eq=False, slots=True)
class Sides:
    """The laws of inputs and of outputs, and the number of independent requests behind them."""

    input_law: LengthLaw
    output_law: LengthLaw
    size: float
    """Of the inputs, and of the outputs where the next two are None."""
    lengths: Ints | None = None
    """Rising; `sizes` are the numbers of requests behind the share of longer outputs, where some requests still run."""
    sizes: Floats | None = None

    def output_sizes(self, lengths: Ints) -> Floats:
        """The number of requests behind the share of outputs longer than each length."""
        if self.lengths is None or self.sizes is None:
            return np.full(len(lengths), min(self.size, _CERTAIN))
        sizes = np.concatenate([[self.size], self.sizes])
        return np.asarray(sizes[np.searchsorted(self.lengths, lengths, side="right")])


@dataclass(frozen=True, eq=False, slots=True)
class Known:
    """A law, and the number of independent requests behind it as in `Sides`; infinite for a law that is certain."""

    workload: Workload
    size: float
    lengths: Ints | None = None
    sizes: Floats | None = None

    @property
    def sides(self) -> Sides:
        return Sides(self.workload.input_law, self.workload.output_law, self.size, self.lengths, self.sizes)


def evidence(one: Known | Sides, other: Known | Sides, *, false_alarm: float) -> float:
    """The distance of two laws over what chance alone exceeds with at most the probability `false_alarm`."""
    both = [known.sides if isinstance(known, Known) else known for known in (one, other)]
    inputs = _lengths([known.input_law for known in both])
    outputs = _lengths([known.output_law for known in both])
    p, q = (np.concatenate([above(k.input_law, inputs), above(k.output_law, outputs)]) for k in both)
    n, m = (np.concatenate([np.full(len(inputs), min(k.size, _CERTAIN)), k.output_sizes(outputs)]) for k in both)
    return _most(p, q, n, m) / math.log(2 * 2 * len(LEVELS) / false_alarm)


def _lengths(laws: Sequence[LengthLaw]) -> Ints:
    return np.unique(np.concatenate([law.quantiles(_LEVELS) for law in laws]))


def _most(p: Floats, q: Floats, n: Floats, m: Floats) -> float:
    """The largest G of shares p of n and q of m requests."""
    both = (n > 0) & (m > 0)
    p, q, n, m = p[both], q[both], n[both], m[both]
    pooled = np.clip((n * p + m * q) / (n + m), np.minimum(p, q), np.maximum(p, q))
    return float(np.max(n * divergence(p, pooled) + m * divergence(q, pooled), initial=0.0))


def above(law: LengthLaw, lengths: Ints) -> Floats:
    """The share of requests longer than each length."""
    cdf = np.concatenate([[0.0], law.cdf])
    return np.asarray(1.0 - cdf[np.searchsorted(law.tokens, lengths, side="right")])


def tail_within(share: float, *, size: float, confidence: float) -> float:
    """The share of a sample that may lie beyond a length so that, with this confidence, at most `share` of all do.

    0 where the sample is too small to know a length that only this share exceeds: then only its longest is left.
    """
    needed = math.log(1 / (1 - confidence)) / size
    if float(divergence(0.0, share)) <= needed:
        return 0.0
    low, high = 0.0, share
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if float(divergence(middle, share)) > needed else (low, middle)
    return low


def come_faster(starts: Floats, rate: float, *, false_alarm: float) -> bool:
    """Whether requests that start at these rising times come faster than `rate` by more than chance explains.

    Their number varies as sums of successive gaps do, at least as in a Poisson stream: bursts that are shorter than
    such a sum are chance. The deviations are Chernoff's for a normal law. False for too few requests.
    """
    gaps = np.diff(starts)
    size = len(gaps) // _NUM_BLOCKS
    if size < _LEAST_BLOCK or starts[-1] <= starts[0]:
        return False
    sums = gaps[len(gaps) - size * _NUM_BLOCKS :].reshape(_NUM_BLOCKS, size).sum(axis=1)
    dispersion = max(1.0, size * float(sums.var(ddof=1)) / max(float(sums.mean()), 1e-9) ** 2)
    chance = math.sqrt(2 * math.log(1 / false_alarm) * dispersion * len(gaps))
    return bool(len(gaps) - chance > rate * (starts[-1] - starts[0]))


def dependence(values: Ints) -> float | None:
    """The variance of block means over that of independent requests; values in the order of their start.

    1 where it is not larger; None for too few values. By ranks, so that a single huge request does not matter.
    """
    size = len(values) // _NUM_BLOCKS
    if size < _LEAST_BLOCK:
        return None
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - counts / 2)[inverse]
    variance = float(ranks.var())
    if variance == 0.0:
        return 1.0
    means = ranks[len(ranks) - size * _NUM_BLOCKS :].reshape(_NUM_BLOCKS, size).mean(axis=1)
    # By the median, over that of a squared normal: a single jump is no dependence.
    between = float(np.median(np.square(np.diff(means)))) / 2 / 0.4549
    return max(1.0, between * size / variance)
