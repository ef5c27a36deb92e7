"""Closed form against replay over random schedules, placements and length laws: errors of throughput and of the latency
of the 99th-percentile output.

    python -m benchmarks.fidelity.closed_form [--cases 60] [--policies rra orca ...] [--seed 0]

A case is replayed with other requests again and again until the standard error of its replays' mean is small, or for as
long as a limit allows: what is left of their noise is in the record, and part of the errors.

Models on datasheet profiles: OPT-13B on A40s, Llama-3.1-8B on H100s, T5-11B on A40s, on 1 to 8 GPUs with any degree of
(partial) tensor parallelism. A schedule's residents fit the memory and are few enough that a replay of 15 generations
of them is short; the KV cache is large enough that no request is preempted. Writes records/closed-form.json.
"""

import argparse
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache

import numpy as np

from benchmarks.lib.record import write_record
from exeplan.arrays import Floats
from exeplan.core.bounds import Bound
from exeplan.core.cluster import load_cluster
from exeplan.core.models.model import load_model_spec
from exeplan.core.runs.metrics import summarize
from exeplan.core.schedule import Schedule
from exeplan.planner.choice.search_space import Variant, variants
from exeplan.planner.problems.problem import Problem, make_problem
from exeplan.planner.reports.tables import table
from exeplan.policies import load_policy, policy_names
from exeplan.profiler.datasheets.datasheet import load_datasheet, profile_from_datasheet, with_links
from exeplan.simulator.closed_form import steady_state
from exeplan.simulator.replay import replay
from exeplan.workload.files import load_workload
from exeplan.workload.workload import Workload

