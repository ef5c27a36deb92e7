"""Sizing: the fewest GPUs of a cluster that meet the bounds and the rate, and what more GPUs gain where none do.

Parts of a cluster are some GPUs of one node, or whole nodes. GPUs may stay idle, so that what suffices on some GPUs
suffices on more: sizes are doubled until one suffices, then the interval is bisected. Whatever is advised was optimized
for. Not here: how a part is used (`optimize.py`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from exeplan.core.bounds import utilizations
from exeplan.core.cluster import Cluster
from exeplan.core.plan import Plan
from exeplan.core.plan import as_json as plan_json
from exeplan.core.schedule import Schedule
from exeplan.errors import Infeasible
from exeplan.planner.choice.answers import Optimum
from exeplan.planner.choice.infeasible import too_tight
from exeplan.planner.choice.search_space import variants
from exeplan.planner.problems.headroom import is_most, most_rate
from exeplan.planner.problems.problem import Problem
from exeplan.planner.problems.replays import replay_estimate
from exeplan.planner.reports.explain import compared, larger
from exeplan.planner.reports.placement_text import show_copies
from exeplan.planner.reports.tables import table
from exeplan.policies import load_policy
from exeplan.progress import SILENT, Told
from exeplan.units import show_seconds

_LEFT = 0.6
"""Share of the work, as it is told, that another tried size leaves: how many it takes is not known before."""
_LOWER = 0.99
"""A latency below this share of another is worth more GPUs."""

_TENTH_MORE, _HALF_MORE = 1.1, 1.5
"""What is tried where as many nodes as a rate needs in proportion do not suffice."""

_UNLIKELY = 0.9
"""Below this share of the GPUs that a rate needs in proportion no part of several nodes is tried."""

_SEED = 0
"""Of the replays of a search."""

_VERIFIED = 2
"""Sizes whose closed form keeps a bound that are optimized for, before the one of the lowest latency."""

Solve = Callable[[Cluster, Told], Optimum]
"""The best plan on some GPUs; raises Infeasible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A number of GPUs, and its plan or why it has none."""

    num_gpus: int
    optimum: Optimum | None
    refusal: str = ""


def sizes(cluster: Cluster) -> list[int]:
    """Numbers of GPUs that are part of a node, or whole nodes; rising."""
    nodes = range(2, cluster.num_nodes + 1)
    return [*range(1, cluster.gpus_per_node + 1), *(n * cluster.gpus_per_node for n in nodes)]


def fewest_gpus(whole: Cluster, solve: Solve, told: Told = SILENT) -> tuple[Tried, tuple[Tried, ...]]:
    """The smallest size with a plan, and all tried sizes, rising. Raises Infeasible when all GPUs do not suffice."""
    found, tried = _fewest([whole.part(size) for size in sizes(whole)], solve, told)
    if found is None:
        refusal = tried[-1].refusal
        raise Infeasible(f"all {whole.num_gpus} GPUs of cluster {whole.name} do not suffice: {refusal}")
    return found, tried


def _fewest(
    clusters: Sequence[Cluster], solve: Solve, told: Told, guess: int = 0
) -> tuple[Tried | None, tuple[Tried, ...]]:
    """The first of the clusters, rising, that has a plan, and all that were tried; `guess` is the one tried first."""
    known: dict[int, Tried] = {}

    def works(index: int) -> bool:
        if index not in known:
            size, left = clusters[index], _LEFT ** len(known)
            part = told.part(1 - left, 1 - _LEFT * left, f"{size.num_gpus} GPUs")
            known[index] = tried_size(size, solve, part)
        return known[index].optimum is not None

    fails, reach, index = -1, len(clusters), guess
    while reach - fails > 1:
        fails, reach = (fails, index) if works(index) else (index, reach)
        if reach == len(clusters):
            index = _doubled(clusters, fails)
        elif fails >= 0:
            index = (fails + reach) // 2
        else:  # Nothing was too small yet.
            index = max(0, reach - (guess - reach + 1))
    tried = tuple(known[index] for index in sorted(known))
    return (known[reach] if reach < len(clusters) else None), never_worse(tried)


def _doubled(clusters: Sequence[Cluster], index: int) -> int:
    """The index of the first one with at least twice as many GPUs, or of the last."""
    double = 2 * clusters[index].num_gpus
    return next((i for i, cluster in enumerate(clusters) if cluster.num_gpus >= double), len(clusters) - 1)


def never_worse(tried: Sequence[Tried]) -> tuple[Tried, ...]:
    """The same, each size with the best plan of its own and of the smaller ones, which leaves GPUs idle."""
    best: Tried | None = None
    found = []
    for size in tried:
        if best and best.optimum and (not size.optimum or _serves_less(size.optimum, best.optimum)):
            size = replace(best, num_gpus=size.num_gpus)
        if size.optimum:
            best = size
        found.append(size)
    return tuple(found)


def _serves_less(one: Optimum, other: Optimum) -> bool:
    first, second = compared(one, other).rates
    return first < second


def _most(plan: Plan) -> float:
    """Requests/s that a plan sustains within its bounds; the estimate of one with arrivals is at their rate."""
    assert plan.replay is not None
    return most_rate(plan) or plan.replay.throughput


def with_more_gpus(
    error: Infeasible,
    problem: Problem,
    whole: Cluster,
    solve: Solve,
    policies: Sequence[str],
    told: Told = SILENT,
    *,
    margins: bool,
) -> Infeasible:
    """The refusal of a problem, completed by the fewest GPUs with a plan, or by what more GPUs would achieve; with
    `margins` what `solve` finds keeps these, too."""
    assert problem.cluster is not None
    own = problem.cluster.num_gpus
    clusters = _beyond(whole, own)
    if error.wider and not problem.required:
        return _completed(error, _lower_latency(problem, whole, clusters, solve, policies, told, margins=margins))
    guess = 0
    if error.reached:
        needed = own * problem.required / error.reached
        clusters = _likely(whole, clusters, needed)
        guess = next((i for i, size in enumerate(clusters) if size.num_gpus >= needed), len(clusters) - 1)
    found, tried = _fewest(clusters, solve, told, guess)
    if found is None:
        return _completed(error, f"with {tried[-1].num_gpus} GPUs {tried[-1].refusal}")
    before = [one for one in clusters if one.num_gpus < found.num_gpus][-1:]
    # For a rate larger pipelines than these are not searched.
    sure = not error.reached or found.num_gpus <= max(own, whole.gpus_per_node)
    sure = sure and all(_is_next(found.num_gpus, one.num_gpus, whole) for one in before)
    return _completed(error, _suffices(found, "are the fewest that suffice" if sure else "suffice", whole))


def _likely(whole: Cluster, clusters: list[Cluster], needed: float) -> list[Cluster]:
    """Those of the clusters that may sustain a rate which needs that many GPUs in proportion to what fewer sustain.

    Where the cluster is used up: as many nodes as that makes, a tenth more, and half as many again.
    """
    largest = clusters[-1]
    if largest.num_gpus > whole.num_gpus and whole.gpus_per_node < needed <= largest.num_gpus:
        nodes = math.ceil(needed / whole.gpus_per_node)
        numbers = sorted({nodes, math.ceil(_TENTH_MORE * nodes), math.ceil(_HALF_MORE * nodes)})
        return [replace(whole, num_nodes=number) for number in numbers]
    enough = [one for one in clusters if one.num_gpus <= whole.gpus_per_node or one.num_gpus >= _UNLIKELY * needed]
    return enough or [largest]


def _completed(error: Infeasible, advice: str) -> Infeasible:
    return Infeasible(f"{error}; {advice}", nearest=error.nearest, wider=error.wider, reached=error.reached)


def _suffices(found: Tried, words: str, whole: Cluster) -> str:
    """With the requests/s of its replay, which at a rate are those that are asked for."""
    assert found.optimum is not None
    plan = found.optimum.plan
    arrives = plan.arrival_rate is not None or plan.trace_arrivals
    up_to = "up to " if arrives and not is_most(plan.rate_headroom) else ""
    more = " and more" if is_most(plan.rate_headroom) else ""
    most = "" if arrives and most_rate(plan) is None else f" at {up_to}{_most(plan):.3g} requests/s{more}"
    return f"{found.num_gpus} GPUs {words}, by {show_copies(plan)}{most}{_beyond_file(found.num_gpus, whole)}"


def _beyond_file(num_gpus: int, whole: Cluster) -> str:
    """What to change in the cluster file for more GPUs than it has; empty where it has them."""
    if num_gpus <= whole.num_gpus:
        return ""
    nodes, rest = divmod(num_gpus, whole.gpus_per_node)
    if rest:
        return f"; those are more than the cluster has: raise `gpus_per_node` in its file to {num_gpus}"
    return f"; those are {nodes} nodes like these: raise `nodes` in the cluster file from {whole.num_nodes} to {nodes}"


def _beyond(whole: Cluster, num_gpus: int) -> list[Cluster]:
    """Clusters of more GPUs, rising: further parts of the whole; where it is used up, one GPU or node more, and twice,
    four and eight times as many."""
    if parts := [whole.part(size) for size in sizes(whole) if size > num_gpus]:
        return parts
    more = [replace(whole, num_nodes=whole.num_nodes * k) for k in (2, 4, 8)]
    return [larger(whole, num_gpus), *(one for one in more if one.num_gpus > larger(whole, num_gpus).num_gpus)]


def _is_next(size: int, before: int, whole: Cluster) -> bool:
    """Whether no number of nodes lies between two numbers of GPUs."""
    return size - before <= whole.gpus_per_node


def _lower_latency(
    problem: Problem,
    whole: Cluster,
    clusters: Sequence[Cluster],
    solve: Solve,
    policies: Sequence[str],
    told: Told,
    *,
    margins: bool,
) -> str:
    """What more GPUs do for the lowest latency: replicas do not lower it, a larger pipeline may."""
    lowest = []
    tried = [one for one in clusters if one in (clusters[0], clusters[-1]) or _is_power_of_two(one.num_nodes)]
    for number, cluster in enumerate(tried):
        told(f"lowest latency on {cluster.num_gpus} GPUs", number / (2 * len(tried)))
        lowest.append(_lowest(problem, cluster, policies))
    floors = [_seconds(one) for one in lowest]
    assert problem.cluster is not None
    if min(floors) >= _LOWER * lowest_latency(problem, problem.cluster, policies):
        return f"more GPUs, up to {clusters[-1].num_gpus}, do not lower it"
    least = next(i for i, floor in enumerate(floors) if _LOWER * floor <= min(floors))
    if min(floors) > problem.limit and not margins and (refusal := _replayed(problem, lowest[least])):
        return f"with {tried[least].num_gpus} GPUs {refusal}"
    enough = [i for i, floor in enumerate(floors[:least]) if floor <= problem.limit][:_VERIFIED]
    for number, index in enumerate([*enough, least]):
        size = tried[index]
        share = 0.5 + number / (2 * len(enough) + 2)
        found = tried_size(size, solve, told.part(share, 1.0, f"{size.num_gpus} GPUs"))
        if found.optimum:
            before = clusters[: clusters.index(size)][-1:]
            sure = number == 0 and all(one in tried and _is_next(size.num_gpus, one.num_gpus, whole) for one in before)
            return _suffices(found, "are the fewest that suffice" if sure else "suffice", whole)
    return f"with {tried[least].num_gpus} GPUs {found.refusal}"


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


@dataclass(frozen=True, slots=True)
class _Lowest:
    """The lowest-latency schedule on some GPUs, on its placement, and the seconds of what the bounds are on."""

    seconds: float
    placed: Problem
    schedule: Schedule


def lowest_latency(problem: Problem, cluster: Cluster, policies: Sequence[str]) -> float:
    """Seconds of what the bounds are on for the lowest-latency schedule on all these GPUs as one pipeline.

    By a policy whose stages are not separate where there is one: one request alone takes the same time with each.
    Infinite where the model does not fit.
    """
    return _seconds(_lowest(problem, cluster, policies))


def _seconds(lowest: _Lowest | None) -> float:
    return lowest.seconds if lowest else math.inf


def _lowest(problem: Problem, cluster: Cluster, policies: Sequence[str]) -> _Lowest | None:
    """As `lowest_latency`; None where the model does not fit."""
    names = [name for name in policies if not load_policy(name).SEPARATE_STAGES][:1] or list(policies)
    try:
        there = replace(problem, cluster=cluster, max_seqs=cluster.num_gpus * problem.max_seqs).part(cluster.num_gpus)
    except Infeasible:
        return None
    found: _Lowest | None = None
    for policy in map(load_policy, names):
        corner = {knob.name: knob.values[0] for knob in policy.knobs(problem.workload, 1)}
        for variant in variants(there, policy):
            schedule = policy.schedule({**corner, **variant.enumerated}, problem.workload)
            outcome = variant.problem.evaluate(schedule)
            if outcome.memory <= 1 and outcome.latency < _seconds(found):
                found = _Lowest(outcome.latency, variant.problem, replace(schedule, order=problem.order))
    return found


def _replayed(problem: Problem, lowest: _Lowest | None) -> str:
    """The tightest bound found to work, by a replay; empty where it keeps the bounds."""
    assert lowest is not None
    _, replay = replay_estimate(lowest.placed, lowest.schedule, seed=_SEED, record_passes=False)
    both = (replay, lowest.placed.estimate(lowest.schedule))
    shares = [max(pair) for pair in zip(*(utilizations(problem.bounds, one) for one in both), strict=True)]
    return too_tight(lowest.placed, lowest.schedule, shares).nearest if max(shares) > 1 else ""


def sizes_table(tried: tuple[Tried, ...]) -> str:
    """One row for each tried size."""
    rows = []
    for size in tried:
        if size.optimum is None or size.optimum.plan.replay is None:
            rows.append((str(size.num_gpus), size.refusal, "-", "-"))
            continue
        plan = size.optimum.plan
        idle = f", {size.num_gpus - plan.gpus} idle" if plan.gpus and plan.gpus < size.num_gpus else ""
        rows.append(
            (
                str(size.num_gpus),
                f"{show_copies(plan)}{idle}",
                f"{_most(plan):.3g}{' or more' if is_most(plan.rate_headroom) else ''}",
                show_seconds(size.optimum.plan.replay.latency),
            )
        )
    return table(("GPUs", "best plan", "most req/s", "latency"), rows)


def sizes_json(tried: Sequence[Tried]) -> list[dict[str, Any]]:
    """The same for programs: plan, requests/s and seconds are null for a size without a plan."""
    return [
        {
            "gpus": size.num_gpus,
            "refusal": size.refusal or None,
            **_figures(size.optimum.plan if size.optimum else None),
        }
        for size in tried
    ]


def _figures(plan: Plan | None) -> dict[str, Any]:
    if plan is None or plan.replay is None:
        return {"plan": None, "most_rate": None, "latency": None}
    return {"plan": plan_json(plan), "most_rate": _most(plan), "latency": plan.replay.latency}


def tried_size(cluster: Cluster, solve: Solve, told: Told = SILENT) -> Tried:
    """The plan on a cluster, or why there is none."""
    try:
        return Tried(num_gpus=cluster.num_gpus, optimum=solve(cluster, told))
    except Infeasible as error:
        return Tried(num_gpus=cluster.num_gpus, optimum=None, refusal=error.nearest or str(error))
