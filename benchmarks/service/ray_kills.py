"""Workers, engines and nodes of a Ray cluster killed at random under load: the answers, time to capacity, what is left.

    python -m benchmarks.service.ray_kills [--kills 100] [--minutes 60] [--back 5] [--replans 10]

Serves two replicas of the demo model with `--ray` on a cluster of a head, which takes no worker, and two nodes with
room for one worker each; all are on this machine, each with a raylet of its own. Clients stream the same greedy answers
repeatedly. At random times a worker, an engine, or a node with all its processes gets SIGKILL; a lost node is followed
by another one after `--back` seconds. Every answer must equal the undisturbed one, or be the documented error after its
request's second crash. Three times are taken of each kill: until the log says something (known), until a request sent
after the kill has its first token (answering), and until as many engines and workers run as before (capacity). At last
the server gets SIGTERM: no process of it, no worker, port or file in the temporary directory may be left.

Then a pipeline over both nodes, with `--replan auto`, loses one of them `--replans` times, and there is no other: times
are until it is known, until a later request is answered by the node left, and, from when another node is added, until
the pipeline is back on its first plan. Its answers are judged in the same way.
Writes records/ray-kills.json.

Not here: a host that is cut off while its processes live (`tests/runner/distributed/ray_hosts.sh`).
"""

import argparse
import contextlib
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from os import environ, kill, listdir
from pathlib import Path
from typing import Any

import exeplan
from benchmarks.lib.record import write_record
from benchmarks.service.kills import (
    ONE,
    TWO,
    WELL_SECONDS,
    Load,
    await_claim,
    bodies_of,
    family_of,
    spread,
    what_is_left,
)
from benchmarks.service.kills import name_of as process_name
from benchmarks.service.serving import Server, descendants, served
from exeplan.planner.reports.tables import table

KINDS = ("worker", "engine", "node")
TIMES = ("known", "answering", "capacity")
NUM_REPLICAS = 2
REPLAN_TIMES = ("known", "answering", "first plan")
_DWELL_SECONDS = 5
_PLANNED = "workload: 'fixed:in=30;out=60'\nbound: {seconds: 60}\n"
_OPTIONS = {"object_store_memory": 80 << 20, "include_dashboard": False}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=60.0, help="at most")
    parser.add_argument("--back", type=float, default=5.0, help="seconds after which a lost node is replaced")
    parser.add_argument("--replans", type=int, default=10, help="losses of a node that is half of a pipeline")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with ray_nodes(sizes=[1] * NUM_REPLICAS) as nodes, tempfile.TemporaryDirectory() as folder:
        found = _measure(nodes, Path(folder), args) | {"fewer devices": _measure_replans(nodes, Path(folder), args)}
    times = found["seconds"] | {"half of a pipeline": found["fewer devices"]["seconds"]}
    rows = [[kind, name, str(one)] for kind, each in times.items() for name, one in each.items()]
    print(table(("killed", "until", "seconds"), rows))
    print(*(f"{name}: {value}" for name, value in found.items() if name != "seconds"), sep="\n", flush=True)
    print(f"\nrecord: {write_record('ray-kills', found)}")


class Nodes:
    """The cluster and its nodes with room for a worker."""

    def __init__(self, cluster: Any, folder: str, sizes: Sequence[int]) -> None:
        self._cluster = cluster
        cluster.add_node(num_cpus=0, temp_dir=folder, **_OPTIONS)
        self._nodes = [cluster.add_node(num_cpus=size, **_OPTIONS) for size in sizes]

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def lose(self, draw: random.Random) -> None:
        self._cluster.remove_node(self._nodes.pop(draw.randrange(len(self._nodes))), allow_graceful=False)

    def add(self) -> None:
        self._nodes.append(self._cluster.add_node(num_cpus=1, **_OPTIONS))

    def workers(self) -> set[int]:
        """The processes that compute: those that an agent has forked."""
        raylets = [one.process.pid for node in self._nodes for one in node.all_processes.get("raylet", ())]
        agents = [pid for raylet in raylets for pid in descendants(raylet) if "NodeAgent" in process_name(pid)]
        return {pid for agent in agents for pid in descendants(agent) if process_name(pid) == "exeplan-worker"}


@contextlib.contextmanager
def ray_nodes(*, sizes: Sequence[int]) -> Iterator[Nodes]:
    """A cluster that ends with the context. Sizes are the CPUs of nodes that are not the head."""
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ray-", dir=tempfile.gettempdir())  # Sockets lie in it, whose paths must be short.
    environ["RAY_TMPDIR"] = folder  # Where Ray writes its latest cluster's address, in a folder that must be there.
    Path(folder, "ray").mkdir()
    cluster = Cluster()
    try:
        yield Nodes(cluster, folder, sizes)
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _measure(nodes: Nodes, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    plan, temporary, log = folder / "plan.yaml", folder / "tmp", folder / "log"
    plan.write_text(f"{ONE}kv_cache_tokens: 8192\nreplicas: {list(range(NUM_REPLICAS))}\n")
    temporary.mkdir()
    draw, environment, shared = random.Random(args.seed), {"TMPDIR": str(temporary)}, set(listdir("/dev/shm"))
    times: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in TIMES} for kind in KINDS}
    options = ("--weights", "dummy", "--replan", "off", "--ray", nodes.address)
    with served(plan, *options, environment=environment, log=log) as server:
        load = Load(server, bodies_of(random.Random(args.seed), args.clients))
        wanted, began = [load.answer(body)[1] for body in load.bodies], time.monotonic()
        with load.clients(args.clients, wanted):
            for number in range(args.kills):
                if time.monotonic() - began > 60 * args.minutes:
                    break
                time.sleep(draw.uniform(0.3, 3.0))
                kind = draw.choice(KINDS)
                taken = _killed(kind, nodes, server, load, log, draw, args.back)
                for name, seconds in zip(TIMES, taken, strict=True):
                    times[kind][name].append(seconds)
                shown = ", ".join(f"{name} {one:.2f} s" for name, one in zip(TIMES, taken, strict=True))
                print(f"{number + 1}: {kind}: {shown}; {dict(load.outcomes)}", flush=True)
        await_claim(server.idle, WELL_SECONDS, "requests or blocks are left")
        family = [server.process.pid, *descendants(server.process.pid), *nodes.workers()]
    return {
        "answers": dict(sorted(load.outcomes.items())),
        "kills": {kind: len(found["known"]) for kind, found in times.items()},
        "seconds": {kind: {name: spread(found) for name, found in each.items()} for kind, each in times.items()},
        "exit status": server.process.returncode,
        "left after SIGTERM": what_is_left(family, server.port, temporary, shared | _of_ray()),
    }


