"""LangChain's ChatOpenAI: python with_langchain.py BASE_URL MODEL; prints one JSON object a check."""

import sys

from checks import run
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

BASE_URL, MODEL = sys.argv[1:]
CHAT = ChatOpenAI(base_url=BASE_URL, api_key="none", model=MODEL, max_retries=0, timeout=60, max_tokens=80, seed=1)
ASK = HumanMessage("Name a colour.")


class Answer(BaseModel):
    """What is asked for."""

    sure: bool


@tool
def weather(tomorrow: bool) -> str:
    """The weather."""
    return "rain tomorrow" if tomorrow else "sun"


def two_turns() -> bool:
    first = CHAT.invoke([ASK])
    return CHAT.invoke([ASK, first, HumanMessage("Another.")]).usage_metadata["output_tokens"] > 0


def stream_with_usage() -> bool:
    *parts, last = CHAT.stream([ASK], stream_usage=True, temperature=0)
    text = "".join(str(part.content) for part in [*parts, last])
    usage = [part.usage_metadata for part in [*parts, last] if part.usage_metadata]
    return text == CHAT.invoke([ASK], temperature=0).content and usage[-1]["output_tokens"] > 0


def batch() -> bool:
    return len(CHAT.batch([[ASK]] * 8)) == 8


def json_schema() -> bool:
    return isinstance(CHAT.with_structured_output(Answer, method="json_schema").invoke([ASK]), Answer)


def tools() -> bool:
    bound = CHAT.bind_tools([weather], tool_choice="required")
    call = bound.invoke([ASK])
    result = weather.invoke(call.tool_calls[0])
    CHAT.bind_tools([weather], tool_choice="none").invoke([ASK, call, result])
    return call.tool_calls[0]["name"] == "weather"


def streamed_tools() -> bool:
    """Pieces of a call add up to it."""
    first, *rest = CHAT.bind_tools([weather], tool_choice="required").stream([ASK])
    for chunk in rest:
        first += chunk
    return isinstance(first.tool_calls[0]["args"]["tomorrow"], bool) and not first.invalid_tool_calls


run(two_turns, stream_with_usage, batch, json_schema, tools, streamed_tools)
