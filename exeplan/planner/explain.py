"""Explains a plan: where its time goes, what limits it, the runner-up, and what more GPUs or latency would gain.

Those gains are searched again, for the winner's policy alone. Not here: how it is shown (`explain_text.py`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from exeplan.core.cluster import Cluster
from exeplan.core.schedule import Placement, Schedule
from exeplan.errors import Infeasible
from exeplan.planner.candidates import Candidate, capacity
from exeplan.planner.optimize import Optimum
from exeplan.planner.problem import Problem
from exeplan.planner.replays import replay_estimate
from exeplan.simulator.breakdown import Breakdown, PhaseTime, break_down
from exeplan.simulator.closed_form import steady_state
from exeplan.simulator.cost import CostModel
from exeplan.simulator.memory import memory_bytes

MORE_LATENCY = 0.1
"""The share by which the bound is widened to see the gain."""
_NO_GAIN = 0.01
"""A gain of throughput that is not worth a sentence."""
_TELLING = 0.1
"""Share of the GPUs' time from which idle stages and communication are named."""
_FAR = 0.4
"""A phase below this share of both of the device's ceilings is called far from both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The best schedule of the winner's policy with more GPUs or latency."""

    change: str
    """What is different: `5 GPUs instead of 4`."""
    schedule: Schedule | None
    throughput: float | None
    gain: float | None
    """Of throughput, relative to the plan's."""
    note: str = ""
    """Why there is no schedule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The explanation of a plan."""

    schedule: Schedule
    placement: Placement
    throughput: float
    """Requests/s with its batches full."""
    limits: tuple[str, ...]
    """What limits the throughput, the first cause first."""
    breakdown: Breakdown
    runner_up: Candidate | None
    refusals: tuple[str, ...]
    """Why the policies without a schedule have none."""
    more_gpus: WhatIf
    more_latency: WhatIf


def explain(
    problem: Problem,
    optimum: Optimum,
    *,
    again: Callable[[Problem], Optimum],
    whole: Cluster | None = None,
    seed: int = 0,
) -> Explanation:
    """Explains the optimum of a problem.

    `again` optimizes another problem for the winner's policy alone; `whole` is the cluster that the
    GPUs are a part of.
    """
    plan, winner = optimum.plan, _winner(optimum)
    placed = problem.replica(plan.placement, len(plan.replicas), router=plan.router)
    more_latency = _more_latency(problem, again, capacity(winner))
    found = break_down(
        placed.cost,
        lambda cost: replay_estimate(replace(placed, cost=cost), plan.schedule, seed=seed)[0],
        backlog=problem.arrivals is None,
    )
    others = [c for c in optimum.candidates if c.schedule is not None and c is not winner]
    return Explanation(
        schedule=plan.schedule,
        placement=plan.placement,
        throughput=capacity(winner),
        limits=(_what_binds(placed, winner, more_latency), *_what_takes_time(found)),
        breakdown=found,
        runner_up=max(others, key=capacity, default=None),
        refusals=tuple(c.refusal for c in optimum.candidates if c.refusal),
        more_gpus=_more_gpus(problem, again, capacity(winner), whole or problem.cluster),
        more_latency=more_latency,
    )


def _winner(optimum: Optimum) -> Candidate:
    """The candidate of the plan's policy. Where replicas have several policies, the plan is better than any of them."""
    return next(c for c in optimum.candidates if c.policy == optimum.plan.schedule.policy)


def _what_binds(problem: Problem, winner: Candidate, more_latency: WhatIf) -> str:
    """The limit that one more step of a control variable breaks, or that another variant would need more of."""
    assert winner.search is not None
    assert winner.schedule is not None
    binding = winner.search.what_binds
    found = []
    if "latency" in binding:
        found.append(f"the {problem.binding_bound(winner.schedule)}")
    if "memory" in binding:
        steady = steady_state(winner.schedule, problem.workload, problem.cost)
        held = memory_bytes(problem.profile, problem.cost.placement, steady.kv_tokens, steady.cycle.prefill_kv_tokens)
        full = held / problem.memory >= steady.cycle.num_seqs / problem.max_seqs
        found.append("KV memory" if full else f"the limit of {problem.max_seqs} residents")
    if not found and more_latency.gain is not None and more_latency.gain > _NO_GAIN:
        return (
            f"the {problem.binding_bound(winner.schedule)}: a larger batch brings no more throughput here, but "
            f"{more_latency.schedule} does under {more_latency.change}"
        )
    if not found:
        return "no limit: a larger batch brings no more throughput"
    return f"{' and '.join(found)}: one more step of a control variable breaks {'it' if len(found) == 1 else 'them'}"


def _what_takes_time(found: Breakdown) -> list[str]:
    """What the GPUs spend their time on, by its share."""
    costs = [(time.share, f"{name} passes: {_ceiling(time)}") for name, time in found.phases.items()]
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


def _more_gpus(problem: Problem, again: Callable[[Problem], Optimum], before: float, whole: Cluster | None) -> WhatIf:
    if problem.cluster is None or whole is None:
        note = "name a --cluster to see the gain"
        return WhatIf(change="one more GPU", schedule=None, throughput=None, gain=None, note=note)
    number, cluster = problem.cluster.num_gpus, larger(whole, problem.cluster.num_gpus)
    bigger = replace(
        problem,
        cluster=cluster,
        cost=CostModel(problem.cost.timings, cluster=cluster),
        max_seqs=math.ceil(problem.max_seqs * cluster.num_gpus / number),
    )
    return _what_if(f"{cluster.num_gpus} GPUs instead of {number}", bigger, again, before)


def larger(whole: Cluster, num_gpus: int) -> Cluster:
    """One GPU more than `num_gpus` of the cluster; where they fill nodes, one node more."""
    if num_gpus < whole.gpus_per_node:
        return whole.part(num_gpus + 1)
    if whole.num_nodes == 1:
        return replace(whole, gpus_per_node=num_gpus + 1)
    return replace(whole, num_nodes=num_gpus // whole.gpus_per_node + 1)


def _more_latency(problem: Problem, again: Callable[[Problem], Optimum], before: float) -> WhatIf:
    if math.isinf(problem.limit):
        return WhatIf(change="more latency", schedule=None, throughput=None, gain=None, note="there is no bound")
    looser = problem.limited_to((1 + MORE_LATENCY) * problem.limit)
    bounds = " and ".join(str(bound) for bound in looser.bounds if math.isfinite(bound.seconds))
    return _what_if(f"{bounds}, {percent(MORE_LATENCY)} more", looser, again, before)


def _what_if(change: str, problem: Problem, again: Callable[[Problem], Optimum], before: float) -> WhatIf:
    try:
        optimum = again(problem)
    except Infeasible as refused:
        return WhatIf(change=change, schedule=None, throughput=None, gain=None, note=str(refused))
    throughput = capacity(_winner(optimum))
    return WhatIf(change=change, schedule=optimum.plan.schedule, throughput=throughput, gain=throughput / before - 1)


def percent(share: float) -> str:
    """A share for people."""
    return f"{100 * share:.0f} %"
