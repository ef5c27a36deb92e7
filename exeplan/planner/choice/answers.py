"""What a search answers: the plan of the best division with what is told of every policy, or why there is none.

Not here: which division is the best (`pipelines.py`), and the sentences of refusals (`infeasible.py`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from exeplan.core.bounds import binding, utilizations
from exeplan.core.plan import Plan
from exeplan.core.schedule import ROUTERS, Estimate, Placement, ReplicaGroup, Schedule
from exeplan.errors import Infeasible
from exeplan.planner.choice.candidates import Candidate, Key, candidate, reached, sustained
from exeplan.planner.choice.infeasible import burst, too_slow, too_tight, wider_bounds
from exeplan.planner.choice.most_headroom import headrooms
from exeplan.planner.choice.pipelines import Pipelines, Proof, filled, keys_of, less_margin, lowest_latency, placed_at
from exeplan.planner.margins.margins import Margins, margins
from exeplan.planner.problems.headroom import with_headroom
from exeplan.planner.problems.problem import Problem
from exeplan.planner.problems.ranking import Order
from exeplan.planner.problems.replays import FullBatches, full_batches, kv_cache_tokens, promised, too_short
from exeplan.planner.problems.replicas import GroupFigures, division_throughput, first_devices, together
from exeplan.search.grid import Slack
from exeplan.search.search import Result
from exeplan.simulator.closed_form import steady_state
from exeplan.simulator.run import Run
from exeplan.units import show_apart, show_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The winner as a plan, the best of every policy, and the replay of the winner's first replica by the first
    seed."""

    plan: Plan
    candidates: tuple[Candidate, ...]
    beyond: tuple[str, ...]
    """Where the winner's estimate left the measured range."""
    unproven: tuple[str, ...]
    """Why replays are too short to prove the plan; empty where they are not."""
    run: Run
    order: Order | None
    """Against the next best division; None where no other was replayed."""
    full: FullBatches | None = None
    """With an arrival rate, at which batches are seldom full; None under a backlog, where they always are."""
    groups: tuple[GroupFigures, ...] = ()
    """Of unequal replicas the figures of each; empty where all are equal."""
    seeds: tuple[Estimate, ...] = ()
    """Replays of the whole plan, by seed; its `replay` is their mean, and what `replayed` of its policy counts."""


def solved(pipelines: Pipelines, division: Mapping[int, tuple[str, int]]) -> Optimum:
    """The plan of a division, all of whose pipelines are proved."""
    keys = sorted(keys_of(division), key=lambda key: (-division[key[0]][1] * pipelines.score(key), key))
    groups = _groups(pipelines, division, keys)
    first, proof = keys[0], pipelines.proofs[keys[0]]
    placed = placed_at(pipelines.parts[first[0]], groups[0].placement)
    counts = [group.num_replicas for group in groups]
    # The search's own estimates may be held to tighter bounds.
    pairs = zip(keys, groups, strict=True)
    alone = [(placed_at(pipelines.parts[size], group.placement), group) for (size, _), group in pairs]
    estimates = [one.estimate(group.schedule) for one, group in alone]
    plan = _plan(pipelines.problem, placed, groups, [pipelines.proofs[key].margin for key in keys])
    found = tuple(_candidate(pipelines, policy) for policy in pipelines.policies)
    seeds = _seeds(pipelines, keys, counts)
    stalls = [one.longest_stall(group.schedule) for one, group in alone]
    full = full_batches(alone) if pipelines.problem.arrivals else None
    plan = replace(
        plan,
        capacity=full.of_each(plan.num_replicas) if full else plan.capacity,
        longest_stall=asdict(max(stalls, key=lambda stall: stall.seconds)),
        estimate=promised(proof.replayed, estimates[0]) if pipelines.problem.arrivals else together(estimates, counts),
        # What the order counts, too: pipelines of unequal replicas may have unequal numbers of seeds.
        replay=proof.replayed
        if pipelines.problem.arrivals
        else together([pipelines.proofs[key].replayed for key in keys], counts),
        search={
            **_summary([one.search for one in pipelines.found.values() if one.search], pipelines.method),
            **_gap(pipelines),
            "replays": len(seeds),
        },
    )
    if pipelines.effort.report:
        known = headrooms(pipelines, first) if pipelines.problem.arrivals else None
        plan = with_headroom(plan, [one for one, _ in alone], known=known)
    assert plan.estimate is not None
    assert plan.replay is not None
    for figures in (plan.estimate, plan.replay):
        assert max(utilizations(pipelines.problem.bounds, figures)) <= 1, "a plan keeps its bounds by its own estimate"
    steady = steady_state(plan.schedule, pipelines.problem.workload, placed.cost)
    ranked = None if pipelines.problem.arrivals else pipelines.order(division)
    return Optimum(
        plan=plan,
        candidates=found,
        beyond=placed.cost.beyond(steady.cycle),
        unproven=tuple(
            filter(None, (too_short(one, group.schedule, replicas=group.num_replicas) for one, group in alone))
        ),
        run=proof.run,
        order=ranked and ranked[0],
        full=full,
        groups=tuple(
            GroupFigures(group=group, estimate=one, replay=pipelines.proofs[key].replayed)
            for key, group, one in zip(keys, groups, estimates, strict=True)
            if len(groups) > 1
        ),
        seeds=seeds,
    )


