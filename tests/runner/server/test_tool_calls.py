"""Calls of functions: told to the model by its template, found in its output, forced where asked, and answered."""

import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jsonschema_rs
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from exeplan.core.models.model import load_model_spec
from exeplan.errors import InputError
from exeplan.runner.compute.tokens.structures import check_grammar
from exeplan.runner.engine.chat_template import UNKNOWN_TOOL_FORMAT, ChatTemplate
from exeplan.runner.engine.tokenizer import structure_tokenizer
from exeplan.runner.ipc.messages import ToolFormat
from exeplan.runner.server.openai.chat_request import Function
from exeplan.runner.server.openai.errors import RequestError
from exeplan.runner.server.openai.harmony import parser_of
from exeplan.runner.server.openai.structure import tool_grammar
from exeplan.runner.server.openai.tool_arguments import MAX_HELD_CHARS, declared_types
from exeplan.runner.server.openai.tool_calls import DIALECTS, ToolParser, whole_calls

from .conftest import Running

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "pattern": "^[a-z]{1,6}$"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "tells it", "parameters": PARAMETERS}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
ASK = {"role": "user", "content": "how is it?"}
HERMES = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Say <tool_call>{"name": <name>, "arguments": <arguments>}</tool_call>\n{% endif %}'
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}({{ call.function.arguments.city }})"
    "</tool_call>{% endfor %}{% if m.tool_call_id %}[{{ m.tool_call_id }}]{% endif %}\n{% endfor %}"
    "<|assistant|>"
)
LLAMA = 'Respond {"name": function name, "parameters": dictionary of argument name and its value} {{ tools }}'
TYPES = {
    "weather": {
        "city": ["string"],
        "days": ["integer"],
        "sure": ["boolean"],
        "at": ["null", "string"],
        "places": ["array"],
        "how": ["object", "string"],
    }
}
FORMATS = {
    "hermes": ToolFormat(name="hermes", functions=("weather", "clock"), single=False),
    "one": ToolFormat(name="hermes", functions=("weather", "clock"), single=True),
    "llama": ToolFormat(name="llama3_json", functions=("weather", "clock"), single=False),
    "mistral": ToolFormat(name="mistral", functions=("weather", "clock"), single=False),
    "one of a list": ToolFormat(name="mistral", functions=("weather", "clock"), single=True),
    "mistral 11": ToolFormat(name="mistral_v11", functions=("weather", "clock"), single=False),
    "deepseek": ToolFormat(name="deepseek_v3", functions=("weather", "clock"), single=False),
    "deepseek 3.1": ToolFormat(name="deepseek_v31", functions=("weather", "clock"), single=False),
    "qwen": ToolFormat(name="qwen3_coder", functions=("weather", "clock"), single=False, types=TYPES),
    "harmony": ToolFormat(name="harmony", functions=("weather", "clock"), single=False),
    "glm": ToolFormat(name="glm45", functions=("weather", "clock"), single=False, types=TYPES),
}
Read = tuple[str, list[tuple[str, str]]]


