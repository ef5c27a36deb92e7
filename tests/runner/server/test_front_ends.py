"""Front ends on several hosts are one service: the same tokens, queue, limits and drain, whichever of them is asked.

The hosts are processes here (`local_placer.py`); on Ray's nodes they are in `tests/runner/distributed/test_ray.py`.
"""

import contextlib
import http.client
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from exeplan.errors import InputError
from exeplan.runner.server.front_ends.process import host_here
from exeplan.runner.server.options import ServeOptions

from ..processes import descendants, eventually, is_alive
from .conftest import KEY, Running, is_idle
from .test_lifecycle import request, streaming

ONE_AT_A_TIME = "policy: orca, max_num_seqs: 1"
SHORT = {"prompt": "the quick", "max_tokens": 20, "temperature": 0, "ignore_eos": True, "logprobs": 0}
LONG = 300


@dataclass(frozen=True)
class Service:
    """The front end on the replicas' host, and the other one."""

    owner: Running
    log: Path

    @property
    def urls(self) -> list[str]:
        return re.findall(r"front end 1 on \S+ answers at (\S+)", self.log.read_text())

    @property
    def other(self) -> Running:
        """The one that was placed last."""
        return replace(self.owner, url=self.urls[-1])

    @property
    def pids(self) -> list[int]:
        """Of front ends on other hosts."""
        found = descendants(self.owner.process.pid)
        return [pid for pid in found if Path(f"/proc/{pid}/comm").read_text().strip() == "exeplan-front"]


@contextlib.contextmanager
def serving(
    launch: Callable[..., Any], folder: Path, schedule: str = ONE_AT_A_TIME, **options: Any
) -> Iterator[Service]:
    log = folder / "log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLACER_FOR_TESTS", str(Path(__file__).parent))
        patch.setenv("PLACER_REFUSES_WHILE", str(folder / "no cluster"))
        given = {"replicas": (0, 1), "replan": "off", "ray": "auto", "front_ends": 2, **options}
        with launch(schedule, log=log, **given) as owner:
            service = Service(owner, log)
            eventually(lambda: bool(service.urls))
            eventually(lambda: service.other.call("/ready").status == 200)
            yield service


@pytest.fixture(scope="module")
def both(launch: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(launch, tmp_path_factory.mktemp("both"), api_key=KEY, max_queue=2) as service:
        yield service


def test_both_give_the_same_tokens_whole_and_streamed(both: Service) -> None:
    answers = [json.loads(one.complete(SHORT).text)["choices"] for one in (both.owner, both.other)]
    assert answers[0] == answers[1]
    streams = [one.complete({**SHORT, "stream": True}).text.split("data: ") for one in (both.owner, both.other)]
    texts = [[json.loads(line)["choices"][0]["text"] for line in lines[1:-1]] for lines in streams]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 20


def test_a_request_that_is_wrong_is_refused_alike(both: Service) -> None:
    wrong = {**SHORT, "max_tokens": 10**6}
    refusals = [(one.complete(wrong).status, one.complete(wrong).error) for one in (both.owner, both.other)]
    assert refusals[0] == refusals[1]
    assert refusals[0][0] == 400
    assert [one.call("/v1/models", authorization="").status for one in (both.owner, both.other)] == [401, 401]


def test_the_queue_is_one(both: Service) -> None:
    with contextlib.ExitStack() as streams:
        for one in (both.owner, both.other):  # A place on each replica.
            streams.enter_context(streaming(one, max_tokens=3000))
        for one in (both.owner, both.other):
            streams.enter_context(request(one, max_tokens=3000))
        eventually(lambda: both.owner.metric("num_requests_waiting") == 2)
        for one in (both.owner, both.other):
            reply = one.complete(SHORT)
            assert (reply.status, reply.error["code"]) == (429, "queue_full")
        assert both.owner.metric("front_end_requests") == 2
    eventually(lambda: is_idle(both.owner))
    assert both.owner.metric("front_end_requests") == 0


def test_a_replica_drains_by_either_without_a_refused_request(both: Service) -> None:
    with streaming(both.other, max_tokens=LONG) as stream:
        drained = both.other.call("/replicas", {"drain": 0})
        assert drained.status == 200, drained.text
        assert [one.complete(SHORT).status for one in (both.owner, both.other)] == [200, 200]
        assert stream.read().count(b"data: {") == LONG - 1
    eventually(lambda: json.loads(both.owner.call("/replicas").text)["replicas"][0]["state"] == "drained")
    assert both.owner.call("/replicas").text == both.other.call("/replicas").text
    refusal = both.other.call("/replicas", {"drain": 1})
    assert (refusal.status, refusal.text) == (409, both.owner.call("/replicas", {"drain": 1}).text)
    assert both.owner.call("/replicas", {"resume": 0}).status == 200
    eventually(lambda: json.loads(both.other.call("/replicas").text)["replicas"][0]["state"] == "serving")


def test_a_plan_is_changed_by_either_for_both(both: Service) -> None:
    plan = json.loads(both.other.call("/plan").text)
    plan = {name: plan[name] for name in ("model", "schedule", "placement", "kv_cache_tokens", "replicas", "router")}
    first = plan["schedule"]
    reply = both.other.call("/plan", {**plan, "schedule": {"policy": "orca", "max_num_seqs": 2}})
    assert reply.status == 200, reply.text
    for one in (both.owner, both.other):
        assert json.loads(one.call("/plan").text)["schedule"]["max_num_seqs"] == 2
    assert both.owner.call("/plan", {**plan, "schedule": first}).status == 200


def test_a_killed_front_end_loses_its_own_connections_and_another_takes_its_place(both: Service) -> None:
    (pid,), known = both.pids, len(both.urls)
    with streaming(both.owner, max_tokens=LONG) as undisturbed, streaming(both.other, max_tokens=3000) as lost:
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError, http.client.HTTPException):
            lost.read()
        assert undisturbed.read().count(b"data: {") == LONG - 1
    eventually(lambda: is_idle(both.owner))
    assert "is gone, and 1 requests with it" in both.log.read_text()
    eventually(lambda: len(both.urls) > known)
    eventually(lambda: both.other.call("/ready").status == 200)
    assert both.other.complete(SHORT).status == 200


