"""The bodies that the two generation endpoints answer with, whole or as stream chunks, in OpenAI's shapes.

The types are what `/openapi.json` describes. Every final body also carries `timing`, on the engine's clock; with
several choices it has the earliest start, the earliest first token and the latest last one.
"""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from exeplan.runner.ipc.messages import Event, Logprob, ToolFormat
from exeplan.runner.server.tool_calls import Parsed, ToolCall, ToolParser, whole_calls

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have; OpenAI's value."""
FinishReason = Annotated[str, Field(json_schema_extra={"enum": ["stop", "length", "tool_calls"]})]


class Usage(TypedDict):
    """Prompt tokens are counted once a prompt, completion tokens over all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Timing(TypedDict):
    """Seconds from the arrival to the start of the first prefill, to the first token, and to the last one."""

    queue_s: float
    ttft_s: float
    e2e_s: float


class Head(TypedDict):
    id: str
    created: int
    model: str


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Completion(Head):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage
    timing: Timing


class CompletionChunk(Head):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
    timing: NotRequired[Timing]


class ChatToken(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatSampledToken(ChatToken):
    top_logprobs: list[ChatToken]


class ChatLogprobs(TypedDict):
    content: list[ChatSampledToken]
    refusal: None


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    """None where there are only calls."""
    refusal: None
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletion(Head):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    timing: Timing


class ChatChunk(Head):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    timing: NotRequired[Timing]


@dataclass(eq=False, slots=True)
class Choice:
    """One generated sequence, as far as it is generated."""

    index: int
    text: str = ""
    num_tokens: int = 0
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: str | None = None
    first: Event | None = None
    last: Event | None = None

    def take(self, event: Event) -> None:
        self.first = self.first or event
        self.last = event
        self.text += event.text
        self.num_tokens += len(event.token_ids)
        self.logprobs.extend(event.logprobs)
        self.finish_reason = event.finish_reason


class ResponseBuilder(ABC):
    """Collects the choices of one request and renders its bodies; `wants_logprobs` says whether to report them."""

    prefix: str

    def __init__(self, *, model: str, num_prompt_tokens: int, num_choices: int, wants_logprobs: bool) -> None:
        self.choices = [Choice(index) for index in range(num_choices)]
        self.wants_logprobs = wants_logprobs
        self._num_prompt_tokens = num_prompt_tokens
        self._head: Head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason for choice in self.choices)

    def usage(self) -> Usage:
        completion = sum(choice.num_tokens for choice in self.choices)
        prompt = self._num_prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def timing(self) -> Timing:
        """Of a response whose choices have all begun."""
        firsts = [choice.first for choice in self.choices if choice.first]
        lasts = [choice.last for choice in self.choices if choice.last]
        arrival = firsts[0].arrival
        return {
            "queue_s": min(event.start for event in firsts) - arrival,
            "ttft_s": min(event.time for event in firsts) - arrival,
            "e2e_s": max(event.time for event in lasts) - arrival,
        }

    @abstractmethod
    def whole(self) -> Completion | ChatCompletion:
        """The body of a finished response that is not streamed."""

    @abstractmethod
    def chunk(self, choice: Choice, event: Event) -> CompletionChunk | ChatChunk:
        """The chunk for an event that `choice` has just taken."""

    @abstractmethod
    def last_chunk(self) -> CompletionChunk | ChatChunk:
        """The chunk that carries the usage and no choices."""


class CompletionBuilder(ResponseBuilder):
    """`token_text` turns a token id into its text; `echoes` are the prompts to repeat, one a choice, or empty."""

    prefix = "cmpl"

    def __init__(self, token_text: Callable[[int], str], echoes: Sequence[str] = (), **common: Any) -> None:
        super().__init__(**common)
        self._token_text, self._echoes = token_text, echoes
        self._offsets = [0] * len(self.choices)

    def whole(self) -> Completion:
        choices = [self._choice(c, c.text, c.logprobs, c.finish_reason, begins=True) for c in self.choices]
        return {
            **self._head,
            "object": "text_completion",
            "choices": choices,
            "usage": self.usage(),
            "timing": self.timing(),
        }

    def chunk(self, choice: Choice, event: Event) -> CompletionChunk:
        begins = choice.first is event
        added = self._choice(choice, event.text, event.logprobs, event.finish_reason, begins=begins)
        head = self._head
        return {
            "id": head["id"],
            "created": head["created"],
            "model": head["model"],
            "object": "text_completion",
            "choices": [added],
        }

    def last_chunk(self) -> CompletionChunk:
        return {
            **self._head,
            "object": "text_completion",
            "choices": [],
            "usage": self.usage(),
            "timing": self.timing(),
        }

    def _choice(
        self, choice: Choice, text: str, logprobs: Sequence[Logprob], finish_reason: str | None, *, begins: bool
    ) -> CompletionChoice:
        """What is generated, or what an event adds; the echo of the prompt comes with the beginning."""
        echo = self._echoes[choice.index] if self._echoes and begins else ""
        found = self._logprobs(choice, logprobs) if self.wants_logprobs else None
        return {"index": choice.index, "text": echo + text, "logprobs": found, "finish_reason": finish_reason}

    def _logprobs(self, choice: Choice, entries: Iterable[Logprob]) -> CompletionLogprobs:
        found: CompletionLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            text = self._token_text(entry.token_id)
            found["tokens"].append(text)
            found["token_logprobs"].append(_finite(entry.logprob))
            # Pieces of characters may have the same text; the likeliest of them, which comes first, keeps it.
            top = {self._token_text(token): _finite(value) for token, value in reversed(entry.top)}
            found["top_logprobs"].append(top)
            found["text_offset"].append(self._offsets[choice.index])
            self._offsets[choice.index] += len(text)
        return found


class ChatBuilder(ResponseBuilder):
    """`tools` says how calls of functions are found in the text; None where it is all content."""

    prefix = "chatcmpl"

    def __init__(self, token_text: Callable[[int], str], *, tools: ToolFormat | None = None, **common: Any) -> None:
        super().__init__(**common)
        self._token_text = token_text
        self._parsers = [ToolParser(tools) for _ in self.choices] if tools else []

    def whole(self) -> ChatCompletion:
        choices = [self._choice(choice) for choice in self.choices]
        return {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "usage": self.usage(),
            "timing": self.timing(),
        }

    def _choice(self, choice: Choice) -> ChatChoice:
        message: ChatMessage = {"role": "assistant", "content": choice.text, "refusal": None}
        if self._parsers:
            parsed = self._parsed(choice, choice.text)
            if calls := whole_calls(parsed.calls):
                message |= {"content": parsed.content or None, "tool_calls": calls}
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": self._finish_reason(choice),
        }

    def _parsed(self, choice: Choice, text: str) -> Parsed:
        """What a text of this choice adds, and at its end what was held back."""
        parser = self._parsers[choice.index]
        parsed = parser.push(text)
        if choice.finish_reason:
            parsed.content += parser.finish().content
        return parsed

    def _finish_reason(self, choice: Choice) -> str | None:
        calls = choice.finish_reason == "stop" and self._parsers and self._parsers[choice.index].num_calls
        return "tool_calls" if calls else choice.finish_reason

    def chunk(self, choice: Choice, event: Event) -> ChatChunk:
        # The role comes with the first token: a chunk before it would distort the client's time to first token.
        delta: ChatDelta = self._delta(choice, event.text)
        if choice.first is event:
            delta = {"role": "assistant", **delta}
        added: ChatChunkChoice = {
            "index": choice.index,
            "delta": delta,
            "logprobs": self._logprobs(event.logprobs),
            "finish_reason": self._finish_reason(choice),
        }
        head = self._head
        return {
            "id": head["id"],
            "created": head["created"],
            "model": head["model"],
            "object": "chat.completion.chunk",
            "choices": [added],
        }

    def _delta(self, choice: Choice, text: str) -> ChatDelta:
        if not self._parsers:
            return {"content": text}
        parsed, delta = self._parsed(choice, text), ChatDelta()
        if parsed.content:
            delta["content"] = parsed.content
        if parsed.calls:
            delta["tool_calls"] = parsed.calls
        return delta

    def last_chunk(self) -> ChatChunk:
        return {
            **self._head,
            "object": "chat.completion.chunk",
            "choices": [],
            "usage": self.usage(),
            "timing": self.timing(),
        }

    def _logprobs(self, entries: Iterable[Logprob]) -> ChatLogprobs | None:
        if not self.wants_logprobs:
            return None
        content: list[ChatSampledToken] = [
            {
                **self._token(entry.token_id, entry.logprob),
                "top_logprobs": [self._token(token, value) for token, value in entry.top],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> ChatToken:
        text = self._token_text(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
