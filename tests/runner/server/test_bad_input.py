"""Every bad input gets one clear sentence with a 4xx, and other clients are unaffected."""

import contextlib
import gzip
import json
import socket
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ..processes import PATIENCE

BODIES = {
    "zero max_tokens": ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    "negative max_tokens": ({"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
    "max_tokens beyond the context": ({"prompt": "a", "max_tokens": 5000}, 400, "at most 4095 fit"),
    "max_tokens as text": ({"prompt": "a", "max_tokens": "5"}, 400, "max_tokens must be an integer"),
    "max_tokens as float": ({"prompt": "a", "max_tokens": 5.0}, 400, "max_tokens"),
    "max_tokens as bool": ({"prompt": "a", "max_tokens": True}, 400, "max_tokens"),
    "prompt longer than the context": (
        {"prompt": [1] * 4097},
        400,
        "4097 tokens; the context of 4096 takes at most 4095",
    ),
    "prompt as long as the context": ({"prompt": [1] * 4096}, 400, "4096 tokens"),
    "text far too long": ({"prompt": "x" * 100_000}, 400, "100000 characters"),
    "empty prompt": ({"prompt": ""}, 400, "prompt must not be empty"),
    "no prompts": ({"prompt": []}, 400, "prompt must not be empty"),
    "one empty prompt": ({"prompt": ["a", ""]}, 400, "prompt must not be empty"),
    "prompt missing": ({}, 400, "'prompt' is missing"),
    "token id too large": ({"prompt": [1, 300]}, 400, "token id 300"),
    "token id negative": ({"prompt": [-1]}, 400, "token id -1"),
    "token id huge": ({"prompt": [10**100]}, 400, "not in the vocabulary"),
    "token ids with bool": ({"prompt": [1, True]}, 400, "prompt"),
    "texts and ids mixed": ({"prompt": ["a", [1]]}, 400, "prompt"),
    "bad prompt in a batch": ({"prompt": [[1], [999]]}, 400, "token id 999"),
    "unknown field": ({"prompt": "a", "max_token": 5}, 400, "unknown field 'max_token'"),
    "field not offered": ({"prompt": "a", "best_of": 4}, 400, "best_of=4"),
    "structured output": ({"prompt": "a", "response_format": {"type": "xml"}}, 400, "response_format.type"),
    "temperature too high": ({"prompt": "a", "temperature": 3}, 400, "temperature"),
    "top_p above 1": ({"prompt": "a", "top_p": 1.5}, 400, "top_p"),
    "too many choices": ({"prompt": "a", "n": 10**6}, 400, "n must be at most"),
    "more sequences than the queue": ({"prompt": ["a"] * 100, "n": 128}, 400, "12800 sequences"),
    "a deadline that is over": ({"prompt": "a", "deadline": 0}, 400, "deadline must be above 0"),
    "a deadline as text": ({"prompt": "a", "deadline": "2s"}, 400, "deadline must be a number"),
    "a deadline beyond a day": ({"prompt": "a", "deadline": 1e6}, 400, "deadline must be at most 86400"),
    "a weight below zero": ({"prompt": "a", "weight": -1}, 400, "weight must be above 0"),
    "stop of the wrong type": ({"prompt": "a", "stop": 5}, 400, "stop"),
    "a token id of 5000 digits": ({"prompt": "a", "logit_bias": {"9" * 5000: 1}}, 400, "must be a token id"),
    "an object of 100000 fields": ({"prompt": "a"} | {str(n): 1 for n in range(100_000)}, 400, "at most 4096"),
    "best of fewer": ({"prompt": "a", "n": 4, "best_of": 2}, 400, "best_of=2 is not offered"),
    "harmless, but for its type": ({"prompt": "a", "best_of": True}, 400, "best_of=true is not offered"),
    "stop token out of range": ({"prompt": "a", "stop_token_ids": [5000]}, 400, "token id 5000"),
    "usage without stream": ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    "wrong model": ({"prompt": "a", "model": "gpt-9"}, 404, "no model 'gpt-9'"),
    "NaN": (b'{"prompt": "a", "temperature": NaN}', 400, "NaN"),
    "Infinity": (b'{"prompt": "a", "temperature": -Infinity}', 400, "Infinity"),
    "float overflow": (b'{"prompt": "a", "temperature": 1e999}', 400, "temperature"),
    "lone surrogate": (b'{"prompt": "\\ud800"}', 400, "surrogate"),
    "duplicate key": (b'{"prompt": "a", "prompt": "b"}', 400, "'prompt' twice"),
    "invalid UTF-8": (b'{"prompt": "\xff"}', 400, "UTF-8 (byte 12)"),
    "invalid JSON": (b'{"prompt": ', 400, "not valid JSON"),
    "no body": (b"", 400, "not valid JSON"),
    "array body": (b'["prompt"]', 400, "JSON object"),
    "deep nesting": (b'{"a":' * 20_000, 400, "nested too deeply"),
    "5000 digits": (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400, "number that is too long"),
    "4000 digits": (b'{"prompt": "a", "seed": ' + b"9" * 4000 + b"}", 400, "seed"),
    "100000 lists": (b'{"prompt": ' + b"[" * 100_000, 400, "more than 32768 lists and objects"),
    "a logit_bias of one token twice": ({"prompt": "a", "logit_bias": {"7": 1, "07": 1}}, 400, "token id 7 twice"),
    "a prompt longer than the context, often": ({"prompt": [1] * 100_000, "n": 60}, 400, "has 100000 tokens; the"),
    "body over the cap": (b" " * (2 * 1024 * 1024 + 1), 413, "2 MiB"),
}
MESSAGES = {
    "no messages": ([], "messages must not be empty"),
    "image": ([{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content.0.type"),
    "tool result": ([{"role": "tool", "content": "x"}], "chat template has no place for tools"),
    "unknown field": ([{"role": "user", "content": "x", "colour": 1}], "messages.0.colour"),
    "content missing": ([{"role": "user"}], "messages.0.content"),
    "content of half a million numbers": ([{"role": "user", "content": [5] * 500_000}], "messages.0.content.0 must be"),
}


@pytest.mark.parametrize("case", BODIES)
def test_names_what_is_wrong(case, server):
    body, status, words = BODIES[case]
    reply = server.complete(body)
    assert reply.status == status
    assert words in reply.error["message"]


@pytest.mark.parametrize("case", MESSAGES)
def test_names_what_is_wrong_with_messages(case, server):
    messages, words = MESSAGES[case]
    reply = server.call("/v1/chat/completions", {"messages": messages})
    assert reply.status == 400
    assert words in reply.error["message"]


def test_harmless_documented_fields_are_accepted(server):
    fields = {"user": "u", "best_of": 1, "suffix": None, "n": None, "response_format": {"type": "text"}, "tools": []}
    assert server.complete({"prompt": "a", "max_tokens": 1, **fields}).status == 200


def test_unknown_paths_and_methods_get_error_objects(server):
    assert server.call("/v1/nothing").status == 404
    assert server.call("/v1/completions").error["message"].endswith("Method Not Allowed")


def test_a_running_stream_does_not_notice(client, server):
    def stream():
        options = {"temperature": 0, "max_tokens": 400, "stream": True, "extra_body": {"ignore_eos": True}}
        return client.completions.create(model="tiny", prompt="the quick", **options)

    undisturbed = "".join(chunk.choices[0].text for chunk in stream())
    chunks = stream()
    text = next(chunks).choices[0].text
    for body, status, _ in BODIES.values():
        assert server.complete(body).status == status
    assert text + "".join(chunk.choices[0].text for chunk in chunks) == undisturbed


numbers = st.one_of(
    st.sampled_from([-1, 0, 1, 2**31, 2**63, -(2**63) - 1, 10**99, 1e308, -0.0, 0.5, True, None, "5", [], {}]),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
)
names = ["n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "logprobs", "logit_bias"]
names += ["presence_penalty", "frequency_penalty", "repetition_penalty", "stop", "stop_token_ids", "ignore_eos"]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=st.dictionaries(st.sampled_from(names), numbers, min_size=1, max_size=3))
def test_no_value_of_any_field_is_a_server_error(fields, server):
    reply = server.complete({"prompt": "a", "max_tokens": 1, **fields})
    assert reply.status in (200, 400)
    assert reply.status == 200 or reply.error["message"]


def send(server, data):
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    connection.sendall(data)
    return connection


def receive(connection):
    """Everything until the server closes."""
    with contextlib.closing(connection):
        return b"".join(iter(lambda: connection.recv(65536), b""))


def receive_until_reset(connection):
    """Everything until the server closes, or ends the connection without having read all that was sent."""
    answer = bytearray()
    with contextlib.closing(connection), contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            answer += part
    return bytes(answer)


@pytest.mark.parametrize("size", [20_000, 100_000, 1_000_000])
def test_large_headers_are_refused(size, server):
    connection = send(server, b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"x" * size)
    with contextlib.suppress(OSError):  # The server may have closed by now.
        connection.sendall(b"\r\n\r\n")
    answer = receive_until_reset(connection)
    assert not answer or answer.startswith(b"HTTP/1.1 431")
    assert server.call("/health").status == 200


def test_announced_oversized_body_is_refused_before_it_is_sent(server):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 300000000\r\n\r\n"
    with send(server, head) as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 413")  # And not 408, after ten seconds without a body.


def test_chunked_bodies_count_against_the_same_cap(server):
    connection = send(server, b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
    with connection:
        for _ in range(40):
            connection.sendall(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 413")


def test_an_encoded_body_is_refused_by_its_header(server):
    body = gzip.compress(b'{"prompt": "a", "max_tokens": 1}')
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    head += "connection: close\r\ncontent-encoding: gzip\r\n\r\n"
    answer = receive(send(server, head.encode() + body))
    assert answer.startswith(b"HTTP/1.1 415")
    assert b"content-encoding 'gzip'" in answer


def test_a_body_whose_length_is_said_in_two_ways_is_refused_and_ends_the_connection(server):
    both = b'content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{"a":\r\n0\r\n\r\n'
    answer = receive_until_reset(send(server, b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n" + both))
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"may be read in two ways" in answer
    assert server.call("/health").status == 200


def test_what_is_not_http_gets_400(server):
    answer = receive(send(server, b"\x16\x03\x01\x02\x00 hello\r\n\r\n"))
    assert answer.startswith(b"HTTP/1.1 400")
    assert "error" in json.loads(answer.partition(b"\r\n\r\n")[2])


def test_half_sent_requests_are_closed_after_ten_seconds(server):
    start = time.monotonic()
    header = send(server, b"POST /v1/completions HTTP/1.1\r\nhost:")
    body = send(server, b'POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{"prompt"')
    assert receive(header).startswith(b"HTTP/1.1 408")
    assert receive(body).startswith(b"HTTP/1.1 408")
    assert time.monotonic() - start >= 10