def read(how: str, text: str, cuts: list[int] = []) -> Read:  # noqa: B006 - never changed
    """Content and calls of a text that comes in pieces."""
    parser, places = parser_of(FORMATS[how]), [0, *sorted(cuts), len(text)]
    parsed = [parser.push(text[a:b]) for a, b in itertools.pairwise(places)] + [parser.finish()]
    calls = whole_calls(piece for each in parsed for piece in each.calls)
    assert len({call["id"] for call in calls}) == len(calls) == parser.num_calls
    found = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return "".join(each.content for each in parsed), found


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "a}\\"{b", "days": 1}}\n</tool_call>'
ARGUMENTS = '{"city": "a}\\"{b", "days": 1}'
READINGS: dict[str, tuple[str, str, Read]] = {
    "text": ("hermes", "hello <tool> you ", ("hello <tool> you ", [])),
    "a call": ("hermes", CALL, ("", [("weather", ARGUMENTS)])),
    "text and calls": ("hermes", f"I look.\n{CALL}\n{CALL}\n", ("I look.", [("weather", ARGUMENTS)] * 2)),
    "text between": ("hermes", f"a {CALL} b {CALL} c", ("a b c", [("weather", ARGUMENTS)] * 2)),
    "one of two": ("one", f"{CALL}\n{CALL}", ("", [("weather", ARGUMENTS)])),
    "no arguments": ("hermes", '<tool_call>{"name": "clock", "arguments": {}}</tool_call>', ("", [("clock", "{}")])),
    "cut": ("hermes", CALL[:60], ("", [("weather", CALL[CALL.index('{"city') : 60])])),
    "cut in the marker": ("hermes", "a <tool_ca", ("a <tool_ca", [])),
    "cut in the head": ("hermes", '<tool_call>{"name": "wea', ('<tool_call>{"name": "wea', [])),
    "an unknown function": ("hermes", CALL.replace("weather", "x"), (CALL.replace("weather", "x"), [])),
    "no JSON": ("hermes", "<tool_call>what</tool_call> so", ("<tool_call>what</tool_call> so", [])),
    "a long head": ("hermes", "<tool_call>" + "x" * 600, ("<tool_call>" + "x" * 600, [])),
    "a call after an unknown function": (
        "hermes",
        f"{CALL.replace('weather', 'x')}\n{CALL}",
        (CALL.replace("weather", "x"), [("weather", ARGUMENTS)]),
    ),
    "a call after a mention": (
        "hermes",
        f"I write <tool_call> so: {CALL} and it",
        ("I write <tool_call> so: and it", [("weather", ARGUMENTS)]),
    ),
    "a call after a mention far before": (
        "hermes",
        f"a <tool_call> {'x ' * 600}{CALL}",
        (f"a <tool_call> {'x ' * 600}".rstrip(), [("weather", ARGUMENTS)]),
    ),
    "a call after arguments of an unknown function": (
        "hermes",
        f'<tool_call>{{"arguments": {{}}, "name": "x"}}</tool_call>{CALL}',
        ('<tool_call>{"arguments": {}, "name": "x"}</tool_call>', [("weather", ARGUMENTS)]),
    ),
    "llama": ("llama", '{"name": "clock", "parameters": {"a": {}}}', ("", [("clock", '{"a": {}}')])),
    "llama, typed": (
        "llama",
        '\n{"type": "function", "name": "clock", "parameters": {}} and more',
        ("", [("clock", "{}")]),
    ),
    "llama, text": (
        "llama",
        'it is {"name": "clock", "parameters": {}}',
        ('it is {"name": "clock", "parameters": {}}', []),
    ),
    "llama, other JSON": ("llama", '{"colour": 1}', ('{"colour": 1}', [])),
    "arguments first": (
        "hermes",
        'so <tool_call>\n{"arguments": {"a": {"b": "}"}}, "name": "weather"}\n</tool_call> it',
        ("so it", [("weather", '{"a": {"b": "}"}}')]),
    ),
    "arguments of nothing": (
        "hermes",
        '<tool_call>{"arguments": {"a": 1}}</tool_call> it',
        ('<tool_call>{"arguments": {"a": 1}}</tool_call> it', []),
    ),
    "arguments first, cut": ("hermes", '<tool_call>{"arguments": {"a"', ('<tool_call>{"arguments": {"a"', [])),
    "parameters": ("hermes", '<tool_call>{"name": "clock", "parameters": {}}</tool_call>', ("", [("clock", "{}")])),
    "a list": (
        "mistral",
        'so [TOOL_CALLS] [{"name": "weather", "arguments": {"city": "]}"}, "id": "abcdefghi"}, '
        '{"name": "clock", "arguments": {}}]',
        ("so", [("weather", '{"city": "]}"}'), ("clock", "{}")]),
    ),
    "one of a list": (
        "one of a list",
        '[TOOL_CALLS][{"name": "clock", "arguments": {}}, {"name": "clock", "arguments": {}}]',
        ("", [("clock", "{}")]),
    ),
    "a list with an unknown function": (
        "mistral",
        '[TOOL_CALLS][{"name": "clock", "arguments": {}}, {"name": "x", "arguments": {}}]',
        (', {"name": "x", "arguments": {}}]', [("clock", "{}")]),
    ),
    "names with arguments": (
        "mistral 11",
        '[TOOL_CALLS]weather[ARGS]{"city": "a"}[TOOL_CALLS]clock[CALL_ID]abc123[ARGS]{}[TOOL_CALLS]clock{}',
        ("", [("weather", '{"city": "a"}'), ("clock", "{}"), ("clock", "{}")]),
    ),
    "an unknown name": ("mistral 11", "[TOOL_CALLS]x[ARGS]{}", ("[TOOL_CALLS]x[ARGS]{}", [])),
    "a call after an unknown name": (
        "mistral 11",
        "[TOOL_CALLS]x[ARGS]{}[TOOL_CALLS]clock[ARGS]{}",
        ("[TOOL_CALLS]x[ARGS]{}", [("clock", "{}")]),
    ),
    "deepseek": (
        "deepseek",
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        f"{ARGUMENTS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("I look.", [("weather", ARGUMENTS), ("clock", "{}")]),
    ),
    "deepseek 3.1": (
        "deepseek 3.1",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("", [("weather", ARGUMENTS), ("clock", "{}")]),
    ),
    "tags": (
        "qwen",
        'so\n<tool_call>\n<function=weather>\n<parameter=city>\na "b"\n</parameter>\n<parameter=days>\n3\n</parameter>'
        "\n<parameter=sure>\nTrue\n</parameter>\n<parameter=at>\nnull\n</parameter>\n<parameter=places>\n"
        '["a", {"b": 1}]\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=clock>\n</function>\n'
        "</tool_call>",
        (
            "so",
            [
                ("weather", '{"city": "a \\"b\\"", "days": 3, "sure": true, "at": null, "places": ["a", {"b": 1}]}'),
                ("clock", "{}"),
            ],
        ),
    ),
    "tags and lines": (
        "qwen",
        "<tool_call><function=weather><parameter=city>\nif a:\n    b\n\n</parameter></function></tool_call>",
        ("", [("weather", '{"city": "if a:\\n    b\\n"}')]),
    ),
    "tags without declared types": (
        "qwen",
        "<tool_call><function=clock><parameter=a>1</parameter><parameter=b>x y</parameter></function></tool_call>",
        ("", [("clock", '{"a": 1, "b": "x y"}')]),
    ),
    "tags that repeat an argument": (
        "qwen",
        "<tool_call><function=weather><parameter=city>a</parameter><parameter=days>1</parameter><parameter=city>b"
        "</parameter><parameter=days>2</parameter><parameter=at>c</parameter></function></tool_call>",
        ("", [("weather", '{"city": "a", "days": 1, "at": "c"}')]),
    ),
    "tags of another type than declared": (
        "qwen",
        "<tool_call><function=weather><parameter=days>soon</parameter><parameter=how>5</parameter></function></tool_call>",
        ("", [("weather", '{"days": "soon", "how": "5"}')]),
    ),
    "tags, cut in a string": (
        "qwen",
        "<tool_call><function=weather><parameter=city>par",
        ("", [("weather", '{"city": "par')]),
    ),
    "tags without the mark before them": (
        "qwen",
        "so\n<function=clock>\n</function>\n</tool_call>\n<function=clock></function> it <fun",
        ("so it <fun", [("clock", "{}")] * 2),
    ),
    "an unknown function in tags": (
        "qwen",
        "<tool_call><function=x></function></tool_call>",
        ("<tool_call><function=x></function></tool_call>", []),
    ),
    "a call after an unknown function in tags": (
        "qwen",
        "<tool_call>\n<function=x>\n</function>\n</tool_call>\n<tool_call>\n<function=clock>\n</function>\n</tool_call>",
        ("<tool_call>\n<function=x>\n</function>\n</tool_call>", [("clock", "{}")]),
    ),
    "a call after an unknown function without the mark before it": (
        "qwen",
        "<function=x></function><function=clock></function>",
        ("<function=x></function>", [("clock", "{}")]),
    ),
    "harmony": (
        "harmony",
        "<|channel|>analysis<|message|>I think<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        f"{ARGUMENTS}<|call|>",
        ("I look.", [("weather", ARGUMENTS)]),
    ),
    "harmony, recipient first": (
        "harmony",
        " to=functions.clock<|channel|>commentary json<|message|>{}<|call|>",
        ("", [("clock", "{}")]),
    ),
    "harmony, no call": (
        "harmony",
        "<|channel|>analysis<|message|>I think<|end|><|start|>assistant<|channel|>final<|message|>hello <b>",
        ("hello <b>", []),
    ),
    "harmony, two contents": (
        "harmony",
        "<|channel|>commentary<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
        ("a\nb", []),
    ),
    "harmony, an unknown function": (
        "harmony",
        "<|channel|>commentary to=functions.x<|message|>{}<|call|>",
        ("{}", []),
    ),
    "harmony, text": ("harmony", "it is so", ("it is so", [])),
    "harmony, cut in a header": ("harmony", "<|channel|>anal", ("", [])),
    "keys": (
        "glm",
        "so\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>a</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>clock</tool_call>",
        ("so", [("weather", '{"city": "a", "days": 3}'), ("clock", "{}")]),
    ),
    "a call after an unknown function in keys": (
        "glm",
        "<tool_call>x</tool_call>\n<tool_call>clock</tool_call>",
        ("<tool_call>x</tool_call>", [("clock", "{}")]),
    ),
}


@pytest.mark.parametrize("case", READINGS)
def test_calls_are_found_in_a_text(case: str) -> None:
    how, text, expected = READINGS[case]
    assert read(how, text) == expected


@given(st.sampled_from(sorted(READINGS)), st.data())
def test_pieces_of_a_text_say_what_the_whole_says(case: str, data: st.DataObject) -> None:
    how, text, expected = READINGS[case]
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6) | st.just(list(range(len(text)))))
    content, calls = read(how, text, cuts)
    assert (content.split(), calls) == (expected[0].split(), expected[1])


