"""The files that commands name, turned into a Problem: references in a plan are relative to the plan's own folder."""

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from exeplan.core.batch import BLOCK_SIZE, num_blocks_for
from exeplan.core.bounds import Bound
from exeplan.core.cluster import Cluster, Link, load_cluster
from exeplan.core.model import ModelSpec, load_model_spec
from exeplan.core.plan import Plan, parse_plan
from exeplan.core.profile import Profile, load_profile
from exeplan.core.queue_order import ORDERS
from exeplan.errors import Infeasible, InputError
from exeplan.files import read_yaml
from exeplan.planner.check_placement import check_devices, check_placement
from exeplan.planner.problem import MEMORY_UTILIZATION, Problem, make_problem
from exeplan.policies import check_schedule
from exeplan.simulator.memory import memory_bytes
from exeplan.units import show_bytes
from exeplan.workload.arrivals import Arrivals, trace_arrivals
from exeplan.workload.deadlines import parse_deadlines
from exeplan.workload.files import load_workload
from exeplan.workload.workload import Workload


def load_plan(path: Path) -> Plan:
    """Reads and checks a plan. Raises InputError naming the field that is wrong."""
    body = read_yaml(path)
    if body.pop("exeplan", 1) != 1:
        raise InputError(f"{path} is a plan of a newer exeplan")
    try:
        return plan_from(body, folder=path.resolve().parent)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def plan_from(body: Mapping[str, Any], *, folder: Path | None = None) -> Plan:
    """The plan of `as_json` values, checked by its policy. Raises InputError naming the field that is wrong.

    Only a trusted source has a `folder`, from which a policy file is loaded (see `exeplan.policies`).
    """
    plan = parse_plan(body, folder=folder)
    check_schedule(plan.schedule)
    return plan


def read_plan(path: Path) -> Plan:
    """The plan with its references to files made good from here."""
    plan = load_plan(path)
    return replace(
        plan,
        model=_from(path, plan.model),
        workload=_from(path, plan.workload) if plan.workload else None,
        profile=_from(path, plan.profile) if plan.profile else None,
        cluster=_from(path, plan.cluster) if plan.cluster else None,
    )


def refer(reference: str, plan: Path) -> str:
    """How a plan at that path names a file: relative to its folder. Names that are no files stay as they are."""
    if not Path(reference).expanduser().exists():
        return reference
    return os.path.relpath(Path(reference).expanduser(), plan.resolve().parent)


def plan_model(plan: Plan) -> ModelSpec:
    """The model of a plan. Raises InputError when its shape is not the one that was planned."""
    spec = load_model_spec(plan.model)
    if plan.model_fingerprint and plan.model_fingerprint != spec.fingerprint:
        raise InputError(
            f"the plan was made for a model of shape {plan.model_fingerprint}, {plan.model} has shape "
            f"{spec.fingerprint}; optimize again with a profile of this model"
        )
    check_placement(plan.placement, spec, plan.schedule)
    check_devices(plan.placement)
    return spec


def plan_workload(plan: Plan, spec: ModelSpec, override: str | None = None) -> Workload:
    """The workload of a plan, or another one, fitted to the context where the plan's was."""
    reference = override or plan.workload
    if reference is None:
        raise InputError("the plan names no workload; give one with --workload")
    workload = fitted(load_workload(reference), spec, fit=plan.fit_context)
    return replace(workload, deadlines=parse_deadlines(plan.deadline)) if plan.deadline else workload


def fitted(workload: Workload, spec: ModelSpec, *, fit: bool) -> Workload:
    """The workload, its lengths scaled to the model's context if asked to."""
    return workload.fit_context(spec.max_context) if fit else workload


def plan_cluster(plan: Plan, profile: Profile, override: str | None = None) -> Cluster | None:
    """The GPUs that a plan is for, or another cluster; None where it names none: its devices stand in one node then.

    Raises InputError when the cluster is of other devices than the profile, or lacks one that the plan uses.
    """
    reference = override or plan.cluster
    if reference is None and plan.gpus is None:
        return None
    cluster = (
        cluster_for(profile, reference, None if override else plan.gpus)
        if reference
        else profiled_host(profile, plan.gpus or 1)
    )
    check_devices(plan.placement, cluster)
    return cluster


def cluster_for(profile: Profile, reference: str, num_gpus: int | None = None) -> Cluster:
    """The cluster, or so many of its GPUs, checked to be of the profile's devices."""
    cluster = load_cluster(reference)
    if cluster.device != profile.device.name:
        raise InputError(
            f"cluster {cluster.name} has {cluster.device} GPUs, the profile is of {profile.device.name}; profile the "
            f"model for {cluster.device}"
        )
    return cluster if num_gpus is None else cluster.part(num_gpus)


