"""Replay speed: CPU milliseconds and bytes a request on conversation lengths, by policy, stages and requests.

    python -m benchmarks.planner.replay_speed [--requests 10000 1000000] [--policies orca rra] [--stages 1 4]

Llama-3.1-8B in bfloat16 on A40s (datasheet), lengths drawn from azure-2023-conv, all requests there at time 0; 10
million requests with `--requests 10000000`. Each case has a process of its own, which replays once. Its CPU seconds are
those of the replay and its Estimate; its bytes are what the process grows by at most meanwhile, beyond the given
lengths. Passes are not recorded. Writes records/planner-replay-speed.json.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.lib.record import write_record
from exeplan.core.cluster import load_cluster
from exeplan.core.metrics import summarize
from exeplan.core.model import load_model_spec
from exeplan.core.schedule import Schedule, Stage
from exeplan.planner.tables import table
from exeplan.profiler.datasheets.datasheet import load_datasheet, profile_from_datasheet, with_links
from exeplan.simulator.cost import CostModel
from exeplan.simulator.replay import replay
from exeplan.workload.files import load_workload

SCHEDULES = {
    "orca": {"max_num_seqs": 256},
    "chunked": {"max_num_seqs": 256, "max_num_batched_tokens": 1024},
    "rra": {"prefill_batch": 64, "decode_steps": 50},
    "static": {"batch_size": 256},
    "waa-c": {"prefill_batch": 1, "decode_batch": 256},
}
WORKLOAD, MODEL, CLUSTER = "azure-2023-conv", "llama-3.1-8b", "a40"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--policies", nargs="+", choices=sorted(SCHEDULES), default=list(SCHEDULES))
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--repeats", type=int, default=3, help="of cases up to 100,000 requests; the median counts")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(_measured(**json.loads(args.case))))
        return
    cases = [(p, s, n) for n in args.requests for p in args.policies for s in args.stages]
    rows = [_row(*case, repeats=args.repeats) for case in cases]
    print(table(tuple(rows[0]), [tuple(map(str, row.values())) for row in rows]))
    record = {"model": MODEL, "device": CLUSTER, "workload": WORKLOAD, "seed": 0, "rows": rows}
    print(f"\nrecord: {write_record('planner-replay-speed', record)}")


def _row(policy: str, stages: int, count: int, *, repeats: int) -> dict[str, object]:
    """The median of the repeats, each in a process of its own."""
    case = json.dumps({"policy": policy, "stages": stages, "count": count})
    command = [sys.executable, "-m", "benchmarks.planner.replay_speed", "--case", case]
    runs = []
    for _ in range(repeats if count <= 100_000 else 1):
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
        runs.append(json.loads(answer.stdout))
    median = sorted(runs, key=lambda run: run["ms a request"])[len(runs) // 2]
    spread = [run["ms a request"] for run in runs]
    return {**median, "least": min(spread), "most": max(spread)}


def _measured(policy: str, stages: int, count: int) -> dict[str, object]:
    workload = load_workload(WORKLOAD)
    cost = _cost(stages, separate=policy.startswith("waa"))
    schedule = Schedule(policy, {**SCHEDULES[policy], **({"micro_batches": stages} if stages > 1 else {})})
    inputs, outputs = workload.sample(count, seed=0)
    before, began = _resident_bytes(), time.process_time()
    run = replay(schedule, cost, input_tokens=inputs, output_tokens=outputs, num_blocks=10**6, record_passes=False)
    estimate = summarize(run.requests, p99_output=workload.output_quantile(0.99))
    seconds = time.process_time() - began
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    return {
        "schedule": str(schedule),
        "stages": stages,
        "requests": count,
        "tokens a request": round(float(outputs.mean()), 1),
        "passes a request": round(run.num_passes / count, 2),
        "requests/s of the plan": round(estimate.throughput, 3),
        "ms a request": round(seconds / count * 1e3, 4),
        "bytes a request": round(grown / count),
    }


def _cost(stages: int, *, separate: bool) -> CostModel:
    """Layers in equal parts; with separate stages one more, which prefills."""
    cluster = load_cluster(CLUSTER)
    profile = profile_from_datasheet(
        load_model_spec(MODEL), with_links(load_datasheet(cluster.device), cluster), dtype="bfloat16"
    )
    layers = profile.model.num_layers
    phase, first = ("decode", 1) if separate else ("", 0)
    placement = [Stage(devices=(0,), layers=(0, layers), phase="prefill")] if separate else []
    placement += [
        Stage(devices=(first + i,), layers=(layers * i // stages, layers * (i + 1) // stages), phase=phase)
        for i in range(stages)
    ]
    return CostModel(profile, tuple(placement), cluster)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main()
