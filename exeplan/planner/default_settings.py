"""An engine without options: the schedule that its defaults are, as far as the KV cache allows.

The placement is that of a plan, so that only the settings differ; of servers that only prefill or only decode each does
both, as by default. Not here: which defaults an engine has
(`plans/engines`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from exeplan.core.plan import Plan
from exeplan.core.schedule import ROUTERS, Estimate, ReplicaGroup, Schedule, num_servers, servers
from exeplan.errors import Infeasible
from exeplan.planner.load_problem import replica_problem
from exeplan.planner.plan_request import PlanRequest
from exeplan.planner.problems.problem import Problem
from exeplan.planner.problems.replicas import together


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultSettings:
    """An engine's defaults on a device."""

    schedule: Schedule
    gives_way: str
    """The variable that is lower where the KV cache does not hold as many requests."""


def with_defaults(request: PlanRequest, plan: Plan, defaults: DefaultSettings) -> Plan:
    """The plan of this request with the engine's default settings, and their estimate.

    Raises Infeasible where they cannot run on its placement.
    """
    groups, estimates = [], []
    plan = _aggregated(plan)
    for group in plan.groups:
        problem = replica_problem(request, plan, group)
        schedule, estimate = _in_memory(problem, _staged(defaults.schedule, group), defaults.gives_way)
        groups.append(replace(group, schedule=schedule))
        estimates.append(estimate)
    first, *others = groups
    found = together(estimates, [group.num_replicas for group in groups])
    return replace(plan, schedule=first.schedule, more_replicas=tuple(others), estimate=found, replay=None)


def _aggregated(plan: Plan) -> Plan:
    """Each server of a phase as a replica that prefills and decodes."""
    groups = [own for group in plan.groups for own in _whole_servers(group)]
    several = sum(group.num_replicas for group in groups) > 1
    first, *others = groups
    return replace(
        plan,
        schedule=first.schedule,
        placement=first.placement,
        replicas=first.first_devices,
        more_replicas=tuple(others),
        router=(plan.router or ROUTERS[0]) if several else None,
    )


def _whole_servers(group: ReplicaGroup) -> Iterator[ReplicaGroup]:
    if num_servers(group.placement) is None:
        yield group
        return
    for phase in ("prefill", "decode"):
        found = servers(group.placement, phase)
        first = group.placement[found[0][0]].devices[0]
        stages = [group.placement[number] for number in found[0]]
        placement = tuple(
            replace(stage, phase="", devices=tuple(device - first for device in stage.devices)) for stage in stages
        )
        devices = (one[numbers[0]].devices[0] for one in group.placements for numbers in found)
        yield ReplicaGroup(schedule=group.schedule, placement=placement, first_devices=tuple(devices))


def _staged(schedule: Schedule, group: ReplicaGroup) -> Schedule:
    """A micro-batch for each stage, as engines have them."""
    stages = len(group.placement)
    return replace(schedule, variables={**schedule.variables, "micro_batches": stages}) if stages > 1 else schedule


def _in_memory(problem: Problem, schedule: Schedule, name: str) -> tuple[Schedule, Estimate]:
    """The schedule and its estimate, with this variable as large as memory allows and at most its own.

    Raises Infeasible where 1 is too much.
    """

    def tried(value: int) -> tuple[Schedule, Estimate]:
        found = replace(schedule, variables={**schedule.variables, name: value})
        return found, problem.estimate(found)

    def fits(found: tuple[Schedule, Estimate]) -> bool:
        return found[1].memory_bytes_per_gpu <= problem.memory

    if fits(most := tried(schedule[name])):
        return most
    if not fits(best := tried(1)):
        raise Infeasible(f"{schedule} does not fit the KV cache with {name}=1 either")
    low, high = 1, schedule[name]
    while high - low > 1:
        found = tried(middle := (low + high) // 2)
        low, high, best = (middle, high, found) if fits(found) else (low, middle, best)
    return best
