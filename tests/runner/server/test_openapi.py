"""The server conforms to its own OpenAPI description in every case that schemathesis generates, and never fails."""

import json

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis import checks

from exeplan.runner.server.network.connection import OPEN_PATHS
from exeplan.runner.server.openai.chat_request import ChatRequest
from exeplan.runner.server.openai.check import check
from exeplan.runner.server.openai.completion_request import CompletionRequest
from exeplan.runner.server.openai.errors import RequestError
from exeplan.runner.server.routes import route_views
from exeplan.runner.server.views.description import describe

from ..processes import PATIENCE, eventually
from .conftest import KEY, is_idle

DESCRIPTION = describe(route_views(), model="tiny", vocab_size=300, has_key=True)
SCHEMA = schemathesis.openapi.from_dict(DESCRIPTION)
REQUESTS = {"CompletionRequest": CompletionRequest, "ChatRequest": ChatRequest}
REQUIRED = {"CompletionRequest": {"prompt": "a"}, "ChatRequest": {"messages": [{"role": "user", "content": "a"}]}}
QUICK = settings(
    max_examples=25,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
WANTED = [
    checks.not_a_server_error,
    schemathesis.specs.openapi.checks.status_code_conformance,
    schemathesis.specs.openapi.checks.content_type_conformance,
    schemathesis.specs.openapi.checks.response_schema_conformance,
]


def test_the_description_is_served_and_asks_for_the_key(keyed):
    assert json.loads(keyed.call("/openapi.json").text) == SCHEMA.raw_schema
    assert keyed.call("/openapi.json", authorization="").status == 401


def test_every_operation_asks_for_the_key_unless_its_path_is_open():
    for path, operations in DESCRIPTION["paths"].items():
        for operation in operations.values():
            assert operation["security"] == ([] if path in OPEN_PATHS else [{"key": []}])
            assert ("401" in operation["responses"]) == (path not in OPEN_PATHS)
            assert "422" not in operation["responses"]


@pytest.mark.parametrize("name", REQUESTS)
def test_the_limits_described_are_the_limits_checked(name):
    """Of every number: the limits are accepted, and what lies beyond them is refused with the field's name."""

    def fault(field, value):
        try:
            check(REQUESTS[name], {**REQUIRED[name], field: value})
        except RequestError as error:
            return error.param
        return None

    numbers = 0
    for field, schema in DESCRIPTION["components"]["schemas"][name]["properties"].items():
        for branch in schema.get("anyOf", [schema]):
            if branch.get("type") in ("integer", "number"):
                numbers += 1
                beyond = (branch["maximum"] + 1, branch.get("exclusiveMinimum", branch.get("minimum", 1) - 1))
                assert fault(field, branch["maximum"]) is None
                assert fault(field, branch.get("minimum", branch["maximum"])) is None
                assert [fault(field, value) for value in beyond] == [field, field]
    assert numbers > 12


@SCHEMA.parametrize()
@QUICK
def test_answers_as_described(case, keyed):
    if isinstance(case.body, dict) and {"prompt", "messages"} & set(case.body):
        case.body["max_tokens"] = 2  # What is tested is the server, not how long a tiny model can go on.
    headers = {"authorization": f"Bearer {KEY}"}
    case.call_and_validate(base_url=keyed.url, headers=headers, checks=WANTED, timeout=PATIENCE)


def test_nothing_is_left_of_it(keyed):
    eventually(lambda: is_idle(keyed))
    assert keyed.call("/ready").status == 200
