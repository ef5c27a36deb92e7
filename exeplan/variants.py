"""Variants: every placement and filling of the pipeline under which a policy's control variables are searched."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from exeplan.placement import layouts
from exeplan.plan import Placement
from exeplan.policies import Policy
from exeplan.problem import Problem
from exeplan.simulator.balance import Balance


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
    found = layouts(problem.cluster, problem.profile.model, problem.profile.tensor_parallel_sizes)
    if policy.SEPARATE_STAGES:
        if problem.cluster.num_gpus < 2:
            return []
        number = balance.prefill_gpus(policy.SPLIT_BY)
        made = [balance.split_placement(replace(layout, num_prefill=number)) for layout in found]
    else:
        made = [balance.placement(layout) for layout in found]
    return list(dict.fromkeys(placement for placement in made if placement is not None))
