"""Candidates: the best schedule of each policy on pipelines of every size, by the closed form.

Not here: which of them is planned, which their replays decide (`optimize.py`).
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_all_start_methods, get_context

from exeplan.core.schedule import Estimate, Placement, ReplicaGroup, Schedule
from exeplan.errors import Infeasible
from exeplan.planner.infeasible import policy_refusal
from exeplan.planner.problem import Problem
from exeplan.planner.replicas import (
    best_division,
    division_throughput,
    num_replicas,
    pipeline_sizes,
    sizes_between,
)
from exeplan.planner.search_space import search_variants
from exeplan.search.search import Result

Key = tuple[int, str]
"""The number of GPUs of a pipeline, and its policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The best schedule of one policy and its placement, or why it has none."""

    policy: str
    schedule: Schedule | None
    placement: Placement | None
    """Of the schedule, or of the lowest-latency one where none keeps the bound; None where the policy does not fit."""
    estimate: Estimate | None
    """Of all replicas together."""
    search: Result | None
    """All of the policy's searches together, for one pipeline; None where there was nothing to search."""
    refusal: str = ""
    replicas: tuple[int, ...] = (0,)
    """The first device of each replica."""
    more_replicas: tuple[ReplicaGroup, ...] = ()
    replayed: float | None = None
    """Requests/s of all replicas by replay; None where not all of them were replayed."""

    @property
    def num_replicas(self) -> int:
        return len(self.replicas) + sum(group.num_replicas for group in self.more_replicas)


def not_searched(policy: str) -> Candidate:
    """The candidate on pipelines of a size that another policy alone was searched on."""
    return Candidate(policy=policy, schedule=None, placement=None, estimate=None, search=None, refusal="not searched")


def sustained(candidate: Candidate) -> float:
    """Requests/s of one pipeline with its batches full: with an arrival rate, more than arrives."""
    if candidate.schedule is None:
        return 0.0
    if candidate.search is not None and candidate.search.best is not None:
        return candidate.search.best.outcome.throughput
    return candidate.estimate.throughput if candidate.estimate else 0.0


def capacity(one: Candidate) -> float:
    """Requests/s of all replicas with their batches full."""
    if one.more_replicas and one.estimate:  # Under a backlog, so that the estimate is of full batches.
        return one.estimate.throughput
    return one.num_replicas * sustained(one)


def candidate(
    problem: Problem,
    policy: str,
    method: str,
    before: Result | None = None,
    *,
    at_least: float = 0.0,
    without: Sequence[tuple[Placement, Schedule]] = (),
) -> Candidate:
    """The best schedule of a policy under the bounds, in none of the variants of the schedules `without`.

    One of less throughput than `at_least` need not be found. The cost of a search `before` is added.
    """
    found = search_variants(problem, policy, method=method, bound=problem.limit, at_least=at_least, without=without)
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
        estimate = placed.estimate(schedule, attainment=False)
    except Infeasible as refusal:  # The rate is its whole capacity: a queue would grow without end.
        return Candidate(
            policy=policy, schedule=None, placement=placement, estimate=None, search=result, refusal=str(refusal)
        )
    return Candidate(policy=policy, schedule=schedule, placement=placement, estimate=estimate, search=result)


def candidates(
    problem: Problem, parts: Mapping[int, Problem], policies: Sequence[str], method: str
) -> dict[Key, Candidate]:
    """Every policy's candidate on pipelines of every size; on a cluster the policies are searched in parallel.

    `parts` are the problems of one pipeline by its number of GPUs, rising; `problem` is that of the whole cluster.
    """
    workers = min(len(policies), _num_workers())
    if problem.cluster is None or problem.cluster.num_gpus == 1 or workers < 2:
        found = [_of_policy(problem, parts, policy, method) for policy in policies]
    else:
        context = get_context("fork")
        with ProcessPoolExecutor(workers, context, initializer=_share, initargs=(problem, parts)) as pool:
            found = list(pool.map(_shared_candidates, policies, [method] * len(policies)))
    return {key: one for of_policy in found for key, one in of_policy.items()}


def _of_policy(problem: Problem, parts: Mapping[int, Problem], policy: str, method: str) -> dict[Key, Candidate]:
    """One policy's candidates. A large pipeline is searched for more than small ones on as many GPUs have together."""
    found: dict[int, Candidate] = {}
    for size, part in parts.items():
        found[size] = _of_size(problem, part, policy, method, found)
    if problem.cluster is None or problem.one_pipeline:
        return {(size, policy): one for size, one in found.items()}
    tried = {*found, *pipeline_sizes(problem.cluster)}
    while sizes := sizes_between(problem.cluster, {size: sustained(one) for size, one in found.items()}, tried):
        tried.update(sizes)
        for size in sizes:
            if part := part_of(problem, size):
                found[size] = _of_size(problem, part, policy, method, found)
    return {(size, policy): one for size, one in found.items()}


def _of_size(problem: Problem, part: Problem, policy: str, method: str, smaller: Mapping[int, Candidate]) -> Candidate:
    known = {size: sustained(one) for size, one in smaller.items() if one.schedule}
    if method != "branch-and-bound":
        at_least = 0.0
    elif problem.arrivals and part.cluster is not None:
        together = max((num_replicas(problem.cluster, size) * value for size, value in known.items()), default=0.0)
        at_least = together / num_replicas(problem.cluster, part.cluster.num_gpus)
    else:
        fitting = {size: value for size, value in known.items() if part.cluster and size <= part.cluster.num_gpus}
        at_least = division_throughput(fitting, best_division(fitting, part.cluster))
    return candidate(part, policy, method, at_least=at_least)


def part_of(problem: Problem, size: int) -> Problem | None:
    """The problem of one of as many pipelines of that many GPUs as there is room for; None where one is too small."""
    try:
        return problem.part(size, replicas=num_replicas(problem.cluster, size))
    except Infeasible:
        return None


def _num_workers() -> int:
    """Processes that may search at once; 1 on a system without fork, as the problem is passed by the fork."""
    if "fork" not in get_all_start_methods():
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_shared: list[tuple[Problem, Mapping[int, Problem]]] = []
"""The problems of this worker process, inherited by the fork: curves and caches cannot be sent."""


def _share(problem: Problem, parts: Mapping[int, Problem]) -> None:
    _shared[:] = [(problem, parts)]


def _shared_candidates(policy: str, method: str) -> dict[Key, Candidate]:
    return _of_policy(*_shared[0], policy, method)
