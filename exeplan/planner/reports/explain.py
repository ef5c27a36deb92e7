"""Explains a plan: what limits it, where its time goes, the runner-up, and what more of bound, memory or GPUs gains.

What limits a plan is what gains throughput when there is more of it: the problem is optimized again with a tenth more
of the bounds, with a tenth more memory or residents, and with one GPU more, over the same policies and with the same
replays as the plan. Gains compare the replayed throughput of both plans; with an arrival rate, which every replay
attains, the highest rate within the bounds, or what full batches serve where one of those is beyond the headroom that
is told. The old plan answers the wider problem too, so that no gain is negative.

Not here: how it is shown (`explain_text.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

from exeplan.core.bounds import Bound, utilizations, values_of
from exeplan.core.cluster import Cluster
from exeplan.core.pass_memory import MEMORY_UTILIZATION
from exeplan.core.plan import Plan
from exeplan.core.schedule import ReplicaGroup, Schedule
from exeplan.errors import Infeasible
from exeplan.planner.choice.answers import Optimum
from exeplan.planner.choice.candidates import Candidate, capacity
from exeplan.planner.choice.infeasible import meaning
from exeplan.planner.problems.headroom import is_most, most_rate
from exeplan.planner.problems.problem import Problem
from exeplan.planner.problems.replays import replay_estimate
from exeplan.planner.reports.placement_text import show_equal
from exeplan.planner.reports.report import IN_REPLAY, binding_bound
from exeplan.policies import load_policy
from exeplan.progress import SILENT, Told
from exeplan.simulator.breakdown import Breakdown, PhaseTime, break_down
from exeplan.simulator.closed_form import steady_state
from exeplan.simulator.cost import CostModel
from exeplan.units import show_seconds

MORE = 0.1
"""The share by which bounds, memory and residents are widened to see the gain."""
NO_GAIN = 0.01
"""A gain of throughput that replays of other requests would not show for certain; a larger gap of the search counts."""
_TELLING = 0.1
"""Share of the GPUs' time from which idle stages and communication are named."""
_SEEN = 0.01
"""Share of the GPUs' time from which the passes of a phase are named."""
_FAR = 0.4
"""A phase below this share of both of the device's ceilings is called far from both."""


class Again(Protocol):
    """Optimizes another problem of the same request: over its policies, or over the given ones."""

    def __call__(
        self, problem: Problem, *, policies: tuple[str, ...] | None = None, told: Told = SILENT
    ) -> Optimum: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The best plan with more of something; the plan as it is where that is no better."""

    change: str
    """What is different: `5 GPUs instead of 4`."""
    limit: str
    """What there is more of: `KV memory`."""
    plan: Plan | None = None
    throughput: float | None = None
    gain: float | None = None
    """Of throughput, relative to the plan's."""
    noise: float = NO_GAIN
    """A gain up to this is none."""
    of_full_batches: bool = False
    """What the throughput is of, and the gain."""
    note: str = ""
    """Why there is no plan."""

    @property
    def schedule(self) -> Schedule | None:
        return self.plan.schedule if self.plan else None

    @property
    def gains(self) -> bool:
        return self.gain is not None and self.gain > self.noise


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """The best plan of another policy, optimized for alone."""

    plan: Plan
    throughput: float
    less: float
    """Relative to the plan's throughput; negative where chance gives it more."""
    noise: float = NO_GAIN
    of_full_batches: bool = False


class Compared(NamedTuple):
    """Requests/s of whole plans, as gains compare them."""

    rates: tuple[float, ...]
    of_full_batches: bool


class _Others(NamedTuple):
    """The other policies that have a schedule."""

    best: RunnerUp | None
    unplanned: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The explanation of a plan."""

    groups: tuple[ReplicaGroup, ...]
    """Equal replicas each."""
    throughput: float
    """Requests/s in the replay; where requests arrive the highest rate within the bounds, or of full batches."""
    at_rate: bool
    """Requests arrive: throughput and gains are the highest rate within the bounds."""
    of_full_batches: bool
    """The same, where that rate is beyond the headroom that is told: they are what full batches serve."""
    limits: tuple[str, ...]
    """What limits the throughput, the first cause first."""
    bounds: tuple[str, ...]
    """How far each bound is used in the replay."""
    breakdowns: tuple[Breakdown, ...]
    """Of one replica of each group."""
    runner_up: RunnerUp | None
    refusals: tuple[str, ...]
    """Why the policies without a schedule have none."""
    unplanned: tuple[str, ...]
    """Of the policies with a schedule by the closed form of which replays make no plan: what they would reach."""
    more_gpus: WhatIf
    more_latency: WhatIf
    more_memory: WhatIf
    """More memory for keys and values, or more residents: the one that is fuller."""

    @property
    def schedule(self) -> Schedule:
        """Of the first group."""
        return self.groups[0].schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The plan that is explained, and how another problem is compared with it."""

    problem: Problem
    optimum: Optimum
    again: Again

    def with_more(self, change: str, limit: str, problem: Problem, told: Told) -> WhatIf:
        """The best plan of a problem that asks for no more than this one's: this plan answers it too."""
        try:
            other = self.again(problem, told=told)
        except Infeasible:
            other = self.optimum
        (before, after), of_full_batches = compared(self.optimum, other)
        return WhatIf(
            change=change,
            limit=limit,
            plan=other.plan if after > before else self.optimum.plan,
            throughput=max(before, after),
            gain=max(before, after) / before - 1,
            noise=_gap(self.optimum, other),
            of_full_batches=of_full_batches,
        )


