"""parse() takes a request as it is meant and refuses all else with the field, the value and the limit; no server.

What HTTP adds to that is in tests/runner/server.
"""

import json
from typing import Any

import pytest

from exeplan.runner.engine.chat_template import ChatTemplate
from exeplan.runner.server.openai.chat_request import ChatRequest
from exeplan.runner.server.openai.completion_request import CompletionRequest
from exeplan.runner.server.openai.errors import RequestError
from exeplan.runner.server.openai.generation_request import parse

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "look"}}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def completion(**fields: Any):
    return parse(CompletionRequest, json.dumps({"prompt": "a", **fields}).encode())


def chat(**fields: Any):
    return parse(ChatRequest, json.dumps({"messages": HELLO, **fields}).encode())


def refused(ask: Any, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as error:
        ask(**fields)
    assert error.value.status == 400
    return error.value


def test_what_is_left_out_has_its_documented_value() -> None:
    request, sampling = completion()
    assert (request.prompts, request.n, request.stream, request.echo, request.weight) == (["a"], 1, False, False, 1.0)
    assert (request.deadline, request.num_logprobs, sampling.max_tokens, sampling.temperature) == (None, None, 16, 1.0)
    request, sampling = chat()
    assert (request.messages[0].plain(), request.num_logprobs) == ({"role": "user", "content": "hello"}, None)
    assert sampling.max_tokens is None


def test_null_counts_as_absent() -> None:
    assert completion(max_tokens=None, stop=None, n=None, deadline=None) == completion()


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([0], [[0]]),
        (["x"] * 1024, ["x"] * 1024),
    ],
)
def test_a_prompt_is_always_a_batch(given: Any, prompts: list[Any]) -> None:
    assert completion(prompt=given)[0].prompts == prompts


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": ["x"] * 1025}, "prompt is a batch of 1025, at most 1024 are taken"),
        ({"prompt": [[1]] * 1025}, "prompt is a batch of 1025, at most 1024 are taken"),
        ({"prompt": []}, "prompt must not be empty"),
        ({"prompt": [""]}, "prompt must not be empty"),
        ({"prompt": [1, True]}, "prompt must be a string, a list of token ids"),
        ({"prompt": ["a", [1]]}, "prompt must be a string, a list of token ids"),
        ({"prompt": 5}, "prompt must be a string, a list of token ids"),
        ({"n": 0}, "n must be at least 1, found 0"),
        ({"n": 129}, "n must be at most 128, found 129"),
        ({"n": 1.0}, "n must be an integer, found 1.0"),
        ({"n": "1"}, 'n must be an integer, found "1"'),
        ({"n": True}, "n must be an integer, found true"),
        ({"stream": 1}, "stream must be true or false, found 1"),
        ({"stream": "true"}, 'stream must be true or false, found "true"'),
        ({"echo": 0}, "echo must be true or false, found 0"),
        ({"logprobs": -1}, "logprobs must be at least 0, found -1"),
        ({"logprobs": 21}, "logprobs must be at most 20, found 21"),
        ({"prompt_logprobs": 21}, "prompt_logprobs must be at most 20, found 21"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs is not taken with stream=true; a stream has them by"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, found 0, which is taken only with echo"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens 1 is above max_tokens 0"),
        ({"max_tokens": -1, "echo": True}, "max_tokens must be at least 0, found -1"),
        ({"deadline": 0}, "deadline must be above 0"),
        ({"deadline": -2.5}, "deadline must be above 0"),
        ({"deadline": 86_401}, "deadline must be at most 86400"),
        ({"weight": 0}, "weight must be above 0"),
        ({"weight": 2e6}, "weight must be at most 1000000"),
        ({"max_token": 3}, "unknown field 'max_token'"),
        ({"messages": HELLO}, "unknown field 'messages'"),
        ({"max_completion_tokens": 3}, "unknown field 'max_completion_tokens'"),
        ({"best_of": 2}, "best_of=2 is not offered by this server; leave it out"),
        ({"best_of": True}, "best_of=true is not offered by this server; leave it out"),
        ({"store": 0}, "store=0 is not offered by this server; leave it out"),
        ({"reasoning_effort": "low"}, 'reasoning_effort="low" is not offered by this server; leave it out'),
        ({"user": 5}, "user must be a string"),
        ({"metadata": "x"}, "metadata must be an object"),
        ({"stream_options": {"include_usage": True}}, "stream_options is taken only with stream=true"),
        ({"stream": True, "stream_options": {"usage": True}}, "unknown field 'stream_options.usage'"),
        ({"temperature": 2.1}, "temperature must be at most 2.0, found 2.1"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x must be a token id"),
    ],
    ids=str,
)
def test_a_wrong_completion_is_named(fields: dict[str, Any], words: str) -> None:
    assert str(refused(completion, **fields)).startswith(words)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "messages must not be empty"),
        ({"messages": HELLO * 4097}, "messages holds 4097 entries, at most 4096 are taken"),
        (
            {"messages": [{"role": "bot", "content": "x"}]},
            "messages.0.role must be 'system', 'developer', 'user', 'ass",
        ),
        ({"messages": [{"role": "user"}]}, "'messages.0.content' is missing"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content must be"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0"),
        ({"prompt": "a"}, "unknown field 'prompt'"),
        ({"logprobs": 1}, "logprobs must be true or false, found 1"),
        ({"top_logprobs": 2}, "top_logprobs is taken only with logprobs=true"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, found 0"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs is not taken with stream=true"),
        ({"echo": True}, "echo=true is not offered by this server"),
        ({"add_special_tokens": True}, "add_special_tokens=true is not offered by this server"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be at most 20, found 21"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens 3 and max_completion_tokens 4 are the same limit"),
        ({"chat_template_kwargs": ["a"]}, "chat_template_kwargs must be an object"),
        ({"chat_template_kwargs": {str(n): 1 for n in range(65)}}, "chat_template_kwargs holds 65 entries, at most 64"),
        ({"messages": [{**HELLO[0], "tool_calls": [{}]}]}, "'messages.0.tool_calls.0.function' is missing"),
        ({"messages": [{**HELLO[0], "tool_calls": [CALL]}]}, "messages.0 has tool_calls, which only a message of the"),
        ({"messages": [{**HELLO[0], "reasoning_content": "a"}]}, "messages.0 has reasoning_content, which only a"),
        ({"messages": [{**HELLO[0], "refusal": "no"}]}, 'messages.0.refusal="no" is not offered by this server'),
        ({"use_beam_search": True}, "use_beam_search=true is not offered by this server"),
        ({"skip_special_tokens": False}, "skip_special_tokens=false is not offered by this server"),
        ({"priority": 1}, "priority=1 is not offered by this server"),
        ({"tools": [{"type": "function"}]}, "'tools.0.function' is missing"),
        ({"tools": [TOOL, TOOL]}, "tools has the function 'look' twice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name must have 1 to 64"),
        ({"tool_choice": "required"}, "tool_choice asks for a function of tools, of which there are none"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tools; there are look"),
        ({"tools": [TOOL], "guided_regex": "a"}, "tools and guided_regex exclude each other"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_regex and guided_choice both say what the output must"),
        (
            {"guided_regex": "a", "ignore_eos": True},
            "guided_regex ends an output when it is complete, which ignore_eos",
        ),
        ({"guided_json": "[1]"}, "guided_json must be a JSON object"),
        ({"response_format": {"type": "json_schema"}}, "response_format has json_schema where its type is json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type must be 'text', 'json_object' or 'json_schema'"),
        ({"structured_outputs": {"grammar": "x"}}, 'structured_outputs.grammar="x" is not offered'),
    ],
    ids=str,
)
def test_a_wrong_chat_is_named(fields: dict[str, Any], words: str) -> None:
    assert words in str(refused(chat, **fields))


