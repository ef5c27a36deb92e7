"""Plan: schedule + placement + the estimate it was chosen on + fingerprints of its inputs, as one YAML file.

A plan may be written by hand: model, policy with its variables, and placement suffice; `exeplan simulate` adds the
rest.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from exeplan.core.bounds import MAX_ITL, Bound, check_together, is_deadline, percentile
from exeplan.core.contract import check_types, is_number
from exeplan.core.models.model import DTYPE_BYTES
from exeplan.core.models.uneven_routing import check_uneven
from exeplan.core.schedule import (
    BOUND_FIGURES,
    DEADLINE_FIGURES,
    NO_FIGURES,
    ROUTERS,
    Estimate,
    Placement,
    ReplicaGroup,
    Schedule,
    Stage,
    moved,
)
from exeplan.errors import InputError
from exeplan.extras import frame
from exeplan.files import write_text
from exeplan.workload.arrivals import check_rate
from exeplan.workload.deadlines import parse_deadlines


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything `exeplan serve` needs, and what it promises."""

    model: str
    """A model directory, a shipped name, or an id of the Hugging Face Hub."""
    schedule: Schedule
    """Of each replica of the first group."""
    placement: Placement
    """The same; device numbers count from the replica's first device."""
    replicas: tuple[int, ...] = (0,)
    """The first device of each replica of the first group."""
    more_replicas: tuple[ReplicaGroup, ...] = ()
    """Further groups of replicas, whose schedule or placement is another one."""
    router: str | None = None
    """To which replica a request goes (see `ROUTERS`); None where there is one."""
    workload: str | None = None
    """The trace, shipped workload or law that the plan was made for, as written for `--workload`."""
    fit_context: bool = False
    """The workload's lengths were scaled to the model's context."""
    profile: str | None = None
    engine: str | None = None
    """Whose constants the times of a datasheet have, of a plan without a profile; None for kernels alone."""
    cluster: str | None = None
    """A cluster file or a shipped name; None for one device."""
    gpus: int | None = None
    """Number of GPUs of the cluster; None for all."""
    bound: Bound | None = None
    more_bounds: tuple[Bound, ...] = ()
    """Bounds that hold together with `bound`."""
    arrival_rate: float | None = None
    """Requests a second, Poisson, for which the bounds hold with the wait; None where there is a backlog."""
    deadline: str | None = None
    """Time from arrival to deadline, or two times, as written for `--deadline`."""
    trace_arrivals: bool = False
    """Requests come as in the workload's own trace."""
    dtype: str | None = None
    kv_dtype: str | None = None
    """Of keys and values, where it is not the same."""
    routing: str | None = None
    """How unevenly tokens are taken to choose experts; None where evenly, or as was not stated."""
    device: str | None = None
    num_threads: int = 1
    """Compute threads on a CPU."""
    kv_cache_tokens: int | None = None
    """Of each replica of the first group."""
    capacity: float | None = None
    """Requests/s of each replica of the first group with its batches full; None where all replicas are alike and have
    full batches, as under a backlog."""
    gpu_memory_utilization: float | None = None
    """The share of a GPU's memory that may be in use, where it is not the usual one."""
    max_seqs: int | None = None
    model_fingerprint: str | None = None
    """Of the model's sizes."""
    quantization: str | None = None
    """Of the weights that it was made for; None where they are not quantized."""
    workload_fingerprint: str | None = None
    profile_fingerprint: str | None = None
    estimate: Estimate | None = None
    replay: Estimate | None = None
    drift_headroom: float | None = None
    """The mean output may rise by this share before the bound breaks; None when nothing bounds it."""
    rate_headroom: float | None = None
    """The arrival rate may rise by this share before a bound breaks; None for a backlog."""
    promise: Mapping[str, Any] = field(default_factory=dict)
    """The `risk` of breaking a bound, the `margin` kept below each, relative to the estimate, and its `source`."""
    longest_stall: Mapping[str, Any] = field(default_factory=dict)
    """The most `seconds` that its passes can take between two tokens of a request, and the `num_prompts` and
    `num_tokens` that are prefilled meanwhile."""
    search: Mapping[str, Any] = field(default_factory=dict)

    @property
    def groups(self) -> tuple[ReplicaGroup, ...]:
        """All replicas, equal ones together."""
        first = ReplicaGroup(
            schedule=self.schedule,
            placement=self.placement,
            first_devices=self.replicas,
            kv_cache_tokens=self.kv_cache_tokens,
            capacity=self.capacity,
        )
        return (first, *self.more_replicas)

    @property
    def num_replicas(self) -> int:
        return sum(group.num_replicas for group in self.groups)

    @property
    def has_arrivals(self) -> bool:
        """Whether requests come at a rate or at the times of a trace, instead of waiting in a backlog."""
        return self.trace_arrivals or self.arrival_rate is not None

    @property
    def full_throughput(self) -> float | None:
        """Of all replicas with their batches full, in requests/s; None where nothing says it, as figures at a rate."""
        capacities = [group.capacity for group in self.groups]
        if self.has_arrivals:
            known = [one * group.num_replicas for one, group in zip(capacities, self.groups, strict=True) if one]
            return sum(known) if len(known) == len(capacities) else None
        found = self.replay or self.estimate
        return found.throughput if found else None

    @property
    def figures(self) -> dict[str, Estimate]:
        """The closed form's and the replay's, as far as the plan has them; where requests arrive the replay's."""
        closed = {} if self.has_arrivals and self.replay else {"closed form": self.estimate}
        return {name: one for name, one in {**closed, "replay": self.replay}.items() if one is not None}

    def to_frame(self) -> Any:
        """A pandas DataFrame of its figures."""
        return frame([{"by": name, **one.to_dict()} for name, one in self.figures.items()], index="by")


