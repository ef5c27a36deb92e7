"""Headroom is the last step that keeps the bounds, whatever the shape of what fills them."""

import math
from collections.abc import Callable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from exeplan.core.bounds import Bound
from exeplan.core.profile import Profile
from exeplan.planner.choice.optimize import optimize
from exeplan.planner.problems.headroom import _LIMIT, _STEPS, _headroom
from exeplan.planner.problems.problem import make_problem
from exeplan.planner.reports.report import promise_report
from exeplan.workload.arrivals import Arrivals
from exeplan.workload.files import load_workload


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


def test_the_most_that_is_told_is_not_called_where_the_bounds_break(profile: Profile) -> None:
    law = load_workload("normal:in=40,10,80;out=12,5,24")
    asked = replace(make_problem(profile, law, Bound(seconds=10.0), max_seqs=8), arrivals=Arrivals(rate=0.5))
    plan = optimize(asked, policies=("orca",)).plan
    lines = promise_report(asked, replace(plan, rate_headroom=_LIMIT, drift_headroom=_LIMIT))
    assert any("the bounds hold at least until the rate is 400 % higher, by" in line for line in lines)
    assert "drift headroom: the bound holds at least until outputs are 400 % longer" in lines
    lines = promise_report(asked, replace(plan, rate_headroom=0.5, drift_headroom=0.5))
    assert any("the bounds hold until the rate is 50 % higher, by" in line for line in lines)
    assert "drift headroom: the bound holds until outputs are 50 % longer" in lines
