"""Two workers against one core: output tokens a second of orca in closed loops of 2, 8 and 32 requests.

    python -m benchmarks.engine.pipeline [--seconds 120] [--others 0.35]

The demo model with random weights, 8 to 64 tokens in and 64 to 192 out, without HTTP: the engine in this benchmark's
processes, one of which computes itself, one of which has a worker a core in a pipeline with two micro-batches, and one
a worker a core in a tensor-parallel group. They take turns in bursts of 0.8 s, each of which waits until other programs
use less than `--others` of the machine; printed are medians, the ratio, and the share of a core that engine and workers
used. To compare two versions, run both by turns. What they could win at most: `two_cores.py`. Writes nothing.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from benchmarks.engine.handover import cpu_seconds
from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.schedule import Schedule, Stage
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.engine.engine import Engine, Request
from exeplan.runner.engine_process.build import build_engine, engine_setup

CLIENTS, BURST, WARM_UP = (2, 8, 32), 0.8, 0.25
WAYS = ("one", "pipeline", "tensor")
MODULE = "benchmarks.engine.pipeline"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--others", type=float, default=0.35)
    parser.add_argument("--serve", choices=WAYS, help="be one of the processes")
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
    else:
        measure(args.seconds, args.others)


def measure(seconds: float, others: float) -> None:
    """Bursts by turns, and their table."""
    ways = {way: started(way) for way in WAYS}
    found: dict[tuple[int, str], list[list[float]]] = defaultdict(list)
    ended = time.monotonic() + seconds
    while time.monotonic() < ended:
        for clients in CLIENTS:
            for way, process in ways.items():
                wait_for_idle(others, ended)
                found[clients, way].append(burst(process, clients))
    for process in ways.values():
        assert process.stdin is not None
        process.stdin.close()
    for clients in CLIENTS:
        for way in ways:
            bursts = found[clients, way]
            rate, *used = (statistics.median(figures) for figures in zip(*bursts, strict=True))
            ratio = rate / statistics.median(one[0] for one in found[clients, "one"])
            shares = ", ".join(f"{share:.2f}" for share in used)
            said = f"{clients:2d} requests, {way:8s}: {rate:7.1f} tokens/s, {ratio:.2f} times"
            print(f"{said}, cores {shares}; {len(bursts)} bursts")


def started(way: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", MODULE, "--serve", way]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def burst(process: "subprocess.Popen[str]", clients: int) -> list[float]:
    """Tokens a second, and cores that each process used."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(clients, file=process.stdin, flush=True)
    answer: list[float] = json.loads(process.stdout.readline())
    return answer


def wait_for_idle(others: float, ended: float) -> None:
    """Until the machine is that idle, or the time is over."""
    while True:
        before = ticks()
        time.sleep(0.15)
        idle, total = (after - at for at, after in zip(before, ticks(), strict=True))
        if 1.0 - idle / max(total, 1) <= others or time.monotonic() > ended:
            return


def ticks() -> tuple[int, int]:
    """Idle ones, and all."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return fields[3] + fields[4], sum(fields[:8])


def serve(way: str) -> None:
    """Bursts of as many clients as each line of the standard input says."""
    engine = made(way)
    pids = (os.getpid(), *getattr(engine._executor, "pids", ()))
    numbers = iter(range(sys.maxsize))
    rng = random.Random(0)
    print("ready", flush=True)
    for line in sys.stdin:
        for _ in range(int(line)):
            engine.add(request(next(numbers), rng))
        run(engine, WARM_UP, numbers, rng)
        before, start = cpu_seconds(pids), time.perf_counter()
        tokens = run(engine, BURST, numbers, rng)
        seconds = time.perf_counter() - start
        used = [(after - at) / seconds for at, after in zip(before, cpu_seconds(pids), strict=True)]
        print(json.dumps([tokens / seconds, *used]), flush=True)
        for name in list(engine._requests):
            engine.abort(name)
        while engine.has_work:
            engine.step()
    engine.close()


def made(way: str) -> Engine:
    spec = load_model_spec("demo")
    layers, half = spec.num_layers, spec.num_layers // 2
    placement = {
        "one": (Stage(layers=(0, layers)),),
        "pipeline": (Stage(devices=(0,), layers=(0, half)), Stage(devices=(1,), layers=(half, layers))),
        "tensor": (Stage(devices=(0, 1), layers=(0, layers)),),
    }[way]
    schedule = Schedule("orca", {"max_num_seqs": max(CLIENTS), **({"micro_batches": 2} if way == "pipeline" else {})})
    plan = Plan(model="demo", schedule=schedule, placement=placement, kv_cache_tokens=max(CLIENTS) * 512)
    return build_engine(engine_setup(plan, spec, dummy_weights=True))


def request(number: int, rng: random.Random) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=rng.randint(64, 192), ignore_eos=True)
    prompt = [rng.randrange(5, 2000) for _ in range(rng.randint(8, 64))]
    return Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling)


def run(engine: Engine, seconds: float, numbers: Iterator[int], rng: random.Random) -> int:
    """Output tokens; a request that ends is followed by another."""
    tokens, ended = 0, time.perf_counter() + seconds
    while time.perf_counter() < ended:
        for output in engine.step():
            tokens += len(output.token_ids)
            if output.finish_reason:
                engine.add(request(next(numbers), rng))
    return tokens


if __name__ == "__main__":
    main()