def single_plans(plan: Plan) -> tuple[Plan, ...]:
    """Each replica as a plan of its own, by the cluster's device numbers; what an engine runs."""
    return tuple(
        replace(
            plan,
            schedule=group.schedule,
            placement=placement,
            kv_cache_tokens=group.kv_cache_tokens,
            capacity=group.capacity,
            replicas=(0,),
            more_replicas=(),
            router=None,
        )
        for group in plan.groups
        for placement in group.placements
    )


def group_plans(plan: Plan) -> tuple[Plan, ...]:
    """Each group of equal replicas as a plan of its own, without figures, which are of all replicas together."""
    groups = plan.groups
    if len(groups) == 1:
        return (plan,)
    return tuple(
        replace(
            plan,
            schedule=group.schedule,
            placement=group.placement,
            kv_cache_tokens=group.kv_cache_tokens,
            capacity=None,
            replicas=group.first_devices,
            more_replicas=(),
            router=plan.router if group.num_replicas > 1 else None,
            estimate=None,
            replay=None,
        )
        for group in groups
    )


def with_group(plan: Plan, number: int, found: Plan) -> Plan:
    """The plan with another schedule and placement for the replicas of one group, those of a plan of that group."""
    capacity = found.estimate.throughput / found.num_replicas if found.estimate and plan.more_replicas else None
    if number == 0:
        return replace(
            plan,
            schedule=found.schedule,
            placement=found.placement,
            kv_cache_tokens=found.kv_cache_tokens,
            capacity=capacity,
        )
    group = replace(
        plan.more_replicas[number - 1],
        schedule=found.schedule,
        placement=found.placement,
        kv_cache_tokens=found.kv_cache_tokens,
        capacity=capacity,
    )
    return replace(plan, more_replicas=(*plan.more_replicas[: number - 1], group, *plan.more_replicas[number:]))


def with_replica(plan: Plan, number: int, found: Plan) -> Plan:
    """The plan with the schedule and placement of a plan of that one replica; `number` is its place among all replicas.

    All keep their places and first devices. Figures and headroom are those of the plan as it was.
    """
    groups: list[ReplicaGroup] = []
    for group in plan.groups:
        at, firsts = number - sum(one.num_replicas for one in groups), group.first_devices
        if not 0 <= at < len(firsts):
            groups.append(group)
            continue
        own = ReplicaGroup(
            schedule=found.schedule,
            placement=moved(found.placement, -firsts[at]),
            first_devices=(firsts[at],),
            kv_cache_tokens=found.kv_cache_tokens,
            capacity=found.capacity,
        )
        before, after = (replace(group, first_devices=part) for part in (firsts[:at], firsts[at + 1 :]))
        groups += [one for one in (before, own, after) if one.num_replicas]
    first, *more = groups
    return replace(
        plan,
        schedule=first.schedule,
        placement=first.placement,
        replicas=first.first_devices,
        kv_cache_tokens=first.kv_cache_tokens,
        capacity=first.capacity,
        more_replicas=tuple(more),
    )


def save_plan(plan: Plan, path: Path) -> None:
    """Writes the plan as YAML; a policy file is named from the plan's folder."""
    write_text(path, plan_yaml(plan, path.resolve().parent))


