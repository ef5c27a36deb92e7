"""Candidates: the best schedule of each policy on pipelines of every size, by the closed form.

Not here: which of them is planned, which their replays decide (`optimize.py`).
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from typing import Any

from exeplan.core.schedule import Estimate, Placement, ReplicaGroup, Schedule, Sharding
from exeplan.errors import Infeasible
from exeplan.forked import num_processes
from exeplan.planner.choice.infeasible import policy_refusal
from exeplan.planner.choice.search_progress import Counter, Message, SearchProgress, Tell, tell_nothing
from exeplan.planner.choice.search_space import Outcomes, search_variants
from exeplan.planner.problems.balance_stages import SMALL
from exeplan.planner.problems.problem import Problem
from exeplan.planner.problems.replicas import (
    best_division,
    division_throughput,
    pipeline_sizes,
    sizes_between,
)
from exeplan.policies import load_policy
from exeplan.search.search import Outcome, Result

Key = tuple[int, str]
"""The number of GPUs of a pipeline, and its policy."""
_TELL_SECONDS = 0.2
"""Between two looks at what the workers tell."""
_OF_POINTS = 0.8
"""How the time of a search rises with the steps of bisections along all knobs, about: a second knob is not bisected for
every value of the first."""
_ROUNDING = 1e-9
Found = tuple[float, tuple[Result, Placement] | None]
"""The throughput that a search was told to beat, and what it found."""
Known = dict[Hashable, Found]
"""Searches of one request that were done, by what differs between its problems."""


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


def reached(candidate: Candidate) -> float:
    """Requests/s of the best point of a search, whether that suffices or not; 0 where none keeps the bounds."""
    return candidate.search.best.outcome.throughput if candidate.search and candidate.search.best else 0.0


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
    known: Known | None = None,
    outcomes: Outcomes | None = None,
    tell: Tell = tell_nothing,
) -> Candidate:
    """The best schedule of a policy under the bounds, in none of the variants of the schedules `without`.

    One of less throughput than `at_least` need not be found. The cost of a search `before` is added. What is `known`
    is not searched again, and what is found is added to it, as `outcomes` are.
    """
    key = _key(problem, policy, method)
    if known is not None and not without and key in known and _covers(known[key], at_least):
        found = known[key][1]
    else:
        found = search_variants(
            problem,
            policy,
            method=method,
            bound=problem.limit,
            at_least=at_least,
            without=without,
            evaluated=Counter(tell),
            outcomes=outcomes,
        )
        if known is not None and not without:
            known[key] = at_least, found
    if found is None:
        apart = load_policy(policy).SEPARATE_STAGES
        why = "needs devices that prefill and others that decode, each of them with room" if apart else "has no layout"
        refusal = f"{policy} {why} for the model"
        return Candidate(policy=policy, schedule=None, placement=None, estimate=None, search=None, refusal=refusal)
    result, placement = found
    if before is not None:
        points, seconds = before.num_points + result.num_points, before.seconds + result.seconds
        result = replace(result, num_points=points, seconds=seconds)
    # Without a cluster the placement is the problem's own, with its links.
    placed = problem.at(placement) if problem.cluster else problem
    if result.best is None or result.best.outcome.throughput < problem.required:
        refusal = policy_refusal(placed, policy, result)
        return Candidate(
            policy=policy, schedule=None, placement=placement, estimate=None, search=result, refusal=refusal
        )
    schedule = problem.schedule(policy, result.best.point)
    try:
        if problem.arrivals:
            roomy = placed.with_spare_places(schedule)
            # Room for bursts makes larger batches, too: not where that breaks a bound.
            schedule = roomy if placed.keeps(roomy) else schedule
        schedule = placed.with_shorter_stalls(schedule)
        estimate = placed.estimate(schedule, attainment=False)
    except Infeasible as refusal:  # The rate is its whole capacity: a queue would grow without end.
        return Candidate(
            policy=policy, schedule=None, placement=placement, estimate=None, search=result, refusal=str(refusal)
        )
    return Candidate(policy=policy, schedule=schedule, placement=placement, estimate=estimate, search=result)


def _key(problem: Problem, policy: str, method: str) -> Hashable:
    """What a search depends on and may differ within a request; the rate only decides what becomes of its result."""
    backlog = problem.arrivals is None
    return policy, method, problem.cluster, problem.bounds, problem.memory, problem.max_seqs, backlog


def _covers(found: Found, at_least: float) -> bool:
    """Whether a search that had another throughput to beat answers this one too."""
    beaten, what = found
    best = what[0].best if what else None
    return (
        what is None or beaten <= at_least * (1 + _ROUNDING) or (best is not None and best.outcome.throughput >= beaten)
    )


def candidates(
    problem: Problem,
    parts: Mapping[int, Problem],
    policies: Sequence[str],
    method: str,
    *,
    known: Known | None = None,
    outcomes: Outcomes | None = None,
    rivals: float = 0.0,
    alike: bool = False,
    at_least: float = 0.0,
    progress: SearchProgress | None = None,
) -> dict[Key, Candidate]:
    """Every policy's candidate on pipelines of every size; on a cluster the policies are searched in parallel. What was
    evaluated is added to the `outcomes`.

    `parts` are the problems of one pipeline by its number of GPUs, rising; `problem` is that of the whole cluster. On
    one device a policy with less than the share `rivals` of the throughput of those before it need not be found, and
    nowhere one of less than `at_least` requests/s of all replicas. Where those are `alike`, no other sizes are tried.
    """
    known, outcomes = {} if known is None else known, {} if outcomes is None else outcomes
    workers = num_workers(problem, policies)
    if workers == 1:
        tell = progress.take if progress else tell_nothing
        found = dict[Key, Candidate]()
        for policy in policies:
            most = max(map(sustained, found.values()), default=0.0) if len(parts) == 1 else 0.0
            beaten = max(at_least, rivals * most)
            found |= _of_policy(problem, parts, policy, method, known, outcomes, tell, alike=alike, at_least=beaten)
        return found
    _prepare(problem)
    context = get_context("fork")
    told: SimpleQueue[Message] = context.SimpleQueue()
    with ProcessPoolExecutor(workers, context, initializer=_share, initargs=(problem, parts, known, told)) as pool:
        order = _largest_first(problem, policies)
        futures = [pool.submit(_shared_candidates, of_law, method, alike, at_least) for of_law in order]
        _follow(futures, told, progress)
        done = [future.result() for future in futures]
    for of_law, (_, new, evaluated) in zip(order, done, strict=True):
        known |= new
        law = load_policy(of_law[0]).steady_state  # A function of a user's file cannot be sent.
        outcomes |= {(law, *key): outcome for key, outcome in evaluated.items()}
    found = {key: one for of_policies, _, _ in done for key, one in of_policies.items()}
    return {key: found[key] for policy in policies for key in found if key[1] == policy}


def _prepare(problem: Problem) -> None:
    """What every worker needs, once and not in each of them: curves, and a module that np.unique imports."""
    import_module("numpy.ma")
    for size in problem.profile.tensor_parallel_sizes:
        problem.cost.timings.shard(Sharding(size), True)


def _largest_first(problem: Problem, policies: Sequence[str]) -> list[list[str]]:
    """By what their searches are likely to take, so that no worker is left alone with a long one: stages that prefill
    are split off in several ways, enumerated variables are tried one by one, knobs by bisection. Policies of one law
    are together on a cluster so small that they share most outcomes: a large one they split differently."""
    share = problem.cluster is None or problem.cluster.num_gpus <= SMALL

    def size(policy: str) -> tuple[bool, float]:
        module = load_policy(policy)
        knobs = module.knobs(problem.workload, problem.max_seqs)
        points = math.prod(len(knob.values).bit_length() for knob in knobs)
        return module.SEPARATE_STAGES, len(module.enumerated(num_stages=2)) * points**_OF_POINTS

    alike: dict[Hashable, list[str]] = {}
    for policy in sorted(policies, key=size, reverse=True):
        alike.setdefault(load_policy(policy).steady_state if share else policy, []).append(policy)
    return list(alike.values())


def _follow(futures: Sequence[Future[Any]], told: "SimpleQueue[Message]", progress: SearchProgress | None) -> None:
    """Passes on what the workers tell until they are done: a full queue would stop them."""
    while True:
        running = wait(futures, timeout=_TELL_SECONDS, return_when="FIRST_EXCEPTION").not_done
        while not told.empty():
            message = told.get()
            if progress:
                progress.take(message)
        if not running:
            return
        if progress:
            progress.tell()


def _of_policy(
    problem: Problem,
    parts: Mapping[int, Problem],
    policy: str,
    method: str,
    known: Known,
    outcomes: Outcomes,
    tell: Tell,
    *,
    alike: bool,
    at_least: float,
) -> dict[Key, Candidate]:
    """One policy's candidates. A large pipeline is searched for more than small ones on as many GPUs have together."""
    found: dict[int, Candidate] = {}
    for size, part in parts.items():
        found[size] = _of_size(
            problem, part, policy, method, found, known, outcomes, tell, alike=alike, at_least=at_least
        )
    if problem.cluster is None or problem.one_pipeline or alike:
        return {(size, policy): one for size, one in found.items()}
    tried = {*found, *pipeline_sizes(problem.cluster)}
    while sizes := sizes_between(problem.cluster, {size: sustained(one) for size, one in found.items()}, tried):
        tried.update(sizes)
        for size in sizes:
            if between := part_of(problem, size):
                found[size] = _of_size(
                    problem, between, policy, method, found, known, outcomes, tell, alike=alike, at_least=at_least
                )
    return {(size, policy): one for size, one in found.items()}


