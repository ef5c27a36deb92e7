"""Calls of functions in a model's output: found as the text comes, in the format of the model's chat template.

A `Dialect` says how a template asks for a call. The parser is a state machine over the text: content, the head of a
call up to its arguments, the arguments (`tool_arguments.py`), and the rest up to the end of the call. The time is
linear in the text but for what is held back: at most `MAX_HELD_CHARS` and one argument, or the arguments of a call that
names its function after them. Whole and streamed answers are read by the same parser.
Sources: the chat templates of the models that a dialect names, which show how a call of an earlier turn is written.
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
from exeplan.runner.server.openai.tool_arguments import (
    GLM45,
    MAX_HELD_CHARS,
    QWEN3_CODER,
    Arguments,
    JsonArguments,
    TaggedArguments,
    Tags,
    overlap,
)

_LETTERS, _ID_CHARS = string.ascii_letters + string.digits, 9
"""Of the id of a call: the templates of Mistral's models take no other when it comes back in the next turn."""
_PIECE_CHARS = 4096
"""Of a whole text, which is read in pieces, as what is left is copied after each call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How calls are written.

    `begin` comes before a call, or before the first one where `again` comes before the others; then `head`, whose group
    is the function's name, the arguments, and `end`. Without `begin`, an output that begins with a brace is one call.
    """

    begin: str
    head: re.Pattern[str]
    end: str
    again: str = ""
    """After `end`, if another call follows."""
    close: str = ""
    """After the last `end`."""
    bare: str = ""
    """What a head begins with, where models are known to leave out `begin`."""
    tags: Tags | None = None
    """Of arguments that are not one JSON object."""
    early: re.Pattern[str] | None = None
    """A head whose arguments come before the name."""
    forced: "Written | None" = None
    """For grammars of calls; None where calls that are asked for are written as JSON."""
    markers: tuple[str, ...] = ()
    """The texts above that a tokenizer may hide in its output, as special tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The exact text around the calls of one answer, and around the arguments of each; NAME is the function."""

    before: str = ""
    call: tuple[str, str]
    between: str | None
    """None where an answer has one call."""
    after: str = ""


NAME = "\N{NULL}"
_NAMED = r'"name"\s*:\s*"([^"\\]*)"'
_GIVEN = r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
_OBJECT = rf'\s*\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?(?:"id"\s*:\s*"[^"\\]*"\s*,\s*)?{_NAMED}\s*,\s*{_GIVEN}'
_OPENED = re.compile(rf'\s*\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?{_GIVEN}')
_LATE_NAME = re.compile(rf"\s*,\s*{_NAMED}")
_CALLS, _CALL, _SEP = "<｜tool▁calls▁{}｜>", "<｜tool▁call▁{}｜>", "<｜tool▁sep｜>"
_DEEPSEEK = (_CALLS.format("begin"), _CALLS.format("end"), _CALL.format("begin"), _CALL.format("end"), _SEP)

