"""Engines that fill their places at every prefill get as many places as the plan has requests after one."""

from itertools import pairwise

import numpy as np
import pytest

from exeplan.core.bounds import Bound
from exeplan.export.shape import most_rows
from exeplan.planner.choice.optimize import optimize
from exeplan.planner.problems.problem import make_problem
from exeplan.simulator.replay import replay
from exeplan.workload.workload import Trace, Workload


@pytest.mark.parametrize("bound", [0.3, 0.6, 3.0])
def test_the_places_are_those_taken_after_a_prefill(profile, cost, bound):
    rng = np.random.default_rng(3)
    inputs, outputs = rng.integers(8, 60, 6000), np.minimum(rng.gamma(2.0, 30.0, 6000).astype(int) + 1, 400)
    problem = make_problem(profile, Workload.of_trace("w", Trace(inputs, outputs)), Bound(seconds=bound))
    plan = optimize(problem, policies=("rra",)).plan
    run = replay(plan.schedule, cost, input_tokens=inputs, output_tokens=outputs, num_blocks=1_000_000)
    passes = list(run.passes)[len(run.passes) // 4 : -len(run.passes) // 4]
    after = [later.num_decode for one, later in pairwise(passes) if one.num_prefill]
    [group] = plan.groups
    assert most_rows(plan, group) == pytest.approx(np.mean(after), rel=0.05, abs=1.5)
