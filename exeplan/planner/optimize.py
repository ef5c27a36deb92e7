"""From a planning problem to a plan: the closed form searches, the replay decides.

Each policy is searched separately; the schedule with the highest throughput within the bounds wins. If its replay
breaks a bound, the search is repeated under bounds tightened by the overshoot, so that every promise was replayed.

With an arrival rate, the winner is the schedule that sustains the highest rate within the bounds: the most headroom.
With a stated risk the bounds are tightened by margins (`margins.py`).
"""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_all_start_methods, get_context
from typing import Any

import numpy as np

from exeplan.core.bounds import binding, scaled, utilizations
from exeplan.core.cluster import Cluster
from exeplan.core.plan import Plan
from exeplan.core.plan import as_json as plan_json
from exeplan.core.schedule import Estimate, Placement, Schedule
from exeplan.errors import Infeasible
from exeplan.planner.infeasible import burst, policy_refusal, too_slow, too_tight, wider_bounds
from exeplan.planner.margins import Margins, Risk, expected_margins, margins
from exeplan.planner.problem import Problem, drift_headroom, kv_cache_tokens, rate_headroom, replay_estimate
from exeplan.planner.search_space import pareto, search_variants
from exeplan.policies import load_policy, policy_names, policy_reference
from exeplan.search.search import Result
from exeplan.simulator.closed_form import steady_state
from exeplan.simulator.run import Run
from exeplan.units import show_bytes

_RETRIES = 8
_MISJUDGED, _GIVEN_UP = 1.1, 2
"""Replay over closed form, in latency, from which a variant is given up; and how many are given up at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The best schedule of one policy and its placement, or why it has none."""

    policy: str
    schedule: Schedule | None
    placement: Placement | None
    """Of the schedule, or of the lowest-latency one where none keeps the bound; None where the policy does not fit."""
    estimate: Estimate | None
    search: Result | None
    """All of the policy's searches together; None where there was nothing to search."""
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The winner as a plan, the best schedule of every policy, and the winner's replay."""

    plan: Plan
    candidates: tuple[Candidate, ...]
    beyond: tuple[str, ...]
    """Where the winner's estimate left the measured range."""
    run: Run


def optimize(
    problem: Problem,
    *,
    policies: tuple[str, ...],
    method: str = "branch-and-bound",
    seed: int = 0,
    risk: Risk | None = None,
    advise: bool = True,
) -> Optimum:
    """The best plan under the bounds. Raises Infeasible with the binding limit and the tightest possible bound.

    With `advise`, a refusal of a rate also names the bounds under which it would be sustained, which is searched.
    """
    margin = expected_margins(problem, risk) if risk else None
    held = scaled(problem.bounds, [1 / (1 + value) for value in margin.values]) if margin else problem.bounds
    candidates = _candidates(problem.held_to(held), policies, method)
    limits = dict.fromkeys(policies, held)
    num_compared = sum(c.schedule is not None for c in candidates.values())
    replays: list[tuple[Schedule, Estimate]] = []
    given_up: list[tuple[Placement, Schedule]] = []
    for attempt in range(_RETRIES):
        kept = [c for c in candidates.values() if c.schedule is not None]
        if not kept:
            break
        winner = max(kept, key=_sustained)
        assert winner.schedule is not None
        assert winner.placement is not None
        placed = problem.at(winner.placement)
        run, replayed = replay_estimate(placed, winner.schedule, seed=seed)
        if risk:
            margin = margins(placed, winner.schedule, risk, num_compared=num_compared, seed=seed)
        filled = _filled(problem, winner, replayed, margin)
        if max(filled) <= 1:
            return _optimum(placed, winner, candidates, method=method, run=run, replayed=replayed, margin=margin)
        replays.append((winner.schedule, replayed))
        if _misjudged(problem, winner, replayed) and len(given_up) < _GIVEN_UP:
            others = [*given_up, (winner.placement, winner.schedule)]
            again = _candidate(
                problem.held_to(limits[winner.policy]), winner.policy, method, winner.search, without=others
            )
            if again.schedule is not None:
                given_up, candidates[winner.policy] = others, again
                continue
        # Slack that doubles ends this soon, whatever chance does to the few long requests of a replay.
        slack = 1 - 0.005 * 2**attempt
        limits[winner.policy] = scaled(limits[winner.policy], [slack / full if full > 1 else 1.0 for full in filled])
        # Another placement would gain less than the tighter bound costs.
        here = replace(placed, cluster=None)
        tightened = here.held_to(limits[winner.policy])
        candidates[winner.policy] = _candidate(tightened, winner.policy, method, winner.search, without=given_up)
    if problem.required:
        _refuse_rate(problem, candidates, method, replays, advise=advise)
    return _last_resort(problem, candidates, method=method, seed=seed, margin=margin)


