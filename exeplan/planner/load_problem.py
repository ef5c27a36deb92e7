"""Reads plans and the files that they name. References in a plan are relative to the plan's own folder."""

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from exeplan.core.batch import BLOCK_SIZE
from exeplan.core.bounds import Bound
from exeplan.core.cluster import HOST, Cluster, Link, load_cluster
from exeplan.core.models.model import ModelSpec, load_model_spec, model_reference, model_reference_from
from exeplan.core.plan import Plan, parse_plan
from exeplan.core.profile import Profile, load_profile
from exeplan.core.queue_order import ORDERS
from exeplan.core.schedule import Placement, ReplicaGroup, num_devices
from exeplan.errors import InputError
from exeplan.files import read_yaml, shipped_names
from exeplan.planner.plan_request import PlanRequest
from exeplan.planner.problems.check_placement import check_devices, check_placement
from exeplan.planner.problems.problem import Problem
from exeplan.policies import check_schedule
from exeplan.scheduling.largest_passes import with_finite_context
from exeplan.simulator.memory import cache_bytes_per_token, weight_bytes
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
    for group in plan.groups:
        check_schedule(group.schedule)
    return plan


def read_plan(path: Path, *, model: str | None = None) -> Plan:
    """The plan with its references to files as seen from the working directory; `model` is another name of its model,
    as where its directory moved."""
    plan = load_plan(path)
    return replace(
        plan,
        model=model or model_reference_from(plan.model, path),
        workload=_from(path, plan.workload, "workloads") if plan.workload else None,
        profile=_from(path, plan.profile) if plan.profile else None,
        cluster=_from(path, plan.cluster, "clusters") if plan.cluster else None,
    )


def refer(reference: str, plan: Path) -> str:
    """How a plan at that path names a file: relative to its folder. Other names stay as they are."""
    if not Path(reference).expanduser().exists():
        return reference
    return os.path.relpath(Path(reference).expanduser(), plan.resolve().parent)


def with_relative_references(plan: Plan, path: Path) -> Plan:
    """The plan with its references as a file at that path has them."""
    return replace(
        plan,
        model=model_reference(plan.model, path),
        workload=plan.workload and refer(plan.workload, path),
        profile=plan.profile and refer(plan.profile, path),
        cluster=plan.cluster and refer(plan.cluster, path),
    )


def plan_model(plan: Plan) -> ModelSpec:
    """The model of a plan. Raises InputError when its sizes are not those that were planned."""
    if Path(plan.model).is_absolute() and not Path(plan.model).exists():
        raise InputError(
            f"the plan's model was in {plan.model}, which is not there; say where with --model-dir, or in the plan"
        )
    return _checked(plan, load_model_spec(plan.model))


def plan_sizes(plan: Plan) -> ModelSpec:
    """The same for what needs no weights: of the plan's profile where the model is not on this machine."""
    profile = load_profile(Path(plan.profile)) if plan.profile and Path(plan.profile).exists() else None
    spec = _checked(plan, _planned_model(plan, profile)) if profile else plan_model(plan)
    own = profile if profile and profile.model.fingerprint == spec.fingerprint else None
    _check_cache(plan, spec, own, load_cluster(plan.cluster) if plan.cluster else None)
    return spec


def _checked(plan: Plan, spec: ModelSpec) -> ModelSpec:
    """The model of a plan, whose placement is of its layers."""
    if plan.model_fingerprint and not spec.matches(plan.model_fingerprint):
        raise InputError(
            f"the plan was made for a model of other sizes (fingerprint {plan.model_fingerprint}) than {plan.model} "
            f"has ({spec.fingerprint}); optimize again with a profile of this model"
        )
    wanted, held = (str(one or "none") for one in (plan.quantization, spec.quantization))
    if plan.model_fingerprint and wanted != held:
        raise InputError(
            f"the plan was made for other weights (quantization: {wanted}) than those of {plan.model} (quantization: "
            f"{held}); optimize again with a profile of these"
        )
    for group in plan.groups:
        check_placement(group.placement, spec, group.schedule)
    check_devices(_all_stages(plan))
    return spec


def _check_cache(plan: Plan, spec: ModelSpec, profile: Profile | None, cluster: Cluster | None) -> None:
    """Raises InputError where a device has less memory than the KV cache of a replica takes, with its weights if there
    is a profile, which says them."""
    dtype = profile.cache_dtype if profile else plan.kv_dtype or plan.dtype
    if cluster:
        device, memory = cluster.device, cluster.memory_bytes
    elif profile:
        device, memory = profile.device.name, profile.device.memory_bytes
    if dtype is None or not (cluster or profile):
        return
    for group in plan.groups:
        for number, stage in enumerate(group.placement):
            if not group.kv_cache_tokens or stage.phase == "prefill":
                continue
            each = cache_bytes_per_token(spec, dtype, group.placement, number)
            weights = weight_bytes(profile, group.placement, number) if profile else 0.0
            if (held := group.kv_cache_tokens * each + weights) > memory:
                raise InputError(
                    f"the plan's kv_cache_tokens, {group.kv_cache_tokens}, take {show_bytes(held)} of a device"
                    f"{' with its weights' if profile else ''}; {device} has {show_bytes(memory)}, enough for at most "
                    f"{max(int((memory - weights) / each), 0)}"
                )


