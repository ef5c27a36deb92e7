"""LiteLLM's openai provider: python with_litellm.py BASE_URL MODEL; prints one JSON object a check."""

import json
import sys
from typing import Any

import litellm
from checks import run

BASE_URL, MODEL = sys.argv[1:]
CLOSED = {"additionalProperties": False}
ASK: list[Any] = [{"role": "user", "content": "Name a colour."}]


def ask(messages: list[Any] | None = None, **options: Any) -> Any:
    few = {"max_tokens": 12, "temperature": 0, "timeout": 60, "num_retries": 0, **options}
    model = f"openai/{MODEL}"
    return litellm.completion(model=model, api_base=BASE_URL, api_key="none", messages=messages or ASK, **few)


def two_turns() -> bool:
    first = ask().choices[0].message
    return bool(ask([*ASK, first, {"role": "user", "content": "Another."}]).usage.completion_tokens)


def stream_with_usage() -> bool:
    parts = list(ask(stream=True, stream_options={"include_usage": True}))
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    usage = [part.usage for part in parts if getattr(part, "usage", None)]
    return text == (ask().choices[0].message.content or "") and usage[-1].completion_tokens > 0


def seeds() -> bool:
    texts = [ask(seed=seed, temperature=1.0).choices[0].message.content for seed in (7, 7, 8)]
    return texts[0] == texts[1] != texts[2]


def text_completion() -> bool:
    model = f"text-completion-openai/{MODEL}"
    reply = litellm.text_completion(model=model, api_base=BASE_URL, api_key="none", prompt="a", max_tokens=5)
    return bool(reply.usage.completion_tokens)


def json_schema() -> bool:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    return set(json.loads(ask(max_tokens=60, response_format=form).choices[0].message.content)) == {"a"}


def tools() -> bool:
    """A required call, whole and streamed, and the answer to its result."""
    parameters = {"type": "object", "properties": {"day": {"enum": ["today", "tomorrow"]}}, "required": ["day"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": {**parameters, **CLOSED}}}
    asked = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 300}
    message = ask(**asked).choices[0].message
    (call,) = message.tool_calls
    parts = list(ask(stream=True, **asked))
    (streamed,) = litellm.stream_chunk_builder(parts, messages=ASK).choices[0].message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    ask([*ASK, message, result], tools=[tool], tool_choice="none")
    days = [json.loads(each.function.arguments)["day"] for each in (call, streamed)]
    return {call.function.name, streamed.function.name} == {"weather"} and {*days} <= {"today", "tomorrow"}


run(two_turns, stream_with_usage, seeds, text_completion, json_schema, tools)
