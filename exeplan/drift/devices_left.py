"""The plan of a replica for the devices that it has left: the bounds kept where a plan keeps them, else the tightest.

    kept      the bounds of the plan, at its arrival rate or its replica's part of it
    tightest  where no plan keeps these: the tightest that one keeps, all wider by one factor, at the same rate
    no rate   where the rate is too much under any bounds: the same two without it

A replica stays one pipeline, on the largest part of the devices that has as many on each of its nodes, as the planner's
clusters have. The lengths are the planned ones: what is seen while devices are lost is no new traffic.

Pure. Not here: which devices are left, and when the first plan comes back (`runner/replan/devices.py`).
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from exeplan.core.bounds import scaled
from exeplan.core.cluster import Cluster
from exeplan.core.plan import Plan, single_plans, with_replica
from exeplan.core.schedule import ROUTERS, Estimate, Placement, num_devices
from exeplan.drift.best_plan import Found, tightest
from exeplan.errors import Infeasible
from exeplan.planner.choice.optimize import optimize, resolve_policies
from exeplan.planner.choice.pipelines import Effort
from exeplan.planner.load_problem import plan_request, profiled_host
from exeplan.planner.plan_request import PlanRequest
from exeplan.planner.problems.problem import Problem
from exeplan.planner.problems.replicas import part_of, together
from exeplan.policies import engine_of, policy_names

_RIVALS = 0.9
"""As for a change of the traffic (`best_plan.py`): the service waits for the answer."""
_ARRIVING = 3000
ByNode = Sequence[Sequence[int]]
"""Numbers of devices, those of one node together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftPlan:
    """What a replica can do with the devices that are left."""

    plan: Plan
    """Of this replica alone, by the cluster's device numbers, with its estimate."""
    missed: float
    """The tightest bounds that it keeps, over those of the service's plan; 1 where it keeps these."""
    verdict: str
    """In words."""


def plan_for_left(plan: Plan, number: int, by_node: ByNode) -> LeftPlan:
    """The best plan of replica `number` on the devices left; `plan` is the one for all of its devices.

    Raises InputError where the plan names no profile or workload, or they cannot be read; Infeasible where no plan fits
    these devices.
    """
    own = single_plans(plan)[number]
    total = num_devices(own.placement)
    devices = largest_part(by_node)
    request = _request(plan, own, devices)
    found, rate = _found(request, _policies(plan, request.cluster))
    placed = _on_devices(found.plan.placement, [device for node in devices for device in node])
    whole = found.plan.estimate
    made = replace(
        own,
        schedule=found.plan.schedule,
        placement=placed,
        kv_cache_tokens=found.plan.kv_cache_tokens,
        capacity=_capacity(plan, own, found.plan),
        estimate=whole,
        replay=found.plan.replay,
        drift_headroom=None,
        rate_headroom=None,
    )
    count = sum(map(len, devices))
    verdict = f"{count} of {total} devices are left to replica {number}: {_promise(request, made, found.missed, rate)}"
    return LeftPlan(plan=made, missed=found.missed, verdict=verdict)


def service_plan(plan: Plan, left: Mapping[int, Plan]) -> Plan:
    """The plan with other plans of some replicas, by their place, and the figures of all together."""
    if not left:
        return plan
    whole = replace(plan, drift_headroom=None, rate_headroom=None)
    if plan.num_replicas == 1:
        return replace(with_replica(whole, 0, left[0]), estimate=left[0].estimate, replay=left[0].replay)
    figures = plan.replay or plan.estimate
    shares = _shares(plan, figures)
    for number, own in enumerate(single_plans(plan)):
        others = own.capacity if plan.has_arrivals and own.capacity else shares[number]
        whole = with_replica(whole, number, left.get(number, replace(own, capacity=others)))
    return replace(whole, estimate=_together(figures, left, shares), replay=None)


def largest_part(by_node: ByNode) -> tuple[tuple[int, ...], ...]:
    """The most devices with as many on each node, the first of each; of equal ones that of the fewest nodes."""
    nodes = sorted((tuple(node) for node in by_node if node), key=len, reverse=True)
    if not nodes:
        return ()
    most = max(range(1, len(nodes) + 1), key=lambda count: (count * len(nodes[count - 1]), -count))
    return tuple(node[: len(nodes[most - 1])] for node in nodes[:most])


