"""One plan with Ray and without on this host, in turn: tokens, and the ratio of throughputs; two replicas against one.

    python -m benchmarks.service.ray_overhead [--rounds 5] [--requests 60]

Four servers of the demo model run at the same time, three of them idle: a pipeline of two workers, the same one placed
by Ray, and one and two replicas of a worker that Ray has placed. Each round gives all four the same greedy requests in
a random order, with as many in flight as they have places for. The tokens must be equal. Ratios are of the requests'
tokens a second within a round; the planned one of replicas is their number, as replicas that share no core do not slow
each other down. Writes records/ray-overhead.json.

Not here: workers on several hosts, whose network is their own.
"""

import argparse
import contextlib
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from benchmarks.lib.record import write_record
from benchmarks.service.kills import ONE, TWO, Load, bodies_of
from benchmarks.service.ray_kills import NUM_REPLICAS, ray_nodes
from benchmarks.service.serving import served
from exeplan.planner.reports.tables import table

PIPELINE, BY_RAY = "pipeline", "pipeline, by Ray"
REPLICA, REPLICAS = "a replica, by Ray", "two replicas, by Ray"
_PLACES = 8
"""Of each replica, by the plan."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=60, help="of each server and round")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with ray_nodes(sizes=(3 + NUM_REPLICAS,)) as nodes, tempfile.TemporaryDirectory() as folder:
        rates, equal = _measure(nodes.address, Path(folder), args)
    overhead = [without / with_ray - 1 for without, with_ray in zip(rates[PIPELINE], rates[BY_RAY], strict=True)]
    gain = [two / one for two, one in zip(rates[REPLICAS], rates[REPLICA], strict=True)]
    found = {
        "tokens equal": equal,
        "tokens_per_second": {name: median(each) for name, each in rates.items()},
        "overhead": {"median": median(overhead), "rounds": overhead},
        "two replicas over one": {"median": median(gain), "rounds": gain, "planned": float(NUM_REPLICAS)},
    }
    print(table(("server", "tokens/s"), [[name, f"{median(each):.0f}"] for name, each in rates.items()]))
    print(f"overhead of Ray {median(overhead):+.1%}, two replicas over one {median(gain):.2f}, tokens equal: {equal}")
    print(f"\nrecord: {write_record('ray-overhead', found)}")
    raise SystemExit(int(not equal))


def _measure(address: str, folder: Path, args: argparse.Namespace) -> tuple[dict[str, list[float]], bool]:
    """Tokens a second of each server in each round, and whether all gave the same tokens."""
    draw, ray = random.Random(args.seed), ("--ray", address)
    bodies = bodies_of(draw, -(-args.requests // 3))[: args.requests]
    servers = {
        PIPELINE: (TWO, 1, ()),
        BY_RAY: (TWO, 1, ray),
        REPLICA: (ONE, 1, ray),
        REPLICAS: (ONE, NUM_REPLICAS, ray),
    }
    rates: dict[str, list[float]] = {name: [] for name in servers}
    answers = []
    with contextlib.ExitStack() as stack:
        loads = {}
        for name, (body, count, options) in servers.items():
            plan = folder / f"{len(loads)}.yaml"
            plan.write_text(f"{body}kv_cache_tokens: 8192\nreplicas: {list(range(count))}\n")
            server = stack.enter_context(served(plan, "--weights", "dummy", "--replan", "off", *options))
            loads[name] = Load(server, bodies)
        for number in range(args.rounds + 1):  # The first one warms up.
            for name in draw.sample(sorted(servers), len(servers)):
                began = time.perf_counter()
                with ThreadPoolExecutor(servers[name][1] * _PLACES) as clients:
                    found = list(clients.map(loads[name].answer, bodies))
                seconds = time.perf_counter() - began
                answers.append(found)
                if number:
                    rates[name].append(sum(len(tokens) for _, tokens in found) / seconds)
    return rates, all(each == answers[0] for each in answers)


if __name__ == "__main__":
    main()
