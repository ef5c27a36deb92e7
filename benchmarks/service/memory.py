"""Memory of a server over many requests: what each of its processes holds, after every part of them.

    python -m benchmarks.service.memory [--requests 5000] [--at-once 32] [--one-length]

Serves the demo model (random weights), with so many requests at once. Prompts have 1 to 100 tokens, outputs 1 to 16,
both drawn evenly; every fourth answer is streamed, every tenth prompt is text. Memory is anonymous, what
processes share by a fork divided among them (`Pss_Anon` of Linux); `forks` and `rforks` are what engine and readers are
forked by. With `--one-length` every prompt has 50 tokens and every output 8: what still grows then is kept for every
request, while the code that is compiled for each number of tokens in a pass is all there at once.
Writes records/memory.json or records/memory-one-length.json; with another number of requests, this is in its name, too.
"""

import argparse
import asyncio
import json
import random
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.lib.record import write_record
from benchmarks.service.leavers import PLAN
from benchmarks.service.serving import Server, descendants, served
from exeplan.planner.reports.tables import table

DEFAULT, PARTS = 5000, 16
_KINDS = ("front end", "engine", "forks", "reader", "rforks", "all")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=DEFAULT)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--one-length", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        plan = Path(name) / "plan.yaml"
        plan.write_text(PLAN)
        with served(plan, "--weights", "dummy", "--replan", "off") as server:
            rows = asyncio.run(_all(server, args.requests, args.at_once, one_length=args.one_length))
    print(table(tuple(rows[0]), [tuple(map(str, row.values())) for row in rows]))
    grown = {kind: round(rows[-1][kind] / rows[PARTS // 4][kind] - 1, 4) for kind in _KINDS if rows[0].get(kind)}
    print("after the first quarter: " + ", ".join(f"{kind} {100 * share:+.1f} %" for kind, share in grown.items()))
    record = {
        "one_length": args.one_length,
        "requests": args.requests,
        "at_once": args.at_once,
        "grown_after_a_quarter": grown,
        "rows": rows,
    }
    ending = ("-one-length" if args.one_length else "") + ("" if args.requests == DEFAULT else f"-{args.requests}")
    print(f"record: {write_record(f'memory{ending}', record)}")


async def _all(server: Server, count: int, at_once: int, *, one_length: bool) -> list[dict[str, Any]]:
    """What is held before, and after each of the parts."""
    draw, rows, began = random.Random(0), [_row(server, 0, 0.0)], time.monotonic()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for part in range(1, PARTS + 1):
            seeds = iter([draw.randrange(2**32) for _ in range(count * part // PARTS - count * (part - 1) // PARTS)])
            await asyncio.gather(*(_client(session, server, seeds, one_length=one_length) for _ in range(at_once)))
            rows.append(_row(server, count * part // PARTS, time.monotonic() - began))
    return rows


async def _client(session: aiohttp.ClientSession, server: Server, seeds: Iterator[int], *, one_length: bool) -> None:
    """One request after the other, as long as there are any."""
    for seed in seeds:
        draw = random.Random(seed)
        num_tokens, num_new = (50, 8) if one_length else (draw.randint(1, 100), draw.randint(1, 16))
        tokens = [draw.randrange(200) for _ in range(num_tokens)]
        prompt = "a schedule " * (len(tokens) // 10 + 1) if not one_length and draw.random() < 0.1 else tokens
        body = {"prompt": prompt, "max_tokens": num_new, "stream": draw.random() < 0.25, "ignore_eos": True}
        async with session.post(f"{server.url}/v1/completions", json=body) as response:
            text = await response.read()
        if response.status != 200:
            raise SystemExit(f"answered {response.status}: {text[:200]!r} to {json.dumps(body)[:200]}")


def _row(server: Server, answered: int, seconds: float) -> dict[str, Any]:
    """MiB by kind of process, `all` the sum."""
    held = dict.fromkeys(_KINDS, 0.0)
    for pid in (server.process.pid, *descendants(server.process.pid)):
        kind = "front end" if pid == server.process.pid else _kind(pid)
        size = _anonymous_mib(pid)
        held["all"] += size
        held[kind] = held.get(kind, 0.0) + size
    return {"answered": answered, "s": round(seconds, 1), **{kind: round(size, 1) for kind, size in held.items()}}


def _kind(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip().removeprefix("exeplan-")


def _anonymous_mib(pid: int) -> float:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(r"^Pss_Anon:\s+(\d+) kB", text, re.MULTILINE)
    assert found
    return int(found.group(1)) / 1024


if __name__ == "__main__":
    main()
