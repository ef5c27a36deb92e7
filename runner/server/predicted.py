"""What a plan promises, by the names under which it is observed, and both beside each other as plain values.

`prefill_batch` is the schedule's own; `decode_batch` follows from the estimate by Little's law: tokens a second times
seconds a token. Everything else is the replay's estimate, the closed form's where there is no replay.
"""

import math
from dataclasses import asdict, fields
from typing import Any

from exeplan.core.plan import Plan
from exeplan.core.schedule import Estimate
from exeplan.runner.server.observed import Snapshot, bounds_of

_BATCHES = ("prefill_batch", "decode_batch")


def predictions(plan: Plan, *, empty: bool = False) -> dict[str, float]:
    """By name, what is unknown left out; `empty` gives every name there is."""
    names = [*(field.name for field in fields(Estimate)), *_BATCHES]
    if empty:
        return dict.fromkeys(names, math.nan)
    found: dict[str, float | None] = dict.fromkeys(names)
    if estimate := plan.replay or plan.estimate:
        found.update(asdict(estimate), decode_batch=estimate.token_throughput * estimate.tpot)
    found["prefill_batch"] = plan.schedule.prefill_batch
    return {name: float(value) for name, value in found.items() if value is not None}


def beside(plan: Plan, snapshot: Snapshot) -> dict[str, Any]:
    """`predicted`, `observed` and `bounds` as plain values."""
    observed = asdict(snapshot)
    within = observed.pop("within")
    bounds = [{"about": b.metric, "seconds": b.seconds, "within": within.get(b.metric)} for b in bounds_of(plan)]
    return {"predicted": predictions(plan), "observed": observed, "bounds": bounds}