def test_a_string_in_tags_streams_before_it_is_complete() -> None:
    parser = ToolParser(FORMATS["qwen"])
    parser.push("<tool_call><function=weather><parameter=city>")
    assert parser.push("par").calls == [{"index": 0, "function": {"arguments": "par"}}]


HOSTILE = {
    "properties": {
        "a": {"$ref": "#/$defs/a"},
        "b": {"type": "integer"},
        "c": {"$ref": "#/$defs/b"},
        "d": 1,
        "e": {"enum": [1, "a"]},
        "f": {"anyOf": [{"type": "null"}, {"const": "x"}]},
    },
    "$defs": {"a": {"$ref": "#/$defs/a"}, "b": {"anyOf": [{"$ref": "#/$defs/b"}] * 1000}},
}


def test_types_of_arguments_are_found_in_schemas_that_go_in_circles() -> None:
    assert declared_types({"properties": dict(list(HOSTILE["properties"].items())[1:2])}) == {"b": ["integer"]}
    assert declared_types({"properties": {k: HOSTILE["properties"][k] for k in "bdef"}}) == {
        "b": ["integer"],
        "e": ["integer", "string"],
        "f": ["null", "string"],
    }
    assert "c" not in declared_types(HOSTILE)
    for other in (None, {}, {"properties": 1}, {"properties": {"a": {"type": [1, []], "enum": 3}}}):
        assert declared_types(other) == {}


