"""Answers have token ids where they are asked for, as vLLM's, and always where a model has no tokenizer."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import Running

SAY = [{"role": "user", "content": "who?"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": ["a fox", "the"]},
    "/v1/chat/completions": {"messages": SAY},
}
FIELDS = {"max_tokens": 5, "ignore_eos": True, "temperature": 0, "n": 2}


def ask(server: Running, path: str, **fields: Any) -> dict[str, Any]:
    reply = server.call(path, {**ASKED[path], **FIELDS, **fields})
    assert reply.status == 200, reply.text
    return json.loads(reply.text)


def stream(server: Running, path: str, **fields: Any) -> list[dict[str, Any]]:
    lines = server.call(path, {**ASKED[path], **FIELDS, "stream": True, **fields}).text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def token_ids(server: Running, text: str) -> list[int]:
    return json.loads(server.call("/tokenize", {"prompt": text}).text)["tokens"]


def test_a_completion_has_the_ids_of_prompt_and_output(server: Running) -> None:
    choices = ask(server, "/v1/completions", return_token_ids=True)["choices"]
    prompts = [token_ids(server, prompt) for prompt in ASKED["/v1/completions"]["prompt"]]
    assert [choice["prompt_token_ids"] for choice in choices] == [prompt for prompt in prompts for _ in range(2)]
    for choice in choices:
        assert len(choice["token_ids"]) == 5
        text = json.loads(server.call("/detokenize", {"tokens": choice["token_ids"]}).text)["prompt"]
        assert text.replace("<|end|>", "") == choice["text"]
    assert "token_ids" not in ask(server, "/v1/completions")["choices"][0]


def test_a_chat_has_those_of_its_prompt_once(server: Running) -> None:
    answer = ask(server, "/v1/chat/completions", return_token_ids=True)
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    assert [len(choice["token_ids"]) for choice in answer["choices"]] == [5, 5]
    assert "prompt_token_ids" not in answer["choices"][0]


@pytest.mark.parametrize("path", ASKED)
def test_a_stream_has_the_same_ids_in_pieces(server: Running, path: str) -> None:
    whole, chunks = ask(server, path, return_token_ids=True), stream(server, path, return_token_ids=True)
    for choice in whole["choices"]:
        told = [(chunk, one) for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
        assert [token for _, one in told for token in one["token_ids"]] == choice["token_ids"]
        (first, one), *others = told
        expected = choice.get("prompt_token_ids") or whole["prompt_token_ids"]
        assert (first if "chat" in path else one)["prompt_token_ids"] == expected
        assert not any("prompt_token_ids" in {**chunk, **later} for chunk, later in others if chunk is not first)


def test_a_scored_prompt_has_no_ids_of_an_output(server: Running) -> None:
    fields = {"max_tokens": 0, "min_tokens": 0, "echo": True, "return_token_ids": True}
    assert ask(server, "/v1/completions", **fields)["choices"][0]["token_ids"] == []


@pytest.mark.parametrize("path", ASKED)
def test_tokens_of_log_probabilities_by_their_ids(server: Running, path: str) -> None:
    wanted = {"logprobs": 3} if path == "/v1/completions" else {"logprobs": True, "top_logprobs": 3}
    fields = {**wanted, "return_token_ids": True, "return_tokens_as_token_ids": True}
    for choice in ask(server, path, **fields)["choices"]:
        found, names = choice["logprobs"], [f"token_id:{token}" for token in choice["token_ids"]]
        if "chat" in path:
            assert [token["token"] for token in found["content"]] == names
            assert [token["top_logprobs"][0]["token"] for token in found["content"]] == names
        else:
            assert found["tokens"] == names
            assert [len(tops) for tops in found["top_logprobs"]] == [3] * 5  # Ids are unique, as texts are not.


@pytest.fixture(scope="module")
def bare(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shape of the model without its tokenizer."""
    directory = tmp_path_factory.mktemp("bare")
    shutil.copy(checkpoint / "config.json", directory)
    return directory


def test_without_a_tokenizer_an_output_is_its_ids(launch: Callable[..., Any], bare: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    asked = {"prompt": [5, 6], "logprobs": 1}
    with launch(directory=bare, log=log) as server:
        assert "this model has no tokenizer" in log.read_text()
        for choice in ask(server, "/v1/completions", **asked)["choices"]:
            assert (choice["text"], len(choice["token_ids"]), "prompt_token_ids" in choice) == ("", 5, False)
            assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
        chunks = stream(server, "/v1/completions", **asked)
        assert [len(chunk["choices"][0]["token_ids"]) for chunk in chunks] == [1] * 10
        asked_for = ask(server, "/v1/completions", **asked, return_token_ids=True)
        assert asked_for["choices"][0]["prompt_token_ids"] == [5, 6]
