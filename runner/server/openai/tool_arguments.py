"""The arguments of one call of a function, read as its text comes and told as pieces of JSON.

`JsonArguments` are an object, which is told as it is written. `TaggedArguments` are XML-like pairs of a name and a
value, as Qwen3-Coder and GLM-4.5 write them, whose values become JSON by the types that the function's schema declares.
Both take time linear in the text, and hold back no more than a value.
Not here: which function is called (`tool_calls.py`), and whether the arguments satisfy the schema.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

MAX_HELD_CHARS = 512
"""Of what leads to a call, an argument or its value; a text that goes on for longer is none."""
_PLAIN_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
"""As JSON, whatever their case: templates show a call's booleans to the model as Python writes them."""
_MAX_STEPS = 500
"""Of looking for types in a schema, whose references may go round in a circle and whose branches may multiply; less
than Python's limit on calls in each other."""
_KINDS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (bool, ("boolean",)),
    (int, ("integer", "number")),
    (float, ("number", "integer")),
    (str, ("string",)),
    (list, ("array",)),
    (dict, ("object",)),
    (type(None), ("null",)),
)


class Arguments(Protocol):
    """Of one call."""

    def push(self, text: str) -> tuple[str, str | None]:
        """The JSON that this adds, and the text after the end of the arguments; None where they go on."""


class JsonArguments:
    """An object, up to the brace that closes it."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped = 0, False, False

    def push(self, text: str) -> tuple[str, str | None]:
        for place, character in enumerate(text):
            if self._closes_object(character):
                return text[: place + 1], text[place + 1 :]
        return text, None

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


@dataclass(frozen=True, slots=True)
class Tags:
    """How a format writes arguments: `key` matches up to a value and has its name; `value_end` ends the value, and
    `end`, which is left in the text, the arguments.
    """

    key: re.Pattern[str]
    value_end: str
    end: str
    on_lines: bool
    """A value has a line break before it and after it that are no part of it."""


QWEN3_CODER = Tags(re.compile(r"\s*<parameter=([^>\n]{1,256})>"), "</parameter>", "</function>", on_lines=True)
GLM45 = Tags(
    re.compile(r"\s*<arg_key>([^<]{1,256})</arg_key>\s*<arg_value>"), "</arg_value>", "</tool_call>", on_lines=False
)


class TaggedArguments:
    """Pairs of a name and a value; `types` are the JSON types of an argument by its name, where they are declared.

    A string is told as it comes, other values when they end. Of an argument that is given twice the first value counts.
    """

    def __init__(self, tags: Tags, types: Mapping[str, Sequence[str]]) -> None:
        self._tags, self._types = tags, types
        self._held, self._names = "", set[str]()
        self._name: str | None = None
        """Of the argument whose value is being read."""
        self._at_begin = False
        """Of the value."""
        self._repeats = False
        """Whether the argument had a value before."""

    def push(self, text: str) -> tuple[str, str | None]:
        self._held += text
        told = ""
        while True:
            if self._name is None:
                piece, going = self._key()
                if going is None:
                    return told + piece, self._held
            else:
                piece, going = self._value(self._name)
            told += "" if self._repeats else piece
            if not going:
                return told, None

    def _key(self) -> tuple[str, bool | None]:
        """What is told, and whether there may be more to read; None at the end of the arguments."""
        if found := self._tags.key.match(self._held):
            self._name, self._held, self._at_begin = found[1].strip(), self._held[found.end() :], self._tags.on_lines
            self._repeats = self._name in self._names
            head = f"{', ' if self._names else '{'}{json.dumps(self._name, ensure_ascii=False)}: "
            self._names.add(self._name)
            return head + ('"' if self._streams(self._name) else ""), True
        if self._held.lstrip().startswith(self._tags.end) or len(self._held) > MAX_HELD_CHARS:
            return ("" if self._names else "{") + "}", None
        return "", False

    def _value(self, name: str) -> tuple[str, bool]:
        if self._at_begin and self._held:
            self._held, self._at_begin = self._held.removeprefix("\n"), False
        value, found, after = self._held.partition(self._tags.value_end)
        if found:
            self._name, self._held = None, after
            text = value.removesuffix("\n") if self._tags.on_lines else value
            return (_escaped(text) + '"' if self._streams(name) else self._as_json(name, text)), True
        if not self._streams(name):
            return "", False
        end = self._tags.value_end
        kept = max(overlap(self._held, "\n" + end) if self._tags.on_lines else 0, overlap(self._held, end))
        sure = self._held[: len(self._held) - kept]
        self._held = self._held[len(sure) :]
        return _escaped(sure), False

    def _streams(self, name: str) -> bool:
        return tuple(self._types.get(name, ())) == ("string",)

    def _as_json(self, name: str, text: str) -> str:
        """A value as JSON of a declared type where it is one, else as a string."""
        types, bare = self._types.get(name, ()), text.strip()
        word = _PLAIN_WORDS.get(bare.lower())
        if word is not None and ("null" if word == "null" else "boolean") in types:
            return word
        try:
            value = msgspec.json.decode(bare)
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            return json.dumps(text, ensure_ascii=False)
        if types and not any(type(value) is kind and set(names) & set(types) for kind, names in _KINDS):
            return json.dumps(text, ensure_ascii=False)
        return bare


def declared_types(schema: Mapping[str, Any] | None) -> dict[str, list[str]]:
    """The JSON types of each argument of a function's schema; of one that declares none, nothing."""
    properties = schema.get("properties") if schema else None
    if not schema or not isinstance(properties, Mapping):
        return {}
    steps = iter(range(_MAX_STEPS))
    found = {name: sorted(_types(each, schema, steps)) for name, each in properties.items()}
    return {name: types for name, types in found.items() if types}


def _types(given: Any, root: Mapping[str, Any], steps: Iterator[int]) -> set[str]:
    """Nothing where any type may be meant. A reference that leads nowhere, or round in a circle, says nothing."""
    if not isinstance(given, Mapping) or next(steps, None) is None:
        return set()
    if isinstance(given.get("$ref"), str):
        return _types(_referred(given["$ref"], root), root, steps)
    stated = given.get("type")
    if isinstance(stated, str):
        return {stated}
    if isinstance(stated, list):
        return {name for name in stated if isinstance(name, str)}
    values = [given["const"]] if "const" in given else given.get("enum")
    if isinstance(values, list):
        return {names[0] for value in values for kind, names in _KINDS if type(value) is kind}
    branches = given.get("anyOf", given.get("oneOf"))
    each = [_types(branch, root, steps) for branch in branches] if isinstance(branches, list) else []
    return set().union(*each) if all(each) else set()


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    at: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        at = at.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(at, Mapping) else None
    return at if reference.startswith("#") else None


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def overlap(text: str, marker: str) -> int:
    """How many characters at the end of a text may be the beginning of the marker."""
    most = min(len(text), len(marker) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(marker[:size])), 0)
