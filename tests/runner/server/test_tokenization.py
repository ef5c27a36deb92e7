"""`/tokenize` and `/detokenize` agree with what generation counts; models and tokenizer are described as by vLLM."""

import json

import pytest

from .conftest import CHAT_TEMPLATE, CONTEXT

PROMPT = "the quick brown fox <|end|> \N{SNOWMAN}"
TOOL = {"type": "function", "function": {"name": "look"}}
MESSAGES = [{"role": "user", "content": "a schedule"}]


def answer(server, path, **body):
    reply = server.call(path, body)
    assert reply.status == 200, reply.text
    return json.loads(reply.text)


def test_a_prompt_has_the_tokens_that_generation_counts(server):
    found = answer(server, "/tokenize", prompt=PROMPT, model="tiny")
    assert found["count"] == len(found["tokens"])
    assert (found["max_model_len"], found["token_strs"]) == (CONTEXT, None)
    used = json.loads(server.complete({"prompt": PROMPT, "max_tokens": 1}).text)["usage"]
    assert used["prompt_tokens"] == found["count"]


def test_messages_have_the_tokens_that_generation_counts(server):
    found = answer(server, "/tokenize", messages=MESSAGES)
    used = json.loads(server.call("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}).text)["usage"]
    assert used["prompt_tokens"] == found["count"]
    quiet = answer(server, "/tokenize", messages=MESSAGES, chat_template_kwargs={"enable_thinking": False})
    assert quiet["count"] > found["count"]


def test_tokens_become_their_text_again(server):
    found = answer(server, "/tokenize", prompt=PROMPT, return_token_strs=True, add_special_tokens=False)
    assert answer(server, "/detokenize", tokens=found["tokens"]) == {"prompt": PROMPT}
    assert "<|end|>" in found["token_strs"]
    assert answer(server, "/detokenize", tokens=[]) == {"prompt": ""}


def test_what_a_client_without_the_tokenizers_files_must_know(server):
    special = {"bos_token": None, "eos_token": "<|end|>", "pad_token": None, "unk_token": None}
    assert answer_of(server, "/tokenizer_info") == {
        **special,
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": CONTEXT,
    }


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/tokenize", {}, 400, "give either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "give either prompt or messages"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "no model 'other'"),
        ("/tokenize", {"prompt": "x" * 100_000}, 400, "100000 characters"),
        ("/tokenize", {"prompt": 5}, 400, "prompt must be a string, found 5"),
        ("/tokenize", {"messages": MESSAGES, "tools": [{}]}, 400, "'tools.0.type' is missing"),
        ("/tokenize", {"messages": MESSAGES, "tools": [TOOL]}, 400, "chat template has no place for tools"),
        ("/tokenize", {"prompt": "a", "tools": [TOOL]}, 400, "tools are taken only with messages"),
        ("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": {"messages": 1}}, 400, "must not set 'messages'"),
        ("/detokenize", {}, 400, "'tokens' is missing"),
        ("/detokenize", {"tokens": [5000]}, 400, "token id 5000 is not in the vocabulary"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "no model 'other'"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens must be a list"),
    ],
)
def test_names_what_is_wrong(server, path, body, status, words):
    reply = server.call(path, body)
    assert reply.status == status
    assert words in reply.error["message"]


def test_the_model_has_the_fields_that_clients_of_vllm_read(server, checkpoint):
    (card,) = answer_of(server, "/v1/models")["data"]
    assert (card["id"], card["root"], card["parent"], card["max_model_len"]) == (
        "tiny",
        checkpoint.name,
        None,
        CONTEXT,
    )
    assert card["created"] > 0
    assert card["vocab_size"] == json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    assert [one["allow_sampling"] for one in card["permission"]] == [True]
    assert answer_of(server, "/v1/models/tiny") == card


def answer_of(server, path):
    return json.loads(server.call(path).text)