def plan_yaml(plan: Plan, folder: Path) -> str:
    """The text of a plan's file in this folder, unset fields left out."""
    from exeplan import plain_yaml

    body = {name: value for name, value in as_json(plan).items() if value not in (None, {}, [])}
    for schedule, part in zip((g.schedule for g in plan.groups), (body, *body.get("more_replicas", ())), strict=True):
        if schedule.has_policy_file:
            relative = os.path.relpath(schedule.policy, folder)
            part["schedule"]["policy"] = relative if relative.startswith("..") else f"./{relative}"
    return plain_yaml.dump({"exeplan": 1, **body})


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain values: `schedule` is flat, with policy, order and control variables."""
    body = asdict(plan)
    body["schedule"] = schedule_json(plan.schedule)
    body["replicas"] = list(plan.replicas) if plan.num_replicas > 1 else None
    body["more_replicas"] = [_group_json(group) for group in plan.more_replicas]
    for name in ("estimate", "replay"):
        if (found := getattr(plan, name)) is not None:
            body[name] = found.to_dict()
    body["placement"] = [stage_json(stage) for stage in plan.placement]
    body["bound"] = bound_json(plan.bound) if plan.bound else None
    body["more_bounds"] = [bound_json(bound) for bound in plan.more_bounds]
    return body


def schedule_json(schedule: Schedule) -> dict[str, Any]:
    """A schedule as plain values: policy, order and control variables."""
    order = {} if schedule.order == "fcfs" else {"order": schedule.order}
    return {"policy": schedule.policy, **order, **schedule.variables}


_OF_A_GROUP = ("kv_cache_tokens", "capacity")
"""What a group of replicas may have, by the name that it has in a plan."""


def _group_json(group: ReplicaGroup) -> dict[str, Any]:
    body = {
        "schedule": schedule_json(group.schedule),
        "placement": [stage_json(stage) for stage in group.placement],
        "replicas": list(group.first_devices),
    }
    more = {name: getattr(group, name) for name in _OF_A_GROUP if getattr(group, name) is not None}
    return body | more


def bound_json(bound: Bound) -> dict[str, Any]:
    """A bound as plain values; its metric is called `about` in files."""
    body: dict[str, Any] = {"seconds": bound.seconds, "about": bound.metric}
    return {**body, "targets": dict(bound.scaled_targets)} if bound.targets else body


def stage_json(stage: Stage) -> dict[str, Any]:
    """A stage as plain values, as in a plan's `placement`."""
    body: dict[str, Any] = {
        "devices": list(stage.devices),
        "tensor_parallel_size": stage.tensor_parallel_size,
        **{name: getattr(stage, name) for name in _DEGREES if getattr(stage, name) > 1},
        "layers": list(stage.layers),
    }
    if stage.encoder_layers != (0, 0):
        body["encoder_layers"] = list(stage.encoder_layers)
    return {**body, "phase": stage.phase} if stage.phase else body


def parse_plan(body: Mapping[str, Any], *, folder: Path | None = None) -> Plan:
    """The plan of `as_json` values, its policy unchecked. Raises InputError naming the field that is wrong.

    A policy file is taken from `folder`; without a folder, as for a plan from the network, none may be named.
    """
    known = {f.name for f in fields(Plan)}
    if unknown := sorted({str(name) for name in body} - known):
        raise InputError(f"unknown field '{unknown[0]}'; a plan has {', '.join(sorted(known))}")
    given = {name: value for name, value in body.items() if value is not None}
    for name in ("model", "schedule", "placement"):
        if name not in given:
            raise InputError(f"a plan needs '{name}'")
    _check_values(given)
    given.update(
        schedule=schedule_from(given["schedule"], folder),
        placement=placement_from(given["placement"]),
        replicas=_first_devices(given.get("replicas", [0])),
        more_replicas=_more_replicas(given.get("more_replicas", []), folder),
        bound=_bound(given["bound"]) if "bound" in given else None,
        more_bounds=_more_bounds(given),
    )
    _check_deadline_bound(given["bound"], given)
    _check_router(given)
    given.update({name: _estimate(name, given[name]) for name in ("estimate", "replay") if name in given})
    return Plan(**given)


def with_utilization(plan: Plan, share: float | None) -> Plan:
    """The plan with another share of its GPUs' memory, where one is given. Raises InputError for a plan for a CPU."""
    if share is None:
        return plan
    check_utilization(share, "--gpu-memory-utilization")
    if plan.device != "cuda":
        raise InputError("--gpu-memory-utilization is for GPUs; on a CPU the KV cache has the plan's kv_cache_tokens")
    return replace(plan, gpu_memory_utilization=share)


