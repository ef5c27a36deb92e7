"""Engines that fill their places at every prefill get as many places as the plan has requests after one."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from exeplan.core.bounds import Bound
from exeplan.export.shape import most_rows
from exeplan.planner.choice.optimize import optimize
from exeplan.planner.problems.problem import make_problem
from exeplan.simulator.replay import replay
from exeplan.workload.arrivals import Arrivals
from exeplan.workload.workload import Trace, Workload


def workload() -> Workload:
    rng = np.random.default_rng(3)
    inputs, outputs = rng.integers(8, 60, 6000), np.minimum(rng.gamma(2.0, 30.0, 6000).astype(int) + 1, 400)
    return Workload.of_trace("w", Trace(inputs, outputs))


@pytest.mark.parametrize("bound", [0.3, 0.6, 3.0])
def test_the_places_are_those_taken_after_a_prefill(profile, cost, bound):
    asked = workload()
    plan = optimize(make_problem(profile, asked, Bound(seconds=bound)), policies=("rra",)).plan
    trace = asked.trace
    run = replay(plan.schedule, cost, input_tokens=trace.inputs, output_tokens=trace.outputs, num_blocks=1_000_000)
    [group] = plan.groups
    assert most_rows(plan, group) == pytest.approx(np.mean(taken_after_prefills(run)), rel=0.05, abs=1.5)


@pytest.mark.parametrize("share", [0.6, 0.8])
def test_at_a_rate_bursts_find_places_too(profile, cost, share):
    """With those of the mean 6 and 15 % of the prefills would have found too few."""
    backlog = make_problem(profile, workload(), Bound(seconds=0.6))
    most = optimize(backlog, policies=("rra",)).plan.replay.throughput
    arrivals = Arrivals(rate=share * most)
    plan = optimize(replace(backlog, arrivals=arrivals), policies=("rra",)).plan
    inputs, outputs, times = arrivals.draw(backlog.workload, 6000, seed=5)
    run = replay(plan.schedule, cost, input_tokens=inputs, output_tokens=outputs, arrivals=times, num_blocks=1_000_000)
    [group] = plan.groups
    assert np.mean(taken_after_prefills(run) > most_rows(plan, group)) < 0.05


def taken_after_prefills(run):
    """Requests that decode after each prefill in the middle of a run."""
    passes = list(run.passes)[len(run.passes) // 4 : -len(run.passes) // 4]
    return np.array([later.num_decode for one, later in pairwise(passes) if one.num_prefill])
