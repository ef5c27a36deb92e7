"""Plan: schedule + placement + the estimate it was chosen on + fingerprints of its inputs, as one YAML file.

A plan may be written by hand: model, policy with its variables, and placement suffice; `exeplan simulate` adds the rest.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from exeplan.errors import InputError
from exeplan.files import read_yaml, write_text

BOUND_ABOUT = ("p99-length", "p99-requests")
"""What a latency bound is about: an output of the 99th-percentile length, or 99 % of all requests."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A policy with values for its control variables."""

    policy: str
    variables: Mapping[str, int]

    def __getitem__(self, name: str) -> int:
        return self.variables[name]

    def __str__(self) -> str:
        return f"{self.policy}({', '.join(f'{k}={v}' for k, v in self.variables.items())})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One pipeline stage: the devices that hold it and the layers on them, first to last exclusive."""

    devices: tuple[int, ...] = (0,)
    layers: tuple[int, int]

    @property
    def tensor_parallel_size(self) -> int:
        return len(self.devices)


Placement = tuple[Stage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """a promise: `seconds` for what `about` says, counted from the start of a request's prefill."""

    seconds: float
    about: str = "p99-length"

    def __post_init__(self) -> None:
        if math.isnan(self.seconds) or self.seconds <= 0:
            raise InputError(f"a latency bound must be a positive number of seconds, found {self.seconds:g}")
        if self.about not in BOUND_ABOUT:
            raise InputError(f"a bound can be on {' or '.join(BOUND_ABOUT)}, not on '{self.about}'")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a schedule does: predicted by the closed form or the replay, or measured. Requests/s, seconds, tokens, bytes.

    Times count from the start of a request's prefill. `latency` is the one the bound is about; where a measurement holds
    no request that long it is None.
    """

    throughput: float
    token_throughput: float
    ttft: float
    tpot: float
    latency: float | None
    latency_p50: float
    latency_p99: float
    kv_tokens: float
    """Tokens in the KV cache: mean plus the spread that the plan leaves room for (predicted), or the peak (measured)."""
    memory_bytes_per_gpu: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything `exeplan serve` needs, and what it promises."""

    model: str
    """A model directory or a shipped name."""
    schedule: Schedule
    placement: Placement
    workload: str | None = None
    """What the plan was made for: a trace path, a shipped workload, or a law as written for `--workload`."""
    fit_context: bool = False
    """The workload's lengths were scaled to the model's context."""
    profile: str | None = None
    bound: Bound | None = None
    dtype: str | None = None
    device: str | None = None
    num_threads: int = 1
    """Compute threads on a CPU."""
    kv_cache_tokens: int | None = None
    max_seqs: int | None = None
    model_fingerprint: str | None = None
    workload_fingerprint: str | None = None
    profile_fingerprint: str | None = None
    estimate: Estimate | None = None
    replay: Estimate | None = None
    drift_headroom: float | None = None
    """The mean output may rise by this share before the bound breaks; None when nothing bounds it."""
    search: Mapping[str, Any] = field(default_factory=dict)


def save_plan(plan: Plan, path: Path) -> None:
    """Writes the plan as YAML, unset fields left out."""
    import yaml

    body = {name: value for name, value in as_json(plan).items() if value not in (None, {}, [])}
    write_text(path, yaml.safe_dump({"exeplan": 1, **body}, sort_keys=False, default_flow_style=None, width=110))


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain values: `schedule` is flat, its policy beside its variables (DESIGN: contracts for programs)."""
    body = asdict(plan)
    body["schedule"] = {"policy": plan.schedule.policy, **plan.schedule.variables}
    body["placement"] = [
        {"devices": list(s.devices), "tensor_parallel_size": s.tensor_parallel_size, "layers": list(s.layers)}
        for s in plan.placement
    ]
    return body


def load_plan(path: Path) -> Plan:
    """Reads and checks a plan. Raises InputError naming the field that is wrong."""
    body = read_yaml(path)
    if body.pop("exeplan", 1) != 1:
        raise InputError(f"{path} is a plan of a newer exeplan")
    known = {f.name for f in fields(Plan)}
    if unknown := sorted(set(body) - known):
        raise InputError(f"{path}: unknown field '{unknown[0]}'; a plan has {', '.join(sorted(known))}")
    for name in ("model", "schedule", "placement"):
        if name not in body:
            raise InputError(f"{path}: a plan needs '{name}'")
    try:
        return Plan(
            **{
                **body,
                "schedule": _schedule(body["schedule"]),
                "placement": tuple(_stage(stage) for stage in body["placement"]),
                "bound": Bound(**body["bound"]) if body.get("bound") else None,
                "estimate": _estimate(body.get("estimate")),
                "replay": _estimate(body.get("replay")),
            }
        )
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise InputError(f"{path} is not a plan: {error}") from None


def _schedule(body: Any) -> Schedule:
    from exeplan.policies import load_policy

    if not isinstance(body, Mapping) or not isinstance(body.get("policy"), str):
        raise InputError("schedule must name a policy and its control variables")
    schedule = Schedule(body["policy"], {str(k): v for k, v in body.items() if k != "policy"})
    load_policy(schedule.policy).check(schedule)
    return schedule


def _stage(body: Any) -> Stage:
    if not isinstance(body, Mapping) or not {"devices", "layers"} <= set(body):
        raise InputError("each stage of a placement needs devices and layers")
    first, last = body["layers"]
    devices = tuple(body["devices"])
    if not devices or not all(isinstance(n, int) and n >= 0 for n in (*devices, first, last)) or first >= last:
        raise InputError(f"a stage cannot hold layers {first} to {last} on devices {list(devices)}")
    return Stage(devices=devices, layers=(first, last))


def _estimate(body: Any) -> Estimate | None:
    return Estimate(**body) if body else None
