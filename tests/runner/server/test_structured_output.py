"""An answer has the schema, regex or choice that its request states, or is cut; what cannot be followed gets 400."""

import json
import os
import re
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import jsonschema_rs
import openai
import pytest
from pydantic import BaseModel, Field
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from .conftest import Running

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
AS_PERSON = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
SAY = [{"role": "user", "content": "who?"}]


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=SAY, **{"max_tokens": 400, "seed": 3, **fields})


@pytest.mark.parametrize("temperature", [0, 1, 2])
@pytest.mark.parametrize("on", ["server", "pipeline"])
def test_a_chat_answers_in_the_schema(on: str, temperature: float, request: pytest.FixtureRequest) -> None:
    """The last stage of a pipeline samples, in a process that has no request but what it was sent of it."""
    with request.getfixturevalue(on).client() as client:
        answer = chat(client, response_format=AS_PERSON, temperature=temperature, n=3)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema_rs.validate(PERSON, json.loads(choice.message.content))
    if temperature:
        assert len({choice.message.content for choice in answer.choices}) > 1


def test_a_stream_brings_the_same_json(client: openai.OpenAI) -> None:
    pieces = [c.choices[0].delta.content for c in chat(client, response_format=AS_PERSON, stream=True)]
    assert "".join(pieces) == chat(client, response_format=AS_PERSON).choices[0].message.content


def test_log_probabilities_have_the_bytes_of_characters_in_pieces(client: openai.OpenAI) -> None:
    """The tokenizer has no token of a whole kanji, so that three tokens have a third of it each."""
    fields: dict[str, Any] = {"extra_body": {"guided_choice": ["日"]}, "logprobs": True, "top_logprobs": 20}
    content = chat(client, **fields).choices[0].logprobs.content
    chunks = [chunk.choices[0].logprobs.content for chunk in chat(client, stream=True, **fields)]
    for found in (content, [token for chunk in chunks for token in chunk]):
        assert [token.token for token in found] == ["\ufffd"] * 3 + ["<|end|>"]
        assert [token.bytes for token in found] == [[0xE6], [0x97], [0xA5], [*b"<|end|>"]]
        tops = [top for token in found for top in token.top_logprobs if top.token == "\ufffd"]
        assert tops
        assert not any(bytes(top.bytes) == "\ufffd".encode() for top in tops)


class Leg(BaseModel):
    """A part of a journey."""

    by: Literal["train", "ship"] = Field(description="what moves")
    hours: int = Field(ge=0, le=99)


class Journey(BaseModel):
    legs: list[Leg] = Field(max_length=2)
    name: str | None = Field(max_length=5)
    paid: bool


def test_the_clients_own_models_are_filled(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="tiny", messages=SAY, response_format=Journey, max_tokens=600, seed=1, temperature=1
    )
    assert isinstance(answer.choices[0].message.parsed, Journey)


def test_an_output_that_is_cut_says_so(client: openai.OpenAI) -> None:
    answer = chat(client, response_format=AS_PERSON, max_tokens=5).choices[0]
    assert answer.finish_reason == "length"
    assert answer.message.content.startswith("{")


def test_any_object(client: openai.OpenAI) -> None:
    for form in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "any"}}):
        answer = chat(client, response_format=form, max_tokens=2000, logit_bias={"93": 5}).choices[0]
        assert answer.finish_reason == "length" or isinstance(json.loads(answer.message.content), dict)


def test_text_is_no_structure(client: openai.OpenAI) -> None:
    same = {"temperature": 0, "max_tokens": 8}
    plain = chat(client, **same).choices[0].message.content
    assert chat(client, **same, response_format={"type": "text"}).choices[0].message.content == plain


@pytest.mark.parametrize(
    "stated",
    [
        {"structured_outputs": {"regex": "[a-f]{3}-[0-9]{2}"}},
        {"guided_regex": "[a-f]{3}-[0-9]{2}"},
        {"structured_outputs": {"choice": ["abc-00", "fff-99"]}},
        {"guided_choice": ["abc-00", "fff-99"]},
        {"structured_outputs": {"json": {"type": "string", "pattern": "^[a-f]{3}-[0-9]{2}$"}}},
        {"guided_json": json.dumps({"type": "string", "pattern": "^[a-f]{3}-[0-9]{2}$"})},
    ],
    ids=lambda stated: str(next(iter(stated))),
)
def test_completions_take_the_names_of_vllm(client: openai.OpenAI, stated: dict[str, Any]) -> None:
    answer = client.completions.create(model="tiny", prompt="a", max_tokens=20, extra_body=stated).choices[0]
    assert answer.finish_reason == "stop"
    assert re.fullmatch("[a-f]{3}-[0-9]{2}", answer.text.strip('"'))


def test_goes_with_logprobs_bias_penalties_min_tokens_and_stop(client: openai.OpenAI) -> None:
    extra = {"guided_regex": "[ab]{1,9}", "min_tokens": 4, "repetition_penalty": 1.3, "top_k": 5}
    answer = client.completions.create(
        model="tiny", prompt="a", max_tokens=20, logprobs=2, logit_bias={"0": 100}, presence_penalty=1, extra_body=extra
    ).choices[0]
    assert re.fullmatch("[ab]{4}", answer.text)
    assert len(answer.logprobs.tokens) == 5
    stopped = client.completions.create(
        model="tiny", prompt="a", max_tokens=20, stop="aa", extra_body={"guided_regex": "a{9}"}
    ).choices[0]
    assert (stopped.text, stopped.finish_reason) == ("", "stop")


