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
from exeplan.core.bounds import Bound
from exeplan.core.cluster import load_cluster
from exeplan.core.models.model import load_model_spec
from exeplan.planner.choice.search_space import search_variants
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
        if case["loss"] > 0:
            print(f"{case['case']}: {100 * case['loss']:.2g} % less throughput than the best there is")
    rows = []
    for policy in policy_names():
        own = [case for case in found if case["policy"] == policy]
        if own:
            worst = max(case["loss"] for case in own)
            shares = [case["points"] / case["grid"] for case in own]
            same = sum(case["loss"] <= 1e-9 for case in own)
            cells = (f"{same} of {len(own)}", f"{100 * worst:.2g} %", f"{median(c['grid'] for c in own):.0f}")
            rows.append((policy, *cells, f"{100 * median(shares):.2g} %"))
    points, grid = (sum(case[key] for case in found) for key in ("points", "grid"))
    print(f"\n{table(('', 'same optimum', 'largest loss', 'median grid', 'median share tried'), rows)}")
    print(f"\n{points} of {grid} points tried in all, {100 * points / grid:.2g} %")
    print(f"record: {write_record('search-cluster', {'cases': found})}")


def compare(seed: int, max_seqs: int) -> dict | None:
    """Both methods on one random case; None where not even the lowest-latency schedule fits."""
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
    free = search_variants(problem, policy, method="branch-and-bound", bound=float("inf"))
    if free is None or free[0].best is None:
        return None
    bound = float(rng.choice(FACTORS)) * free[0].lowest_latency.outcome.latency
    best, found = (
        search_variants(problem, policy, method=method, bound=bound) for method in ("exhaustive", "branch-and-bound")
    )
    assert best is not None
    assert found is not None
    top, got = (result[0].best.outcome.throughput if result[0].best else 0.0 for result in (best, found))
    return {
        "policy": policy,
        "case": f"{policy}, {model} on {gpus} {name}, {law}, bound {bound:.3g} s",
        "loss": 1 - got / top if top else 0.0,
        "grid": best[0].grid_size,
        "points": found[0].num_points,
    }


if __name__ == "__main__":
    main()
