"""From a profile, a workload and a bound to a plan: the closed form searches, the replay has the final word.

Every policy is searched on its own; the highest throughput that keeps the bound wins. If the winner's replay breaks
the bound, the search is repeated under a bound tightened by the overshoot, so that what is promised has been replayed.
"""

import math
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from typing import Any

import numpy as np

from exeplan.cluster import Cluster
from exeplan.errors import Infeasible
from exeplan.plan import Estimate, Placement, Plan, Schedule
from exeplan.plan import as_json as plan_json
from exeplan.policies import load_policy, policy_names
from exeplan.problem import Problem, drift_headroom, kv_cache_tokens, replay_estimate
from exeplan.search import Result
from exeplan.simulator.closed_form import steady_state
from exeplan.simulator.replay import Run
from exeplan.units import show_bytes, show_seconds
from exeplan.variants import pareto, search_variants

_RETRIES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The best schedule of one policy and where it runs, or why it has none."""

    policy: str
    schedule: Schedule | None
    placement: Placement | None
    """Of the schedule, or of the gentlest one where none keeps the bound; None where the policy cannot be placed."""
    estimate: Estimate | None
    search: Result | None
    """All of the policy's searches together; None where there was nothing to search."""
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The winner as a plan, the best of every policy, and what to know about the prediction."""

    plan: Plan
    candidates: tuple[Candidate, ...]
    beyond: tuple[str, ...]
    """Where the winner's estimate left the measured range."""
    run: Run


def optimize(
    problem: Problem, *, policies: tuple[str, ...], method: str = "branch-and-bound", seed: int = 0
) -> Optimum:
    """The best plan under the bound. Raises Infeasible saying what binds and the tightest bound that is possible."""
    candidates = _candidates(problem, policies, method)
    limits = dict.fromkeys(policies, problem.bound.seconds)
    for attempt in range(_RETRIES):
        kept = [c for c in candidates.values() if c.schedule is not None]
        if not kept:
            break
        winner = max(kept, key=lambda c: c.estimate.throughput if c.estimate else 0.0)
        assert winner.schedule is not None
        assert winner.placement is not None
        placed = problem.at(winner.placement)
        run, replayed = replay_estimate(placed, winner.schedule, seed=seed)
        if replayed.latency is None or replayed.latency <= problem.bound.seconds:
            return _optimum(placed, winner, candidates, method=method, run=run, replayed=replayed)
        # A margin that doubles ends this soon, whatever chance does to the few long requests of a replay.
        limits[winner.policy] *= (1 - 0.005 * 2**attempt) * problem.bound.seconds / replayed.latency
        # What is left to gain on another placement is less than what a tighter bound costs.
        here = replace(placed, cluster=None)
        candidates[winner.policy] = _candidate(here, winner.policy, method, winner.search, limits[winner.policy])
    return _last_resort(problem, candidates, method=method, seed=seed)


def _last_resort(problem: Problem, candidates: dict[str, Candidate], *, method: str, seed: int) -> Optimum:
    """The gentlest schedule of all, if it keeps the bound; what it needs is the tightest bound that is possible."""
    gentlest = {c.policy: c.search.gentlest for c in candidates.values() if c.search}
    fitting = [c for c in candidates.values() if c.search and "memory" not in c.search.what_binds]
    if not fitting:
        refusals = "; ".join(c.refusal for c in candidates.values())
        raise Infeasible(f"no schedule fits {show_bytes(problem.memory)} of memory: {refusals}")
    best = min(fitting, key=lambda c: gentlest[c.policy].outcome.latency)
    assert best.placement is not None
    placed = problem.at(best.placement)
    schedule = load_policy(best.policy).schedule(gentlest[best.policy].point, problem.workload)
    run, replayed = replay_estimate(placed, schedule, seed=seed)
    needed = max(gentlest[best.policy].outcome.latency, replayed.latency or 0.0)
    if needed > problem.bound.seconds:
        raise Infeasible(_why_not(placed, schedule, needed))
    winner = replace(best, schedule=schedule, estimate=placed.estimate(schedule), refusal="")
    candidates = {**candidates, best.policy: winner}
    return _optimum(placed, winner, candidates, method=method, run=run, replayed=replayed)


def _optimum(
    problem: Problem,
    winner: Candidate,
    candidates: dict[str, Candidate],
    *,
    method: str,
    run: Run,
    replayed: Estimate,
) -> Optimum:
    schedule = winner.schedule
    assert schedule is not None
    model = problem.profile.model
    everyone = tuple(candidates.values())
    plan = Plan(
        model=str(model.directory or model.name),
        schedule=schedule,
        placement=problem.cost.placement,
        cluster=problem.cluster.name if problem.cluster else None,
        gpus=problem.cluster.num_gpus if problem.cluster else None,
        bound=problem.bound,
        dtype=problem.profile.dtype,
        device=problem.profile.device.kind,
        num_threads=problem.profile.device.num_threads,
        kv_cache_tokens=kv_cache_tokens(problem, schedule),
        max_seqs=problem.max_seqs,
        model_fingerprint=model.fingerprint,
        workload_fingerprint=problem.workload.fingerprint,
        profile_fingerprint=problem.profile.fingerprint,
        estimate=winner.estimate,
        replay=replayed,
        drift_headroom=drift_headroom(problem, schedule),
        search=search_summary(everyone, method),
    )
    steady = steady_state(schedule, problem.workload, problem.cost)
    return Optimum(plan=plan, candidates=everyone, beyond=problem.cost.beyond(steady.cycle), run=run)


