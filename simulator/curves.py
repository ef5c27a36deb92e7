"""Curves and surfaces: times between measured points.

Linear between points, so that an estimate never leaves the values of its measured neighbours; beyond the last point the
slope of the last octave goes on. Two close points would say little about it: 2 % of noise in each of two that are a
quarter apart are 10 % of the time of a pass ten times as large.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from statistics import median

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.profile import Measurement
from exeplan.workload.length_law import Ints

_FAR = 1e15
"""Beyond any number of tokens, sequences or bytes."""


@dataclass(frozen=True)
class Curve:
    """Seconds over one axis; linear between points, the slope of the last octave beyond them, never below zero."""

    x: Floats
    seconds: Floats

    def __call__(self, at: Floats | float) -> Floats:
        return np.asarray(np.interp(at, *self._with_last_slope))

    def at(self, x: float) -> float:
        """The value at one number, without numpy's overhead."""
        xs, seconds = self._lists
        i = bisect_right(xs, x)
        if 0 < i < len(xs):
            low, before = xs[i - 1], seconds[i - 1]
            return before + (seconds[i] - before) * (x - low) / (xs[i] - low)
        i = min(max(i, 1), len(xs) - 1)
        if x <= xs[0] or len(xs) == 1:
            return seconds[0]
        value = seconds[i - 1] + (seconds[i] - seconds[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])
        return value if x <= xs[-1] else seconds[-1] + self.last_slope * (x - xs[-1])

    def one(self, x: float) -> float:
        """What a call gives for one number, to the last digit, without numpy's overhead."""
        xs, seconds = self._lists_with_last_slope
        i = bisect_right(xs, x)
        if not 0 < i < len(xs):
            return seconds[max(i - 1, 0)]
        return (seconds[i] - seconds[i - 1]) / (xs[i] - xs[i - 1]) * (x - xs[i - 1]) + seconds[i - 1]

    @cached_property
    def _lists_with_last_slope(self) -> tuple[list[float], list[float]]:
        x, seconds = self._with_last_slope
        return x.tolist(), seconds.tolist()

    @cached_property
    def _with_last_slope(self) -> tuple[Floats, Floats]:
        """The points and one beyond any number asked for, so that a call is a single np.interp."""
        if len(self.x) == 1:
            return self.x, self.seconds
        end = self.seconds[-1] + self.last_slope * (_FAR - self.x[-1])
        return np.append(self.x, _FAR), np.append(self.seconds, end)

    @cached_property
    def _lists(self) -> tuple[list[float], list[float]]:
        return self.x.tolist(), self.seconds.tolist()

    @cached_property
    def last_slope(self) -> float:
        """Seconds per unit beyond the last point: from the last measured one at half of it or below."""
        half = max(int(self.x.searchsorted(self.x[-1] / 2, side="right")) - 1, 0)
        return max(0.0, float((self.seconds[-1] - self.seconds[half]) / (self.x[-1] - self.x[half])))


@dataclass(frozen=True)
class Surface:
    """Seconds over (num_seqs, tokens a sequence): one curve over tokens for each measured num_seqs, linear between.

    Below one sequence and beyond the largest measured number the time is proportional to the number of sequences.
    """

    num_seqs: Floats
    curves: tuple[Curve, ...]

    def __call__(self, num_seqs: Floats | float, tokens: Floats | float) -> Floats:
        n, tokens = np.asarray(num_seqs, dtype=float), np.asarray(tokens, dtype=float)
        x, table = self._table
        right = np.minimum(np.maximum(x.searchsorted(tokens), 1), len(x) - 1)
        before = x.take(right - 1)
        share = np.maximum((tokens - before) / (x.take(right) - before), 0.0)
        clipped, low, high, weight = self._neighbours(n)
        below, above = low * len(x) + right, high * len(x) + right
        lower, upper = table.take(below - 1), table.take(above - 1)
        lower = lower + share * (table.take(below) - lower)
        upper = upper + share * (table.take(above) - upper)
        return np.asarray((lower + weight * (upper - lower)) * n / np.maximum(clipped, 1e-12))

    def at_num_seqs(self, num_seqs: int) -> "Curve":
        """The curve over tokens a sequence at one number of sequences; exact, as it has the points of all curves."""
        x, _ = self._table
        return Curve(x, self(float(num_seqs), x))

    def blend(self, num_seqs: Floats, heights: Floats) -> Floats:
        """Interpolates over num_seqs the values that each curve gives: `heights` has one for each curve."""
        clipped, low, high, weight = self._neighbours(num_seqs)
        between = heights[low] + weight * (heights[high] - heights[low])
        return np.asarray(between * num_seqs / np.maximum(clipped, 1e-12))

    def _neighbours(self, n: Floats) -> tuple[Floats, Ints, Ints, Floats]:
        """n within the measured range, the curves on both sides of it, and the weight of the upper one."""
        clipped = np.minimum(np.maximum(n, self.num_seqs[0]), self.num_seqs[-1])
        high = np.maximum(self.num_seqs.searchsorted(clipped), min(1, len(self.curves) - 1))
        low = np.maximum(high - 1, 0)
        below = self.num_seqs.take(low)
        return clipped, low, high, (clipped - below) / np.maximum(self.num_seqs.take(high) - below, 1e-12)

    @cached_property
    def _table(self) -> tuple[Floats, Floats]:
        """Tokens at which any curve has a point and one beyond the last, and every curve's seconds there, [curves,
        tokens]."""
        x = np.unique(np.concatenate([curve.x for curve in self.curves]))
        x = np.append(x, x[-1] * 2)
        return x, np.stack([curve(x) for curve in self.curves])


def curve_of(rows: Iterable[Measurement], axis: str) -> Curve:
    """The medians of the rows along one axis."""
    points: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        points[getattr(row, axis)].append(row.seconds)
    x = sorted(points)
    return Curve(np.array(x, dtype=float), np.array([median(points[at]) for at in x]))


def surface_of(rows: Iterable[Measurement], axis: str) -> Surface:
    """Rows of one operation over num_seqs and `axis`, which counts the tokens of all sequences."""
    by_seqs: dict[int, dict[float, float]] = defaultdict(dict)
    for row in rows:
        by_seqs[row.num_seqs][getattr(row, axis) / row.num_seqs] = row.seconds
    curves = []
    for num_seqs in sorted(by_seqs):
        points = sorted(by_seqs[num_seqs].items())
        curves.append(Curve(np.array([p[0] for p in points]), np.array([p[1] for p in points])))
    return Surface(np.array(sorted(by_seqs), dtype=float), tuple(curves))
