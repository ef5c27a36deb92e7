"""What short runs of a perfect engine show against long ones: bias of every figure, and how often its interval holds
the truth, by policy and length of the run.

    python -m benchmarks.fidelity.perfect_engine [--seeds 200] [--durations 8 16 30] [--policies rra ...]
        [--workload alpaca] [--profile FILE] [--out FILE]

A replay is an engine that takes exactly the predicted time, so that whatever a short run of it shows wrongly is the
fault of the estimators (`exeplan/core/runs/estimators.py`). The demo model on one core of the generic CPU's datasheet,
planned for each policy under the demo's bound, four times what one request alone needs; policies with separate stages
have two cores and eight times that. Each run has the requests of `exeplan bench` of that duration, drawn
with a seed of its own.

The truth is the mean of four replays of 60 times the longest duration, figures taken from single requests by plain
means and quantiles: those that begin after the first and before the last twentieth. Throughput is compared in tokens:
requests/s follow from it by the mean output of the requests of a run, which is known. The truth has seeds of its own.
Writes records/perfect-engine.json, or --out.
"""

import argparse
import math
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.lib.record import write_record
from exeplan.arrays import Floats
from exeplan.core.bounds import Bound
from exeplan.core.cluster import load_cluster
from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.profile import Profile, load_profile
from exeplan.core.runs.metrics import Requests, summarize
from exeplan.core.schedule import Estimate, Schedule
from exeplan.planner.choice.optimize import optimize
from exeplan.planner.load_problem import fitted
from exeplan.planner.problems.problem import make_problem
from exeplan.planner.reports.tables import table
from exeplan.policies import load_policy, policy_names, sampled_evenly
from exeplan.profiler.datasheets.datasheet import load_datasheet, profile_from_datasheet, with_links
from exeplan.runner.load import draw_load, enough_requests
from exeplan.simulator.cost import CostModel
from exeplan.simulator.replay import replay
from exeplan.simulator.run import Run
from exeplan.workload.files import load_workload
from exeplan.workload.workload import Workload

TIMES_LONGER = 60
_BOUND_FACTOR, _BOUND_FACTOR_APART = 4.0, 8.0
_TRUTH_SEEDS = range(10**6, 10**6 + 4)
_EDGE = 0.05
_PACE = 0.95
QUANTITIES = {
    "token_throughput": "tokens/s",
    "latency": "latency at p99 length",
    "latency_p50": "p50 of requests",
    "latency_p99": "p99 of requests",
    "ttft": "mean ttft",
    "p99-ttft": "p99 ttft",
    "tpot": "mean tpot",
    "p95-tpot": "p95 tpot",
    "attainment": "attainment",
}


@dataclass(frozen=True)
class Case:
    """A plan, and the machine that runs it exactly as predicted."""

    schedule: Schedule
    cost: CostModel
    workload: Workload
    throughput: float
    """Requests/s by the plan."""

    @property
    def length(self) -> int:
        return self.workload.output_quantile(0.99)

    def played(self, seconds: float, seed: int) -> Run:
        """A run of the requests that `exeplan bench` plays for this duration."""
        number = enough_requests(self.schedule, throughput=self.throughput, seconds=seconds)
        load = draw_load(self.workload, number, seed=seed, stratified=sampled_evenly(self.schedule))
        return replay(
            self.schedule,
            self.cost,
            input_tokens=load.input_tokens,
            output_tokens=load.output_tokens,
            num_blocks=10**6,
            record_passes=False,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=" ".join(__doc__.split("\n\n")[0].split()))
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--durations", type=float, nargs="+", default=[8.0, 16.0, 30.0], metavar="SECONDS")
    parser.add_argument("--policies", nargs="+", default=list(policy_names()))
    parser.add_argument("--workload", default="alpaca")
    parser.add_argument("--profile", type=Path, help="of one device, instead of the datasheet's")
    parser.add_argument("--out", type=Path, help="where the record goes")
    args = parser.parse_args()
    job = partial(rows_of, args.durations, args.seeds, workload=args.workload, profile=args.profile)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        rows = [row for found in pool.map(job, args.policies) for row in found]
    print(table(_HEADER, [_cells(row) for row in rows]))
    print(f"\nrecord: {write_record('perfect-engine', {'seeds': args.seeds, 'rows': rows}, args.out)}")


def case_of(policy: str, workload: str, profile: Path | None) -> Case:
    """The plan of this policy under the demo's bound."""
    apart = load_policy(policy).SEPARATE_STAGES
    timed = load_profile(profile) if profile else _datasheet_profile()
    law = fitted(load_workload(workload), timed.model, fit=True)
    unbounded = make_problem(timed, law, Bound(seconds=math.inf))
    alone = unbounded.evaluate(Schedule("static", {"batch_size": 1})).latency
    bound = Bound(seconds=float(f"{(_BOUND_FACTOR_APART if apart else _BOUND_FACTOR) * alone:.1g}"))
    part = load_cluster("cpu").part(2) if apart else None
    problem = make_problem(timed, law, bound, cluster=part)
    plan: Plan = optimize(problem, policies=(policy,)).plan
    assert plan.estimate is not None
    return Case(plan.schedule, CostModel(timed, plan.placement, part), law, plan.estimate.throughput)


def _datasheet_profile() -> Profile:
    cluster = load_cluster("cpu")
    device = with_links(load_datasheet(cluster.device), cluster)
    return profile_from_datasheet(load_model_spec("demo"), device, dtype="float32")


