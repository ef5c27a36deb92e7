"""Simulation: a plan replayed request by request, its figures filled in; for programs, notebooks, the command line."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exeplan.core.bounds import MAX_ITL, Bound, binding
from exeplan.core.plan import Plan, save_plan
from exeplan.core.schedule import ROUTERS, Estimate, ReplicaGroup
from exeplan.errors import InputError
from exeplan.extras import frame
from exeplan.figures import axes_or_new
from exeplan.planner.load_problem import with_relative_references
from exeplan.planner.plan_request import PlanRequest
from exeplan.planner.problems.headroom import with_headroom
from exeplan.planner.problems.problem import Problem
from exeplan.planner.problems.replays import (
    FullBatches,
    TracePart,
    arrived_estimate,
    full_batches,
    kv_cache_tokens,
    promised,
    replay_estimate,
    routed_estimate,
    trace_part,
)
from exeplan.planner.problems.replicas import GroupFigures, together
from exeplan.planner.reports.placement_text import show_copies
from exeplan.planner.reports.report import OF_REPLAYS, full_line
from exeplan.planner.reports.tables import group_table, html, html_table, notes_on, side_by_side, side_by_side_rows
from exeplan.progress import SILENT, Told
from exeplan.simulator.closed_form import steady_state
from exeplan.simulator.routed import RoutedRun
from exeplan.simulator.run import Run
from exeplan.simulator.timeline import draw_stages, write_timeline
from exeplan.units import show_apart, show_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STEADY_STATES = ("comb", "paper")
"""Exact, or by ExeGPT's formula."""
MAX_REQUESTS = 10_000_000
"""Most requests of a replay, days of a busy service and few enough to hold in memory."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Simulation:
    """A plan with its estimate and replay, and the replay's passes and requests."""

    plan: Plan
    request: PlanRequest
    """What the plan was replayed under."""
    problem: Problem
    run: Run
    """Of the first replica."""
    routed: RoutedRun | None = None
    """Of all replicas behind their router; None for a backlog, and where there is one."""
    steady_state: str = "comb"
    full: FullBatches | None = None
    """With an arrival rate; None under a backlog."""
    groups: tuple[GroupFigures, ...] = ()
    """Of unequal replicas the figures of each; empty where all are equal."""
    extrapolated: tuple[str, ...] = ()
    """Where the closed form left the measured range."""

    @property
    def estimate(self) -> Estimate:
        """The closed form's; the replay's where requests arrive at a rate or at the times of a trace."""
        assert self.plan.estimate is not None
        return self.plan.estimate

    @property
    def replay(self) -> Estimate:
        assert self.plan.replay is not None
        return self.plan.replay

    @property
    def whole(self) -> Run | RoutedRun:
        """The run of all replicas, or of the first one under a backlog."""
        return self.routed or self.run

    @property
    def broken_bound(self) -> Bound | None:
        """The binding bound, where the replay breaks it, or the passes that the plan allows a bound on gaps."""
        found = self._binding
        return found[0] if found is not None and found[1] > 1 else None

    @property
    def _binding(self) -> tuple[Bound, float] | None:
        """The bound of the highest utilization in the replay, of gaps by the longest pass that the plan allows too; and
        that."""
        gaps = [one.percentiles[MAX_ITL] for one in (self.estimate, self.replay) if MAX_ITL in one.percentiles]
        longest = {MAX_ITL: max(gaps)} if gaps else {}
        return binding(self.problem.bounds, replace(self.replay, percentiles={**self.replay.percentiles, **longest}))

    @property
    def trace_part(self) -> TracePart | None:
        """What was replayed of a trace; None where that is all of it, or requests come otherwise."""
        return trace_part(self.problem, len(self.whole.requests))

    def save(self, path: str | PathLike[str]) -> Plan:
        """Writes the plan with its figures as YAML. Returns it with the names of its inputs as a file there has them.

        Raises InputError for a simulation by ExeGPT's formula.
        """
        check_saved(self.steady_state)
        plan = with_relative_references(self.request.named(self.plan), Path(path))
        save_plan(plan, Path(path))
        return plan

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draws the passes in the middle of the replay on these axes, or on new ones: a lane for each stage."""
        axes = axes_or_new(ax)
        draw_stages(self.run, axes)
        axes.set_title(self._title, fontsize="medium", loc="left", pad=22)  # Above the legend.
        return axes

    def write_timeline(self, path: str | PathLike[str]) -> None:
        """Writes the passes for Perfetto (.json) or as a picture (.png, .svg, .pdf)."""
        write_timeline(self.run, Path(path), title=self._title)

    def to_frame(self) -> Any:
        """A pandas DataFrame with a row for the closed form, where there is one, and one for the replay."""
        return self.plan.to_frame()

    def requests(self) -> Any:
        """A pandas DataFrame with one row a request of the replay; seconds from the start of the run."""
        requests = self.whole.requests
        columns = (
            requests.input_tokens,
            requests.output_tokens,
            requests.arrivals,
            requests.starts,
            requests.first_tokens,
            requests.last_tokens,
        )
        rows = []
        for given, answered, arrival, start, first, end in zip(*(each.tolist() for each in columns), strict=True):
            times = {"first_token": first if answered else None, "end": end if answered else None}
            rows.append({"input_tokens": given, "output_tokens": answered, "arrival": arrival, "start": start, **times})
        return frame(rows)

    @property
    def _title(self) -> str:
        return f"{self.plan.schedule} on {self.problem.workload.name}, predicted"

    @property
    def _headline(self) -> str:
        requests, passes = len(self.whole.requests), self.whole.num_passes
        of = " in the first replica" if self.routed is None and self.plan.num_replicas > 1 else ""
        head = f"{show_copies(self.plan)} on {self.problem.workload.name}, {requests} requests, {passes} passes{of}"
        return "\n  ".join(filter(None, (head, self.problem.workload.source)))

    @property
    def _remark(self) -> str:
        lines = (
            OF_REPLAYS if self.problem.arrivals else "",
            str(self.trace_part or ""),
            *full_line(self.full),
            notes_on(replay=self.plan.replay).strip(),
            self._broken,
        )
        return "\n".join(line for line in lines if line)

    @property
    def _broken(self) -> str:
        """That the replay breaks a bound, or a pass that the plan allows; with its value where three digits of that
        look like the bound."""
        found = self._binding
        if found is None or found[1] <= 1:
            return ""
        bound, share = found
        alike = not bound.targets and show_seconds(share * bound.seconds) == show_seconds(bound.seconds)
        by = f", by {show_apart(share * bound.seconds, bound.seconds)[0]}" if alike else ""
        seen = bound.metric != MAX_ITL or self.replay.percentiles.get(MAX_ITL, 0.0) > bound.seconds
        return f"{'the replay' if seen else 'a pass that the plan allows'} breaks the {bound}{by}"

    def __repr__(self) -> str:
        figures = side_by_side(**self.plan.figures)
        parts = (self._headline, figures, group_table(self.groups), self._remark)
        return "\n\n".join(part for part in parts if part)

    def _repr_html_(self) -> str:
        columns, rows = side_by_side_rows(**self.plan.figures)
        return html(self._headline, html_table(columns, rows), group_table(self.groups), self._remark)


def check_saved(steady_state: str) -> None:
    """Raises InputError for a steady state that no plan is written with."""
    if steady_state == "paper":
        raise InputError(
            "--steady-state paper reproduces figures; plans are written with the exact steady state (comb)"
        )


def simulate_plan(
    plan: Plan,
    request: PlanRequest,
    *,
    num_requests: int | None = None,
    seed: int = 0,
    steady_state: str = "comb",
    told: Told = SILENT,
) -> Simulation:
    """Replays a plan under the request that it answers, on its own placement; `told` hears how far the replay is.

    Raises InputError for options out of range, Infeasible where the placement lacks memory.
    """
    if num_requests is not None and not 1 <= num_requests <= MAX_REQUESTS:
        raise InputError(f"--requests must lie between 1 and {MAX_REQUESTS}, found {num_requests}")
    if seed < 0:
        raise InputError(f"--seed must be at least 0, found {seed}")
    if steady_state not in STEADY_STATES:
        raise InputError(f"--steady-state must be {' or '.join(STEADY_STATES)}, found '{steady_state}'")
    problems = [_as_paper(one) if steady_state == "paper" else one for one in replica_problems(plan, request)]
    problem, profile, alone = problems[0], request.profile, list(zip(problems, plan.groups, strict=True))
    run, replayed, of_groups = _replayed(plan, request, problems, num_requests=num_requests, seed=seed, told=told)
    estimates = [one.estimate(group.schedule) for one, group in alone]
    closed_form = together(estimates, [group.num_replicas for group in plan.groups])
    stalls = [one.longest_stall(group.schedule) for one, group in alone]
    first, *more = (
        replace(group, kv_cache_tokens=group.kv_cache_tokens or kv_cache_tokens(one, group.schedule))
        for one, group in alone
    )
    full = full_batches(alone) if problem.arrivals else None
    filled = replace(
        with_headroom(replace(plan, replay=replayed), problems),
        estimate=promised(replayed, closed_form) if problem.arrivals else closed_form,
        longest_stall=asdict(max(stalls, key=lambda stall: stall.seconds)),
        kv_cache_tokens=first.kv_cache_tokens,
        capacity=full.of_each(plan.num_replicas) if full and not more else plan.capacity,
        more_replicas=tuple(more),
        search={**plan.search, "replays": 1} if plan.search else plan.search,
        model_fingerprint=profile.model.fingerprint,
        quantization=str(profile.model.quantization) if profile.model.quantization else None,
        profile_fingerprint=profile.fingerprint,
        workload_fingerprint=problem.workload.fingerprint,
        dtype=plan.dtype or profile.dtype,
        kv_dtype=plan.kv_dtype or profile.kv_dtype,
        routing=profile.routing,
        device=plan.device or profile.device.kind,
        max_seqs=plan.max_seqs or _places(plan, request, problem),
    )
    return Simulation(
        plan=filled,
        request=request,
        problem=problem,
        run=run.replicas[0] if isinstance(run, RoutedRun) else run,
        routed=run if isinstance(run, RoutedRun) else None,
        steady_state=steady_state,
        full=full,
        groups=tuple(
            GroupFigures(group=group, estimate=one, replay=each)
            for group, one, each in zip(plan.groups, estimates, of_groups, strict=True)
            if len(plan.groups) > 1
        ),
        extrapolated=tuple(dict.fromkeys(sentence for one, group in alone for sentence in _beyond(one, group))),
    )


def _places(plan: Plan, request: PlanRequest, first: Problem) -> int:
    """Requests that may be resident on all GPUs together; `first` is the problem of one replica of the first group."""
    if plan.more_replicas:
        return request.problem_at(plan.placement).max_seqs
    return first.max_seqs * plan.num_replicas


def _beyond(problem: Problem, group: ReplicaGroup) -> tuple[str, ...]:
    return problem.cost.beyond(steady_state(group.schedule, problem.workload, problem.cost).cycle)


def _replayed(
    plan: Plan, request: PlanRequest, problems: Sequence[Problem], *, num_requests: int | None, seed: int, told: Told
) -> tuple[Run | RoutedRun, Estimate, Sequence[Estimate]]:
    """Where requests arrive, of all replicas behind the router; under a backlog, where replicas do not depend on each
    other, of one of each group, and the run of the first. The last are of one replica of each group."""
    groups = list(zip(problems, plan.groups, strict=True))
    if plan.router is not None and problems[0].arrivals is not None:
        whole = replace(problems[0], arrivals=request.arrivals)
        run, replayed = routed_estimate(whole, groups, plan.router, seed=seed, num_requests=num_requests, told=told)
        firsts = [sum(group.num_replicas for group in plan.groups[:number]) for number in range(len(groups))]
        parts = zip(groups, (run.replicas[first] for first in firsts), strict=True)
        alone = [arrived_estimate(one, part.requests, [part], [(one, group.schedule)]) for (one, group), part in parts]
        return run, replayed, alone
    runs = [
        replay_estimate(
            one,
            group.schedule,
            seed=seed,
            num_requests=num_requests,
            kv_tokens=group.kv_cache_tokens,
            told=told.part(number / len(groups), (number + 1) / len(groups)),
        )
        for number, (one, group) in enumerate(groups)
    ]
    replays = [found for _, found in runs]
    return runs[0][0], together(replays, [group.num_replicas for group in plan.groups]), replays


def _as_paper(problem: Problem) -> Problem:
    return replace(problem, workload=replace(problem.workload, as_paper=True))


def replica_problems(plan: Plan, request: PlanRequest) -> tuple[Problem, ...]:
    """The problem of one replica of each group. A rate is shared by throughput where the router looks at the queues.

    Raises Infeasible where the placement lacks memory.
    """
    alone = [request.problem_at(group.placement) for group in plan.groups]
    if plan.num_replicas == 1:
        return tuple(alone)
    shares = [1 / plan.num_replicas] * len(alone)
    if plan.router == ROUTERS[0]:
        rates = [
            steady_state(g.schedule, p.workload, p.cost).throughput for p, g in zip(alone, plan.groups, strict=True)
        ]
        total = sum(rate * group.num_replicas for rate, group in zip(rates, plan.groups, strict=True))
        shares = [rate / total for rate in rates]
    return tuple(
        problem.replica(
            group.placement, plan.num_replicas, alike=not plan.more_replicas, router=plan.router, share=share
        )
        for problem, group, share in zip(alone, plan.groups, shares, strict=True)
    )