def test_limits_themselves_are_taken() -> None:
    assert completion(n=128, deadline=86_400, weight=1e6, logprobs=20)[0].n == 128
    assert completion(best_of=3, n=3)[0].n == 3
    assert completion(best_of=1, store=False, user="u", metadata={}, suffix="")[1] == completion()[1]
    assert chat(max_completion_tokens=7)[1].max_tokens == 7
    assert chat(max_completion_tokens=7, max_tokens=7)[1].max_tokens == 7


def test_log_probabilities_are_asked_for_in_two_ways() -> None:
    assert [completion(logprobs=count)[0].num_logprobs for count in (0, 3)] == [0, 3]
    assert chat(logprobs=True)[0].num_logprobs == 0
    assert chat(logprobs=True, top_logprobs=4)[0].num_logprobs == 4
    assert chat(logprobs=False)[0].num_logprobs is None
    assert [completion(logprobs=2)[1].logprobs, chat(logprobs=True)[1].logprobs] == [2, 0]


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"logprobs": 2}, None),
        ({"echo": True}, None),
        ({"echo": True, "logprobs": 0}, 0),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": 1}, 2),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": 2}, 2),
        ({"prompt_logprobs": 0}, 0),
    ],
    ids=str,
)
def test_log_probabilities_of_a_prompt_come_with_echo_or_by_their_own_field(
    fields: dict[str, Any], count: int | None
) -> None:
    assert completion(**fields)[1].prompt_logprobs == count


def test_only_an_echoed_prompt_may_be_continued_by_no_token() -> None:
    request, sampling = completion(echo=True, max_tokens=0)
    assert (request.scores_only, sampling.max_tokens) == (True, 1)
    assert not completion(echo=True)[0].scores_only
    assert chat(prompt_logprobs=3)[1].prompt_logprobs == 3


def test_stops_and_biases_are_taken_as_json_has_them() -> None:
    sampling = completion(stop="end", logit_bias={"7": -2.5})[1]
    assert (sampling.stop, dict(sampling.logit_bias)) == (("end",), {7: -2.5})