def _sustained(candidate: Candidate) -> float:
    """Requests/s of a candidate's schedule with its batches full."""
    return candidate.search.best.outcome.throughput if candidate.search and candidate.search.best else 0.0


def _misjudged(problem: Problem, winner: Candidate, replayed: Estimate) -> bool:
    """Whether the closed form is so far off that another placement is worth more than a tighter bound."""
    assert winner.estimate is not None
    if problem.cluster is None or problem.arrivals:
        return False
    pairs = zip(utilizations(problem.bounds, replayed), utilizations(problem.bounds, winner.estimate), strict=True)
    return any(full > _MISJUDGED * predicted for full, predicted in pairs)


def _filled(problem: Problem, winner: Candidate, replayed: Estimate, margin: Margins | None) -> list[float]:
    """The utilization of each bound: by the replay and, with a margin, by the closed form plus margin."""
    assert winner.estimate is not None
    filled = utilizations(problem.bounds, replayed)
    if margin is None:
        return filled
    predicted = utilizations(problem.bounds, winner.estimate)
    return [max(full, share * (1 + value)) for full, share, value in zip(filled, predicted, margin.values, strict=True)]


def _refuse_rate(
    problem: Problem,
    candidates: dict[str, Candidate],
    method: str,
    replays: Sequence[tuple[Schedule, Estimate]],
    *,
    advise: bool,
) -> None:
    """Raises Infeasible for a rate that no schedule sustains; returns where the bounds alone are out of reach."""
    if problem.arrivals and replays:
        schedule, replayed = min(replays, key=lambda pair: max(utilizations(problem.bounds, pair[1])))
        bound, share = binding(problem.bounds, replayed) or (problem.bound, 0.0)
        if share > 1:
            raise burst(problem, schedule, bound, share * bound.seconds)
    most = max(candidates.values(), key=_sustained)
    if most.search is None or most.search.best is None or most.placement is None:
        return
    schedule = problem.schedule(most.policy, most.search.best.point)

    def search_again(other: Problem) -> tuple[float, Placement | None]:
        found = _candidate(other, most.policy, method)
        return _sustained(found), found.placement

    advice = wider_bounds(problem, search_again) if advise else ""
    raise too_slow(problem.at(most.placement), schedule, most.search, advice)


def _last_resort(
    problem: Problem,
    candidates: dict[str, Candidate],
    *,
    method: str,
    seed: int,
    margin: Margins | None,
) -> Optimum:
    """The lowest-latency schedule of all, if it keeps the bounds; its latency is the tightest possible bound."""
    lowest = {c.policy: c.search.lowest_latency for c in candidates.values() if c.search}
    fitting = [c for c in candidates.values() if c.search and "memory" not in c.search.what_binds]
    if not fitting:
        refusals = "; ".join(c.refusal for c in candidates.values())
        raise Infeasible(f"no schedule fits {show_bytes(problem.memory)} of memory: {refusals}")
    best = min(fitting, key=lambda c: lowest[c.policy].outcome.latency)
    assert best.placement is not None
    placed = problem.at(best.placement)
    schedule = problem.schedule(best.policy, lowest[best.policy].point)
    estimate = placed.estimate(schedule)  # Refuses a rate beyond its capacity before a long replay.
    run, replayed = replay_estimate(placed, schedule, seed=seed)
    winner = replace(best, schedule=schedule, estimate=estimate, refusal="")
    predicted = utilizations(problem.bounds, estimate)
    filled = [max(pair) for pair in zip(predicted, _filled(problem, winner, replayed, margin), strict=True)]
    if max(filled) > 1:
        bound = problem.bounds[filled.index(max(filled))]
        raise too_tight(placed, schedule, bound, max(filled) * bound.seconds)
    candidates = {**candidates, best.policy: winner}
    return _optimum(placed, winner, candidates, method=method, run=run, replayed=replayed, margin=margin)


