"""A polite client's latency alone, and next to a client that floods the server and one that reads none of its streams.

    python -m benchmarks.service.floods [--requests 60] [--rounds 3] [--flood 300] [--unread 500] [--plan plan.yaml]

Serves the demo model (random weights), or a plan. The polite client sends one short request after the other. Meanwhile
another keeps `--flood` requests open and repeats what is refused, a third keeps `--unread` streams of long outputs open
and reads none. Clients have addresses of their own; the rude ones run in a process of their own at a low priority, as
in service they are on other machines. Rounds with and without them alternate. Writes records/floods.json.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.record import write_record
from benchmarks.service.serving import Server, served
from exeplan.planner.reports.tables import table

PLAN = """model: demo
schedule: {policy: rra, prefill_batch: 4, decode_steps: 8}
placement: [{devices: [0], layers: [0, 6]}]
kv_cache_tokens: 16384
"""
POLITE, FLOOD, UNREAD = "127.0.0.2", "127.0.0.3", "127.0.0.4"
QUESTION = {"prompt": [5, 6, 7] * 5, "max_tokens": 32, "ignore_eos": True, "temperature": 0}
FLOODED = {"prompt": [8, 9] * 30, "max_tokens": 64, "ignore_eos": True, "temperature": 0}
STREAMED = {"prompt": [3, 4] * 10, "max_tokens": 1000, "ignore_eos": True, "temperature": 0, "stream": True}
PAUSE_SECONDS = 0.1
"""Before what was refused is sent again; Retry-After, of at least a second, is ignored."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=60, help="of the polite client in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flood", type=int, default=300, help="requests that the flooding client keeps open")
    parser.add_argument("--unread", type=int, default=500, help="streams that are never read")
    parser.add_argument("--settle", type=float, default=5.0, help="seconds before a round with the others")
    parser.add_argument("--plan", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plan = args.plan or Path(folder) / "plan.yaml"
        if not args.plan:
            plan.write_text(PLAN)
        with served(plan, "--weights", "dummy" if not args.plan else "auto", "--replan", "off") as server:
            figures = measured(server, args)
    print(table(("", ""), [[name, str(value)] for name, value in figures.items()]))
    print(f"\nrecord: {write_record('floods', figures)}")


def measured(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """Rounds alone and in company by turns; quantiles over all rounds of a kind."""
    alone: list[float] = []
    company: list[float] = []
    statuses: Counter[int] = Counter()
    asyncio.run(polite(server.port, 5, Counter()))
    for _ in range(args.rounds):
        alone += asyncio.run(polite(server.port, args.requests, statuses))
        before = server.metric("generation_tokens_total")
        with rude(server.port, args.flood, args.unread):
            time.sleep(args.settle)
            began = time.perf_counter()
            company += asyncio.run(polite(server.port, args.requests, statuses))
            seconds = time.perf_counter() - began
            waiting, running = (server.metric(f"num_requests_{what}") for what in ("waiting", "running"))
            tokens = server.metric("generation_tokens_total") - before
        while not server.idle():
            time.sleep(0.1)
    quantiles = {share: tuple(float(np.quantile(times, share)) for times in (alone, company)) for share in (0.5, 0.99)}
    return {
        "requests of the polite client, each way": len(alone),
        "its answers by status": dict(statuses),
        "open requests of the flooding client": args.flood,
        "unread streams": args.unread,
        "waiting and running in the last round": [int(waiting), int(running)],
        "output tokens/s of all in the last round": round(tokens / (seconds + args.settle), 1),
        "alone, median and p99 s": [round(quantiles[share][0], 4) for share in quantiles],
        "in company, median and p99 s": [round(quantiles[share][1], 4) for share in quantiles],
        "ratio of the medians": round(quantiles[0.5][1] / quantiles[0.5][0], 3),
        "ratio of the p99": round(quantiles[0.99][1] / quantiles[0.99][0], 3),
        "held by the server": server.held(),
    }


async def polite(port: int, count: int, statuses: Counter[int]) -> list[float]:
    """Seconds of each answer, one request at a time, each on a connection of its own."""
    found = []
    for _ in range(count):
        began = time.perf_counter()
        statuses[status := await ask(port, POLITE, QUESTION)] += 1
        if status == 200:
            found.append(time.perf_counter() - began)
        await asyncio.sleep(0.01)
    return found


@contextlib.contextmanager
def rude(port: int, flood: int, unread: int) -> Iterator[None]:
    """The flooding client and the one that reads nothing, in a process of their own."""
    process = multiprocessing.get_context("spawn").Process(target=_rude, args=(port, flood, unread), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _rude(port: int, flood: int, unread: int) -> None:
    os.nice(10)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    async def both() -> None:
        await asyncio.gather(*(_flooding(port) for _ in range(flood)), *(_unread(port) for _ in range(unread)))

    asyncio.run(both())


async def _flooding(port: int) -> None:
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            if await ask(port, FLOOD, FLOODED) == 200:
                continue
        await asyncio.sleep(PAUSE_SECONDS)


async def _unread(port: int) -> None:
    """One stream, whose header alone is read; refused or given up by the server, it is tried again."""
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await _send(port, UNREAD, STREAMED, limit=1024)
            with contextlib.closing(writer):
                if await _status(reader) == 200:
                    while not reader.at_eof():
                        await asyncio.sleep(1.0)
        await asyncio.sleep(PAUSE_SECONDS)


async def ask(port: int, address: str, body: dict[str, Any]) -> int:
    """The status of a request, whose whole answer is read."""
    reader, writer = await _send(port, address, body)
    with contextlib.closing(writer):
        status = await _status(reader)
        await reader.read()
        return status


async def _send(
    port: int, address: str, body: dict[str, Any], *, limit: int = 65536
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0), limit=limit)
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    writer.write(head.encode() + data)
    return reader, writer


async def _status(reader: asyncio.StreamReader) -> int:
    head = await reader.readuntil(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1])


if __name__ == "__main__":
    main()
