"""Many optimizations in one table: every profile on every cluster of its device, under every workload and bound.

Not here: what a single optimization can be asked beyond that (`exeplan optimize`).
"""

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from exeplan.core.bounds import Bound
from exeplan.core.cluster import Cluster
from exeplan.core.plan import bound_json, estimate_json, stage_json
from exeplan.core.profile import Profile
from exeplan.core.schedule import Estimate, Placement, Schedule
from exeplan.errors import Infeasible, InputError
from exeplan.planner.optimize import optimize, resolve_policies
from exeplan.planner.placement_text import show_placement
from exeplan.planner.problem import make_problem
from exeplan.planner.tables import table
from exeplan.units import show_seconds
from exeplan.workload.workload import Workload

_HEADER = (
    "model",
    "cluster",
    "GPUs",
    "workload",
    "bound",
    "winner",
    "variables",
    "placement",
    "req/s",
    "tok/s",
    "latency",
    "req/s/GPU",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One row: what was asked, and the best plan or why there is none."""

    model: str
    cluster: str
    """The device where there is no cluster."""
    gpus: int
    workload: str
    bound: Bound
    schedule: Schedule | None = None
    placement: Placement | None = None
    estimate: Estimate | None = None
    """The closed form's, as in the table of `exeplan optimize`."""
    replay: Estimate | None = None
    refusal: str = ""
    nearest: str = ""
    """What would be possible, in a few words."""

    @property
    def throughput_per_gpu(self) -> float | None:
        """Requests/s."""
        return self.estimate.throughput / self.gpus if self.estimate else None


def matched(profiles: Sequence[Profile], clusters: Sequence[Cluster]) -> list[tuple[Profile, Cluster]]:
    """Every profile with every cluster of its device. Raises InputError for one that has no partner."""
    devices = {cluster.device for cluster in clusters}
    for profile in profiles:
        if profile.device.name not in devices:
            raise InputError(
                f"the profile of {profile.model.name} is of {profile.device.name}, the clusters have "
                f"{', '.join(sorted(devices))}; give a cluster of {profile.device.name}"
            )
    measured = {profile.device.name for profile in profiles}
    for cluster in clusters:
        if cluster.device not in measured:
            raise InputError(
                f"cluster {cluster.name} has {cluster.device} GPUs, the profiles are of "
                f"{', '.join(sorted(measured))}; profile a model for {cluster.device}"
            )
    return [(p, c) for p, c in product(profiles, clusters) if p.device.name == c.device]


def compare(profile: Profile, cluster: Cluster | None, workload: Workload, bound: Bound, *, policy: str) -> Comparison:
    """One row. Raises InputError where something is wrong, rather than out of reach."""
    row = Comparison(
        model=profile.model.name,
        cluster=cluster.name if cluster else profile.device.name,
        gpus=cluster.num_gpus if cluster else 1,
        workload=workload.name,
        bound=bound,
    )
    try:
        problem = make_problem(profile, workload, bound, cluster=cluster)
        plan = optimize(problem, policies=resolve_policies(policy, cluster)).plan
    except Infeasible as refused:
        return replace(row, refusal=str(refused), nearest=refused.nearest)
    return replace(row, schedule=plan.schedule, placement=plan.placement, estimate=plan.estimate, replay=plan.replay)


def comparison_table(rows: Sequence[Comparison]) -> str:
    """The rows for people. Why a row has no plan stands in it, or below the table, where it takes a sentence."""
    reasons = list(dict.fromkeys(row.refusal for row in rows if row.refusal and not row.nearest))
    lines = [table(_HEADER, [_cells(row, reasons) for row in rows])]
    lines += [f"({number}) {reason}" for number, reason in enumerate(reasons, 1)]
    return "\n".join(lines)


def _cells(row: Comparison, reasons: Sequence[str]) -> tuple[str, ...]:
    asked = (row.model, row.cluster, str(row.gpus), row.workload, show_seconds(row.bound.seconds))
    if row.schedule is None or row.placement is None or row.estimate is None:
        return (*asked, "none", row.nearest or f"see ({reasons.index(row.refusal) + 1})", *("-",) * 5)
    return (
        *asked,
        row.schedule.policy,
        _variables(row.schedule),
        show_placement(row.placement),
        f"{row.estimate.throughput:.3g}",
        f"{row.estimate.token_throughput:.4g}",
        show_seconds(row.estimate.latency),
        f"{row.throughput_per_gpu:.3g}",
    )


def as_json(row: Comparison) -> dict[str, Any]:
    """A row for programs: schedule and placement as in a plan, null where there is none."""
    return {
        **{name: getattr(row, name) for name in ("model", "cluster", "gpus", "workload")},
        "bound": bound_json(row.bound),
        "schedule": {"policy": row.schedule.policy, **row.schedule.variables} if row.schedule else None,
        "placement": [stage_json(stage) for stage in row.placement] if row.placement else None,
        "estimate": estimate_json(asdict(row.estimate)) if row.estimate else None,
        "replay": estimate_json(asdict(row.replay)) if row.replay else None,
        "throughput_per_gpu": row.throughput_per_gpu,
        "refusal": row.refusal or None,
        "nearest": row.nearest or None,
    }


def csv_text(rows: Sequence[Comparison]) -> str:
    """The rows as CSV: seconds, requests/s, tokens/s; an endless bound is `inf`, what a row has not is empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [*_flat(rows[0])], lineterminator="\n")
    writer.writeheader()
    writer.writerows(_flat(row) for row in rows)
    return out.getvalue()


def _flat(row: Comparison) -> dict[str, Any]:
    estimate = row.estimate
    return {
        **{name: getattr(row, name) for name in ("model", "cluster", "gpus", "workload")},
        "bound_seconds": row.bound.seconds,
        "bound_about": row.bound.metric,
        "policy": row.schedule.policy if row.schedule else None,
        "variables": _variables(row.schedule) if row.schedule else None,
        "placement": show_placement(row.placement) if row.placement else None,
        "throughput": estimate.throughput if estimate else None,
        "token_throughput": estimate.token_throughput if estimate else None,
        "latency": estimate.latency if estimate else None,
        "throughput_per_gpu": row.throughput_per_gpu,
        "refusal": row.refusal,
    }


def _variables(schedule: Schedule) -> str:
    return " ".join(f"{name}={value}" for name, value in schedule.variables.items())
