"""What is planned at a rate and the closed form against long replays, and those against an independent simulation.

    python -m benchmarks.planner.rates [--cases 20] [--policies orca rra ...] [--seeds 2] [--requests 3000] [--seed 0]
        [--traces azure-2023-conv.csv ...]

A case is a policy on a random layout (one stage, tensor parallel, pipelines of two to four stages; for stages that
prefill apart 1+1, 1+3 and 2+2) of OPT-13B on A40s, Llama-3.1-70B on H100s or Qwen3-8B on H100s, with lengths of the
tasks S and T, wide ones as of ShareGPT, or heavy-tailed ones, and random control variables. Its capacity is what it
serves of a backlog, by replay. Requests then come at 0.5 to 0.95 of that, as a Poisson stream and, in every fourth
case, as one replica of four has them behind a round-robin router (gaps with a quarter of the variance). The closed form
searches; what is planned and told is the planner's own replay, by one seed of the case's own that no long replay has,
of a stratified sample, as long as `exeplan optimize` makes it, and with its waits as in a long run; of policies that
lose a quarter of that (`briefly`). `covered` counts the points in which the interval that it is told with, of 90 %, and
that of the long replays have a value in common. Long replays of several seeds go on until the median request
latency has a 95 % interval (Student's) of 2 % and p95 of ttft one of 10 %, or for four times --seeds; the gaps of each
are scaled to the planned rate. Near the capacity p99 of ttft has an interval of 10 to 60 % even then, which a point's
`half width` says: an error within it is the replay's as well. Of each figure a point says whether it is `within` 5 % of
the replay for all that its interval leaves open, `beyond` 5 % for all of it, or `undecided`: then the replays tell no
more.

For orca, chunked, rra and waa-c every fourth case is run by `event_simulation.py`, too, with the same requests; with
--traces also a first stretch of each trace at its own times, made faster or slower by one factor to the loads.

Errors are what is planned, or the closed form, over the long replays, less 1. Writes records/planner-rates.json.
"""

import argparse
import math
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit

from benchmarks.lib.record import write_record
from benchmarks.planner.event_simulation import SIMULATED, simulate
from exeplan.core.bounds import Bound
from exeplan.core.cluster import load_cluster
from exeplan.core.models.model import load_model_spec
from exeplan.core.runs.metrics import summarize
from exeplan.core.schedule import Estimate, Figure, Placement, Schedule, Stage
from exeplan.errors import Infeasible
from exeplan.planner.choice.seeded_replays import TOLD
from exeplan.planner.problems.problem import Problem, make_problem
from exeplan.planner.problems.replays import replay_estimate
from exeplan.planner.reports.tables import table
from exeplan.policies import load_policy, policy_names
from exeplan.profiler.datasheets.datasheet import load_datasheet, profile_from_datasheet, with_links
from exeplan.simulator.closed_form import steady_state
from exeplan.simulator.replay import replay
from exeplan.workload.arrivals import Arrivals
from exeplan.workload.files import load_workload
from exeplan.workload.workload import Workload

