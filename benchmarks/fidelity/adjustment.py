"""Dynamic workload adjustment (ExeGPT section 5.2): what planned schedules of rra and waa gain by it, by replay.

    python -m benchmarks.fidelity.adjustment

OPT-13B on four A40s, the paper's tasks and real traces, each planned under a bound of three times what a request of the
99th-percentile length takes alone and without a bound, and replayed without adjustment and with it within 5 and
10 % of the planned loads: several seeds, the same requests for each threshold. Prints how throughput and latencies
change with a threshold, with 95 % intervals over the seeds, and how much prefills and decode batches vary (standard
deviation over mean, in the middle of the run). The planned decode batch of waa is what its steady state holds: towards
slots that stay empty every prefill would be enlarged. Writes records/adjustment.json.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from math import inf, sqrt

import numpy as np

from benchmarks.lib.record import write_record
from exeplan.arrays import Floats
from exeplan.core.bounds import Bound
from exeplan.core.cluster import load_cluster
from exeplan.core.models.model import load_model_spec
from exeplan.core.runs.metrics import summarize
from exeplan.core.schedule import Schedule
from exeplan.errors import Infeasible
from exeplan.planner.choice.optimize import optimize
from exeplan.planner.load_problem import fitted
from exeplan.planner.problems.problem import Problem, make_problem
from exeplan.planner.reports.tables import table
from exeplan.profiler.datasheets.datasheet import load_datasheet, profile_from_datasheet, with_links
from exeplan.simulator.closed_form import steady_state
from exeplan.simulator.replay import replay
from exeplan.simulator.run import Run
from exeplan.workload.files import load_workload

LAWS = ("S", "T", "C1", "alpaca", "wmt17-ende", "azure-2023-code")
POLICIES = ("rra", "waa-c")
SLACKS = (3.0, inf)
PERCENTS = (5, 10)
_SEEDS = 4
_T_95 = 3.18
"""Of the t distribution with three degrees of freedom, 95 % within."""
_GENERATIONS, _REQUESTS = 10, (2000, 6000)
_BOUNDS = (Bound(seconds=1e9), Bound(seconds=1e9, metric="p99-ttft"))
_FIGURES = ("requests/s", "p99-length latency", "p99 of requests", "p99 ttft", "prefills vary", "decode batches vary")


@dataclass(frozen=True, slots=True)
class Case:
    """A planned schedule, replayed without a threshold and with each; figures are [seeds, kinds]."""

    name: str
    plain: Floats
    adjusted: dict[int, Floats]

    def change(self, percent: int, figure: int) -> tuple[float, float]:
        """Relative to the replays without a threshold, and half its 95 % interval."""
        ratios = self.adjusted[percent][:, figure] / self.plain[:, figure] - 1
        return float(ratios.mean()), float(_T_95 * ratios.std(ddof=1) / sqrt(len(ratios)))

    def row(self) -> list[str]:
        cells = [f"{self.plain[:, figure].mean():.3g}" for figure in (0, 1)]
        for percent in PERCENTS:
            cells += [_percents(self.change(percent, figure)) for figure in range(4)]
            cells.append(_varying(self.plain, self.adjusted[percent]))
        return [self.name, *cells]


def main() -> None:
    jobs = [(law, policy, slack) for law in LAWS for policy in POLICIES for slack in SLACKS]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        cases = [case for case in pool.map(_case, *zip(*jobs, strict=True)) if case]
    header = ["case", *_FIGURES[:2]]
    for percent in PERCENTS:
        header += [f"{percent} %: {name}" for name in (*_FIGURES[:4], "variations")]
    rows = [case.row() for case in cases]
    print(table(tuple(header), rows))
    lines = list(_summary(cases))
    print("\n".join(lines))
    figures = [
        {"case": c.name, "plain": c.plain.tolist(), "adjusted": {p: a.tolist() for p, a in c.adjusted.items()}}
        for c in cases
    ]
    print(f"\nrecord: {write_record('adjustment', {'figures': _FIGURES, 'cases': figures, 'summary': lines})}")


def _summary(cases: Sequence[Case]) -> Iterator[str]:
    """For each threshold the changes over the cases, and in how many one is certain to be a gain of a percent."""
    for percent in PERCENTS:
        for number, better in ((0, 1), (1, -1), (2, -1), (3, -1)):
            changes = [case.change(percent, number) for case in cases]
            means = [mean for mean, _ in changes]
            gains = sum(better * mean - half > 0.01 for mean, half in changes)
            losses = sum(-better * mean - half > 0.01 for mean, half in changes)
            yield (
                f"within {percent} %, {_FIGURES[number]}: {100 * min(means):+.1f} to {100 * max(means):+.1f} %, median "
                f"{100 * float(np.median(means)):+.1f} %; better by 1 % in {gains} of {len(cases)} cases, worse in "
                f"{losses}"
            )


def _percents(change: tuple[float, float]) -> str:
    return f"{100 * change[0]:+.1f} ± {100 * change[1]:.1f} %"


def _varying(plain: Floats, adjusted: Floats) -> str:
    before, after = 100 * plain[:, 4:].mean(axis=0), 100 * adjusted[:, 4:].mean(axis=0)
    return f"{before[0]:.0f} to {after[0]:.0f} %, {before[1]:.0f} to {after[1]:.0f} %"


def _case(law: str, policy: str, slack: float) -> Case | None:
    """None where no schedule keeps the bound."""
    cluster, spec = load_cluster("a40").part(4), load_model_spec("opt-13b")
    sheet = with_links(load_datasheet(cluster.device), cluster)
    workload = fitted(load_workload(law), spec, fit=True)
    profile = profile_from_datasheet(spec, sheet, dtype="float16")
    problem = make_problem(profile, workload, Bound(seconds=inf), cluster=cluster)
    alone = optimize(problem, policies=("static",)).plan
    shortest = problem.at(alone.placement).evaluate(Schedule("static", {"batch_size": 1})).latency
    try:
        plan = optimize(replace(problem, bound=Bound(seconds=slack * shortest)), policies=(policy,)).plan
    except Infeasible:
        return None
    placed = problem.at(plan.placement)
    bound = f"{slack:g} x alone" if slack < inf else "no bound"
    planned = loads(placed, plan.schedule)
    adjusted = {percent: {**plan.schedule.variables, **planned, "adjust_percent": percent} for percent in PERCENTS}
    return Case(
        f"{law}, {bound}, {plan.schedule}",
        _figures(placed, plan.schedule),
        {percent: _figures(placed, Schedule(policy, variables)) for percent, variables in adjusted.items()},
    )


def loads(placed: Problem, schedule: Schedule) -> dict[str, int]:
    """The planned loads: prompt tokens of a prefill, and requests that decode after it."""
    tokens = round(schedule["prefill_batch"] * placed.workload.mean_input)
    if "decode_steps" in schedule.variables:
        comb = placed.workload.decode_law(first_token_from_prefill=True).comb(schedule["decode_steps"])
        return {"prefill_tokens": tokens, "decode_batch": round(schedule["prefill_batch"] * comb.active[0])}
    residents = steady_state(schedule, placed.workload, placed.cost).cycle.num_seqs
    return {"prefill_tokens": tokens, "decode_batch": min(round(residents), schedule["decode_batch"])}


def _figures(placed: Problem, schedule: Schedule) -> Floats:
    """A row of figures for each seed."""
    steady = steady_state(schedule, placed.workload, placed.cost)
    residents = steady.throughput * steady.bound_latency("p99-length")
    number = int(np.clip(_GENERATIONS * residents, *_REQUESTS))
    return np.array([_of_seed(placed, schedule, number, seed) for seed in range(_SEEDS)])


def _of_seed(placed: Problem, schedule: Schedule, number: int, seed: int) -> list[float]:
    inputs, outputs = placed.workload.sample(number, seed=seed)
    run = replay(schedule, placed.cost, input_tokens=inputs, output_tokens=outputs, num_blocks=10**6)
    found = summarize(
        run.requests, p99_output=placed.workload.output_quantile(0.99), bounds=_BOUNDS, backlog=True, waiting=False
    )
    assert found.latency is not None
    assert found.latency_p99 is not None
    prefills = _middle(run, [(p.start, p.end - p.start) for p in run.passes if p.num_prefill])
    decodes = _middle(run, [(p.start, float(p.num_decode)) for p in run.passes if p.num_decode])
    tails = found.latency_p99, found.percentiles["p99-ttft"]
    return [found.throughput, found.latency, *tails, _spread(prefills), _spread(decodes)]


def _middle(run: Run, timed: list[tuple[float, float]]) -> list[float]:
    """Those of the middle two quarters of the run, its steady state."""
    end = run.passes[-1].end
    return [value for start, value in timed if end / 4 < start < 3 * end / 4]


def _spread(values: list[float]) -> float:
    return float(np.std(values) / np.mean(values))


if __name__ == "__main__":
    main()
