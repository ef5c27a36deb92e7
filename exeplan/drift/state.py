"""When a service re-plans, and what it knows of its own plan: drift, predictions, the last re-plan; plain values.

Not here: how it comes about (`drift.py`, `runner/replan/replanner.py`) and how it is shown (`runner/server/server.py`).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from exeplan.core.plan import Plan
from exeplan.core.plan import as_json as plan_json
from exeplan.core.schedule import Estimate

MODES = ("off", "advise", "auto")
"""Watch nothing; watch, and propose other plans; watch, and adopt them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """When to re-plan."""

    gain: float = 0.03
    """Relative gain in throughput from which moving is worth thinking of: predictions are not better than that."""
    dwell: float = 60.0
    """Seconds from one re-plan to the next, at least."""
    every: float = 5.0
    """Seconds between two looks."""
    false_alarm: float = 1e-6
    """Probability, at one look, that a law which has not changed counts as another."""
    least_requests: float = 64.0
    """Independent requests without which nothing is said."""
    least_for_search: float = 160.0
    """Such without which no plan is made: about ln(1 / (1 - confidence)) / 1 %, so that the tail is known at all."""
    looks: int = 2
    """Looks in a row that have to agree."""
    confidence: float = 0.8
    """That the tail is not heavier than the new plan reckons with."""


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
    """How long requests are, each side alone; both laws have the same edges."""

    inputs: Histogram = field(default_factory=Histogram)
    outputs: Histogram = field(default_factory=Histogram)


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftState:
    """The latest look at what arrives, by the law of recent requests."""

    seconds: float = 0.0
    """When, on the service's clock."""
    num_requests: float = 0.0
    """Independent requests that the observed law is worth; 0 while nothing is known."""
    measure: float = 0.0
    """How far the observed law is from the one planned for, over what chance may do: above 1 it has changed."""
    bound_share: float | None = None
    """How full the fullest bound would be under the observed law with the active plan: above 1 it is broken."""
    predicted: Estimate | None = None
    """Of the active plan under the observed law."""
    best_gain: float | None = None
    """Relative gain in throughput of the best other plan, when one was last searched for."""
    missed: float | None = None
    """Where no plan kept the bounds when one was last searched for: the narrowest that one keeps over those asked."""
    verdict: str = ""
    """In words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanned:
    """A re-plan that was adopted or proposed; `number` counts them from 1."""

    number: int
    seconds: float
    """When, on the service's clock."""
    source: str
    """`drift`, or what an operator did: `signal`, `request`."""
    reason: str
    plan: Plan
    old: Estimate | None
    """Of the plan before, under the law that the new one was made for, as far as that is known."""
    new: Estimate | None
    diff: str
    """For people."""
    file: str | None = None
    """Where the plan was written."""
    pause_seconds: float = 0.0
    """In which no batch ran."""
    num_recomputed: int = 0
    """Requests whose keys and values could not stay."""
    num_carried: int = 0
    """Requests that took theirs along to other workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplanState:
    """Everything about re-planning that a page or a metric may show."""

    mode: str
    plan: Plan
    """The active one."""
    num_replans: int = 0
    """Adopted since the start."""
    drift: DriftState = field(default_factory=DriftState)
    planned: Lengths | None = None
    """What the active plan was made for; None where its workload cannot be read."""
    observed: Lengths | None = None
    last: Replanned | None = None
    """The last re-plan that was adopted."""
    proposed: Replanned | None = None
    """A plan that waits for somebody to adopt or to veto it."""
    veto: str = ""
    """Why the last plan that was found better, or proposed, was not adopted."""
    error: str = ""
    """Why nothing is watched, or why the last attempt failed."""


def as_json(state: ReplanState) -> dict[str, Any]:
    """Plain values; plans as in `exeplan.core.plan.as_json`."""
    body = asdict(state)
    body["plan"] = plan_json(state.plan)
    for name in ("last", "proposed"):
        if (replanned := getattr(state, name)) is not None:
            body[name]["plan"] = plan_json(replanned.plan)
    return body


def summary(state: ReplanState) -> Mapping[str, float]:
    """The numbers for metrics, by name; what is not known is left out."""
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
    }
    return {name: float(value) for name, value in found.items() if value is not None}
