"""Where a rising quantity crosses its limit, in fewer trials than halving takes where it is nearly a line.

Positions are whole numbers. The next trial is where a line between the values on both sides crosses; after two trials
that have not halved the interval it is its middle, so that no crossing takes more than three times as long as halving.
"""

import math
from collections.abc import Callable

_PATIENCE = 2
"""Trials by interpolation that may fail to halve the interval."""


class Interval:
    """Two positions with the crossing between them: at `good` the excess is not above 0, at `bad` it is."""

    def __init__(self, good: int, excess_good: float, bad: int, excess_bad: float = math.inf) -> None:
        """An infinite excess is that of a position that was not tried."""
        self.good, self.bad = good, bad
        self._low, self._high = (good, excess_good), (bad, excess_bad)
        """Two points of the line to follow: where `bad` was not tried, the last two good ones."""
        self._last_good: bool | None = None
        self._width, self._trials = abs(bad - good), 0

    @property
    def closed(self) -> bool:
        """No position is left between them."""
        return abs(self.bad - self.good) <= 1

    def middle(self) -> int:
        """The next position to try, strictly between them."""
        (one, low), (other, high) = self._low, self._high
        if self._trials >= _PATIENCE or not math.isfinite(high - low) or high == low:
            return (self.good + self.bad) // 2
        # Just beyond the crossing: where that breaks the limit, one trial more closes the interval.
        crossing = one - low * (other - one) / (high - low)
        step = math.ceil(abs(crossing - self.good)) if (crossing > self.good) == (self.bad > self.good) else 1
        step = min(max(step, 1), abs(self.bad - self.good) - 1)
        return self.good + step * (1 if self.bad > self.good else -1)

    def tell(self, position: int, excess: float) -> None:
        """What a trial between them found."""
        good = excess <= 0
        bad_was_tried = self._high[0] == self.bad and math.isfinite(self._high[1])
        # An end that stays counts for half (the Illinois method): else a bent line would draw all trials to the other.
        weight = 0.5 if good == self._last_good else 1.0
        before = self._low if self._low[0] == self.good else self._high
        if good and bad_was_tried:
            self._low, self._high = (position, excess), (self.bad, weight * self._high[1])
        elif good:
            self._low, self._high = before, (position, excess)
        else:
            self._low, self._high = (self.good, weight * before[1]), (position, excess)
        self.good, self.bad = (position, self.bad) if good else (self.good, position)
        self._last_good = good
        self._trials += 1
        if 2 * abs(self.bad - self.good) <= self._width or self._trials > _PATIENCE:
            self._width, self._trials = abs(self.bad - self.good), 0


def last_within(excess: Callable[[int], float], start: int, end: int) -> int:
    """The position farthest from `start`, where the excess is not above 0, towards `end` where that still holds."""
    if start == end or (beyond := excess(end)) <= 0:
        return end
    interval = Interval(start, excess(start), end, beyond)
    while not interval.closed:
        at = interval.middle()
        interval.tell(at, excess(at))
    return interval.good
