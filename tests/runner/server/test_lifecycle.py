"""A client that disconnects frees its places, a full queue answers 429, and both processes end as they should."""

import asyncio
import contextlib
import http.client
import json
import re
import signal
import socket
from pathlib import Path

import aiohttp
import openai
import pytest

from exeplan.core.plan import Plan
from exeplan.core.schedule import Schedule, Stage
from exeplan.runner.server import server as serving

from ..processes import PATIENCE, eventually
from .conftest import dropped, is_idle

LONG = {"prompt": "the quick", "max_tokens": 4000, "ignore_eos": True}
API_KEY = "correct horse"


@contextlib.contextmanager
def request(server, **fields):
    """A connection on which a long request has been sent; it is closed in the end."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    with contextlib.closing(connection):
        headers = {"authorization": f"Bearer {server.api_key}"}
        connection.request("POST", "/v1/completions", json.dumps({**LONG, **fields}), headers)
        yield connection


@contextlib.contextmanager
def streaming(server, **fields):
    """A stream after its first token; the client disconnects at the end."""
    with request(server, stream=True, **fields) as connection, connection.getresponse() as response:
        assert response.status == 200
        assert response.readline().startswith(b"data: {")
        yield response


def status_before_the_body(server):
    """Of a request without its body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    with contextlib.closing(connection):
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("authorization", f"Bearer {server.api_key}")
        connection.putheader("content-length", "100")
        connection.endheaders()
        return connection.getresponse().status