LOADS = (0.5, 0.7, 0.8, 0.9, 0.95)
MODELS = (("opt-13b", "a40", 1), ("llama-3.1-70b", "h100", 4), ("qwen3-8b", "h100", 1))
"""With the devices of the smallest stage."""
WIDTHS = ((1,), (1,), (2,), (1, 1), (1, 1, 1), (1, 1, 1, 1), (2, 2))
APART = (((1,), (1,)), ((1,), (1, 1, 1)), ((1, 1), (1, 1)), ((2,), (2,)))
LENGTHS = ("S", "T", "sharegpt", "heavy")
ROUND_ROBIN = 4
"""Replicas among which the stream of every fourth case goes in turn."""
METRICS = ("ttft", "tpot", "latency", "latency_p50", "latency_p99", "p95-ttft", "p99-ttft", "p95-tpot", "p99-tpot")
VERDICTS = ("within", "undecided", "beyond")
_BOUNDS = (Bound(seconds=1e9), *(Bound(seconds=1e8, metric=name) for name in METRICS if "-" in name))
_BLOCKS = 10**7
_CAPACITY_REQUESTS = 4000
_CLOSE = {"latency_p50": 0.02, "p95-ttft": 0.1}
"""Half intervals, relative, at which no more seeds are replayed."""
_TRACED = 1500
"""Requests of a trace."""
_SPARE = 0.5
"""Share of the capacity to spare for which a replay has the given number of requests; queues of less take longer to
reach their length."""
_NOTHING_TO_ERR = 1e-9
LENGTH_TOLD = {"planned": 1.0, "briefly": TOLD}
"""Of the replays whose figures are told, over that of a schedule that may win."""
_PLANNED_SEED = 10_000
_LIMIT = 0.05
"""What the closed form may be off."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=20, help="for each policy")
    parser.add_argument("--policies", nargs="+", default=list(policy_names()))
    parser.add_argument("--loads", nargs="+", type=float, default=list(LOADS))
    parser.add_argument("--seeds", type=int, default=2, help="replays of a point at least; at most four times as many")
    parser.add_argument(
        "--requests",
        type=int,
        default=3000,
        help="of a replay at 0.5; more at higher loads: 11 times as many at 0.9, 32 times at 0.95",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--traces", nargs="*", default=[], metavar="CSV", help="requests with their times of arrival")
    args = parser.parse_args()
    numbers = range(args.seed, args.seed + args.cases)
    jobs = [(policy, n, tuple(args.loads), args.seeds, args.requests) for policy in args.policies for n in numbers]
    points = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for found in pool.map(_case, jobs):
            points += found
            print("\n".join(map(_line, found)), flush=True)
    _print(points)
    traced = [
        traced_point(policy, args.seed, trace, load)
        for trace in args.traces
        for policy in args.policies
        if policy in SIMULATED
        for load in args.loads
    ]
    if traced:
        print(f"\n{table(tuple(traced[0]), [tuple(map(_cell, row.values())) for row in traced])}")
    print(f"\nrecord: {write_record('planner-rates', {'rows': summary(points), 'points': points, 'traces': traced})}")


def _cell(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3g}"


def traced_point(policy: str, number: int, trace: str, load: float) -> dict[str, Any]:
    """Errors of the replay over the independent simulation where requests come as in a trace."""
    problem, schedule = draw(policy, number, trace)
    requests = problem.workload.trace
    assert requests is not None
    assert requests.arrival_s is not None
    times = requests.arrival_s[:_TRACED] - requests.arrival_s[0]
    times *= len(times) / times[-1] / (load * _capacity(problem, schedule))
    lengths = requests.inputs[: len(times)], requests.outputs[: len(times)]
    return {
        "policy": policy,
        "trace": Path(trace).name,
        "load": load,
        "what": _named(problem, schedule),
        **_replay_errors(problem, schedule, *lengths, times),
    }


def _case(job: tuple[str, int, tuple[float, ...], int, int]) -> list[dict[str, Any]]:
    return list(points_of(*job))


def points_of(
    policy: str, number: int, loads: tuple[float, ...], seeds: int, requests: int
) -> Iterator[dict[str, Any]]:
    """One row for each load of a random case."""
    problem, schedule = draw(policy, number)
    capacity = _capacity(problem, schedule)
    replicas = ROUND_ROBIN if number % 4 == 3 else 1
    for load in loads:
        arrivals = Arrivals(rate=replicas * load * capacity).split(replicas, "round-robin")
        count = int(requests * (_SPARE / max(1 - load, _SPARE / 10)) ** 1.5)
        runs = replays(problem, schedule, arrivals, count=count, seeds=seeds)
        replayed = {name: float(np.mean([_value(run, name) for run in runs])) for name in METRICS}
        closed = closed_form(problem, schedule, arrivals)
        halves = {name: half_width(runs, name) for name in METRICS}
        errors = None if closed is None else {n: _error(closed[n], replayed[n]) for n in METRICS}
        ways = {} if replicas > 1 else LENGTH_TOLD
        told = {way: _planned(problem, schedule, arrivals, way, seed=_PLANNED_SEED + number) for way in ways}
        yield {
            "policy": policy,
            "case": number,
            "what": _named(problem, schedule),
            "load": load,
            "one of": replicas,
            "capacity": capacity,
            "planned capacity": float(steady_state(schedule, problem.workload, problem.cost).throughput),
            "replays": len(runs),
            "half width": halves,
            "replay": replayed,
            "closed form": closed,
            "errors": errors,
            **{way: {n: _error(_value(one, n), replayed[n]) for n in METRICS} for way, one in told.items()},
            "covered": {
                way: {n: _covered(one.evidence.get(n), replayed[n], halves[n]) for n in METRICS}
                for way, one in told.items()
            },
            "verdicts": errors
            and {n: _verdict(errors[n], _error(replayed[n] + halves[n], replayed[n])) for n in METRICS},
            "events": _simulated(problem, schedule, arrivals) if number % 4 == 0 and policy in SIMULATED else None,
        }


def _error(found: float, true: float) -> float:
    return found / true - 1 if true > _NOTHING_TO_ERR else 0.0


def _verdict(error: float, half: float) -> str:
    """Of an error that is known to `half` on either side."""
    return "within" if abs(error) + half <= _LIMIT else "beyond" if abs(error) - half > _LIMIT else "undecided"


def closed_form(problem: Problem, schedule: Schedule, arrivals: Arrivals) -> dict[str, float] | None:
    """None where it holds the rate to be beyond the capacity."""
    try:
        found = replace(problem, arrivals=arrivals).estimate(schedule)
    except Infeasible:
        return None
    return {name: _value(found, name) for name in METRICS}


def _planned(problem: Problem, schedule: Schedule, arrivals: Arrivals, way: str, *, seed: int) -> Estimate:
    """As `optimize` replays a schedule that may win, or `briefly` one of a policy that loses."""
    at_rate = replace(problem, arrivals=arrivals)
    return replay_estimate(at_rate, schedule, seed=seed, length=LENGTH_TOLD[way], record_passes=False)[1]


def _covered(told: Figure | None, true: float, half: float) -> bool | None:
    """Whether the interval of a figure reaches what is known to `half`; None where it has none."""
    if told is None or told.low is None or told.high is None:
        return None
    return told.low <= true + half and true - half <= told.high


def replays(problem: Problem, schedule: Schedule, arrivals: Arrivals, *, count: int, seeds: int) -> list[Estimate]:
    """Of as many seeds as it takes for a close interval."""
    runs: list[Estimate] = []
    while len(runs) < 4 * seeds:
        runs.append(replayed(problem, schedule, arrivals, count=count, seed=len(runs)))
        if len(runs) >= max(seeds, 2) and all(
            half_width(runs, name) <= share * np.mean([_value(run, name) for run in runs])
            for name, share in _CLOSE.items()
        ):
            break
    return runs


def half_width(runs: list[Estimate], name: str) -> float:
    """Half the 95 % interval of the mean over the seeds; infinite for one."""
    if len(runs) < 2:
        return math.inf
    spread = float(np.std([_value(run, name) for run in runs], ddof=1))
    return float(stdtrit(len(runs) - 1, 0.975)) * spread / len(runs) ** 0.5


def stream(problem: Problem, arrivals: Arrivals, *, count: int, seed: int) -> tuple[Any, Any, Any]:
    """Input tokens, output tokens and times of arrival, at the planned rate in the mean of this stream."""
    inputs, outputs = problem.workload.sample(count, seed=seed, stratified=False)
    shape = 1 / arrivals.variability
    gaps = np.random.default_rng([seed, count]).gamma(shape, 1.0, count)
    return inputs, outputs, np.cumsum(gaps / gaps.mean() / arrivals.rate)


def replayed(problem: Problem, schedule: Schedule, arrivals: Arrivals, *, count: int, seed: int) -> Estimate:
    inputs, outputs, times = stream(problem, arrivals, count=count, seed=seed)
    run = replay(
        schedule,
        problem.cost,
        input_tokens=inputs,
        output_tokens=outputs,
        num_blocks=_BLOCKS,
        arrivals=times,
        record_passes=False,
    )
    return summarize(
        run.requests, p99_output=problem.workload.output_quantile(0.99), bounds=_BOUNDS, backlog=False, waiting=True
    )


def _simulated(problem: Problem, schedule: Schedule, arrivals: Arrivals) -> dict[str, float]:
    """Errors of the replay over the independent simulation of the same requests: mean ttft and mean latency."""
    return _replay_errors(problem, schedule, *stream(problem, arrivals, count=1500, seed=0))


def _replay_errors(problem: Problem, schedule: Schedule, inputs: Any, outputs: Any, times: Any) -> dict[str, float]:
    run = replay(schedule, problem.cost, input_tokens=inputs, output_tokens=outputs, num_blocks=_BLOCKS, arrivals=times)
    requests = simulate(schedule, problem.cost, inputs.tolist(), outputs.tolist(), times.tolist())
    firsts = np.array([request.token_times[0] for request in requests])
    lasts = np.array([request.token_times[-1] for request in requests])
    return {
        "ttft": float(np.mean(run.requests.first_tokens - times) / np.mean(firsts - times) - 1),
        "latency": float(np.mean(run.requests.last_tokens - times) / np.mean(lasts - times) - 1),
    }


def _value(found: Estimate, name: str) -> float:
    value = found.percentiles[name] if "-" in name else getattr(found, name)
    assert value is not None
    return float(value)


def _capacity(problem: Problem, schedule: Schedule) -> float:
    """Requests/s of a backlog, by replay."""
    steady = steady_state(schedule, problem.workload, problem.cost)
    generation = steady.throughput * steady.bound_latency("p99-length") + steady.cycle.num_seqs
    inputs, outputs = problem.workload.sample(int(max(_CAPACITY_REQUESTS, 15 * generation)), seed=1)
    run = replay(
        schedule, problem.cost, input_tokens=inputs, output_tokens=outputs, num_blocks=_BLOCKS, record_passes=False
    )
    return summarize(run.requests, p99_output=problem.workload.output_quantile(0.99)).throughput


def draw(policy: str, number: int, trace: str | None = None) -> tuple[Problem, Schedule]:
    """A random case whose schedule the memory holds; with the lengths of a trace, cut to the model's context."""
    rng = np.random.default_rng([number, *policy.encode()])
    module = load_policy(policy)
    while True:
        model, cluster, unit = MODELS[rng.integers(len(MODELS))]
        problem = _problem(model, cluster, trace or LENGTHS[rng.integers(len(LENGTHS))])
        placement = _placement(problem, rng, unit, apart=module.SEPARATE_STAGES)
        if placement is None:
            continue
        placed = problem.at(placement)
        stages = len(placed.cost.decode_stages)
        # As a search at a rate.
        enumerated = [one for one in module.enumerated(stages) if one.get("micro_batches", 1) <= stages]
        values = dict(enumerated[rng.integers(len(enumerated))])
        for knob in module.knobs(placed.workload, 256):
            shown = np.log([knob.values[0], knob.values[-1]])
            value = np.exp(rng.uniform(max(np.log(4), shown.min()) if knob.name != "decode_steps" else 0, shown.max()))
            values[knob.name] = min(knob.values, key=lambda one, value=value: abs(one - value))
        schedule = module.schedule(values, placed.workload)
        module.check(schedule)
        parts = max(values.get("micro_batches", 1), values.get("prefill_micro_batches", 1))
        found = steady_state(schedule, placed.workload, placed.cost)
        if placed.evaluate(schedule).memory <= 1 and found.cycle.num_seqs >= 3 * parts:
            return placed, schedule


