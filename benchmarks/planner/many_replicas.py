"""A thousand replicas behind one router, replayed request by request: what each router's law gives, and the time taken.

    python -m benchmarks.planner.many_replicas [--replicas 1000] [--requests 1000000] [--load 0.8]

OPT-13B in float16, a replica on each A40 (datasheet), `orca`, task S, Poisson arrivals at a share of what the steady
states serve together; the router is the server's own. A process for each router; the first tenth of the requests, while
the replicas fill, is left out of the latencies. Writes records/many-replicas.json.
"""

import argparse
import multiprocessing
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

import exeplan
from benchmarks.lib.record import write_record
from exeplan.core.batch import BLOCK_SIZE
from exeplan.core.bounds import Bound
from exeplan.core.schedule import ROUTERS, Schedule
from exeplan.planner.problems.problem import make_problem
from exeplan.planner.problems.replays import kv_cache_tokens
from exeplan.planner.reports.tables import table
from exeplan.runner.load import draw_load
from exeplan.simulator.closed_form import steady_state
from exeplan.simulator.routed import Replica, routed_replay
from exeplan.workload.files import load_workload

MODEL, DEVICE, WORKLOAD = "opt-13b", "a40-48gb", "S"
SCHEDULE = Schedule("orca", {"max_num_seqs": 56})
_FILLING = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--load", type=float, default=0.8, help="share of what all replicas serve")
    args = parser.parse_args()
    rows = []
    for router in ROUTERS:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
            rows.append(alone.submit(_row, router, args.replicas, args.requests, args.load).result())
        print(*rows[-1].values(), flush=True)
    print(table(tuple(rows[0]), [tuple(map(str, row.values())) for row in rows]))
    asked = {"model": MODEL, "device": DEVICE, "workload": WORKLOAD, "schedule": str(SCHEDULE), **vars(args)}
    print(f"\nrecord: {write_record('many-replicas', {**asked, 'rows': rows})}")


def _row(router: str, count: int, requests: int, load: float) -> dict[str, Any]:
    profile = exeplan.datasheet_profile(MODEL, DEVICE)
    problem = make_problem(profile, load_workload(WORKLOAD), Bound(seconds=float("inf")))
    rate = load * count * steady_state(SCHEDULE, problem.workload, problem.cost).throughput
    drawn = draw_load(problem.workload, requests, seed=0, rate=rate)
    blocks = kv_cache_tokens(problem, SCHEDULE) // BLOCK_SIZE
    replica = Replica(schedule=SCHEDULE, cost=problem.cost, num_blocks=blocks)
    began, computing = time.perf_counter(), time.process_time()
    run = routed_replay(
        [replica] * count,
        router,
        input_tokens=drawn.input_tokens,
        output_tokens=drawn.output_tokens,
        arrivals=drawn.arrivals,
        record_passes=False,
    )
    seconds, computing = time.perf_counter() - began, time.process_time() - computing
    late = slice(int(_FILLING * requests), None)
    ends = (run.requests.first_tokens, run.requests.last_tokens)
    first, last = ((times - run.requests.arrivals)[late] for times in ends)
    share = np.bincount(run.chosen, minlength=count) / requests * count
    return {
        "router": router,
        "replay s": round(seconds, 1),
        "CPU s": round(computing, 1),
        "us a request": round(1e6 * computing / requests, 1),
        "MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "mean TTFT s": round(float(first.mean()), 4),
        "p99 TTFT s": round(float(np.quantile(first, 0.99)), 4),
        "mean latency s": round(float(last.mean()), 4),
        "p99 latency s": round(float(np.quantile(last, 0.99)), 4),
        "fullest over mean": round(float(share.max()), 3),
    }


if __name__ == "__main__":
    main()