def _request(plan: Plan, own: Plan, devices: Sequence[Sequence[int]]) -> PlanRequest:
    """What is asked of one replica on these devices."""
    if not devices:
        raise Infeasible("no devices are left")
    request = plan_request(own)
    arrivals = request.arrivals
    if arrivals is not None:
        stream = replace(arrivals, of_trace=False)
        arrivals = stream.split(plan.num_replicas, plan.router or ROUTERS[0])
    cluster = _cluster(request, num_devices(own.placement), devices)
    limit = request.max_num_seqs
    if limit is not None:  # Of all the plan's devices; equal replicas share it alone.
        used = sum(num_devices(placement) for group in plan.groups for placement in group.placements)
        planned = (plan.more_replicas and plan.gpus) or used
        limit = max(limit * sum(map(len, devices)) // planned, 1)
    return replace(request, cluster=cluster, arrivals=arrivals, one_pipeline=True, max_num_seqs=limit)


def _cluster(request: PlanRequest, total: int, devices: Sequence[Sequence[int]]) -> Cluster | None:
    nodes, each = len(devices), len(devices[0])
    if request.cluster is None and nodes * each == 1:
        return None
    whole = request.cluster or profiled_host(request.profile, total)
    return replace(whole, num_nodes=nodes, gpus_per_node=each)


def _policies(plan: Plan, cluster: Cluster | None) -> tuple[str, ...]:
    """Those of `auto`, the plan's own first, also where it is from outside the package or an engine's."""
    names = resolve_policies("auto", cluster, deadlines=plan.deadline is not None)
    own = plan.schedule.policy
    here = (own,) if own in names or own not in policy_names() or engine_of(own) else ()
    return (*here, *(name for name in names if name != own))


def _found(request: PlanRequest, policies: tuple[str, ...]) -> tuple[Found, bool]:
    """The plan, and whether it sustains the rate, where there is one."""

    def make(asked: Problem) -> Plan:
        arriving = _ARRIVING if asked.arrivals else None
        effort = Effort(rivals=_RIVALS, num_requests=arriving, close_ones=False, report=False)
        return optimize(asked, policies=policies, advise=False, effort=effort).plan

    problem = request.problem(request.cluster)
    try:
        return tightest(problem, make), True
    except Infeasible:
        if problem.arrivals is None:
            raise
    return tightest(replace(problem, arrivals=None), make), False


def _on_devices(placement: Placement, devices: Sequence[int]) -> Placement:
    return tuple(replace(stage, devices=tuple(devices[device] for device in stage.devices)) for stage in placement)


def _promise(request: PlanRequest, made: Plan, missed: float, rate: bool) -> str:
    """What the plan promises there, in words."""
    figures = made.replay or made.estimate
    throughput = f", predicted {figures.throughput:.3g} requests/s" if figures else ""
    bounds = [bound for bound in request.bounds if math.isfinite(bound.seconds)]
    asked = ", ".join(map(str, bounds))
    kept = f" keeps {asked} there" if bounds else " runs there"
    if missed > 1:
        wider = ", ".join(map(str, scaled(bounds, [missed] * len(bounds))))
        kept = f" keeps {wider}, the tightest that a plan keeps there, instead of {asked}"
    short = "" if rate or request.arrivals is None else f"; {request.arrivals} are more than any plan sustains there"
    return f"{made.schedule}{kept}{throughput}{short}"


def _capacity(plan: Plan, own: Plan, found: Plan) -> float | None:
    """Requests/s of a replica with the plan `found`: with full batches where the plan for a rate says these, else those
    of its figures, as the router's queues are weighed by figures of all replicas then."""
    if plan.has_arrivals and own.capacity:
        return found.full_throughput
    return found.estimate.throughput if found.estimate and plan.num_replicas > 1 else None


def _shares(plan: Plan, figures: Estimate | None) -> list[float | None]:
    """Requests/s of each replica of the first plan, by capacity where its replicas differ; as known without figures."""
    capacities = [one.capacity for one in single_plans(plan)]
    if figures is None:
        return capacities
    parts = [one or 1.0 for one in capacities]
    return [figures.throughput * part / sum(parts) for part in parts]


def _together(figures: Estimate | None, left: Mapping[int, Plan], shares: Sequence[float | None]) -> Estimate | None:
    """Of all replicas; None where one of them has no figures."""
    if figures is None or any(one.estimate is None for one in left.values()):
        return None
    found = []
    for number, share in enumerate(shares):
        own = left[number].replay or left[number].estimate if number in left else None
        found.append(own or part_of(figures, (share or 0.0) / figures.throughput))
    known = set.intersection(*(set(one.percentiles) for one in found))
    return together([_with_percentiles(one, known) for one in found], [1] * len(found))


def _with_percentiles(figures: Estimate, names: Collection[str]) -> Estimate:
    return replace(figures, percentiles={name: figures.percentiles[name] for name in sorted(names)})
