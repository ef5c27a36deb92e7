"""Headroom: by how much output lengths or the arrival rate may rise before a plan breaks a bound, by the closed form.

Where requests arrive, its bounds are scaled by what its figures are to those of the replay: at the rate itself both say
the same. With a margin that is promised the bounds hold up to there with it, so that a plan for more is not refused.
Of the arrivals of a trace it takes those of a Poisson stream.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from exeplan.core.bounds import scaled, values_of
from exeplan.core.plan import Plan
from exeplan.core.schedule import Estimate, Schedule
from exeplan.planner.problems.problem import Problem
from exeplan.planner.problems.replays import kv_cache_tokens

_LIMIT, _STEPS, _FIRST, _WIDER = 4.0, 1024, 16, 4
"""The most that is told, the steps to it, the one that is tried first, and by which factor the next one is further."""
_IN_VAIN = 2
"""Steps by a line that have not halved the interval, after which it is halved."""


class Headrooms(NamedTuple):
    """Of one schedule, as shares; None where nothing limits it."""

    rate: float | None
    drift: float | None


def with_headroom(plan: Plan, alone: Sequence[Problem], *, known: Headrooms | None = None) -> Plan:
    """The plan with its headroom, the least of its groups of replicas; `alone` are the problems of one of each, and
    what is `known` is not looked for.

    Where requests arrive, the plan has its replay already.
    """
    if known is not None:
        return replace(plan, drift_headroom=known.drift, rate_headroom=known.rate)
    promises = [plan.promise, *plan.promise.get("more_groups", ())]
    margins = [one.get("margin", {}) for one in promises] * (1 if len(promises) > 1 else len(plan.groups))

    replayed = [
        (as_replayed(one, group.schedule, plan.replay, margin=margin), group)
        for one, group, margin in zip(alone, plan.groups, margins, strict=True)
    ]
    return replace(
        plan,
        drift_headroom=_least(
            drift_headroom(one, group.schedule, kv_tokens=group.kv_cache_tokens) for one, group in replayed
        ),
        rate_headroom=_least(rate_headroom(one, group.schedule) for one, group in replayed),
    )


def _least(found: Iterable[float | None]) -> float | None:
    return min((value for value in found if value is not None), default=None)


def most_rate(plan: Plan) -> float | None:
    """The highest rate within the bounds, requests/s, of a plan that has headroom, or less where that is the most that
    is told; None without."""
    if plan.rate_headroom is None or plan.estimate is None:
        return None
    return (plan.arrival_rate or plan.estimate.throughput) * (1 + plan.rate_headroom)


def is_most(headroom: float | None) -> bool:
    """Whether it is the most that is told: the bounds hold up to there, and may hold further."""
    return headroom is not None and headroom >= _LIMIT


def drift_headroom(problem: Problem, schedule: Schedule, *, kv_tokens: int | None = None) -> float | None:
    """The share by which output lengths may rise, all in proportion, before a bound breaks.

    None without a finite bound; never more than 400 %. Where requests arrive, as many are served at once as a KV
    cache of `kv_tokens` then holds, by default the one that is planned: the others wait. Under a backlog fewer at once
    have less latency, and nothing waits.
    """
    if math.isinf(problem.limit):
        return None
    tokens = (kv_tokens or kv_cache_tokens(problem, schedule)) if problem.arrivals else math.inf

    def filled(rise: float) -> float:
        longer = replace(problem, workload=problem.workload.scale(1.0 + rise))
        held = longer.within_cache(schedule, tokens) if problem.arrivals else schedule
        return longer.filled(held) if held else math.inf

    return _headroom(filled)


def rate_headroom(problem: Problem, schedule: Schedule) -> float | None:
    """The share by which the arrival rate may rise before a bound breaks or the queue grows without end.

    None for a backlog; never more than 400 %.
    """
    arrivals = problem.arrivals
    if arrivals is None:
        return None

    def filled(rise: float) -> float:
        faster = replace(arrivals, rate=arrivals.rate * (1.0 + rise))
        return replace(problem, arrivals=faster).filled(schedule)

    return _headroom(filled)


def as_replayed(
    problem: Problem, schedule: Schedule, replayed: Estimate | None, *, margin: Mapping[str, float]
) -> Problem:
    """The problem with bounds that the closed form uses as far as the replay uses those asked for, less the `margin` by
    metric."""
    problem = problem.held_to(scaled(problem.bounds, [1 / (1 + margin.get(b.metric, 0.0)) for b in problem.bounds]))
    if problem.arrivals is None or replayed is None:
        return problem
    pairs = zip(values_of(problem.bounds, problem.estimate(schedule)), values_of(problem.bounds, replayed), strict=True)
    return problem.held_to(scaled(problem.bounds, [one / two if one and two else 1.0 for one, two in pairs]))


def _headroom(filled: Callable[[float], float]) -> float:
    """The last kept step up to the limit, where at most 1 of a bound is `filled`.

    Looked for where the reciprocal, which the waits of a queue make nearly a line, crosses 1 by the last two steps that
    are sustained; in the middle where that has not halved the interval twice.
    """
    points: list[tuple[int, float]] = []

    def keeps(step: int) -> bool:
        use = filled(_LIMIT * step / _STEPS)
        if math.isfinite(use):
            points.append((step, 1 / max(use, 1e-9)))
        return use <= 1

    low, high = 0, _FIRST
    while keeps(high):
        if high == _STEPS:
            return _LIMIT
        low, high = high, min(_WIDER * high, _STEPS)
    in_vain = 0
    while high - low > 1:
        middle = _crossing(points[-2:]) if in_vain < _IN_VAIN else None
        middle = min(max((low + high) // 2 if middle is None else middle, low + 1), high - 1)
        width = high - low
        low, high = (middle, high) if keeps(middle) else (low, middle)
        in_vain = 0 if 2 * (high - low) <= width else in_vain + 1
    return _LIMIT * low / _STEPS


def _crossing(points: Sequence[tuple[int, float]]) -> int | None:
    """The step before the one at which a line through two points falls below 1; None where it does not fall."""
    if len(points) < 2:
        return None
    (one, at_one), (other, at_other) = points
    slope = (at_other - at_one) / (other - one)
    return math.floor(one + (1 - at_one) / slope) if slope < 0 else None