def test_reasoning_is_told_from_content() -> None:
    parsed = parser_of(FORMATS["harmony"]).whole(READINGS["harmony"][1])
    assert (parsed.reasoning, parsed.content) == ("I think", "I look.")


def test_a_call_streams_before_it_is_complete() -> None:
    parser = ToolParser(FORMATS["hermes"])
    head = parser.push('<tool_call>{"name": "weather", "arguments": {"ci').calls
    assert [(piece["index"], piece["function"]) for piece in head] == [(0, {"name": "weather", "arguments": '{"ci'})]
    assert parser.push('ty": "x').calls == [{"index": 0, "function": {"arguments": 'ty": "x'}}]


def test_what_is_held_back_is_bounded() -> None:
    for text in (" ", "<tool_call>{", "<tool_c"):
        parser = ToolParser(FORMATS["hermes"])
        said = sum(len(parser.push(text).content) for _ in range(3000))
        assert said > 3000 * len(text) - MAX_HELD_CHARS - 2 * len(text)


@pytest.mark.parametrize(
    ("template", "takes", "form"),
    [
        ("{{ messages }}", False, None),
        ("{% set tools = 1 %}{{ tools }}", False, None),
        (HERMES, True, "hermes"),
        (LLAMA, True, "llama3_json"),
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}" + LLAMA, True, "llama3_json"),
        ("{{ tools }}<tool_call>\n<function=x><parameter=y>", True, "qwen3_coder"),
        ("{{ tools }}<tool_call>{name}\n<arg_key>{key}</arg_key>", True, "glm45"),
        ("{{ tools }}[TOOL_CALLS] [{{ call | tojson }}]", True, "mistral"),
        ("{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}", True, "mistral_v11"),
        ("{{ tools }}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ name }}\n```json\n", True, "deepseek_v3"),
        ("{{ tools }}<｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>", True, "deepseek_v31"),
        ("{{ tools }}<tool_call>{{ call | tojson }}", True, "hermes"),
        ("{{ tools }}<|start|>assistant<|channel|>final<|message|>", True, "harmony"),
        ("{{ tools }}<tools>", True, None),
    ],
    ids=range(14),
)
def test_a_template_says_whether_and_how_calls_are_made(template: str, takes: bool, form: str | None) -> None:
    found = ChatTemplate(template)
    assert (found.takes_tools, found.tool_format) == (takes, form)


