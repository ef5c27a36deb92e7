"""What ExeGPT's idea is worth today: RRA and WAA against chunked prefill and ORCA, each on its best placement.

Datasheets of three deployments, four length laws, and bounds on an output of the 99th-percentile length: three and
twelve times what a request of that length takes alone, and for one of them none. Every policy is planned alone, on any
placement and in any number of replicas, and counts with the throughput of its replay under a backlog. Lengths beyond a
model's context are scaled to it. The better of RRA and WAA is compared with the better of the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median

from benchmarks.paper.claims import Part
from benchmarks.paper.setting import DTYPE, Settings
from benchmarks.paper.systems import on_whole_machines
from exeplan.core.bounds import Bound
from exeplan.core.cluster import load_cluster
from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.schedule import Schedule
from exeplan.errors import Infeasible
from exeplan.planner.choice.optimize import optimize
from exeplan.planner.load_problem import fitted
from exeplan.planner.problems.problem import Problem, make_problem
from exeplan.profiler.datasheets.datasheet import load_datasheet, profile_from_datasheet, with_links
from exeplan.workload.files import load_workload

EXEGPT, OTHERS = ("rra", "waa-c"), ("orca", "chunked")
_DEPLOYMENTS = {
    ("llama-3.1-8b", "a40", 4): (3.0, 12.0),
    ("opt-13b", "a40", 4): (3.0, 12.0, inf),
    ("gpt3-39b", "a40", 16): (3.0, 12.0),
}
"""Model, cluster and GPUs: slacks of the bounds."""
_LAWS = ("alpaca", "wmt17-ende", "azure-2023-conv", "azure-2023-code")


@dataclass(frozen=True, slots=True)
class Cell:
    """A deployment, a length law and a bound, with the best plan of each policy; None where none keeps the bound."""

    deployment: str
    law: str
    slack: float
    bound: float
    plans: dict[str, Plan | None]

    def rate(self, policy: str) -> float | None:
        plan = self.plans[policy]
        return plan.replay.throughput if plan and plan.replay else None

    def best(self, policies: Sequence[str]) -> tuple[str, float] | None:
        """The fastest of these policies, with its requests/s."""
        kept = [(policy, rate) for policy in policies if (rate := self.rate(policy))]
        return max(kept, key=lambda pair: pair[1], default=None)

    @property
    def ratio(self) -> float | None:
        """ExeGPT's better policy over the better of the others."""
        ours, others = self.best(EXEGPT), self.best(OTHERS)
        return ours[1] / others[1] if ours and others else None

    @property
    def case(self) -> str:
        bound = f"{self.slack:g} x alone" if self.slack < inf else "no bound"
        return f"{self.deployment}, {self.law}, {bound}"

    def row(self) -> tuple[object, ...]:
        ours = self.best(EXEGPT)
        plan = self.plans[ours[0]] if ours else None
        rates = (self.rate(policy) for policy in _POLICIES)
        return self.case, self.bound, *rates, self.ratio, plan and f"{plan.num_replicas} x {plan.schedule}"


def part(settings: Settings) -> Part:
    """Quick: the smallest model only."""
    cells = []
    for (model, cluster, gpus), slacks in list(_DEPLOYMENTS.items())[: 1 if settings.quick else None]:
        for law in _LAWS:
            cells += compared(model, cluster, gpus, law, slacks)
            print(*cells[-1].row(), sep=" | ", flush=True)
    return Part(
        title="What RRA and WAA are worth today, requests/s",
        header=("case", "bound s", *_POLICIES, "over the others", "ExeGPT's plan"),
        rows=[cell.row() for cell in cells],
        notes=(summarized(cells), (__doc__ or "").partition("\n\n")[2].strip().replace("\n", " ")),
    )


def compared(model: str, cluster_name: str, gpus: int, law: str, slacks: Sequence[float]) -> list[Cell]:
    """A cell for each slack."""
    cluster, spec = load_cluster(cluster_name).part(gpus), load_model_spec(model)
    sheet = with_links(load_datasheet(cluster.device), cluster)
    profile = profile_from_datasheet(spec, sheet, dtype=DTYPE)
    workload = fitted(load_workload(law), spec, fit=True)
    problem = make_problem(profile, workload, Bound(seconds=inf), cluster=cluster)
    alone = on_whole_machines(problem).evaluate(Schedule("static", {"batch_size": 1})).latency
    name = f"{model}, {gpus} {cluster_name.upper()}"
    return [
        Cell(name, law, slack, slack * alone, {policy: _plan(problem, policy, slack * alone) for policy in _POLICIES})
        for slack in slacks
    ]


_POLICIES = (*EXEGPT, *OTHERS)


def _plan(problem: Problem, policy: str, seconds: float) -> Plan | None:
    try:
        return optimize(replace(problem, bound=Bound(seconds=seconds)), policies=(policy,)).plan
    except Infeasible:
        return None


def summarized(cells: Sequence[Cell]) -> str:
    """How many cells ExeGPT's policies win, by more than 2 %, and by how much they win and lose."""
    rated = [(cell.ratio, cell) for cell in cells if cell.ratio]
    (most, best), (least, worst) = (pick(rated, key=lambda pair: pair[0]) for pick in (max, min))
    won = [cell.best(EXEGPT) for ratio, cell in rated if ratio > 1.02]
    by_waa = sum(found is not None and found[0] == "waa-c" for found in won)
    even = sum(0.98 <= ratio <= 1.02 for ratio, _ in rated)
    return (
        f"RRA or WAA serves over 2 % more than the better of ORCA and chunked prefill in {len(won)} of {len(cells)} "
        f"cases, {by_waa} of these by WAA; {even} are even, {len(cells) - len(won) - even} lost. The ratio is "
        f"{median(ratio for ratio, _ in rated):.2f} in the median, {most:.2f} at most ({best.case}) and {least:.2f} at "
        f"least ({worst.case})."
    )
