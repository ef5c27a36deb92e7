"""Predicted against measured on this device: workloads x policies, each planned under one bound and run by the engine.

    python benchmarks/fidelity.py [--model demo] [--duration 20] [--repeats 1] [--profile FILE]

Profiles the model first (unless given a profile), then plans and runs every pair. Prints the closed form's and the
replay's error on throughput and on the latency of the 99th-percentile output, against the wall clock and against the
CPU clock of the engine's thread (what it would have measured on a machine of its own). A run lasts --duration or four
times the planned latency, whichever is longer, since a shorter one has no steady state.
Writes records/fidelity-<model>.json.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

from record import write_record

from exeplan.inputs import fitted
from exeplan.optimize import optimize
from exeplan.plan import Bound, Schedule, save_plan
from exeplan.problem import make_problem
from exeplan.profile import load_profile
from exeplan.report import table
from exeplan.workload_files import load_workload

WORKLOADS = ("alpaca", "azure-2023-conv", "wmt17-ende")
POLICIES = ("static", "orca", "rra")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--profile", type=Path, help="instead of measuring one now")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--duration", type=float, default=20.0, help="seconds of each run")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--slack", type=float, default=6.0, help="bound over what one request alone needs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.profile or Path(folder) / "profile.json"
        if args.profile is None:
            subprocess.run([sys.executable, "-m", "exeplan", "profile", args.model, "-o", str(path)], check=True)
        profile = load_profile(path)
        rows = []
        for name in args.workloads:
            workload = fitted(load_workload(name), profile.model, fit=True)
            problem = make_problem(profile, workload, Bound(seconds=float("inf")))
            alone = problem.evaluate(Schedule("static", {"batch_size": 1})).latency
            problem = replace(problem, bound=Bound(seconds=float(f"{args.slack * alone:.2g}")))
            for policy in POLICIES:
                plan = replace(optimize(problem, policies=(policy,)).plan, workload=name, profile=str(path.resolve()))
                file = Path(folder) / f"{policy}.yaml"
                save_plan(replace(plan, fit_context=True), file)
                duration = max(args.duration, 4 * plan.estimate.latency)
                runs = [_bench(file, seed, duration) for seed in range(args.repeats)]
                rows.append(
                    {"workload": name, "bound": problem.bound.seconds, "schedule": str(plan.schedule), "runs": runs}
                )
                print("  ".join([name, rows[-1]["schedule"], *_cells(rows[-1], "throughput")]), flush=True)
    for key, unit in (("throughput", "requests/s"), ("latency", "seconds to the 99th-percentile output")):
        print(f"\n{unit}\n")
        print(table(("", *_HEADER), [[f"{row['workload']} {row['schedule']}", *_cells(row, key)] for row in rows]))
    print(f"\nrecord: {write_record(f'fidelity-{args.model}', {'profile': asdict(profile.device), 'rows': rows})}")


_HEADER = ("plan", "measured", "error", "by CPU clock", "error", "replay")


def _bench(plan: Path, seed: int, duration: float) -> dict[str, dict[str, float]]:
    """One run in a process of its own, as a user would do it."""
    command = ["bench", str(plan), "--duration", f"{duration}s", "--seed", str(seed), "--json"]
    answer = subprocess.run([sys.executable, "-m", "exeplan", *command], check=True, capture_output=True, text=True)
    body = json.loads(answer.stdout)
    kinds = ("estimate", "replay", "measured", "measured_cpu_clock")
    return {kind: {k: body[kind][k] for k in ("throughput", "latency", "ttft", "tpot")} for kind in kinds}


def _cells(row: dict, key: str) -> list[str]:
    plan, replayed, wall, cpu = (
        median(r[kind][key] for r in row["runs"]) for kind in ("estimate", "replay", "measured", "measured_cpu_clock")
    )
    return [
        f"{plan:.3f}",
        f"{wall:.3f}",
        f"{100 * (plan / wall - 1):+.1f} %",
        f"{cpu:.3f}",
        f"{100 * (plan / cpu - 1):+.1f} %",
        f"{replayed:.3f}",
    ]


if __name__ == "__main__":
    main()