def _seeds(pipelines: Pipelines, keys: Sequence[Key], counts: Sequence[int]) -> tuple[Estimate, ...]:
    """Replays of all replicas of proved pipelines, by the seeds that all of them were replayed with."""
    each = [pipelines.proofs[key].replays for key in keys]
    if pipelines.problem.arrivals:  # Of all replicas already.
        return each[0]
    return tuple(together(of_seed, counts) for of_seed in zip(*each, strict=False))


def _gap(pipelines: Pipelines) -> dict[str, Any]:
    """`gap`: how much more throughput, relative and by the closed form, what the searches left out could have; and
    `uncounted_dips`: the largest of those that no gap counts, of the searches that such dips might lift to more."""
    searches = {key: one.search for key, one in pipelines.found.items() if one.search and one.search.gap is not None}
    gaps = {key: 1 + (search.gap or 0.0) for key, search in searches.items()}
    before, after = _throughput(pipelines, {}), _throughput(pipelines, gaps)
    if not before or not gaps:
        return {"gap": None, "uncounted_dips": None}
    dips = {key: search.uncounted for key, search in searches.items() if search.uncounted is not None}
    found = Slack()
    for key, uncounted in dips.items():
        if uncounted.most and _throughput(pipelines, {key: gaps[key] * (1 + uncounted.most)}) > before:
            found = found.joined(uncounted)
    return {"gap": after / before - 1, "uncounted_dips": asdict(found) if dips else None}


def _throughput(pipelines: Pipelines, factors: Mapping[Key, float]) -> float:
    """Requests/s of the best division by the closed form, if pipelines had so many times what they have."""
    scores = {
        size: max(sustained(pipelines.found[size, p]) * factors.get((size, p), 1.0) for p in pipelines.policies)
        for size in pipelines.parts
    }
    return division_throughput(scores, pipelines.divided({size: value for size, value in scores.items() if value}))


def _groups(
    pipelines: Pipelines, division: Mapping[int, tuple[str, int]], keys: Sequence[Key]
) -> tuple[ReplicaGroup, ...]:
    """The replicas of a division, the group with the most throughput first."""
    devices = first_devices({size: count for size, (_, count) in division.items()}, pipelines.problem.cluster)
    groups = []
    for key in keys:
        schedule, placement = pipelines.found[key].schedule, pipelines.found[key].placement
        assert schedule is not None
        assert placement is not None
        groups.append(
            ReplicaGroup(
                schedule=schedule,
                placement=placement,
                first_devices=devices[key[0]],
                kv_cache_tokens=kv_cache_tokens(placed_at(pipelines.parts[key[0]], placement), schedule),
                capacity=float(f"{sustained(pipelines.found[key]):.4g}") if len(keys) > 1 else None,
            )
        )
    return tuple(groups)


