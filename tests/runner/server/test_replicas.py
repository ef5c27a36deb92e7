"""A plan of several replicas: an engine process for each, one front end, and the router's law."""

import contextlib
import json
import os
import signal
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from exeplan.cli import main
from exeplan.core.models.model import load_model_spec
from exeplan.core.profile import save_profile

from ..processes import PATIENCE, eventually, is_alive
from .conftest import KV_TOKENS, ONE_DEVICE, TWO_STAGES
from .test_lifecycle import request, streaming

ONE_AT_A_TIME = "policy: orca, max_num_seqs: 1"


@pytest.fixture(scope="module")
def pair(launch):
    with launch(ONE_AT_A_TIME, replicas=(0, 1), replan="off", api_key="the key") as running:
        yield running


def test_two_requests_run_on_two_replicas_and_a_third_waits(pair):
    with contextlib.ExitStack() as streams:
        for _ in range(2):
            streams.enter_context(streaming(pair, max_tokens=2000))
        streams.enter_context(request(pair))
        eventually(lambda: (pair.metric("num_requests_running"), pair.metric("num_requests_waiting")) == (2, 1))
    eventually(lambda: pair.metric("num_requests_running") == 0)


def test_tokens_are_those_of_one_replica(pair, server):
    body = {"prompt": "the quick", "max_tokens": 20, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    found = {json.dumps(json.loads(pair.complete(body).text)["choices"]) for _ in range(4)}
    expected = json.loads(server.complete(body).text)["choices"][0]
    assert len(found) == 1
    assert json.loads(found.pop())[0]["text"] == expected["text"]


def test_unequal_replicas_answer_alike_and_each_has_its_schedule(launch, server):
    """A pipeline of two workers with two places, and one worker with one place."""
    alone = f"{{schedule: {{{ONE_AT_A_TIME}}}, placement: {ONE_DEVICE}, replicas: [2], kv_cache_tokens: {KV_TOKENS}}}"
    body = {"prompt": "the quick", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    expected = json.loads(server.complete(body).text)["choices"][0]["text"]
    with launch("policy: orca, max_num_seqs: 2", TWO_STAGES, more_replicas=f"[{alone}]", replan="off") as running:
        assert len(running.engine_pids) == 2
        assert len(running.worker_pids) == 2
        assert {json.loads(running.complete(body).text)["choices"][0]["text"] for _ in range(4)} == {expected}
        with contextlib.ExitStack() as streams:
            for _ in range(3):
                streams.enter_context(streaming(running, max_tokens=2000))
            eventually(
                lambda: (running.metric("num_requests_running"), running.metric("num_requests_waiting")) == (3, 0)
            )


def test_another_schedule_is_adopted_by_both_and_another_number_of_replicas_refused(pair):
    plan = json.loads(pair.call("/plan").text)
    plan = {name: plan[name] for name in ("model", "schedule", "placement", "kv_cache_tokens", "replicas", "router")}
    plan["schedule"] = {"policy": "orca", "max_num_seqs": 2}
    assert pair.call("/plan", {**plan, "replicas": [0]}).status == 400
    with streaming(pair, max_tokens=200) as response:
        reply = pair.call("/plan", plan)
        assert reply.status == 200, reply.text
        assert response.read().count(b"data: {") == 199
    with contextlib.ExitStack() as streams:
        for _ in range(4):  # Two places on each.
            streams.enter_context(streaming(pair, max_tokens=2000))
        eventually(lambda: pair.metric("num_requests_running") == 4)


@pytest.mark.parametrize("load", [["--rate", "40"], ["--concurrency", "3"], []], ids=["rate", "clients", "backlog"])
def test_bench_compares_with_the_replay_of_all_replicas(pair, profile, load, tmp_path, capsys):
    spec = load_model_spec(json.loads(pair.call("/plan").text)["model"])
    save_profile(replace(profile, model=spec), tmp_path / "p.json")
    common = ["--url", pair.url, "--api-key", pair.api_key, "--profile", str(tmp_path / "p.json"), "--json"]
    assert (
        main(["bench", str(pair.plan_file), *common, "--workload", "fixed:in=8;out=4", "--requests", "12", *load]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["measured"]["throughput"] > 0
    assert found["replay"]["throughput"] > 0
    assert found["replay"]["ttft"] > 0
    assert main(["bench", str(pair.plan_file), "--profile", str(tmp_path / "p.json")]) == 2
    assert "the plan has 2 replicas, and bench runs one engine" in capsys.readouterr().err


def test_a_replica_whose_engine_dies_goes_on_with_another_one_and_what_the_other_runs_is_not_disturbed(launch):
    with launch(ONE_AT_A_TIME, replicas=(0, 1), replan="off") as server, contextlib.ExitStack() as streams:
        responses = [streams.enter_context(streaming(server, max_tokens=1000)) for _ in range(2)]
        first, second = server.engine_pids
        os.kill(first, signal.SIGKILL)
        assert server.complete({"prompt": "a", "max_tokens": 2}).status == 200
        assert [response.read().count(b"data: {") for response in responses] == [999, 999]
        assert second in server.engine_pids
        assert first not in server.engine_pids


def test_a_replica_drains_and_comes_back_under_load_without_a_refused_request(pair, server):
    bodies = [
        {"prompt": [3 + n, 5], "max_tokens": 20 + 7 * n, "temperature": 0, "ignore_eos": True, "logprobs": 0}
        for n in range(6)
    ]
    expected = [json.loads(server.complete(body).text)["choices"][0]["logprobs"]["tokens"] for body in bodies]
    over, found = threading.Event(), []

    def ask(number):
        while not over.is_set():
            found.append((number, pair.complete(bodies[number])))

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for client in clients:
        client.start()
    try:
        for number, move in ((1, False), (0, False), (1, True)):
            drain_and_resume(pair, number, move=move)
    finally:
        over.set()
        for client in clients:
            client.join()
    assert len(found) > 12
    for number, reply in found:
        assert reply.status == 200, reply.text
        assert json.loads(reply.text)["choices"][0]["logprobs"]["tokens"] == expected[number]


def drain_and_resume(server, number, *, move):
    before = server.engine_pids
    assert server.call("/replicas", {"drain": number, "move": move}).status == 200
    refused = server.call("/replicas", {"drain": 1 - number})
    assert refused.status == 409
    assert f"replica {1 - number} is the only one that serves" in refused.error["message"]
    eventually(lambda: states(server)[number] == "drained")
    assert len(server.engine_pids) == 1
    assert server.call("/replicas", {"resume": number}).status == 200
    eventually(lambda: states(server) == ["serving", "serving"])
    assert len(set(server.engine_pids) - set(before)) == 1


def states(server):
    return [one["state"] for one in json.loads(server.call("/replicas").text)["replicas"]]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"drain": 2}, 409, "there are replicas 0 to 1, found 2"),
        ({"resume": 0}, 409, "replica 0 serves, or will by itself"),
        ({"drain": "0"}, 400, "drain"),
        ({"move": True}, 400, "drain"),
        ({"resume": 0, "move": True}, 400, "move"),
    ],
)
def test_what_cannot_be_drained_is_refused(pair, body, status, message):
    reply = pair.call("/replicas", body)
    assert reply.status == status
    assert message in reply.error["message"]