def explain(
    problem: Problem,
    optimum: Optimum,
    *,
    again: Again,
    whole: Cluster | None = None,
    seed: int = 0,
    told: Told = SILENT,
) -> Explanation:
    """Explains the optimum of a problem. `whole` is the cluster that the GPUs are a part of."""
    plan, explained = optimum.plan, _Plan(problem=problem, optimum=optimum, again=again)
    alike = not plan.more_replicas
    placed = [problem.replica(g.placement, plan.num_replicas, alike=alike, router=plan.router) for g in plan.groups]
    more_latency = _more_latency(explained, told.part(0.0, 0.35, "more latency"))
    more_memory = _more_memory(explained, placed, told.part(0.35, 0.7, "more memory"))
    more_gpus = _more_gpus(explained, whole or problem.cluster, told.part(0.7, 0.8, "more GPUs"))
    others = _others(explained, told.part(0.8, 0.9, "runner-up"))
    told("where the time goes", 0.9)
    found = tuple(_broken_down(one, g.schedule, seed=seed) for one, g in zip(placed, plan.groups, strict=True))
    (own,), of_full_batches = compared(optimum)
    return Explanation(
        groups=plan.groups,
        throughput=own,
        at_rate=problem.arrivals is not None,
        of_full_batches=of_full_batches,
        limits=(_what_limits(more_latency, more_memory, more_gpus), *_what_takes_time(plan.groups, found)),
        bounds=tuple(_bound_sentences(problem, plan)),
        breakdowns=found,
        runner_up=others.best,
        refusals=tuple(c.refusal for c in optimum.candidates if c.refusal),
        unplanned=others.unplanned,
        more_gpus=more_gpus,
        more_latency=more_latency,
        more_memory=more_memory,
    )


def _broken_down(placed: Problem, schedule: Schedule, *, seed: int) -> Breakdown:
    return break_down(
        placed.cost.for_policy(load_policy(schedule.policy)),
        lambda cost: replay_estimate(replace(placed, cost=cost), schedule, seed=seed)[0],
        backlog=placed.arrivals is None,
    )


def throughput(optimum: Optimum) -> float:
    """Requests/s of the whole plan: replayed, or where requests arrive the highest rate within the bounds that is
    told."""
    assert optimum.plan.replay is not None
    return most_rate(optimum.plan) or optimum.plan.replay.throughput


def compared(*optima: Optimum) -> Compared:
    """The throughput of each, or of its full batches where one of them has more headroom than is told."""
    full = [one.full.throughput for one in optima if one.full]
    if len(full) == len(optima) and any(is_most(one.plan.rate_headroom) for one in optima):
        return Compared(tuple(full), of_full_batches=True)
    return Compared(tuple(map(throughput, optima)), of_full_batches=False)


def _gap(*optima: Optimum) -> float:
    """What a gain has to exceed: the noise of replays, and what the searches may have missed."""
    return max(NO_GAIN, *(optimum.plan.search["gap"] or 0.0 for optimum in optima))


def _what_limits(more_latency: WhatIf, more_memory: WhatIf, more_gpus: WhatIf) -> str:
    """What gains when there is a tenth more of it, the most first; else the GPUs, or nothing alone."""
    asked = [what for what in (more_latency, more_memory) if what.gain is not None]
    gaining = sorted((what for what in asked if what.gains), key=lambda what: -(what.gain or 0.0))
    if gaining:
        return "; ".join(f"{what.limit}: {_briefly(what)} {_gains(what)}" for what in gaining)
    most, tried = _most_noise(asked), " or ".join(what.change for what in asked)
    if more_gpus.gains:
        return f"the GPUs: {more_gpus.change} {_gains(more_gpus)}, {tried} alone gains at most {most}"
    if more_gpus.gain is None:
        return f"the device: {tried} alone gains at most {most}"
    return f"nothing alone: {tried} or {more_gpus.change} gains at most {_most_noise([*asked, more_gpus])}"


