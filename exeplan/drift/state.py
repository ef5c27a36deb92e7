"""Rules of re-planning, and what a service knows about its plan: drift, predictions, the last re-plan; plain values.

Not here: how they are computed (`watch.py`, `runner/replan/replanner.py`) and shown (`runner/server`).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from exeplan.core.plan import Plan
from exeplan.core.plan import as_json as plan_json
from exeplan.core.schedule import Estimate

MODES = ("off", "advise", "auto")
"""No watch; watch and propose other plans; watch and adopt them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """When to re-plan."""

    gain: float = 0.03
    """Least relative gain in throughput for a re-plan: predictions are not better than that."""
    dwell: float = 60.0
    """Least seconds between two re-plans."""
    every: float = 5.0
    """Seconds between two looks."""
    false_alarm: float = 1e-6
    """Probability, at one look, that an unchanged law counts as changed, or the planned traffic as more."""
    least_requests: float = 64.0
    """Independent requests below which no verdict is given."""
    least_for_search: float = 160.0
    """Independent requests below which no plan is made: about ln(1 / (1 - confidence)) / 1 %, to know the tail."""
    looks: int = 2
    """Consecutive looks that have to agree."""
    confidence: float = 0.8
    """Probability that the tail is not heavier than the new plan assumes."""


class RequestLengths(NamedTuple):
    """A request as far as it is known; `start` in seconds on any one clock."""

    start: float
    input_tokens: int
    output_tokens: int
    complete: bool
    """False: it still runs, or was dropped, and would have become longer."""
    seconds: float = 0.0
    """From its start to its last token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Shares of requests by length: `shares[i]` lie above `edges[i]` and at most at `edges[i + 1]` tokens."""

    edges: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()
    mean: float = 0.0
    p99: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths of inputs and of outputs; both laws have the same edges."""

    inputs: Histogram = field(default_factory=Histogram)
    outputs: Histogram = field(default_factory=Histogram)


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftState:
    """The latest look at the traffic, by the law of recent requests."""

    seconds: float = 0.0
    """When, on the service's clock."""
    num_requests: float = 0.0
    """Independent requests behind the observed law; 0 while there are none."""
    measure: float = 0.0
    """Distance of the observed law from the planned one over what chance explains: above 1 it has changed."""
    bound_share: float | None = None
    """Utilization of the binding bound under the observed law with the active plan: above 1 it is broken."""
    predicted: Estimate | None = None
    """Of all replicas of the active plan under the observed law."""
    best_gain: float | None = None
    """Relative gain in throughput of the best other plan of the last search."""
    missed: float | None = None
    """Where no plan kept the bounds in the last search: the tightest that one keeps over the requested ones."""
    verdict: str = ""
    """In words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanned:
    """A re-plan that was adopted or proposed; `number` counts them from 1."""

    number: int
    seconds: float
    """When, on the service's clock."""
    source: str
    """`drift`, `devices` that were lost or came back, or the operator's `signal` or `request`."""
    reason: str
    plan: Plan
    old: Estimate | None
    """Of the previous plan under the law that the new one was made for, where known."""
    new: Estimate | None
    diff: str
    """For people."""
    file: str | None = None
    """Where the plan was written."""
    pause_seconds: float = 0.0
    """In which no batch ran."""
    num_recomputed: int = 0
    """Requests that were prefilled again."""
    num_carried: int = 0
    """Requests whose keys and values moved to other workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FewerDevices:
    """Replicas that have lost devices."""

    num_replicas: int
    """Those that run a plan for the devices left; the others wait for theirs."""
    missed: float
    """The widest of the bounds that these keep, over the service's own; 1 where all keep those."""
    verdict: str
    """In words, of every replica that has lost devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplanState:
    """Everything about re-planning that the dashboard and metrics show."""

    mode: str
    plan: Plan
    """The active one."""
    num_replans: int = 0
    """Adopted since the start."""
    drift: DriftState = field(default_factory=DriftState)
    planned: Lengths | None = None
    """Lengths that the active plan was made for; None where its workload cannot be read."""
    observed: Lengths | None = None
    last: Replanned | None = None
    """The last re-plan that was adopted."""
    proposed: Replanned | None = None
    """A plan that awaits adoption or veto."""
    devices: FewerDevices | None = None
    """None while all replicas have theirs."""
    veto: str = ""
    """Why the last better or proposed plan was not adopted."""
    error: str = ""
    """Why there is no watch, or why the last attempt failed."""


def as_json(state: ReplanState) -> dict[str, Any]:
    """Plain values; plans as in `exeplan.core.plan.as_json`."""
    body = asdict(state)
    body["plan"] = plan_json(state.plan)
    for name in ("last", "proposed"):
        if (replanned := getattr(state, name)) is not None:
            body[name]["plan"] = plan_json(replanned.plan)
    return body


def summary(state: ReplanState) -> Mapping[str, float]:
    """The values for metrics, by name; unknown ones are left out."""
    found = {
        "replans_total": state.num_replans,
        "drift_measure": state.drift.measure,
        "drift_requests": state.drift.num_requests,
        "drift_bound_share": state.drift.bound_share,
        "drift_best_gain": state.drift.best_gain,
        "drift_bound_missed": state.drift.missed,
        "replan_pause_seconds": state.last.pause_seconds if state.last else None,
        "replan_last_seconds": state.last.seconds if state.last else None,
        "replan_proposed": float(state.proposed is not None),
        "replan_reduced_replicas": float(state.devices.num_replicas if state.devices else 0),
        "replan_reduced_bound_missed": state.devices.missed if state.devices and state.devices.num_replicas else None,
    }
    return {name: float(value) for name, value in found.items() if value is not None}
