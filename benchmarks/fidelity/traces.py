"""Real traces on two workers: throughput and latency, measured, of every policy, all planned under one latency bound.

    python -m benchmarks.fidelity.traces [--model demo] [--slack 4] [--rounds 2] [--profile FILE]

Three traces of different shape, with lengths scaled to the model's context. For each, every policy is planned on two
devices of this host, on its best placement, under the same bound: `--slack` times the latency of one request alone on a
pipeline of two. Each plan is played as a backlog that ends when its last request is answered. Needs two idle cores.
Prints the measured requests/s and latency, and the throughput relative to `static` and `orca` in the same run. Writes
records/traces-<model>.json.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.fidelity.bench_runs import profiled, run_rounds
from benchmarks.fidelity.one_device import WORKLOADS
from benchmarks.lib.record import write_record
from exeplan.core.bounds import Bound
from exeplan.core.profile import Profile, load_profile
from exeplan.core.schedule import Schedule, Stage
from exeplan.errors import Infeasible
from exeplan.planner.choice.optimize import optimize
from exeplan.planner.load_problem import fitted, profiled_host
from exeplan.planner.problems.problem import Problem, make_problem
from exeplan.planner.reports.tables import table
from exeplan.policies import policy_names
from exeplan.workload.files import load_workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--profile", type=Path, help="made with --devices 2; instead of measuring one now")
    parser.add_argument("--slack", type=float, default=4.0, help="bound over what one request alone needs")
    parser.add_argument("--duration", type=float, default=15.0, help="seconds of each run")
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = profiled(args.model, args.profile, Path(folder), "--devices", "2", "--budget", "90s")
        rows = [row for name in WORKLOADS for row in _plans(load_profile(path), name, slack=args.slack)]
        run_rounds([row for row in rows if row["plan"]], path, rounds=args.rounds, least=args.duration)
    cells = [_cells(row, rows) for row in rows]
    header = ("", "bound s", "plan", "stages", "requests/s", "latency s", "over static", "over orca")
    print(f"\n{table(header, cells)}")
    print(f"\nrecord: {write_record(f'traces-{args.model}', {'rows': cells})}")


def _plans(profile: Profile, name: str, *, slack: float) -> list[dict]:
    law = fitted(load_workload(name), profile.model, fit=True)
    problem = make_problem(profile, law, Bound(seconds=float("inf")), cluster=profiled_host(profile, 2))
    problem = replace(problem, one_pipeline=True)
    bound = Bound(seconds=float(f"{slack * _alone(problem, profile):.2g}"))
    rows = []
    for policy in policy_names():
        try:
            plan = replace(optimize(replace(problem, bound=bound), policies=(policy,)).plan, gpus=2, cluster=None)
        except Infeasible:
            plan = None
        rows.append({"case": f"{name} {policy}", "name": name, "policy": policy, "bound": bound, "plan": plan})
    return [{**row, "runs": []} for row in rows]


def _alone(problem: Problem, profile: Profile) -> float:
    layers = profile.model.num_layers
    pipeline = (Stage(devices=(0,), layers=(0, layers // 2)), Stage(devices=(1,), layers=(layers // 2, layers)))
    return replace(problem.at(pipeline), cluster=None).evaluate(Schedule("static", {"batch_size": 1})).latency


def _cells(row: dict, rows: list[dict]) -> list[str]:
    if row["plan"] is None:
        return [row["case"], f"{row['bound'].seconds:g}", "none keeps the bound", *[""] * 5]
    stages = " ".join(f"{stage.phase or 'all'}:{len(stage.devices)}" for stage in row["plan"].placement)
    peers = {other["policy"]: other for other in rows if other["name"] == row["name"] and other["plan"]}
    ratios = [
        f"{_measured(row, 'throughput') / _measured(peers[peer], 'throughput'):.2f}" if peer in peers else ""
        for peer in ("static", "orca")
    ]
    figures = [f"{_measured(row, 'throughput'):.2f}", f"{_measured(row, 'latency'):.2f}"]
    return [row["case"], f"{row['bound'].seconds:g}", str(row["plan"].schedule), stages, *figures, *ratios]


def _measured(row: dict, key: str) -> float:
    return median(run["measured"][key] for run in row["runs"])


if __name__ == "__main__":
    main()
