"""OpenAI's own client: python with_openai.py BASE_URL MODEL; prints one JSON object a check."""

import json
import sys
from typing import Any

import openai
from checks import run
from pydantic import BaseModel, ConfigDict

BASE_URL, MODEL = sys.argv[1:]
CLIENT = openai.OpenAI(base_url=BASE_URL, api_key="none", max_retries=0, timeout=60)
ASK: list[dict[str, Any]] = [{"role": "user", "content": "Name a colour."}]
FEW: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["a"]}
SCHEMA["additionalProperties"] = False
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"day": {"enum": ["today", "tomorrow"]}}}}
WEATHER["parameters"] |= {"required": ["day"], "additionalProperties": False}


def two_turns() -> bool:
    """The assistant's message goes back as the client gives it."""
    first = CLIENT.chat.completions.create(messages=ASK, **FEW).choices[0].message
    again = CLIENT.chat.completions.create(messages=[*ASK, first, {"role": "user", "content": "Another."}], **FEW)
    return again.usage is not None and again.usage.completion_tokens == 12


def stream_with_usage() -> bool:
    options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    *parts, last = CLIENT.chat.completions.create(messages=ASK, **options, **FEW)
    whole = CLIENT.chat.completions.create(messages=ASK, temperature=0, **FEW).choices[0].message.content
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    return text == whole and last.usage.completion_tokens == 12


def seeds() -> bool:
    texts = [CLIENT.completions.create(prompt="a", seed=seed, **FEW).choices[0].text for seed in (7, 7, 8)]
    return texts[0] == texts[1] != texts[2]


def logprobs() -> bool:
    choice = CLIENT.chat.completions.create(messages=ASK, logprobs=True, top_logprobs=3, **FEW).choices[0]
    return [len(token.top_logprobs) for token in choice.logprobs.content] == [3] * 12


def stop() -> bool:
    options = {**FEW, "max_tokens": 60, "temperature": 0, "prompt": "a"}
    text = CLIENT.completions.create(**options).choices[0].text
    end = text[5:7]
    cut = CLIENT.completions.create(stop=[end], **options).choices[0]
    return cut.finish_reason == "stop" and cut.text == text[: text.index(end)]


def json_schema() -> bool:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    reply = CLIENT.chat.completions.create(model=MODEL, messages=ASK, max_tokens=60, response_format=form)
    return set(json.loads(reply.choices[0].message.content)) == {"a"}


def tools() -> bool:
    """A required call, then the answer to its result."""
    tool = {"type": "function", "function": WEATHER}
    asked = {"model": MODEL, "max_tokens": 400, "tools": [tool], "parallel_tool_calls": False}
    choice = CLIENT.chat.completions.create(messages=ASK, tool_choice="required", **asked).choices[0]
    (call,) = choice.message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    CLIENT.chat.completions.create(messages=[*ASK, choice.message, result], tool_choice="none", **asked)
    return choice.finish_reason == "tool_calls" and json.loads(call.function.arguments)["day"] in ("today", "tomorrow")


def streamed_tools() -> bool:
    """The client's own collector puts the pieces of a call together."""
    tool = {"type": "function", "function": WEATHER}
    asked = {"model": MODEL, "max_tokens": 400, "tools": [tool], "parallel_tool_calls": False}
    with CLIENT.chat.completions.stream(messages=ASK, tool_choice="required", **asked) as stream:
        pieces = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        choice = stream.get_final_completion().choices[0]
    (call,) = choice.message.tool_calls
    return "".join(piece.arguments_delta for piece in pieces) == call.function.arguments and call.id is not None


def structured_stream() -> bool:
    class Answer(BaseModel):
        """What is asked for."""

        model_config = ConfigDict(extra="forbid")
        sure: bool

    with CLIENT.chat.completions.stream(model=MODEL, messages=ASK, response_format=Answer, max_tokens=100) as stream:
        return isinstance(stream.get_final_completion().choices[0].message.parsed, Answer)


def errors() -> bool:
    try:
        CLIENT.completions.create(model=MODEL, prompt="a", max_tokens=-1)
    except openai.BadRequestError as error:
        return "max_tokens" in str(error)
    return False


run(two_turns, stream_with_usage, seeds, logprobs, stop, json_schema, structured_stream, tools, streamed_tools, errors)
