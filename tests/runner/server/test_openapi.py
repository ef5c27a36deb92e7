"""The server does what its own description says, whatever schemathesis makes of it; and never fails."""

import json

import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis import checks

from exeplan.runner.openapi import describe

from ..processes import PATIENCE, eventually
from .conftest import KEY, is_idle

SCHEMA = schemathesis.openapi.from_dict(describe(model="tiny", vocab_size=300, keyed=True))
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
