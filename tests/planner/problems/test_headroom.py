"""Headroom is the last step that keeps the bounds, whatever the shape of what fills them."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exeplan.core.bounds import Bound
from exeplan.core.models.model import load_model_spec
from exeplan.core.profile import Profile
from exeplan.core.schedule import Schedule
from exeplan.planner.choice.optimize import optimize
from exeplan.planner.problems.headroom import _LIMIT, _STEPS, _headroom, drift_headroom, with_headroom
from exeplan.planner.problems.problem import make_problem
from exeplan.planner.problems.replays import kv_cache_tokens, replay_estimate
from exeplan.planner.reports.report import promise_report
from exeplan.profiler.datasheets.datasheet import load_datasheet, profile_from_datasheet
from exeplan.simulator.closed_form import steady_state
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


ORCA = Schedule("orca", {"max_num_seqs": 46})
CHUNKED = Schedule("chunked", {"max_num_seqs": 53, "max_num_batched_tokens": 512})
"""The largest batches that the memory of an A40 holds, of requests as below."""


@pytest.mark.parametrize(("schedule", "most"), [(ORCA, 1.3), (CHUNKED, 1.05)], ids=str)
def test_slots_that_the_cache_does_not_hold_with_longer_outputs_are_no_drift_headroom(
    schedule: Schedule, most: float
) -> None:
    """Where it ends the wait is steep: by replay `orca` has 38.5 s there, 29.3 s by closed form, and `chunked` 31.3."""
    profile = profile_from_datasheet(load_model_spec("opt-13b"), load_datasheet("a40-48gb"), dtype="float16")
    backlog = make_problem(profile, load_workload("normal:in=256,50,400;out=128,30,256"), Bound(seconds=30.0))
    capacity = steady_state(schedule, backlog.workload, backlog.cost).throughput
    problem = replace(backlog, arrivals=Arrivals(rate=0.7 * capacity))
    tokens = kv_cache_tokens(problem, schedule)

    def latency(rise: float) -> float:
        longer = replace(problem, workload=problem.workload.scale(1 + rise))
        return replay_estimate(longer, schedule, seed=0, kv_tokens=tokens)[1].latency

    def with_all_slots(rise: float) -> float:
        return replace(problem, workload=problem.workload.scale(1 + rise)).filled(schedule)

    found = drift_headroom(problem, schedule)
    assert found is not None
    assert 0 < found < (promised := _headroom(with_all_slots))
    assert latency(0.9 * found) <= 30.0
    assert latency(found) <= most * 30.0
    assert latency(found + 0.25 * (promised - found)) > 30.0
    assert latency(promised) > 2.5 * 30.0


def test_a_plan_with_a_smaller_cache_than_planned_has_less_drift_headroom(profile: Profile) -> None:
    asked = replace(
        make_problem(profile, load_workload("normal:in=40,10,80;out=12,5,24"), Bound(seconds=1.0), max_seqs=32),
        arrivals=Arrivals(rate=60.0),
    )
    plan = replace(optimize(asked, policies=("orca",)).plan, replay=None)
    schedule, planned = plan.schedule, plan.kv_cache_tokens
    assert planned is not None
    assert planned == kv_cache_tokens(asked, schedule)
    found = [with_headroom(replace(plan, kv_cache_tokens=tokens), [asked]) for tokens in (None, planned, planned // 3)]
    assert found[0].drift_headroom == found[1].drift_headroom == drift_headroom(asked, schedule)
    assert found[2].drift_headroom == drift_headroom(asked, schedule, kv_tokens=planned // 3)
    assert found[1].drift_headroom is not None
    assert found[2].drift_headroom is not None
    assert found[2].drift_headroom < found[1].drift_headroom
    assert found[2].rate_headroom == found[1].rate_headroom


def test_a_batch_within_a_cache_is_the_largest_that_it_holds(profile: Profile) -> None:
    """Requests of 40 tokens: three blocks each where they reserve them."""
    problem = make_problem(profile, load_workload("fixed:in=20;out=20"), Bound(seconds=1.0), max_seqs=16)
    orca = Schedule("orca", {"max_num_seqs": 8})
    assert problem.within_cache(orca, 8 * 48) == orca
    held = [problem.within_cache(orca, tokens) for tokens in (7 * 48, 3 * 48 + 47, 47)]
    assert [one and one["max_num_seqs"] for one in held] == [7, 3, None]
    chunked = replace(CHUNKED, variables={**CHUNKED.variables, "max_num_seqs": 8})
    tokens = steady_state(chunked, problem.workload, problem.cost).kv_tokens
    assert problem.within_cache(chunked, tokens) == chunked
    cut = problem.within_cache(chunked, np.nextafter(tokens, 0))
    assert cut is not None
    assert cut["max_num_seqs"] == 7
