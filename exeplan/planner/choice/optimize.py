"""From a planning problem to a plan: the closed form searches, the replay decides.

Each policy is searched for on pipelines of every size that the cluster has room for, by the closed form. The division
of the cluster into replicas with the most throughput wins (`replicas.py`), counting each pipeline that it uses with the
throughput of its replay: pipelines are replayed, the most promising first, until all those of the best division are.
If a replay breaks a bound, that search is repeated under bounds tightened by the overshoot, so that every promise was
replayed.

With an arrival rate, the winner is what sustains the highest rate within the bounds, by the closed form with full
batches, and of the best of every policy the one with the most headroom (`most_headroom.py`); replicas are then equal.
With a stated risk the bounds are tightened by margins (`margins.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from exeplan.core.bounds import values_of
from exeplan.core.cluster import Cluster
from exeplan.core.plan import as_json as plan_json
from exeplan.core.plan import schedule_json
from exeplan.planner.choice.answers import Optimum, begin_replays, last_resort, refuse_rate, solved, tell, unreplayed
from exeplan.planner.choice.candidates import Candidate, Known, candidate, capacity, sustained
from exeplan.planner.choice.most_headroom import most_headroom
from exeplan.planner.choice.pipelines import Effort, Pipelines
from exeplan.planner.choice.search_space import Outcomes, pareto
from exeplan.planner.margins.margins import Risk
from exeplan.planner.problems.problem import Problem
from exeplan.planner.problems.ranking import CONFIDENCE, half_interval
from exeplan.policies import engine_of, load_policy, policy_names, policy_reference
from exeplan.progress import SILENT, Told
from exeplan.search.search import Result, Trial

_SEARCHED = 0.9
"""Share of the work that is done, as it is told, before the first replay."""


def optimize(
    problem: Problem,
    *,
    policies: tuple[str, ...],
    method: str = "branch-and-bound",
    seed: int = 0,
    risk: Risk | None = None,
    advise: bool = True,
    known: Known | None = None,
    effort: Effort | None = None,
    told: Told = SILENT,
) -> Optimum:
    """The best plan under the bounds. Raises Infeasible with the binding limit and the tightest bound found to work.

    With `advise`, a refusal of a rate also names the bounds under which it would be sustained, which is searched.
    Problems of one request that share `known` do not search the same pipelines again; `effort` is what may be left out.
    """
    searches = told.part(0.0, _SEARCHED)
    pipelines = Pipelines(
        problem, policies, method=method, seed=seed, risk=risk, known=known, effort=effort or Effort(), told=searches
    )
    number = 0
    while (division := pipelines.best()) and (next_one := pipelines.undecided(division)):
        number += 1
        told(
            f"replay {number} ({next_one[1]}, {next_one[0]} GPU{'s' if next_one[0] != 1 else ''})",
            1 - (1 - _SEARCHED) / number,
        )
        if number == 1:
            begin_replays(pipelines, next_one)
        pipelines.replay(next_one)
    if division and pipelines.throughput(division) >= problem.min_throughput:
        if others := unreplayed(pipelines):
            told(f"replays of {', '.join(policy for _, policy in others)}", 1 - (1 - _SEARCHED) / (number + 1))
            tell(pipelines, others)
            division = most_headroom(pipelines, division)
            tell(pipelines, unreplayed(pipelines))
        return solved(pipelines, division)
    if problem.required:
        refuse_rate(pipelines, advise=advise)
    return last_resort(pipelines, advise=advise)


def with_frontier(problem: Problem, one: Candidate, *, num_bounds: int = 24) -> Result:
    """The candidate's search with its frontier completed by searches under other bounds, on its placement.

    A single search tries few points away from its bound. The throughput is that of all replicas. `best` is the schedule
    of the candidate with full batches, which at a rate or adjusted is not the point that was found first.
    """
    assert one.search is not None
    assert one.placement is not None
    lowest = one.search.lowest_latency.outcome.latency
    widest = min(3 * problem.limit, 100 * lowest)
    factor = capacity(one) / alone if (alone := sustained(one)) else float(one.num_replicas)
    trials = list(one.search.frontier)
    if widest > lowest:
        replica = problem.replica(one.placement, one.num_replicas, alike=not one.more_replicas)
        placed, outcomes = replace(replica, cluster=None), Outcomes()
        for seconds in np.geomspace(lowest, widest, num_bounds):
            looser = placed.limited_to(float(seconds))
            found = candidate(looser, one.policy, "branch-and-bound", outcomes=outcomes).search
            trials += found.frontier if found else ()
    return replace(
        one.search,
        best=_times(best, factor) if (best := _planned(problem, one)) else None,
        frontier=tuple(_times(trial, factor) for trial in pareto(trials)),
    )


def _planned(problem: Problem, one: Candidate) -> Trial | None:
    """The candidate's schedule on one of its replicas, or the best point of its search where it has none."""
    assert one.search is not None
    assert one.placement is not None
    if one.schedule is None:
        return one.search.best
    placed = problem.replica(one.placement, one.num_replicas, alike=not one.more_replicas)
    return Trial(one.schedule.variables, placed.evaluate(one.schedule))


