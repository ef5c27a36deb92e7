"""The bodies that the two endpoints answer with, whole or as stream chunks, in OpenAI's shapes.

Every final answer also carries `timing`: `queue_s` from arrival to the start of the first prefill, `ttft_s` to the
first token and `e2e_s` to the last one, both from arrival too, on the engine's clock. Of several choices: the earliest
start, the earliest first token, the latest last one.
"""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from exeplan.runner.ipc.frames import Event, Logprob

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have; OpenAI's value."""


@dataclass(eq=False, slots=True)
class Choice:
    """One generated sequence as far as it has come."""

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


class Answer(ABC):
    """One response. `token_text` turns a token id into its text; `wants_logprobs` says whether to report them."""

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, *, model: str, num_prompt_tokens: int, num_choices: int, wants_logprobs: bool) -> None:
        self.choices = [Choice(index) for index in range(num_choices)]
        self.wants_logprobs = wants_logprobs
        self._num_prompt_tokens = num_prompt_tokens
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason for choice in self.choices)

    def usage(self) -> dict[str, int]:
        """Prompt tokens counted once a prompt, completion tokens over all choices."""
        completion = sum(choice.num_tokens for choice in self.choices)
        prompt = self._num_prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def timing(self) -> dict[str, float]:
        """See the head of this file."""
        firsts = [choice.first for choice in self.choices if choice.first]
        lasts = [choice.last for choice in self.choices if choice.last]
        if not firsts:
            return {}
        arrival = firsts[0].arrival
        return {
            "queue_s": min(event.start for event in firsts) - arrival,
            "ttft_s": min(event.time for event in firsts) - arrival,
            "e2e_s": max(event.time for event in lasts) - arrival,
        }

    def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices = [{**self._content(c), "finish_reason": c.finish_reason} for c in self.choices]
        head = {**self._head, "object": self.whole_object}
        return {**head, "choices": choices, "usage": self.usage(), "timing": self.timing()}

    def chunk(self, choice: Choice, event: Event) -> dict[str, Any]:
        """The chunk for an event that `choice` has just taken."""
        row = {**self._delta(choice, event), "finish_reason": event.finish_reason}
        return {**self._head, "object": self.chunk_object, "choices": [row]}

    def last_chunk(self) -> dict[str, Any]:
        """The chunk that carries the usage and no choices."""
        head = {**self._head, "object": self.chunk_object}
        return {**head, "choices": [], "usage": self.usage(), "timing": self.timing()}

    @abstractmethod
    def _content(self, choice: Choice) -> dict[str, Any]:
        """All of a finished choice."""

    @abstractmethod
    def _delta(self, choice: Choice, event: Event) -> dict[str, Any]:
        """What an event adds to its choice."""


class CompletionAnswer(Answer):
    """`echoes` are the prompt texts to repeat before the choices, one a choice, or empty."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, token_text: Callable[[int], str], echoes: Sequence[str] = (), **common: Any) -> None:
        super().__init__(**common)
        self._token_text, self._echoes = token_text, echoes
        self._offsets = [0] * len(self.choices)

    def _content(self, choice: Choice) -> dict[str, Any]:
        echo = self._echoes[choice.index] if self._echoes else ""
        return {"index": choice.index, "text": echo + choice.text, "logprobs": self._logprobs(choice, choice.logprobs)}

    def _delta(self, choice: Choice, event: Event) -> dict[str, Any]:
        echo = self._echoes[choice.index] if self._echoes and choice.first is event else ""
        return {"index": choice.index, "text": echo + event.text, "logprobs": self._logprobs(choice, event.logprobs)}

    def _logprobs(self, choice: Choice, entries: Iterable[Logprob]) -> dict[str, Any] | None:
        if not self.wants_logprobs:
            return None
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            text = self._token_text(entry.token_id)
            found["tokens"].append(text)
            found["token_logprobs"].append(_finite(entry.logprob))
            # Pieces of characters read alike; the likeliest of them, which comes first, keeps the name.
            top = {self._token_text(token): _finite(value) for token, value in reversed(entry.top)}
            found["top_logprobs"].append(top)
            found["text_offset"].append(self._offsets[choice.index])
            self._offsets[choice.index] += len(text)
        return found


class ChatAnswer(Answer):
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, token_text: Callable[[int], str], **common: Any) -> None:
        super().__init__(**common)
        self._token_text = token_text

    def _content(self, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"index": choice.index, "message": message, "logprobs": self._logprobs(choice.logprobs)}

    def _delta(self, choice: Choice, event: Event) -> dict[str, Any]:
        # The role comes with the first token: a chunk before it would spoil the client's time to first token.
        delta = {"role": "assistant", "content": event.text} if choice.first is event else {"content": event.text}
        return {"index": choice.index, "delta": delta, "logprobs": self._logprobs(event.logprobs)}

    def _logprobs(self, entries: Iterable[Logprob]) -> dict[str, Any] | None:
        if not self.wants_logprobs:
            return None
        content = [
            {
                **self._token(entry.token_id, entry.logprob),
                "top_logprobs": [self._token(token, value) for token, value in entry.top],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._token_text(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
