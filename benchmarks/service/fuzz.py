"""Fuzzing the server: answers of status 5xx, requests without an answer, leaks, and the effect on a normal load.

    python -m benchmarks.service.fuzz [--minutes 60] [--rate 10]

Serves the demo model (random weights, a key). The normal load, a few clients with consecutive requests, is first
measured alone. It continues while two fuzzers run at a bounded rate: schemathesis, inside and outside of the server's
OpenAPI description, and raw sockets with broken HTTP. The normal load and a probe, which asks for /health every 50 ms,
have processes of their own, as the fuzzers would hold them up. Two things are told apart. Valid fuzzed requests are
load as well: their outputs are limited to two tokens, and a second 99th percentile leaves out the normal load's
requests beside which one of them was answered. And the fuzzers need processor time that in service would be another
machine's: in turns they send the same to a decoy, which answers 400 to everything.

Every quarter of an hour, or of a shorter run, it prints memory, latencies of the normal load alone, beside the decoy
and fuzzed, the probe's slowest answer, and the answers of status 5xx so far. Writes records/fuzz.json.
"""

import argparse
import contextlib
import http.client
import json
import math
import multiprocessing
import os
import random
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import checks
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi import checks as openapi_checks

from benchmarks.lib.record import write_record
from benchmarks.service.leavers import PLAN
from benchmarks.service.malformed import malformed, talk
from benchmarks.service.serving import Server, served
from exeplan.planner.reports.tables import table
from exeplan.runner.server.openai.generation_request import MAX_CHOICES

