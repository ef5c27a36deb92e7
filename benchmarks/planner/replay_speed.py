"""Replay speed: CPU milliseconds and bytes a request on conversation lengths, by policy, stages and requests.

    python -m benchmarks.planner.replay_speed [--requests 10000 1000000] [--policies orca rra] [--stages 1 4]
    python -m benchmarks.planner.replay_speed --requests 10000000 --policies orca --stages 1 --record 10m
    python -m benchmarks.planner.replay_speed --peer PYTHON [--requests 1000 10000] [--stages 1 4]

Llama-3.1-8B in bfloat16 on A40s (datasheet), lengths drawn from azure-2023-conv, all requests there at time 0. Each
case has a process of its own, which replays once. Its CPU seconds are those of the replay and its Estimate; its bytes
are what the process grows by at most meanwhile, beyond the given lengths. Passes are not recorded. Writes
records/planner-replay-speed.json; with `--record NAME`, planner-replay-speed-NAME.json.

With `--peer`, the interpreter of an environment that can import vidur, the same requests run through `chunked`
here and through vidur's Sarathi scheduler there, with the same slots, budget, blocks and nearly the same pass times
(`replay_peer.py`); the two take turns. Training vidur's predictor, filling its tables and reading the
trace is timed apart, and vidur collects no metrics. Writes records/planner-replay-speed-peer.json.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lib.record import write_record
from benchmarks.planner import replay_peer
from exeplan.core.cluster import load_cluster
from exeplan.core.models.model import load_model_spec
from exeplan.core.runs.metrics import summarize
from exeplan.core.schedule import Schedule, Stage
from exeplan.planner.reports.tables import table
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
BLOCKS = 10**6
"""KV blocks: slots bind before memory does."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+")
    parser.add_argument("--policies", nargs="+", choices=sorted(SCHEDULES), default=list(SCHEDULES))
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--repeats", type=int, default=3, help="of cases up to 100,000 requests; the median counts")
    parser.add_argument("--peer", metavar="PYTHON", help="compare with vidur, which this interpreter can import")
    parser.add_argument("--record", metavar="NAME", default="", help="ends the record's name")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(_measured(**json.loads(args.case))))
        return
    record = {"model": MODEL, "device": CLUSTER, "workload": WORKLOAD, "seed": 0, "load": os.getloadavg()[0]}
    if args.peer:
        counts = args.requests or [1_000, 10_000]
        rows = [compare(args.peer, s, n, repeats=args.repeats) for n in counts for s in args.stages]
    else:
        counts = args.requests or [10_000, 1_000_000]
        cases = [(p, s, n) for n in counts for p in args.policies for s in args.stages]
        rows = [_row(*case, repeats=args.repeats) for case in cases]
    print(table(tuple(rows[0]), [tuple(map(str, row.values())) for row in rows]))
    ending = args.record or ("peer" if args.peer else "")
    path = write_record(f"planner-replay-speed{'-' if ending else ''}{ending}", {**record, "rows": rows})
    print(f"\nrecord: {path}")


def compare(python: str, stages: int, count: int, *, repeats: int) -> dict[str, Any]:
    """`chunked` here and in the peer on the same requests, in turns; medians."""
    slots, budget = SCHEDULES["chunked"]["max_num_seqs"], SCHEDULES["chunked"]["max_num_batched_tokens"]
    inputs, outputs = load_workload(WORKLOAD).sample(count, seed=0)
    options = {"stages": stages, "slots": slots, "budget": budget, "blocks": BLOCKS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one_stage = cost_model(1, separate=False)
        replay_peer.write_files(folder, one_stage, slots=slots, budget=budget, inputs=inputs, outputs=outputs)
        first = replay_peer.run(python, folder, **options)
        ours, theirs = list[dict[str, Any]](), list[dict[str, Any]]()
        for _ in range(repeats):
            ours.append(measured_apart("chunked", stages, count))
            theirs.append(replay_peer.run(python, folder, **options))
    here = median(run["ms a request"] for run in ours)
    there = median(run["seconds"] for run in theirs) / count * 1e3
    return {
        "stages": stages,
        "requests": count,
        "ms a request": here,
        "peer's ms a request": round(there, 3),
        "times": round(there / here, 1),
        "passes": ours[0]["passes"],
        "peer's passes": first["passes"],
        "simulated seconds": ours[0]["simulated seconds"],
        "peer's simulated seconds": round(first["simulated seconds"], 3),
        "peer's predictor seconds": round(first["predictor seconds"], 1),
        "most here": max(run["ms a request"] for run in ours),
        "least there": round(min(run["seconds"] for run in theirs) / count * 1e3, 3),
        "vidur's commit": first["commit"],
    }


def _row(policy: str, stages: int, count: int, *, repeats: int) -> dict[str, object]:
    """The median of the repeats, each in a process of its own."""
    runs = [measured_apart(policy, stages, count) for _ in range(repeats if count <= 100_000 else 1)]
    middle = sorted(runs, key=lambda run: run["ms a request"])[len(runs) // 2]
    spread = [run["ms a request"] for run in runs]
    return {**middle, "least": min(spread), "most": max(spread)}


def measured_apart(policy: str, stages: int, count: int) -> dict[str, Any]:
    """One replay, in a process of its own."""
    case = json.dumps({"policy": policy, "stages": stages, "count": count})
    command = [sys.executable, "-m", "benchmarks.planner.replay_speed", "--case", case]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(answer.stdout)


def _measured(policy: str, stages: int, count: int) -> dict[str, object]:
    workload = load_workload(WORKLOAD)
    cost = cost_model(stages, separate=policy.startswith("waa"))
    schedule = Schedule(policy, {**SCHEDULES[policy], **({"micro_batches": stages} if stages > 1 else {})})
    started = time.process_time()
    inputs, outputs = workload.sample(count, seed=0)
    before, began, clock = _resident_bytes(), time.process_time(), time.perf_counter()
    run = replay(schedule, cost, input_tokens=inputs, output_tokens=outputs, num_blocks=BLOCKS, record_passes=False)
    estimate = summarize(run.requests, p99_output=workload.output_quantile(0.99))
    seconds, wall = time.process_time() - began, time.perf_counter() - clock
    peak = _highest_resident_bytes()
    return {
        "schedule": str(schedule),
        "stages": stages,
        "requests": count,
        "tokens a request": round(float(outputs.mean()), 1),
        "passes a request": round(run.num_passes / count, 2),
        "requests/s of the plan": round(estimate.throughput, 3),
        "ms a request": round(seconds / count * 1e3, 4),
        "bytes a request": round((peak - before) / count),
        "CPU seconds": round(seconds, 2),
        "wall seconds": round(wall, 2),
        "passes": run.num_passes,
        "simulated seconds": round(float(run.requests.last_tokens.max()), 3),
        "CPU seconds of sampling": round(began - started, 2),
        "peak MiB": round(peak / 2**20),
    }


def cost_model(stages: int, *, separate: bool) -> CostModel:
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


def _highest_resident_bytes() -> int:
    """Of this program: `ru_maxrss` may be that of the one that started it."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
