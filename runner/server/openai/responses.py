"""The bodies that the two generation endpoints answer with, whole or as stream chunks, in OpenAI's shapes.

The types are what `/openapi.json` describes. Every final body also carries `timing`, on the engine's clock; with
several choices it has the earliest start, the earliest first token and the latest last one.
"""

import time
import uuid
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NotRequired

import msgspec
from msgspec.structs import replace
from pydantic import Field
from typing_extensions import TypedDict

from exeplan.runner.ipc.messages import Event, Generate, Logprob, PromptLogprobs
from exeplan.runner.server.openai.harmony import parser_of
from exeplan.runner.server.openai.prompt_scores import PromptScores, encoded, entries, finite, prompt_scores
from exeplan.runner.server.openai.scores import Scores
from exeplan.runner.server.openai.text_offsets import TextOffsets, TokenTexts
from exeplan.runner.server.openai.tool_calls import Parsed, ToolCall, whole_calls

_LARGE_SCORES, _LARGE_CHARS = 2048, 1 << 16
"""Log-probabilities and characters of an answer that take about two milliseconds to write."""
_ID_CHARS = 6
"""Of a token id, with its comma."""
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
    """A token each; null for the first of an echoed prompt, of which the model says nothing."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    """The most likely tokens, and the one itself."""
    text_offset: list[int]
    """The character of the text at which the token begins."""


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    prompt_logprobs: NotRequired[PromptScores]
    token_ids: NotRequired[list[int]]
    """With return_token_ids, as in chats; of a stream those of the chunk. Always, where the model has no tokenizer."""
    prompt_token_ids: NotRequired[list[int]]
    """With return_token_ids; of a stream in the first chunk of each choice."""


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
    """Those of the tokens of a character together are its UTF-8; `token` has U+FFFD for each part."""


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
    reasoning_content: NotRequired[str]
    """DeepSeek's name, of models whose format tells reasoning from content."""
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: NotRequired[list[int]]


class ChatDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: NotRequired[list[int]]


class ChatCompletion(Head):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    timing: Timing
    prompt_logprobs: NotRequired[PromptScores]
    prompt_token_ids: NotRequired[list[int]]


class ChatChunk(Head):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    timing: NotRequired[Timing]
    prompt_token_ids: NotRequired[list[int]]


@dataclass(eq=False, slots=True)
class Choice:
    """One generated sequence, as far as it is generated."""

    index: int
    text: str = ""
    logprobs: Scores = field(default_factory=Scores)
    """None of a stream, whose chunks have them."""
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    """Of an answer that has them, and is no stream."""
    finish_reason: str | None = None
    first: Event | None = None
    last: Event | None = None
    prompt: PromptLogprobs | None = None
    """Of its prompt, where they were asked for."""

    def take(self, event: Event) -> None:
        self.first = self.first or event
        self.last = event
        self.text += event.text
        self.prompt = event.prompt or self.prompt
        self.finish_reason = event.finish_reason


