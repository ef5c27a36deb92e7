"""What a plan promises, in lines for people: bounds and the fullest of them, rate, headroom, and the margin kept."""

import math
from collections.abc import Sequence

from exeplan.core.bounds import Bound, binding, values_of
from exeplan.core.plan import Plan
from exeplan.planner.problem import Problem
from exeplan.planner.tables import table
from exeplan.units import show_seconds


def show_bounds(bounds: Sequence[Bound]) -> str:
    """`bound 5 s on p99-length, ttft 500 ms`."""
    first, *others = bounds
    shown = [str(bound) for bound in others]
    return ", ".join([str(first) if math.isfinite(first.seconds) else "no latency bound", *shown])


def promise_lines(problem: Problem, plan: Plan) -> list[str]:
    """Everything that is promised beyond throughput; nothing where nothing is."""
    return [
        *_bound_lines(problem, plan),
        *_rate_lines(problem, plan),
        *_headroom_lines(problem, plan),
        *_risk_lines(plan),
    ]


def _bound_lines(problem: Problem, plan: Plan) -> list[str]:
    """Several bounds one by one, and which of them is fullest."""
    if plan.estimate is None or plan.replay is None or not problem.more_bounds:
        return []
    predicted, replayed = values_of(problem.bounds, plan.estimate), values_of(problem.bounds, plan.replay)
    rows = [
        (bound.metric, show_seconds(bound.seconds), show_seconds(one), show_seconds(two))
        for bound, one, two in zip(problem.bounds, predicted, replayed, strict=True)
        if math.isfinite(bound.seconds)
    ]
    lines = [table(("bound on", "at most", "closed form", "replay"), rows)]
    if full := binding(problem.bounds, plan.replay):
        lines.append(f"what binds most: {full[0].metric}, {100 * full[1]:.0f} % full in the replay")
    return [*lines, ""]


def _rate_lines(problem: Problem, plan: Plan) -> list[str]:
    if problem.arrivals is None or plan.rate_headroom is None:
        return []
    more = 100 * plan.rate_headroom
    return [
        f"arrivals: {problem.arrivals}; times count from the arrival, the wait for a slot included",
        f"rate headroom: the bounds hold until {more:.0f} % more requests come (of the schedules that keep the bounds "
        "at this rate, the one that could take the highest)",
    ]


def _headroom_lines(problem: Problem, plan: Plan) -> list[str]:
    if plan.drift_headroom is None:
        return []
    hold = "bounds hold" if problem.more_bounds else "bound holds"
    return [f"drift headroom: the {hold} until outputs are {100 * plan.drift_headroom:.0f} % longer"]


def _risk_lines(plan: Plan) -> list[str]:
    if not plan.promise:
        return []
    kept = ", ".join(f"{100 * value:.1f} % on {about}" for about, value in plan.promise["margin"].items())
    return [
        f"margin: with {kept} on top the closed form still keeps every bound, so that one breaks with a chance of "
        f"{100 * plan.promise['risk']:g} % at most",
        f"  from {plan.promise['source']}",
    ]