def _most_noise(asked: Sequence[WhatIf]) -> str:
    """The most that one of them may gain, none of which certainly does."""
    return f"{math.ceil(100 * max(what.noise for what in asked) - 1e-9)} %"


def _briefly(what: WhatIf) -> str:
    """The change, after what it is of."""
    return what.change.replace(what.limit, "them" if what.limit.startswith("the bounds") else "it")


def _gains(what: WhatIf) -> str:
    return f"gains {100 * (what.gain or 0.0):.1f} %"


def _bound_sentences(problem: Problem, plan: Plan) -> list[str]:
    """How far the replay uses each finite bound, and which one binds."""
    assert plan.replay is not None
    binds = binding_bound(problem, plan)
    values, shares = values_of(problem.bounds, plan.replay), utilizations(problem.bounds, plan.replay)
    found = []
    num_finite = sum(math.isfinite(bound.seconds) for bound in problem.bounds)
    for bound, value, share in zip(problem.bounds, values, shares, strict=True):
        if math.isinf(bound.seconds) or value is None:
            continue
        sentence = f"{_bound_sentence(problem, bound, plan, value)}; {percent(share)} of the bound"
        if binds and binds[0] is bound:
            sentence += f", {percent(binds[1])} {binds[2]}" if binds[2] != IN_REPLAY else ""
            sentence += ", the bound that binds" if num_finite > 1 else ""
        found.append(sentence)
    return found


def _bound_sentence(problem: Problem, bound: Bound, plan: Plan, value: float) -> str:
    assert plan.replay is not None
    if bound.targets and plan.replay.attainment is not None:
        each = ", ".join(f"{name} {show_seconds(seconds)}" for name, seconds in bound.scaled_targets)
        asked = bound.metric[1:].removesuffix("-all")
        return f"{100 * plan.replay.attainment:.2f} % of requests keep {each} in the replay, {asked} % must"
    about = meaning(bound, problem.workload.output_quantile(0.99))
    mean = " on average" if bound.metric in ("ttft", "tpot") else ""
    return f"{about}{mean}: {show_seconds(value)} in the replay, at most {show_seconds(bound.seconds)}"


def _what_takes_time(groups: Sequence[ReplicaGroup], found: Sequence[Breakdown]) -> list[str]:
    """The same for every group of replicas, which is named where there are several."""
    names = [f"{show_equal(group)}: " if len(groups) > 1 else "" for group in groups]
    return [name + each for name, one in zip(names, found, strict=True) for each in _takes_time(one)]


def _takes_time(found: Breakdown) -> list[str]:
    """What the GPUs spend their time on, by its share."""
    phases = [(name, time) for name, time in found.phases.items() if time.share >= _SEEN]
    costs = [(time.share, f"{name} passes: {_ceiling(time)}") for name, time in phases]
    if found.mean["idle"] >= _TELLING:
        costs.append((found.mean["idle"], "pipeline bubbles" if len(found.stages) > 1 else "waiting"))
    if found.mean["all_reduce"] + found.mean["send"] >= _TELLING:
        costs.append((found.mean["all_reduce"] + found.mean["send"], "communication, in both phases"))
    return [f"{percent(share)} of the GPUs' time goes to {what}" for share, what in sorted(costs, reverse=True)]


def _ceiling(time: PhaseTime) -> str:
    """The device's ceiling that a phase is closer to."""
    reached = f"at {percent(time.flops_share)} of the FLOP/s and {percent(time.bandwidth_share)} of the bandwidth"
    if max(time.flops_share, time.bandwidth_share) < _FAR:
        return f"far from both ceilings, {reached}"
    return f"bound by {'compute' if time.compute_bound else 'memory bandwidth'}, {reached}"