def _candidate(pipelines: Pipelines, policy: str) -> Candidate:
    """A policy's own best division, or why it has none."""
    of_policy = {size: pipelines.found[size, policy] for size in pipelines.parts}
    searches = [one.search for one in of_policy.values() if one.search]
    if not (division := pipelines.best([policy])):
        return _refused(pipelines, policy, of_policy, searches)
    keys = [(size, policy) for size in sorted(division, key=lambda s: -division[s][1] * pipelines.score((s, policy)))]
    first, *more = _groups(pipelines, division, keys)
    estimates = [one for key in keys if (one := pipelines.found[key].estimate) is not None]
    proved = all(key in pipelines.proofs for key in keys)
    if pipelines.problem.arrivals and (proved or pipelines.effort.report):
        return _at_rate(pipelines, keys[0], first, _added(pipelines.found[keys[0]].search, searches))
    return replace(
        pipelines.found[keys[0]],
        estimate=together(estimates, [first.num_replicas, *(group.num_replicas for group in more)]),
        search=_added(pipelines.found[keys[0]].search, searches),
        replicas=first.first_devices,
        more_replicas=tuple(more),
        replayed=pipelines.throughput(division) if proved else None,
    )


def _at_rate(pipelines: Pipelines, key: Key, group: ReplicaGroup, search: Result | None) -> Candidate:
    """A policy's best pipeline where requests arrive: what the replay of all its replicas says."""
    found, bounds = replace(pipelines.found[key], search=search), pipelines.problem.bounds
    replayed = pipelines.told(key)
    if key not in pipelines.proofs:
        bound, share = binding(bounds, replayed) or (pipelines.problem.bound, 0.0)
        if share > 1:
            needed, _ = show_apart(share * bound.seconds, bound.seconds)
            refusal = f"{key[1]}: the schedule that was found needs {needed} {bound.name}"
            return replace(found, schedule=None, refusal=refusal)
    return replace(found, estimate=replayed, replicas=group.first_devices, replayed=replayed.throughput)


def unreplayed(pipelines: Pipelines) -> list[Key]:
    """Where requests arrive: each policy's best pipeline that no replay has told of."""
    if not (pipelines.problem.arrivals and pipelines.effort.report):
        return []
    best = [pipelines.best([policy]) for policy in pipelines.policies]
    return [key for division in best for key in keys_of(division) if key not in pipelines.proofs]


def tell(pipelines: Pipelines, keys: Sequence[Key]) -> None:
    """Replays pipelines for what is told of their policies."""
    pipelines.replays.tell([_replicas(pipelines, key) for key in keys])


def begin_replays(pipelines: Pipelines, first: Key) -> None:
    """Where requests arrive: the first replay, and at the same time those for what is told of the other policies."""
    if others := [_replicas(pipelines, key) for key in unreplayed(pipelines) if key != first]:
        pipelines.replays.begin(_replicas(pipelines, first), others)


def _replicas(pipelines: Pipelines, key: Key) -> tuple[Problem, Schedule, int]:
    """The problem of one replica of a pipeline that has a schedule, that, and their number."""
    found = pipelines.found[key]
    assert found.schedule is not None
    assert found.placement is not None
    return placed_at(pipelines.parts[key[0]], found.placement), found.schedule, pipelines.count(key[0])


def _refused(
    pipelines: Pipelines, policy: str, of_policy: Mapping[int, Candidate], searches: Sequence[Result]
) -> Candidate:
    """Why a policy has no plan: by the size that comes nearest to one."""

    def distance(size: int) -> tuple[float, bool, bool, float]:
        one = of_policy[size]
        short_of_memory = one.search is not None and "memory" in one.search.what_binds
        return -pipelines.count(size) * reached(one), one.search is None, short_of_memory, lowest_latency(one)

    size = min(of_policy, key=distance)
    refused = of_policy[size]
    most = pipelines.count(size) * reached(refused)
    if most and not _suffices(pipelines, (size, policy)):
        refused = replace(refused, refusal=f"{policy} sustains {most:.3g} requests/s within the bounds")
    return replace(refused, search=_added(refused.search, searches))


