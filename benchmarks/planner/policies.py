"""The best plan of each policy under one bound, from a datasheet: requests/s, latency, replays that keep the bound.

    python -m benchmarks.planner.policies [--replays 8]

OPT-13B on four A40, ExeGPT's task S, 11.5 s for an output of the 99th-percentile length: the table of the README. Every
policy of `auto` is planned alone, then its plan is replayed with `--replays` seeds, all replicas together. The half
widths are those of 95 % intervals of the mean over replays (Student's t). Writes records/planner-policies.json.
"""

import argparse
from typing import Any

import numpy as np

import exeplan
from benchmarks.lib.intervals import half_width
from benchmarks.lib.record import write_record
from exeplan.planner.choice.optimize import resolve_policies
from exeplan.planner.reports.tables import table

MODEL, DEVICE, CLUSTER, GPUS, TASK, BOUND = "opt-13b", "a40-48gb", "a40", 4, "S", 11.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replays", type=int, default=8)
    args = parser.parse_args()
    policies = resolve_policies("auto", exeplan.load_cluster(CLUSTER))
    rows = [planned(policy, replays=args.replays) for policy in policies]
    rows.sort(key=lambda row: -row["requests/s"])
    print(table(tuple(rows[0]), [tuple(str(value) for value in row.values()) for row in rows]))
    about = {"model": MODEL, "device": DEVICE, "gpus": GPUS, "workload": TASK, "bound s": BOUND}
    print(f"record: {write_record('planner-policies', {**about, 'replays': args.replays, 'rows': rows})}")


def planned(policy: str, *, replays: int) -> dict[str, Any]:
    """The row of a policy: its plan, the closed form, and means over replays."""
    profile = exeplan.datasheet_profile(MODEL, DEVICE, cluster=CLUSTER)
    plan = exeplan.optimize(profile, TASK, latency_bound=BOUND, cluster=CLUSTER, gpus=GPUS, policy=policy).plan
    found = [exeplan.simulate(plan, profile=profile, workload=TASK, seed=n).replay for n in range(1, replays + 1)]
    throughputs = np.array([replay.throughput for replay in found])
    latencies = np.array([replay.latency for replay in found])
    assert plan.estimate is not None
    return {
        "policy": policy,
        "replicas": plan.num_replicas,
        "schedule": str(plan.schedule),
        "stages": len(plan.placement),
        "closed form requests/s": round(plan.estimate.throughput, 3),
        "requests/s": round(float(throughputs.mean()), 3),
        "requests/s +-": round(half_width(throughputs), 3),
        "latency s": round(float(latencies.mean()), 3),
        "latency s +-": round(half_width(latencies), 3),
        "replays in bound": int((latencies <= BOUND).sum()),
    }


if __name__ == "__main__":
    main()
