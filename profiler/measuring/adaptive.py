"""Where to measure next: the gap whose interpolation error is likely the largest. Pure functions of measured points.

Leaving a measured point out and interpolating over the doubled gap shows how curved the function is there: for a
smooth function the error at a point between gaps g and h is c*g*h/2, and the largest error inside the gap h alone is
c*h*h/8. So the error left in a gap is estimated as h/(4*g) of the leave-one-out error at its end, and the worse of its
two ends counts. Errors smaller than the noise of the point are not curvature.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Gap:
    """Between two neighbouring measured places; `error` is the share of `scale` that interpolation may miss by."""

    error: float
    low: int
    high: int

    @property
    def middle(self) -> int | None:
        """Where to measure next; None when nothing lies between."""
        if self.high - self.low < 2:
            return None
        if self.high > 2 * self.low > 0:  # Wide in ratio: the geometric middle serves the small end too.
            return min(max(round((self.low * self.high) ** 0.5), self.low + 1), self.high - 1)
        return (self.low + self.high) // 2


def gaps(
    seconds: Mapping[int, float], scale: Callable[[int], float], noise: Callable[[int], float] = lambda _: 0.0
) -> list[Gap]:
    """The gaps between measured places, worst first.

    `scale(at)` are the seconds that an error there is a share of, `noise(at)` the seconds that its measurement may be
    off by. With only two places the error of their gap is unknown and taken as about 1.
    """
    x = sorted(seconds)
    missed = {at: max(0.0, abs(_left_out(seconds, a, at, b)) - 2 * noise(at)) for a, at, b in _triples(x)}
    found = []
    for index, (low, high) in enumerate(pairwise(x)):
        width, error = high - low, 0.0 if len(x) > 2 else scale(low)
        if low in missed:
            error = max(error, missed[low] * width / (4 * (low - x[index - 1])))
        if high in missed:
            error = max(error, missed[high] * width / (4 * (x[index + 2] - high)))
        found.append(Gap(error * 2 / (scale(low) + scale(high)), low, high))
    return sorted(found, key=lambda gap: -gap.error)


def splittable(found: list[Gap], *, target: float, ratio: float = 1.15) -> list[Gap]:
    """The gaps above the target error that are wide enough for another point, in the same order.

    The error at a step of the function does not shrink with its gap, so gaps narrower than `ratio` are left.
    """
    return [gap for gap in found if gap.error > target and gap.middle is not None and gap.high >= ratio * gap.low]


def _triples(x: list[int]) -> list[tuple[int, int, int]]:
    return list(zip(x, x[1:], x[2:], strict=False))


def _left_out(seconds: Mapping[int, float], low: int, at: int, high: int) -> float:
    """Seconds by which interpolating between `low` and `high` misses the point `at`."""
    share = (at - low) / (high - low)
    return seconds[low] + share * (seconds[high] - seconds[low]) - seconds[at]