def _optimum(
    problem: Problem,
    winner: Candidate,
    candidates: dict[str, Candidate],
    *,
    method: str,
    run: Run,
    replayed: Estimate,
    margin: Margins | None,
) -> Optimum:
    schedule = winner.schedule
    assert schedule is not None
    model = problem.profile.model
    found = tuple(candidates.values())
    plan = Plan(
        model=str(model.directory or model.name),
        schedule=schedule,
        placement=problem.cost.placement,
        cluster=problem.cluster.name if problem.cluster else None,
        gpus=problem.cluster.num_gpus if problem.cluster else None,
        bound=problem.bound,
        more_bounds=problem.more_bounds,
        arrival_rate=problem.arrivals.rate if problem.arrivals and not problem.arrivals.of_trace else None,
        trace_arrivals=problem.arrivals is not None and problem.arrivals.of_trace,
        deadline=str(problem.workload.deadlines) if problem.workload.deadlines else None,
        dtype=problem.profile.dtype,
        kv_dtype=problem.profile.kv_dtype,
        device=problem.profile.device.kind,
        num_threads=problem.profile.device.num_threads,
        kv_cache_tokens=kv_cache_tokens(problem, schedule),
        gpu_memory_utilization=problem.utilization,
        max_seqs=problem.max_seqs,
        model_fingerprint=model.fingerprint,
        workload_fingerprint=problem.workload.fingerprint,
        profile_fingerprint=problem.profile.fingerprint,
        estimate=winner.estimate,
        replay=replayed,
        drift_headroom=drift_headroom(problem, schedule),
        rate_headroom=rate_headroom(problem, schedule),
        promise=_promise(problem, margin),
        search=search_summary(found, method),
    )
    steady = steady_state(schedule, problem.workload, problem.cost)
    return Optimum(plan=plan, candidates=found, beyond=problem.cost.beyond(steady.cycle), run=run)


def _promise(problem: Problem, margin: Margins | None) -> dict[str, Any]:
    if margin is None:
        return {}
    kept = {bound.metric: round(value, 4) for bound, value in zip(problem.bounds, margin.values, strict=True)}
    return {"risk": margin.risk, "margin": kept, "source": margin.source}


def with_frontier(problem: Problem, candidate: Candidate, *, num_bounds: int = 24) -> Result:
    """The candidate's search with its frontier completed by searches under other bounds, on its placement.

    A single search tries few points away from its bound.
    """
    assert candidate.search is not None
    assert candidate.placement is not None
    lowest = candidate.search.lowest_latency.outcome.latency
    widest = min(3 * problem.limit, 100 * lowest)
    if widest <= lowest:
        return candidate.search
    placed = replace(problem.at(candidate.placement), cluster=None)
    trials = list(candidate.search.frontier)
    for seconds in np.geomspace(lowest, widest, num_bounds):
        looser = placed.limited_to(float(seconds))
        found = _candidate(looser, candidate.policy, "branch-and-bound").search
        trials += found.frontier if found else ()
    return replace(candidate.search, frontier=pareto(trials))


def resolve_policies(text: str, cluster: Cluster | None = None, *, deadlines: bool = False) -> tuple[str, ...]:
    """The named policy; for `auto` every policy of the package that applies.

    On one device that leaves out policies with separate stages, without deadlines those made for deadlines.
    """
    if text == "auto":
        policies = {name: load_policy(name) for name in policy_names()}
        return tuple(
            name
            for name, policy in policies.items()
            if (cluster or not policy.SEPARATE_STAGES) and (deadlines or not policy.FOR_DEADLINES)
        )
    return (policy_reference(text),)


