"""Replicas: the plan for a cluster against one pipeline, copies of smaller plans, and plans made by chance.

    python -m benchmarks.planner.replicas [--cases 30] [--drawn 2000] [--seed 0] [--workers N]

First the cases of `NAMED`, then random problems: a model on 8 to 256 datasheet GPUs, lengths and a bound drawn by seed.
Each is planned with and without replicas; then

- copies: the best single pipeline of every part of the cluster, as often as it fits;
- chance: --drawn plans with random parts, splits of the layers over random stages, policies and control variables of
  any value, by a generator that shares no list with the search (`_variables`): it has the policies' names, the sizes
  of tensor parallelism that were timed, and the closed form in common with it, and knows no expert or data sharding
  and no stage over two nodes. `made` of them keep bound and memory by the closed form, and the best one that keeps the
  bound in a replay counts.

`beaten` is how much more throughput than the plan such a plan has, negative where the plan is better: the mean over
replays of both with the same SEEDS seeds, and half the width of its interval at 95 %. A problem that is refused though
one of them solves it is beaten by 100 %. `bound used` is what the replays of the plan take of the bound, the mean over
the seeds, of the replicas that take most of it. --workers problems are planned at once, each on one core. Writes
records/replicas.json after every case, with what there is.
"""

import argparse
import math
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks.lib.record import write_record
from exeplan.core.bounds import Bound, utilizations
from exeplan.core.cluster import Cluster, load_cluster
from exeplan.core.models.model import ModelSpec, load_model_spec
from exeplan.core.schedule import Placement, Schedule, Stage
from exeplan.errors import Infeasible, InputError
from exeplan.planner.choice.answers import Optimum
from exeplan.planner.choice.optimize import optimize, resolve_policies
from exeplan.planner.problems.problem import Problem, make_problem
from exeplan.planner.problems.ranking import behind
from exeplan.planner.problems.replays import replay_estimate
from exeplan.planner.reports.tables import table
from exeplan.policies import load_policy
from exeplan.profiler.datasheets.datasheet import load_datasheet, profile_from_datasheet, with_links
from exeplan.workload.files import load_workload

NAMED = (
    ("qwen3-8b", "h100", 8, "azure-2023-conv", 30.0),
    ("opt-13b", "a40", 8, "S", 11.5),
    ("t5-11b", "a40", 8, "T", math.inf),
    ("llama-3.1-70b", "h100", 48, "azure-2023-conv", 30.0),
    ("llama-3.1-70b", "h100", 256, "azure-2023-conv", 30.0),
)
MODELS = (
    ("opt-13b", "a40"),
    ("t5-11b", "a40"),
    ("llama-2-7b", "a100"),
    ("llama-2-70b", "a100"),
    ("qwen3-8b", "h100"),
    ("qwen3-32b", "h100"),
    ("llama-3.1-70b", "h200"),
)
GPUS = (8, 12, 16, 32, 64, 128, 256)
SEEDS = 4
COPIED = (1, 2, 4, 8, 16)
"""Sizes of the pipelines that are copied."""