def profiled_host(profile: Profile, num_gpus: int) -> Cluster:
    """So many devices of the host that was profiled, with the links that were measured there.

    CPU devices share its memory. Raises InputError when the profile is of one device alone.
    """
    sends = sorted((m.bytes, m.seconds) for m in profile.measurements if (m.op, m.phase) == ("send", "intra"))
    if num_gpus < 1 or len(sends) < 2:
        raise InputError(
            f"the profile times no links for {num_gpus} devices; profile with --devices {num_gpus}, or give a --cluster"
        )
    (least, latency), (most, longest) = sends[0], sends[-1]
    link = Link(bytes_per_second=(most - least) / max(longest - latency, 1e-9), latency=latency)
    device = profile.device
    return Cluster(
        name="host",
        device=device.name,
        num_nodes=1,
        gpus_per_node=num_gpus,
        memory_bytes=device.memory_bytes // num_gpus if device.kind == "cpu" else device.memory_bytes,
        intra=link,
        inter=link,
    )


def plan_problem(
    plan: Plan, *, profile: str | None = None, workload: str | None = None, cluster: str | None = None
) -> Problem:
    """The Problem that a plan answers, on the plan's placement.

    Raises InputError when its inputs are missing, belong to another model or device, or lack memory.
    """
    spec = plan_model(plan)
    reference = profile or plan.profile
    if reference is None:
        raise InputError("the plan names no profile; give one with --profile")
    measured = profile_for(spec, load_profile(Path(reference)))
    gpus = plan_cluster(plan, measured, cluster)
    requests = plan_workload(plan, spec, workload)
    problem = _placed(plan, measured, requests, gpus)
    # Another schedule keeps the order, but for one that only the plan's own policy has.
    order = plan.schedule.order if plan.schedule.order in ORDERS else "das"
    return replace(problem, more_bounds=plan.more_bounds, arrivals=_arrivals(plan, requests), order=order)


def _arrivals(plan: Plan, workload: Workload) -> Arrivals | None:
    if plan.trace_arrivals:
        return trace_arrivals(workload)
    return Arrivals(rate=plan.arrival_rate) if plan.arrival_rate else None


def _placed(plan: Plan, measured: Profile, requests: Workload, gpus: Cluster | None) -> Problem:
    """The problem on the plan's placement, checked to have room for it."""
    bound = plan.bound or Bound(seconds=math.inf)
    if len(plan.placement) == 1 and gpus is None and plan.placement[0].tensor_parallel_size == 1:
        return make_problem(measured, requests, bound, utilization=plan.gpu_memory_utilization, max_seqs=plan.max_seqs)
    share = plan.gpu_memory_utilization or MEMORY_UTILIZATION
    memory = (gpus.memory_bytes if gpus else measured.device.memory_bytes) * share
    # Whether the model fits one device or could fit the cluster says nothing about this placement.
    unplaced = make_problem(measured, requests, bound, cluster=gpus, memory=math.inf, max_seqs=plan.max_seqs)
    problem = replace(unplaced, memory=memory).at(plan.placement)
    _check_room(problem)
    return problem


def _check_room(problem: Problem) -> None:
    """Raises Infeasible unless the fullest GPU of the placement holds its layers and the longest request."""
    longest = int((problem.workload.inputs + problem.workload.outputs).max())
    tokens = float(num_blocks_for(longest) * BLOCK_SIZE)
    needed = memory_bytes(problem.profile, problem.cost.placement, tokens, tokens)
    if needed > problem.memory:
        raise Infeasible(
            f"the plan's fullest GPU needs {show_bytes(needed)} for weights, workspace and one request of {longest} "
            f"tokens, {problem.profile.device.name} has {show_bytes(problem.memory)} for it; place fewer layers on it"
        )


def profile_for(spec: ModelSpec, profile: Profile) -> Profile:
    """The profile, checked to be of this model's shape."""
    if profile.model.fingerprint != spec.fingerprint:
        raise InputError(
            f"the profile is of {profile.model.name} (shape {profile.model.fingerprint}), the model is {spec.name} "
            f"(shape {spec.fingerprint}); profile it with `exeplan profile`"
        )
    return profile


def _from(plan: Path, reference: str) -> str:
    beside = plan.resolve().parent / Path(reference).expanduser()
    return str(beside) if beside.exists() else reference


def engine_blocks(plan: Plan, spec: ModelSpec) -> int:
    """KV blocks for the engine: the plan's, or room for a few full contexts where a plan by hand says nothing."""
    return (plan.kv_cache_tokens or 8 * spec.max_context) // BLOCK_SIZE
