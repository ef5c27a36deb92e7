"""Routers: the closed form of replicas that share a stream against their replay, by router, number and load.

    python -m benchmarks.planner.routers [--requests 40000] [--replicas 1 2 4 8] [--policies orca chunked rra]

OPT-13B in float16, a replica on each A40 (datasheet), task S, Poisson arrivals at 0.5, 0.7 and 0.9 of what the steady
states serve together. Errors are closed form over replay. One replica has no router: its errors are those of the closed
form itself. Writes records/planner-routers.json.
"""

import argparse
from dataclasses import replace

import exeplan
from benchmarks.lib.record import write_record
from exeplan.core.bounds import Bound
from exeplan.core.schedule import ROUTERS, ReplicaGroup, Schedule
from exeplan.planner.problems.problem import Problem, make_problem
from exeplan.planner.problems.replays import routed_estimate
from exeplan.planner.reports.tables import table
from exeplan.simulator.closed_form import steady_state
from exeplan.workload.arrivals import Arrivals
from exeplan.workload.files import load_workload

SCHEDULES = {
    "orca": {"max_num_seqs": 56},
    "chunked": {"max_num_seqs": 56, "max_num_batched_tokens": 544},
    "rra": {"prefill_batch": 12, "decode_steps": 8},
}
LOADS = (0.5, 0.7, 0.9)
FIGURES = ("ttft", "latency", "latency_p50", "latency_p99")
KV_TOKENS = 1_000_000
MODEL, DEVICE, WORKLOAD = "opt-13b", "a40-48gb", "S"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=40_000)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--policies", nargs="+", choices=sorted(SCHEDULES), default=list(SCHEDULES))
    args = parser.parse_args()
    profile = exeplan.datasheet_profile(MODEL, DEVICE)
    problem = make_problem(profile, load_workload(WORKLOAD), Bound(seconds=float("inf")))
    rows = []
    for policy in args.policies:
        for count in args.replicas:
            for router in ROUTERS if count > 1 else ("-",):
                rows += [_row(problem, policy, count, router, load, args.requests) for load in LOADS]
                print(*rows[-1].values(), flush=True)
    print(table(tuple(rows[0]), [tuple(map(str, row.values())) for row in rows]))
    record = {"model": MODEL, "device": DEVICE, "workload": WORKLOAD, "seed": 0, "requests": args.requests}
    print(f"\nrecord: {write_record('planner-routers', {**record, 'rows': rows})}")


def _row(problem: Problem, policy: str, count: int, router: str, load: float, requests: int) -> dict[str, object]:
    schedule, law = Schedule(policy, SCHEDULES[policy]), ROUTERS[0] if router == "-" else router
    rate = load * count * steady_state(schedule, problem.workload, problem.cost).throughput
    whole = replace(problem, arrivals=Arrivals(rate=rate))
    one = replace(problem, arrivals=Arrivals(rate=rate).split(count, law))
    group = ReplicaGroup(
        schedule=schedule,
        placement=problem.cost.placement,
        first_devices=tuple(range(count)),
        kv_cache_tokens=KV_TOKENS,
    )
    _, replayed = routed_estimate(whole, [(one, group)], law, seed=0, num_requests=requests, record_passes=False)
    predicted = one.estimate(schedule)
    errors = {f"{name} error %": _error(getattr(predicted, name), getattr(replayed, name)) for name in FIGURES}
    seconds = {f"{name} s": round(getattr(replayed, name), 4) for name in FIGURES}
    return {"policy": policy, "replicas": count, "router": router, "load": load, **seconds, **errors}


def _error(predicted: float, replayed: float) -> float:
    return round(100 * (predicted / replayed - 1), 1)


if __name__ == "__main__":
    main()
