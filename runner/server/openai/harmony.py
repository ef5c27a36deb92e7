"""Harmony: the format of gpt-oss, in which an output is a list of messages, each to a recipient and on a channel.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
    <|constrain|>json<|message|>{...}<|call|>

A message to a function is a call of it, one on the channel `analysis` is reasoning, all others are content. The parser
takes time linear in the text. An output that begins with no header is content as it is.
Source: the chat template of openai/gpt-oss-20b, and OpenAI's description of the format.
Not here: tools that are no functions of the request, such as `browser`; a message to one is content.
"""

import re

from exeplan.runner.ipc.messages import ToolFormat
from exeplan.runner.server.openai.tool_arguments import MAX_HELD_CHARS, overlap
from exeplan.runner.server.openai.tool_calls import Parsed, ToolParser

_BODY, _ENDS = "<|message|>", ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([a-zA-Z0-9_.-]+)")
_HEADS = ("<|", "to=")
_END = re.compile("|".join(map(re.escape, _ENDS)))


def parser_of(tools: ToolFormat) -> ToolParser:
    """The parser of one output."""
    return HarmonyParser(tools) if tools.name == "harmony" else ToolParser(tools)


class HarmonyParser(ToolParser):
    """The messages of one output."""

    def __init__(self, tools: ToolFormat) -> None:
        super().__init__(tools)
        self._state = self._first
        self._kind = "content"
        """Of the message whose body is being read: content, reasoning, call; or none, of a call beyond the first."""
        self._said = False
        """Whether there was content, which the next message's does not run into."""

    def finish(self) -> Parsed:
        """What was held back. A header that is cut is none of the text."""
        parsed = Parsed()
        if self._state == self._body:
            self._tell(parsed, self._held)
        elif self._state == self._first:
            parsed.content = self._held
        self._held = ""
        return parsed

    def _first(self, parsed: Parsed) -> bool:
        """Whether the output has headers at all."""
        begins = self._held.lstrip()
        if any(begins != mark and mark.startswith(begins) for mark in _HEADS):
            return False
        self._state = self._header if begins.startswith(_HEADS) else self._content
        return True

    def _header(self, parsed: Parsed) -> bool:
        header, found, after = self._held.partition(_BODY)
        if not found:
            if len(self._held) <= MAX_HELD_CHARS:
                return False
            self._state = self._content
            return True
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._kind = "reasoning" if channel and channel[1] == "analysis" else "content"
        if recipient and recipient[1] in self._names:
            self._kind = "none" if self._single and self.num_calls else "call"
            if self._kind == "call":
                self._open(parsed, recipient[1])
        elif self._kind == "content" and self._said:
            parsed.content += "\n"
        self._held, self._state = after, self._body
        return True

    def _body(self, parsed: Parsed) -> bool:
        if found := _END.search(self._held):
            self._tell(parsed, self._held[: found.start()])
            self._held, self._state = self._held[found.end() :], self._header
            return True
        kept = max(overlap(self._held, end) for end in _ENDS)
        self._tell(parsed, self._held[: len(self._held) - kept])
        self._held = self._held[len(self._held) - kept :]
        return False

    def _tell(self, parsed: Parsed, text: str) -> None:
        if self._kind == "call":
            self._add(parsed, text)
        elif self._kind == "reasoning":
            parsed.reasoning += text
        elif self._kind == "content":
            self._said = self._said or bool(text)
            parsed.content += text
