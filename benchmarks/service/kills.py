"""Engines, workers and readers killed or stopped at random under load: the answers, the time to recovery, what is left.

    python -m benchmarks.service.kills [--plan one two reader] [--kills 30] [--minutes 30] [--stops 0.25] [--keep FILE]

Serves the demo model on one worker, on two (a pipeline), and on one whose reader processes are the target. Each plan
gets that many kills, or fewer where its minutes end first. Clients stream the same greedy answers repeatedly. At random
times a random process (the engine; the engine or a worker; a reader) gets SIGKILL, or SIGSTOP for a share of the kills.
Every answer must equal the undisturbed one, or be the documented error after its request's second crash; requests that
come during a restart wait for it, and one that is told 503 nevertheless is sent again and counted. Well again is the
first new token that the next processes make. What the server holds is noted every `--held` kills. At last the server
gets SIGTERM, and another one SIGKILL under load: no process, port, shared memory or file in the temporary directory may
be left. With `--keep` every tenth kill is written to a file, and a run that finds it goes on from there with another
server: 1,000 kills of each plan take several runs of `--kills 1000 --minutes 20 --keep kills.part.json`.
Writes records/kills.json.
"""

import argparse
import contextlib
import http.client
import json
import math
import os
import random
import signal
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lib.record import write_record
from benchmarks.service.serving import Server, descendants, served
from exeplan.planner.reports.tables import table

ONE = "model: demo\nschedule: {policy: orca, max_num_seqs: 8}\nplacement: [{devices: [0], layers: [0, 6]}]\n"
TWO = """model: demo
schedule: {policy: orca, max_num_seqs: 8, micro_batches: 2}
placement: [{devices: [0], layers: [0, 3]}, {devices: [1], layers: [3, 6]}]
"""
PLANS = {
    "one": (ONE, ("exeplan-engine",)),
    "two": (TWO, ("exeplan-engine", "exeplan-worker")),
    "reader": (ONE, ("exeplan-reader",)),
}
"""By name: the plan, and what is killed."""
WELL_SECONDS = 60.0
END_SECONDS = 30.0
AFTER_SECOND_CRASH = "died more than once while this request was running"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--kills", type=int, default=30, help="of each plan")
    parser.add_argument("--minutes", type=float, default=30.0, help="for each plan at most")
    parser.add_argument("--stops", type=float, default=0.25, help="share that gets SIGSTOP instead of SIGKILL")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held", type=int, default=100, metavar="KILLS", help="between two looks at what is held")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="where a run leaves off and the next one goes on")
    args = parser.parse_args()
    kept = Kept(args.keep)
    plans = []
    for name in args.plan:
        run = kept.runs.setdefault(name, Run())
        if run.num_kills < args.kills:
            _measure(name, run, kept, args)
        plans.append(run.figures(name))
        shown = {**plans[-1], "held": f"{run.held[0]}, at the end {run.held[-1]}"}
        print(table(("", ""), [[key, str(value)] for key, value in shown.items()]), flush=True)
    print(f"\nrecord: {write_record('kills', {'plans': plans})}")


@dataclass
class Run:
    """What the kills of one plan have shown so far, over one server or several."""

    answers: dict[str, int] = field(default_factory=dict)
    well: dict[str, list[float]] = field(default_factory=lambda: {"SIGKILL": [], "SIGSTOP": []})
    """Seconds, by signal."""
    held: list[dict[str, int]] = field(default_factory=list)
    """At the beginning of each server, every so many kills, and at its end."""
    left: dict[str, dict[str, int]] = field(default_factory=dict)
    """After each way to end, over all servers."""
    statuses: list[int] = field(default_factory=list)

    @property
    def num_kills(self) -> int:
        return sum(map(len, self.well.values()))

    def add_left(self, end: str, found: dict[str, int]) -> None:
        self.left[end] = dict(Counter(found) + Counter(self.left.get(end, {})) | {n: 0 for n in found if not found[n]})

    def figures(self, name: str) -> dict[str, Any]:
        return {
            "plan": name,
            "kills": self.num_kills,
            "answers": dict(sorted(self.answers.items())),
            **{f"well again after {kind}, s": spread(found) for kind, found in self.well.items()},
            "held": self.held,
            "exit statuses": self.statuses,
            **{f"left after {end}": found for end, found in self.left.items()},
        }