def _of_size(
    problem: Problem,
    part: Problem,
    policy: str,
    method: str,
    smaller: Mapping[int, Candidate],
    known: Known,
    outcomes: Outcomes,
    tell: Tell,
    *,
    alike: bool,
    at_least: float,
) -> Candidate:
    # Also where it misses a required rate: a larger pipeline that has less misses it too.
    rates = {size: reached(one) for size, one in smaller.items() if reached(one)}
    if method != "branch-and-bound":
        beaten = 0.0
    elif (problem.arrivals or alike) and part.cluster is not None:
        together = max((problem.replicas_of(size) * value for size, value in rates.items()), default=0.0)
        beaten = max(at_least, together) / problem.replicas_of(part.cluster.num_gpus)
    else:
        fitting = {size: value for size, value in rates.items() if part.cluster and size <= part.cluster.num_gpus}
        beaten = max(at_least, division_throughput(fitting, best_division(fitting, part.cluster)))
    found = candidate(part, policy, method, at_least=beaten, known=known, outcomes=outcomes, tell=tell)
    tell((part.cluster.num_gpus if part.cluster else 1, policy))
    return found


def part_of(problem: Problem, size: int) -> Problem | None:
    """The problem of one of as many pipelines of that many GPUs as there is room for; None where one is too small."""
    try:
        return problem.part(size, replicas=problem.replicas_of(size))
    except Infeasible:
        return None


