"""Matrix products of any size from a table of measured ones.

A product of m rows, n outputs and k inputs takes some times its roofline, which is what it computes and moves at the
device's peaks. The logarithm of that excess is what is interpolated: linearly in log n and log k, between the four
measured neighbours, at every measured m. Beyond the table the excess of its border holds. Other ways of interpolating
between two sizes (time, achieved rate, logarithms of either) miss sizes that are left out by as much: kernels differ
from size to size by a few percent in no order. Arrays are [m, n, k]. Not here: interpolation in m, where the time has
steps; rows keep the measured m.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from exeplan.arrays import Floats

_ELEMENT_BYTES = 2
_SMALLEST = 1024
"""Sizes of n and k from which on the error is judged: a layer's own."""


@dataclass(frozen=True)
class Gemms:
    """Measured products; `excess` is the log of seconds over roofline seconds, NaN where there is no measurement."""

    m: Floats
    n: Floats
    k: Floats
    excess: Floats
    flops_per_second: float
    bytes_per_second: float

    def seconds(self, n: int, k: int) -> Floats:
        """At every measured m; NaN where the table has no neighbour at all."""
        return np.exp(_interpolated(self.excess, _place(self.n, n), _place(self.k, k))) * self._roofline(n, k)

    def measured(self, n: int, k: int) -> bool:
        """Whether the table has this very product at every m."""
        found = np.flatnonzero(self.n == n), np.flatnonzero(self.k == k)
        return all(map(len, found)) and bool(np.isfinite(self.excess[:, found[0][0], found[1][0]]).all())

    @cached_property
    def misses(self) -> Floats:
        """Relative errors at measured products when all of their n, and then all of their k, are left out.

        The gap is twice as wide then as those that are interpolated over, so these errors are too large rather than
        too small.
        """
        found = []
        for axis, sizes in ((1, self.n), (2, self.k)):
            large = np.flatnonzero(sizes >= _SMALLEST)
            other = np.flatnonzero((self.k if axis == 1 else self.n) >= _SMALLEST)
            table = np.moveaxis(self.excess, axis, 0)[:, :, other]
            for at in large[1:-1]:
                share = np.log(sizes[at] / sizes[at - 1]) / np.log(sizes[at + 1] / sizes[at - 1])
                guess = table[at - 1] + share * (table[at + 1] - table[at - 1])
                found.append(np.abs(np.expm1(guess - table[at])).ravel())
        errors = np.concatenate(found) if found else np.zeros(0)
        return errors[np.isfinite(errors)]

    def _roofline(self, n: int, k: int) -> Floats:
        return roofline_seconds(self.m, n, k, self.flops_per_second, self.bytes_per_second)


def roofline_seconds(m: Floats, n: Floats | int, k: Floats | int, flops: float, bandwidth: float) -> Floats:
    """The longer of computing and of moving inputs, weights and outputs once, both at peak."""
    moved = _ELEMENT_BYTES * (m * k + k * n + m * n)
    return np.maximum(2.0 * m * n * k / flops, moved / bandwidth)


def gemms(m: Floats, n: Floats, k: Floats, seconds: Floats, *, flops: float, bandwidth: float) -> Gemms:
    """The table of measured rows; the median of those with the same sizes."""
    axes = [np.unique(sizes) for sizes in (m, n, k)]
    cells = [np.searchsorted(axis, sizes) for axis, sizes in zip(axes, (m, n, k), strict=True)]
    flat = np.ravel_multi_index(cells, [len(axis) for axis in axes])
    log = np.log(seconds / roofline_seconds(m, n, k, flops, bandwidth))
    order = np.lexsort((log, flat))
    cell, starts, counts = np.unique(flat[order], return_index=True, return_counts=True)
    low, high = log[order][starts + (counts - 1) // 2], log[order][starts + counts // 2]
    excess = np.full([len(axis) for axis in axes], np.nan)
    excess.flat[cell] = (low + high) / 2
    return Gemms(axes[0], axes[1], axes[2], excess, flops, bandwidth)


def _place(sizes: Floats, at: int) -> tuple[tuple[int, float], tuple[int, float]]:
    """The two neighbours of a size and their shares, in its logarithm; the border twice beyond it."""
    right = int(np.clip(np.searchsorted(sizes, at), min(1, len(sizes) - 1), len(sizes) - 1))
    left = max(right - 1, 0)
    if left == right:
        return (left, 1.0), (right, 0.0)
    share = float(np.clip(np.log(at / sizes[left]) / np.log(sizes[right] / sizes[left]), 0.0, 1.0))
    return (left, 1.0 - share), (right, share)


def _interpolated(
    excess: Floats, along_n: tuple[tuple[int, float], ...], along_k: tuple[tuple[int, float], ...]
) -> Floats:
    """The mean of the corners that were measured, weighted by their shares."""
    total, weight = np.zeros(len(excess)), np.zeros(len(excess))
    for i, share_n in along_n:
        for j, share_k in along_k:
            corner = excess[:, i, j]
            here = np.where(np.isfinite(corner), share_n * share_k, 0.0)
            total += np.where(here > 0, here * np.nan_to_num(corner), 0.0)
            weight += here
    return np.divide(total, weight, out=np.full(len(excess), np.nan), where=weight > 0)