class Kept:
    """The runs by plan, and the file that has them."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        found = json.loads(path.read_text()) if path and path.exists() else {}
        self.runs = {name: Run(**fields) for name, fields in found.items()}

    def write(self) -> None:
        if self._path:
            beside = self._path.with_suffix(".new")
            beside.write_text(json.dumps({name: asdict(run) for name, run in self.runs.items()}))
            beside.replace(self._path)


def _measure(name: str, run: Run, kept: Kept, args: argparse.Namespace) -> None:
    body, victims = PLANS[name]
    shared = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as folder:
        plan, temporary = Path(folder) / "plan.yaml", Path(folder) / "tmp"
        plan.write_text(f"{body}kv_cache_tokens: 8192\n")
        temporary.mkdir()
        environment = {"TMPDIR": str(temporary)}
        with served(plan, "--weights", "dummy", "--replan", "off", environment=environment) as server:
            _storm(server, name, victims, run, kept, args)
            family = [server.process.pid, *descendants(server.process.pid)]
        run.statuses.append(server.process.returncode)
        run.add_left("SIGTERM", what_is_left(family, server.port, temporary, shared))
        with served(plan, "--weights", "dummy", "--replan", "off", environment=environment, killed=True) as server:
            load = Load(server, bodies_of(random.Random(args.seed), args.clients))
            with load.clients(args.clients, wanted=None):
                family = [server.process.pid, *descendants(server.process.pid)]
                server.process.kill()
                server.process.wait()
        run.add_left("SIGKILL", what_is_left(family, server.port, temporary, shared))
        kept.write()


@dataclass
class Load:
    """Clients that stream, and what came of it."""

    server: Server
    bodies: list[dict[str, Any]]
    outcomes: Counter[str] = field(default_factory=Counter)
    last: tuple[float, float] = (0.0, 0.0)
    """When the latest token came, and when its request was sent."""
    stop: threading.Event = field(default_factory=threading.Event)

    def answer(self, body: dict[str, Any]) -> tuple[str, list[str]]:
        """How a request ended, and its tokens."""
        tokens: list[str] = []
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=120)
        with contextlib.closing(connection):
            sent = time.perf_counter()
            fields = {**body, "temperature": 0, "ignore_eos": True, "logprobs": 0, "stream": True}
            connection.request("POST", "/v1/completions", json.dumps(fields))
            response = connection.getresponse()
            if response.status != 200:
                return _ended(response.status, response.read().decode()), tokens
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    return _ended(0, chunk["error"]["message"]), tokens
                tokens += chunk["choices"][0]["logprobs"]["tokens"]
                self.last = (time.perf_counter(), sent)
        return "ended", tokens

    @contextlib.contextmanager
    def clients(self, count: int, wanted: list[list[str]] | None) -> Iterator[None]:
        """Each asks one body after another; the answers are compared where `wanted` has them."""

        def client(number: int) -> None:
            turn = number
            while not self.stop.is_set():
                index = turn % len(self.bodies)
                try:
                    outcome, tokens = self.answer(self.bodies[index])
                except OSError as error:
                    if wanted is None:  # The server is to go.
                        return
                    outcome, tokens = f"unexpected {type(error).__name__}", []
                if wanted and outcome == "ended":
                    outcome = "as undisturbed" if tokens == wanted[index] else "other tokens"
                self.outcomes[outcome] += 1
                turn += count
                if outcome.startswith("not let in"):
                    time.sleep(0.05)

        threads = [threading.Thread(target=client, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        began = self.last
        await_claim(lambda: self.last != began, WELL_SECONDS, "no token came")
        try:
            yield
        finally:
            self.stop.set()
            for thread in threads:
                thread.join()


def _ended(status: int, text: str) -> str:
    if AFTER_SECOND_CRASH in text:
        return "clear error after a second crash"
    return "not let in (503)" if status == 503 else f"unexpected {status}: {text[:80]}"


def bodies_of(draw: random.Random, clients: int) -> list[dict[str, Any]]:
    return [
        {"prompt": [draw.randrange(200) for _ in range(draw.randint(1, 60))], "max_tokens": draw.randint(5, 120)}
        for _ in range(3 * clients)
    ]


def _storm(server: Server, name: str, victims: tuple[str, ...], run: Run, kept: Kept, args: argparse.Namespace) -> None:
    """Kills until there are as many as asked for, or the time is over; everything is noted in `run`."""
    draw = random.Random(f"{args.seed} {run.num_kills}")
    load = Load(server, bodies_of(random.Random(args.seed), args.clients))
    wanted = [load.answer(body)[1] for body in load.bodies]
    told, begun, began = Counter(run.answers), run.num_kills, time.monotonic()
    run.held.append({"kills": begun, **server.held()})
    with load.clients(args.clients, wanted):
        while run.num_kills < args.kills and time.monotonic() - began < 60 * args.minutes:
            time.sleep(draw.uniform(0.3, 3.0))
            kind = "SIGSTOP" if draw.random() < args.stops else "SIGKILL"
            run.well[kind].append(_killed(server, load, victims, draw, kind))
            if run.num_kills % args.held == 0:
                run.held.append({"kills": run.num_kills, **server.held()})
            if run.num_kills % 10 == 0 or run.num_kills == args.kills:
                run.answers = dict(told + load.outcomes)
                kept.write()
                gone = time.monotonic() - began
                rest = gone / (run.num_kills - begun) * (args.kills - run.num_kills)
                every = spread(run.well["SIGKILL"] + run.well["SIGSTOP"])
                print(
                    f"{name}: {run.num_kills} of {args.kills}, {gone / 60:.0f} min, {rest / 60:.0f} min more; "
                    f"well again {every}; {run.answers}",
                    flush=True,
                )
    run.answers = dict(told + load.outcomes)
    await_claim(server.idle, WELL_SECONDS, "requests or blocks are left")
    run.held.append({"kills": run.num_kills, **server.held()})


def _killed(server: Server, load: Load, victims: tuple[str, ...], draw: random.Random, kind: str) -> float:
    """Seconds from the signal to the first token of the processes that came next; of a new request, for a reader."""
    found = family_of(server, victims)
    victim = draw.choice(sorted(found))
    began = time.perf_counter()
    os.kill(victim, getattr(signal, kind))

    def replaced() -> bool:
        now = family_of(server, victims)
        return victim not in now and len(now) == len(found)

    await_claim(replaced, WELL_SECONDS, f"process {victim} was not replaced after {kind}")
    since, requests_too = time.perf_counter(), victims == ("exeplan-reader",)
    await_claim(
        lambda: load.last[0] > since and (not requests_too or load.last[1] > began),
        WELL_SECONDS,
        f"no token came after {kind}",
    )
    return load.last[0] - began


def family_of(server: Server, names: tuple[str, ...]) -> set[int]:
    """The processes of a server that live and have one of these names."""
    return {pid for pid in descendants(server.process.pid) if name_of(pid) in names}


def name_of(pid: int) -> str:
    """As the system shows it; none for one that has ended."""
    with contextlib.suppress(OSError):
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def what_is_left(family: list[int], port: int, temporary: Path, shared: set[str]) -> dict[str, int]:
    """What there is of a server that has ended, a while after its end where there is anything."""
    with contextlib.suppress(SystemExit):
        await_claim(lambda: not any(map(name_of, family)), END_SECONDS, "processes are left")
    with socket.socket() as probe:
        return {
            "processes": sum(bool(name_of(pid)) for pid in family),
            "ports": int(probe.connect_ex(("127.0.0.1", port)) == 0),
            "files in the temporary directory": len(list(temporary.iterdir())),
            "shared-memory files": len(set(os.listdir("/dev/shm")) - shared - _mapped()),
        }


def _mapped() -> set[str]:
    """Files in shared memory that some process has mapped: those of other programs on this machine."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            found |= {Path(line.split()[-1]).name for line in maps.read_text().splitlines() if "/dev/shm/" in line}
    return found


def spread(seconds: list[float]) -> dict[str, float]:
    """Median and worst, and of a hundred or more the 99th percentile; nothing of nothing."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    found = {"median": median(ordered), "worst": ordered[-1]}
    if len(ordered) >= 100:
        found["p99"] = ordered[math.ceil(0.99 * len(ordered)) - 1]
    return {name: round(value, 3) for name, value in found.items()}


def await_claim(claim: Any, seconds: float, otherwise: str) -> None:
    deadline = time.perf_counter() + seconds
    while not claim():
        if time.perf_counter() > deadline:
            raise SystemExit(f"{otherwise} within {seconds:g} s")
        time.sleep(0.005)


if __name__ == "__main__":
    main()
