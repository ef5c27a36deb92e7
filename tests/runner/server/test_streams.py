"""A streamed answer has the same events whatever the HTTP version: in chunks, or until the connection closes."""

import json
import socket
from dataclasses import asdict

import pytest

from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.engine.tokenizer import ByteCodec, Tokenizer
from exeplan.runner.ipc.messages import Event, Generate, Sampling
from exeplan.runner.server.openai.responses import ChatBuilder, CompletionBuilder
from exeplan.runner.server.openai.text_offsets import TokenTexts

from ..processes import PATIENCE
from .conftest import Running

BODY = {"prompt": [1, 2, 3], "max_tokens": 12, "temperature": 0, "ignore_eos": True, "stream": True}


def _answer(server: Running, version: str) -> tuple[str, bytes]:
    """Header and body, as they came."""
    body, found = json.dumps(BODY).encode(), b""
    head = f"POST /v1/completions HTTP/{version}\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(body)}"
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        while part := connection.recv(1 << 16):
            found += part
    header, _, rest = found.partition(b"\r\n\r\n")
    return header.decode().lower(), rest


def _texts(events: bytes) -> list[str]:
    *chunks, end = events.decode().removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]"
    return [json.loads(chunk.removeprefix("data: "))["choices"][0]["text"] for chunk in chunks]


def _without_framing(body: bytes) -> bytes:
    """What chunks hold, by their sizes; nothing follows the last one."""
    whole = b""
    while True:
        size, _, body = body.partition(b"\r\n")
        part, body = body[: int(size, 16)], body[int(size, 16) :]
        assert body.startswith(b"\r\n")
        body = body[2:]
        if not part:
            assert not body
            return whole
        whole += part


class Choices(list):
    """Counts how many of them are looked at one after the other."""

    looks = 0

    def __iter__(self):
        for choice in super().__iter__():
            self.looks += 1
            yield choice


@pytest.mark.parametrize("builder", [CompletionBuilder, ChatBuilder])
def test_usage_in_each_chunk_takes_the_same_work_however_many_choices_there_are(builder):
    num_choices, num_tokens = 100, 5
    sampling = Sampling(**asdict(SamplingParams()))
    asked = {"echoes": [], "prompt_logprobs": None, "scores_only": False, "deadline": None, "weight": 1.0}
    asked |= {"stream": True, "usage": True, "usage_in_each_chunk": True}
    request = Generate(chat=builder is ChatBuilder, prompts=[[1, 2]], sampling=sampling, n=num_choices, **asked)
    built = builder(TokenTexts(Tokenizer(ByteCodec())), request, model="demo")
    built.choices = choices = Choices(built.choices)
    times = {"arrival": 0.0, "start": 0.0, "time": 1.0, "num_prompt_tokens": 2}
    for number in range(1, num_tokens + 1):
        for index in range(num_choices):
            assert not built.finished
            reason = "length" if number == num_tokens else None
            first = number == 1
            event = Event(request_id=f"1-{index}", token_ids=[97], text="a", finish_reason=reason, first=first, **times)
            built.chunk(*built.take(event))
            tokens = (number - 1) * num_choices + index + 1
            assert built.usage() == {"prompt_tokens": 2, "completion_tokens": tokens, "total_tokens": 2 + tokens}
    assert built.finished
    assert choices.looks == 0


@pytest.fixture(scope="module")
def texts(server: Running) -> list[str]:
    header, body = _answer(server, "1.1")
    assert "transfer-encoding: chunked" in header
    return _texts(_without_framing(body))


def test_every_token_is_an_event_in_a_chunk(server: Running, texts: list[str]):
    whole = json.loads(server.complete({**BODY, "stream": False}).text)["choices"][0]["text"]
    assert "".join(texts) == whole
    assert len(texts) == BODY["max_tokens"]


def test_a_client_that_knows_no_chunks_gets_the_same_events(server: Running, texts: list[str]):
    header, body = _answer(server, "1.0")
    assert "transfer-encoding" not in header
    assert _texts(body) == texts
