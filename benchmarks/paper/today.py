"""What ExeGPT's idea is worth today: RRA and WAA against chunked prefill and ORCA, each on its best placement.

    python -m benchmarks.paper.today [--quick]

Datasheets of three deployments, four length laws, and bounds on an output of the 99th-percentile length: three and
twelve times what a request of that length takes alone, and for one of them none. Every policy is planned alone, on
any placement and in any number of replicas, and counts with the throughput of its replay under a backlog. Lengths
beyond a model's context are scaled to it. Writes records/today.json.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median
from typing import Any

from benchmarks.lib.record import write_record
from benchmarks.paper.setting import DTYPE
from benchmarks.paper.systems import on_whole_machines
from exeplan.core.bounds import Bound
from exeplan.core.cluster import load_cluster
from exeplan.core.model import load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.schedule import Schedule
from exeplan.errors import Infeasible
from exeplan.planner.load_problem import fitted
from exeplan.planner.optimize import optimize
from exeplan.planner.problem import Problem, make_problem
from exeplan.planner.tables import table
from exeplan.profiler.datasheets.datasheet import load_datasheet, profile_from_datasheet, with_links
from exeplan.workload.files import load_workload

EXEGPT, OTHERS = ("rra", "waa-c"), ("orca", "chunked")
_DEPLOYMENTS = {
    ("llama-3.1-8b", "a40", 4): (3.0, 12.0),
    ("opt-13b", "a40", 4): (3.0, 12.0, inf),
    ("gpt3-39b", "a40", 16): (3.0, 12.0),
}
"""Model, cluster and GPUs: slacks of the bounds."""
_LARGE = {("llama-3.1-70b", "h100", 8): (3.0, 12.0)}
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

    def row(self) -> dict[str, Any]:
        ours = self.best(EXEGPT)
        plan = self.plans[ours[0]] if ours else None
        return {
            "case": f"{self.deployment}, {self.law}, {self.slack:g} x alone",
            "bound s": round(self.bound, 3) if self.bound < inf else "none",
            **{policy: self.rate(policy) for policy in (*EXEGPT, *OTHERS)},
            "over the others": self.ratio,
            "ExeGPT's plan": f"{plan.num_replicas} x {plan.schedule}" if plan else "none keeps the bound",
            "ExeGPT's policy": ours[0] if ours else None,
            "slack": self.slack if self.slack < inf else "none",
            "law": self.law,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="OPT-13B only")
    parser.add_argument("--large", action="store_true", help="Llama-3.1-70B on eight H100, too: minutes")
    args = parser.parse_args()
    began, cells = time.process_time(), []
    for (model, cluster, gpus), slacks in (_DEPLOYMENTS | (_LARGE if args.large else {})).items():
        for law in _LAWS if not args.quick or model == "opt-13b" else ():
            for cell in compared(model, cluster, gpus, law, slacks):
                cells.append(cell)
                print(*cell.row().values(), sep=" | ", flush=True)
    summary = summarized(cells)
    print(table(("", ""), [(key, str(value)) for key, value in summary.items()]))
    record = {**summary, "CPU seconds": round(time.process_time() - began), "rows": [cell.row() for cell in cells]}
    print(f"record: {write_record('today', record)}")


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


def summarized(cells: Sequence[Cell]) -> dict[str, Any]:
    """Cells that ExeGPT's policies win, by more than 2 %, and by how much they win and lose."""
    rated = [(cell.ratio, cell) for cell in cells if cell.ratio]
    best, worst = max(rated, key=lambda pair: pair[0]), min(rated, key=lambda pair: pair[0])
    return {
        "cells": len(cells),
        "won by more than 2 %": sum(ratio > 1.02 for ratio, _ in rated),
        "won by WAA by more than 2 %": sum(
            ratio > 1.02 and cell.best(EXEGPT)[0] == "waa-c" for ratio, cell in rated if cell.best(EXEGPT)
        ),
        "within 2 %": sum(abs(ratio - 1) <= 0.02 for ratio, _ in rated),
        "lost by more than 2 %": sum(ratio < 0.98 for ratio, _ in rated) + len(cells) - len(rated),
        "median ratio": median(ratio for ratio, _ in rated),
        "largest ratio": best[0],
        "largest ratio in": best[1].row()["case"],
        "smallest ratio": worst[0],
        "smallest ratio in": worst[1].row()["case"],
    }


if __name__ == "__main__":
    main()
