"""A client that sends too much, too fast or too slowly is refused or dropped with a reason; others are unaffected."""

import asyncio
import contextlib
import http.client
import json
import socket
import struct
import threading
import time

import pytest
import uvicorn

from exeplan.runner.server.network import connection
from exeplan.runner.server.network.connection import GuardedProtocol
from exeplan.runner.server.network.places import NUM_PROBES

from ..processes import PATIENCE, eventually
from .conftest import dropped, is_idle
from .test_lifecycle import LONG, request, streaming


@pytest.fixture(scope="module")
def hurried(launch):
    """A server that gives every request a second, and runs one at a time."""
    options = {"request_seconds": 1.0, "cors_origins": ["https://chat.example.org"]}
    with launch("policy: orca, max_num_seqs: 1", **options) as running:
        yield running


def test_a_request_that_takes_too_long_gets_504(hurried):
    began = time.monotonic()
    with dropped(hurried, LONG["max_tokens"]):
        reply = hurried.complete(LONG)
    assert reply.status == 504
    assert (reply.error["message"], reply.error["code"]) == ("the request was not done within 1 s", "timeout")
    assert time.monotonic() - began >= 1


def test_a_stream_that_takes_too_long_ends_with_an_error(hurried):
    with streaming(hurried) as response:
        *_, last, done = response.read().decode().strip().split("\n\n")
    assert "not done within 1 s" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert done == "data: [DONE]"


def test_a_request_that_would_be_late_is_refused_early(launch):
    with launch("policy: orca, max_num_seqs: 1", admission="refuse-late") as server:
        with streaming(server), request(server):
            eventually(lambda: server.metric("num_requests_waiting") == 1)
            refused = server.complete({"prompt": "a"})  # 2 s of waiting, for a bound of 2 s.
            assert server.metric("num_requests_waiting") == 1  # It did not wait for other requests.
        assert (refused.status, refused.error["code"]) == (429, "late")
        assert int(refused.headers["retry-after"]) >= 1
        assert 'reason="late"' in server.call("/metrics").text


def test_a_slow_reader_loses_its_answer_and_nothing_else(server):
    body = {"prompt": "the quick", "max_tokens": 1500, "ignore_eos": True, "n": 8, "logprobs": 20, "stream": True}
    data = json.dumps(body).encode()
    with socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect(("127.0.0.1", server.port))
        stuck.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(data) + data
        )
        eventually(lambda: server.metric("num_requests_running") == 8)
        before = server.metric("generation_tokens_total")
        eventually(lambda: is_idle(server))
        assert server.metric("generation_tokens_total") - before < 8 * 1300  # Not run to its end without a client.


def test_a_connection_that_is_reset_frees_everything(server):
    for _ in range(5):
        with dropped(server, 2 * LONG["max_tokens"]), request(server, n=2) as connection:
            eventually(lambda: server.metric("num_requests_running") == 2)
            linger = struct.pack("ii", 1, 0)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


def test_pages_of_other_sites_are_refused_unless_allowed(hurried, server):
    def ask(target, origin, **headers):
        return target.call("/v1/models", origin=origin, **headers)

    for origin in ("https://evil.example", "null", "http://127.0.0.1:1"):
        refused = ask(server, origin)
        assert refused.status == 403
        assert "access-control-allow-origin" not in refused.headers
    assert ask(server, server.url).status == 200  # Its own page.
    assert ask(hurried, "https://evil.example").status == 403
    allowed = ask(hurried, "https://chat.example.org")
    assert (allowed.status, allowed.headers["access-control-allow-origin"]) == (200, "https://chat.example.org")


def test_an_allowed_page_may_ask_first(hurried):
    headers = {"origin": "https://chat.example.org", "access_control_request_method": "POST"}
    headers["access_control_request_headers"] = "authorization,content-type"
    preflight = hurried.call("/v1/completions", method="OPTIONS", **headers)
    assert preflight.status == 200
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert hurried.call("/v1/completions", method="OPTIONS", **headers | {"origin": "https://x.org"}).status == 400


@contextlib.contextmanager
def guarded(app):
    """The port of an application behind `GuardedProtocol`, in a thread of this process."""
    config = uvicorn.Config(
        app, port=0, http=GuardedProtocol, ws="none", lifespan="off", log_config=None, timeout_keep_alive=600
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


def test_a_client_that_reads_nothing_is_disconnected(monkeypatch):
    monkeypatch.setattr(connection, "STALL_SECONDS", 0.2)
    left = threading.Event()

    async def endless(send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)  # Sending without a client returns at once.

    async def app(scope, receive, send):
        sending = asyncio.create_task(endless(send))
        while (await receive())["type"] != "http.disconnect":
            pass
        sending.cancel()
        left.set()

    with guarded(app) as port, socket.create_connection(("127.0.0.1", port)) as stuck:
        stuck.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert left.wait(PATIENCE)


async def answers(scope, receive, send):
    """An application that answers `/never` at the end of the connection."""
    if scope["path"] == "/never":
        scope["app"].append(scope)
        while (await receive())["type"] != "http.disconnect":
            pass
        return
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def asked(port, path, address="127.0.0.1"):
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE, source_address=(address, 0))
    client.request("GET", path)
    return client


