"""Several times the planned rate: how many accepted requests keep the bound, how soon others are refused, and memory.

    python -m benchmarks.service.overload [--minutes 10] [--factor 5] [--plan plan.yaml] [--max-queue N]

Profiles and plans the demo model on this machine (or takes a plan), serves it, and sends Poisson arrivals of the plan's
own workload at `--factor` times its throughput. Accepted requests are judged by the plan's bound, which counts from
the start of the prefill; the wait in the queue is a separate figure. Refusals are judged by the time to their 429.
Client and server share the machine. Writes records/overload.json.
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.lib.record import write_record
from benchmarks.service.serving import Server, demo_plan, served
from exeplan.core.plan import Plan
from exeplan.planner.load_problem import plan_model, plan_workload, read_plan
from exeplan.planner.reports.tables import table
from exeplan.runner.load import Load, draw_load

SAMPLE_SECONDS = 5.0
REFUSED_WITHIN = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--factor", type=float, default=5.0)
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--max-queue", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.plan or demo_plan(Path(folder))
        plan = read_plan(path)
        workload = plan_workload(plan, plan_model(plan))
        estimate = plan.replay or plan.estimate
        assert estimate
        rate = args.factor * estimate.throughput
        load = draw_load(workload, round(rate * args.minutes * 60), rate=rate, seed=args.seed)
        with served(path, "--max-queue", str(args.max_queue), "--replan", "off") as server:
            os.nice(5)  # In service the clients run on other machines.
            figures = asyncio.run(overload(server, load, plan_model(plan).vocab_size))
            figures = judged(plan, figures, workload.output_quantile(0.99))
    print(table(("", ""), [[name, str(value)] for name, value in figures.items()]))
    print(f"\nrecord: {write_record('overload', figures)}")


async def overload(server: Server, load: Load, vocab_size: int) -> dict[str, Any]:
    """Plays the load as an open loop; the answers, and memory over time."""
    assert load.arrivals is not None
    found: dict[str, Any] = {"statuses": Counter(), "refused": [], "accepted": [], "memory": []}
    began, tasks = time.perf_counter(), set()
    # One connection a request, as with many clients; refused ones are soon closed.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as client:
        watching = asyncio.create_task(_watch_memory(server, found["memory"]))
        for index, arrival in enumerate(load.arrivals):
            await asyncio.sleep(max(0.0, float(arrival) - (time.perf_counter() - began)))
            body = {
                "prompt": load.prompt(index, vocab_size),
                "max_tokens": int(load.output_tokens[index]),
                "temperature": 0,
                "ignore_eos": True,
            }
            task = asyncio.create_task(_ask(client, server.url, body, found))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
        watching.cancel()
    found["seconds"] = time.perf_counter() - began
    return found


async def _ask(client: aiohttp.ClientSession, url: str, body: dict[str, Any], found: dict[str, Any]) -> None:
    began = time.perf_counter()
    try:
        async with client.post(f"{url}/v1/completions", json=body) as response:
            answer = await response.json(content_type=None)
            status: Any = response.status
            if status == 429 and "retry-after" not in response.headers:
                status = "429 without Retry-After"
    except aiohttp.ClientError as error:
        status, answer = type(error).__name__, {}
    found["statuses"][str(status)] += 1
    if status == 429:
        found["refused"].append(time.perf_counter() - began)
    elif status == 200:
        timing, tokens = answer["timing"], answer["usage"]["completion_tokens"]
        found["accepted"].append((timing["queue_s"], timing["ttft_s"], timing["e2e_s"], tokens))


async def _watch_memory(server: Server, samples: list[int]) -> None:
    while True:
        samples.append(server.held()["MiB"])
        await asyncio.sleep(SAMPLE_SECONDS)


def judged(plan: Plan, found: dict[str, Any], p99_output: int) -> dict[str, Any]:
    """The figures: latency in the bound's metric; memory of the first against the last third once warm."""
    queue, ttft, e2e, tokens = np.array(found["accepted"] or [(np.nan,) * 4]).T
    waits = plan.arrival_rate is not None or plan.trace_arrivals
    start = 0.0 if waits else queue
    pace = (e2e - ttft) / np.maximum(tokens - 1, 1)
    # An output longer than the bound's length counts up to that length.
    takes = np.where(tokens <= p99_output, e2e, ttft + (p99_output - 1) * pace) - start
    bound = plan.bound.seconds if plan.bound else np.inf
    refused = np.array(found["refused"] or [np.nan])
    memory = np.array(found["memory"][2:] or [0])
    third = max(len(memory) // 3, 1)
    reached = tokens >= p99_output
    return {
        "schedule": str(plan.schedule),
        "seconds": round(found["seconds"], 1),
        "answers": dict(found["statuses"]),
        "accepted requests/s": round(len(found["accepted"]) / found["seconds"], 2),
        "promised requests/s": round((plan.replay or plan.estimate).throughput, 2),
        "bound, s": bound,
        "latency of outputs of p99 length, mean s": round(float(np.mean(takes[reached])), 3) if reached.any() else None,
        "share of accepted within the bound": round(float(np.mean(takes <= bound)), 4),
        "latency of accepted, p99 s": round(float(np.quantile(takes, 0.99)), 3),
        "wait of accepted, p99 s": round(float(np.quantile(queue, 0.99)), 3),
        "429 after, median s": round(float(np.median(refused)), 4),
        "429 after, p99 s": round(float(np.quantile(refused, 0.99)), 4),
        "429 after, most s": round(float(np.max(refused)), 4),
        "share of 429 within 100 ms": round(float(np.mean(refused <= REFUSED_WITHIN)), 5),
        "memory MiB, first third": round(float(np.median(memory[:third])), 1),
        "memory MiB, last third": round(float(np.median(memory[-third:])), 1),
    }


if __name__ == "__main__":
    main()
