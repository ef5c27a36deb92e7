"""Solution: the answer to a PlanRequest, for programs, notebooks and the command line.

Not here: the search (`optimize.py`), and how a plan is replayed again (`simulation.py`).
"""

from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exeplan.core.cluster import Cluster
from exeplan.core.plan import Plan, save_plan
from exeplan.errors import Infeasible
from exeplan.extras import frame
from exeplan.figures import axes_or_new
from exeplan.planner.choice.answers import Optimum
from exeplan.planner.choice.candidates import Known
from exeplan.planner.choice.optimize import optimize, with_frontier
from exeplan.planner.choice.pipelines import Effort
from exeplan.planner.load_problem import with_relative_references
from exeplan.planner.plan_request import PlanRequest
from exeplan.planner.problems.problem import Problem
from exeplan.planner.reports.explain import Explanation, explain
from exeplan.planner.reports.frontier_plot import FrontierRow, draw_frontier, frontier_rows, plot_frontier
from exeplan.planner.reports.report import (
    POLICY_COLUMNS,
    columns,
    headline,
    optimum_report,
    policy_rows,
    promises,
)
from exeplan.planner.reports.tables import html, html_table, side_by_side_rows
from exeplan.planner.reports.thread_table import ThreadsTried
from exeplan.planner.sizing import Tried, fewest_gpus, with_more_gpus
from exeplan.progress import SILENT, Told
from exeplan.search.search import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Solution:
    """The best plan of a request, the best schedule of every policy, and what the search knew."""

    request: PlanRequest
    problem: Problem
    """The request on the GPUs of the plan."""
    optimum: Optimum
    tried: tuple[Tried, ...] = ()
    """Numbers of GPUs that were tried, where the fewest were asked for."""
    known: Known = field(default_factory=dict)
    """Searches that need not be done again."""
    threads: tuple[ThreadsTried, ...] = ()
    """Numbers of threads a process that were tried, where several were profiled."""

    @property
    def plan(self) -> Plan:
        """The plan with the names of its inputs, where they have any."""
        return self.request.named(self.optimum.plan)

    def save(self, path: str | PathLike[str]) -> Plan:
        """Writes the plan as YAML. Returns it with the names of its inputs as a file there has them."""
        plan = with_relative_references(self.plan, Path(path))
        save_plan(plan, Path(path))
        return plan

    def explain(self, *, told: Told = SILENT) -> Explanation:
        """Why the winner wins, and what more GPUs, latency or memory would buy, which is searched again."""

        def again(problem: Problem, *, policies: tuple[str, ...] | None = None, told: Told = SILENT) -> Optimum:
            names = policies or self.request.policies(problem.cluster)
            return _optimize(self.request, problem, policies=names, known=self.known, told=told)

        return explain(self.problem, self.optimum, again=again, whole=self.request.whole, told=told)

    def frontier(self) -> tuple[FrontierRow, ...]:
        """The throughput/latency frontier of every policy."""
        return tuple(frontier_rows(self._results(), winning=self.plan.schedule.policy))

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draws the frontier of every policy on these axes, or on new ones."""
        axes = axes_or_new(ax)
        plot_frontier(self.frontier(), axes, bound=self.problem.limit)
        return axes

    def write_plot(self, path: str | PathLike[str], *, told: Told = SILENT) -> None:
        """Writes the frontier as PNG, SVG or PDF by the suffix of the path."""
        winning = self.plan.schedule.policy
        draw_frontier(self._results(told), Path(path), bound=self.problem.limit, winning=winning)

    def to_frame(self) -> Any:
        """A pandas DataFrame with one row a policy: its best schedule and what the closed form says of it."""
        rows: list[dict[str, Any]] = []
        for candidate in self.optimum.candidates:
            row = {"policy": candidate.policy, "schedule": str(candidate.schedule) if candidate.schedule else None}
            values = candidate.estimate.to_dict() if candidate.estimate else {}
            rows.append({**row, **values, "refusal": candidate.refusal or None})
        return frame(rows, index="policy")

    def _results(self, told: Told = SILENT) -> dict[str, Result]:
        found, searched = {}, [c for c in self.optimum.candidates if c.search]
        for number, one in enumerate(searched):
            told(f"frontier of {one.policy}", number / len(searched))
            found[one.policy] = with_frontier(self.problem, one)
        return found

    def __repr__(self) -> str:
        return optimum_report(self.optimum, self.problem)

    def _repr_html_(self) -> str:
        header, rows = side_by_side_rows(**columns(self.optimum))
        return html(
            "\n".join(headline(self.optimum, self.problem)),
            html_table(header, rows),
            "\n".join(promises(self.optimum, self.problem)).strip(),
            html_table(POLICY_COLUMNS, policy_rows(self.optimum)),
        )


def solve(request: PlanRequest, *, told: Told = SILENT) -> Solution:
    """The best plan of a request. Raises InputError for wrong input, Infeasible saying what would be possible."""
    known: Known = {}

    def best(gpus: Cluster | None, told: Told, *, advise: bool = False, effort: Effort | None = None) -> Optimum:
        problem, policies = request.problem(gpus), request.policies(gpus)
        return _optimize(request, problem, policies=policies, advise=advise, known=known, effort=effort, told=told)

    if request.fewest_gpus:
        assert request.whole is not None
        found, tried = fewest_gpus(request.whole, best, told)
        assert found.optimum is not None
        problem = request.problem(request.whole.part(found.num_gpus))
        return Solution(request=request, problem=problem, optimum=found.optimum, tried=tried, known=known)
    try:
        optimum = best(request.cluster, told, advise=True)
    except Infeasible as error:
        if request.cluster is None or request.whole is None:
            raise
        problem, policies = request.problem(request.cluster), request.policies(request.cluster)
        more = told.part(0.5, 1.0, "no plan, more GPUs")
        # More of the pipelines that were searched: larger ones hardly ever sustain more a GPU.
        largest = max(request.cluster.num_gpus, request.whole.gpus_per_node)
        # Of what is only advised a first replay decides.
        effort = Effort(largest=largest if error.reached else None, close_ones=False, one_replica=True, report=False)
        solve_again = partial(best, effort=effort)
        raise with_more_gpus(
            error, problem, request.whole, solve_again, policies, more, margins=request.risk is not None
        ) from None
    return Solution(request=request, problem=request.problem(request.cluster), optimum=optimum, known=known)


def _optimize(
    request: PlanRequest,
    problem: Problem,
    *,
    policies: tuple[str, ...],
    advise: bool = False,
    known: Known,
    effort: Effort | None = None,
    told: Told,
) -> Optimum:
    return optimize(
        problem,
        policies=policies,
        method=request.method,
        risk=request.risk,
        advise=advise,
        known=known,
        effort=effort,
        told=told,
    )
