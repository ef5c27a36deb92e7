"""Dynamic workload adjustment in a plan: schedules with it that may serve more than one without, within the bounds.

Source: ExeGPT (ASPLOS 2024) section 5.2. Adjusted prefills are of like work, so that the slowest of them takes less
time over the mean one. Where a percentile of the ttft is bounded under a backlog, which is what a prefill takes there,
a larger batch keeps the bound. Elsewhere best schedules gain nothing by it (`benchmarks/fidelity/adjusted_plans.py`),
and are not looked at. The closed form knows roughly what it changes: replays of both decide (`pipelines.py`).
"""

import math

import numpy as np

from exeplan.core.bounds import percentile
from exeplan.core.schedule import Schedule
from exeplan.planner.problem import Problem
from exeplan.policies import load_policy

PERCENT = 10
_LARGEST, _SIZES = 2.0, 10
"""Of the prefill batches that are looked at: the largest over the planned one, and how many sizes at most."""


def may_gain(problem: Problem, policy: str) -> bool:
    """Whether adjustment may help the policy keep a bound."""
    tails = [percentile(bound.metric) for bound in problem.bounds if math.isfinite(bound.seconds)]
    on_ttft = any(found is not None and found[0] == "ttft" for found in tails)
    return on_ttft and problem.arrivals is None and hasattr(load_policy(policy), "adjusted")


def adjusted_schedules(placed: Problem, schedule: Schedule) -> list[Schedule]:
    """Schedules on its placement like this one, adjusted, which by the closed form keep the bounds and serve as much or
    more: the one with the most throughput first."""
    policy, found = load_policy(schedule.policy), []
    batch, steps = schedule["prefill_batch"], schedule["decode_steps"]
    least = placed.evaluate(schedule).throughput
    for size in np.unique(np.geomspace(batch, _LARGEST * batch, _SIZES).round().astype(int)).tolist():
        for slower in dict.fromkeys((steps, max(round(steps * size / batch), 1))):
            variables = {**schedule.variables, "prefill_batch": size, "decode_steps": slower}
            one = policy.adjusted(Schedule(schedule.policy, variables, schedule.order), placed.workload, PERCENT)
            outcome = placed.evaluate(one)
            if outcome.throughput >= least and outcome.latency <= placed.limit and outcome.memory <= 1:
                found.append((outcome.throughput, one))
    return [one for _, one in sorted(found, key=lambda pair: -pair[0])]
