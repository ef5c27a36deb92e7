"""Headroom is the last step that keeps the bounds, whatever the shape of what fills them."""

import math
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from exeplan.planner.problems.headroom import _LIMIT, _STEPS, _headroom


def queue(capacity: float, alone: float) -> Callable[[float], float]:
    """A share of a bound as a wait in a queue makes it, infinite from the capacity on."""
    return lambda rise: alone / (1 - rise / capacity) if rise < capacity else math.inf


def line(alone: float, slope: float) -> Callable[[float], float]:
    return lambda rise: alone + slope * rise


def step(last: float) -> Callable[[float], float]:
    return lambda rise: 0.5 if rise <= last else math.inf


shapes = st.one_of(
    st.builds(queue, st.floats(0.01, 6.0), st.floats(0.0, 1.2)),
    st.builds(line, st.floats(0.0, 1.2), st.floats(0.0, 50.0)),
    st.builds(step, st.floats(-0.1, 5.0)),
)


@given(shapes)
def test_it_is_the_last_step_that_keeps_the_bounds(filled: Callable[[float], float]) -> None:
    kept = [number for number in range(1, _STEPS + 1) if filled(_LIMIT * number / _STEPS) <= 1]
    calls: list[float] = []

    def counted(rise: float) -> float:
        calls.append(rise)
        return filled(rise)

    assert _headroom(counted) == _LIMIT * max(kept, default=0) / _STEPS
    assert len(calls) <= 24


def test_a_queue_is_asked_about_few_times() -> None:
    calls: list[float] = []

    def filled(rise: float) -> float:
        calls.append(rise)
        return queue(0.62, 0.4)(rise)

    assert _headroom(filled) == _LIMIT * 95 / _STEPS
    assert len(calls) == 5  # 10 by halves.
