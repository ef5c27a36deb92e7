"""Answers of any size are whole and the same as streamed ones, and nothing of them waits, neither here nor below."""

import json
import math
import socket
from typing import Any

import pytest

from exeplan.runner.ipc.messages import Logprob
from exeplan.runner.server.network.listener import open_listener, set_options
from exeplan.runner.server.openai.scores import Scores

from .conftest import Running

SAY = [{"role": "user", "content": "who?"}]
LARGE: dict[str, Any] = {"n": 3, "max_tokens": 60, "seed": 4, "ignore_eos": True}
ASKED = {
    "/v1/completions": {"prompt": "a", "logprobs": 20, **LARGE},
    "/v1/chat/completions": {"messages": SAY, "logprobs": True, "top_logprobs": 20, **LARGE},
}


@pytest.mark.parametrize("path", ASKED)
def test_a_large_answer_is_sent_in_parts_and_says_what_a_stream_says(server: Running, path: str) -> None:
    reply = server.call(path, ASKED[path])
    assert "content-length" not in reply.headers
    whole = json.loads(reply.text)
    lines = server.call(path, {**ASKED[path], "stream": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert whole["usage"]["completion_tokens"] == 180
    for choice in whole["choices"]:
        told = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        for name, found in choice["logprobs"].items():
            if found is not None:
                assert [entry for part in told for entry in part["logprobs"][name]] == found
        assert choice["finish_reason"] == told[-1]["finish_reason"] == "length"


def test_a_small_answer_comes_with_its_length(server: Running) -> None:
    reply = server.call("/v1/completions", {"prompt": "a", "max_tokens": 3, "logprobs": 2})
    assert int(reply.headers["content-length"]) == len(reply.text.encode())


def test_a_part_of_an_answer_is_sent_before_the_one_before_it_is_acknowledged() -> None:
    with open_listener("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            set_options(connection, 60)
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_scores_come_back_as_they_were() -> None:
    given = [
        Logprob(7, -0.125, ((7, -0.125), (9, -math.inf))),
        Logprob(2**31 - 1, -3.5),
        Logprob(0, 0.0, ((1, -1e-300),)),
    ]
    scores = Scores()
    scores.extend(given[:1])
    scores.extend(given[1:])
    assert (len(scores), list(scores)) == (3, given)
