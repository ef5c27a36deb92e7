"""Branch and bound against exhaustive search on clusters, over placements and micro-batches too.

    python -m benchmarks.planner.search_cluster [--cases 60] [--seed 0]

Random models, parts of a cluster, length laws, policies and bounds, on datasheet profiles; at most --max-num-seqs
residents, so that exhaustive search ends in time. Writes records/search-cluster.json.
"""

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from statistics import median

import numpy as np

from benchmarks.lib.record import write_record
from benchmarks.planner.referee import ROUNDING, counts, judged
from exeplan.core.bounds import Bound
from exeplan.core.cluster import load_cluster
from exeplan.core.models.model import load_model_spec
from exeplan.planner.choice.search_space import Outcomes, search_variants
from exeplan.planner.problems.problem import make_problem
from exeplan.planner.reports.tables import table
from exeplan.policies import policy_names
from exeplan.profiler.datasheets.datasheet import load_datasheet, profile_from_datasheet, with_links
from exeplan.workload.files import load_workload

MODELS = (("opt-13b", "a40"), ("llama-3.1-8b", "h100"), ("t5-11b", "a40"))
FACTORS = (1.5, 3.0, 6.0, float("inf"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-num-seqs", type=int, default=96)
    args = parser.parse_args()
    seeds = range(args.seed, args.seed + args.cases)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = [case for case in pool.map(compare, seeds, [args.max_num_seqs] * args.cases) if case]
    for case in found:
        if case["loss"] > ROUNDING:
            print(f"{case['case']}: {case['said']}")
    rows = []
    for policy in policy_names():
        own = [case for case in found if case["policy"] == policy]
        if own:
            worst = max(case["loss"] for case in own)
            shares = [case["points"] / case["grid"] for case in own]
            same, above = counts([case["loss"] for case in own])
            grid = f"{median(case['grid'] for case in own):.0f}"
            cells = (f"{same} of {len(own)}", str(above), f"{100 * max(0.0, worst):.2g} %", grid)
            rows.append((policy, *cells, f"{100 * median(shares):.2g} %"))
    points, grid = (sum(case[key] for case in found) for key in ("points", "grid"))
    print(f"\n{table(_HEADER, rows)}")
    print(f"\n{points} of {grid} points tried in all, {100 * points / grid:.2g} %")
    print(f"record: {write_record('search-cluster', {'cases': found})}")


_HEADER = ("", "same optimum", "above the list", "largest loss", "median grid", "median share tried")


def compare(seed: int, max_seqs: int) -> dict | None:
    """Both methods on one random case; None where exhaustive search finds that no schedule fits the memory."""
    rng = np.random.default_rng(seed)
    model, name = MODELS[rng.integers(len(MODELS))]
    cluster = load_cluster(name)
    sheet = with_links(load_datasheet(cluster.device), cluster)
    profile = profile_from_datasheet(load_model_spec(model), sheet, dtype="float16")
    mean = int(rng.integers(4, 16))
    prompts = f"{rng.integers(20, 600)},{rng.integers(5, 200)},1000"
    law = f"normal:in={prompts};out={mean},{max(1, mean // 2)},{3 * mean}"
    policy, gpus = str(rng.choice(policy_names())), int(rng.choice([1, 2, 4]))
    if gpus == 1 and policy.startswith("waa"):
        gpus = 2
    problem = make_problem(
        profile, load_workload(law), Bound(seconds=float("inf")), cluster=cluster.part(gpus), max_seqs=max_seqs
    )
    known = Outcomes()
    free = search_variants(problem, policy, method="exhaustive", bound=float("inf"), outcomes=known)
    if free is None or free[0].best is None:
        return None
    bound = float(rng.choice(FACTORS)) * free[0].lowest_latency.outcome.latency
    best = search_variants(problem, policy, method="exhaustive", bound=bound, outcomes=known)
    assert best is not None
    found = search_variants(problem, policy, method="branch-and-bound", bound=bound)
    top = best[0].best.outcome.throughput if best[0].best else 0.0
    verdict = judged(problem, policy, found, best=top, bound=bound)
    return {
        "policy": policy,
        "case": f"{policy}, {model} on {gpus} {name}, {law}, bound {bound:.3g} s",
        "loss": verdict.loss,
        "said": verdict.said,
        "grid": best[0].grid_size,
        "points": found[0].num_points if found else 0,
    }


if __name__ == "__main__":
    main()