def test_only_an_operator_drains_and_one_replica_is_drained_with_the_server(pair, server, keyed):
    assert pair.call("/replicas", {"drain": 0}, authorization="").status == 401
    assert server.call("/replicas", {"drain": 0}).status == 403
    assert keyed.call("/replicas", {"drain": 0}).status == 409
    assert "SIGTERM" in keyed.call("/replicas").error["message"]


def test_sigterm_finishes_what_runs_and_leaves_no_process(launch):
    with launch(ONE_AT_A_TIME, replicas=(0, 1), replan="off") as server, streaming(server, max_tokens=200) as response:
        pids = server.engine_pids
        assert len(pids) == 2
        server.process.send_signal(signal.SIGTERM)
        assert response.read().endswith(b"data: [DONE]\n\n")
        assert server.process.wait(PATIENCE) == 0
        eventually(lambda: not any(is_alive(pid) for pid in pids))


@pytest.fixture
def replicas(pair, capsys):
    """The command on the server of two replicas: its status, what it printed, and its sentence."""

    def run(*words, key="the key", url=pair.url):
        try:
            status = main(["replicas", url, *words, "--api-key", key])
        except SystemExit as end:  # argparse ends by itself.
            status = end.code
        found = capsys.readouterr()
        return status, found.out, found.err.strip().removeprefix("exeplan replicas: ")

    return run


