"""What dynamic workload adjustment (ExeGPT section 5.2) lets a plan serve within its bound: the best schedules with it
and without, by replay.

    python -m benchmarks.fidelity.adjusted_plans [--laws S T] [--seeds 3]

OPT-13B on four A40s, ExeGPT's tasks, ORCA's lengths and traces, `rra` and `waa-c`, under a backlog, within a bound of
three times what a request of the 99th-percentile length takes alone, and within bounds on the 99th percentile of the
ttft of 1.5 and 2.5 times the mean one of a request alone. The search gives the best schedule under the bound and under
others around it, from 0.8 to 2 times; each is replayed without adjustment and within 5 and 10 % of its planned loads,
by the same requests. Of those whose replays keep the bound in the mean over the seeds the one with the most throughput
counts, with adjustment and without: so the closed form, which ignores adjustment, decides nothing.

Then the plans without it at 70 and 90 % of their throughput as Poisson arrivals, where waiting counts: what adjustment
changes of the 99th percentiles of ttft and latency. Writes records/adjusted-plans.json.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from math import inf

import numpy as np

from benchmarks.fidelity.adjustment import loads
from benchmarks.lib.record import write_record
from exeplan.arrays import Floats
from exeplan.core.bounds import Bound
from exeplan.core.cluster import load_cluster
from exeplan.core.models.model import load_model_spec
from exeplan.core.runs.metrics import summarize
from exeplan.core.schedule import Schedule
from exeplan.planner.choice.optimize import optimize
from exeplan.planner.choice.search_space import search_variants
from exeplan.planner.load_problem import fitted
from exeplan.planner.problems.problem import Problem, make_problem
from exeplan.planner.problems.ranking import half_interval
from exeplan.planner.reports.tables import table
from exeplan.profiler.datasheets.datasheet import load_datasheet, profile_from_datasheet, with_links
from exeplan.simulator.closed_form import steady_state
from exeplan.simulator.replay import replay
from exeplan.workload.arrivals import Arrivals
from exeplan.workload.files import load_workload
from exeplan.workload.laws import joint, uniform
from exeplan.workload.length_law import Ints
from exeplan.workload.workload import Workload

ORCA = "ORCA"
LAWS = ("S", "T", "C1", "G", ORCA, "alpaca", "wmt17-ende", "azure-2023-code")
POLICIES = ("rra", "waa-c")
BOUNDS = (("p99-length", 3.0), ("p99-ttft", 1.5), ("p99-ttft", 2.5))
"""Metric, and seconds over those of a request alone."""
AROUND = (0.8, 0.9, 1.0, 1.15, 1.4, 2.0)
PERCENTS = (5, 10)
RATES = (0.7, 0.9)
_GENERATIONS, _REQUESTS = 10, (1500, 4000)
_FIGURES = ("p99-ttft", "p99-requests")


@dataclass(frozen=True, slots=True)
class Best:
    """The schedule that serves the most within the bound, by replay, and its requests/s by seed."""

    schedule: str
    throughput: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A bound, with the best schedule without adjustment and with it, and what it changes at rates of arrivals."""

    name: str
    metric: str
    plain: Best
    adjusted: Best | None
    """None where no adjusted schedule keeps the bound."""
    at_rates: tuple[tuple[float, str, float, float], ...]
    """Share of the throughput, the figure, what adjusting within 10 % changes of it, and half the interval of that."""

    @property
    def gain(self) -> tuple[float, float]:
        """Of throughput, and half its 95 % interval over the seeds."""
        ratios = np.divide(self.adjusted.throughput, self.plain.throughput) - 1 if self.adjusted else np.array([-1.0])
        return float(ratios.mean()), half_interval(ratios.tolist())

    def row(self) -> list[str]:
        gain, half = self.gain
        cells = [self.name, self.plain.schedule, f"{np.mean(self.plain.throughput):.3g}"]
        best = self.adjusted
        cells += [best.schedule, f"{np.mean(best.throughput):.3g}"] if best else ["none", "-"]
        cells.append(f"{100 * gain:+.1f} ± {100 * half:.1f} %" if best else "-")
        return [*cells, "; ".join(f"{s:.0%} {f} {100 * c:+.0f} ± {100 * h:.0f} %" for s, f, c, h in self.at_rates)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--laws", nargs="+", choices=LAWS, default=LAWS)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    jobs = [(law, policy, bound, args.seeds) for law in args.laws for policy in POLICIES for bound in BOUNDS]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        cases = [case for case in pool.map(_case, *zip(*jobs, strict=True)) if case]
    header = ("case", "without", "requests/s", "adjusted", "requests/s", "gain", "within 10 %, arrivals")
    print(table(header, [case.row() for case in cases]))
    lines = list(_summary(cases))
    print("\n".join(lines))
    if tuple(args.laws) == LAWS:
        body = {"seeds": args.seeds, "cases": [asdict(case) for case in cases], "summary": lines}
        print(f"\nrecord: {write_record('adjusted-plans', body)}")


def _summary(cases: Sequence[Case]) -> Iterator[str]:
    for policy in POLICIES:
        for metric in dict.fromkeys(metric for metric, _ in BOUNDS):
            of = [case for case in cases if case.metric == metric and f", {policy}," in case.name]
            if not of:
                continue
            gains = [case.gain for case in of]
            means, won = [mean for mean, _ in gains], sum(mean - half > 0.01 for mean, half in gains)
            lost = sum(mean + half < -0.01 for mean, half in gains)
            yield (
                f"{policy}, bound on {metric}: {100 * min(means):+.1f} to {100 * max(means):+.1f} % throughput, median "
                f"{100 * float(np.median(means)):+.1f} %; certainly over 1 % more in {won} of {len(of)} cases, less "
                f"in {lost}"
            )
        for share in RATES:
            for figure in _FIGURES:
                found = [r for c in cases if f", {policy}," in c.name for r in c.at_rates if r[:2] == (share, figure)]
                if not found:
                    continue
                means = [mean for _, _, mean, _ in found]
                better, worse = (sum(s * m - h > 0.01 for _, _, m, h in found) for s in (-1, 1))
                yield (
                    f"{policy}, arrivals at {share:.0%}, within 10 %: {figure} {100 * min(means):+.1f} to "
                    f"{100 * max(means):+.1f} %; certainly over 1 % shorter in {better} of {len(found)}, longer in "
                    f"{worse}"
                )


def _case(law: str, policy: str, bound: tuple[str, float], num_seeds: int) -> Case | None:
    """None where no schedule keeps the bound."""
    problem = _problem(law)
    metric, factor = bound
    limit = Bound(seconds=factor * _alone(problem, metric), metric=metric)
    seeds = range(num_seeds)
    plain, adjusted = [], []
    for placed, schedule in _plans(problem, policy, limit):
        plain.append((placed, schedule, _within(placed, schedule, limit, seeds)))
        planned = loads(placed, schedule)
        for percent in PERCENTS:
            one = Schedule(policy, {**schedule.variables, **planned, "adjust_percent": percent})
            adjusted.append(_within(placed, one, limit, seeds))
    kept = [(placed, schedule, best) for placed, schedule, best in plain if best]
    if not kept:
        return None
    placed, schedule, best = max(kept, key=lambda one: float(np.mean(one[2].throughput)))
    return Case(
        name=f"{law}, {policy}, {metric} {limit.seconds:.3g} s",
        metric=metric,
        plain=best,
        adjusted=max(filter(None, adjusted), key=lambda one: float(np.mean(one.throughput)), default=None),
        at_rates=tuple(_at_rates(placed, schedule, float(np.mean(best.throughput)), seeds)),
    )


def _problem(law: str) -> Problem:
    """Without a bound."""
    cluster, spec = load_cluster("a40").part(4), load_model_spec("opt-13b")
    if law == ORCA:
        inputs, outputs, weights = joint(uniform(32, 512), uniform(1, 128))
        workload = Workload.of("ORCA, section 6.2", inputs=inputs, outputs=outputs, weights=weights)
    else:
        workload = fitted(load_workload(law), spec, fit=True)
    sheet = with_links(load_datasheet(cluster.device), cluster)
    profile = profile_from_datasheet(spec, sheet, dtype="float16")
    return replace(make_problem(profile, workload, Bound(seconds=inf), cluster=cluster), one_pipeline=True)


def _alone(problem: Problem, metric: str) -> float:
    """Seconds of a request of the 99th-percentile length, or the mean ttft."""
    plan = optimize(problem, policies=("static",)).plan
    alone = problem.at(plan.placement).evaluate(Schedule("static", {"batch_size": 1}))
    if metric == "p99-length":
        return float(alone.latency)
    return float(problem.at(plan.placement).estimate(Schedule("static", {"batch_size": 1})).ttft)


def _plans(problem: Problem, policy: str, bound: Bound) -> list[tuple[Problem, Schedule]]:
    """The best schedules by the closed form under the bounds around this one, each with its placement once."""
    found = {}
    for around in AROUND:
        looser = replace(bound, seconds=around * bound.seconds)
        held = replace(problem, bound=looser) if bound.on_latency else replace(problem, more_bounds=(looser,))
        search = search_variants(held, policy, method="branch-and-bound", bound=held.limit)
        if search and search[0].best:
            schedule, placement = held.schedule(policy, search[0].best.point), search[1]
            found[str(schedule), str(placement)] = problem.at(placement), schedule
    return list(found.values())


def _within(placed: Problem, schedule: Schedule, bound: Bound, seeds: Sequence[int]) -> Best | None:
    """None where the mean over the seeds breaks the bound."""
    found = [_replayed(placed, schedule, bound.metric, seed) for seed in seeds]
    if np.mean([value for _, value in found]) > bound.seconds:
        return None
    return Best(str(schedule), tuple(throughput for throughput, _ in found))


def _replayed(placed: Problem, schedule: Schedule, metric: str, seed: int) -> tuple[float, float]:
    """Requests/s under a backlog, and the seconds that are bounded."""
    inputs, outputs = placed.workload.sample(_number(placed, schedule), seed=seed)
    run = replay(
        schedule, placed.cost, input_tokens=inputs, output_tokens=outputs, num_blocks=10**6, record_passes=False
    )
    bounds = (Bound(seconds=1e9), Bound(seconds=1e9, metric="p99-ttft"))
    p99 = placed.workload.output_quantile(0.99)
    found = summarize(run.requests, p99_output=p99, bounds=bounds, backlog=True, waiting=False)
    value = found.latency if metric == "p99-length" else found.percentiles[metric]
    assert value is not None
    return found.throughput, value


def _number(placed: Problem, schedule: Schedule) -> int:
    steady = steady_state(schedule, placed.workload, placed.cost)
    return int(np.clip(_GENERATIONS * steady.throughput * steady.bound_latency("p99-length"), *_REQUESTS))


def _at_rates(
    placed: Problem, schedule: Schedule, throughput: float, seeds: Sequence[int]
) -> Iterator[tuple[float, str, float, float]]:
    """With waiting: what adjusting within the widest threshold changes of each figure."""
    variables = {**schedule.variables, **loads(placed, schedule), "adjust_percent": PERCENTS[-1]}
    number = _number(placed, schedule)
    for share in RATES:
        changes = []
        for seed in seeds:
            drawn = Arrivals(rate=share * throughput).draw(placed.workload, number, seed=seed)
            before, after = (_tails(placed, one, *drawn) for one in (schedule, Schedule(schedule.policy, variables)))
            changes.append(np.divide(after, before) - 1)
        for name, values in zip(_FIGURES, np.array(changes).T, strict=True):
            yield share, name, float(values.mean()), half_interval(values.tolist())


def _tails(placed: Problem, schedule: Schedule, inputs: Ints, outputs: Ints, arrivals: Floats) -> list[float]:
    """The 99th percentiles of ttft and of latency, from the arrival on."""
    run = replay(
        schedule,
        placed.cost,
        input_tokens=inputs,
        output_tokens=outputs,
        num_blocks=10**6,
        arrivals=arrivals,
        record_passes=False,
    )
    inside = slice(len(run.requests) // 10, None)
    begun = run.requests.arrivals[inside]
    ends = run.requests.first_tokens[inside], run.requests.last_tokens[inside]
    return [float(np.quantile(end - begun, 0.99)) for end in ends]


if __name__ == "__main__":
    main()