MODELS = (("opt-13b", "a40"), ("llama-3.1-8b", "h100"), ("t5-11b", "a40"))
WORKLOADS = ("S", "T", "G", "C1", "alpaca", "azure-2023-conv", "wmt17-ende")
_CONTEXT = 2048
_ATTEMPTS = 100
_FEWEST, _GENERATIONS = 1500, 15
"""Requests of a replay, and generations of them."""
_TURNS = 40
"""Of a turbo schedule's batches, about twice the requests that wait: the first ones are not in their turns, the last
ones are cut from what is left, which is 4 % of the requests of 12 turns."""
_LARGEST = 1000.0
"""The largest generation that is drawn."""
_NOISE = np.array([0.002, 0.004])
"""Relative standard errors of throughput and latency that are small enough."""
_REPLAYS, _MOST_REQUESTS = 4, 150_000
"""Replays of a case at least, and requests of all of them at most."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=60, help="for each policy")
    parser.add_argument("--policies", nargs="+", default=list(policy_names()))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    jobs = [(policy, args.seed + number) for policy in args.policies for number in range(args.cases)]
    found = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for case in filter(None, pool.map(compare, *zip(*jobs, strict=True))):
            found.append(case)
            print(f"{case['case']}: throughput {_with_noise(case, 0)}, latency {_with_noise(case, 1)}", flush=True)
    rows = [_row(policy, [c for c in found if c["policy"] == policy]) for policy in args.policies]
    rows.append(_row("all", found))
    header = ("", "cases", "throughput median", "p95", "worst", "latency median", "p95", "worst")
    print(f"\n{table(header, rows)}\n\nrecord: {write_record('closed-form', {'rows': rows, 'cases': found})}")


def compare(policy: str, seed: int) -> dict | None:
    """One random case; None where no random draw fits."""
    rng = np.random.default_rng([seed, *policy.encode()])
    for _ in range(_ATTEMPTS):
        drawn = _draw(policy, rng)
        if drawn is not None:
            return _errors(*drawn, seed=seed)
    return None


def _draw(policy: str, rng: np.random.Generator) -> tuple[Variant, Schedule] | None:
    model, cluster = MODELS[rng.integers(len(MODELS))]
    law = _law(WORKLOADS[rng.integers(len(WORKLOADS))], rng)
    problem = _problem(model, cluster, int(rng.choice([1, 2, 4, 8])), law)
    module = load_policy(policy)
    found = list(variants(problem, module))
    if not found:
        return None
    variant = found[rng.integers(len(found))]
    point = {}
    for knob in module.knobs(law, problem.max_seqs):
        share = rng.random() ** 2 if knob.name != "decode_steps" else rng.random() ** 0.5
        point[knob.name] = knob.values[min(int(share * len(knob.values)), len(knob.values) - 1)]
    schedule = module.schedule({**point, **variant.enumerated}, law)
    try:
        module.check(schedule)
    except ValueError:
        return None
    fits = variant.problem.evaluate(schedule).memory <= 1.0 and _generation(variant, schedule) <= _LARGEST
    return (variant, schedule) if fits else None


def _generation(variant: Variant, schedule: Schedule) -> float:
    """Requests that pass while one of the longest is served."""
    steady = steady_state(schedule, variant.problem.workload, variant.problem.cost)
    return steady.throughput * steady.bound_latency("p99-length") + steady.cycle.num_seqs


def _law(name: str, rng: np.random.Generator) -> Workload:
    """A shipped workload, its outputs stretched by up to a factor of two either way."""
    return load_workload(name).fit_context(_CONTEXT // 2).scale(float(np.exp(rng.uniform(-0.7, 0.7))))


@cache
def _profile(model: str, cluster: str):
    found = load_cluster(cluster)
    return profile_from_datasheet(
        load_model_spec(model), with_links(load_datasheet(found.device), found), dtype="float16"
    )


def _problem(model: str, cluster: str, num_gpus: int, law: Workload) -> Problem:
    part = load_cluster(cluster).part(num_gpus)
    return make_problem(_profile(model, cluster), law, Bound(seconds=float("inf")), cluster=part)


def _errors(variant: Variant, schedule: Schedule, *, seed: int) -> dict:
    problem = variant.problem
    steady = steady_state(schedule, problem.workload, problem.cost)
    generation = _generation(variant, schedule)
    number = int(max(_FEWEST, _GENERATIONS * generation))
    if schedule.policy == "turbo":
        number = max(number, _TURNS * min(16 * schedule["batch_size"], 2048))
    predicted = np.array([1.0 / steady.throughput, steady.bound_latency("p99-length")])
    replayed, noise = _replayed(variant, schedule, number, seed)
    stages = "+".join(f"{len(stage.devices)}{stage.phase[:1]}" for stage in problem.cost.placement)
    return {
        "policy": schedule.policy,
        "case": f"{schedule} {problem.profile.model.name} on {stages}, {problem.workload.name}",
        "seed": seed,
        "errors": [float(replayed[0] / predicted[0]) - 1, float(predicted[1] / replayed[1]) - 1],
        "noise": noise.tolist(),
        "generations": number / generation,
    }


def _replayed(variant: Variant, schedule: Schedule, number: int, seed: int) -> tuple[Floats, Floats]:
    """Seconds a request and latency, mean over replays of `number` requests, and their relative standard errors."""
    problem = variant.problem
    found: list[tuple[float, float]] = []
    while True:
        inputs, outputs = problem.workload.sample(number, seed=seed + 10_000 * len(found))
        run = replay(
            schedule,
            problem.cost,
            input_tokens=inputs,
            output_tokens=outputs,
            num_blocks=10**7,
            record_passes=False,
        )
        summary = summarize(run.requests, p99_output=problem.workload.output_quantile(0.99))
        assert summary.latency is not None
        found.append((1.0 / summary.throughput, summary.latency))
        if len(found) < _REPLAYS:
            continue
        mean = np.mean(found, axis=0)
        noise = np.std(found, axis=0, ddof=1) / np.sqrt(len(found)) / mean
        if (noise <= _NOISE).all() or (len(found) + 1) * number > _MOST_REQUESTS:
            return mean, noise


def _with_noise(case: dict, which: int) -> str:
    return f"{case['errors'][which]:+.1%} (standard error {case['noise'][which]:.1%})"


def _row(name: str, cases: list[dict]) -> list[str]:
    return [name, str(len(cases)), *_spread(cases, 0), *_spread(cases, 1)]


def _spread(cases: list[dict], which: int) -> Iterator[str]:
    sizes = np.abs([case["errors"][which] for case in cases])
    for q in (0.5, 0.95, 1.0):
        yield f"{100 * np.quantile(sizes, q):.1f} %"


if __name__ == "__main__":
    main()
