"""Calls of functions in a model's output: found as the text comes, in the format of the model's chat template.

A `Dialect` says how a template asks for a call. The parser is a state machine over the text: content, the head of a
call up to its arguments, the arguments, and the rest up to the end of the call. The time is linear in the text but for
what is held back, of which there are at most `MAX_HELD_CHARS`. Whole and streamed answers are read by the same parser.
Not here: which calls are allowed, which a grammar says (`structure.py`); and whether the arguments of a call that the
model was free to make are valid, which clients must check, as with OpenAI.
"""

import re
import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NotRequired

from typing_extensions import TypedDict

from exeplan.runner.ipc.messages import ToolFormat

MAX_HELD_CHARS = 512
"""From the beginning of a call to its arguments, after which a text is no call; and of white space before a call."""
_LETTERS, _ID_CHARS = string.ascii_letters + string.digits, 9
"""Of the id of a call: the templates of Mistral's models take no other when it comes back in the next turn."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """A call is an object with `name` and `arguments` (the field's name) between `begin` and `end`.

    Where these are empty, an output that begins with such an object is a single call.
    """

    begin: str
    end: str
    arguments: str


DIALECTS = {
    "hermes": Dialect("<tool_call>", "</tool_call>", "arguments"),
    "llama3_json": Dialect("", "", "parameters"),
    "json": Dialect("", "", "arguments"),
}
"""By the names of `chat_template.tool_format`."""


class CalledFunction(TypedDict):
    name: NotRequired[str]
    arguments: str


class ToolCall(TypedDict):
    """OpenAI's: whole, or a piece in a stream, of which the first has id and name."""

    index: NotRequired[int]
    id: NotRequired[str]
    type: NotRequired[str]
    function: CalledFunction


@dataclass(slots=True)
class Parsed:
    """What a piece of text adds."""

    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    """At most one piece a call."""


class ToolParser:
    """The calls in one output. Feed it with `push`, and at the end with `finish`; `num_calls` were found so far."""

    def __init__(self, tools: ToolFormat) -> None:
        self._dialect, self._names, self._single = DIALECTS[tools.name], frozenset(tools.functions), tools.single
        self._head = re.compile(
            r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]*)"\s*,\s*'
            rf'"{self._dialect.arguments}"\s*:\s*(?=\{{)'
        )
        self.num_calls = 0
        self._state = self._content if self._dialect.begin else self._begin
        self._held = ""
        self._depth, self._in_string, self._escaped = 0, False, False

    def push(self, text: str) -> Parsed:
        """What can be told of the text so far."""
        parsed = Parsed()
        self._held += text
        while self._state(parsed):
            pass
        return parsed

    def finish(self) -> Parsed:
        """What was held back, after the last text."""
        parsed = Parsed()
        if self._state == self._in_head:
            parsed.content = self._dialect.begin + self._held
        elif self._state == self._content:
            parsed.content = self._held.rstrip() if self.num_calls else self._held
        elif self._state == self._begin:
            parsed.content = self._held
        self._held = ""
        return parsed

    # Each state reads what is held, and returns whether there may be more to read.

    def _content(self, parsed: Parsed) -> bool:
        """Text, of which the space before a call is no part; without a marker, all that follows."""
        begin = self._dialect.begin
        if not begin:
            parsed.content += self._held
            self._held = ""
            return False
        before, found, after = self._held.partition(begin)
        if found:
            parsed.content += before.rstrip()
            self._held, self._state = after, self._in_head
            return True
        sure = self._held[: len(self._held) - _overlap(self._held, begin)]
        said = sure.rstrip()
        if len(sure) - len(said) > MAX_HELD_CHARS:
            said = sure
        parsed.content += said
        self._held = self._held[len(said) :]
        return False

    def _begin(self, parsed: Parsed) -> bool:
        """The first character says whether an output without markers may be a call."""
        if not (first := self._held.lstrip()[:1]):
            return False
        self._state = self._in_head if first == "{" else self._content
        return True

    def _in_head(self, parsed: Parsed) -> bool:
        found = self._head.match(self._held)
        if found and found[1] in self._names:
            self._open(parsed, found[1])
            self._held, self._state = self._held[found.end() :], self._in_arguments
            return True
        if found or len(self._held) > MAX_HELD_CHARS or self._closes():
            parsed.content += self._dialect.begin + self._held
            self._held, self._state = "", self._content
        return False

    def _closes(self) -> bool:
        return bool(self._dialect.end) and self._dialect.end in self._held

    def _open(self, parsed: Parsed, name: str) -> None:
        call_id = "".join(secrets.choice(_LETTERS) for _ in range(_ID_CHARS))
        function: CalledFunction = {"name": name, "arguments": ""}
        parsed.calls.append({"index": self.num_calls, "id": call_id, "type": "function", "function": function})
        self.num_calls += 1

    def _in_arguments(self, parsed: Parsed) -> bool:
        """Up to the brace that closes the object."""
        for place, character in enumerate(self._held):
            if self._closes_object(character):
                self._add(parsed, self._held[: place + 1])
                self._held, self._state = self._held[place + 1 :], self._after
                return True
        self._add(parsed, self._held)
        self._held = ""
        return False

    def _closes_object(self, character: str) -> bool:
        if self._in_string:
            self._in_string = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
        elif character == '"':
            self._in_string = True
        elif character in "{}":
            self._depth += 1 if character == "{" else -1
            return self._depth == 0
        return False

    def _add(self, parsed: Parsed, arguments: str) -> None:
        if not arguments:
            return
        number = self.num_calls - 1
        if not parsed.calls or parsed.calls[-1]["index"] != number:
            parsed.calls.append({"index": number, "function": {"arguments": ""}})
        parsed.calls[-1]["function"]["arguments"] += arguments

    def _after(self, parsed: Parsed) -> bool:
        """Nothing follows a single call; another one, or text, follows the end of one of several."""
        end = self._dialect.end
        if self._single or not end:
            self._held = ""
            return False
        _, found, after = self._held.partition(end)
        self._held = after if found else self._held[len(self._held) - _overlap(self._held, end) :]
        if found:
            self._state = self._content
        return bool(found)


def whole_calls(pieces: Iterable[ToolCall]) -> list[ToolCall]:
    """The calls of an answer that is not streamed, without their numbers."""
    calls: list[ToolCall] = []
    for piece in pieces:
        if "id" in piece:
            calls.append({"id": piece["id"], "type": "function", "function": {**piece["function"]}})
        else:
            calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
    return calls


def _overlap(text: str, marker: str) -> int:
    """How many characters at the end of a text may be the beginning of the marker."""
    most = min(len(text), len(marker) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(marker[:size])), 0)