class ResponseBuilder(ABC):
    """Collects the choices of one request and renders its bodies."""

    prefix: str
    kind: str

    def __init__(self, texts: TokenTexts, request: Generate, *, model: str) -> None:
        self._texts, self._request = texts, request
        self._gives_ids = request.return_token_ids or not texts.are_known
        self._names_ids = request.return_tokens_as_token_ids or not texts.are_known
        self._prompts = [prompt for prompt in request.prompts for _ in range(request.n)]
        self.choices = [Choice(index) for index in range(len(self._prompts))]
        self._num_prompt_tokens = sum(map(len, request.prompts))
        self._num_completion_tokens, self._num_open = 0, len(self.choices)
        """Kept while events come: a stream asks at each of them, whatever the number of choices."""
        self._head: Head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def take(self, event: Event) -> tuple[Choice, Event]:
        """Adds an event to its choice. Returns both; where only the prompt is scored the token is left out."""
        if self._request.scores_only:
            reason = event.finish_reason and "length"
            event = replace(event, token_ids=(), text="", logprobs=(), finish_reason=reason)
        choice = self.choices[int(event.request_id.rpartition("-")[2])]
        choice.take(event)
        self._num_completion_tokens += len(event.token_ids)
        self._num_open -= event.finish_reason is not None
        if not self._request.stream:
            choice.logprobs.extend(event.logprobs)
            if self._gives_ids:
                choice.token_ids.extend(event.token_ids)
        return choice, event

    @property
    def finished(self) -> bool:
        return self._num_open == 0

    def usage(self) -> Usage:
        prompt, completion = self._num_prompt_tokens, self._num_completion_tokens
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

    def _name(self, token_id: int) -> str:
        """Of a token in log-probabilities."""
        return f"token_id:{token_id}" if self._names_ids else self._texts.text(token_id)

    def _prompt_scores(self, choice: Choice) -> PromptScores | None:
        """vLLM's, where they were asked for."""
        count = self._request.prompt_logprobs
        if count is None or choice.prompt is None:
            return None
        return prompt_scores(self._prompts[choice.index], choice.prompt, count, self._texts.text)

    @property
    def is_large(self) -> bool:
        """Whether the body of a finished response takes milliseconds to make."""
        scored = sum(len(choice.logprobs) for choice in self.choices) * (1 + (self._request.sampling.logprobs or 0))
        prompts = self._request.sampling.prompt_logprobs is not None
        chars = self._request.n * sum(map(len, self._request.echoes)) + sum(len(choice.text) for choice in self.choices)
        ids = sum(len(choice.token_ids) for choice in self.choices)
        if self._request.return_token_ids:
            ids += self._request.n * self._num_prompt_tokens
        return prompts or scored > _LARGE_SCORES or chars + _ID_CHARS * ids > _LARGE_CHARS

    def pieces(self) -> Iterator[bytes]:
        """The body of a finished response that is not streamed, as JSON in pieces: one is a choice, which is not kept.

        Its lists are encoded piece by piece as well: a thread that encodes for long holds up all others.
        """
        yield msgspec.json.encode({**self._head, "object": self.kind})[:-1] + b',"choices":['
        for choice in self.choices:
            yield b"," * (choice.index > 0) + msgspec.json.encode(self._whole(choice))
            choice.logprobs = Scores()
        yield b"]," + msgspec.json.encode(self._end())[1:]

    def _end(self) -> dict[str, Any]:
        """What comes after the choices."""
        return {"usage": self.usage(), "timing": self.timing()}

    @abstractmethod
    def _whole(self, choice: Choice) -> CompletionChoice | ChatChoice:
        """A choice that has finished."""

    @abstractmethod
    def chunk(self, choice: Choice, event: Event) -> CompletionChunk | ChatChunk:
        """The chunk for an event that `choice` has just taken."""

    @abstractmethod
    def last_chunk(self) -> CompletionChunk | ChatChunk:
        """The chunk that carries the usage and no choices."""


class CompletionBuilder(ResponseBuilder):
    """Of `/v1/completions`; prompts that are to be repeated come first, with the log-probabilities of their tokens."""

    prefix, kind = "cmpl", "text_completion"

    def __init__(self, texts: TokenTexts, request: Generate, *, model: str) -> None:
        super().__init__(texts, request, model=model)
        self._echoes = [text for text in request.echoes for _ in range(request.n)]
        self._offsets: list[TextOffsets] = []
        if request.sampling.logprobs is not None:
            self._offsets = [TextOffsets(texts, self._echo(choice)) for choice in self.choices]

    def _whole(self, choice: Choice) -> CompletionChoice:
        rendered = self._choice(choice, choice.text, choice.logprobs, choice.finish_reason, begins=True)
        if (found := rendered["logprobs"]) is not None:
            rendered["logprobs"] = _encoded(found)
        if (scores := self._prompt_scores(choice)) is not None:
            rendered["prompt_logprobs"] = scores
        if self._gives_ids:
            rendered["token_ids"] = encoded(choice.token_ids)
        if self._request.return_token_ids:
            rendered["prompt_token_ids"] = encoded(self._prompts[choice.index])
        return rendered

    def chunk(self, choice: Choice, event: Event) -> CompletionChunk:
        begins = choice.first is event
        added = self._choice(choice, event.text, event.logprobs, event.finish_reason, begins=begins)
        if self._gives_ids:
            added["token_ids"] = [*event.token_ids]
        if begins and self._request.return_token_ids:
            added["prompt_token_ids"] = self._prompts[choice.index]
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
        self, choice: Choice, text: str, logprobs: Iterable[Logprob], finish_reason: str | None, *, begins: bool
    ) -> CompletionChoice:
        """What is generated, or what an event adds; the echo of the prompt comes with the beginning."""
        echo = self._echo(choice) if begins else ""
        found: CompletionLogprobs | None = None
        if (count := self._request.sampling.logprobs) is not None:
            found = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
            scored = self._echoes and begins and choice.prompt
            if scored:
                prompt = self._prompts[choice.index]
                self._add(found, choice, prompt[0], None)
                self._add_all(found, choice, entries(prompt, scored, count))
                self._offsets[choice.index].end_prompt()
            self._add_all(found, choice, logprobs)
            if scored and choice.finish_reason is None:
                found = _encoded(found)
        return {"index": choice.index, "text": echo + text, "logprobs": found, "finish_reason": finish_reason}

    def _echo(self, choice: Choice) -> str:
        """What its text begins with."""
        return self._echoes[choice.index] if self._echoes else ""

    def _add_all(self, found: CompletionLogprobs, choice: Choice, logprobs: Iterable[Logprob]) -> None:
        for entry in logprobs:
            self._add(found, choice, entry.token_id, entry)

    def _add(self, found: CompletionLogprobs, choice: Choice, token_id: int, entry: Logprob | None) -> None:
        name = self._name(token_id)
        found["tokens"].append(name)
        found["token_logprobs"].append(finite(entry.logprob) if entry else None)
        found["top_logprobs"].append(self._top(name, entry) if entry else None)
        found["text_offset"].append(self._offsets[choice.index].next(token_id))

    def _top(self, name: str, entry: Logprob) -> dict[str, float]:
        """Pieces of characters may have the same text; the likeliest of them, which comes first, keeps it."""
        likely = {self._name(token): finite(value) for token, value in reversed(entry.top)}
        return {name: finite(entry.logprob)} | likely


