"""What a plan chooses, and its effect: Schedule, Placement, ReplicaGroup, Estimate, Figure.

Not here: the file that holds them (`plan.py`), and how they are found (`exeplan/planner`).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from exeplan.core.models.model import ModelSpec
from exeplan.extras import frame

POLICY_FILE = ".py"
"""How the name of a policy ends that is a file outside the package."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A policy with values for its control variables."""

    policy: str
    """A name, or the absolute path of a policy file (see `exeplan.policies`)."""
    variables: Mapping[str, int]
    order: str = "fcfs"
    """Which waiting request goes first (see `exeplan.core.queue_order`)."""

    @property
    def num_micro_batches(self) -> int:
        """Batches in flight on a pipeline, each with its own requests; the variable `micro_batches` of any policy."""
        return self.variables.get("micro_batches", 1)

    @property
    def prefill_batch(self) -> int | None:
        """Requests of one prefill, where the schedule plans them; the variable `prefill_batch` of some policies."""
        return self.variables.get("prefill_batch")

    @property
    def lead_seconds(self) -> float:
        """How long before its deadline a request must have started; the variable `lead_ms` of any order."""
        return self.variables.get("lead_ms", 0) / 1000

    @property
    def has_policy_file(self) -> bool:
        """Whether the policy is a file outside the package: loading it runs its code."""
        return self.policy.endswith(POLICY_FILE)

    def __getitem__(self, name: str) -> int:
        return self.variables[name]

    def __str__(self) -> str:
        values = [] if self.order == "fcfs" else [f"order={self.order}"]
        name = Path(self.policy).name if self.has_policy_file else self.policy
        return f"{name}({', '.join([*values, *(f'{k}={v}' for k, v in self.variables.items())])})"


class Sharding(NamedTuple):
    """How the devices of a stage share its layers.

    Attention is cut over `tensor_parallel_size` devices, and `data_parallel_size` such groups (ranks) each hold all of
    it and attend for requests of their own. Experts are on all devices: in `expert_parallel_size` parts of whole
    experts, each part cut by width over what is left.
    """

    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_parallel_size: int = 1

    @property
    def num_devices(self) -> int:
        return self.tensor_parallel_size * self.data_parallel_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One pipeline stage: the devices that hold it and the layers on them, first to last exclusive."""

    devices: tuple[int, ...] = (0,)
    layers: tuple[int, int]
    """Decoder layers."""
    encoder_layers: tuple[int, int] = (0, 0)
    phase: str = ""
    """`prefill` or `decode` for a stage that does nothing else."""
    data_parallel_size: int = 1
    """Groups of devices (ranks) that each attend for requests of their own (see `Sharding`)."""
    expert_parallel_size: int = 1
    """Parts of whole experts that the devices hold."""

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @property
    def tensor_parallel_size(self) -> int:
        """Devices over which attention is cut: all of them, without attention data parallelism."""
        return len(self.devices) // self.data_parallel_size

    @property
    def sharding(self) -> Sharding:
        return Sharding(self.tensor_parallel_size, self.data_parallel_size, self.expert_parallel_size)


Placement = tuple[Stage, ...]
"""Stages in the order in which a pass visits them."""


def single_stage(spec: ModelSpec) -> Placement:
    """All layers on device 0."""
    return (Stage(layers=(0, spec.num_layers), encoder_layers=(0, spec.num_encoder_layers)),)


ROUTERS = ("shortest-queue", "round-robin", "random")
"""To which replica a request goes: the one with the fewest requests, each in turn, or any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaGroup:
    """Equal pipelines. Each replica holds the whole model and has requests, batches and a KV cache of its own."""

    schedule: Schedule
    """Of each replica."""
    placement: Placement
    """Of each replica; device numbers count from its first device."""
    first_devices: tuple[int, ...] = (0,)
    """The first device of each replica."""
    kv_cache_tokens: int | None = None
    """Of each replica."""
    capacity: float | None = None
    """Requests/s of each replica with its batches full; by it the router weighs queues. None where all are alike and
    requests do not arrive at a rate."""

    @property
    def num_replicas(self) -> int:
        return len(self.first_devices)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placement of each replica, by the cluster's device numbers."""
        return tuple(moved(self.placement, first) for first in self.first_devices)


def moved(placement: Placement, first_device: int) -> Placement:
    """The same stages on devices that follow `first_device`."""
    return tuple(replace(s, devices=tuple(first_device + device for device in s.devices)) for s in placement)