def _suffices(pipelines: Pipelines, key: Key) -> bool:
    """Whether full batches within the bounds serve a pipeline's share of the rate: it is refused for another reason."""
    return reached(pipelines.found[key]) >= pipelines.parts[key[0]].required


def refuse_rate(pipelines: Pipelines, *, advise: bool) -> None:
    """Raises Infeasible for a rate that no schedule sustains; returns where the bounds alone are out of reach, of the
    search or of the replays of what it found."""
    problem = pipelines.problem

    def most_reached(key: Key) -> tuple[float, int]:
        return pipelines.count(key[0]) * reached(pipelines.found[key]), -key[0]

    if pipelines.unsure and not pipelines.best():
        raise pipelines.unsure[max(pipelines.unsure, key=most_reached)]
    if problem.arrivals and pipelines.broken:
        schedule, replayed = min(pipelines.broken, key=lambda pair: max(utilizations(problem.bounds, pair[1])))
        bound, share = binding(problem.bounds, replayed) or (problem.bound, 0.0)
        if share > 1:
            raise burst(problem, schedule, bound, share * bound.seconds)
    division = pipelines.best()
    if not division and not problem.arrivals:
        return
    if not division:
        best = max(pipelines.found, key=most_reached)
        if _suffices(pipelines, best):
            raise Infeasible(pipelines.found[best].refusal)
        division = {best[0]: (best[1], pipelines.count(best[0]))}
    size = max(division, key=lambda size: division[size][1] * reached(pipelines.found[size, division[size][0]]))
    policy, _ = division[size]
    most = pipelines.found[size, policy]
    if most.search is None or most.search.best is None or most.placement is None:
        return
    raise _too_slow(pipelines, division, size, advise=advise)


def _too_slow(pipelines: Pipelines, division: Mapping[int, tuple[str, int]], size: int, *, advise: bool) -> Infeasible:
    """That a division serves less than is required; of its pipelines of this size is what binds."""
    problem, (policy, count) = pipelines.problem, division[size]
    most = pipelines.found[size, policy]
    assert most.search is not None
    assert most.placement is not None
    part = replace(pipelines.parts[size], min_throughput=problem.min_throughput / count)

    def search_again(other: Problem) -> tuple[float, Placement | None]:
        bounds = less_margin(other, pipelines.margin) if math.isfinite(other.limit) else other.bounds
        found = candidate(other.held_to(bounds), policy, pipelines.method)
        return reached(found), found.placement

    return too_slow(
        problem,
        placed_at(part, most.placement),
        most.search,
        reached=pipelines.throughput(division) if not problem.arrivals else count * reached(most),
        by=[(number, _most_throughput(pipelines, (size, name))) for size, (name, number) in division.items()],
        advice=wider_bounds(part, search_again, replicas=count) if advise else "",
        margin=pipelines.margin,
    )


def _most_throughput(pipelines: Pipelines, key: Key) -> Schedule:
    """The schedule of the most throughput within the bounds, whether that suffices or not."""
    found = pipelines.found[key]
    if found.schedule is not None:
        return found.schedule
    assert found.search is not None
    assert found.search.best is not None
    return pipelines.problem.schedule(key[1], found.search.best.point)


def last_resort(pipelines: Pipelines, *, advise: bool) -> Optimum:
    """The lowest-latency schedule of all, if it keeps the bounds and serves what is required; its latency is the
    tightest bound found to work."""
    fitting = [k for k, c in pipelines.found.items() if c.search and _fits(c.search)]
    if not fitting:
        refusals = "; ".join(_candidate(pipelines, policy).refusal for policy in pipelines.policies)
        raise Infeasible(f"no schedule fits {show_bytes(pipelines.problem.memory)} of memory: {refusals}")
    key = min(fitting, key=lambda k: (lowest_latency(pipelines.found[k]), k))
    best, part = pipelines.found[key], pipelines.parts[key[0]]
    assert best.placement is not None
    assert best.search is not None
    placed = placed_at(part, best.placement)
    schedule = pipelines.problem.schedule(best.policy, best.search.lowest_latency.point)
    estimate = placed.estimate(schedule)  # Refuses a rate beyond its capacity before a long replay.
    run, replays = pipelines.replays.of(placed, schedule, replicas=pipelines.count(key[0]))
    winner = replace(best, schedule=schedule, estimate=estimate, refusal="")
    margin = pipelines.margin
    if pipelines.risk:
        margin = margins(placed, schedule, pipelines.risk, seed=pipelines.seed)
    proof = Proof(run=run, replays=replays, margin=margin)
    shares = filled(part, winner, proof)
    if max(shares) > 1:
        raise too_tight(placed, schedule, shares, margin)
    pipelines.found[key] = winner
    pipelines.proofs[key] = proof
    division = {key[0]: (key[1], pipelines.count(key[0]))}
    if not pipelines.problem.arrivals and pipelines.throughput(division) < pipelines.problem.min_throughput:
        raise _too_slow(pipelines, division, key[0], advise=advise)
    return solved(pipelines, division)