def status_of(port, path, address="127.0.0.1"):
    with contextlib.closing(asked(port, path, address)) as client, client.getresponse() as response:
        return response.status


def test_where_all_connections_work_probes_alone_are_answered(monkeypatch):
    monkeypatch.setattr(GuardedProtocol, "max_connections", 4)
    begun = []

    async def app(scope, receive, send):
        await answers({**scope, "app": begun}, receive, send)

    with guarded(app) as port:
        working = []
        for address in ("127.0.0.2", "127.0.0.2", "127.0.0.2", "127.0.0.3"):
            if address == "127.0.0.3":
                assert status_of(port, "/", "127.0.0.2") == 503  # It has its share.
                assert status_of(port, "/", "127.0.0.3") == 204
            working.append(asked(port, "/never", address))
            eventually(lambda: len(begun) == len(working))
        assert status_of(port, "/", "127.0.0.4") == 503
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(NUM_PROBES + 10)]
        assert silent[0].recv(1000).startswith(b"HTTP/1.1 503")  # The oldest makes room.
        assert status_of(port, "/health", "127.0.0.2") == 204
        for entry in (*working, *silent):
            entry.close()
        eventually(lambda: status_of(port, "/", "127.0.0.2") == 204)


def test_idle_connections_make_room_the_oldest_first(monkeypatch):
    monkeypatch.setattr(GuardedProtocol, "max_connections", 4)
    with guarded(answers) as port:
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]

        def ask(entry):
            entry.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            return entry.recv(1000).partition(b"\r")[0]

        assert [ask(entry) for entry in (*idle, idle[0])] == [b"HTTP/1.1 204 No Content"] * 4
        assert status_of(port, "/") == 204
        assert ask(idle[0]) == b"HTTP/1.1 204 No Content"
        assert idle[1].recv(1000) == b""  # It had been idle for longer than the one that asked again.
        for entry in idle:
            entry.close()


async def refuses(scope, receive, send):
    """An application that reads no body."""
    await send({"type": "http.response.start", "status": 429, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"no"})


POST = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 20\r\n"


def answered(client):
    answer = b""
    while not answer.endswith(b"no"):
        part = client.recv(1000)
        assert part, "closed"
        answer += part
    return answer.startswith(b"HTTP/1.1 429")


def test_a_body_that_comes_after_the_refusal_is_thrown_away(monkeypatch):
    with guarded(refuses) as port, socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as client:
        monkeypatch.setattr(connection, "MAX_BODY_BYTES", 150)
        client.sendall(POST + b"\r\n")
        for _ in range(20):
            assert answered(client)
            client.sendall(b"x" * 15)
            client.sendall(b"x" * 5 + POST + b"\r\n" + b"x")  # The next request may come with the end of it.
            assert answered(client)
            client.sendall(b"x" * 19 + POST + b"\r\n")


@pytest.mark.parametrize("limit", ["BODY_SECONDS", "MAX_BODY_BYTES"])
def test_it_may_not_come_for_ever(limit, monkeypatch):
    monkeypatch.setattr(connection, limit, 0.1)
    with guarded(refuses) as port, socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as client:
        client.sendall(POST + b"\r\n")
        assert answered(client)
        client.sendall(b"x")
        assert client.recv(1000) == b""  # Closed, and long before any other timer.


def test_a_refusal_instead_of_100_continue_ends_the_connection():
    with guarded(refuses) as port, socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as client:
        client.sendall(POST + b"expect: 100-continue\r\n\r\n")
        assert answered(client)
        assert client.recv(1000) == b""


def test_bodies_have_a_limit_together(monkeypatch):
    monkeypatch.setattr(connection, "MAX_BODIES_BYTES", 10_000)
    answers = []

    class Request:
        def __init__(self, size):
            self.headers, self.size = {}, size

        async def stream(self):
            for _ in range(self.size // 1000):
                yield b"x" * 1000
                await asyncio.sleep(0)

    async def read(size):
        try:
            answers.append(len(await connection.read_body(Request(size))))
        except connection.RequestError as error:
            answers.append(error.status)

    async def together():
        await asyncio.gather(*(read(6000) for _ in range(2)))
        await read(9000)

    asyncio.run(together())
    assert sorted(answers) == [503, 6000, 9000]  # And all is given back.
