"""A load is played as drawn: every request gets its tokens, in all three kinds of load and on both clocks."""

import asyncio
import json
import re
import socketserver
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from exeplan.cli import main
from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.runs.metrics import RequestRecord, summarize
from exeplan.core.schedule import Schedule, Stage
from exeplan.errors import InputError
from exeplan.progress import SILENT, Told
from exeplan.runner.engine.engine import Engine, Request
from exeplan.runner.engine_process.build import build_engine, engine_setup
from exeplan.runner.load import Load, draw_load, play_engine, play_url, served_model
from exeplan.workload.files import load_workload
from exeplan.workload.workload import Trace, Workload


@pytest.fixture(scope="module")
def engine() -> Engine:
    plan = Plan(
        model="demo",
        schedule=Schedule("rra", {"prefill_batch": 3, "decode_steps": 4}),
        placement=(Stage(layers=(0, 6)),),
        kv_cache_tokens=1024,
    )
    return build_engine(engine_setup(plan, load_model_spec("demo")))


@pytest.mark.parametrize(
    "load",
    [
        Load(input_tokens=np.array([5, 9, 3, 7]), output_tokens=np.array([4, 1, 6, 2])),
        Load(input_tokens=np.array([5, 9, 3, 7]), output_tokens=np.array([4, 1, 6, 2]), concurrency=1),
        Load(input_tokens=np.array([5, 9, 3]), output_tokens=np.array([4, 1, 6]), arrivals=np.array([0.0, 0.01, 0.3])),
    ],
    ids=["backlog", "closed loop", "open loop"],
)
def test_every_request_gets_the_tokens_it_was_drawn_with(engine: Engine, load: Load) -> None:
    run = play_engine(engine, load, vocab_size=2048)
    assert [r.output_tokens for r in run.records] == load.output_tokens.tolist()
    assert [r.input_tokens for r in run.records] == load.input_tokens.tolist()
    for record in run.records:
        assert record.arrival <= record.start < record.token_times[0]
        assert list(record.token_times) == sorted(record.token_times)


