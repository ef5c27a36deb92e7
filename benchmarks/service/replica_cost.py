"""Two replicas against one: tokens a second, and where the CPU seconds go, with and without HTTP.

    python -m benchmarks.service.replica_cost [--model demo llama-50m] [--requests 60] [--rounds 3]

A model on this host, one replica and two, each an engine process of one thread. The same greedy requests a replica, as
many in flight as there are places, are asked in turn

    log-probabilities   over HTTP, streamed, an event a token with its log-probability (as `ray_overhead` asks)
    streamed            over HTTP, an event a token
    whole               over HTTP, an answer each
    no HTTP             of the same engine processes by the same router (`ReplicaSet`), in this process
    independent         of engines in processes of their own, without router and messages: what two can win at most

CPU milliseconds for 1,000 tokens are of all threads of each process: the load, the front end with its readers, the
engines. Others is the share of the machine's time that other programs and systems had: one and two replicas are
measured after one another until so many rounds had less than a twentieth, or `--most` times, and the
quietest count. On two cores two replicas are at most as much faster as what is besides the engines leaves room for.
The demo is so small that a token costs its engine only a few times what carries it; llama-50m is that of
`benchmarks.engine.throughput`. Writes records/replica-cost.json.

Not here: workers placed by Ray (`ray_overhead.py`).
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engine.throughput import VOCABULARY, make_checkpoint
from benchmarks.lib.record import write_record
from benchmarks.lib.vllm_server import write_tokenizer
from benchmarks.service.kills import Load, bodies_of, name_of
from benchmarks.service.serving import Server, descendants, served
from exeplan.core.plan import Plan, single_plans
from exeplan.planner.load_problem import plan_model, read_plan
from exeplan.planner.reports.tables import table
from exeplan.runner.engine_process.build import build_engine, engine_setup
from exeplan.runner.engine_process.replicas import ReplicaSet
from exeplan.runner.ipc.messages import EngineSetup, Prompt, Sampling

MODELS = {"demo": (6, 8), "llama-50m": (8, 32)}
"""Layers, and places of each replica by the plan."""
WAYS = ("log-probabilities", "streamed", "whole", "no HTTP", "independent")
QUIET = 0.05
"""The share of the machine that others have in a round which is not repeated."""
PLACES = 8
"""Requests that warm up."""
PARTS = ("load", "front end", "readers", "engines")
_END = b"\r\n0\r\n\r\n"
_TICKS = os.sysconf("SC_CLK_TCK")
Body = dict[str, Any]
Pair = tuple[dict[str, float], dict[str, float]]
"""Of one replica and of two."""
Play = Callable[[str, list[Body]], dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--requests", type=int, default=60, help="for each replica, of each way and round")
    parser.add_argument("--rounds", type=int, default=3, help="that count, of each way")
    parser.add_argument("--most", type=int, default=12, help="rounds of each way")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        return _answer_alone(args.engine)
    options = {name: value for name, value in vars(args).items() if name != "engine"}
    found = {model: _measure(model, args) for model in args.model}
    print(f"\nrecord: {write_record('replica-cost', {**options, 'models': found})}")


def _measure(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one model, which it prints."""
    bodies = bodies_of(random.Random(args.seed), -(-args.requests // 3))[: args.requests]
    pairs: dict[str, list[Pair]] = {way: [] for way in args.ways}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        name = _model_in(Path(folder), model)
        plays = {n: stack.enter_context(_players(Path(folder), name, model, n)) for n in (1, 2)}
        for way in args.ways:
            for play in plays.values():
                play(way, bodies[:PLACES])  # Warms up.
        for turn in range(args.most):
            for way, measured in pairs.items():
                if sum(_busy(pair) < QUIET for pair in measured) < args.rounds:
                    first, second = (1, 2) if turn % 2 == 0 else (2, 1)
                    one = {n: plays[n](way, bodies) for n in (first, second)}
                    measured.append((one[1], one[2]))
    taken = {way: sorted(measured, key=_busy)[: args.rounds] for way, measured in pairs.items()}
    rows = [
        {"way": way, "replicas": n + 1}
        | {name: round(median(pair[n][name] for pair in each), 3) for name in each[0][n]}
        for way, each in taken.items()
        for n in (0, 1)
    ]
    gains = {way: [two["tokens/s"] / one["tokens/s"] for one, two in each] for way, each in taken.items()}
    print(
        f"{model}, {MODELS[model][1]} places a replica; {', '.join(f'{w} {len(p)}' for w, p in pairs.items())} rounds"
    )
    print(table(tuple(rows[0]), [tuple(map(str, row.values())) for row in rows]))
    print("two over one:", ", ".join(f"{way} {median(each):.2f}" for way, each in gains.items()), flush=True)
    return {
        "rows": rows,
        "two over one": {way: {"median": median(each), "rounds": each} for way, each in gains.items()},
        "rounds": {way: len(measured) for way, measured in pairs.items()},
    }


def _busy(pair: "Pair") -> float:
    return max(one["others"] for one in pair)


def _model_in(folder: Path, model: str) -> str:
    """As a plan names it."""
    if model == "demo":
        return model
    made = folder / "model"
    make_checkpoint(str(made), model)
    write_tokenizer(made, VOCABULARY)
    return str(made)


@contextlib.contextmanager
def _players(folder: Path, name: str, model: str, count: int) -> Iterator[Play]:
    """Asks for all bodies, so many times as there are replicas, in a way: of a server, of engines behind a router, and
    of engines alone, all of which run meanwhile."""
    file, (num_layers, places) = folder / f"{count}.yaml", MODELS[model]
    placement = f"placement: [{{devices: [0], layers: [0, {num_layers}]}}]\n"
    plan = f"model: {name}\nschedule: {{policy: orca, max_num_seqs: {places}}}\n{placement}"
    file.write_text(f"{plan}kv_cache_tokens: {256 * places}\nreplicas: {list(range(count))}\n")
    in_flight = count * places
    with (
        served(file, "--weights", "dummy", "--replan", "off") as server,
        asyncio.Runner() as runner,
        _engines_alone(file, count) as alone,
    ):
        replicas = runner.run(_engines(read_plan(file)))

        def play(way: str, bodies: list[Body]) -> dict[str, float]:
            own, all_bodies = [os.getpid()], [body for body in bodies for _ in range(count)]
            if way == "independent":
                pids = {"engines": [engine.pid for engine in alone]}
                return _measured(lambda: _asked_alone(alone, bodies), pids)
            if way == "no HTTP":
                clients = [client for number in range(count) if (client := replicas.client(number))]
                pids = {"engines": [client.pid for client in clients if client.pid], "load": own}
                return _measured(lambda: runner.run(_ask_all(replicas, all_bodies, in_flight)), pids)
            family = {pid: name_of(pid) for pid in descendants(server.process.pid)}
            pids = {
                "load": own,
                "front end": [server.process.pid],
                "readers": [pid for pid, name in family.items() if name == "exeplan-reader"],
                "engines": [pid for pid, name in family.items() if name == "exeplan-engine"],
            }
            ask = Load(server, bodies).answer if way == "log-probabilities" else _asker(server, way)
            return _measured(lambda: _in_threads(ask, all_bodies, in_flight), pids)

        try:
            yield play
        finally:
            runner.run(replicas.close())


def _measured(play: Callable[[], int], pids: dict[str, list[int]]) -> dict[str, float]:
    """Tokens a second, CPU milliseconds for 1,000 tokens by part, and the share of the machine that others had."""
    before, machine, began = _seconds_by(pids), _machine_seconds(), time.perf_counter()
    num_tokens = play()
    seconds = time.perf_counter() - began
    after, (busy, stolen) = _seconds_by(pids), _machine_seconds()
    spent = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in PARTS}
    others = max(busy - machine[0] - sum(spent.values()), 0.0) + stolen - machine[1]
    return {
        "tokens/s": num_tokens / seconds,
        **{f"{name} ms": 1e6 * value / num_tokens for name, value in spent.items()},
        "others": others / seconds / len(os.sched_getaffinity(0)),
    }


def _seconds_by(pids: dict[str, list[int]]) -> dict[str, float]:
    return {name: _cpu_seconds(each) for name, each in pids.items()}


def _machine_seconds() -> tuple[float, float]:
    """In which cores of this machine were busy, and in which another system had them."""
    user, nice, system, _, _, irq, soft, steal, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system + irq + soft) / _TICKS, steal / _TICKS