def test_front_ends_are_placed_again_when_a_cluster_that_was_away_is_back(both: Service) -> None:
    (placer,) = (
        pid
        for pid in descendants(both.owner.process.pid)
        if b"local_placer" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    known, away = len(both.urls), both.log.with_name("no cluster")
    away.touch()
    os.kill(placer, signal.SIGKILL)
    eventually(lambda: "no front ends on other hosts: there is no cluster" in both.log.read_text())
    away.unlink()
    eventually(lambda: len(both.urls) > known)
    eventually(lambda: both.other.call("/ready").status == 200)


def test_limits_of_a_key_count_at_all_front_ends(launch: Callable[..., Any], tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.touch(mode=0o600)
    keys.write_text("keys: [{name: one, key: the-key, max_requests: 1}]")
    with serving(launch, tmp_path, api_keys=str(keys), api_key=None) as service:
        one, other = (replace(each, api_key="the-key") for each in (service.owner, service.other))
        with streaming(one, max_tokens=3000):
            reply = other.complete(SHORT)
            assert (reply.status, reply.error["code"]) == (429, "too_many_requests")
        eventually(lambda: other.complete(SHORT).status == 200)
        refusal = other.call("/replicas", {"drain": 0})
        assert (refusal.status, refusal.text) == (403, one.call("/replicas", {"drain": 0}).text)


def test_sigterm_finishes_what_runs_at_all_front_ends(launch: Callable[..., Any], tmp_path: Path) -> None:
    with serving(launch, tmp_path) as service:
        (pid,) = service.pids
        with streaming(service.other, max_tokens=LONG) as stream:
            service.owner.process.send_signal(signal.SIGTERM)
            eventually(lambda: service.other.complete(SHORT).status == 503)
            assert stream.read().count(b"data: {") == LONG - 1
        assert service.owner.process.wait() == 0
        eventually(lambda: not is_alive(pid))


@pytest.mark.parametrize(
    ("host", "found"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "localhost"),
        ("0.0.0.0", "0.0.0.0"),
        ("::", "::"),
        ("10.0.0.1", "10.0.0.2"),
        ("server.example.org", "10.0.0.2"),
    ],
)
def test_a_front_end_listens_on_its_own_host_as_the_owner_does_on_its(host: str, found: str) -> None:
    assert host_here(host, "10.0.0.2") == found


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"front_ends": 0}, "--front-ends must be at least 1, found 0"),
        ({"front_ends": 2}, "--front-ends 2 takes as many nodes of a Ray cluster; name it with --ray"),
    ],
)
def test_a_number_of_front_ends_that_cannot_be_is_refused(given: dict[str, int], sentence: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        ServeOptions(**given)
