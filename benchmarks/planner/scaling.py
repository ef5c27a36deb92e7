"""Scaling replicas by the plan's rate curve, in a replay: requests within the bound and replica-hours, against fixed
numbers and hindsight.

    python -m benchmarks.planner.scaling [--base 24] [--start-seconds 10,40,120] [--seeds 5]

OPT-13B in float16, a replica on each A40 (datasheet), `orca`, task S, two replicas a host, a bound of 10 s on the 99th
percentile of the latency from arrival. Poisson arrivals at the base rate for 10 minutes, at twice that for 15, and at
the base rate for 15 more; in each part two bursts of 20 s at 1.5 times its rate; at 1,000 s the host of the first two
replicas dies for good. All rows replace what has died on other hosts, with the same start.

    fixed       as many as the curve says for the base rate, or for twice that
    rule        `exeplan/scheduling/scaling.py`, as the server runs it
    no hold     the same, but what is not needed is stopped at once; and held for four starts instead of one
    hindsight   the rate at every time and the death are known a start ahead, and the curve says how many

Replica-hours count from the start of a replica, its load included, up to the last arrival; a seed draws arrivals and
lengths anew. Figures are means over the seeds, with half of their 95 % interval (Student's t). First, as a check of the
curve: fixed numbers at its rates.
Writes records/scaling.json.
"""

import argparse
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

import exeplan
from benchmarks.lib.intervals import half_width
from benchmarks.lib.record import write_record
from exeplan.arrays import Floats
from exeplan.core.batch import BLOCK_SIZE
from exeplan.core.bounds import Bound
from exeplan.core.schedule import ROUTERS, Schedule
from exeplan.planner.problems.problem import Problem, make_problem
from exeplan.planner.problems.replays import kv_cache_tokens
from exeplan.planner.rate_curve import curve_at
from exeplan.planner.reports.tables import table
from exeplan.scheduling.scaling import Demand, RateCurve, ScalingRule, look
from exeplan.simulator.routed import Replica
from exeplan.simulator.scaled import NOTICED_SECONDS, Loss, ScaledRun, Seen, scaled_replay
from exeplan.workload.files import load_workload

MODEL, DEVICE, WORKLOAD = "opt-13b", "a40-48gb", "S"
SCHEDULE = Schedule("orca", {"max_num_seqs": 56})
BOUND = Bound(seconds=10.0, metric="p99-requests")
PARTS = ((600, 1.0), (900, 2.0), (900, 1.0))
"""Seconds, and times the base rate."""
BURST, BURST_SECONDS = 1.5, 20
DEATH, PER_HOST, MOST = 1000.0, 2, 24
_CHECKED, _CHECK_REQUESTS = (1, 2, 4, 8), 4000
Wanted = Callable[[Seen], int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=float, default=24.0, help="requests/s")
    parser.add_argument("--start-seconds", default="10,40,120")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    starts = [float(each) for each in args.start_seconds.split(",")]
    curve = _curve(_problem())
    checks = [_check(number, curve) for number in _CHECKED]
    print(table(tuple(checks[0]), [tuple(map(str, row.values())) for row in checks]), flush=True)
    rows = []
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as processes:
        asked = [(name, start) for start in starts for name in _policies(curve, args.base, start)]
        found = [
            [processes.submit(_run, name, start, args.base, seed) for seed in range(args.seeds)]
            for name, start in asked
        ]
        for (name, start), runs in zip(asked, found, strict=True):
            rows.append({"start s": start, "replicas": name, **_together([run.result() for run in runs])})
            print(*rows[-1].values(), flush=True)
    print(table(tuple(rows[0]), [tuple(map(str, row.values())) for row in rows]))
    asked_for = {"model": MODEL, "device": DEVICE, "workload": WORKLOAD, "schedule": str(SCHEDULE), "bound": str(BOUND)}
    figures = {**asked_for, **vars(args), "curve": [round(rate, 3) for rate in curve.rates[:8]]}
    print(f"\nrecord: {write_record('scaling', {**figures, 'checks': checks, 'rows': rows})}")


def _problem() -> Problem:
    return make_problem(exeplan.datasheet_profile(MODEL, DEVICE), load_workload(WORKLOAD), BOUND)


def _curve(problem: Problem) -> RateCurve:
    return curve_at(problem, SCHEDULE, ROUTERS[0], MOST)


