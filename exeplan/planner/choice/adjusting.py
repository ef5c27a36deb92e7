"""Dynamic workload adjustment in a plan: schedules with it that may serve more than one without, within the bounds.

Source: ExeGPT (ASPLOS 2024) section 5.2. Adjusted prefills are of like work, so that the slowest of them takes less
time over the mean one. Where a percentile of the ttft is bounded under a backlog, which is what a prefill takes there,
a larger batch keeps the bound. Elsewhere best schedules gain nothing by it (`benchmarks/fidelity/adjusted_plans.py`),
and are not looked at. The closed form knows roughly what it changes: replays of both decide (`pipelines.py`).
"""

import math
from dataclasses import replace

import numpy as np

from exeplan.core.bounds import percentile
from exeplan.core.schedule import Schedule
from exeplan.planner.problems.problem import Problem
from exeplan.policies import load_policy
from exeplan.simulator.closed_form import steady_state

PERCENT = 10
_LARGEST, _SIZES = 2.0, 10
"""Of the prefill batches that are looked at: the largest over the planned one, and how many sizes at most."""


def may_gain(problem: Problem, policy: str) -> bool:
    """Whether adjustment may help the policy keep a bound."""
    tails = [percentile(bound.metric) for bound in problem.bounds if math.isfinite(bound.seconds)]
    on_ttft = any(found is not None and found[0] == "ttft" for found in tails)
    return on_ttft and problem.arrivals is None and hasattr(load_policy(policy), "enlarged")


def adjusted_schedules(placed: Problem, schedule: Schedule) -> list[Schedule]:
    """Schedules on its placement like this one, adjusted, which by the closed form keep the bounds and serve as much or
    more: the one with the most throughput first."""
    policy, least = load_policy(schedule.policy), placed.evaluate(schedule).throughput
    found = {}
    for factor in np.geomspace(1.0, _LARGEST, _SIZES).tolist():
        for one in policy.enlarged(schedule, placed.workload, factor):
            adjusted = _adjusted(placed, one)
            outcome = placed.evaluate(adjusted)
            if outcome.throughput >= least and outcome.latency <= placed.limit and outcome.memory <= 1:
                found[str(adjusted)] = outcome.throughput, adjusted
    return [one for _, one in sorted(found.values(), key=lambda pair: -pair[0])]


def _adjusted(placed: Problem, schedule: Schedule) -> Schedule:
    """Towards the loads of its steady state: towards slots that stay empty every prefill would be enlarged."""
    residents = round(steady_state(schedule, placed.workload, placed.cost).cycle.num_seqs)
    loads = {
        "prefill_tokens": max(round(schedule["prefill_batch"] * placed.workload.mean_input), 1),
        "decode_batch": max(min(residents, schedule.variables.get("decode_batch", residents)), 1),
    }
    return replace(schedule, variables={**schedule.variables, **loads, "adjust_percent": PERCENT})