KEY = "a key for the benchmark"
CHECKS = [
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
]
_BATCH = 20
_WORK = ("/v1/completions", "/v1/chat/completions")
_IDLE_SECONDS = 30.0
"""After this time abandoned requests have timed out."""
_NICE = 10
"""Of the threads that fuzz, on Linux of them alone: in service they would be on another machine."""
_PART_SECONDS = 15 * 60.0
"""Between two reports of a long run."""
_PROBE_SECONDS = 0.05
_TURN_SECONDS = 10.0
"""The normal load alone and under fuzz alternate, so that other load on the machine affects both."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=10.0, help="fuzzed requests a second, half of them raw")
    parser.add_argument("--clients", type=int, default=2, help="of the normal load")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.yaml"
        plan.write_text(PLAN)
        with served(plan, "--weights", "dummy", "--replan", "off", "--max-queue", "2000", key=KEY) as server:
            figures = storm(server, seconds=60 * args.minutes, rate=args.rate, clients=args.clients, begin=args.seed)
    figures["exit status"] = server.process.returncode
    shown = {**figures, "memory MiB, after each turn": _ends(figures["memory MiB, after each turn"])}
    print(table(("", ""), [[name, str(value)] for name, value in shown.items() if name != "parts"]))
    print(f"\nrecord: {write_record('fuzz', figures)}")


def storm(server: Server, *, seconds: float, rate: float, clients: int, begin: int) -> dict[str, Any]:
    """Fuzzes for `seconds` and returns the figures."""
    answers: Counter[str] = Counter()
    findings: Counter[str] = Counter()
    stop, quiet = threading.Event(), threading.Event()
    quiet.set()
    pace = Pace(rate, stop, quiet)
    with (
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool,
        Probe(server) as probe,
        Decoy() as decoy,
    ):
        aim = Aim(server, decoy)
        fuzzers = [
            threading.Thread(target=_conforming, args=(aim, pace, begin, answers, findings)),
            threading.Thread(target=_broken, args=(aim, pace, begin, answers, findings)),
        ]
        normal = Normal(server, clients, pool)
        normal.measure(min(_TURN_SECONDS, seconds / 4))  # What comes first is slow.
        before = server.held()
        for thread in fuzzers:
            thread.start()
        parts, start = [Part()], time.monotonic()
        length = min(_PART_SECONDS, seconds / 4)
        while (gone := time.monotonic() - start) < seconds:
            if gone > length * len(parts):
                print(parts[-1].line(gone, answers), flush=True)
                parts.append(Part())
            now = parts[-1]
            quiet.set()
            time.sleep(0.5)
            probe.seconds()
            now.alone += normal.measure(min(_TURN_SECONDS, seconds / 10))
            now.probed_alone += probe.seconds()
            aim.at_decoy = True
            quiet.clear()
            now.decoyed += normal.measure(min(2 * _TURN_SECONDS, seconds / 6))
            aim.at_decoy = False
            probe.seconds()
            now.fuzzed += normal.measure(min(4 * _TURN_SECONDS, seconds / 3))
            now.valid = aim.valid
            now.probed += probe.seconds()
            now.memory.append(server.held()["MiB"])
        print(parts[-1].line(gone, answers), flush=True)
        quiet.clear()
        stop.set()
        for thread in fuzzers:
            thread.join()
    ended = time.monotonic()
    while not server.idle() and time.monotonic() - ended < _IDLE_SECONDS:
        time.sleep(0.02)
    time.sleep(1.0)
    whole = Part()
    for part in parts:
        for name in ("alone", "decoyed", "fuzzed", "probed_alone", "probed", "memory"):
            getattr(whole, name).extend(getattr(part, name))
    whole.valid = aim.valid
    alone, fuzzed = ([one.seconds for one in found] for found in (whole.alone, whole.fuzzed))
    return {
        **{f"answers: {status}": count for status, count in sorted(answers.items())},
        "5xx": num_server_errors(answers),
        "not as described": dict(findings),
        "normal load": f"{len(alone)} requests alone, {len(fuzzed)} fuzzed, {normal.failed} failed",
        "latency alone, median and p95 s": _middle(alone),
        "latency fuzzed, median and p95 s": _middle(fuzzed),
        "harm, median": f"{100 * (median(fuzzed) / median(alone) - 1):+.1f} %",
        **{name: value for name, value in whole.figures().items() if name != "memory MiB"},
        "memory MiB, after each turn": whole.memory,
        "parts": [part.figures() for part in parts],
        "all free again": server.idle(),
        "held before": before,
        "held after": server.held(),
    }


def _ends(values: list[int]) -> str:
    return f"{values[0]} at first, {values[len(values) // 4]} after a quarter, {values[-1]} at last"


def num_server_errors(answers: Counter[str]) -> int:
    return sum(count for status, count in answers.items() if status[:1] == "5")


def _middle(seconds: list[float]) -> tuple[float, float]:
    return round(median(seconds), 4), round(float(np.quantile(seconds, 0.95)), 4)


class Asked(NamedTuple):
    """When a request was sent and answered, on the clock that all processes share."""

    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass
class Part:
    """What was measured in a part of the time; in seconds, and MiB after each turn."""

    alone: list[Asked] = field(default_factory=list)
    decoyed: list[Asked] = field(default_factory=list)
    fuzzed: list[Asked] = field(default_factory=list)
    valid: list[Asked] = field(default_factory=list)
    """Fuzzed requests for which the engine worked."""
    probed_alone: list[float] = field(default_factory=list)
    probed: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        asked = {"alone": self.alone, "decoyed": self.decoyed, "fuzzed": self.fuzzed}
        asked["refused only"] = [one for one in self.fuzzed if not _beside(one, self.valid)] or self.fuzzed
        p99 = {name: _p99(found) for name, found in asked.items()}
        slow = sum(each > 0.1 for each in self.probed)
        slowest = {
            name: round(max(filter(math.isfinite, found), default=0.0), 4)
            for name, found in (("alone", self.probed_alone), ("fuzzed", self.probed))
        }
        return {
            "memory MiB": self.memory[-1],
            "p99 alone s": p99["alone"],
            "p99 fuzzed s": p99["fuzzed"],
            "p99 beside the decoy s": p99["decoyed"],
            "p99 later": f"{100 * (p99['fuzzed'] / p99['alone'] - 1):+.1f} %",
            "p99 later than beside the decoy": f"{100 * (p99['fuzzed'] / p99['decoyed'] - 1):+.1f} %",
            "p99 later, beside no valid fuzzed request": f"{100 * (p99['refused only'] / p99['alone'] - 1):+.1f} %",
            "of the normal load's": f"{len(asked['refused only'])} of {len(self.fuzzed)}",
            "slowest /health alone s": slowest["alone"],
            "slowest /health fuzzed s": slowest["fuzzed"],
            "/health above 100 ms, fuzzed": f"{slow} of {len(self.probed)}",
            "/health failed": sum(map(math.isinf, self.probed + self.probed_alone)),
        }

    def line(self, gone: float, answers: Counter[str]) -> str:
        shown = ", ".join(f"{name} {value}" for name, value in self.figures().items())
        return f"{gone / 60:.1f} min: {shown}, answers {sum(answers.values())}, 5xx {num_server_errors(answers)}"


def _beside(one: Asked, others: list[Asked]) -> bool:
    return any(other.began <= one.ended and one.began <= other.ended for other in others)


def _p99(found: list[Asked]) -> float:
    return round(float(np.quantile([one.seconds for one in found], 0.99)), 4)


class Decoy:
    """A server in a process of its own that answers 400 to everything; `port` is where."""

    port: int

    def __enter__(self) -> "Decoy":
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._process = context.Process(target=_answer_400, args=(theirs,), daemon=True)
        self._process.start()
        self.port = ours.recv()
        return self

    def __exit__(self, *given: object) -> None:
        self._process.terminate()
        self._process.join()


def _answer_400(port: Connection) -> None:
    os.nice(_NICE)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Refusing) as server:
        port.send(server.server_address[1])
        server.serve_forever()


class _Refusing(BaseHTTPRequestHandler):
    def handle_one_request(self) -> None:
        self.connection.recv(1 << 20)
        self.wfile.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        self.close_connection = True


@dataclass
class Aim:
    """What the fuzzers fuzz."""

    server: Server
    decoy: Decoy
    at_decoy: bool = False
    valid: list[Asked] = field(default_factory=list)
    """Requests for which the engine worked."""

    @property
    def port(self) -> int:
        return self.decoy.port if self.at_decoy else self.server.port


class Probe:
    """Asks for /health over one connection, in a process of its own."""

    def __init__(self, server: Server) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_probe, args=(server.port, theirs), daemon=True)

    def __enter__(self) -> "Probe":
        self._process.start()
        return self

    def __exit__(self, *given: object) -> None:
        self._ours.close()
        self._process.join()

    def seconds(self) -> list[float]:
        """Of each answer since the last call; infinite where there was none, or another one than 200."""
        self._ours.send(None)
        return self._ours.recv()


def _probe(port: int, asked: Connection) -> None:
    found: list[float] = []
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    while True:
        with contextlib.suppress(EOFError):
            if asked.poll(_PROBE_SECONDS):
                asked.recv()
                asked.send(found)
                found = []
            began = time.perf_counter()
            try:
                connection.request("GET", "/health")
                reply = connection.getresponse()
                reply.read()
                found.append(time.perf_counter() - began if reply.status == 200 else math.inf)
            except (OSError, http.client.HTTPException):
                connection.close()
                found.append(math.inf)
            continue
        return


class Pace:
    """Holds the fuzzers to `rate` requests a second together, pauses them while `quiet` is set; False at the end."""

    def __init__(self, rate: float, stop: threading.Event, quiet: threading.Event) -> None:
        self._gap, self._stop, self._quiet = 2 / rate, stop, quiet

    def __call__(self) -> bool:
        self._stop.wait(self._gap)
        while self._quiet.is_set() and not self._stop.is_set():
            self._stop.wait(0.05)
        return not self._stop.is_set()


class Normal:
    """The normal load: clients with consecutive requests, in a process of the pool."""

    def __init__(self, server: Server, clients: int, pool: ProcessPoolExecutor) -> None:
        self._url, self._key, self._clients = f"{server.url}/v1/completions", server.key, clients
        self._pool, self.failed = pool, 0

    def measure(self, seconds: float) -> list[Asked]:
        """Each request sent within `seconds`."""
        found, failed = self._pool.submit(_ask, self._url, self._key, self._clients, seconds).result()
        self.failed += failed
        return found


def _ask(url: str, key: str, clients: int, seconds: float) -> tuple[list[Asked], int]:
    """Requests that were answered, and the number of others."""
    found: list[Asked] = []
    failed: list[Exception] = []
    deadline = time.monotonic() + seconds

    def client(number: int) -> None:
        body = {"prompt": [3 + number] * 20, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        while True:  # At least once, even on a slow machine.
            began = time.monotonic()
            request = urllib.request.Request(url, json.dumps(body).encode(), headers)
            try:
                with urllib.request.urlopen(request, timeout=60) as reply:
                    reply.read()
                found.append(Asked(began, time.monotonic()))
            except (urllib.error.URLError, OSError) as error:
                failed.append(error)
            if time.monotonic() >= deadline:
                break

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, len(failed)


def _conforming(aim: Aim, pace: Callable[[], bool], begin: int, answers: Counter[str], findings: Counter[str]) -> None:
    """schemathesis on every operation in turn, until it is over."""
    os.nice(_NICE)
    headers = {"authorization": f"Bearer {aim.server.key}"}
    schema = schemathesis.openapi.from_url(f"{aim.server.url}/openapi.json", headers=headers)
    operations = [found.ok() for found in schema.get_all_operations()]
    for number, operation in _forever(operations):

        @seed(begin + number)
        @settings(
            max_examples=_BATCH,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def ask(case: Any) -> None:
            if not pace():
                return
            if isinstance(case.body, dict) and {"prompt", "messages"} & set(case.body):
                case.body["max_tokens"] = 2
                if isinstance(case.body.get("n"), int) and 2 < case.body["n"] <= MAX_CHOICES:
                    case.body["n"] = 2
            if aim.at_decoy:
                with contextlib.suppress(OSError):
                    case.call(base_url=f"http://127.0.0.1:{aim.decoy.port}", headers=headers, timeout=60)
                return
            began = time.monotonic()
            try:
                response = case.call(base_url=aim.server.url, headers=headers, timeout=60)
                answers[str(response.status_code)] += 1
                if response.status_code == 200 and case.operation.path in _WORK:
                    aim.valid.append(Asked(began, time.monotonic()))
                case.validate_response(response, checks=CHECKS)
            except FailureGroup as failure:
                findings.update(f"{case.operation.label}: {entry}"[:200] for entry in failure.exceptions)
            except OSError as error:
                findings[f"{case.operation.label}: {type(error).__name__}"] += 1

        ask()
        if not pace():
            return


def _forever(operations: list[Any]) -> Iterator[tuple[int, Any]]:
    number = 0
    while True:
        yield number, operations[number % len(operations)]
        number += 1


def _broken(aim: Aim, pace: Callable[[], bool], begin: int, answers: Counter[str], findings: Counter[str]) -> None:
    """Broken HTTP over raw sockets, until it is over."""
    os.nice(_NICE)
    draw = random.Random(begin)
    while pace():
        name, data = malformed(draw, aim.server.key)
        at_decoy = aim.at_decoy
        try:
            status = talk(aim.port, data, seconds=draw.uniform(0.05, 0.5))
        except (TimeoutError, ConnectionError):
            status = "raw: closed without an answer"
        if at_decoy:
            continue
        answers[status] += 1
        if status.startswith("5"):
            findings[f"raw {name}: {status}"] += 1


if __name__ == "__main__":
    main()