def check_utilization(value: object, name: str) -> None:
    """Raises InputError unless it is a share of a GPU's memory."""
    if not is_number(value) or not 0 < value <= 1:  # type: ignore[operator] # it is a number by then
        raise InputError(f"{name} is a share of the GPU's memory above 0 and at most 1, found {value!r}")


def _check_values(body: Mapping[str, Any]) -> None:
    if "gpu_memory_utilization" in body:
        check_utilization(body["gpu_memory_utilization"], "gpu_memory_utilization")
    if "arrival_rate" in body:
        check_rate(body["arrival_rate"])
    check_types(body, Plan)
    _check_capacity(body)
    for name in ("dtype", "kv_dtype"):
        if body.get(name, "float32") not in DTYPE_BYTES:
            raise InputError(f"{name} must be one of {', '.join(DTYPE_BYTES)}, found '{body[name]}'")
    if "routing" in body:
        check_uneven(body["routing"])
    if body.get("device", "cpu") not in ("cpu", "cuda"):
        raise InputError(f"device must be cpu or cuda, found '{body['device']}'")
    if "deadline" in body:
        parse_deadlines(body["deadline"], "deadline")
        if not ("arrival_rate" in body or body.get("trace_arrivals")):
            raise InputError("a deadline counts from the arrival; give arrival_rate or trace_arrivals too")
    if "arrival_rate" in body and body.get("trace_arrivals"):
        raise InputError("arrival_rate and trace_arrivals exclude each other; leave one out")


def _check_capacity(body: Mapping[str, Any]) -> None:
    if body.get("capacity") is not None and not 0 < body["capacity"] < math.inf:
        raise InputError(f"capacity must be a positive number of requests a second, found {body['capacity']!r}")


def _first_devices(body: Any) -> tuple[int, ...]:
    if not _counts(body) or len(set(body)) < len(body):
        raise InputError(f"replicas must list the first device of each, such as [0, 8], found {body!r}")
    return tuple(body)


def _more_replicas(body: Any, folder: Path | None) -> tuple[ReplicaGroup, ...]:
    needed = {"schedule", "placement", "replicas"}
    known = {*needed, *_OF_A_GROUP}
    if not isinstance(body, list) or not all(isinstance(g, Mapping) and needed <= set(g) <= known for g in body):
        raise InputError(f"more_replicas must list groups of {', '.join(sorted(known))}, found {body!r}")
    for group in body:
        check_types({name: group[name] for name in _OF_A_GROUP if name in group}, Plan)
        _check_capacity(group)
    return tuple(
        ReplicaGroup(
            schedule=schedule_from(group["schedule"], folder),
            placement=placement_from(group["placement"]),
            first_devices=_first_devices(group["replicas"]),
            **{name: group.get(name) for name in _OF_A_GROUP},
        )
        for group in body
    )


def _check_router(body: dict[str, Any]) -> None:
    """Several replicas have a router, the first one unless it is named; a single one has none."""
    several = len(body["replicas"]) > 1 or bool(body["more_replicas"])
    router = body.setdefault("router", ROUTERS[0]) if several else body.get("router")
    if router is not None and not several:
        raise InputError(f"router {router!r} is for several replicas; list their first devices in replicas: [0, 1]")
    if router not in (None, *ROUTERS):
        raise InputError(f"router must be one of {', '.join(ROUTERS)}, found {router!r}")


def schedule_from(body: Any, folder: Path | None = None) -> Schedule:
    """The schedule of `schedule_json` values. Raises InputError naming what is wrong."""
    if not isinstance(body, Mapping) or not isinstance(body.get("policy"), str):
        raise InputError("schedule must name a policy and its control variables")
    variables = {str(k): v for k, v in body.items() if k not in ("policy", "order")}
    schedule = Schedule(body["policy"], variables, body.get("order", "fcfs"))
    if not schedule.has_policy_file:
        return schedule
    if folder is None:
        raise InputError("this plan cannot name a policy file, which is code; save it as a file where the policy is")
    return replace(schedule, policy=str((folder / Path(schedule.policy).expanduser()).resolve()))


_DEGREES = ("data_parallel_size", "expert_parallel_size")
_STAGE = ("devices", "tensor_parallel_size", *_DEGREES, "layers", "encoder_layers", "phase")


def placement_from(body: Any) -> Placement:
    """The placement of `stage_json` values. Raises InputError naming what is wrong."""
    if not isinstance(body, list) or not body:
        raise InputError("placement must list at least one stage, such as {devices: [0], layers: [0, 6]}")
    return tuple(_stage(stage) for stage in body)


