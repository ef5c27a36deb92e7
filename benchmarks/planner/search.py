"""Branch and bound against exhaustive search: optimum and number of evaluations.

    python -m benchmarks.planner.search --profile FILE [--max-num-seqs 64]

For each workload, policy and bound (2, 4, 8 and 16 times the latency of one request alone, and none): the optimum of
both methods, their evaluations, and the time of a whole `exeplan optimize` as a process. Writes records/search.json.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from benchmarks.lib.record import write_record
from benchmarks.planner.referee import ROUNDING, Referee, counts, judged, referee
from exeplan.core.bounds import Bound
from exeplan.core.profile import load_profile
from exeplan.core.schedule import Schedule
from exeplan.planner.choice.optimize import resolve_policies
from exeplan.planner.choice.search_space import search_variants
from exeplan.planner.load_problem import fitted
from exeplan.planner.problems.problem import Problem, make_problem
from exeplan.planner.reports.tables import table
from exeplan.workload.files import load_workload

WORKLOADS = ("alpaca", "wmt17-ende", "S")
FACTORS = (2.0, 4.0, 8.0, 16.0, float("inf"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    args = parser.parse_args()
    profile = load_profile(args.profile)
    rows = []
    for name in WORKLOADS:
        workload = fitted(load_workload(name), profile.model, fit=True)
        problem = make_problem(profile, workload, Bound(seconds=float("inf")), max_seqs=args.max_num_seqs)
        alone = problem.evaluate(Schedule("static", {"batch_size": 1})).latency
        for policy in resolve_policies("auto"):
            tried = referee(problem, policy)
            for factor in FACTORS:
                rows.append(_compare(problem, name, policy, factor * alone, tried))
                print("  ".join(_cells(rows[-1])), flush=True)
    seconds = [_optimize_seconds(args.profile, name) for name in WORKLOADS for _ in range(3)]
    print(f"\n{table(_HEADER, [_cells(row) for row in rows])}")
    different = [row for row in rows if row["loss"] > ROUNDING]
    _, above = counts([row["loss"] for row in rows])
    large = [row["points"] / row["grid"] for row in rows if row["grid"] >= 5000]
    print(
        f"\n{len(rows)} cases, {len(different)} with less throughput than the best of the grid, {above} with more, "
        "by values between the listed ones"
    )
    print(f"grids of 5,000 points and more: median {100 * median(large):.2g} %, at most {100 * max(large):.2g} % tried")
    print(f"exeplan optimize, start-up included: median {median(seconds):.2f} s, at most {max(seconds):.2f} s")
    print(f"record: {write_record('search', {'rows': rows, 'optimize_seconds': seconds})}")


_HEADER = ("case", "bound", "best", "found", "loss", "grid", "points", "share")


def _compare(problem: Problem, workload: str, policy: str, bound: float, tried: Referee) -> dict:
    """Both methods on one case."""
    result = search_variants(problem, policy, method="branch-and-bound", bound=bound)
    assert result is not None
    verdict = judged(problem, policy, result, best=tried.best(bound), bound=bound)
    return {
        "case": f"{workload} {policy}",
        "bound": bound,
        "best": verdict.best,
        "found": verdict.found,
        "loss": verdict.loss,
        "said": verdict.said,
        "grid": result[0].grid_size,
        "points": result[0].num_points,
    }


def _optimize_seconds(profile: Path, workload: str) -> float:
    began = time.perf_counter()
    command = ["optimize", "--profile", str(profile), "--workload", workload, "--latency-bound", "5s"]
    subprocess.run([sys.executable, "-m", "exeplan", *command], check=True, capture_output=True)
    return time.perf_counter() - began


def _cells(row: dict) -> list[str]:
    return [
        row["case"],
        f"{row['bound']:.2f} s",
        f"{row['best']:.3f}",
        f"{row['found']:.3f}",
        row["said"],
        str(row["grid"]),
        str(row["points"]),
        f"{100 * row['points'] / row['grid']:.2g} %",
    ]


if __name__ == "__main__":
    main()