def truth_of(case: Case, seconds: float) -> tuple[dict[str, float], tuple[Bound, ...]]:
    """Every figure of long runs, and bounds that about nine requests of ten keep together in the first of them."""
    bounds: tuple[Bound, ...] = ()
    found = []
    for seed in _TRUTH_SEEDS:
        requests = case.played(seconds, seed).requests
        bounds = bounds or _bounds_kept(requests)
        found.append(_plain_figures(requests, case.length, bounds))
    return {name: float(np.mean([one[name] for one in found])) for name in found[0]}, bounds


def _inside(requests: Requests) -> tuple[NDArray[np.bool_], float, float]:
    """Those that begin in the middle of a run, and when that opens and closes."""
    opens, closes = np.quantile(requests.starts, [_EDGE, 1 - _EDGE])
    return (requests.starts >= opens) & (requests.starts < closes), float(opens), float(closes)


def _waits_and_paces(requests: Requests) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Of each request, and which have a pace."""
    later = requests.output_tokens - 1
    return (
        requests.first_tokens - requests.starts,
        (requests.last_tokens - requests.first_tokens) / np.maximum(later, 1),
        later > 0,
    )


def _bounds_kept(requests: Requests) -> tuple[Bound, ...]:
    inside, *_ = _inside(requests)
    waits, paces, several = _waits_and_paces(requests)
    return (
        Bound(seconds=math.inf),
        Bound(seconds=float(np.quantile(waits[inside], _PACE)), metric="p99-ttft"),
        Bound(seconds=float(np.quantile(paces[inside & several], _PACE)), metric="p95-tpot"),
    )


def _plain_figures(requests: Requests, length: int, bounds: Sequence[Bound]) -> dict[str, float]:
    """Of one long run."""
    inside, opens, closes = _inside(requests)
    waits, paces, several = _waits_and_paces(requests)
    spans = (requests.last_tokens - requests.starts)[inside]
    until = (requests.times.nth(length) - requests.starts)[inside]
    _, wait, pace = (bound.seconds for bound in bounds)
    kept = (waits <= wait) & (~several | (paces <= pace))
    return {
        "token_throughput": requests.times.num_within(opens, closes) / (closes - opens),
        "latency": float(np.nanmean(until)),
        "latency_p50": float(np.quantile(spans, 0.5)),
        "latency_p99": float(np.quantile(spans, 0.99)),
        "ttft": float(waits[inside].mean()),
        "p99-ttft": float(np.quantile(waits[inside], 0.99, method="inverted_cdf")),
        "tpot": float(paces[inside & several].mean()),
        "p95-tpot": float(np.quantile(paces[inside & several], _PACE)),
        "attainment": float(kept[inside].mean()),
    }


def rows_of(
    durations: Sequence[float], seeds: int, policy: str, *, workload: str, profile: Path | None
) -> list[dict[str, Any]]:
    """Of one policy: each quantity at each duration, over all seeds."""
    case = case_of(policy, workload, profile)
    truth, bounds = truth_of(case, TIMES_LONGER * max(durations))
    rows = []
    for seconds in durations:
        runs = (case.played(seconds, seed).requests for seed in range(seeds))
        seen = [summarize(requests, p99_output=case.length, bounds=bounds) for requests in runs]
        about = {"policy": str(case.schedule), "seconds": seconds}
        rows += [{**about, "quantity": name, **judged(seen, name, truth[name])} for name in QUANTITIES]
    return rows


def judged(seen: Sequence[Estimate], name: str, truth: float) -> dict[str, Any]:
    """Bias of the mean figure, share of the intervals that hold the truth, median half of their finite widths, and
    the windows in which there was no figure, no interval or no upper end of one."""
    figures = [estimate.evidence[name] for estimate in seen if name in estimate.evidence]
    values = np.array([figure.value for figure in figures])
    sides = [(f.low, f.high) for f in figures if f.low is not None and f.high is not None]
    widths = [(high - low) / 2 for low, high in sides if math.isfinite(high)]
    word = "bounds" if "-" in name or name == "attainment" else name.replace("_", " ")
    return {
        "truth": truth,
        "bias": float(values.mean()) / truth - 1 if len(values) else None,
        "deviation": float(values.std()) / truth if len(values) else None,
        "coverage": sum(low <= truth <= high for low, high in sides) / len(sides) if sides else None,
        "half_width": float(np.median(widths)) / truth if widths else None,
        "runs": len(seen),
        "refused": len(seen) - len(figures),
        "no_interval": len(figures) - len(sides),
        "no_upper_end": len(sides) - len(widths),
        "noted": sum(any(word in note for note in estimate.notes) for estimate in seen),
    }


_HEADER = (
    "", "run", "figure", "truth", "bias", "deviation", "coverage", "half width",
    "refused", "no interval", "no upper end", "noted",
)  # fmt: skip


def _cells(row: dict[str, Any]) -> list[str]:
    shares = [
        "-" if row[key] is None else f"{100 * row[key]:+.2f} %" if key == "bias" else f"{100 * row[key]:.1f} %"
        for key in ("bias", "deviation", "coverage", "half_width")
    ]
    counts = [str(row[key]) for key in ("refused", "no_interval", "no_upper_end", "noted")]
    return [
        row["policy"], f"{row['seconds']:g} s", QUANTITIES[row["quantity"]], f"{row['truth']:.4g}", *shares, *counts
    ]  # fmt: skip


if __name__ == "__main__":
    main()