def _fits(search: Result) -> bool:
    """Whether its lowest-latency schedule fits the memory; where there is a best one, what binds is about that."""
    return search.best is not None or "memory" not in search.what_binds


def _added(search: Result | None, searches: Sequence[Result]) -> Result | None:
    """A search with the cost of all of them, and the largest gap."""
    if search is None:
        return None
    return replace(
        search,
        num_points=sum(one.num_points for one in searches),
        grid_size=sum(one.grid_size for one in searches),
        seconds=sum(one.seconds for one in searches),
        gap=max((one.gap for one in searches if one.gap is not None), default=None),
    )


def _plan(problem: Problem, placed: Problem, groups: Sequence[ReplicaGroup], margins: Sequence[Margins | None]) -> Plan:
    """The plan of these replicas without its estimates; `placed` is the problem of one of the first group."""
    model, first = problem.profile.model, groups[0]
    several = len(groups) > 1 or first.num_replicas > 1
    # Idle GPUs have no places that others could take.
    places = placed.max_seqs * first.num_replicas if problem.seqs_measured and len(groups) == 1 else problem.max_seqs
    return Plan(
        model=model.reference or model.name,
        schedule=first.schedule,
        placement=first.placement,
        replicas=first.first_devices,
        more_replicas=tuple(groups[1:]),
        router=ROUTERS[0] if several else None,
        cluster=problem.cluster.name if problem.cluster else None,
        gpus=problem.cluster.num_gpus if problem.cluster else None,
        bound=problem.bound,
        more_bounds=problem.more_bounds,
        arrival_rate=problem.arrivals.rate if problem.arrivals and not problem.arrivals.of_trace else None,
        trace_arrivals=problem.arrivals is not None and problem.arrivals.of_trace,
        deadline=str(problem.workload.deadlines) if problem.workload.deadlines else None,
        dtype=problem.profile.dtype,
        kv_dtype=problem.profile.kv_dtype,
        routing=problem.profile.routing,
        device=problem.profile.device.kind,
        num_threads=problem.profile.device.num_threads,
        kv_cache_tokens=first.kv_cache_tokens,
        capacity=first.capacity,
        gpu_memory_utilization=problem.utilization,
        max_seqs=places,
        model_fingerprint=model.fingerprint,
        quantization=str(model.quantization) if model.quantization else None,
        workload_fingerprint=problem.workload.fingerprint,
        profile_fingerprint=problem.profile.fingerprint,
        promise=_promise(problem, [margin for margin in margins if margin]),
    )


def _promise(problem: Problem, found: Sequence[Margins]) -> dict[str, Any]:
    """The margins of every group of replicas, that of the first in the promise itself."""
    if not found:
        return {}
    first, *more = (margin.promise(problem.bounds) for margin in found)
    return {"risk": found[0].risk, **first, **({"more_groups": more} if more else {})}


def _summary(searches: Sequence[Result], method: str) -> dict[str, Any]:
    """Cost and quality of searches: `points` evaluated, `seconds`, and the largest `gap` to an upper bound."""
    return {
        "method": method,
        "points": sum(search.num_points for search in searches),
        "grid": sum(search.grid_size for search in searches),
        "seconds": round(sum(search.seconds for search in searches), 4),
        "gap": max((search.gap for search in searches if search.gap is not None), default=None),
    }
