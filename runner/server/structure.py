"""What the output of a request must be, as the grammar that every process that samples compiles (`structures.py`).

Sources: OpenAI's `response_format`; vLLM's `structured_outputs`, and its older names `guided_json`, `guided_regex` and
`guided_choice`; llguidance's grammars (its variant of Lark, and JSON Schema 2020-12 as far as it can be followed token
by token). What cannot be followed is refused, never left out.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from exeplan.errors import InputError
from exeplan.runner.ipc.messages import ToolFormat
from exeplan.runner.server.protocol import MAX_SCHEMA_CHARS, Function, RequestError, Structure
from exeplan.runner.server.tool_calls import DIALECTS

_JSON_STYLE = {"whitespace_pattern": r"( |\n[ \t]{0,24})?", "lenient": False, "coerce_one_of": False}
"""A space, or a line break with its indentation, so that white space ends; and no keyword is ignored."""
_ANY_OBJECT = {"type": "object"}
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def grammar_of(structure: Structure) -> str:
    """Raises RequestError for a schema that is none, or too large."""
    from llguidance import LLMatcher, regex_to_lark

    match structure.kind:
        case "regex":  # Digits and letters are those of ASCII, as in JSON Schema.
            return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(structure.value, 'dw')}/")
        case "choice":
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(_quoted, structure.value)))
        case _:
            return LLMatcher.grammar_from_json_schema(_schema(structure.value or _ANY_OBJECT, structure.param))


def tool_grammar(functions: Sequence[Function], tools: ToolFormat) -> str:
    """Calls of these functions and nothing else: one of them, or several where the format has a place for them.

    Raises RequestError for parameters that are no schema, or too large.
    """
    from llguidance import LLMatcher

    dialect = DIALECTS[tools.name]
    calls = "call" if tools.single or not dialect.begin else 'call ("\\n" call)*'
    rules = [
        f"start: {calls}",
        f"call: {_around(dialect.begin, f'({_alternatives(len(functions))})', dialect.end)}",
    ]
    rest = MAX_SCHEMA_CHARS
    for number, function in enumerate(functions):
        given = _NO_ARGUMENTS if function.parameters is None else function.parameters
        schema = _schema(given, f"the parameters of {function.name}", most=rest)
        rest -= len(schema)
        head = f'{{"name": {json.dumps(function.name)}, "{dialect.arguments}": '
        rules += [f"f{number}: {_quoted(head)} a{number} {_quoted('}')}", f"a{number}: %json {schema}"]
    return LLMatcher.grammar_from_lark("\n".join(rules))


def refused(error: InputError, param: str) -> RequestError:
    """What `check_grammar` says of a grammar, as the answer to the request."""
    return RequestError(f"{param} cannot be followed: {error}", param=param)


def _around(begin: str, body: str, end: str) -> str:
    return f"{_quoted(begin + chr(10))} {body} {_quoted(chr(10) + end)}" if begin else body


def _alternatives(count: int) -> str:
    return " | ".join(f"f{number}" for number in range(count))


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
