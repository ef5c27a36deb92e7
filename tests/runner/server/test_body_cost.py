"""Work on a body grows no faster than its bytes, whatever is in it; counted in calls, as a time would be no test.

Milliseconds are measured by `python -m benchmarks.service.body_cost`, which has the same bodies.
"""

import contextlib
import json
import sys

import pytest

from benchmarks.service.body_cost import BODIES
from exeplan.runner.server.openai.completion_request import CompletionRequest
from exeplan.runner.server.openai.errors import RequestError
from exeplan.runner.server.openai.generation_request import parse
from exeplan.runner.server.openai.json_body import MAX_DEPTH, MAX_OBJECTS

SIZES = (10_000, 40_000, 160_000)
ROOM = 1.25
"""Caps and constants of a parse are no exact multiple of its size."""


def calls(kind, body: bytes) -> int:
    """Functions called, of Python and of C, until the body is accepted or refused."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        with contextlib.suppress(RequestError):
            parse(kind, body)
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("name", BODIES)
def test_calls_grow_no_faster_than_bytes(name):
    kind, make = BODIES[name]
    base = calls(kind, make(100))
    small, middle, large = (calls(kind, make(size)) - base for size in SIZES)
    assert middle <= ROOM * 4 * max(small, 100)
    assert large <= ROOM * 4 * max(middle, 100)


def answer(body: bytes) -> str:
    try:
        parse(CompletionRequest, body)
    except RequestError as error:
        return str(error)
    return "taken"


def nested(field: str, levels: int, opening: str, closing: str) -> bytes:
    rest = "" if field == "prompt" else '"prompt": "a", '
    return f'{{{rest}"{field}": {opening * levels}1{closing * levels}}}'.encode()


@pytest.mark.parametrize("field", ["prompt", "metadata", "stop", "logit_bias", "tools", "response_format", "unknown"])
@pytest.mark.parametrize("brackets", [("[", "]"), ('{"a":', "}")], ids=["lists", "objects"])
def test_every_depth_has_its_sentence(field, brackets):
    """Around the depths where Python's own limit once was, too, which depends on the caller's stack."""
    for levels in (*range(MAX_DEPTH - 2, MAX_DEPTH + 2), *range(900, 1001), 20_000):
        said = answer(nested(field, levels, *brackets))
        assert (said == "the body is nested too deeply; at most 64 levels are taken") == (levels >= MAX_DEPTH)
        assert (said == "taken") == (field == "metadata" and levels < MAX_DEPTH and brackets[0] != "[")


@pytest.mark.parametrize("one", [b"{}", b"[]"])
def test_objects_and_lists_are_counted(one):
    def body(count):
        return b'{"prompt": "a", "metadata": {"a": [' + b",".join([one] * count) + b"]}}"

    parse(CompletionRequest, body(MAX_OBJECTS - 3))
    with pytest.raises(RequestError, match=f"the body has more than {MAX_OBJECTS} lists and objects"):
        parse(CompletionRequest, body(MAX_OBJECTS - 2))


def test_brackets_in_a_text_are_no_lists():
    text = "[{" * MAX_OBJECTS + '"' * 9
    assert parse(CompletionRequest, json.dumps({"prompt": text}).encode())[0].prompts == [text]


def test_a_token_id_written_in_two_ways_is_given_twice():
    with pytest.raises(RequestError, match="logit_bias has the token id 7 twice"):
        parse(CompletionRequest, b'{"prompt": "a", "logit_bias": {"7": 1, "07": 1.0}}')


def test_what_is_too_long_is_counted():
    body = b'{"prompt": "a", "logit_bias": {' + b",".join(b'"%d": 1' % token for token in range(301)) + b"}}"
    with pytest.raises(RequestError, match="logit_bias holds 301 entries, at most 300 are taken"):
        parse(CompletionRequest, body)