def num_workers(problem: Problem, policies: Sequence[str]) -> int:
    """Processes that search at once: one where there is little to search."""
    if problem.cluster is None or problem.cluster.num_gpus == 1:
        return 1
    return min(len(policies), num_processes())


_shared: list[tuple[Problem, Mapping[int, Problem], Known, "SimpleQueue[Message]"]] = []
"""The problems of this worker process, inherited by the fork: curves and caches cannot be sent."""


def _share(problem: Problem, parts: Mapping[int, Problem], known: Known, told: "SimpleQueue[Message]") -> None:
    _shared[:] = [(problem, parts, known, told)]


def _shared_candidates(
    policies: Sequence[str], method: str, alike: bool, at_least: float
) -> tuple[dict[Key, Candidate], Known, dict[tuple[Hashable, ...], Outcome]]:
    """The candidates of policies of one law, the searches that were not known before, and what was evaluated, by
    placement and variables."""
    problem, parts, known, told = _shared[0]
    before, found, outcomes = dict(known), dict[Key, Candidate](), Outcomes()
    for policy in policies:
        found |= _of_policy(problem, parts, policy, method, known, outcomes, told.put, alike=alike, at_least=at_least)
    new = {key: one for key, one in known.items() if before.get(key) is not one}
    return found, new, {key[1:]: outcome for key, outcome in outcomes.items()}