@pytest.mark.parametrize("form", [name for name, dialect in DIALECTS.items() if dialect.forced])
@pytest.mark.parametrize("single", [True, False])
def test_a_grammar_of_calls_is_sound(form: str, single: bool) -> None:
    vocabulary = structure_tokenizer(load_model_spec("demo"))
    tools = ToolFormat(name=form, functions=("weather", "clock"), single=single)
    check_grammar(vocabulary, tool_grammar([Function(name="clock"), Function(**WEATHER["function"])], tools))
    wrong = Function(name="clock", parameters={"properties": {"at": {"type": "what"}}})
    with pytest.raises(InputError):
        check_grammar(vocabulary, tool_grammar([wrong], tools))
    large = Function(name="clock", parameters={"enum": ["x" * 40_000]})
    with pytest.raises(RequestError, match="a schema may have at most 65536 characters in all"):
        tool_grammar([large, large], tools)


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        {},
        {"properties": {"a": {"type": "integer"}}},
        {"type": ["object", "null"]},
        {"anyOf": [{}, {"maxProperties": 1}]},
    ],
    ids=str,
)
def test_arguments_are_an_object_where_a_schema_does_not_say_so(parameters: dict[str, Any] | None) -> None:
    tools = ToolFormat(name="hermes", functions=("clock",), single=True)
    grammar = tool_grammar([Function(name="clock", parameters=parameters)], tools)
    tokenizer = LLTokenizer("byte")

    def allows(arguments: str) -> bool:
        text = f'<tool_call>\n{{"name": "clock", "arguments": {arguments}}}\n</tool_call>'
        matcher = LLMatcher(tokenizer, grammar)
        return matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting()

    assert allows("{}")
    assert not any(map(allows, ("null", '"x"', "[]", "3")))


