"""`exeplan bench URL` on a server that is not known: its figures, and the server's own beside them."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from exeplan.cli import main


def bench(server, capsys, *words: str) -> str:
    load = ("--workload", "fixed:in=8;out=5", "--requests", "12", "--api-key", server.api_key)
    assert main(["bench", server.url, *load, *words]) == 0
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def alone(launch):
    """A server without other clients, so that its counts are those of the test."""
    with launch() as server:
        yield server


def test_the_servers_own_counts_are_those_that_were_sent(alone, capsys):
    text = bench(alone, capsys, "--concurrency", "3")
    assert "the server's own metrics: 12 requests, 96 prompt and 60 output tokens, as sent; mean ttft" in text
    for name in ("ttft", "tpot", "itl", "latency"):
        assert f"\n{name} " in text
    assert "itl, between two successive tokens" in text


def test_each_table_says_from_when_its_times_count_and_an_unbounded_latency_what_it_is_of(alone, capsys):
    first, rest = bench(alone, capsys).split("\ntimes at the client, ")
    assert "\n\nttft and latency from the start of a request's first prefill, its wait left out\n\n" in first
    assert "\nlatency p99-length  " in first
    assert "(bound)" not in first
    assert rest.startswith("from sending a request, its wait included: ")
    assert rest.rstrip().endswith(", from arrival there")


def test_times_at_the_client_are_not_below_the_servers(alone, capsys):
    found = json.loads(bench(alone, capsys, "--concurrency", "2", "--json"))["client"]
    server = found["server"]
    assert (server["requests"], server["output_tokens"], found["differing"]) == (12, 60, [])
    assert found["times"]["latency"][0] > server["latency"] > 0
    assert found["times"]["ttft"][0] > server["ttft"] > 0


def test_lengths_are_scaled_to_the_servers_context(alone, capsys):
    words = ["bench", alone.url, "--workload", "mooncake-conv", "--api-key", alone.api_key]
    assert main([*words, "--requests", "4", "--fit-context"]) == 0
    assert "4 requests, " in capsys.readouterr().out
    assert main([*words, "--requests", "4"]) == 2
    assert "was answered 400" in capsys.readouterr().err


def test_the_base_url_of_openais_clients_is_taken(alone, capsys):
    words = ["--workload", "fixed:in=8;out=5", "--requests", "4", "--api-key", alone.api_key]
    assert main(["bench", f"{alone.url}/v1/", *words]) == 0
    assert "the server's own metrics: 4 requests, " in capsys.readouterr().out
    assert main(["bench", f"{alone.url}/v2", *words]) == 2
    assert capsys.readouterr().err.startswith(f"exeplan bench: {alone.url}/v2/v1/models does not list the models")


class SmallVocabulary(BaseHTTPRequestHandler):
    """An engine with a path of its own that does not state its vocabulary, of which the prompts are not."""

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "m"}]}) if self.path == "/engine/v1/models" else self._answer(404, {})

    def do_POST(self) -> None:
        self._answer(400, {"error": {"message": "no such token id"}})

    def _answer(self, status: int, body: object) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def other_engine() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), SmallVocabulary) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/engine"
        server.shutdown()


def test_a_vocabulary_that_no_server_states_is_asked_for(other_engine, capsys):
    words = ["bench", other_engine, "--workload", "fixed:in=8;out=5", "--requests", "2"]
    assert main(words) == 2
    assert capsys.readouterr().err.rstrip().endswith("does not state its vocabulary: --vocab-size N gives it")
    assert main([*words, "--vocab-size", "900"]) == 2
    assert "--vocab-size" not in capsys.readouterr().err