def _replica(problem: Problem) -> Replica:
    return Replica(schedule=SCHEDULE, cost=problem.cost, num_blocks=kv_cache_tokens(problem, SCHEDULE) // BLOCK_SIZE)


def _check(number: int, curve: RateCurve) -> dict[str, Any]:
    """A fixed number at the rate that the curve says, but for the first tenth of the requests."""
    problem, rate, count = _problem(), curve.rates[number - 1], _CHECK_REQUESTS * number
    arrivals = np.cumsum(np.random.default_rng(number).exponential(1 / rate, count))
    run = _replayed(problem, arrivals, lambda seen: number, number, 1.0, seed=number, losses=())
    latency = (run.last_tokens - run.arrivals)[count // 10 :]
    return {"replicas": number, "requests/s": round(rate, 2), "within the bound %": _percent(latency)}


def trace(base: float, seed: int) -> Floats:
    """Arrival times: Poisson, by thinning."""
    rng = np.random.default_rng(seed)
    highest = BURST * base * max(times for _, times in PARTS)
    seconds = sum(length for length, _ in PARTS)
    times = np.cumsum(rng.exponential(1 / highest, int(1.1 * highest * seconds)))
    times = times[times < seconds]
    return times[rng.random(len(times)) * highest < _rates(base)[times.astype(int)]]


def _rates(base: float) -> Floats:
    """Of every second."""
    parts = []
    for length, times in PARTS:
        rates = np.full(length, base * times)
        for burst in (length // 3, 2 * length // 3):
            rates[burst : burst + BURST_SECONDS] *= BURST
        parts.append(rates)
    return np.concatenate(parts)


def _policies(curve: RateCurve, base: float, start: float) -> dict[str, tuple[int, Wanted]]:
    """By name how many there are at first, and how many are wanted later."""
    low, high = (curve.needed(base * times) for times in (1, 2))
    least: dict[str, Any] = {"curve": curve, "most": MOST, "start_seconds": start}
    return {
        "fixed for the base rate": (low, lambda seen: low),
        "fixed for twice that": (high, lambda seen: high),
        "rule": (low, _by(ScalingRule(**least))),
        "rule, no hold": (low, _by(ScalingRule(**least, starts_held=0.0))),
        "rule, held for 4 starts": (low, _by(ScalingRule(**least, starts_held=4.0))),
        "hindsight": (low, _with_hindsight(curve, base, start)),
    }


def _by(rule: ScalingRule) -> Wanted:
    demand = Demand(wanted=rule.least)

    def wanted(seen: Seen) -> int:
        nonlocal demand
        demand = look(rule, demand, now=seen.time, num_arrived=seen.num_arrived, num_waiting=seen.num_waiting)
        return demand.wanted

    return wanted


def _with_hindsight(curve: RateCurve, base: float, start: float) -> Wanted:
    """As many as are needed at any time within a start from now; one host more while one is about to die."""
    needed = np.array([curve.needed(rate) for rate in _rates(base)])

    def wanted(seen: Seen) -> int:
        ahead = needed[int(seen.time) : int(seen.time + start) + 2]
        dies = DEATH - start - 1 <= seen.time < DEATH + NOTICED_SECONDS
        return int(ahead.max(initial=int(needed[-1]))) + PER_HOST * dies

    return wanted


def _run(name: str, start: float, base: float, seed: int) -> dict[str, Any]:
    problem = _problem()
    first, wanted = _policies(_curve(problem), base, start)[name]
    run = _replayed(problem, trace(base, seed), wanted, first, start, seed=seed, losses=(Loss(time=DEATH, host=0),))
    begun = [span.begin for span in run.spans if span.begin > 0]
    return {
        "latency": run.last_tokens - run.arrivals,
        "arrivals": run.arrivals,
        "hours": run.replica_seconds / 3600,
        "starts": len(begun),
    }


def _replayed(
    problem: Problem, arrivals: Floats, wanted: Wanted, first: int, start: float, *, seed: int, losses: tuple[Loss, ...]
) -> ScaledRun:
    inputs, outputs = problem.workload.sample(len(arrivals), seed=seed)
    return scaled_replay(
        _replica(problem),
        ROUTERS[0],
        wanted=wanted,
        first=first,
        most=MOST,
        start_seconds=start,
        input_tokens=inputs,
        output_tokens=outputs,
        arrivals=arrivals,
        per_host=PER_HOST,
        losses=losses,
    )


def _together(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Each figure's mean over the seeds, and half of its interval where there are several."""
    each = [_figures(run) for run in runs]
    found: dict[str, Any] = {}
    for name in each[0]:
        values = [figures[name] for figures in each]
        found[name] = round(float(np.mean(values)), 2)
        if len(values) > 1:
            found[f"{name} \N{PLUS-MINUS SIGN}"] = round(half_width(values), 2)
    return found


def _figures(run: dict[str, Any]) -> dict[str, float]:
    latency, arrivals = run["latency"], run["arrivals"]
    return {
        "within the bound %": _percent(latency),
        **{f"{name} %": _percent(latency[some]) for name, some in _phases(arrivals)},
        "p99 s": float(np.quantile(latency, 0.99)),
        "replica-hours": run["hours"],
        "starts": run["starts"],
    }


def _phases(arrivals: Floats) -> Iterator[tuple[str, Any]]:
    """Which requests came before the rate doubles, in the minutes of each change, and after the death."""
    doubled = PARTS[0][0]
    yield "first 5 min of twice", (arrivals >= doubled) & (arrivals < doubled + 300)
    yield "5 min from the death", (arrivals >= DEATH - 10) & (arrivals < DEATH + 290)


def _percent(latency: Floats) -> float:
    return round(100 * float((latency <= BOUND.seconds).mean()), 2)


if __name__ == "__main__":
    main()