@pytest.fixture(scope="module")
def callers(
    launch: Callable[..., AbstractContextManager[Running]], checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """A server whose model's template takes tools."""
    directory = tmp_path_factory.mktemp("caller") / "tiny"
    shutil.copytree(checkpoint, directory)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": HERMES}))
    with launch(directory=directory) as running:
        yield running


@pytest.fixture(scope="module")
def caller(callers: Running) -> Iterator[openai.OpenAI]:
    with callers.client() as client:
        yield client


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    given = {"messages": [ASK], "tools": TOOLS, "max_tokens": 300, "seed": 5, **fields}
    return client.chat.completions.create(model="tiny", **given)


def check(call: Any) -> None:
    assert re.fullmatch("[A-Za-z0-9]{9}", call.id)  # Mistral's templates refuse any other in the next turn.
    arguments = json.loads(call.function.arguments)
    jsonschema_rs.validate(PARAMETERS if call.function.name == "weather" else {"maxProperties": 0}, arguments)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
def test_a_call_that_is_asked_for_comes_and_has_its_schema(caller: openai.OpenAI, choice: Any) -> None:
    for answer in chat(caller, tool_choice=choice, parallel_tool_calls=False, n=4).choices:
        assert answer.finish_reason == "tool_calls"
        assert answer.message.content is None
        (call,) = answer.message.tool_calls
        check(call)
        assert choice == "required" or call.function.name == "weather"


def test_a_streamed_call_is_the_same(caller: openai.OpenAI) -> None:
    whole = chat(caller, tool_choice="required", parallel_tool_calls=False).choices[0].message.tool_calls[0]
    chunks = [c.choices[0] for c in chat(caller, tool_choice="required", parallel_tool_calls=False, stream=True)]
    pieces = [piece for chunk in chunks for piece in chunk.delta.tool_calls or []]
    assert chunks[-1].finish_reason == "tool_calls"
    assert not any(chunk.delta.content for chunk in chunks)
    assert [piece.id is not None for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert pieces[0].function.name == whole.function.name
    assert "".join(piece.function.arguments for piece in pieces) == whole.function.arguments
    assert {piece.index for piece in pieces} == {0}


def test_the_clients_own_stream_helper_collects_the_call(caller: openai.OpenAI) -> None:
    fields: Any = {"messages": [ASK], "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    with caller.chat.completions.stream(model="tiny", max_tokens=300, seed=5, **fields) as stream:
        final = stream.get_final_completion()
    check(final.choices[0].message.tool_calls[0])


def test_a_model_that_is_free_may_answer_with_text(caller: openai.OpenAI) -> None:
    answer = chat(caller, max_tokens=8, temperature=0).choices[0]
    assert answer.finish_reason == "length"
    assert answer.message.tool_calls is None
    assert answer.message.content
    pieces = chat(caller, max_tokens=8, temperature=0, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in pieces) == answer.message.content


def test_a_second_turn_with_the_result_reaches_the_template(caller: openai.OpenAI, callers: Running) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    first = chat(caller, tool_choice=choice).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain"}
    messages: list[Any] = [ASK, first, result]
    assert chat(caller, messages=messages, max_tokens=4).choices[0].message.content is not None
    sent = [ASK, {**first.model_dump(), "content": None}, result]
    shown = callers.call("/tokenize", {"messages": sent, "tools": TOOLS, "return_token_strs": True})
    text = "".join(json.loads(shown.text)["token_strs"])
    city = json.loads(first.tool_calls[0].function.arguments)["city"]
    assert f"<tool_call>weather({city})</tool_call>" in text
    assert f"<|tool|>rain[{first.tool_calls[0].id}]" in text
    assert '"description": "tells it"' in text


def test_without_a_choice_of_tools_the_model_is_not_told_of_them(callers: Running) -> None:
    def num_prompt_tokens(**fields: Any) -> int:
        reply = callers.call("/v1/chat/completions", {"messages": [ASK], "max_tokens": 1, **fields})
        return json.loads(reply.text)["usage"]["prompt_tokens"]

    assert num_prompt_tokens(tools=TOOLS, tool_choice="none") == num_prompt_tokens() < num_prompt_tokens(tools=TOOLS)


def tool(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [tool({"properties": {"a": {"type": "x"}}})]}, "Invalid type"),
        ({"tools": [tool({"type": "array"})]}, "must be those of an object"),
        ({"response_format": {"type": "json_object"}}, "tools and response_format exclude each other"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tools; there are clock, weather"),
    ],
    ids=range(4),
)
def test_wrong_tools_get_400_and_one_sentence(callers: Running, fields: dict[str, Any], words: str) -> None:
    body = {"messages": [ASK], "tools": TOOLS, "tool_choice": "required", **fields}
    reply = callers.call("/v1/chat/completions", body)
    assert (reply.status, words in reply.error["message"]) == (400, True), reply.text


MARKED = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[TOOL_CALLS]{{ call.function.name }}[ARGS]"
    "{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
)


