"""reach() finds the last point of a line within the limits, or that the line cannot win, in few trials."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exeplan.policies.interface import Knob
from exeplan.search.grid import Grid, Limits, Outcome
from exeplan.search.line import reach


def line(throughput: list[float], latency: list[float], *, bound: float, first: int = 0) -> Grid:
    knob = Knob("k", tuple(range(len(throughput))), first=first)
    return Grid((knob,), lambda at: Outcome(throughput[at["k"]], latency[at["k"]], 0.0), Limits(bound, 1.0))


@st.composite
def rising(draw: st.DrawFn) -> tuple[list[float], list[float]]:
    """Throughput and latency in small whole steps, so that there are ties."""
    size = draw(st.integers(1, 60))
    steps = np.random.default_rng(draw(st.integers(0, 2**32 - 1))).integers(0, 3, size=(2, size))
    throughput, latency = np.cumsum(steps, axis=1).astype(float) + 1.0
    return throughput.tolist(), latency.tolist()


@settings(max_examples=300, deadline=None)
@given(rising(), st.floats(0, 80), st.floats(0, 80), st.floats(0, 1))
def test_it_is_the_most_within_the_limits_or_nothing(
    values: tuple[list[float], list[float]], bound: float, at_least: float, where: float
) -> None:
    throughput, latency = values
    grid = line(throughput, latency, bound=bound)
    found = reach(grid, (int(where * grid.top[0]),), at_least=at_least, slack=0.0)
    most = max((t for t, seconds in zip(throughput, latency, strict=True) if seconds <= bound), default=0.0)
    assert found == (most if most >= at_least else 0.0)
    assert len(grid.tried) <= 3 * math.ceil(math.log2(len(throughput) + 1)) + 2


@pytest.mark.parametrize("start", [0, 40, 99])
def test_a_line_that_cannot_win_costs_two_trials(start: int) -> None:
    slow = line([1.0 + k for k in range(100)], [1.0] * 100, bound=2.0)
    assert reach(slow, (start,), at_least=200.0, slack=0.02) == 0.0
    assert len(slow.tried) <= 2
    late = line([1.0 + k for k in range(100)], [3.0] * 100, bound=2.0)
    assert reach(late, (start,), at_least=200.0, slack=0.02) == 0.0
    assert len(late.tried) == 1


def test_a_line_that_misses_by_the_slack_still_counts() -> None:
    grid = line([10.0, 99.0, 120.0], [1.0, 1.0, 3.0], bound=2.0)
    assert reach(grid, (0,), at_least=100.0, slack=0.02) == 99.0


def smooth(size: int, share: float, power: float) -> Grid:
    """A line whose load is a tenth at first and then rises like a power; it breaks the bound near a share of it."""
    knob, bound = Knob("k", tuple(range(1, size + 1))), (share * size) ** power
    return Grid((knob,), lambda at: Outcome(float(at["k"]), 0.1 * bound + at["k"] ** power, 0.0), Limits(bound, 1.0))


def test_smooth_lines_take_far_fewer_trials_than_halving() -> None:
    trials, halvings = 0, 0.0
    for size in (100, 3000, 100_000):
        for share in (0.02, 0.2, 0.7, 0.95):
            for power in (0.7, 1.0, 1.3):
                grid = smooth(size, share, power)
                most = reach(grid, (size // 2,), at_least=1.0, slack=0.0)
                fitting = [k for k in range(1, size + 1) if 0.1 * grid.limits.bound + k**power <= grid.limits.bound]
                assert most == (float(fitting[-1]) if fitting else 0.0)
                trials, halvings = trials + len(grid.tried), halvings + math.log2(size)
    assert trials < halvings / 2


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 60), st.floats(0.1, 300), st.floats(0.0, 60), st.floats(0.0, 1.5))
def test_below_the_first_value_limits_are_looked_for_by_halves(
    first: int, wait: float, slope: float, part: float
) -> None:
    """Latency is a line and a wait that falls with the value: convex, with its least below the first value or above."""
    rows = np.arange(1, 100)
    latency = 100 + slope * rows + wait / rows
    grid = line(rows.tolist(), latency.tolist(), bound=part * float(latency[first]), first=first)
    assert grid.bottom == (first,)
    moved = grid.lower()
    assert moved is (grid.bottom < (first,))
    if part >= 1:
        assert not moved
    if moved:
        assert latency[grid.bottom[0]] < latency[first]
    halves = [first >> n for n in range(first.bit_length() + 1)]
    falling = [n for n, value in enumerate(halves) if n and (np.diff(latency[halves[: n + 1]]) < 0).all()]
    if any(grid.limits.bound >= latency[halves[n]] for n in falling):
        assert grid.fits(grid.bottom)