def with_frontier(problem: Problem, candidate: Candidate, *, num_bounds: int = 24) -> Result:
    """The candidate's search with its frontier filled in: the best points under bounds around the one asked for.

    A single search tries few points away from its bound, so on its own it shows little of the frontier. On a cluster it
    stays on the candidate's placement.
    """
    assert candidate.search is not None
    assert candidate.placement is not None
    gentlest = candidate.search.gentlest.outcome.latency
    widest = min(3 * problem.bound.seconds, 100 * gentlest)
    if widest <= gentlest:
        return candidate.search
    placed = replace(problem.at(candidate.placement), cluster=None)
    trials = list(candidate.search.frontier)
    for seconds in np.geomspace(gentlest, widest, num_bounds):
        looser = replace(placed, bound=replace(problem.bound, seconds=float(seconds)))
        found = _candidate(looser, candidate.policy, "branch-and-bound").search
        trials += found.frontier if found else ()
    return replace(candidate.search, frontier=pareto(trials))


def resolve_policies(text: str, cluster: Cluster | None = None) -> tuple[str, ...]:
    """`auto` is every policy, on one device every one that the engine can run; otherwise the one that is named."""
    if text == "auto":
        return tuple(name for name in policy_names() if cluster or load_policy(name).IN_ENGINE)
    load_policy(text)
    return (text,)


def search_summary(candidates: tuple[Candidate, ...], method: str) -> dict[str, Any]:
    """What the search cost: `points` evaluated, `seconds`, and the largest `gap` left to an upper bound."""
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
            "estimate": asdict(c.estimate) if c.estimate else None,
            "points": c.search.num_points if c.search else 0,
            "refusal": c.refusal or None,
        }
        for c in optimum.candidates
    ]
    return {**body, "candidates": others, "extrapolated": list(optimum.beyond)}


def _candidates(problem: Problem, policies: tuple[str, ...], method: str) -> dict[str, Candidate]:
    """Every policy's candidate; on a cluster the policies are searched side by side on the cores there are."""
    workers = min(len(policies), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    if problem.cluster is None or problem.cluster.num_gpus == 1 or workers < 2:
        return {policy: _candidate(problem, policy, method) for policy in policies}
    with ProcessPoolExecutor(workers, mp_context=get_context("fork"), initializer=_share, initargs=(problem,)) as pool:
        found = pool.map(_shared_candidate, policies, [method] * len(policies))
        return dict(zip(policies, found, strict=True))


_shared: list[Problem] = []
"""The problem of this worker process: it came with the fork, as curves and caches cannot be sent."""


def _share(problem: Problem) -> None:
    _shared[:] = [problem]


def _shared_candidate(policy: str, method: str) -> Candidate:
    return _candidate(_shared[0], policy, method)


def _candidate(
    problem: Problem, policy: str, method: str, before: Result | None = None, bound: float | None = None
) -> Candidate:
    """The best schedule of a policy under the bound, or a tighter one; what a search `before` cost is added."""
    found = search_variants(problem, policy, method=method, bound=bound or problem.bound.seconds)
    if found is None:
        refusal = f"{policy} cannot be placed"
        return Candidate(policy=policy, schedule=None, placement=None, estimate=None, search=None, refusal=refusal)
    result, placement = found
    if before is not None:
        points, seconds = before.num_points + result.num_points, before.seconds + result.seconds
        result = replace(result, num_points=points, seconds=seconds)
    if result.best is None:
        refusal = _refusal(problem, policy, result)
        return Candidate(
            policy=policy, schedule=None, placement=placement, estimate=None, search=result, refusal=refusal
        )
    schedule = load_policy(policy).schedule(result.best.point, problem.workload)
    estimate = problem.at(placement).estimate(schedule)
    return Candidate(policy=policy, schedule=schedule, placement=placement, estimate=estimate, search=result)


def _refusal(problem: Problem, policy: str, result: Result) -> str:
    outcome = result.gentlest.outcome
    if "memory" in result.what_binds:
        return f"{policy} needs {show_bytes(outcome.memory * problem.memory)} at its gentlest"
    return f"{policy} needs {show_seconds(outcome.latency)} at its gentlest"


def _why_not(problem: Problem, gentlest: Schedule, needed: float) -> str:
    """What binds, and the tightest bound that is possible."""
    length = problem.workload.output_quantile(0.99)
    what = (
        f"an output of the 99th-percentile length ({length} tokens)"
        if problem.bound.about == "p99-length"
        else "99 % of requests"
    )
    return (
        f"latency bound {show_seconds(problem.bound.seconds)}, but the gentlest schedule, {gentlest}, needs "
        f"{show_seconds(needed)} for {what}: {_floor(problem, length)}; "
        f"the tightest bound that is possible is {_round_up(needed)}"
    )


def _floor(problem: Problem, length: int) -> str:
    """Where the time of the gentlest schedule goes: one row through all layers, once a token."""
    cost, layers = problem.cost, problem.profile.model.num_layers
    shard = cost.shards[min(cost.shards)]
    layer = float(shard.rest["decode"](1.0) + shard.decode_attention(1.0, problem.workload.mean_input + length / 2))
    around = float(shard.embed(1.0) + shard.head(1.0) + cost.overhead(1.0))
    return (
        f"what binds is one row alone, {layers} layers at {show_seconds(layer)} and {show_seconds(around)} around "
        f"them, {length} times"
    )


def _round_up(value: float) -> str:
    digits = 2 - math.floor(math.log10(value))
    return show_seconds(math.ceil(value * 10**digits) / 10**digits)