def _placement(problem: Problem, rng: np.random.Generator, unit: int, *, apart: bool) -> Placement | None:
    layers = problem.profile.model.num_layers
    if not apart:
        return _stages(WIDTHS[rng.integers(len(WIDTHS))], 0, layers, unit, "")
    before, behind = APART[rng.integers(len(APART))]
    return _stages(before, 0, layers, unit, "prefill") + _stages(behind, unit * sum(before), layers, unit, "decode")


def _stages(widths: tuple[int, ...], first: int, layers: int, unit: int, phase: str) -> Placement:
    """Stages of these widths, in `unit` devices, with layers in proportion."""
    ends = list(accumulate(widths, initial=0))
    return tuple(
        Stage(
            devices=tuple(range(first + unit * begin, first + unit * end)),
            layers=(round(layers * begin / ends[-1]), round(layers * end / ends[-1])),
            phase=phase,
        )
        for begin, end in pairwise(ends)
    )


@cache
def _problem(model: str, cluster: str, lengths: str) -> Problem:
    found = load_cluster(cluster)
    profile = profile_from_datasheet(
        load_model_spec(model), with_links(load_datasheet(found.device), found), dtype="float16"
    )
    part = found.part(8)
    workload = _lengths(lengths).fit_context(profile.model.max_context)
    return replace(make_problem(profile, workload, _BOUNDS[0], cluster=part), more_bounds=_BOUNDS[1:])


