"""What client programs send is taken: their bodies, field by field, as their code builds them.

Source: openai-python 3.54, LiteLLM 1.109, langchain-openai 1.7, guidellm 0.8 (`request_handlers.py`), aiperf 0.13
(`endpoints/`), lm-eval 0.4.13 (`openai_completions.py`), vLLM (`benchmarks/lib/endpoint_request_func.py`).
"""

import json
from typing import Any

import pytest

from exeplan.runner.server.openai.chat_request import ChatRequest
from exeplan.runner.server.openai.completion_request import CompletionRequest
from exeplan.runner.server.openai.generation_request import parse

HELLO = {"role": "user", "content": "hello"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "hello"}]}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
CONTINUOUS = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "guidellm": {**CONTINUOUS, "max_tokens": 128, "stop": None, "ignore_eos": True, "prompt": "a b"},
    "aiperf": {"prompt": "a", **STREAMED, "max_tokens": 8, "ignore_eos": True, "min_tokens": 8},
    "vllm bench serve": {
        "prompt": "a",
        "repetition_penalty": 1.0,
        "max_tokens": 8,
        "logprobs": None,
        **STREAMED,
        "ignore_eos": True,
        "temperature": 0.0,
    },
    "lm-eval, generation": {
        "prompt": ["a"],
        "max_tokens": 256,
        "temperature": 0,
        "stop": ["\n\n", "<|end|>"],
        "seed": 1234,
    },
    "lm-eval, token ids": {"prompt": [[1, 2]], "max_tokens": 256, "temperature": 0, "stop": ["a"], "seed": 1234},
    "lm-eval, log-likelihood": {
        "prompt": [[1, 2], [3]],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    },
    "an older client of vLLM": {
        "prompt": "a",
        "n": 1,
        "best_of": 1,
        "use_beam_search": False,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "length_penalty": 1.0,
        "early_stopping": False,
        "priority": 0,
        "top_k": -1,
        "include_stop_str_in_output": False,
        "guided_json": None,
        "truncate_prompt_tokens": None,
    },
    "defaults of vLLM": {"prompt": "a", "add_special_tokens": True, "echo": False, "request_id": "a"},
}
CHATS: dict[str, dict[str, Any]] = {
    "openai": {"messages": [HELLO], "store": False, "user": "u", "metadata": {"a": "b"}, "service_tier": "auto"},
    "openai, second turn": {"messages": [HELLO, {"content": "hi", "refusal": None, "role": "assistant"}, HELLO]},
    "openai, second turn by model_dump()": {
        "messages": [
            HELLO,
            {
                "content": "hi",
                "refusal": None,
                "role": "assistant",
                "annotations": None,
                "audio": None,
                "function_call": None,
                "tool_calls": None,
            },
            HELLO,
        ]
    },
    "LiteLLM, second turn": {
        "messages": [
            HELLO,
            {
                "content": "hi",
                "role": "assistant",
                "tool_calls": None,
                "function_call": None,
                "provider_specific_fields": {"refusal": None},
                "reasoning_content": None,
                "annotations": [],
            },
            {**HELLO, "name": None},
        ],
        "max_retries": None,
    },
    "LangChain": {"messages": [HELLO], "stream": False, "n": 1, "temperature": 0.7, "max_completion_tokens": 64},
    "LangChain, streamed": {"messages": [HELLO], **STREAMED, "stop": ["a"], "store": False, "logprobs": False},
    "guidellm": {"messages": [PARTS], **CONTINUOUS, "max_completion_tokens": 128, "stop": None, "ignore_eos": True},
    "aiperf": {"messages": [HELLO], **STREAMED, "max_completion_tokens": 8},
    "aiperf, usage in each chunk": {"messages": [HELLO], **CONTINUOUS, "max_tokens": 8},
    "vllm bench serve": {"messages": [PARTS], "max_completion_tokens": 8, **STREAMED, "ignore_eos": True},
    "lm-eval": {"messages": [HELLO], "max_tokens": 256, "temperature": 0, "stop": ["a"], "seed": 1234},
    "both names of the limit": {"messages": [HELLO], "max_tokens": 8, "max_completion_tokens": 8},
    "Qwen3": {"messages": [HELLO], "chat_template_kwargs": {"enable_thinking": False}},
    "defaults of vLLM": {
        "messages": [HELLO],
        "add_special_tokens": False,
        "echo": False,
        "include_reasoning": True,
        "request_id": "a",
    },
    "Open WebUI": {"messages": [HELLO], "stream": True, "stream_options": None, "tools": [], "tool_choice": "none"},
}


@pytest.mark.parametrize("name", COMPLETIONS)
def test_completions_of_clients_are_taken(name):
    request, sampling = parse(CompletionRequest, body(COMPLETIONS[name]))
    assert sampling.max_tokens == COMPLETIONS[name].get("max_tokens", 16)
    assert request.stream == COMPLETIONS[name].get("stream", False)


@pytest.mark.parametrize("name", CHATS)
def test_chats_of_clients_are_taken(name):
    given = CHATS[name]
    request, sampling = parse(ChatRequest, body(given))
    assert sampling.max_tokens == given.get("max_tokens", given.get("max_completion_tokens"))
    assert [message.plain()["role"] for message in request.messages] == [one["role"] for one in given["messages"]]


def body(fields: dict[str, Any]) -> bytes:
    return json.dumps({"model": "tiny", **fields}).encode()