def test_the_command_drains_a_replica_and_has_it_serve_again(replicas):
    def states(*words):
        status, printed, _ = replicas(*words, "--json")
        assert status == 0
        return [one["state"] for one in json.loads(printed)["replicas"]]

    assert states() == ["serving", "serving"]
    assert states("drain", "1", "--wait", "1min") == ["serving", "drained"]
    _, table, _ = replicas()
    assert table.split()[-3:] == ["1", "drained", "0"]
    assert states("resume", "1", "--wait", "2min") == ["serving", "serving"]


def test_the_command_says_when_a_replica_still_drains(replicas, pair):
    with streaming(pair, max_tokens=3000), streaming(pair, max_tokens=3000):
        status, _, said = replicas("drain", "1", "--wait", "100ms")
        assert (status, said) == (2, "replica 1 is draining after 100ms; it goes on with that")
        assert replicas("resume", "1")[0] == 0


@pytest.mark.parametrize(
    ("state", "reason", "sentence"),
    [
        ("failed", "it could not be started: no room", "replica 1 does not serve: it could not be started: no room"),
        ("stopped", None, "replica 1 does not serve: it is stopped"),
    ],
)
def test_the_command_waits_for_no_replica_that_does_not_start_again(replicas, state, reason, sentence):
    """It is told so by a server that says that the replica starts, and then how it is."""
    told = [("starting", None), (state, reason)]

    class Told(BaseHTTPRequestHandler):
        def do_POST(self):
            state, reason = told.pop(0)
            one = {"number": 1, "state": state, "num_requests": 0, "reason": reason}
            body = json.dumps({"replicas": [{**one, "number": 0}, one]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            self.do_POST()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Told) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        status, _, said = replicas("resume", "1", "--wait", "2min", url=f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert (status, said) == (2, sentence)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("drain",), "say which replica to drain, such as drain 0"),
        (("drain", "7"), "there are replicas 0 to 1, found 7"),
        (("drain", "-1"), "there are replicas 0 to 1, found -1"),
        (("resume", "0"), "replica 0 serves, or will by itself"),
        (("resume", "0", "--move"), "--move belongs to drain"),
        (("--wait", "1s"), "--wait belongs to drain and resume"),
        (("drain", "0", "--wait", "soon"), "--wait"),
        (("stop", "0"), "argument action: invalid choice: 'stop' (choose from 'drain', 'resume')"),
        (("drain", "one"), "argument N: invalid int value: 'one'"),
    ],
)
def test_the_command_refuses_what_cannot_be(replicas, words, sentence):
    status, printed, said = replicas(*words)
    assert (status, printed) == (2, "")
    assert said.startswith(sentence)
    assert [one["state"] for one in json.loads(replicas("--json")[1])["replicas"]] == ["serving", "serving"]


def test_the_command_says_what_the_server_has_against_it(replicas, server):
    assert replicas("drain", "0", key="wrong")[2] == "a valid API key is needed (Authorization: Bearer KEY)"
    assert replicas(url=server.url)[2] == "the plan has one replica, which SIGTERM drains with the server"
    assert replicas(url="localhost:8000")[2] == (
        "the server's URL must begin with http:// or https://, found 'localhost:8000'"
    )
    assert replicas(url="http://127.0.0.1:9")[2] == "http://127.0.0.1:9 does not answer: [Errno 111] Connection refused"