def _times(trial: Trial, factor: float) -> Trial:
    """The trial with that many times the throughput."""
    return replace(trial, outcome=replace(trial.outcome, throughput=factor * trial.outcome.throughput))


def resolve_policies(
    text: str, cluster: Cluster | None = None, *, deadlines: bool = False, engine: Sequence[str] = ()
) -> tuple[str, ...]:
    """The named policy; for `auto` every policy of the package that applies, or those of an engine.

    On one device that leaves out policies with separate stages, without deadlines those made for deadlines, and without
    an engine those that are an engine's own.
    """
    if text == "auto":
        names = engine or [name for name in policy_names() if not engine_of(name)]
        policies = {name: load_policy(name) for name in sorted(names)}
        return tuple(
            name
            for name, policy in policies.items()
            if (cluster or not policy.SEPARATE_STAGES) and (deadlines or not policy.FOR_DEADLINES)
        )
    return (policy_reference(text),)


def as_json(optimum: Optimum) -> dict[str, Any]:
    """The contract for programs: schedule, placement, estimate, replay, search; and every policy as a candidate."""
    body = plan_json(optimum.plan)
    others = [
        {
            "policy": c.policy,
            "schedule": schedule_json(c.schedule) if c.schedule else None,
            "replicas": c.num_replicas,
            "estimate": c.estimate.to_dict() if c.estimate else None,
            "replayed": c.replayed,
            "points": c.search.num_points if c.search else 0,
            "refusal": c.refusal or None,
        }
        for c in optimum.candidates
    ]
    order = optimum.order and {
        "runner_up": optimum.order.runner_up,
        "behind": optimum.order.behind,
        "interval": optimum.order.interval if math.isfinite(optimum.order.interval) else None,
        "confidence": CONFIDENCE,
        "seeds": optimum.order.num_seeds,
    }
    return {
        **body,
        "candidates": others,
        "order": order,
        "extrapolated": list(optimum.beyond),
        "replays": _replays_json(optimum),
        "unproven": list(optimum.unproven),
        "groups": [one.to_dict() for one in optimum.groups],
        "full_batches": asdict(optimum.full) if optimum.full else None,
    }


def _replays_json(optimum: Optimum) -> dict[str, Any]:
    """How many seeds the plan's replay is the mean of, and half the interval of each bounded figure of that mean."""
    plan = optimum.plan
    bounds = tuple(bound for bound in (plan.bound, *plan.more_bounds) if bound)
    by_bound = zip(*(values_of(bounds, one) for one in optimum.seeds), strict=True)
    found = {}
    for bound, values in zip(bounds, by_bound, strict=True):
        half = half_interval([value or 0.0 for value in values])
        found[bound.metric] = half if math.isfinite(half) else None
    return {"seeds": len(optimum.seeds), "confidence": CONFIDENCE, "half_intervals": found}