def served_with(directory: Path, template: str, special: list[str]) -> None:
    """Gives a checkpoint's tokenizer these special tokens, and its model a vocabulary with them."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, fields in (
        ("config.json", {"vocab_size": tokenizer.get_vocab_size()}),
        ("tokenizer_config.json", {"chat_template": template}),
    ):
        (directory / name).write_text(json.dumps(json.loads((directory / name).read_text()) | fields))


def test_calls_are_found_by_marks_that_are_special_tokens(
    launch: Callable[..., AbstractContextManager[Running]], checkpoint: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "tiny"
    shutil.copytree(checkpoint, directory)
    served_with(directory, MARKED, ["[TOOL_CALLS]", "[ARGS]"])
    with launch(directory=directory) as running, running.client() as client:
        two = {"tool_choice": "required", "logit_bias": {"0": -1}, "max_tokens": 300}
        whole = chat(client, tools=[CLOCK], **two).choices[0].message
        assert len(whole.tool_calls) > 1
        assert {(call.function.name, "".join(call.function.arguments.split())) for call in whole.tool_calls} == {
            ("clock", "{}")
        }
        asked: Any = {"messages": [ASK], "tools": [CLOCK], "seed": 5, **two}
        with client.chat.completions.stream(model="tiny", **asked) as stream:
            events = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
            final = stream.get_final_completion().choices[0].message
        assert [call.function.name for call in final.tool_calls] == [call.function.name for call in whole.tool_calls]
        assert {event.index for event in events} >= set(range(len(final.tool_calls)))
        one = chat(client, tool_choice="required", parallel_tool_calls=False).choices[0]
        check(one.message.tool_calls[0])
        text = chat(client, tool_choice="none", max_tokens=40, logit_bias={"300": 5}).choices[0].message.content
        assert "[TOOL_CALLS]" not in text


def test_messages_of_harmony_are_told_apart(
    launch: Callable[..., AbstractContextManager[Running]], checkpoint: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "tiny"
    shutil.copytree(checkpoint, directory)
    words = "{% if tools %}{{ tools }}{% endif %}{{ messages }}<|start|>assistant{# <|channel|>final<|message|> #}"
    marks = ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>"]
    served_with(directory, words, marks)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    number = {mark: str(tokenizer.token_to_id(mark)) for mark in marks}
    with launch(directory=directory) as running, running.client() as client:
        forced = chat(client, tool_choice="required").choices[0]
        check(forced.message.tool_calls[0])
        assert forced.message.content is None
        # No header can be complete where the mark before a body is banned, so that none of a body is told.
        banned = {number["<|message|>"]: -100, "0": -100}
        text = chat(client, tool_choice="none", max_tokens=20, logit_bias=banned | {number["<|channel|>"]: 100})
        assert text.choices[0].message.content == ""


def test_a_format_that_is_not_known_is_said_at_the_start_and_in_the_answer(
    launch: Callable[..., AbstractContextManager[Running]], checkpoint: Path, tmp_path: Path
) -> None:
    directory, log = tmp_path / "tiny", tmp_path / "log"
    shutil.copytree(checkpoint, directory)
    served_with(directory, "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}", [])
    with launch(directory=directory, log=log) as running, running.client() as client:
        assert UNKNOWN_TOOL_FORMAT in log.read_text()
        reply = running.call("/v1/chat/completions", {"messages": [ASK], "tools": TOOLS})
        assert (reply.status, reply.error["message"]) == (400, UNKNOWN_TOOL_FORMAT)
        check(chat(client, tool_choice="required").choices[0].message.tool_calls[0])


def test_a_template_without_tools_takes_none(server: Running) -> None:
    reply = server.call("/v1/chat/completions", {"messages": [ASK], "tools": TOOLS})
    assert reply.status == 400
    assert reply.error["message"] == "this model's chat template has no place for tools, so it takes none"
