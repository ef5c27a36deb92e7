"""Headroom: by how much output lengths or the arrival rate may rise before a plan breaks a bound, by the closed form.

Where requests arrive, its bounds are scaled by what its figures are to those of the replay: at the rate itself both say
the same. Of the arrivals of a trace it takes those of a Poisson stream.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from exeplan.core.bounds import scaled, values_of
from exeplan.core.plan import Plan
from exeplan.core.schedule import Estimate, Schedule
from exeplan.planner.problems.problem import Problem

_LIMIT, _STEPS, _FIRST = 4.0, 1024, 16
"""The most that is told, the steps to it, and the one that is tried first."""


def with_headroom(plan: Plan, alone: Sequence[Problem], *, rate: float | None = None) -> Plan:
    """The plan with its headroom, the least of its groups of replicas; `alone` are the problems of one of each, and
    `rate` is its rate headroom where that is known.

    Where requests arrive, the plan has its replay already.
    """

    def least(headroom: Callable[[Problem, Schedule], float | None]) -> float | None:
        found = [
            headroom(as_replayed(one, group.schedule, plan.replay), group.schedule)
            for one, group in zip(alone, plan.groups, strict=True)
        ]
        return min((value for value in found if value is not None), default=None)

    if rate is None:
        rate = least(rate_headroom)
    return replace(plan, drift_headroom=least(drift_headroom), rate_headroom=rate)


def most_rate(plan: Plan) -> float | None:
    """The highest rate within the bounds, requests/s, of a plan that has headroom; None without."""
    if plan.rate_headroom is None or plan.estimate is None:
        return None
    return (plan.arrival_rate or plan.estimate.throughput) * (1 + plan.rate_headroom)


def drift_headroom(problem: Problem, schedule: Schedule) -> float | None:
    """The share by which output lengths may rise, all in proportion, before a bound breaks.

    None without a finite bound; never more than 400 %.
    """
    if math.isinf(problem.limit):
        return None
    return _headroom(lambda rise: replace(problem, workload=problem.workload.scale(1.0 + rise)).keeps(schedule))


def rate_headroom(problem: Problem, schedule: Schedule) -> float | None:
    """The share by which the arrival rate may rise before a bound breaks or the queue grows without end.

    None for a backlog; never more than 400 %.
    """
    arrivals = problem.arrivals
    if arrivals is None:
        return None

    def keeps(rise: float) -> bool:
        faster = replace(arrivals, rate=arrivals.rate * (1.0 + rise))
        return replace(problem, arrivals=faster).keeps(schedule)

    return _headroom(keeps)


def as_replayed(problem: Problem, schedule: Schedule, replayed: Estimate | None) -> Problem:
    """The problem with bounds that the closed form uses as far as the replay uses those asked for."""
    if problem.arrivals is None or replayed is None:
        return problem
    pairs = zip(values_of(problem.bounds, problem.estimate(schedule)), values_of(problem.bounds, replayed), strict=True)
    return problem.held_to(scaled(problem.bounds, [one / two if one and two else 1.0 for one, two in pairs]))


def _headroom(keeps: Callable[[float], bool]) -> float:
    """The last kept step up to the limit; headroom is mostly small, so smaller steps come first."""
    low, high = 0, _FIRST
    while high <= _STEPS and keeps(_LIMIT * high / _STEPS):
        low, high = high, 2 * high
    while high - low > 1 and low < _STEPS:
        middle = (low + high) // 2
        low, high = (middle, high) if keeps(_LIMIT * middle / _STEPS) else (low, middle)
    return _LIMIT * low / _STEPS