def num_devices(placement: Placement) -> int:
    """Devices of all stages."""
    return sum(stage.num_devices for stage in placement)


def servers(placement: Placement, phase: str) -> tuple[tuple[int, ...], ...]:
    """The numbers of the stages of a phase, those together that hold all layers once.

    There are several where equal servers share the prefills, or the decodes: each takes passes of its own.
    """
    found: list[list[int]] = []
    layers = 0
    for number, stage in enumerate(placement):
        if stage.phase != phase:
            continue
        if not found or (stage.layers[0] == 0 and layers):
            found.append([])
        found[-1].append(number)
        layers = stage.layers[1]
    return tuple(map(tuple, found))


def num_servers(placement: Placement) -> tuple[int, int] | None:
    """Servers that only prefill, and that only decode (x and y of xPyD); None where every stage does both."""
    counts = len(servers(placement, "prefill")), len(servers(placement, "decode"))
    return counts if all(counts) else None


def needs_other_engine(placement: Placement) -> bool:
    """Whether ranks attend for requests of their own, parts of whole experts are themselves cut by width, or several
    servers prefill or decode: the engine here runs tensor parallelism, with the experts of a stage cut likewise or
    divided among all of its devices, and one pipeline for each phase."""
    if (num_servers(placement) or (1, 1)) != (1, 1):
        return True
    return any(
        stage.data_parallel_size > 1 or stage.expert_parallel_size not in (1, stage.tensor_parallel_size)
        for stage in placement
    )


def num_ranks(placement: Placement) -> int:
    """Ranks among which the requests are divided: 1 without attention data parallelism. All stages have as many."""
    return placement[0].data_parallel_size


BOUND_FIGURES = ("attainment", "goodput")
"""Figures of an Estimate that it has only where something is bounded."""
DEADLINE_FIGURES = ("deadline_share", "utility")
"""Those that it has only where requests have deadlines."""

NO_FIGURES = ("percentiles", "evidence", "notes")
"""Fields of an Estimate that are not a figure each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure of a run, in the figure's unit."""

    value: float
    low: float | None
    """Of the interval; None where the window is too short for one."""
    high: float | None
    """Infinite where the run does not limit it."""
    num_observations: int
    of: str
    """What was observed: gaps, requests or tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The performance of a schedule, predicted by closed form or replay, or measured. Requests/s, seconds, tokens,
    bytes.

    Times count from the start of a request's prefill, with arrivals from its arrival. `latency` is
    the metric of the bound; None where a measurement holds no request that long.
    """

    throughput: float
    token_throughput: float
    ttft: float
    tpot: float
    latency: float | None
    latency_p50: float
    latency_p99: float
    kv_tokens: float
    """Tokens in the KV cache: mean plus the spread that a plan leaves room for (predicted), or the peak (measured). Of
    requests at the planned rate, where they come at one; full batches take more."""
    memory_bytes_per_gpu: float
    deadline_share: float | None = None
    """Share of the requests whose whole answer comes by their deadline; None without deadlines, and by closed form."""
    utility: float | None = None
    """Worth of these requests a second, weight / input tokens each."""
    attainment: float | None = None
    """Share of the requests that keep every bound (`core/request_times.py`); None without bounds."""
    goodput: float | None = None
    """Such requests a second."""
    percentiles: Mapping[str, float] = field(default_factory=dict)
    """By metric, such as p99-ttft: the values of the bounds on percentiles of ttft, of tpot and of all together."""
    evidence: Mapping[str, Figure] = field(default_factory=dict, compare=False)
    """Of a run: throughput, token_throughput, latency, latency_p50 and latency_p99 with their intervals."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Of a run: sentences on figures that do not come from requests that were seen from beginning to end."""

    def to_dict(self) -> dict[str, float | None]:
        """Its figures by name, percentiles by metric; without those on bounds or deadlines where there are none."""
        values = asdict(self)
        percentiles, _, _ = (values.pop(name) for name in ("percentiles", "evidence", "notes"))
        optional = (*BOUND_FIGURES, *DEADLINE_FIGURES)
        found = {name: value for name, value in values.items() if value is not None or name not in optional}
        return {**found, **percentiles}

    def to_frame(self) -> Any:
        """A pandas DataFrame of one row."""
        return frame([self.to_dict()])