def _more_gpus(explained: _Plan, whole: Cluster | None, told: Told) -> WhatIf:
    problem = explained.problem
    if problem.cluster is None or whole is None:
        return WhatIf(change="one more GPU", limit="the GPUs", note="name a --cluster to see the gain")
    number, cluster = problem.cluster.num_gpus, larger(whole, problem.cluster.num_gpus)
    memory = problem.memory
    if problem.shares_memory:
        cluster = replace(cluster, memory_bytes=cluster.memory_bytes * number // cluster.num_gpus)
        memory = min(memory, cluster.memory_bytes * (problem.utilization or MEMORY_UTILIZATION))
    bigger = replace(
        problem,
        cluster=cluster,
        memory=memory,
        cost=CostModel(problem.cost.timings, cluster=cluster),
        max_seqs=problem.max_seqs * cluster.num_gpus // number if problem.seqs_measured else problem.max_seqs,
    )
    return explained.with_more(f"{cluster.num_gpus} GPUs instead of {number}", "the GPUs", bigger, told)


def larger(whole: Cluster, num_gpus: int) -> Cluster:
    """One GPU more than `num_gpus` of the cluster; where they fill nodes, one node more."""
    if num_gpus < whole.gpus_per_node:
        return whole.part(num_gpus + 1)
    if whole.num_nodes == 1:
        return replace(whole, gpus_per_node=num_gpus + 1)
    return replace(whole, num_nodes=num_gpus // whole.gpus_per_node + 1)


def _more_latency(explained: _Plan, told: Told) -> WhatIf:
    problem = explained.problem
    finite = [bound for bound in problem.bounds if math.isfinite(bound.seconds)]
    if not finite:
        return WhatIf(change="more latency", limit="the bounds", note="there is no bound")
    first = str(finite[0]) if str(finite[0]).startswith("bound") else f"bound of {finite[0]}"
    limit = f"the {first}" if len(finite) == 1 else f"the bounds ({', '.join(map(str, finite))})"
    change = f"{percent(MORE)} more of {limit}"
    return explained.with_more(change, limit, problem.limited_to((1 + MORE) * problem.limit), told)


def _more_memory(explained: _Plan, placed: Sequence[Problem], told: Told) -> WhatIf:
    """With more of what is fuller in the replica of the plan where it is fullest: memory, or the places for
    residents."""
    problem, filled = explained.problem, []
    for one, group in zip(placed, explained.optimum.plan.groups, strict=True):
        steady = steady_state(group.schedule, problem.workload, one.cost)
        held = one.bytes_held(group.schedule, steady.kv_tokens, steady.cycle.prefill_kv_tokens)
        filled.append((held / problem.memory, steady.cycle.num_seqs / one.max_seqs))
    if max(held for held, _ in filled) >= max(residents for _, residents in filled):
        more = replace(problem, memory=(1 + MORE) * problem.memory)
        return explained.with_more(f"{percent(MORE)} more memory on each GPU", "KV memory", more, told)
    residents = math.ceil((1 + MORE) * problem.max_seqs - 1e-9)
    limit, change = f"the limit of {problem.max_seqs} residents", f"{residents} residents instead of {problem.max_seqs}"
    return explained.with_more(change, limit, replace(problem, max_seqs=residents), told)


def _others(explained: _Plan, told: Told) -> _Others:
    """The best plan of another policy by its replay. In the order of the closed form, until no later one can win."""
    own = explained.optimum.plan.schedule.policy
    others = [c for c in explained.optimum.candidates if c.schedule is not None and c.policy != own]
    best: Optimum | None = None
    unplanned = []
    most = partial(_most, explained.problem)
    for other in sorted(others, key=most, reverse=True):
        if best and compared(best).rates[0] >= most(other):
            break
        try:
            found = explained.again(explained.problem, policies=(other.policy,), told=told)
        except Infeasible as error:  # Its replays break a bound, or serve less than is required.
            unplanned.append(f"{other.policy}: by its replays {error.nearest or error}")
            continue
        best = found if best is None or _serves_more(found, best) else best
    if best is None:
        return _Others(best=None, unplanned=tuple(unplanned))
    (winning, rate), of_full_batches = compared(explained.optimum, best)
    runner_up = RunnerUp(
        plan=best.plan,
        throughput=rate,
        less=1 - rate / winning,
        noise=_gap(explained.optimum, best),
        of_full_batches=of_full_batches,
    )
    return _Others(best=runner_up, unplanned=tuple(unplanned))


def _serves_more(one: Optimum, other: Optimum) -> bool:
    first, second = compared(one, other).rates
    return first > second


def _most(problem: Problem, one: Candidate) -> float:
    """What a candidate may reach at most: by the closed form, where requests arrive that of its full batches."""
    if problem.arrivals is None:
        return capacity(one)
    assert one.schedule is not None
    assert one.placement is not None
    placed = problem.replica(one.placement, one.num_replicas, alike=True)
    return one.num_replicas * steady_state(one.schedule, placed.workload, placed.cost).throughput


def percent(share: float) -> str:
    """A share for people."""
    return f"{100 * share:.0f} %"
