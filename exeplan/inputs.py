"""The files that commands name, turned into a Problem: references in a plan are relative to the plan's own folder."""

import itertools
import os
from dataclasses import replace
from pathlib import Path

from exeplan.errors import InputError
from exeplan.model import ModelSpec, load_model_spec
from exeplan.plan import Bound, Plan, load_plan
from exeplan.problem import Problem, make_problem
from exeplan.profile import Profile, load_profile
from exeplan.scheduling import BLOCK_SIZE
from exeplan.workload import Workload
from exeplan.workload_files import load_workload


def read_plan(path: Path) -> Plan:
    """The plan with its references to files made good from here."""
    plan = load_plan(path)
    return replace(
        plan,
        model=_from(path, plan.model),
        workload=_from(path, plan.workload) if plan.workload else None,
        profile=_from(path, plan.profile) if plan.profile else None,
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
    layers = [stage.layers for stage in plan.placement]
    if (
        layers[0][0] != 0
        or layers[-1][1] != spec.num_layers
        or any(a[1] != b[0] for a, b in itertools.pairwise(layers))
    ):
        raise InputError(f"the plan places layers {layers}, {spec.name} has layers 0 to {spec.num_layers}")
    if len(plan.placement) > 1 or plan.placement[0].tensor_parallel_size > 1:
        devices = sum(stage.tensor_parallel_size for stage in plan.placement)
        raise InputError(f"the plan is for {devices} devices; this version runs plans for one device")
    return spec


def plan_workload(plan: Plan, spec: ModelSpec, override: str | None = None) -> Workload:
    """The workload of a plan, or another one, fitted to the context where the plan's was."""
    reference = override or plan.workload
    if reference is None:
        raise InputError("the plan names no workload; give one with --workload")
    return fitted(load_workload(reference), spec, fit=plan.fit_context)


def fitted(workload: Workload, spec: ModelSpec, *, fit: bool) -> Workload:
    """The workload, its lengths scaled to the model's context if asked to."""
    return workload.fit_context(spec.max_context) if fit else workload


def plan_problem(plan: Plan, *, profile: str | None = None, workload: str | None = None) -> Problem:
    """The Problem that a plan answers. Raises InputError when its inputs are missing or belong to another model."""
    spec = plan_model(plan)
    reference = profile or plan.profile
    if reference is None:
        raise InputError("the plan names no profile; give one with --profile")
    measured = profile_for(spec, load_profile(Path(reference)))
    bound = plan.bound or Bound(seconds=float("inf"))
    return make_problem(measured, plan_workload(plan, spec, workload), bound, max_seqs=plan.max_seqs)


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