def _cpu_seconds(pids: list[int]) -> float:
    """Of this process, or of all threads that live, by the scheduler: ticks of 10 ms miss what runs for less."""
    if pids == [os.getpid()]:  # Whose threads end with their requests.
        return time.process_time()
    threads = [thread for pid in pids for thread in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


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
            assert response.status == 200, response.read()
            if not fields["stream"]:
                response.read()
                return
            last = b""
            while not last.endswith(_END):  # To parse the chunks would take longer than to read them.
                found = response.fp.read1(1 << 16)
                assert found, last
                last = (last + found)[-len(_END) :]

    return ask


def _setups(plan: Plan) -> list[EngineSetup]:
    spec = plan_model(plan)
    return [
        engine_setup(one, spec, dummy_weights=True, timeline=None, deadline_seconds=None, ray=None, reference_passes=())
        for one in single_plans(plan)
    ]


async def _engines(plan: Plan) -> ReplicaSet:
    replicas = ReplicaSet(_setups(plan), "shortest-queue")
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
                while job.open or job.events:
                    await job.next_events()
            finally:
                replicas.release(job)

    await asyncio.gather(*map(ask, bodies))
    return sum(body["max_tokens"] for body in bodies)


@contextlib.contextmanager
def _engines_alone(file: Path, count: int) -> Iterator[list["subprocess.Popen[str]"]]:
    """Processes that each have an engine of the plan and answer what is asked on their standard input."""
    command = [sys.executable, "-m", "benchmarks.service.replica_cost", "--engine", str(file)]
    with contextlib.ExitStack() as stack:
        found = [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            for _ in range(count)
        ]
        for engine in found:
            assert engine.stdin
            assert engine.stdout
            stack.callback(engine.stdin.close)
            assert engine.stdout.readline() == "ready\n"
        yield found


def _asked_alone(engines: list["subprocess.Popen[str]"], bodies: list[Body]) -> int:
    for engine in engines:
        assert engine.stdin
        engine.stdin.write(json.dumps(bodies) + "\n")
        engine.stdin.flush()
    return sum(int(engine.stdout.readline()) for engine in engines if engine.stdout)


def _answer_alone(file: Path) -> None:
    """Answers lists of bodies, a line each, with the number of tokens: an engine without front end and messages."""
    from exeplan.runner.compute.tokens.sampling import SamplingParams
    from exeplan.runner.engine.requests import Request

    engine = build_engine(_setups(read_plan(file))[0])
    print("ready", flush=True)
    for line in sys.stdin:
        count = 0
        for index, body in enumerate(json.loads(line)):
            sampling = SamplingParams(temperature=0.0, max_tokens=body["max_tokens"], ignore_eos=True)
            engine.add(Request(request_id=str(index), prompt_token_ids=body["prompt"], sampling=sampling))
        while engine.has_work:
            count += sum(len(output.token_ids) for output in engine.step())
        print(count, flush=True)


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
