"""Many optimizations in one table: every profile on every cluster of its device, under every workload and bound.

Not here: further options of a single optimization (`exeplan optimize`).
"""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from exeplan.core.bounds import Bound
from exeplan.core.cluster import Cluster
from exeplan.core.plan import Plan, bound_json
from exeplan.core.plan import as_json as plan_json
from exeplan.core.profile import Profile
from exeplan.core.schedule import Estimate, Schedule
from exeplan.errors import Infeasible, InputError
from exeplan.extras import frame
from exeplan.planner.default_settings import DefaultSettings, with_defaults
from exeplan.planner.plan_request import PlanRequest
from exeplan.planner.reports.placement_text import show_copies, show_placement
from exeplan.planner.reports.tables import html, html_table, table
from exeplan.planner.solution import solve
from exeplan.planner.threads import solve_by_threads
from exeplan.progress import SILENT, Told
from exeplan.units import show_seconds

_HEADER = (
    "model",
    "engine",
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
class ComparisonRow:
    """What was asked, and the best plan or why there is none."""

    model: str
    cluster: str
    """The device where there is none."""
    gpus: int
    workload: str
    workload_source: str = ""
    """Where its lengths come from and what was done to them, for people."""
    bound: Bound
    engine: str = ""
    """Whose times the profile has; '' for those of kernels alone, or of exeplan's own engine."""
    defaults: bool = False
    """The plan is the engine without options, on the placement of the row before."""
    plan: Plan | None = None
    refusal: str = ""
    nearest: str = ""
    """The nearest feasible request, in a few words."""

    @property
    def estimate(self) -> Estimate | None:
        """The closed form's, as in the table of `exeplan optimize`."""
        return self.plan.estimate if self.plan else None

    @property
    def schedule(self) -> Schedule | None:
        """Of the first group of replicas."""
        return self.plan.schedule if self.plan else None

    @property
    def breaks_bound(self) -> bool:
        """Of defaults only: a plan keeps it."""
        return bool(self.estimate and (self.estimate.latency or 0.0) > self.bound.seconds)

    @property
    def throughput_per_gpu(self) -> float | None:
        """Requests/s."""
        return self.estimate.throughput / self.gpus if self.estimate else None


def matched(
    profiles: Sequence[Profile], clusters: Sequence[Cluster], own: Sequence[tuple[Profile, Cluster]] = ()
) -> list[tuple[Profile, Cluster]]:
    """Every profile with every cluster of its device, and then those of a cluster's `own` times.

    Raises InputError for one without a match.
    """
    devices = {cluster.device for cluster in clusters}
    for profile in profiles:
        if profile.device.name not in devices:
            raise InputError(
                f"the profile of {profile.model.name} is of {profile.device.name}, the clusters have "
                f"{', '.join(sorted(devices))}; give a cluster of {profile.device.name}"
            )
    measured = {profile.device.name for profile in (*profiles, *(profile for profile, _ in own))}
    for cluster in clusters:
        if cluster.device not in measured:
            raise InputError(
                f"cluster {cluster.name} has {cluster.device} GPUs, the profiles are of "
                f"{', '.join(sorted(measured))}; profile a model for {cluster.device}"
            )
    return [*((p, c) for p, c in product(profiles, clusters) if p.device.name == c.device), *own]


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """Many optimizations: one row each."""

    rows: tuple[ComparisonRow, ...]

    def to_frame(self) -> Any:
        """A pandas DataFrame; seconds, requests/s, tokens/s."""
        return frame([_flat(row) for row in self.rows])

    def __iter__(self) -> Iterator[ComparisonRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return comparison_table(self.rows)

    def _repr_html_(self) -> str:
        cells, reasons = _table_cells(self.rows)
        return html(html_table(_HEADER, cells), "\n".join(reasons))


def default_row(request: PlanRequest, row: ComparisonRow, defaults: DefaultSettings) -> ComparisonRow:
    """The engine of a row with a plan, without options."""
    assert row.plan
    try:
        return replace(row, plan=with_defaults(request, row.plan, defaults), defaults=True)
    except Infeasible as refused:
        return replace(row, plan=None, defaults=True, refusal=str(refused))


def compare_row(request: PlanRequest, *, told: Told = SILENT) -> ComparisonRow:
    """The row of a request under one bound, on one device with the best number of threads that was profiled.

    Raises InputError for wrong input, not for an infeasible bound.
    """
    row = ComparisonRow(
        model=request.profile.model.name,
        cluster=request.cluster.name if request.cluster else request.profile.device.name,
        gpus=request.cluster.num_gpus if request.cluster else 1,
        workload=request.workload.name,
        workload_source=request.requests.source,
        bound=request.bounds[0],
        engine=request.profile.engine,
    )
    try:
        solved = solve(request, told=told) if request.cluster else solve_by_threads(request, told=told)
    except Infeasible as refused:
        return replace(row, refusal=str(refused), nearest=refused.nearest)
    return replace(row, plan=solved.optimum.plan)


def comparison_table(rows: Sequence[ComparisonRow]) -> str:
    """The rows for people. Why a row has no plan stands in it, or below the table, where it takes a sentence."""
    cells, reasons = _table_cells(rows)
    return "\n".join([table(_HEADER, cells), *reasons])


def _table_cells(rows: Sequence[ComparisonRow]) -> tuple[list[tuple[str, ...]], list[str]]:
    """The cells, and the numbered sentences that they refer to."""
    reasons = list(dict.fromkeys(row.refusal for row in rows if row.refusal and not row.nearest))
    return [_cells(row, reasons) for row in rows], [f"({number}) {reason}" for number, reason in enumerate(reasons, 1)]


def _cells(row: ComparisonRow, reasons: Sequence[str]) -> tuple[str, ...]:
    engine = f"{row.engine or 'exeplan'}{', defaults' if row.defaults else ''}"
    asked = (row.model, engine, row.cluster, str(row.gpus), row.workload, show_seconds(row.bound.seconds))
    if row.plan is None or row.estimate is None:
        return (*asked, "none", row.nearest or f"see ({reasons.index(row.refusal) + 1})", *("-",) * 5)
    return (
        *asked,
        _policies(row.plan),
        _variables(row.plan),
        _placements(row.plan),
        f"{row.estimate.throughput:.3g}",
        f"{row.estimate.token_throughput:.4g}",
        show_seconds(row.estimate.latency) + (" (breaks the bound)" if row.breaks_bound else ""),
        f"{row.throughput_per_gpu:.3g}",
    )


def as_json(row: ComparisonRow) -> dict[str, Any]:
    """A row for programs: schedule, placement and replicas as in a plan, null where there is none."""
    plan = plan_json(row.plan) if row.plan else {}
    return {
        **{name: getattr(row, name) for name in ("model", "engine", "defaults", "cluster", "gpus", "workload")},
        "workload_source": row.workload_source or None,
        "bound": bound_json(row.bound),
        **{
            name: plan.get(name)
            for name in ("schedule", "placement", "replicas", "more_replicas", "num_threads", "estimate", "replay")
        },
        "throughput_per_gpu": row.throughput_per_gpu,
        "breaks_bound": row.breaks_bound if row.plan else None,
        "refusal": row.refusal or None,
        "nearest": row.nearest or None,
    }


def csv_text(rows: Sequence[ComparisonRow]) -> str:
    """The rows as CSV: seconds, requests/s, tokens/s; an infinite bound is `inf`, a missing value is empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [*_flat(rows[0])], lineterminator="\n")
    writer.writeheader()
    writer.writerows(_flat(row) for row in rows)
    return out.getvalue()


def _flat(row: ComparisonRow) -> dict[str, Any]:
    estimate, replay = row.estimate, row.plan.replay if row.plan else None
    return {
        **{name: getattr(row, name) for name in ("model", "engine", "defaults", "cluster", "gpus", "workload")},
        "bound_seconds": row.bound.seconds,
        "bound_about": row.bound.metric,
        "policy": _policies(row.plan) if row.plan else None,
        "variables": _variables(row.plan) if row.plan else None,
        "placement": _placements(row.plan) if row.plan else None,
        "throughput": estimate.throughput if estimate else None,
        "token_throughput": estimate.token_throughput if estimate else None,
        "latency": estimate.latency if estimate else None,
        "replay_throughput": replay.throughput if replay else None,
        "replay_token_throughput": replay.token_throughput if replay else None,
        "replay_latency": replay.latency if replay else None,
        "throughput_per_gpu": row.throughput_per_gpu,
        "breaks_bound": row.breaks_bound if row.plan else None,
        "refusal": row.refusal,
    }


def _policies(plan: Plan) -> str:
    return " and ".join(dict.fromkeys(group.schedule.policy for group in plan.groups))


def _variables(plan: Plan) -> str:
    """Of replicas with their numbers and sizes, group by group."""
    if plan.num_replicas > 1:
        return show_copies(plan)
    return " ".join(f"{name}={value}" for name, value in plan.schedule.variables.items())


def _placements(plan: Plan) -> str:
    """Of the first replica of each group; on a CPU with its threads, where there are several."""
    threads = f", {plan.num_threads} threads" if plan.num_threads > 1 else ""
    return " and ".join(show_placement(group.placements[0]) for group in plan.groups) + threads
