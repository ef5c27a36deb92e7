"""A plan on the nodes of a Ray cluster gives the tokens of one host, and goes on when a node is lost.

The nodes are all on this machine, each with its own raylet (`ray_cluster.py`): between them there is no shared memory.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from exeplan.core.profile import Profile, save_profile

from ..processes import PATIENCE, descendants, eventually, is_alive

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'exeplan[ray]'")
CLUSTER = Path(__file__).with_name("ray_cluster.py")
NUM_REQUESTS, NUM_TOKENS = 6, 150
BEGUN_SECONDS = 0.2
"""Requests have begun by then, and have not ended: a token takes some milliseconds."""
SINGLE = "schedule: {policy: orca, max_num_seqs: 4, micro_batches: 1}\nplacement: [{devices: [0], layers: [0, 6]}]\n"
PLANS = {
    "pp": "schedule: {policy: orca, max_num_seqs: 4, micro_batches: 2}\n"
    "placement: [{devices: [0], layers: [0, 2]}, {devices: [1], layers: [2, 6]}]\n",
    "tp": "schedule: {policy: orca, max_num_seqs: 4, micro_batches: 1}\n"
    "placement: [{devices: [0, 1], layers: [0, 6]}]\n",
    "waa": "schedule: {policy: waa-m, decode_batch: 4, prefill_batch: 1}\n"
    "placement: [{devices: [0], layers: [0, 6], phase: prefill}, {devices: [1], layers: [0, 6], phase: decode}]\n",
    "replicas": SINGLE + "replicas: [0, 1]\n",
}
SLOW = (
    "estimate: {throughput: 0.6, token_throughput: 90, ttft: 1, tpot: 0.01, latency: 2,\n"
    "  latency_p50: 2, latency_p99: 2, kv_tokens: 8192, memory_bytes_per_gpu: 1000000}\n"
)


class Cluster:
    """Its nodes have so many CPUs each, and a worker takes one."""

    def __init__(self, *sizes: int, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, CLUSTER, *map(str, sizes)],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._num_nodes, self._size = len(sizes), sizes[-1]
        self.address = self._read()

    def obey(self, command: str) -> None:
        """`lose N` or `add CPUS`, without waiting until it is done."""
        assert self._process.stdin
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()

    def lose(self) -> None:
        """Kills the processes of the node that was added last."""
        self.obey(f"lose {self._num_nodes - 1}")

    def add(self) -> None:
        """Another node of the same size."""
        self.obey(f"add {self._size}")
        self._num_nodes += 1

    def agents(self) -> list[int]:
        return self.processes("NodeAgent")

    def processes(self, name: str) -> list[int]:
        """Whose names contain this."""
        found = []
        for pid in descendants(self._process.pid):
            with contextlib.suppress(OSError):  # It has ended meanwhile.
                if name in Path(f"/proc/{pid}/comm").read_text():
                    found.append(pid)
        return found

    def _read(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, "the cluster did not start"
        return line.strip()

    def close(self) -> None:
        self._process.communicate(timeout=PATIENCE)


class Server:
    """`exeplan serve` of the demo model with random weights."""

    def __init__(self, folder: Path, plan: str, *options: str, environment: Mapping[str, str]) -> None:
        folder.mkdir(exist_ok=True)
        file = folder / "plan.yaml"
        file.write_text(f"model: demo\nkv_cache_tokens: 8192\n{plan}")
        self._log = folder / "log"
        with self._log.open("w") as log:
            command = [
                sys.executable,
                "-m",
                "exeplan",
                "serve",
                str(file),
                "--weights",
                "dummy",
                "--port",
                "0",
                *options,
            ]
            variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
            self.process = subprocess.Popen(command, env=variables, stdout=log, stderr=log)
        eventually(lambda: "\nserving" in self.log or self.process.poll() is not None)
        self.url = self._url()

    def _url(self) -> str:
        found = re.search(r"^serving .* at (http\S+)$", self.log, re.MULTILINE)
        assert found, self.log
        return found[1]

    @property
    def log(self) -> str:
        return f"\n{self._log.read_text()}"

    def tokens(self, meanwhile: Callable[[], None] = lambda: None) -> list[list[str]]:
        """What it answers to several requests at once; `meanwhile` is called once they have begun."""
        with ThreadPoolExecutor(NUM_REQUESTS) as threads:
            answers = threads.map(self._complete, range(NUM_REQUESTS))
            time.sleep(BEGUN_SECONDS)
            meanwhile()
            return list(answers)

    def _complete(self, index: int) -> list[str]:
        prompt = [(7 * index + 31 * n * n) % 2000 for n in range(5 + 9 * index)]
        body = {"prompt": prompt, "max_tokens": NUM_TOKENS + index, "temperature": 0, "ignore_eos": True, "logprobs": 0}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
            return json.load(reply)["choices"][0]["logprobs"]["tokens"]

    def get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=PATIENCE) as reply:
            return json.load(reply)

    def plan(self) -> dict[str, Any]:
        """That it runs."""
        return self.get("/plan")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)


@contextlib.contextmanager
def serving(
    folder: Path, plan: str, *options: str, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Server]:
    server = Server(folder, plan, *options, environment=environment)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


@contextlib.contextmanager
def nodes(*sizes: int, environment: Mapping[str, str] = MappingProxyType({})) -> Iterator[Cluster]:
    cluster = Cluster(*sizes, environment=environment)
    try:
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The tokens of one host without Ray."""
    with serving(tmp_path_factory.mktemp("single"), SINGLE) as server:
        return server.tokens()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Of two nodes with room for one worker each, so that two workers are never on one."""
    with nodes(1, 1) as cluster:
        yield cluster


@pytest.mark.parametrize("name", PLANS)
def test_two_nodes_give_the_tokens_of_one_host(
    name: str, tmp_path: Path, cluster: Cluster, expected: list[list[str]]
) -> None:
    with serving(tmp_path, PLANS[name], "--ray", cluster.address) as server:
        assert server.tokens() == expected
        agents = cluster.agents()
        assert len(agents) == 2
        assert server.stop() == 0
    eventually(lambda: not any(map(is_alive, agents)))


def refusal(folder: Path, plan: str, address: str) -> str:
    """The sentence with which it ends."""
    file = folder / "plan.yaml"
    file.write_text(f"model: demo\nkv_cache_tokens: 8192\n{plan}")
    command = [sys.executable, "-m", "exeplan", "serve", file, "--weights", "dummy", "--port", "0", "--ray", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr.splitlines()[-1]


def test_a_plan_with_more_threads_than_a_node_has_cores_is_refused_and_the_one_before_goes_on(
    tmp_path: Path, cluster: Cluster, expected: list[list[str]]
) -> None:
    with serving(tmp_path, SINGLE, "--ray", cluster.address) as server:
        with (tmp_path / "plan.yaml").open("a") as plan:
            plan.write("num_threads: 2\n")
        server.process.send_signal(signal.SIGHUP)
        sentence = "the plan needs 1 x 2 CPU, the Ray cluster's nodes have room for 0 of its 1 workers"
        eventually(lambda: sentence in server.log)
        assert server.tokens() == expected
        assert server.stop() == 0


def test_a_plan_that_the_cluster_will_never_have_room_for_is_refused(tmp_path: Path, cluster: Cluster) -> None:
    layers = ", ".join(f"{{devices: [{stage}], layers: [{stage}, {stage + 1}]}}" for stage in range(6))
    plan = f"schedule: {{policy: orca, max_num_seqs: 6, micro_batches: 6}}\nplacement: [{layers}]\n"
    assert refusal(tmp_path, plan, cluster.address) == (
        "exeplan serve: the plan needs 6 x 1 CPU, the Ray cluster's nodes have room for 2 of its 6 workers: "
        "1 CPU; 1 CPU"
    )


@pytest.mark.parametrize("name", ["tp", "pp"])
def test_a_lost_node_is_noticed_and_requests_go_on_from_their_tokens_on_another(
    name: str, tmp_path: Path, cluster: Cluster, expected: list[list[str]]
) -> None:
    def lose_one() -> None:
        cluster.lose()
        eventually(lambda: "starting all workers again" in server.log)
        cluster.add()

    with serving(tmp_path, PLANS[name], "--ray", cluster.address) as server:
        assert server.tokens(lose_one) == expected
        assert server.log.count("workers on ") == 2
        assert server.stop() == 0
    eventually(lambda: not cluster.agents())


def test_requests_of_a_replica_that_has_no_room_any_more_go_on_on_another(
    tmp_path: Path, cluster: Cluster, expected: list[list[str]]
) -> None:
    with serving(tmp_path, PLANS["replicas"], "--ray", cluster.address) as server:
        assert server.tokens(cluster.lose) == expected
        assert "requests of a paused replica go on on others" in server.log
        assert server.log.count("workers on ") == 2
        cluster.add()
        eventually(lambda: server.log.count("workers on ") == 3)
        assert server.tokens() == expected
        assert server.stop() == 0
    eventually(lambda: not cluster.agents())


PLANNED = "profile: p.json\nworkload: 'fixed:in=40;out=90'\nbound: {seconds: 20, about: p99-length}\n"
AUTO = ("--replan", "auto", "--replan-dwell", "1s")


def test_a_pipeline_that_lost_a_node_goes_on_on_the_other_and_back_when_the_node_is_there_again(
    tmp_path: Path, cluster: Cluster, expected: list[list[str]], profile: Profile
) -> None:
    save_profile(profile, tmp_path / "p.json")
    with serving(tmp_path, PLANS["pp"] + PLANNED, "--ray", cluster.address, *AUTO) as server:
        assert server.tokens(cluster.lose) == expected
        assert len(server.plan()["placement"]) == 1
        assert "1 of 2 devices are left to replica 0" in server.get("/ready")["devices"]
        assert len(cluster.agents()) == 1
        assert server.tokens(cluster.add) == expected
        eventually(lambda: "the devices of replica 0 are back" in server.log)
        eventually(lambda: len(server.plan()["placement"]) == 2)
        assert server.get("/ready") == {"status": "ok"}
        assert server.tokens() == expected
        assert len(cluster.agents()) == 2
        assert server.stop() == 0
    eventually(lambda: not cluster.agents())


def test_without_the_head_node_requests_are_answered_until_rays_patience_ends_and_the_server_with_it(
    tmp_path: Path, expected: list[list[str]]
) -> None:
    patience = {"RAY_gcs_rpc_server_reconnect_timeout_s": "30"}
    with (
        nodes(1, 1, environment=patience) as cluster,
        serving(tmp_path, PLANS["pp"], "--ray", cluster.address, environment=patience) as server,
    ):
        assert server.tokens(lambda: cluster.obey("behead 0")) == expected
        assert server.tokens() == expected
        assert server.process.wait(PATIENCE) == 1
        eventually(lambda: not cluster.agents())


def test_two_servers_share_a_cluster(tmp_path: Path, cluster: Cluster, expected: list[list[str]]) -> None:
    with serving(tmp_path / "1", SINGLE, "--ray", cluster.address) as first:
        with serving(tmp_path / "2", SINGLE, "--ray", cluster.address) as second:
            assert first.tokens() == second.tokens() == expected
            assert second.stop() == 0
        assert first.tokens() == expected
        assert first.stop() == 0
    eventually(lambda: not cluster.agents())


def test_replicas_start_on_further_nodes_with_the_load_and_leave_them_after_it(
    tmp_path: Path, cluster: Cluster, expected: list[list[str]]
) -> None:
    """The plan says that a replica serves so little that a few rounds of requests need two, for a minute at most."""
    with serving(tmp_path, SINGLE + SLOW, "--ray", cluster.address, "--replicas", "1:2") as server:
        assert len(cluster.agents()) == 1
        for _ in range(3):
            assert server.tokens() == expected
        eventually(lambda: "replica 1 serves after" in server.log)
        assert len(cluster.agents()) == 2
        assert server.tokens() == expected
        eventually(lambda: " has ended" in server.log)
        eventually(lambda: len(cluster.agents()) == 1)
        assert server.tokens() == expected
        assert server.stop() == 0
    eventually(lambda: not cluster.agents())


def test_front_ends_on_two_nodes_give_the_tokens_of_one_host_and_one_that_is_lost_is_placed_again(
    tmp_path: Path, cluster: Cluster, expected: list[list[str]]
) -> None:
    def others() -> list[str]:
        return re.findall(r"front end 1 on \S+ answers at (\S+)", server.log)

    with serving(tmp_path, PLANS["replicas"], "--ray", cluster.address, "--front-ends", "2") as server:
        eventually(lambda: len(others()) == 1)
        assert server.tokens() == expected
        (lost,) = cluster.processes("exeplan-front")
        server.url = others()[0]
        assert server.tokens() == expected
        os.kill(lost, signal.SIGKILL)
        eventually(lambda: len(others()) == 2)
        server.url = others()[1]
        assert server.tokens() == expected
        assert len(server.get("/replicas")["replicas"]) == 2
        assert server.stop() == 0
    eventually(lambda: not cluster.processes("exeplan-front"))
    eventually(lambda: not cluster.agents())


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("127.0.0.1:9", "no Ray cluster answers at 127.0.0.1:9"),
        ("ray://127.0.0.1:10001", "--ray must be HOST:PORT of a Ray cluster, or auto for this host's, found 'ray://"),
        ("head", "--ray must be HOST:PORT of a Ray cluster, or auto for this host's, found 'head'"),
    ],
)
def test_an_address_without_a_cluster_is_refused(tmp_path: Path, address: str, sentence: str) -> None:
    assert refusal(tmp_path, SINGLE, address).startswith(f"exeplan serve: {sentence}")
