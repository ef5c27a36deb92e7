"""Refinement goes where interpolation is worst, and reaches its target with few points."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from exeplan.profiler.measuring.adaptive import Gap, gaps, splittable


def refine(cost: Callable[[int], float], first: list[int], *, target: float, most: int = 100) -> dict[int, float]:
    """Adds the middle of the worst gap until none is left."""
    seconds = {x: cost(x) for x in first}
    while len(seconds) < most:
        found = splittable(gaps(seconds, seconds.__getitem__), target=target)
        if not found:
            break
        middle = found[0].middle
        assert middle is not None
        seconds[middle] = cost(middle)
    return seconds


def worst_error(cost: Callable[[int], float], seconds: dict[int, float]) -> float:
    x = np.arange(min(seconds), max(seconds) + 1)
    points = sorted(seconds)
    predicted = np.interp(x, points, [seconds[p] for p in points])
    true = np.array([cost(int(n)) for n in x])
    return float(np.max(np.abs(predicted - true) / true))


def flat_then_rising(tokens: int) -> float:
    """A weight-bound plateau that turns into a compute-bound slope, as matrix products do."""
    return 1.0 + max(0.0, tokens - 100) * 0.02


def quadratic(tokens: int) -> float:
    return 1.0 + (tokens / 100) ** 2


@pytest.mark.parametrize(
    ("cost", "most_points"),
    [(flat_then_rising, 16), (quadratic, 20), (lambda n: 1.0 + 0.01 * n, 7), (lambda n: math.sqrt(n), 16)],
)
def test_reaches_the_target_with_few_points(cost: Callable[[int], float], most_points: int) -> None:
    seconds = refine(cost, [1, 4, 16, 64, 256, 1024], target=0.03)
    assert worst_error(cost, seconds) < 0.06  # An estimate: it may be off by a factor of two.
    assert len(seconds) <= most_points


def test_a_straight_line_needs_no_more_points() -> None:
    assert splittable(gaps({1: 1.0, 5: 5.0, 9: 9.0, 100: 100.0}, lambda _: 1.0), target=0.001) == []


def test_the_bend_is_between_the_points_it_was_seen_from() -> None:
    seconds = {n: flat_then_rising(n) for n in (1, 50, 80, 200, 250, 300)}
    worst = gaps(seconds, seconds.__getitem__)[0]
    assert (worst.low, worst.high) == (80, 200)


def test_leaving_a_point_out_bounds_the_neighbouring_gaps() -> None:
    # c = 1 in x*x: at 10 the doubled gap misses by 10*10, and a gap of width 10 alone misses by 10*10/4 in its middle.
    first, second = sorted(gaps({0: 0.0, 10: 100.0, 20: 400.0}, lambda _: 1.0), key=lambda gap: gap.low)
    assert (first.error, second.error) == (25.0, 25.0)


def test_noise_is_not_curvature() -> None:
    seconds = {1: 1.0, 2: 1.02, 3: 1.0, 4: 1.02}
    assert gaps(seconds, seconds.__getitem__, lambda _: 0.02)[0].error == 0.0
    assert gaps(seconds, seconds.__getitem__)[0].error > 0.0


def test_of_two_places_nothing_is_known() -> None:
    assert gaps({1: 1.0, 100: 5.0}, lambda _: 1.0)[0].error == pytest.approx(1.0)


@pytest.mark.parametrize(("low", "high", "middle"), [(4, 64, 16), (100, 150, 125), (7, 9, 8), (7, 8, None), (1, 3, 2)])
def test_a_wide_gap_is_split_by_ratio_and_a_narrow_one_in_half(low: int, high: int, middle: int | None) -> None:
    assert Gap(1.0, low, high).middle == middle


def test_a_step_is_not_chased_forever() -> None:
    seconds = refine(lambda n: 1.0 if n < 300 else 2.0, [1, 16, 256, 1024], target=0.03)
    assert len(seconds) < 30