def resident_mib(server):
    """Of the process that answers."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024


def test_says_what_it_serves_in_one_line_without_torch_and_scipy(launch):
    with launch(imports=True) as server:
        line = server.lines[0]
        for words in (
            "serving tiny with rra(prefill_batch=4, decode_steps=4)",
            "0.5 requests/s",
            "latency 1.5 s (bound 2 s)",
        ):
            assert words in line
        assert "16384 KV tokens" in line
        assert server.url in line
        assert server.lines[1].endswith("torch=False scipy=False frozen=True\n")


def test_listens_on_loopback_only(server):
    with pytest.raises(OSError, match="refused"), socket.socket() as probe:
        probe.connect(("127.0.0.2", server.port))


def test_shows_the_plan_and_its_promises(server):
    plan = json.loads(server.call("/plan").text)
    assert plan["schedule"] == {"policy": "rra", "prefill_batch": 4, "decode_steps": 4}
    assert server.metric("plan_predicted_throughput") == 0.5
    assert server.metric("plan_predicted_latency_seconds") == 1.5


def test_metrics_count_what_was_generated(server):
    before = {name: server.metric(name) for name in ("prompt_tokens_total", "generation_tokens_total")}
    server.complete({"prompt": [1, 2, 3], "max_tokens": 5, "n": 2, "ignore_eos": True})
    assert server.metric("prompt_tokens_total") - before["prompt_tokens_total"] == 6
    assert server.metric("generation_tokens_total") - before["generation_tokens_total"] == 10
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
        assert server.metric(f"{name}_count") > 0


def test_a_stream_that_is_left_is_dropped(server):
    with dropped(server, 3 * LONG["max_tokens"]), streaming(server, n=3):
        assert server.metric("num_requests_running") == 3


def test_a_whole_answer_without_a_client_is_dropped(server):
    with dropped(server, LONG["max_tokens"]), request(server):
        eventually(lambda: server.metric("num_requests_running") == 1)


def test_a_client_that_does_not_read_delays_no_other(server):
    with socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect(("127.0.0.1", server.port))
        body = json.dumps({**LONG, "max_tokens": 500, "n": 3, "logprobs": 20, "stream": True}).encode()
        stuck.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: [::1]\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        assert server.complete({"prompt": "a", "max_tokens": 20}).status == 200
        eventually(lambda: server.metric("num_requests_running") == 0)
    eventually(lambda: is_idle(server))


@pytest.fixture(scope="module")
def guarded(launch):
    """A server with a key that runs one request at a time and lets two wait."""
    with launch("policy: orca, max_num_seqs: 1", api_key=API_KEY, max_queue=2) as running:
        yield running


def test_everything_but_health_needs_the_key(guarded):
    for path in ("/v1/models", "/metrics", "/plan", "/v1/nothing"):
        for header in ("", "Bearer", "Bearer wrong", f"Basic {API_KEY}", f"Bearer {API_KEY}x"):
            reply = guarded.call(path, authorization=header)
            assert reply.status == 401
            assert reply.error["code"] == "invalid_api_key"
    for path in ("/health", "/ready"):
        assert guarded.call(path, authorization="").status == 200
    assert guarded.call("/v1/models").status == 200


def test_openai_client_reports_the_wrong_key(guarded):
    client = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong", max_retries=0)
    with client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_full_queue_answers_429_with_the_time_the_plan_needs(guarded):
    with streaming(guarded), request(guarded):
        with request(guarded):
            eventually(lambda: guarded.metric("num_requests_waiting") == 2)
            refused = guarded.complete({"prompt": "a"})
            assert refused.status == 429
            assert refused.headers["retry-after"] == "4"  # 2 are waiting, and the plan does 0.5 a second.
            assert status_before_the_body(guarded) == 429
        eventually(lambda: guarded.metric("num_requests_waiting") == 1)
        assert guarded.complete({"prompt": ["a", "b"]}).status == 429
    eventually(lambda: is_idle(guarded))


def test_refused_clients_cost_no_memory(guarded):
    """Bodies of all at once would be 32 MiB."""
    body = b" " * (1 << 20)

    async def ask_all():
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {API_KEY}"}) as session:

            async def ask():
                found = []
                for _ in range(8):
                    async with session.post(f"{guarded.url}/v1/completions", data=body) as reply:
                        found.append(reply.status)
                return found

            return [status for found in await asyncio.gather(*(ask() for _ in range(32))) for status in found]

    with streaming(guarded), request(guarded), request(guarded):
        eventually(lambda: guarded.metric("num_requests_waiting") == 2)
        before = resident_mib(guarded)
        assert set(asyncio.run(ask_all())) == {429}
        assert resident_mib(guarded) - before < 16
    eventually(lambda: is_idle(guarded))


def test_one_bad_prompt_refuses_the_batch(guarded):
    generated = guarded.metric("generation_tokens_total")
    assert guarded.complete({"prompt": [[1], [5000]], "max_tokens": 5}).status == 400
    assert guarded.complete({"prompt": [1], "max_tokens": 1}).status == 200
    assert guarded.metric("generation_tokens_total") == generated + 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_what_runs_and_refuses_what_comes(number, launch):
    with launch() as server, streaming(server, max_tokens=1000) as response:
        server.process.send_signal(number)
        eventually(lambda: server.call("/ready").status == 503)
        refused = server.complete({"prompt": "a"})
        assert refused.status == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert server.call("/health").status == 200  # Alive, and not to be killed for going.
        rest = response.read()
        assert rest.endswith(b"data: [DONE]\n\n")
        assert rest.count(b"data: {") == 999
        assert server.process.wait(PATIENCE) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("signals", [1, 2])
def test_drain_timeout_or_a_second_signal_ends_what_runs_with_an_error(signals, number, launch):
    drain = 0.3 if signals == 1 else 60
    with launch(drain_seconds=drain) as server, request(server) as whole, streaming(server) as response:
        for _ in range(signals - 1):
            server.process.send_signal(number)
            eventually(lambda: server.call("/ready").status == 503)  # Two at once would count as one.
        server.process.send_signal(number)
        *_, last, done = response.read().decode().strip().split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the server has shut down"
        assert done == "data: [DONE]"
        with whole.getresponse() as refused:
            assert (refused.status, refused.headers["retry-after"]) == (503, "5")
            assert json.load(refused)["error"]["code"] == "unavailable"
        assert server.process.wait(PATIENCE) == 0


def test_an_expired_request_is_answered_408_and_counted(server):
    assert server.complete({"prompt": "a", "max_tokens": 4, "deadline": 30, "weight": 2}).status == 200
    before = server.metric("request_success_total")
    reply = server.complete({"prompt": "a", "max_tokens": 4, "deadline": 1e-9})
    assert (reply.status, reply.error["code"]) == (408, "deadline_exceeded")
    assert "had not begun by its deadline" in reply.error["message"]
    assert server.metric("request_success_total") == before + 1


@pytest.mark.parametrize(
    ("replicas", "threads", "device", "words"),
    [
        ((0,), 1, None, ""),
        ((0, 1), 1, None, "2 threads on the 2 cores"),
        ((0,), 2, "cpu", "2 threads"),
        ((0, 1), 2, "cuda", ""),
    ],
)
def test_engines_that_leave_http_no_core_are_told(replicas, threads, device, words, monkeypatch):
    monkeypatch.setattr(serving, "num_processes", lambda: 2)
    plan = Plan(
        model="m",
        schedule=Schedule("orca", {"max_num_seqs": 4}),
        placement=(Stage(layers=(0, 1)),),
        replicas=replicas,
        num_threads=threads,
        device=device,
    )
    found = serving._without_a_core(plan)
    assert words in found
    assert bool(words) is bool(found)