@dataclass(frozen=True, slots=True)
class Made:
    """So many replicas of a schedule on a placement, and others next to them."""

    replicas: int
    problem: Problem
    schedule: Schedule
    throughput: float
    """Of these replicas, by the closed form or by one replay."""
    more: "Made | None" = None

    def replayed(self, seed: int) -> tuple[float, float]:
        """Requests/s of all replicas, and the share of the bound that those take which take most of it."""
        _, found = replay_estimate(self.problem, self.schedule, seed=seed, record_passes=False)
        throughput, used = self.more.replayed(seed) if self.more else (0.0, 0.0)
        return self.replicas * found.throughput + throughput, max(used, *utilizations(self.problem.bounds, found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=30)
    parser.add_argument("--drawn", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    args = parser.parse_args()
    rows = []
    run = partial(_case, cases_seed=args.seed, drawn=args.drawn)
    with ProcessPoolExecutor(args.workers) as pool:
        for number, row in enumerate(pool.map(run, range(len(NAMED) + args.cases)), start=1):
            rows.append(row)
            print(f"{number}: " + ", ".join(f"{name} {_shown(value)}" for name, value in row.items()), flush=True)
            record = write_record("replicas", {"rows": rows, "drawn": args.drawn})
    columns = ("case", "one pipeline", "with replicas", "bound used", "copies", "chance", "made", "beaten", "noise")
    print(table(columns, [tuple(_shown(row[name]) for name in columns) for row in rows]))
    beaten = [row for row in rows if row["beaten"] is not None]
    sure = sum(row["beaten"] > 0.01 + row["noise"] for row in beaten)
    print(
        f"beaten by more than 1 % in {sum(row['beaten'] > 0.01 for row in beaten)} of {len(beaten)}, beyond noise in "
        f"{sure}; most {100 * max(row['beaten'] for row in beaten):.1f} %; refused though solved: "
        f"{sum(row['plan'] is None for row in beaten)}; a plan's replays take at most "
        f"{100 * max(row['bound used'] or 0.0 for row in rows):.1f} % of the bound"
    )
    print(f"record: {record}")


def _case(number: int, *, cases_seed: int, drawn: int) -> dict[str, Any]:
    """The row of a case: one of `NAMED`, then those made by chance."""
    problem = _named(NAMED[number]) if number < len(NAMED) else _random(cases_seed + number - len(NAMED))
    return compare(problem, drawn=drawn, seed=number)


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def compare(problem: Problem, *, drawn: int, seed: int) -> dict[str, Any]:
    """The row of a problem: throughputs in requests/s by replay, None where nothing keeps the bound."""
    assert problem.cluster is not None
    began = time.perf_counter()
    found = _optimum(problem)
    seconds = time.perf_counter() - began
    whole = _optimum(replace(problem, one_pipeline=True))
    ours = _made(problem, found) if found else None
    chance, made = _chance(problem, drawn=drawn, rng=np.random.default_rng(seed))
    others = [_replays(_copies(problem)), _replays(chance)]
    replays = _replays(ours)
    beaten, noise = None, None
    if replays:
        less = [behind(replays.throughputs, other.throughputs) for other in others if other]
        beaten, noise = max(((-mean, interval) for mean, interval in less), default=(None, None))
    elif any(others):
        beaten, noise = 1.0, 0.0
    bound = f"{problem.limit:g} s" if math.isfinite(problem.limit) else "no bound"
    return {
        "case": f"{problem.profile.model.name} on {problem.cluster.num_gpus} {problem.cluster.name}, "
        f"{problem.workload.name}, {bound}",
        "plan": " + ".join(f"{g.num_replicas} x {g.schedule}" for g in found.plan.groups) if found else None,
        "one pipeline": whole.plan.replay.throughput if whole and whole.plan.replay else None,
        "with replicas": replays and float(np.mean(replays.throughputs)),
        "bound used": replays and float(np.mean(replays.used)),
        "copies": others[0] and float(np.mean(others[0].throughputs)),
        "chance": others[1] and float(np.mean(others[1].throughputs)),
        "made": made,
        "beaten": beaten,
        "noise": noise,
        "gap": found.plan.search["gap"] if found else None,
        "seconds": seconds,
    }


@dataclass(frozen=True, slots=True)
class Replays:
    """Of one plan, an entry a seed: requests/s, and the share of the bound taken."""

    throughputs: list[float]
    used: list[float]


def _replays(made: Made | None) -> Replays | None:
    if made is None:
        return None
    throughputs, used = zip(*(made.replayed(seed) for seed in range(1, SEEDS + 1)), strict=True)
    return Replays(list(throughputs), list(used))


def _made(problem: Problem, optimum: Optimum) -> Made | None:
    """A plan's replicas."""
    made = None
    for group in optimum.plan.groups:
        size = sum(len(stage.devices) for stage in group.placement)
        part = problem.part(size, replicas=1).at(group.placement)
        made = Made(group.num_replicas, part, group.schedule, 0.0, more=made)
    return made


def _optimum(problem: Problem) -> Optimum | None:
    try:
        return optimize(problem, policies=resolve_policies("auto", problem.cluster), advise=False)
    except Infeasible:
        return None


def _copies(problem: Problem) -> Made | None:
    """Copies of the one pipeline's plan of which they have the most throughput."""
    cluster, best = problem.cluster, None
    assert cluster is not None
    for size in COPIED:
        if size > cluster.num_gpus or (size > cluster.gpus_per_node and size % cluster.gpus_per_node):
            continue
        try:
            part = replace(problem.part(size), one_pipeline=True)
        except Infeasible:
            continue
        if (found := _optimum(part)) and found.plan.replay:
            throughput = _times(cluster, size) * found.plan.replay.throughput
            if best is None or throughput > best.throughput:
                placed = part.at(found.plan.placement)
                best = Made(_times(cluster, size), placed, found.plan.schedule, throughput)
    return best


def _times(cluster: Cluster, size: int) -> int:
    in_nodes = cluster.num_nodes * (cluster.gpus_per_node // size)
    return in_nodes if size <= cluster.gpus_per_node else cluster.num_gpus // size


def _chance(problem: Problem, *, drawn: int, rng: np.random.Generator) -> tuple[Made | None, int]:
    """The best plan made by chance that keeps the bound in its replay, too, of the ten best; and how many there are."""
    made = [found for _ in range(drawn) if (found := _drawn(problem, rng))]
    for best in sorted(made, key=lambda one: -one.throughput)[:10]:
        _, replayed = replay_estimate(best.problem, best.schedule, seed=0, record_passes=False)
        if max(utilizations(problem.bounds, replayed)) <= 1:
            return best, len(made)
    return None, len(made)


def _drawn(problem: Problem, rng: np.random.Generator) -> Made | None:
    """A random plan; None where it breaks a limit or makes no sense."""
    cluster = problem.cluster
    assert cluster is not None
    size = int(rng.choice([n for n in (*range(1, 9), 16, 24, 32) if _times(cluster, n) >= 1]))
    if size > cluster.gpus_per_node:
        size = size // cluster.gpus_per_node * cluster.gpus_per_node
    policy = str(rng.choice(resolve_policies("auto", cluster)))
    module = load_policy(policy)
    try:
        part = problem.part(size)
        placement = _placement(problem.profile.model, part, rng, apart=module.SEPARATE_STAGES)
        if placement is None:
            return None
        placed = part.at(placement)
        schedule = Schedule(policy, _variables(policy, placed, rng))
        module.check(schedule)
        outcome = placed.evaluate(schedule)
    except (Infeasible, InputError):
        return None
    if outcome.latency > problem.limit or outcome.memory > 1:
        return None
    copies = _times(cluster, size)
    return Made(copies, placed, schedule, copies * outcome.throughput)


def _variables(policy: str, problem: Problem, rng: np.random.Generator) -> dict[str, int]:
    """Values of a policy's control variables: each any number that could matter, by what the variable means.

    Residents: up to twice what the GPUs' memory would hold if there were no weights, in requests of mean lengths.
    """
    workload = problem.workload
    gpus = sum(len(stage.devices) for stage in problem.cost.placement)
    each = problem.profile.model.kv_bytes_per_token("bfloat16") * (workload.mean_input + workload.mean_output)
    slots = max(1, int(2 * gpus * problem.memory / each))
    stages = len(problem.cost.decode_stages)
    values = {"micro_batches": _log_uniform(1, 4 * stages, rng)} if stages > 1 else {}
    match policy:
        case "orca":
            return values | {"max_num_seqs": _log_uniform(1, slots, rng)}
        case "chunked":
            tokens = {"max_num_batched_tokens": _log_uniform(16, 16384, rng)}
            return values | {"max_num_seqs": _log_uniform(1, slots, rng)} | tokens
        case "static":
            parts = {name: count * _log_uniform(1, 8, rng) for name, count in values.items()}
            prefills = {"prefill_micro_batches": parts["micro_batches"]} if parts else {}
            return values | {"batch_size": _log_uniform(1, slots, rng)} | prefills
        case "rra":
            steps = {"decode_steps": _log_uniform(1, max(1, workload.max_output - 1), rng)}
            return values | {"prefill_batch": _log_uniform(1, slots, rng)} | steps
        case "waa-c" | "waa-m":
            batch = _log_uniform(1, max(1, int(slots / workload.mean_output)), rng)
            decode = max(1, round(batch * workload.mean_output * rng.uniform(0.5, 1.5)))
            return values | {"prefill_batch": batch, "decode_batch": decode}
    raise ValueError(f"no variables are drawn for the policy '{policy}'")


def _log_uniform(low: int, high: int, rng: np.random.Generator) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def _placement(spec: ModelSpec, problem: Problem, rng: np.random.Generator, *, apart: bool) -> Placement | None:
    """Random stages of all GPUs of a part, with random shares of the layers; None where there are too few GPUs."""
    assert problem.cluster is not None
    total = problem.cluster.num_gpus
    if not apart:
        return _stages(spec, problem, 0, total, rng, decoder=True, encoder=spec.num_encoder_layers > 0)
    if total < 2:
        return None
    first = int(rng.integers(1, total))
    encoders = spec.is_encoder_decoder
    prefill = _stages(spec, problem, 0, first, rng, decoder=not encoders, encoder=encoders, phase="prefill")
    return prefill + _stages(spec, problem, first, total, rng, decoder=True, encoder=False, phase="decode")


def _stages(
    spec: ModelSpec,
    problem: Problem,
    first: int,
    end: int,
    rng: np.random.Generator,
    *,
    decoder: bool,
    encoder: bool,
    phase: str = "",
) -> Placement:
    """The GPUs from `first` to `end` in stages of random tensor-parallel degrees within a node."""
    assert problem.cluster is not None
    groups: list[tuple[int, ...]] = []
    per_node = problem.cluster.gpus_per_node
    while first < end:
        room = min(end - first, per_node - first % per_node)
        sizes = [s for s in problem.profile.tensor_parallel_sizes if s <= room and spec.num_heads % s == 0]
        size = int(rng.choice(sizes))
        groups.append(tuple(range(first, first + size)))
        first += size
    weights = np.array([len(group) for group in groups]) * rng.uniform(0.7, 1.3, len(groups))
    ends = np.concatenate([[0.0], np.cumsum(weights) / weights.sum()])
    cuts = np.rint(ends * spec.num_layers).astype(int).tolist() if decoder else [0] * len(ends)
    encoder_cuts = np.rint(ends * spec.num_encoder_layers).astype(int).tolist() if encoder else [0] * len(ends)
    return tuple(
        Stage(
            devices=group,
            layers=(cuts[n], cuts[n + 1]),
            encoder_layers=(encoder_cuts[n], encoder_cuts[n + 1]),
            phase=phase,
        )
        for n, group in enumerate(groups)
    )


def _named(case: tuple[str, str, int, str, float]) -> Problem:
    model, name, gpus, workload, bound = case
    return _problem(model, name, gpus, workload, bound)


def _problem(model: str, name: str, gpus: int, workload: str, bound: float) -> Problem:
    cluster = load_cluster(name)
    cluster = replace(cluster, num_nodes=max(1, -(-gpus // cluster.gpus_per_node)))
    profile = profile_from_datasheet(
        load_model_spec(model), with_links(load_datasheet(cluster.device), cluster), dtype="bfloat16"
    )
    lengths = load_workload(workload).fit_context(profile.model.max_context)
    gpus = gpus if gpus <= cluster.gpus_per_node else cluster.num_gpus
    return make_problem(profile, lengths, Bound(seconds=bound), cluster=cluster.part(gpus))


def _random(seed: int) -> Problem:
    """A problem whose bound some plan keeps: its factor is drawn over the latency of one request alone."""
    rng = np.random.default_rng([seed, 14])
    model, name = MODELS[rng.integers(len(MODELS))]
    gpus, mean_in, mean_out = int(rng.choice(GPUS)), int(rng.integers(50, 1500)), int(rng.integers(8, 300))
    law = f"normal:in={mean_in},{mean_in // 2},{4 * mean_in};out={mean_out},{mean_out // 2},{3 * mean_out}"
    unbounded = _problem(model, name, gpus, law, math.inf)
    assert unbounded.cluster is not None
    part = unbounded.part(min(8, unbounded.cluster.num_gpus))
    alone = optimize(replace(part.limited_to(1e-9), bound=Bound(seconds=1e9)), policies=("orca",), advise=False)
    search = alone.candidates[0].search
    assert search is not None
    return unbounded.limited_to(float(f"{search.lowest_latency.outcome.latency * rng.uniform(1.5, 12):.2g}"))


if __name__ == "__main__":
    main()