DIALECTS = {
    "hermes": Dialect(
        begin="<tool_call>",
        head=re.compile(_OBJECT),
        early=_OPENED,
        end="</tool_call>",
        forced=Written(
            call=(f'<tool_call>\n{{"name": "{NAME}", "arguments": ', "}\n</tool_call>"),
            between="\n",
        ),
        markers=("<tool_call>", "</tool_call>"),
    ),
    "llama3_json": Dialect(
        begin="",
        head=re.compile(_OBJECT),
        early=_OPENED,
        end="",
        forced=Written(call=(f'{{"name": "{NAME}", "parameters": ', "}"), between=None),
    ),
    "json": Dialect(
        begin="",
        head=re.compile(_OBJECT),
        end="",
        forced=Written(call=(f'{{"name": "{NAME}", "arguments": ', "}"), between=None),
    ),
    "mistral": Dialect(
        begin="[TOOL_CALLS]",
        head=re.compile(rf"\s*\[?{_OBJECT}"),
        end="}",
        again=",",
        close="]",
        forced=Written(
            before="[TOOL_CALLS] [",
            call=(f'{{"name": "{NAME}", "arguments": ', "}"),
            between=", ",
            after="]",
        ),
        markers=("[TOOL_CALLS]",),
    ),
    "mistral_v11": Dialect(
        begin="[TOOL_CALLS]",
        head=re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)", re.ASCII),
        end="",
        forced=Written(call=(f"[TOOL_CALLS]{NAME}[ARGS]", ""), between=""),
        markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ),
    "deepseek_v3": Dialect(
        begin=_DEEPSEEK[0],
        head=re.compile(rf"\s*(?:{_DEEPSEEK[2]})?\s*function{_SEP}([\w.-]+)\s*```json\s*(?=\{{)", re.ASCII),
        end=_DEEPSEEK[3],
        again=_DEEPSEEK[2],
        close=_DEEPSEEK[1],
        forced=Written(
            before=_DEEPSEEK[0],
            call=(f"{_DEEPSEEK[2]}function{_SEP}{NAME}\n```json\n", f"\n```{_DEEPSEEK[3]}"),
            between="\n",
            after=_DEEPSEEK[1],
        ),
        markers=_DEEPSEEK,
    ),
    "deepseek_v31": Dialect(
        begin=_DEEPSEEK[0],
        head=re.compile(rf"\s*(?:{_DEEPSEEK[2]})?\s*([\w.-]+){_SEP}\s*(?=\{{)", re.ASCII),
        end=_DEEPSEEK[3],
        again=_DEEPSEEK[2],
        close=_DEEPSEEK[1],
        forced=Written(
            before=_DEEPSEEK[0],
            call=(f"{_DEEPSEEK[2]}{NAME}{_SEP}", _DEEPSEEK[3]),
            between="",
            after=_DEEPSEEK[1],
        ),
        markers=_DEEPSEEK,
    ),
    "qwen3_coder": Dialect(
        begin="<tool_call>",
        head=re.compile(r"\s*<function=([^>\s]+)>"),
        bare="<function=",
        end="</function>",
        close="</tool_call>",
        tags=QWEN3_CODER,
        markers=("<tool_call>", "</tool_call>"),
    ),
    "glm45": Dialect(
        begin="<tool_call>",
        head=re.compile(r"\s*([\w.-]+)\s*(?=<arg_key>|</tool_call>)", re.ASCII),
        end="</tool_call>",
        tags=GLM45,
        markers=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "harmony": Dialect(
        begin="",
        head=re.compile(r"(?!)"),
        end="",
        forced=Written(
            call=(f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>", ""), between=None
        ),
        markers=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
    ),
}
"""By the names of `chat_template.tool_format`, and `json` for a template whose format is not known; `harmony.py` reads
the last one."""


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
    reasoning: str = ""
    """Of formats that tell it from content."""


class ToolParser:
    """The calls in one output. Feed it with `push`, and at the end with `finish`; `num_calls` were found so far."""

    def __init__(self, tools: ToolFormat) -> None:
        self._dialect, self._single, self._types = DIALECTS[tools.name], tools.single, tools.types
        self._names = frozenset(tools.functions)
        self.num_calls = 0
        self._state = self._content if self._dialect.begin else self._begin
        self._held = ""
        self._opening = self._dialect.begin
        """What the head of this call came after, with the space before it, for the case that it is none."""
        self._arguments: Arguments = JsonArguments()
        self._early: list[str] = []
        """Arguments of a call whose name is to come, and what came before them."""

    def push(self, text: str) -> Parsed:
        """What can be told of the text so far."""
        parsed = Parsed()
        self._held += text
        while self._state(parsed):
            pass
        return parsed

    def whole(self, text: str) -> Parsed:
        """What can be told of a whole text."""
        parsed = Parsed()
        for begin in range(0, len(text), _PIECE_CHARS):
            piece = self.push(text[begin : begin + _PIECE_CHARS])
            parsed.content += piece.content
            parsed.calls += piece.calls
            parsed.reasoning += piece.reasoning
        self.end(parsed)
        return parsed

    def end(self, parsed: Parsed) -> None:
        """Adds what was held back to what the last text has added."""
        rest = self.finish()
        parsed.content += rest.content
        parsed.reasoning += rest.reasoning
        parsed.calls += rest.calls

    def finish(self) -> Parsed:
        """What was held back, after the last text."""
        parsed = Parsed()
        if self._state == self._in_head:
            parsed.content = self._opening + self._held
        elif self._state in (self._in_early, self._late_name):
            parsed.content = self._opening + "".join(self._early) + self._held
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
        bare = self._dialect.bare
        if bare and (place := before.find(bare)) >= 0:
            before, found, after = before[:place], "", self._held[place:]
        elif not found:
            return self._text(parsed)
        said = before.rstrip()
        parsed.content += said
        self._held, self._state, self._opening = after, self._in_head, before[len(said) :] + found
        return True

    def _text(self, parsed: Parsed) -> bool:
        """What is held, but for what may begin a call."""
        kept = max(overlap(self._held, mark) for mark in (self._dialect.begin, self._dialect.bare))
        sure = self._held[: len(self._held) - kept]
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
        found = self._dialect.head.match(self._held)
        if found and found[1] in self._names:
            self._open(parsed, found[1])
            self._held, self._state = self._held[found.end() :], self._in_arguments
            return True
        if self._dialect.early and (opened := self._dialect.early.match(self._held)):
            self._early, self._arguments = [opened[0]], JsonArguments()
            self._held, self._state = self._held[opened.end() :], self._in_early
            return True
        if found or len(self._held) > MAX_HELD_CHARS or self._has_mark():
            return self._no_call(parsed)
        return False

    def _has_mark(self) -> bool:
        """Whether the call ends, or another one begins, before its arguments."""
        return any(mark and mark in self._held for mark in (self._dialect.begin, self._dialect.end))

    def _no_call(self, parsed: Parsed) -> bool:
        """What has been taken for the beginning of a call is text; a call may be in what follows."""
        begin = self._dialect.bare if self._held.startswith(self._dialect.bare) else ""
        parsed.content += self._opening + "".join(self._early) + begin
        self._held, self._early, self._state = self._held.removeprefix(begin), [], self._content
        return True

    def _in_early(self, parsed: Parsed) -> bool:
        """Arguments whose function is named after them; they are told when it is."""
        piece, rest = self._arguments.push(self._held)
        self._early.append(piece)
        self._held = rest or ""
        if rest is not None:
            self._state = self._late_name
        return rest is not None

    def _late_name(self, parsed: Parsed) -> bool:
        found = _LATE_NAME.match(self._held)
        if found and found[1] in self._names:
            self._open(parsed, found[1])
            self._add(parsed, "".join(self._early[1:]))
            self._held, self._state, self._early = self._held[found.end() :], self._after, []
            return True
        if found or len(self._held) > MAX_HELD_CHARS or self._has_mark():
            return self._no_call(parsed)
        return False

    def _open(self, parsed: Parsed, name: str) -> None:
        call_id = "".join(secrets.choice(_LETTERS) for _ in range(_ID_CHARS))
        function: CalledFunction = {"name": name, "arguments": ""}
        parsed.calls.append({"index": self.num_calls, "id": call_id, "type": "function", "function": function})
        self.num_calls += 1
        tags = self._dialect.tags
        self._arguments = TaggedArguments(tags, self._types.get(name, {})) if tags else JsonArguments()

    def _in_arguments(self, parsed: Parsed) -> bool:
        piece, rest = self._arguments.push(self._held)
        self._add(parsed, piece)
        self._held = rest or ""
        if rest is not None:
            self._state = self._after
        return rest is not None

    def _add(self, parsed: Parsed, arguments: str) -> None:
        if not arguments:
            return
        number = self.num_calls - 1
        if not parsed.calls or parsed.calls[-1]["index"] != number:
            parsed.calls.append({"index": number, "function": {"arguments": ""}})
        parsed.calls[-1]["function"]["arguments"] += arguments

    def _after(self, parsed: Parsed) -> bool:
        """Nothing follows a single call; another one, or text, follows the end of one of several."""
        dialect = self._dialect
        if self._single or not (dialect.begin or dialect.end):
            self._held = ""
            return False
        if not dialect.end:
            self._state = self._content
            return True
        _, found, after = self._held.partition(dialect.end)
        self._held = after if found else self._held[len(self._held) - overlap(self._held, dialect.end) :]
        if found:
            self._state = self._between if dialect.close else self._content
        return bool(found)

    def _between(self, parsed: Parsed) -> bool:
        """After a call of a list: another one, or the end of the list."""
        again, close, rest = self._dialect.again, self._dialect.close, self._held.lstrip()
        unsure = not rest or any(mark != rest and mark.startswith(rest) for mark in (again, close))
        if unsure and len(self._held) <= MAX_HELD_CHARS:
            return False
        if again and rest.startswith(again):
            self._held, self._opening, self._state = rest.removeprefix(again), again, self._in_head
        else:
            self._held = rest.removeprefix(close) if rest.startswith(close) else self._held
            self._state = self._content
        return True


def whole_calls(pieces: Iterable[ToolCall]) -> list[ToolCall]:
    """The calls of an answer that is not streamed, without their numbers."""
    calls: list[ToolCall] = []
    for piece in pieces:
        if "id" in piece:
            calls.append({"id": piece["id"], "type": "function", "function": {**piece["function"]}})
        else:
            calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
    return calls
