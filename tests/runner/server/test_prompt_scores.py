"""The log-probabilities of prompts reach clients: in OpenAI's form, as lm-eval reads it, and in vLLM's."""

import json
from typing import Any

import openai
import pytest

from .conftest import Running

PROMPT, FORCED = [40, 41, 42, 43], 70
LM_EVAL = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
BROWN = "the quick brown"


def ask(server: Running, path: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
    reply = server.call(path, {"model": "tiny", **fields})
    assert reply.status == 200, reply.text
    return json.loads(reply.text)


def refusal(server: Running, path: str = "/v1/completions", **fields: Any) -> tuple[int, str, str]:
    reply = server.call(path, {"model": "tiny", **fields})
    return reply.status, reply.error["param"], reply.error["message"]


def scored(server: Running, prompt: Any, **fields: Any) -> list[dict[str, Any]]:
    """The choices of a request that only scores its prompts."""
    return ask(server, prompt=prompt, **{"echo": True, "max_tokens": 0, "logprobs": 2, **fields})["choices"]


def test_a_token_has_in_a_prompt_the_log_probability_that_it_had_in_an_output(server: Running) -> None:
    bias = {"logit_bias": {str(FORCED): 100}, "ignore_eos": True}
    (made,) = ask(server, prompt=PROMPT, max_tokens=5, logprobs=3, **bias)["choices"]
    (read,) = scored(server, PROMPT + [FORCED] * 5, logprobs=3)
    for name in ("tokens", "token_logprobs"):
        assert read["logprobs"][name][4:] == pytest.approx(made["logprobs"][name], abs=1e-4)
    for one, other in zip(read["logprobs"]["top_logprobs"][4:], made["logprobs"]["top_logprobs"], strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    assert read["text"].endswith(made["text"])


def test_lm_eval_reads_the_likelihood_of_each_of_several_prompts(server: Running) -> None:
    """As `LocalCompletionsAPI.parse_logprobs` does: without the context, and without the token behind the prompt."""
    prompts, contexts = [[*PROMPT, FORCED], [50, 51], [FORCED] * 30], [4, 1, 10]
    choices = ask(server, prompt=prompts, **LM_EVAL)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    for choice, prompt, context in zip(choices, prompts, contexts, strict=True):
        found = choice["logprobs"]
        values, tops = found["token_logprobs"][context:-1], found["top_logprobs"][context:-1]
        assert len(values) == len(tops) == len(prompt) - context
        (alone,) = scored(server, prompt, logprobs=1)
        assert sum(values) == pytest.approx(sum(alone["logprobs"]["token_logprobs"][context:]), abs=1e-3)
        greedy = [value == max(top.values()) for value, top in zip(values, tops, strict=True)]
        assert greedy == [len(top) == 1 for top in tops]


def test_only_scoring_answers_the_prompt(server: Running) -> None:
    answer = ask(server, prompt=BROWN, echo=True, max_tokens=0, logprobs=0)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (BROWN, "length")
    found, usage = choice["logprobs"], answer["usage"]
    assert (usage["completion_tokens"], usage["prompt_tokens"]) == (0, len(found["tokens"]))
    assert "".join(found["tokens"]) == BROWN
    assert found["text_offset"] == [len("".join(found["tokens"][:number])) for number in range(len(found["tokens"]))]
    assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
    assert [[*top.items()] for top in found["top_logprobs"][1:]] == [
        [pair] for pair in zip(found["tokens"][1:], found["token_logprobs"][1:], strict=True)
    ]


def test_only_echo_needs_no_log_probabilities(server: Running) -> None:
    (choice,) = ask(server, prompt=BROWN, echo=True, max_tokens=0)["choices"]
    assert choice == {"index": 0, "text": BROWN, "logprobs": None, "finish_reason": "length"}


def test_each_choice_of_a_prompt_has_them(server: Running) -> None:
    first, second = scored(server, PROMPT, n=2)
    assert first["logprobs"] == second["logprobs"]


def test_a_stream_has_them_with_the_first_token(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "prompt": BROWN, "echo": True, "logprobs": 2, "max_tokens": 3, "seed": 1}
    fields["extra_body"] = {"ignore_eos": True}
    whole = client.completions.create(**fields).choices[0].logprobs
    chunks = [chunk.choices[0] for chunk in client.completions.create(**fields, stream=True)]
    assert whole
    assert len(whole.tokens or ()) > 4
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [value for chunk in chunks for value in getattr(chunk.logprobs, name)]
        assert streamed == getattr(whole, name)
    assert [len(chunk.logprobs.tokens or ()) for chunk in chunks[1:] if chunk.logprobs] == [1, 1]


def test_vllms_field_goes_by_token_ids(server: Running) -> None:
    (choice,) = ask(server, prompt=PROMPT, prompt_logprobs=2, max_tokens=1)["choices"]
    (read,) = scored(server, PROMPT)
    first, *others = choice["prompt_logprobs"]
    assert first is None
    for token_id, found, value in zip(PROMPT[1:], others, read["logprobs"]["token_logprobs"][1:], strict=True):
        own, *tops = found.values()
        assert next(iter(found)) == str(token_id)
        assert own["logprob"] == pytest.approx(value, abs=1e-4)
        assert [top["rank"] for top in tops] == [rank for rank in (1, 2) if rank != own["rank"]]
        assert all((own["logprob"] < top["logprob"]) == (own["rank"] > top["rank"]) for top in tops)
    assert choice["logprobs"] is None


def test_chats_have_vllms_field(server: Running) -> None:
    messages = [{"role": "user", "content": "a schedule"}]
    answer = ask(server, "/v1/chat/completions", messages=messages, prompt_logprobs=0, max_tokens=1)
    (choice,) = scored(server, "<|user|>a schedule\n<|assistant|>", logprobs=0)
    values = [entry and next(iter(entry.values()))["logprob"] for entry in answer["prompt_logprobs"]]
    assert values == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)


def test_too_many_are_refused_before_anything_is_computed(server: Running) -> None:
    prompts = [[1] * 100] * 256
    assert refusal(server, prompt=prompts, echo=True, logprobs=10)[:2] == (400, "logprobs")
    status, param, message = refusal(server, prompt=prompts, prompt_logprobs=3, n=3)
    assert (status, param) == (400, "prompt_logprobs")
    assert "have 307200 log-probabilities" in message
    assert "at most 262144: send fewer prompts in a request, or lower prompt_logprobs" in message


def test_requests_at_the_same_time_have_the_tokens_that_they_have_alone(server: Running) -> None:
    """Prompts that are scored are computed in the same passes as theirs."""
    fields = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    alone = [ask(server, prompt=[number, 41, 42], **fields)["choices"][0]["logprobs"]["tokens"] for number in range(4)]
    together = [[number, 41, 42] for number in range(4)]
    choices = ask(server, prompt=together, **fields, prompt_logprobs=1)["choices"]
    assert [choice["logprobs"]["tokens"] for choice in choices] == alone


def test_chats_and_completions_report_the_same_of_an_output(server: Running) -> None:
    fields = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    messages = [{"role": "user", "content": "a schedule"}]
    chat = ask(server, "/v1/chat/completions", messages=messages, logprobs=True, top_logprobs=2, **fields)
    completion = ask(server, prompt="<|user|>a schedule\n<|assistant|>", logprobs=2, **fields)
    entries, found = chat["choices"][0]["logprobs"]["content"], completion["choices"][0]["logprobs"]
    assert [entry["token"] for entry in entries] == found["tokens"]
    assert [entry["logprob"] for entry in entries] == pytest.approx(found["token_logprobs"], abs=1e-4)
    for entry, top in zip(entries, found["top_logprobs"], strict=True):
        assert {one["token"]: one["logprob"] for one in entry["top_logprobs"]} == pytest.approx(top, abs=1e-4)