def test_parts_of_a_message_are_joined_and_developers_speak_for_the_system() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    request, _ = chat(messages=[{"role": "developer", "content": parts}])
    assert request.messages[0].plain() == {"role": "system", "content": "one\ntwo"}


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("", {}),
        ('{"a": [1]}', {"a": [1]}),
        ('{"a": "cut', '{"a": "cut'),
        ('{"a": 1, "a": 2}', '{"a": 1, "a": 2}'),
        ('{"a": NaN}', '{"a": NaN}'),
        ("[]", "[]"),
    ],
)
def test_arguments_of_a_call_go_to_the_template_as_an_object_or_as_the_model_wrote_them(
    arguments: str, shown: Any
) -> None:
    made = {**CALL, "function": {"name": "look", "arguments": arguments}}
    request, _ = chat(messages=[*HELLO, {"role": "assistant", "tool_calls": [made]}])
    assert request.messages[1].plain()["tool_calls"][0]["function"] == {"name": "look", "arguments": shown}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize(
    ("rest", "names"),
    [
        ({"content": "so"}, ["reasoning_content", "thinking"]),
        ({"content": None, "tool_calls": [CALL]}, ["reasoning_content", "thinking"]),
        ({"content": "so", "tool_calls": [CALL]}, ["reasoning_content"]),
    ],
    ids=str,
)
def test_reasoning_goes_back_to_the_template(name: str, rest: dict[str, Any], names: list[str]) -> None:
    request, _ = chat(messages=[*HELLO, {"role": "assistant", name: "I think", **rest}])
    plain = request.messages[1].plain()
    assert sorted(key for key, value in plain.items() if value == "I think") == names


@pytest.mark.parametrize("given", [None, "", ["a"]])
def test_an_answer_without_reasoning_has_none(given: Any) -> None:
    request, _ = chat(messages=[*HELLO, {"role": "assistant", "content": "so", "reasoning": given}])
    assert request.messages[1].plain() == {"role": "assistant", "content": "so"}


GPT_OSS = ChatTemplate(
    "{% macro system() %}{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}"
    "Reasoning: {{ reasoning_effort }}{% endmacro %}{{ system() }}"
)
QWEN = ChatTemplate("{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}")
PLAIN = ChatTemplate("{{ messages[0].content }}")


@pytest.mark.parametrize(
    ("template", "fields", "prompt"),
    [
        (GPT_OSS, {}, "Reasoning: medium"),
        (GPT_OSS, {"reasoning_effort": "high"}, "Reasoning: high"),
        (GPT_OSS, {"reasoning_effort": "none"}, "Reasoning: none"),
        (GPT_OSS, {"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}}, "Reasoning: low"),
        (QWEN, {}, ""),
        (QWEN, {"reasoning_effort": "none"}, "<think></think>"),
        (PLAIN, {"reasoning_effort": "none"}, "hello"),
    ],
    ids=range(7),
)
def test_reasoning_effort_goes_to_a_template_with_a_place_for_it(
    template: ChatTemplate, fields: dict[str, Any], prompt: str
) -> None:
    variables = chat(**fields)[0].template_variables(template.variables)
    assert template.render(HELLO, variables) == prompt


@pytest.mark.parametrize("template", [QWEN, PLAIN], ids=["qwen", "plain"])
def test_reasoning_effort_that_changes_nothing_is_refused(template: ChatTemplate) -> None:
    with pytest.raises(RequestError, match="reasoning_effort='high' has no place in this model's chat template"):
        chat(reasoning_effort="high")[0].template_variables(template.variables)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"prompt": "a", "prompt": "b"}', "the body has the field 'prompt' twice"),
        (b'{"prompt": "a", "logit_bias": {"1": 1, "1": 2}}', "the body has the field '1' twice"),
        (b'{"prompt": "a", "temperature": NaN}', "the body holds NaN, which is not a JSON number"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature must be a finite number"),
        (b'{"prompt": "\\ud800"}', "the body holds half of a surrogate pair"),
        (b'{"prompt": "\xff"}', "the body is not valid UTF-8 (byte 12)"),
        (b'{"prompt": ', "the body is not valid JSON"),
        (b"[]", "the body must be a JSON object"),
        (b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", "the body holds a number that is too long"),
        (b"[" * 20_000, "the body is nested too deeply"),
    ],
)
def test_a_body_that_is_no_object_is_named(body: bytes, words: str) -> None:
    with pytest.raises(RequestError) as error:
        parse(CompletionRequest, body)
    assert words in str(error.value)


def test_an_error_is_an_error_object_of_openais() -> None:
    error = refused(completion, n=129)
    assert error.body() == {
        "error": {
            "message": "n must be at most 128, found 129",
            "type": "invalid_request_error",
            "param": "n",
            "code": None,
        }
    }
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "server_error"}
    assert {status: RequestError("x", status=status).body()["error"]["type"] for status in kinds} == kinds