def _measure_replans(nodes: Nodes, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """A pipeline whose second node is lost and comes back, so many times."""
    plan, profile, log = folder / "pipeline.yaml", folder / "profile.json", folder / "pipeline.log"
    exeplan.save_profile(exeplan.datasheet_profile("demo", "cpu-generic", dtype="float32"), profile)
    plan.write_text(f"{TWO}kv_cache_tokens: 8192\nprofile: {profile}\n{_PLANNED}")
    draw = random.Random(args.seed)
    times: dict[str, list[float]] = {name: [] for name in REPLAN_TIMES}
    options = ("--weights", "dummy", "--replan", "auto", "--replan-dwell", f"{_DWELL_SECONDS}s", "--ray", nodes.address)
    with served(plan, *options, log=log) as server:
        load = Load(server, bodies_of(random.Random(args.seed), args.clients))
        wanted = [load.answer(body)[1] for body in load.bodies]
        with load.clients(args.clients, wanted):
            for number in range(args.replans):
                time.sleep(draw.uniform(0.3, 3.0))
                taken = _replanned(nodes, server, load, log, draw)
                for name, seconds in zip(REPLAN_TIMES, taken, strict=True):
                    times[name].append(seconds)
                shown = ", ".join(f"{name} {one:.2f} s" for name, one in zip(REPLAN_TIMES, taken, strict=True))
                print(f"{number + 1}: half of a pipeline: {shown}; {dict(load.outcomes)}", flush=True)
        await_claim(server.idle, WELL_SECONDS, "requests or blocks are left")
    return {
        "answers": dict(sorted(load.outcomes.items())),
        "losses": args.replans,
        "seconds": {name: spread(each) for name, each in times.items()},
        "exit status": server.process.returncode,
    }


def _replanned(nodes: Nodes, server: Server, load: Load, log: Path, draw: random.Random) -> tuple[float, float, float]:
    """Seconds from the loss until it is known, until a later request is answered; from the return to the first plan."""
    said, began = log.stat().st_size, time.perf_counter()
    nodes.lose(draw)

    def after(claim: Callable[[], bool], otherwise: str) -> float:
        await_claim(claim, WELL_SECONDS, f"{otherwise} after the loss of a node")
        return time.perf_counter() - began

    known = after(lambda: log.stat().st_size > said, "nothing was logged")
    after(lambda: server.metric("replan_reduced_replicas") == 1, "no plan for the node left was adopted")
    answering = after(lambda: load.last[1] > began and load.last[0] > began, "no request was answered")
    began = time.perf_counter()
    nodes.add()
    back = after(lambda: server.metric("replan_reduced_replicas") == 0, "the first plan was not adopted again")
    return known, answering, back


def _killed(
    kind: str, nodes: Nodes, server: Server, load: Load, log: Path, draw: random.Random, back: float
) -> tuple[float, float, float]:
    """Seconds from the kill until it is known, until a later request is answered, until capacity is as planned."""
    engines, workers, said = family_of(server, ("exeplan-engine",)), nodes.workers(), log.stat().st_size
    assert len(engines) == len(workers) == NUM_REPLICAS, (engines, workers)
    began = time.perf_counter()
    if kind == "node":
        nodes.lose(draw)
    else:
        kill(victim := draw.choice(sorted(engines if kind == "engine" else workers)), signal.SIGKILL)

    def after(claim: Callable[[], bool], otherwise: str) -> float:
        await_claim(claim, WELL_SECONDS, f"{otherwise} after the kill of a {kind}")
        return time.perf_counter() - began

    known = after(lambda: log.stat().st_size > said, "nothing was logged")
    answering = after(lambda: load.last[1] > began and load.last[0] > began, "no request was answered")
    if kind == "node":
        time.sleep(max(back - (time.perf_counter() - began), 0.0))
        nodes.add()

    def whole() -> bool:
        now, alive = family_of(server, ("exeplan-engine",)), nodes.workers()
        changed = alive != workers if kind == "node" else victim not in now | alive
        return changed and len(now) == len(alive) == NUM_REPLICAS

    return known, answering, after(whole, "engines and workers were not all back")


def _of_ray() -> set[str]:
    """Files in shared memory of the cluster, which goes on."""
    return {name for name in listdir("/dev/shm") if name.startswith(("plasma", "ray"))}


if __name__ == "__main__":
    main()