def _encoded(found: CompletionLogprobs) -> CompletionLogprobs:
    return {
        "tokens": encoded(found["tokens"]),
        "token_logprobs": encoded(found["token_logprobs"]),
        "top_logprobs": encoded(found["top_logprobs"]),
        "text_offset": encoded(found["text_offset"]),
    }


class ChatBuilder(ResponseBuilder):
    """Of `/v1/chat/completions`."""

    prefix, kind = "chatcmpl", "chat.completion"

    def __init__(self, texts: TokenTexts, request: Generate, *, model: str) -> None:
        super().__init__(texts, request, model=model)
        self._parsers = [parser_of(request.tools) for _ in self.choices] if request.tools else []

    def _end(self) -> dict[str, Any]:
        end = super()._end()
        if (scores := self._prompt_scores(self.choices[0])) is not None:
            end["prompt_logprobs"] = scores
        if self._request.return_token_ids:
            end["prompt_token_ids"] = encoded(self._prompts[0])
        return end

    def _whole(self, choice: Choice) -> ChatChoice:
        message: ChatMessage = {"role": "assistant", "content": choice.text, "refusal": None}
        if self._parsers:
            parsed = self._parsers[choice.index].whole(choice.text)
            message["content"] = parsed.content
            if calls := whole_calls(parsed.calls):
                message |= {"content": parsed.content or None, "tool_calls": calls}
            if parsed.reasoning:
                message["reasoning_content"] = parsed.reasoning
        rendered: ChatChoice = {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs, in_pieces=True),
            "finish_reason": self._finish_reason(choice),
        }
        if self._gives_ids:
            rendered["token_ids"] = encoded(choice.token_ids)
        return rendered

    def _parsed(self, choice: Choice, text: str) -> Parsed:
        """What a text of this choice adds, and at its end what was held back."""
        parser = self._parsers[choice.index]
        parsed = parser.push(text)
        if choice.finish_reason:
            parser.end(parsed)
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
        if self._gives_ids:
            added["token_ids"] = [*event.token_ids]
        head = self._head
        chunk: ChatChunk = {
            "id": head["id"],
            "created": head["created"],
            "model": head["model"],
            "object": "chat.completion.chunk",
            "choices": [added],
        }
        if choice.first is event and self._request.return_token_ids:
            chunk["prompt_token_ids"] = self._prompts[0]
        return chunk

    def _delta(self, choice: Choice, text: str) -> ChatDelta:
        if not self._parsers:
            return {"content": text}
        parsed, delta = self._parsed(choice, text), ChatDelta()
        if parsed.content:
            delta["content"] = parsed.content
        if parsed.reasoning:
            delta["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            delta["tool_calls"] = parsed.calls
        return delta

    def last_chunk(self) -> ChatChunk:
        head = self._head
        return {
            "id": head["id"],
            "created": head["created"],
            "model": head["model"],
            "object": "chat.completion.chunk",
            "choices": [],
            "usage": self.usage(),
            "timing": self.timing(),
        }

    def _logprobs(self, logprobs: Iterable[Logprob], *, in_pieces: bool = False) -> ChatLogprobs | None:
        if self._request.sampling.logprobs is None:
            return None
        content = map(self._sampled_token, logprobs)
        return {"content": encoded(content) if in_pieces else [*content], "refusal": None}

    def _sampled_token(self, entry: Logprob) -> ChatSampledToken:
        top = [self._token(token, value) for token, value in entry.top]
        return {**self._token(entry.token_id, entry.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> ChatToken:
        utf8 = self._texts.utf8(token_id)
        return {"token": self._name(token_id), "logprob": finite(logprob), "bytes": list(utf8)}
