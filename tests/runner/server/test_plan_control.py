"""Another plan is loaded into a running server, by signal or authenticated request, and no request is disturbed."""

import asyncio
import json
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from starlette.requests import Request

from exeplan.runner.engine_process.job import EngineError
from exeplan.runner.server.network.clients import Client
from exeplan.runner.server.openai.errors import RequestError
from exeplan.runner.server.plan_control import reload
from exeplan.runner.server.views.plan import change_plan

from ..processes import eventually
from .test_lifecycle import streaming

KEY = "the key"


@pytest.fixture(scope="module")
def served(launch, tmp_path_factory):
    """A server whose plan file may be changed; `served.plan_file` is its path, `served.log` its log."""
    log = tmp_path_factory.mktemp("plans") / "log"
    with launch(api_key=KEY, log=log, replan="off", admission="refuse-late") as running:
        running.log = log
        yield running


def shown(server):
    return json.loads(server.call("/plan").text)


def adopted(server):
    return server.metric("replans_total")


def test_sighup_reads_the_file_again(served):
    before, text = adopted(served), served.plan_file.read_text()
    with streaming(served, max_tokens=600) as response:
        served.plan_file.write_text(re.sub("decode_steps: 4", "decode_steps: 7", text))
        served.process.send_signal(signal.SIGHUP)
        eventually(lambda: adopted(served) == before + 1)
        assert shown(served)["schedule"] == {"policy": "rra", "prefill_batch": 4, "decode_steps": 7}
        assert response.read().count(b"data: {") == 599
    assert "decode_steps" in served.log.read_text()


def test_a_broken_file_changes_nothing(served):
    before, text, plan = adopted(served), served.plan_file.read_text(), shown(served)["schedule"]
    for broken in ("schedule: [", text.replace("prefill_batch", "prefill_patch"), text.replace("[0, 2]", "[0, 3]")):
        length = len(served.log.read_text())
        served.plan_file.write_text(broken)
        served.process.send_signal(signal.SIGHUP)
        eventually(lambda length=length: "the plan was not loaded" in served.log.read_text()[length:])
    served.plan_file.write_text(text)
    assert (adopted(served), shown(served)["schedule"]) == (before, plan)
    assert served.complete({"prompt": "a", "max_tokens": 2}).status == 200


def test_sighup_changes_nothing_where_the_file_says_what_it_did_though_another_plan_has_been_adopted(served):
    """It may be for new keys or certificates."""
    assert served.call("/plan", b"").status == 200
    plan = shown(served)
    plan["schedule"]["prefill_batch"] = 2
    assert served.call("/plan", plan).status == 200
    before, length = adopted(served), len(served.log.read_text())
    served.process.send_signal(signal.SIGHUP)
    eventually(lambda: "has not changed, so the active plan stays" in served.log.read_text()[length:])
    assert (adopted(served), shown(served)["schedule"]) == (before, plan["schedule"])
    assert served.call("/plan", b"").status == 200
    assert (adopted(served), shown(served)["schedule"]["prefill_batch"]) == (before + 1, 4)


def test_sighup_adopts_a_file_that_was_touched_and_not_a_plan_that_is_active(served):
    plan = shown(served)
    plan["schedule"]["prefill_batch"] = 2
    assert served.call("/plan", plan).status == 200
    before, length = adopted(served), len(served.log.read_text())
    served.plan_file.touch()
    served.process.send_signal(signal.SIGHUP)
    eventually(lambda: adopted(served) == before + 1)
    assert shown(served)["schedule"]["prefill_batch"] == 4
    served.plan_file.touch()
    served.process.send_signal(signal.SIGHUP)
    eventually(lambda: f"the plan of {served.plan_file} is the active one" in served.log.read_text()[length:])
    assert adopted(served) == before + 1


def test_a_signal_while_the_engine_is_gone_leaves_a_line_in_the_log(caplog):
    class Gone:
        async def load_changed(self, path, *, source):
            raise EngineError("the engine is gone")

    asyncio.run(reload(SimpleNamespace(replanner=Gone(), plan_file=Path("plan.yaml"))))
    assert "the plan was not loaded: the engine is gone" in caplog.text


def test_a_plan_that_is_posted_while_the_engine_is_gone_may_be_sent_again():
    class Gone:
        async def load(self, path, *, source):
            raise EngineError("the engine is gone")

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    app = SimpleNamespace(state=SimpleNamespace(has_key=True))
    scope = {"type": "http", "headers": [], "app": app, "state": {"client": Client(admin=True)}}
    service = SimpleNamespace(check_loaded=lambda: None, replanner=Gone(), plan_file=Path("plan.yaml"))
    with pytest.raises(RequestError, match="the engine is gone") as error:
        asyncio.run(change_plan(Request(scope, receive), service))
    assert (error.value.status, error.value.code, error.value.retry_after) == (503, "unavailable", 5)


def test_what_get_shows_can_be_changed_and_posted(served):
    plan = shown(served)
    plan["schedule"]["prefill_batch"] = 3
    reply = served.call("/plan", plan)
    assert reply.status == 200, reply.text
    assert json.loads(reply.text)["adopted"] is True
    assert shown(served)["schedule"]["prefill_batch"] == 3
    assert served.complete({"prompt": "a", "max_tokens": 2}).status == 200


def test_a_plan_that_cannot_tell_late_requests_is_refused_and_everything_follows_the_old_one(served):
    before, plan, schedule = adopted(served), shown(served), shown(served)["schedule"]
    del plan["estimate"]
    plan["schedule"]["prefill_batch"] = 2
    reply = served.call("/plan", plan)
    assert (reply.status, "the plan lacks an estimate" in reply.error["message"]) == (400, True)
    assert (adopted(served), shown(served)["schedule"]) == (before, schedule)
    assert served.complete({"prompt": "a", "max_tokens": 2}).status == 200


def test_an_empty_body_reads_the_file_again(served):
    assert served.call("/plan", b"").status == 200
    assert shown(served)["schedule"]["prefill_batch"] == 4


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"schedule": {"policy": "nothing"}}, 400, "a plan needs 'placement'"),
        ({"schedule": {"policy": "nothing"}, "placement": [{"devices": [0], "layers": [0, 2]}]}, 400, "no policy"),
        ({"model": "/etc/passwd"}, 400, "keeps the server's model"),
        ({"workload": "/etc/passwd"}, 400, "keeps the server's workload"),
        ({"accept": True}, 409, "no plan is proposed"),
        ({"accept": 1, "schedule": {}}, 400, "accept"),
        ({"veto": 5}, 400, "veto"),
        (b"[1]", 400, "JSON object"),
        (b"{", 400, "not valid JSON"),
    ],
)
def test_what_is_wrong_is_said_and_changes_nothing(served, body, status, words):
    before = shown(served)["schedule"]
    reply = served.call("/plan", body)
    assert (reply.status, words in reply.error["message"]) == (status, True), reply.text
    assert shown(served)["schedule"] == before


def test_a_veto_without_a_proposal_says_so(served):
    assert json.loads(served.call("/plan", {"veto": "no"}).text) == {"vetoed": False}


def test_without_a_key_the_plan_cannot_be_changed_over_the_network(server):
    assert server.call("/plan", b"").status == 403