def _stage(body: Any) -> Stage:
    if not isinstance(body, Mapping) or not {"devices", "layers"} <= set(body):
        raise InputError(f"each stage of a placement needs devices and layers, found {body!r}")
    if unknown := sorted(str(key) for key in body if key not in _STAGE):
        raise InputError(f"unknown field '{unknown[0]}' of a stage; it has {', '.join(_STAGE)}")
    devices, layers, encoder = body["devices"], body["layers"], body.get("encoder_layers", [0, 0])
    spans = all(_counts(span) and len(span) == 2 and span[0] <= span[1] for span in (layers, encoder))
    if not _counts(devices) or not spans or layers[1] - layers[0] + encoder[1] - encoder[0] == 0:
        raise InputError(
            f"a stage needs devices such as [0] and layers [first, last exclusive], found {devices!r} and {layers!r}"
        )
    if len(set(devices)) < len(devices):
        raise InputError(f"a stage has a device twice: {devices!r}")
    ranks, parts = (_degree(body, name, len(devices)) for name in _DEGREES)
    if (size := body.get("tensor_parallel_size", len(devices) // ranks)) != len(devices) // ranks:
        of = f" over its data_parallel_size of {ranks}" if ranks > 1 else ""
        raise InputError(
            f"tensor_parallel_size is the number of devices of a stage{of}, here {len(devices) // ranks}, "
            f"found {size!r}"
        )
    if body.get("phase", "") not in ("", "prefill", "decode"):
        raise InputError(f"a stage's phase can be prefill or decode, found {body['phase']!r}")
    return Stage(
        devices=tuple(devices),
        layers=(layers[0], layers[1]),
        encoder_layers=(encoder[0], encoder[1]),
        phase=body.get("phase", ""),
        data_parallel_size=ranks,
        expert_parallel_size=parts,
    )


def _degree(body: Mapping[str, Any], name: str, num_devices: int) -> int:
    """Raises InputError unless it divides the devices of the stage."""
    size = body.get(name, 1)
    if type(size) is not int or size < 1 or num_devices % size:
        raise InputError(f"{name} must divide the {num_devices} devices of a stage, found {size!r}")
    return size


def _counts(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(type(n) is int and n >= 0 for n in values)


def _bound(body: Any) -> Bound:
    if not isinstance(body, Mapping) or not {"seconds"} <= set(body) <= {"seconds", "about", "targets"}:
        raise InputError(f"a bound has seconds and about, found {body!r}")
    targets = body.get("targets", {})
    if not isinstance(targets, Mapping):
        raise InputError(f"the targets of a bound are seconds by name, such as {{ttft: 0.5}}, found {targets!r}")
    found = Bound(seconds=body["seconds"], metric=body.get("about", "p99-length"), targets=tuple(targets.items()))
    if found.targets and not math.isclose(found.seconds, found.targets[0][1]):
        raise InputError(
            f"the seconds of a bound on {found.metric} are those of its first target, {found.targets[0][1]}, found "
            f"{found.seconds}"
        )
    return found


def _check_deadline_bound(bound: Bound | None, body: Mapping[str, Any]) -> None:
    if bound and is_deadline(bound.metric) and "deadline" not in body:
        raise InputError(f"a bound on {bound.metric} needs a deadline too, such as deadline: 2s")


def _more_bounds(body: Mapping[str, Any]) -> tuple[Bound, ...]:
    found = body.get("more_bounds", [])
    if not isinstance(found, list):
        raise InputError(f"more_bounds must list bounds such as {{seconds: 0.5, about: ttft}}, found {found!r}")
    more = tuple(_bound(bound) for bound in found)
    check_together((_bound(body["bound"]) if "bound" in body else Bound(seconds=math.inf), *more))
    return more


def _estimate(name: str, body: Any) -> Estimate:
    optional = {*BOUND_FIGURES, *DEADLINE_FIGURES}
    names = [f.name for f in fields(Estimate) if f.name not in (*optional, *NO_FIGURES)]
    percentiles = {key for key in body if key == MAX_ITL or percentile(key)} if isinstance(body, Mapping) else set()
    if not isinstance(body, Mapping) or set(body) - optional - percentiles != set(names):
        raise InputError(f"{name} must have exactly {', '.join(names)}; left out, `exeplan simulate` fills it in")
    for key, value in body.items():
        if not is_number(value) and not (key == "latency" and value is None):
            raise InputError(f"{name}: {key} must be a number, found {value!r}")
    figures = {key: value for key, value in body.items() if key not in percentiles}
    return Estimate(**figures, percentiles={key: body[key] for key in body if key in percentiles})
