"""What the output of a request must be, as the grammar that every process that samples compiles (`structures.py`).

Sources: OpenAI's `response_format`; vLLM's `structured_outputs`, and its older names `guided_json`, `guided_regex` and
`guided_choice`; llguidance's grammars (its variant of Lark, and JSON Schema 2020-12 as far as it can be followed token
by token). What cannot be followed is refused, never left out.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from exeplan.errors import InputError
from exeplan.runner.ipc.messages import ToolFormat
from exeplan.runner.server.openai.chat_request import Function
from exeplan.runner.server.openai.errors import RequestError
from exeplan.runner.server.openai.generation_request import MAX_SCHEMA_CHARS, Structure
from exeplan.runner.server.openai.tool_calls import DIALECTS, NAME

_JSON_STYLE = {"whitespace_pattern": r"( |\n[ \t]{0,24})?", "lenient": False, "coerce_one_of": False}
"""A space, or a line break with its indentation, so that white space ends; and no keyword is ignored."""
_ANY_OBJECT = {"type": "object"}
_NONE: Mapping[str, int] = {}
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def grammar_of(structure: Structure, *, space_first: bool = False) -> str:
    """With `space_first` a space may come before it, which is no part of an answer that begins with it.

    Raises RequestError for a schema that is none, or too large.
    """
    from llguidance import LLMatcher, regex_to_lark

    match structure.kind:
        case "regex":  # Digits and letters are those of ASCII, as in JSON Schema.
            output = f"/{regex_to_lark(structure.value, 'dw')}/"
        case "choice":
            output = " | ".join(map(_quoted, structure.value))
        case _:
            schema = _schema(structure.value or _ANY_OBJECT, structure.param)
            if not space_first:
                return LLMatcher.grammar_from_json_schema(schema)
            output = f"%json {schema}"
    return LLMatcher.grammar_from_lark(f"start: {'/ ?/ ' * space_first}output\noutput: {output}")


def tool_grammar(functions: Sequence[Function], tools: ToolFormat, special: Mapping[str, int] = _NONE) -> str:
    """Calls of these functions and nothing else: one of them, or several where the format has a place for them.

    `special` are the ids of the tokens that mark calls, where they are special. Raises RequestError for parameters that
    are no schema, or too large.
    """
    from llguidance import LLMatcher

    written = DIALECTS[tools.name].forced
    assert written
    calls = "call" if tools.single or written.between is None else f"call ({_text(written.between, special)} call)*"
    rules = [
        f"start: {_text(written.before, special)} {calls} {_text(written.after, special)}",
        f"call: {' | '.join(f'f{number}' for number in range(len(functions)))}",
    ]
    rest = MAX_SCHEMA_CHARS
    for number, function in enumerate(functions):
        schema = _schema(_arguments(function), f"the parameters of {function.name}", most=rest)
        rest -= len(schema)
        before, after = (_text(text.replace(NAME, function.name), special) for text in written.call)
        rules += [f"f{number}: {before} a{number} {after}", f"a{number}: %json {schema}"]
    return LLMatcher.grammar_from_lark("\n".join(rules))


def _arguments(function: Function) -> Mapping[str, Any]:
    """The schema of its arguments, which are an object even where it does not say so. Raises RequestError where it
    says otherwise."""
    if function.parameters is None:
        return _NO_ARGUMENTS
    name, kind = f"the parameters of {function.name}", function.parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise RequestError(f"{name} must be those of an object, found the type {json.dumps(kind)}", param=name)
    return {**function.parameters, "type": "object"}


def _text(text: str, special: Mapping[str, int]) -> str:
    """An exact text as terms of Lark, of which special tokens are some."""
    parts = re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]
    return " ".join(f"<[{special[part]}]>" if part in special else _quoted(part) for part in parts if part)


def refused(error: InputError, param: str) -> RequestError:
    """What `check_grammar` says of a grammar, as the answer to the request."""
    return RequestError(f"{param} cannot be followed: {error}", param=param)


def _schema(given: Mapping[str, Any], name: str, *, most: int = MAX_SCHEMA_CHARS) -> str:
    """As JSON text, in the style that outputs are to have."""
    if "x-guidance" in given:
        raise RequestError(f"{name}: 'x-guidance' is no keyword of JSON Schema", param=name)
    text = json.dumps({**given, "x-guidance": _JSON_STYLE}, ensure_ascii=False)
    if len(text) > most:
        raise RequestError(f"{name}: a schema may have at most {MAX_SCHEMA_CHARS} characters in all", param=name)
    return text


def _quoted(text: str) -> str:
    """As a string of Lark, which is one of JSON."""
    return json.dumps(text, ensure_ascii=False)