def test_a_backlog_is_there_before_the_first_pass_which_it_does_not_delay(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any of the three would delay it by half a second more than it takes anyway."""
    add, load = engine.add, Load(input_tokens=np.full(3, 5), output_tokens=np.full(3, 2))

    def slow(request: Request) -> None:
        time.sleep(0.5)
        add(request)

    undelayed = play_engine(engine, load, vocab_size=2048)
    monkeypatch.setattr(engine, "add", slow)
    run = play_engine(engine, load, vocab_size=2048)
    assert run.wall[-1] < undelayed.wall[-1] + 0.5
    assert [record.arrival for record in run.records] == [0.0, 0.0, 0.0]


def test_a_load_says_how_far_it_is(engine: Engine) -> None:
    here, there = Said(), Said()
    play_engine(engine, Load(input_tokens=np.array([5, 9]), output_tokens=np.array([4, 1])), vocab_size=2048, told=here)
    play_on(lambda _: (200, 8 * CHUNK + DONE), told=there)
    assert here.said == there.said == [("1 of 2 requests", 0.5), ("2 of 2 requests", 1.0)]


class Said(Told):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[tuple[str, float]] = []

    def __call__(self, title: str, share: float) -> None:
        self.said.append((title, share))


def test_a_closed_loop_of_one_runs_the_requests_one_after_the_other(engine: Engine) -> None:
    load = Load(input_tokens=np.array([5, 5, 5]), output_tokens=np.array([3, 3, 3]), concurrency=1)
    first, second, third = play_engine(engine, load, vocab_size=2048).records
    assert first.token_times[-1] <= second.start
    assert second.token_times[-1] <= third.start


def test_the_cpu_clock_is_never_ahead_of_the_wall(engine: Engine) -> None:
    load = Load(input_tokens=np.full(6, 8), output_tokens=np.full(6, 10))
    run = play_engine(engine, load, vocab_size=2048)
    for wall, cpu in zip(run.records, run.on_cpu_clock(), strict=True):
        assert cpu.token_times[-1] - cpu.start <= (wall.token_times[-1] - wall.start) * 1.05
    assert summarize(run.records, p99_output=10).latency is not None


@pytest.mark.parametrize("stratified", [True, False])
def test_a_few_requests_have_one_of_the_length_that_the_bound_is_on(stratified: bool) -> None:
    law = load_workload("alpaca")
    for seed in range(20):
        load = draw_load(law, 60, seed=seed, stratified=stratified)
        assert load.output_tokens.max() >= law.output_quantile(0.99)


def test_poisson_arrivals_come_at_the_rate_asked_for() -> None:
    load = draw_load(load_workload("alpaca"), 4000, rate=20.0)
    assert load.arrivals is not None
    assert load.arrivals[-1] == pytest.approx(200, rel=0.1)
    assert not load.backlog


def test_a_trace_is_played_at_its_own_times() -> None:
    trace = Trace(np.array([1, 2, 3]), np.array([4, 5, 6]), np.array([10.0, 10.5, 12.0]))
    load = draw_load(Workload.of_trace("t", trace), 2, trace_arrivals=True)
    assert load.input_tokens.tolist() == [1, 2]
    assert load.arrivals is not None
    assert load.arrivals.tolist() == [0.0, 0.5]


def test_a_workload_without_times_cannot_be_played_at_its_own() -> None:
    with pytest.raises(InputError, match="'alpaca' has no arrival times"):
        draw_load(load_workload("alpaca"), 10, trace_arrivals=True)


def test_prompts_are_the_same_for_the_same_seed_only() -> None:
    load = Load(input_tokens=np.array([50]), output_tokens=np.array([1]))
    other = Load(input_tokens=np.array([50]), output_tokens=np.array([1]), seed=1)
    assert load.prompt(0, 2048) == load.prompt(0, 2048) != other.prompt(0, 2048)
    assert all(0 <= token < 2048 for token in load.prompt(0, 2048))


@pytest.mark.parametrize(
    ("url", "message"),
    [("nohost", "must begin with http:// or https://, found 'nohost'"), ("http://127.0.0.1:1", "does not answer: ")],
)
def test_a_url_without_a_server_is_said_in_one_sentence(url: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as found:
        served_model(url)
    assert "<" not in str(found.value)


@pytest.mark.parametrize("reply", [b"SSH-2.0-OpenSSH_9.6\r\n", b""])
def test_what_speaks_no_http_is_no_server(reply: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with socketserver.TCPServer(("127.0.0.1", 0), _says(reply)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        with pytest.raises(InputError, match="/v1/models does not list the models: "):
            served_model(url)
        assert main(["replicas", url]) == 2
        assert capsys.readouterr().err.startswith(f"exeplan replicas: {url} is no server of exeplan: ")
        server.shutdown()


def _says(reply: bytes) -> type[socketserver.BaseRequestHandler]:
    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(4096)
            self.request.sendall(reply)

    return Handler


def test_a_port_that_is_no_number_is_said_in_one_sentence() -> None:
    with pytest.raises(InputError, match="nonnumeric port"):
        served_model("http://127.0.0.1:80O0")


class Server:
    """Answers one request after the other; of more than `room` at a time it refuses those that come last."""

    def __init__(self, room: int) -> None:
        self.room, self.inside, self.most, self.refused = room, 0, 0, 0
        self._turn = asyncio.Lock()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: (\d+)", head)
            assert length
            await reader.readexactly(int(length[1]))
            status, body = await self._answer()
            writer.write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))
            await writer.drain()
        finally:
            writer.close()

    async def _answer(self) -> tuple[bytes, bytes]:
        if self.inside == self.room:
            self.refused += 1
            return b"429 Too Many Requests", b'{"error": {"message": "full"}}'
        self.inside += 1
        self.most = max(self.most, self.inside)
        async with self._turn:
            await asyncio.sleep(0.002)
        self.inside -= 1
        return b"200 OK", b'{"choices": [{"text": "a"}]}'


def play(room: int, load: Load, **options: int) -> tuple[list[RequestRecord], Server]:
    async def run() -> tuple[list[RequestRecord], Server]:
        server = Server(room)
        async with await asyncio.start_server(server, "127.0.0.1", 0) as listening:
            url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            return await play_url(url, load, model="m", vocab_size=50, stream=False, **options), server

    return asyncio.run(run())


def load_of(num_requests: int, **fields: Any) -> Load:
    few = np.full(num_requests, 2)
    return Load(input_tokens=few, output_tokens=few, **fields)


def test_a_backlog_is_sent_as_far_as_connections_are_allowed() -> None:
    records, server = play(100, load_of(60), at_once=7)
    assert (len(records), server.most, server.refused) == (60, 7, 0)


def test_what_a_server_refuses_of_a_backlog_is_sent_when_there_is_room(capsys: pytest.CaptureFixture[str]) -> None:
    records, server = play(5, load_of(60), at_once=40)
    assert (len(records), server.most) == (60, 5)
    assert 35 <= server.refused < 60  # Of those that were there at first; hardly one of the others.
    assert re.match(r"note: the server took [45] of these requests at a time and refused more", capsys.readouterr().err)


def test_where_few_files_may_be_open_it_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("exeplan.runner.load._connections", lambda wanted: min(wanted, 3))
    records, server = play(100, load_of(20))
    assert (len(records), server.most) == (20, 3)
    assert "note: 3 of these requests are sent at a time, as no more files" in capsys.readouterr().err
    play(100, load_of(2))
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("room", "load"),
    [(0, load_of(4)), (2, load_of(30, arrivals=np.zeros(30))), (2, load_of(30, concurrency=9))],
    ids=["no room at all", "arrivals", "concurrency"],
)
def test_a_refusal_that_no_request_of_the_load_explains_is_told(room: int, load: Load) -> None:
    with pytest.raises(InputError, match="was answered 429"):
        play(room, load)


CHUNK = b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n'
DONE = b"data: [DONE]\n\n"


def usage(num_tokens: int) -> bytes:
    return b'data: {"choices": [], "usage": {"completion_tokens": %d}}\n\n' % num_tokens


def play_on(
    answer: Callable[[dict[str, Any]], tuple[int, bytes]],
    *,
    stream: bool = True,
    num_requests: int = 2,
    told: Told = SILENT,
) -> list[RequestRecord]:
    """Requests of 8 tokens, one after the other, on a server that answers a body so."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        assert length
        status, body = answer(json.loads(await reader.readexactly(int(length[1]))))
        writer.write(b"HTTP/1.1 %d Status\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))
        await writer.drain()
        writer.close()

    async def run() -> list[RequestRecord]:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
            url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            load = Load(input_tokens=np.full(num_requests, 3), output_tokens=np.full(num_requests, 8), concurrency=1)
            return await play_url(url, load, model="m", vocab_size=50, stream=stream, told=told)

    return asyncio.run(run())


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_ended_early_counts_with_the_tokens_that_came(
    stream: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = b'{"choices": [{"text": "aa"}], "usage": {"completion_tokens": 5}}'
    records = play_on(lambda body: (200, 2 * CHUNK + usage(5) + DONE if stream else whole), stream=stream)
    assert [record.output_tokens for record in records] == [5, 5]
    told = capsys.readouterr().err
    assert told.startswith("note: 2 of 2 answers were shorter than asked, 10 of 16 tokens in all: ")
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize("status", [400, 422])
def test_a_server_that_knows_no_usage_of_streams_is_asked_without(
    status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def answer(body: dict[str, Any]) -> tuple[int, bytes]:
        asked.append("stream_options" in body)
        return (status, b"no field stream_options") if asked[-1] else (200, 4 * CHUNK + DONE)

    records = play_on(answer)
    assert (asked, [record.output_tokens for record in records]) == ([True, False, False], [8, 8])
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "body", "stream", "sentence"),
    [
        (200, b"<html>a proxy</html>", False, "request 0 was answered with something else than a completion: '<html>a"),
        (200, b'["a"]', False, "request 0 was answered with something else than a completion"),
        (200, b'{"error": "late"}', False, "request 0 was answered with something else than a completion"),
        (502, b"<html>a proxy</html>", False, "request 0 was answered 502: <html>a proxy</html>"),
        (502, b"<html>a proxy</html>", True, "request 0 was answered 502: <html>a proxy</html>"),
        (400, b"\xff", True, "request 0 was answered 400: \ufffd"),
        (200, b'data: {"error": "out of memory"}\n\n', True, "request 0 failed: out of memory"),
        (200, b'data: {"error": {"message": "gone"}}\n\n', True, "request 0 failed: gone"),
        (200, b"data: {half\n\n", True, "request 0 was answered with something else than a completion"),
        (200, b"<html>a proxy</html>", True, "a request was answered without any token"),
    ],
)
def test_an_answer_that_is_none_is_said_in_one_sentence(status: int, body: bytes, stream: bool, sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        play_on(lambda _: (status, body), stream=stream, num_requests=1)