def _all_stages(plan: Plan) -> Placement:
    """The stages of all replicas, one replica after the other."""
    return tuple(stage for group in plan.groups for placement in group.placements for stage in placement)


def plan_workload(plan: Plan, spec: ModelSpec, override: str | None = None) -> Workload:
    """The workload of a plan, or another one, fitted to the context where the plan's was."""
    workload = fitted(plan_lengths(plan, override), spec, fit=plan.fit_context)
    return replace(workload, deadlines=parse_deadlines(plan.deadline)) if plan.deadline else workload


def plan_lengths(plan: Plan, override: Workload | str | None = None) -> Workload:
    """The workload that a plan names, or another one, as it was given."""
    found = override or plan.workload
    if found is None:
        raise InputError("the plan names no workload; give one with --workload")
    return found if isinstance(found, Workload) else load_workload(found)


def fitted(workload: Workload, spec: ModelSpec, *, fit: bool) -> Workload:
    """The workload, its lengths scaled to the model's context if asked to."""
    return workload.fit_context(spec.max_context) if fit else workload


def plan_cluster(plan: Plan, profile: Profile, override: Cluster | str | None = None) -> Cluster | None:
    """The GPUs of a plan, or another cluster; None where it names none, which means that its devices are in one node.

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
    check_devices(_all_stages(plan), cluster)
    return cluster


def cluster_for(profile: Profile, reference: Cluster | str, num_gpus: int | None = None) -> Cluster:
    """The cluster, or `num_gpus` of its GPUs, checked to be of the profile's devices."""
    cluster = reference if isinstance(reference, Cluster) else load_cluster(reference)
    if cluster.device != profile.device.name:
        raise InputError(
            f"cluster {cluster.name} has {cluster.device} GPUs, the profile is of {profile.device.name}; profile the "
            f"model for {cluster.device}"
        )
    return cluster if num_gpus is None else cluster.part(num_gpus)


def profiled_host(profile: Profile, num_gpus: int) -> Cluster:
    """`num_gpus` devices of the profiled host, with the links that were measured there.

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
        name=HOST,
        device=device.name,
        num_nodes=1,
        gpus_per_node=num_gpus,
        memory_bytes=device.memory_bytes // num_gpus if device.kind == "cpu" else device.memory_bytes,
        intra=link,
        inter=link,
    )


def _of_datasheet(plan: Plan) -> str:
    """How to make the profile of a plan that was made from a datasheet: the end of a sentence."""
    if plan.cluster is None:
        return ""
    try:
        device = load_cluster(plan.cluster).device
    except InputError:  # A file that is not here.
        return ""
    given = {"dtype": plan.dtype, "kv-dtype": plan.kv_dtype, "engine": plan.engine, "routing": plan.routing}
    options = "".join(f" --{name} {value}" for name, value in given.items() if value)
    words = f"{plan.model} --datasheet {device} --cluster {plan.cluster}{options}"
    return f" (`exeplan profile {words} -o profile.json` makes it)"


def other_times(plan: Plan, profile: Profile) -> list[str]:
    """A sentence where the plan's own profile has other times than it was made with: it may have grown since."""
    if plan.profile_fingerprint in (None, profile.fingerprint):
        return []
    return [
        f"{plan.profile} is not as it was when the plan was made (fingerprint {profile.fingerprint}, then "
        f"{plan.profile_fingerprint}): figures are by its times of now, the plan's own by those of then"
    ]


def plan_request(
    plan: Plan,
    *,
    profile: Profile | str | None = None,
    workload: Workload | str | None = None,
    cluster: Cluster | str | None = None,
) -> PlanRequest:
    """What a plan answers; a profile, workload or cluster that is given replaces the plan's own.

    Raises InputError when its inputs are missing, or belong to another model or device.
    """
    measured = profile or plan.profile
    if measured is None:
        raise InputError(
            "the plan names no profile; give one with --profile where the command takes it, or plan again with one"
            f"{_of_datasheet(plan)}"
        )
    measured = measured if isinstance(measured, Profile) else load_profile(Path(measured))
    spec = _checked(plan, _planned_model(plan, measured))
    measured = profile_for(spec, measured).with_threads(plan.num_threads)
    gpus = plan_cluster(plan, measured, cluster)
    _check_cache(plan, spec, measured, gpus)
    requests = plan_lengths(plan, workload)
    # Another schedule keeps the order, unless only the plan's own policy has it.
    order = plan.schedule.order if plan.schedule.order in ORDERS else "das"
    return PlanRequest(
        profile=measured,
        workload=requests,
        fit_context=plan.fit_context,
        bounds=(plan.bound or Bound(seconds=math.inf), *plan.more_bounds),
        deadlines=parse_deadlines(plan.deadline) if plan.deadline else None,
        arrivals=_arrivals(plan, requests),
        cluster=gpus,
        whole_servers=bool(measured.engine),  # Stages that hold some layers of a phase are of exeplan's own engine.
        order=order,
        gpu_memory_utilization=plan.gpu_memory_utilization,
        max_num_seqs=plan.max_seqs,
    )


