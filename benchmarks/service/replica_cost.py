"""Two replicas against one: tokens a second, and where the CPU seconds go, with and without HTTP.

    python -m benchmarks.service.replica_cost [--requests 120] [--rounds 3]

The demo model on this host, one replica and two, each an engine process of one thread. The same greedy requests, as
many in flight as there are places, are asked in turn

    log-probabilities   over HTTP, streamed, an event a token with its log-probability (as `ray_overhead` asks)
    streamed            over HTTP, an event a token
    whole               over HTTP, an answer each
    no HTTP             of the same engine processes by the same router (`ReplicaSet`), in this process

CPU milliseconds for 1,000 tokens are of all threads of each process: the load, the front end with its readers, the
engines. On two cores two replicas are at most as much faster as the processes besides the engines leave room for.
Writes records/replica-cost.json.

Not here: workers placed by Ray (`ray_overhead.py`).
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lib.record import write_record
from benchmarks.service.kills import ONE, Load, bodies_of, name_of
from benchmarks.service.serving import Server, descendants, served
from exeplan.core.plan import Plan, single_plans
from exeplan.planner.load_problem import plan_model, read_plan
from exeplan.planner.reports.tables import table
from exeplan.runner.engine_process.build import engine_setup
from exeplan.runner.engine_process.replicas import ReplicaSet
from exeplan.runner.ipc.messages import Prompt, Sampling

PLACES = 8
"""Of each replica, by the plan."""
WAYS = ("log-probabilities", "streamed", "whole", "no HTTP")
PARTS = ("load", "front end", "readers", "engines")
_TICKS = os.sysconf("SC_CLK_TCK")
Body = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=120, help="of each way and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    bodies = bodies_of(random.Random(args.seed), -(-args.requests // 3))[: args.requests]
    found: dict[tuple[str, int], list[dict[str, float]]] = {(way, n): [] for way in WAYS for n in (1, 2)}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        plays = {n: stack.enter_context(_players(Path(folder), n)) for n in (1, 2)}
        for number in range(args.rounds + 1):  # The first one warms up.
            for way, count in found:
                measured = plays[count](way, bodies)
                if number:
                    found[way, count].append(measured)
    rows = [
        {"way": way, "replicas": n} | {name: round(median(one[name] for one in each), 1) for name in each[0]}
        for (way, n), each in found.items()
    ]
    gains = {
        way: [two["tokens/s"] / one["tokens/s"] for one, two in zip(found[way, 1], found[way, 2], strict=True)]
        for way in WAYS
    }
    print(table(tuple(rows[0]), [tuple(map(str, row.values())) for row in rows]))
    print("two over one:", ", ".join(f"{way} {median(each):.2f}" for way, each in gains.items()))
    two_over_one = {way: {"median": median(each), "rounds": each} for way, each in gains.items()}
    print(f"\nrecord: {write_record('replica-cost', {**vars(args), 'rows': rows, 'two over one': two_over_one})}")


@contextlib.contextmanager
def _players(folder: Path, count: int) -> Iterator[Callable[[str, list[Body]], dict[str, float]]]:
    """Asks for all bodies in a way, of a server or of engines of so many replicas, both of which run meanwhile."""
    file = folder / f"{count}.yaml"
    file.write_text(f"{ONE}kv_cache_tokens: 8192\nreplicas: {list(range(count))}\n")
    with served(file, "--weights", "dummy", "--replan", "off") as server, asyncio.Runner() as runner:
        replicas = runner.run(_engines(read_plan(file)))

        def play(way: str, bodies: list[Body]) -> dict[str, float]:
            own = [os.getpid()]
            if way == "no HTTP":
                clients = [client for number in range(count) if (client := replicas.client(number))]
                pids = {"engines": [client.pid for client in clients if client.pid], "load": own}
                return _measured(lambda: runner.run(_ask_all(replicas, bodies, count * PLACES)), pids)
            family = {pid: name_of(pid) for pid in descendants(server.process.pid)}
            pids = {
                "load": own,
                "front end": [server.process.pid],
                "readers": [pid for pid, name in family.items() if name == "exeplan-reader"],
                "engines": [pid for pid, name in family.items() if name == "exeplan-engine"],
            }
            ask = Load(server, bodies).answer if way == "log-probabilities" else _asker(server, way)
            return _measured(lambda: _in_threads(ask, bodies, count * PLACES), pids)

        try:
            yield play
        finally:
            runner.run(replicas.close())


def _measured(play: Callable[[], int], pids: dict[str, list[int]]) -> dict[str, float]:
    """Tokens a second, and CPU milliseconds for 1,000 tokens by part."""
    before, began = {name: _cpu_seconds(each) for name, each in pids.items()}, time.perf_counter()
    num_tokens = play()
    seconds = time.perf_counter() - began
    after = {name: _cpu_seconds(each) for name, each in pids.items()}
    spent = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in PARTS}
    return {"tokens/s": num_tokens / seconds} | {
        f"{name} ms": 1e6 * value / num_tokens for name, value in spent.items()
    }


def _cpu_seconds(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS


def _in_threads(ask: Callable[[Body], Any], bodies: list[Body], in_flight: int) -> int:
    with ThreadPoolExecutor(in_flight) as clients:
        list(clients.map(ask, bodies))
    return sum(body["max_tokens"] for body in bodies)


def _asker(server: Server, way: str) -> Callable[[Body], None]:
    """Asks for an answer and reads its bytes; an answer that is no success ends the benchmark."""

    def ask(body: Body) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        with contextlib.closing(connection):
            fields = {**body, "temperature": 0, "ignore_eos": True, "stream": way == "streamed"}
            connection.request("POST", "/v1/completions", json.dumps(fields))
            response = connection.getresponse()
            text = response.read()
            assert response.status == 200, text

    return ask


async def _engines(plan: Plan) -> ReplicaSet:
    spec = plan_model(plan)
    setups = [
        engine_setup(one, spec, dummy_weights=True, timeline=None, deadline_seconds=None, ray=None, reference_passes=())
        for one in single_plans(plan)
    ]
    replicas = ReplicaSet(setups, "shortest-queue")
    await replicas.until_ready()
    return replicas


async def _ask_all(replicas: ReplicaSet, bodies: list[Body], in_flight: int) -> int:
    places = asyncio.Semaphore(in_flight)

    async def ask(body: Body) -> None:
        async with places:
            job = replicas.reserve(1)
            try:
                prompt = Prompt(prompt_token_ids=body["prompt"], sampling=_greedy(body["max_tokens"]))
                replicas.submit(job, [prompt], stream=True)
                while job.open or not job.events.empty():
                    await job.next_events()
            finally:
                replicas.release(job)

    await asyncio.gather(*map(ask, bodies))
    return sum(body["max_tokens"] for body in bodies)


def _greedy(max_tokens: int) -> Sampling:
    return Sampling(
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        seed=None,
        stop=(),
        stop_token_ids=(),
        max_tokens=max_tokens,
        min_tokens=0,
        ignore_eos=True,
        logprobs=None,
        prompt_logprobs=None,
        logit_bias={},
        structure=None,
    )


if __name__ == "__main__":
    main()
