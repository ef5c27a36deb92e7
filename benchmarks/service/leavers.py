"""Clients that disconnect at random moments: KV blocks and other resources, held before and afterwards.

    python -m benchmarks.service.leavers [--clients 1000] [--at-once 50]

Serves the demo model (random weights) to `--clients` clients. Some never finish their header or their body; some ask
for one choice, others for several, streamed or whole. Each disconnects after a random time, half of them by a reset. A
further client sends the same greedy request throughout and must always get the same answer.
Writes records/leavers.json.
"""

import argparse
import asyncio
import contextlib
import json
import random
import socket
import struct
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.lib.record import write_record
from benchmarks.service.serving import Server, served
from exeplan.planner.reports.tables import table

PLAN = """model: demo
schedule: {policy: rra, prefill_batch: 8, decode_steps: 8}
placement: [{devices: [0], layers: [0, 6]}]
kv_cache_tokens: 8192
"""
QUESTION = {"prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.yaml"
        plan.write_text(PLAN)
        with served(plan, "--weights", "dummy") as server:
            figures = asyncio.run(come_and_go(server, clients=args.clients, at_once=args.at_once, seed=args.seed))
    figures["exit status"] = server.process.returncode
    print(table(("", ""), [[name, str(value)] for name, value in figures.items()]))
    print(f"\nrecord: {write_record('leavers', figures)}")


async def come_and_go(server: Server, *, clients: int, at_once: int, seed: int) -> dict[str, Any]:
    """The server's resources before and after, and the answers of the patient client."""
    draw, left, answers = random.Random(seed), Counter(), Counter()
    async with aiohttp.ClientSession() as session:
        wanted = await _answer(session, server)
        before, stop = server.held(), asyncio.Event()
        patient = asyncio.create_task(_patient(session, server, wanted, answers, stop))
        gate = asyncio.Semaphore(at_once)

        async def one(seed: int) -> None:
            async with gate:
                left[await leave(server.port, random.Random(seed))] += 1

        await asyncio.gather(*(one(draw.randrange(2**32)) for _ in range(clients)))
        gone = time.perf_counter()
        stop.set()
        await patient
        while not await asyncio.to_thread(server.idle):
            if time.perf_counter() - gone > 30:
                break
            await asyncio.sleep(0.02)
        seconds = time.perf_counter() - gone
        again = await _answer(session, server)
    await asyncio.sleep(1.0)
    return {
        "clients": clients,
        **{f"left: {kind}": count for kind, count in sorted(left.items())},
        "all free again": server.idle(),
        "after the last one left, s": round(seconds, 3),
        "patient client": dict(answers),
        "the same answer afterwards": again == wanted,
        "held before": before,
        "held after": server.held(),
    }


async def leave(port: int, draw: random.Random) -> str:
    """One client: connects, sends all or a part, reads for a while and disconnects; the kind of its end."""
    kind = draw.choice(("half a header", "half a body", "streamed", "streamed", "whole", "whole"))
    fields = {"max_tokens": draw.randint(1, 200), "ignore_eos": True, "n": draw.choice((1, 1, 1, 4))}
    prompt = [draw.randrange(200) for _ in range(draw.randint(1, 60))]
    body = json.dumps({"prompt": prompt, "stream": kind == "streamed", **fields}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
    sent = {"half a header": head[: len(head) // 2], "half a body": head + body[: len(body) // 2]}.get(
        kind, head + body
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionError, TimeoutError):
        writer.write(sent)
        async with asyncio.timeout(draw.expovariate(1 / 0.3)):
            while await reader.read(4096):
                pass
    if draw.random() < 0.5:
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return kind


async def _patient(
    session: aiohttp.ClientSession, server: Server, wanted: Any, answers: Counter[str], stop: asyncio.Event
) -> None:
    while not stop.is_set():
        found = await _answer(session, server)
        answers["as undisturbed" if found == wanted else "refused" if found == 429 else "other"] += 1
        await asyncio.sleep(0.05)


async def _answer(session: aiohttp.ClientSession, server: Server) -> Any:
    """The tokens, or the status where it is not 200."""
    async with session.post(f"{server.url}/v1/completions", json=QUESTION) as response:
        body = await response.json(content_type=None)
        return body["choices"][0]["logprobs"]["tokens"] if response.status == 200 else response.status


if __name__ == "__main__":
    main()