def _planned_model(plan: Plan, profile: Profile) -> ModelSpec:
    """The model of a plan; where its directory is not on this machine, its sizes as the profile holds them."""
    planned = plan.model_fingerprint is not None and profile.model.matches(plan.model_fingerprint)
    if planned and profile.model.reference == plan.model and not Path(plan.model).exists():
        return profile.model
    return load_model_spec(plan.model)


def plan_problem(
    plan: Plan, *, profile: Profile | str | None = None, workload: str | None = None, cluster: str | None = None
) -> Problem:
    """The Problem that a plan answers, on the plan's placement and for one pipeline; of equal replicas, that of one.

    Raises InputError when its inputs are missing, belong to another model or device, or lack memory, and for replicas
    that are not equal.
    """
    if plan.more_replicas:
        raise InputError(
            "the plan has replicas that are not equal; a server watches each kind on its own, a trace is played to one "
            "kind only: plan with --one-pipeline, or with --arrival-rate, whose replicas are equal"
        )
    return plan_problems(plan, profile=profile, workload=workload, cluster=cluster)[0]


def plan_problems(
    plan: Plan, *, profile: Profile | str | None = None, workload: str | None = None, cluster: str | None = None
) -> tuple[Problem, ...]:
    """The Problem of one replica of each group of equal replicas, on its placement; of a single pipeline its own.

    Raises InputError as `plan_problem`, and for replicas that are not equal where requests come at a rate, of which
    nothing says how it is shared out.
    """
    request = replace(plan_request(plan, profile=profile, workload=workload, cluster=cluster), one_pipeline=True)
    if plan.num_replicas == 1:
        return (request.problem_at(plan.placement),)
    if plan.more_replicas and (plan.arrival_rate or plan.trace_arrivals):
        raise InputError(
            "the plan has replicas that are not equal, and requests that come at a rate; such a plan is not planned "
            "anew: leave arrival_rate and trace_arrivals out of it, or plan with --arrival-rate, whose replicas are "
            "equal"
        )
    return tuple(replica_problem(request, plan, group) for group in plan.groups)


def replica_problem(request: PlanRequest, plan: Plan, group: ReplicaGroup) -> Problem:
    """The problem of one replica of a group, on as many GPUs as it has; of a single pipeline its own."""
    problem = replace(request, one_pipeline=True).problem_at(group.placement)
    if plan.num_replicas == 1:
        return problem
    one = problem.replica(group.placement, plan.num_replicas, alike=not plan.more_replicas, router=plan.router)
    return replace(one, cluster=one.cluster and one.cluster.part(num_devices(group.placement)))


def _arrivals(plan: Plan, workload: Workload) -> Arrivals | None:
    if plan.trace_arrivals:
        return trace_arrivals(workload)
    return Arrivals(rate=plan.arrival_rate) if plan.arrival_rate else None


def profile_for(spec: ModelSpec, profile: Profile) -> Profile:
    """The profile as one of this model, checked to have its sizes."""
    if profile.model.fingerprint != spec.fingerprint:
        raise InputError(
            f"the profile is of {profile.model.name}, whose sizes (fingerprint {profile.model.fingerprint}) are not "
            f"those of {spec.name} ({spec.fingerprint}); profile it with `exeplan profile`"
        )
    held = [str(model.quantization or "none") for model in (profile.model, spec)]
    if profile.source == "measured" and held[0] != held[1]:
        raise InputError(
            f"the profile was measured with the weights of {profile.model.name} (quantization: {held[0]}), those of "
            f"{spec.name} are others (quantization: {held[1]}); profile it with `exeplan profile`"
        )
    return replace(profile, model=spec)


def _from(plan: Path, reference: str, kind: str | None = None) -> str:
    """A file of the plan as seen from here; a name that is shipped as this kind stays what it is."""
    if kind and reference in shipped_names(kind):
        return reference
    path = plan.resolve().parent / Path(reference).expanduser()
    return str(path) if path.exists() else reference


def engine_blocks(plan: Plan, spec: ModelSpec) -> int:
    """KV blocks for the engine: the plan's, or enough for 8 full contexts where a plan by hand sets none (of a model
    without a limit on positions, 8 of those that GPUs keep memory for)."""
    return (plan.kv_cache_tokens or 8 * with_finite_context(spec).max_context) // BLOCK_SIZE