def test_many_at_once_have_each_their_own(client: openai.OpenAI) -> None:
    answers = client.completions.create(
        model="tiny", prompt=["a", "b", "c"], n=4, max_tokens=9, extra_body={"guided_choice": ["yes", "no", "perhaps"]}
    )
    assert {choice.text for choice in answers.choices} <= {"yes", "no", "perhaps"}


def test_workers_that_die_do_not_break_the_structure(client: openai.OpenAI, pipeline: Running) -> None:
    """The next ones follow the grammar from the tokens that were delivered."""
    schema = {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 9},
        "minItems": 150,
        "maxItems": 150,
    }
    form = {"type": "json_schema", "json_schema": {"name": "digits", "schema": schema}}
    expected = chat(client, response_format=form, max_tokens=2000).choices[0]
    before = pipeline.worker_pids
    with pipeline.client() as other:
        chunks = chat(other, response_format=form, max_tokens=2000, stream=True)
        text = "".join(next(chunks).choices[0].delta.content for _ in range(9))
        os.kill(before[1], signal.SIGKILL)
        text += "".join(chunk.choices[0].delta.content for chunk in chunks)
    assert not set(before) & set(pipeline.worker_pids)
    assert (text, len(json.loads(text)), expected.finish_reason) == (expected.message.content, 150, "stop")


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "a bad regex": ({"guided_regex": "(("}, "guided_regex cannot be followed: unclosed group"),
    "a long regex": ({"guided_regex": "a" * 20_000}, "guided_regex must have at most 16384 characters"),
    "too many choices": ({"guided_choice": ["a"] * 2000}, "guided_choice holds 2000 entries"),
    "1 MB of schema": ({"guided_json": {"enum": ["x" * 1000] * 1000}}, "at most 65536 characters"),
    "recursion": ({"guided_json": {"$ref": "#"}}, "guided_json cannot be followed: no output can satisfy it"),
    "a circle": (
        {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
        "no output can satisfy it",
    ),
    "deep nesting": ({"guided_json": nested(100)}, "nested too deeply"),
    "deep nesting in text": ({"guided_json": json.dumps(nested(100))}, "guided_json is nested too deeply"),
    "a far reference": ({"guided_json": {"$ref": "http://169.254.169.254/x"}}, "guided_json cannot be followed"),
    "an unknown type": ({"guided_json": {"type": "strin"}}, "Invalid type"),
    "an unknown keyword": ({"guided_json": {"not": {}}}, "not"),
    "the library's own keyword": ({"guided_json": {"x-guidance": {}}}, "no keyword of JSON Schema"),
    "a heavy schema": ({"guided_json": {"type": "integer", "multipleOf": 123457}}, "guided_json cannot be followed"),
    "no schema": ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "must be an object"),
    "two at once": ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "both say what the output must"),
}


COSTLY = [
    "((((a{0,99}){0,99}){0,99}){0,99}){0,99}",
    "((.|\\n){0,999}x){999}",
    "(.*a.{10})(.*b.{10})(.*c.{12})",
    "|".join(f"{n:x}.*{n:x}" for n in range(1500)),
    "(a|b|c)*a(a|b|c){900}",
]


@pytest.mark.parametrize("regex", COSTLY, ids=lambda regex: regex[:20])
def test_a_costly_regex_is_followed_or_refused_and_holds_no_other_up(server: Running, regex: str) -> None:
    """Which of the two depends on the vocabulary; the work of each token is bounded."""
    reply = server.complete({"prompt": "a", "max_tokens": 100, "guided_regex": regex})
    assert reply.status == 200 or reply.error["code"] == "structure" or "guided_regex" in reply.error["message"]
    assert server.complete({"prompt": "a", "max_tokens": 2}).status == 200


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_followed_gets_400_and_one_sentence(server: Running, name: str) -> None:
    fields, words = HOSTILE[name]
    reply = server.complete({"prompt": "a", "max_tokens": 4, **fields})
    assert reply.status == 400
    assert words in reply.error["message"]
    assert "\n" not in reply.error["message"]
    assert server.call("/health").status == 200


T5 = {
    **{"model_type": "t5", "d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2, "num_layers": 2, "n_positions": 128},
    **{"num_decoder_layers": 2, "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128},
    **{"layer_norm_epsilon": 1e-6, "feed_forward_proj": "relu", "is_encoder_decoder": True, "vocab_size": 9},
    **{"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1},
}


def test_an_encoder_decoder_model_with_pieces_of_sentencepiece_follows_what_is_stated(
    launch: Callable[..., AbstractContextManager[Running]], tmp_path: Path
) -> None:
    """Its first word may come with a space, which is none of the answer."""
    pieces = ["<pad>", "<e>", "<unk>", "\u2581", "a", "\u2581a", "b", "\u2581b", "ab"]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], 2))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.add_special_tokens(pieces[:3])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<e>"}))
    (tmp_path / "config.json").write_text(json.dumps(T5))
    placement = "[{devices: [0], layers: [0, 2], encoder_layers: [0, 2]}]"
    with launch(placement=placement, directory=tmp_path) as running, running.client() as client:

        def texts(**stated: Any) -> set[str]:
            options: dict[str, Any] = {"prompt": "ab a", "n": 8, "seed": 1, "max_tokens": 12, "extra_body": stated}
            return {choice.text for choice in client.completions.create(model="tiny", **options).choices}

        assert texts(guided_choice=["ab a", "b b"]) == {"ab a", "b b"}
        assert texts(guided_regex="a{2}( b){2}") == {"aa b b"}
        with pytest.raises(openai.BadRequestError, match="vocabulary lacks a character"):
            texts(response_format={"type": "json_object"})