@cache
def _lengths(name: str) -> Workload:
    if name in ("S", "T") or Path(name).exists():
        return load_workload(name)
    rng = np.random.default_rng(0)
    mean, sigma, most = {"sharegpt": ((161, 338), (1.2, 0.9), 1000), "heavy": ((200, 150), (1.0, 1.5), 1000)}[name]
    sides = [
        np.clip(np.rint(rng.lognormal(np.log(m) - s**2 / 2, s, 20_000)), 1, most).astype(int)
        for m, s in zip(mean, sigma, strict=True)
    ]
    return Workload.of(name, inputs=sides[0], outputs=sides[1], weights=np.ones(20_000))


def _named(problem: Problem, schedule: Schedule) -> str:
    stages = "+".join(f"{len(stage.devices)}{stage.phase[:1]}" for stage in problem.cost.placement)
    return f"{schedule} {problem.profile.model.name} on {stages}, {problem.workload.name}"


def summary(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By policy and load: medians and largest of the errors of each metric; points beyond the planned capacity."""
    rows = []
    for policy, load in sorted({(p["policy"], p["load"]) for p in points}):
        here = [p for p in points if (p["policy"], p["load"]) == (policy, load)]
        known = [p["errors"] for p in here if p["errors"] is not None]
        sizes = {name: np.abs([errors[name] for errors in known]) for name in METRICS}
        rows.append(
            {
                "policy": policy,
                "load": load,
                "cases": len(here),
                "refused": len(here) - len(known),
                **{name: [float(np.median(s)), float(s.max())] for name, s in sizes.items() if len(s)},
                **{way: _sizes([point[way] for point in here if way in point]) for way in LENGTH_TOLD},
                "covered": {way: _held(here, way) for way in LENGTH_TOLD},
                "verdicts": {name: _counted(here, name) for name in METRICS},
            }
        )
    return rows


def _sizes(errors: list[dict[str, float]]) -> dict[str, list[float]]:
    """The median and the largest error of each metric."""
    sizes = {name: np.abs([one[name] for one in errors]) for name in METRICS if errors}
    return {name: [float(np.median(each)), float(each.max())] for name, each in sizes.items()}


def _held(points: list[dict[str, Any]], way: str) -> dict[str, list[int]]:
    """Of each metric: in how many points the interval holds, of those that have one."""
    known = {n: [p["covered"][way][n] for p in points if p["covered"].get(way, {}).get(n) is not None] for n in METRICS}
    return {name: [sum(found), len(found)] for name, found in known.items()}


def _counted(points: list[dict[str, Any]], name: str) -> list[int]:
    """How many points are within the limit, undecided and beyond it."""
    found = [point["verdicts"][name] for point in points if point["verdicts"]]
    return [found.count(verdict) for verdict in VERDICTS]


def _line(point: dict[str, Any]) -> str:
    """Errors of one point, percent, with the half width of the replays' interval."""
    name = f"{point['policy']} {point['case']} at {point['load']}, one of {point['one of']}: {point['what']}"
    if point["errors"] is None:
        return f"{name}: refused"
    halves = {n: _error(point["replay"][n] + point["half width"][n], point["replay"][n]) for n in METRICS}
    lines = [", ".join(f"{n} {100 * point['errors'][n]:+.1f}+-{100 * halves[n]:.0f}" for n in METRICS)]
    lines += [
        f"{way}: " + ", ".join(f"{n} {100 * point[way][n]:+.1f}" for n in METRICS)
        for way in LENGTH_TOLD
        if way in point
    ]
    return "\n    ".join([name, *lines])


def _print(points: list[dict[str, Any]]) -> None:
    def shown(value: object) -> str:
        if isinstance(value, list):
            return " ".join(f"{100 * part:.1f}" for part in value)
        return str(value)

    rows = summary(points)
    header = ("policy", "load", "cases", "refused", *METRICS)
    print("closed form: median and largest error, percent")
    print(table(header, [tuple(shown(row.get(name, "-")) for name in header) for row in rows]))
    for way in LENGTH_TOLD:
        print(f"{way}: median and largest error, percent")
        told = [(row["policy"], str(row["load"]), *(shown(row[way].get(n, "-")) for n in METRICS)) for row in rows]
        print(table(("policy", "load", *METRICS), told))
        held = ", ".join(f"{name} {a} of {b}" for name, (a, b) in _held(points, way).items())
        print(f"{way}: intervals that hold: {held}")
    print("within 5 % of the replay, undecided, beyond")
    verdicts = [tuple(" ".join(map(str, row["verdicts"][name])) for name in METRICS) for row in rows]
    counted = [(row["policy"], str(row["load"]), *counts) for row, counts in zip(rows, verdicts, strict=True)]
    print(table(("policy", "load", *METRICS), counted))
    events = [p for p in points if p["events"]]
    for policy in sorted({p["policy"] for p in events}):
        here = [p["events"] for p in events if p["policy"] == policy]
        worst = {name: max(abs(e[name]) for e in here) for name in here[0]}
        shown_worst = ", ".join(f"{name} {100 * value:.2f} %" for name, value in worst.items())
        print(f"replay over the independent simulation, {policy}: at most {shown_worst}")


if __name__ == "__main__":
    main()