def search_summary(candidates: tuple[Candidate, ...], method: str) -> dict[str, Any]:
    """Cost and quality of the search: `points` evaluated, `seconds`, and the largest `gap` to an upper bound."""
    return {
        "method": method,
        "points": sum(c.search.num_points for c in candidates if c.search),
        "grid": sum(c.search.grid_size for c in candidates if c.search),
        "seconds": round(sum(c.search.seconds for c in candidates if c.search), 4),
        "gap": max((c.search.gap for c in candidates if c.search and c.search.gap is not None), default=None),
    }


def as_json(optimum: Optimum) -> dict[str, Any]:
    """The contract for programs: schedule, placement, estimate, replay, search; and every policy as a candidate."""
    body = plan_json(optimum.plan)
    others = [
        {
            "policy": c.policy,
            "schedule": {"policy": c.policy, **c.schedule.variables} if c.schedule else None,
            "estimate": c.estimate.to_dict() if c.estimate else None,
            "points": c.search.num_points if c.search else 0,
            "refusal": c.refusal or None,
        }
        for c in optimum.candidates
    ]
    return {**body, "candidates": others, "extrapolated": list(optimum.beyond)}


def _candidates(problem: Problem, policies: tuple[str, ...], method: str) -> dict[str, Candidate]:
    """Every policy's candidate; on a cluster the policies are searched in parallel processes."""
    workers = min(len(policies), _num_workers())
    if problem.cluster is None or problem.cluster.num_gpus == 1 or workers < 2:
        return {policy: _candidate(problem, policy, method) for policy in policies}
    with ProcessPoolExecutor(workers, mp_context=get_context("fork"), initializer=_share, initargs=(problem,)) as pool:
        found = pool.map(_shared_candidate, policies, [method] * len(policies))
        return dict(zip(policies, found, strict=True))


def _num_workers() -> int:
    """Processes that may search at once; 1 on a system without fork, as the problem is passed by the fork."""
    if "fork" not in get_all_start_methods():
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_shared: list[Problem] = []
"""The problem of this worker process, inherited by the fork: curves and caches cannot be sent."""


def _share(problem: Problem) -> None:
    _shared[:] = [problem]


def _shared_candidate(policy: str, method: str) -> Candidate:
    return _candidate(_shared[0], policy, method)


def _candidate(
    problem: Problem,
    policy: str,
    method: str,
    before: Result | None = None,
    without: Sequence[tuple[Placement, Schedule]] = (),
) -> Candidate:
    """The best schedule of a policy under the bounds, in none of the variants of the schedules `without`.

    The cost of a search `before` is added.
    """
    found = search_variants(problem, policy, method=method, bound=problem.limit, without=without)
    if found is None:
        refusal = f"{policy} cannot be placed"
        return Candidate(policy=policy, schedule=None, placement=None, estimate=None, search=None, refusal=refusal)
    result, placement = found
    if before is not None:
        points, seconds = before.num_points + result.num_points, before.seconds + result.seconds
        result = replace(result, num_points=points, seconds=seconds)
    if result.best is None or result.best.outcome.throughput < problem.required:
        refusal = policy_refusal(problem, policy, result)
        return Candidate(
            policy=policy, schedule=None, placement=placement, estimate=None, search=result, refusal=refusal
        )
    # Without a cluster the placement is the problem's own, with its links.
    placed = problem.at(placement) if problem.cluster else problem
    schedule = problem.schedule(policy, result.best.point)
    schedule = placed.with_spare_places(schedule) if problem.arrivals else schedule
    try:
        estimate = placed.estimate(schedule)
    except Infeasible as refusal:  # The rate is its whole capacity: a queue would grow without end.
        return Candidate(
            policy=policy, schedule=None, placement=placement, estimate=None, search=result, refusal=str(refusal)
        )
    return Candidate(policy=policy, schedule=schedule, placement=placement, estimate=estimate, search=result)
