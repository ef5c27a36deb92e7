"""The rate curve of a plan: requests/s that 1, 2, ... of its replicas serve within its bounds, the wait included.

With the plan's profile and workload the closed form says for each number what rate keeps the bounds behind the plan's
router; replicas behind one queue serve more than as many alone. Without them the plan's own figures are divided by its
replicas: its arrival rate with the headroom that it says, or of a backlog's throughput `MOST_LOAD`.

Not here: when replicas start and stop (`scheduling/scaling.py`).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from exeplan.core.cluster import load_cluster
from exeplan.core.plan import Plan
from exeplan.core.schedule import ROUTERS, ReplicaGroup, Schedule
from exeplan.errors import Infeasible, InputError
from exeplan.planner.load_problem import plan_request
from exeplan.planner.problems.headroom import most_rate
from exeplan.planner.problems.problem import Problem
from exeplan.scheduling.scaling import RateCurve
from exeplan.simulator.closed_form import steady_state
from exeplan.workload.arrivals import Arrivals
from exeplan.workload.files import load_workload

MOST_LOAD = 0.95
"""Share of what full batches serve: nearer to it a queue that a burst has left does not empty within minutes."""
_DENSE = 8
"""Numbers up to this are all looked at; above it every half of a power of two."""
_STEPS = 12
"""Bisections of a rate."""


class FoundCurve(NamedTuple):
    curve: RateCurve
    basis: str
    """What it is from, as a clause."""


def rate_curve(plan: Plan, most: int) -> FoundCurve:
    """Of up to `most` replicas, those of the plan in its order and then more of them.

    Raises InputError where the plan says nothing to find it by, or its replicas keep its bounds at no rate.
    """
    if missing := _missing(plan):
        return _of_figures(plan, missing)
    return FoundCurve(_of_profile(plan, most), f"by the plan's profile and workload, {_bounds(plan)}")


def curve_at(problem: Problem, schedule: Schedule, router: str, most: int) -> RateCurve:
    """Of equal replicas, by the problem of one. Raises InputError where one keeps the bounds at no rate."""
    numbers = _numbers(most)
    rates = [number * _most_rate(problem, schedule, router, number) for number in numbers]
    if rates[0] <= 0:
        raise InputError(f"one replica keeps {problem.bound} at no rate; give the plan a bound that {schedule} keeps")
    every = [_between(number, numbers, rates) for number in range(1, most + 1)]
    return RateCurve(tuple(accumulate(every, lambda low, high: max(high, math.nextafter(low, math.inf)))))


def _of_profile(plan: Plan, most: int) -> RateCurve:
    request = replace(plan_request(plan), arrivals=None, one_pipeline=True)
    if not plan.more_replicas:
        return curve_at(request.problem_at(plan.placement), plan.schedule, plan.router or ROUTERS[0], most)

    def alone(group: ReplicaGroup) -> float:
        return curve_at(request.problem_at(group.placement), group.schedule, ROUTERS[0], 1).rates[0]

    rates = [rate for group in plan.groups for rate in [alone(group)] * group.num_replicas]
    return RateCurve(tuple(accumulate(rates[:most])))


def _most_rate(problem: Problem, schedule: Schedule, router: str, number: int) -> float:
    """Requests/s of each of `number` replicas."""
    try:
        high = MOST_LOAD * steady_state(schedule, problem.workload, problem.cost).throughput
    except Infeasible as error:
        raise InputError(str(error)) from None

    def keeps(rate: float) -> bool:
        arrivals = Arrivals(rate=rate * number).split(number, router)
        return replace(problem, arrivals=arrivals).keeps(schedule)

    return high if keeps(high) else _bisected(keeps, high)


def _bisected(keeps: Callable[[float], bool], high: float) -> float:
    low = 0.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


def _numbers(most: int) -> list[int]:
    """The numbers of replicas that are looked at."""
    sparse = (round(2 ** (half / 2)) for half in range(7, 2 * most.bit_length() + 1))
    return sorted({*range(1, min(most, _DENSE) + 1), *(number for number in sparse if number < most), most})


def _between(number: int, numbers: list[int], rates: list[float]) -> float:
    after = next(place for place, known in enumerate(numbers) if known >= number)
    if numbers[after] == number:
        return rates[after]
    low, high = numbers[after - 1], numbers[after]
    return rates[after - 1] + (rates[after] - rates[after - 1]) * (number - low) / (high - low)


def _missing(plan: Plan) -> str:
    """What the plan was made from and is not here, as a clause; empty where all is."""
    if not plan.profile or not Path(plan.profile).exists():
        return "its profile is not here"
    if not plan.workload:
        return "it names no workload"
    try:
        load_workload(plan.workload)
    except InputError as error:
        return f"its workload cannot be read ({error})"
    try:
        if plan.cluster:
            load_cluster(plan.cluster)
    except InputError as error:
        return f"its cluster cannot be read ({error})"
    return ""


def _of_figures(plan: Plan, missing: str) -> FoundCurve:
    """`missing` says why by these."""
    estimate = plan.replay or plan.estimate
    if estimate is None or estimate.throughput <= 0:
        raise InputError(
            f"nothing says what rate a replica of the plan serves: {missing}, and it has no estimate; "
            "`exeplan simulate PLAN` adds one"
        )
    if not plan.trace_arrivals and (most := most_rate(plan)) is not None:
        return FoundCurve(
            RateCurve.proportional(most / plan.num_replicas),
            f"by the plan's rate and its headroom, as {missing}",
        )
    basis = f"as {100 * MOST_LOAD:.0f} % of the plan's throughput, as {missing}; {_bounds(plan)} is not looked at"
    return FoundCurve(RateCurve.proportional(MOST_LOAD * estimate.throughput / plan.num_replicas), basis)


def _bounds(plan: Plan) -> str:
    bounds = [
        str(bound) for bound in (plan.bound, *plan.more_bounds) if bound is not None and math.isfinite(bound.seconds)
    ]
    return f"within {', '.join(bounds)}" if bounds else "without a bound"
