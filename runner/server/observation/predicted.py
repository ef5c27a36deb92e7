"""What a plan predicts, under the names of what is observed, and both together as plain values.

`prefill_batch` is the schedule's own; `decode_batch` follows from the estimate by Little's law: tokens per second times
seconds per token. Everything else is the estimate of the replay, or of the closed form where there is no replay.
"""

from dataclasses import asdict, fields
from typing import Any

from exeplan.core.plan import Plan
from exeplan.core.schedule import NO_FIGURES, Estimate
from exeplan.runner.server.observation.observed import Snapshot, bounds_of

PREDICTED = (*(f.name for f in fields(Estimate) if f.name not in NO_FIGURES), "prefill_batch", "decode_batch")
"""Every name that a prediction may have."""


def predictions(plan: Plan) -> dict[str, float]:
    """By name; what is unknown is left out."""
    found: dict[str, float | None] = dict.fromkeys(PREDICTED)
    if estimate := plan.replay or plan.estimate:
        found.update(estimate.to_dict(), decode_batch=estimate.token_throughput * estimate.tpot)
    found["prefill_batch"] = plan.schedule.prefill_batch
    return {name: float(value) for name, value in found.items() if value is not None}


def predicted_and_observed(plan: Plan, snapshot: Snapshot) -> dict[str, Any]:
    """`predicted`, `observed` and `bounds` as plain values."""
    observed = asdict(snapshot)
    within, percentiles = observed.pop("within"), observed.pop("percentiles")
    bounds = [{"about": b.metric, "seconds": b.seconds, "within": within.get(b.metric)} for b in bounds_of(plan)]
    return {"predicted": predictions(plan), "observed": {**observed, **percentiles}, "bounds": bounds}
