"""Variants: every placement and filling of the pipeline under which a policy's control variables are searched.

Each variant is a grid of its own. The gentlest point of each is tried first: variants that break a limit even there are
left out, the others are searched in turn, and what one has found is what the next has to beat.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from exeplan.placement import layouts
from exeplan.plan import Placement
from exeplan.policies import Policy, load_policy
from exeplan.problem import Problem
from exeplan.search import Outcome, Result, Trial, search
from exeplan.search_grid import Limits
from exeplan.simulator.balance import Balance

_SLACK = 0.02
"""A variant whose gentlest point breaks a limit by less may still hold points that keep it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A placement, and how micro-batches fill its pipeline."""

    problem: Problem
    """The problem on that placement."""
    filling: Mapping[str, int]


def variants(problem: Problem, policy: Policy) -> Iterator[Variant]:
    """Every variant of a policy; none where the cluster is too small for it."""
    for placement in _placements(problem, policy):
        placed = problem.at(placement) if problem.cluster else problem
        for filling in policy.fillings(len(placed.cost.decode_stages)):
            yield Variant(problem=placed, filling=filling)


def _placements(problem: Problem, policy: Policy) -> list[Placement]:
    if problem.cluster is None:
        separate = any(stage.phase for stage in problem.cost.placement)
        return [problem.cost.placement] if separate == policy.SEPARATE_STAGES else []
    balance = Balance(problem.cost.timings, problem.cluster, problem.workload, problem.memory)
    found = layouts(
        problem.cluster,
        problem.profile.model,
        problem.profile.tensor_parallel_sizes,
        across_nodes=problem.across_nodes,
    )
    if policy.SEPARATE_STAGES:
        if problem.cluster.num_gpus < 2:
            return []
        numbers = balance.prefill_gpus(policy.SPLIT_BY)
        made = [balance.split_placement(replace(layout, num_prefill=number)) for number in numbers for layout in found]
    else:
        made = [balance.placement(layout) for layout in found]
    return list(dict.fromkeys(placement for placement in made if placement is not None))


def search_variants(problem: Problem, policy: str, *, method: str, bound: float) -> tuple[Result, Placement] | None:
    """The searches of all variants together, and the placement of their best point, or of their gentlest one.

    None where the policy cannot be placed at all.
    """
    everyone = [(_gentlest(variant, policy), variant) for variant in variants(problem, load_policy(policy))]
    if not everyone:
        return None
    limits = Limits(bound, 1.0)
    open_ = [(outcome, variant) for outcome, variant in everyone if not limits.broken(outcome, _SLACK)]
    if not open_ and method != "exhaustive":
        open_ = [min(everyone, key=lambda pair: (pair[0].memory > 1.0, pair[0].latency))]
    results: list[tuple[Result, Placement]] = []
    best = 0.0
    for _, variant in sorted(open_ or everyone, key=lambda pair: pair[0].latency):
        result = _searched(variant, policy, method=method, bound=bound, at_least=best)
        results.append((result, variant.problem.cost.placement))
        best = max(best, result.best.outcome.throughput if result.best else 0.0)
    result, placement = _merged(results)
    knobs = load_policy(policy).knobs(problem.workload, problem.max_seqs)
    size = math.prod(len(knob.values) for knob in knobs) * len(everyone)
    return replace(result, num_points=result.num_points + len(everyone) - len(results), grid_size=size), placement


def _gentlest(variant: Variant, policy: str) -> Outcome:
    """The outcome at the lower end of every knob."""
    problem, module = variant.problem, load_policy(policy)
    point = {knob.name: knob.values[0] for knob in module.knobs(problem.workload, problem.max_seqs)}
    return problem.evaluate(module.schedule({**point, **variant.filling}, problem.workload))


def _searched(variant: Variant, policy: str, *, method: str, bound: float, at_least: float) -> Result:
    problem, module = variant.problem, load_policy(policy)

    def evaluate(point: Mapping[str, int]) -> Outcome:
        return problem.evaluate(module.schedule({**point, **variant.filling}, problem.workload))

    knobs = module.knobs(problem.workload, problem.max_seqs)
    result = search(knobs, evaluate, bound=bound, capacity=1.0, method=method, at_least=at_least)
    return _with_filling(result, variant.filling)


def _with_filling(result: Result, filling: Mapping[str, int]) -> Result:
    """The filling's variables in every trial."""

    def full(trial: Trial) -> Trial:
        return replace(trial, point={**trial.point, **filling})

    return replace(
        result,
        best=full(result.best) if result.best else None,
        gentlest=full(result.gentlest),
        frontier=tuple(full(trial) for trial in result.frontier),
    )


def _merged(results: Sequence[tuple[Result, Placement]]) -> tuple[Result, Placement]:
    """The result of all variants together, and the placement of its best, or else its gentlest, point."""
    won = [pair for pair in results if pair[0].best is not None]
    if won:
        chosen = max(won, key=lambda pair: pair[0].best.outcome.throughput if pair[0].best else 0.0)
    else:
        chosen = min(results, key=lambda pair: ("memory" in pair[0].what_binds, pair[0].gentlest.outcome.latency))
    gaps = [result.gap for result, _ in results if result.gap is not None]
    merged = replace(
        chosen[0],
        frontier=pareto([trial for result, _ in results for trial in result.frontier]),
        num_points=sum(result.num_points for result, _ in results),
        grid_size=sum(result.grid_size for result, _ in results),
        seconds=sum(result.seconds for result, _ in results),
        gap=max(gaps, default=None),
    )
    return merged, chosen[1]


def pareto(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Those that no other beats in both latency and throughput, latency rising; their searches checked the memory."""
    kept: list[Trial] = []
    for trial in sorted(trials, key=lambda t: (t.outcome.latency, -t.outcome.throughput)):
        if not kept or trial.outcome.throughput > kept[-1].outcome.throughput:
            kept.append(trial)
    return tuple(kept)
