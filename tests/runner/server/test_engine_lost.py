"""An engine may die or be stopped: another one goes on with its requests, and no token is lost or repeated."""

import json
import os
import signal

import pytest

from ..processes import PATIENCE, descendants, eventually, is_alive
from .test_lifecycle import request, streaming
from .test_workers_lost import answers, tokens

GREEDY = [
    {"prompt": [3 + n, 5, 7 * n % 100 + 1], "max_tokens": 300 + 40 * n, "ignore_eos": True, "temperature": 0}
    for n in range(6)
]
SEEDED = [{**body, "temperature": 1.0, "seed": 7, "min_tokens": 3, "presence_penalty": 0.5} for body in GREEDY[:2]]
BODIES = GREEDY + SEEDED
BRIEF = {"prompt": "a", "max_tokens": 2}


@pytest.fixture(scope="module")
def recovering(launch):
    """Eight sequences at a time, so that all bodies run together and a ninth waits."""
    with launch("policy: orca, max_num_seqs: 8", replan="off", deadline_seconds=20) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(recovering):
    return [tokens(reply) for reply in answers(recovering, BODIES)()]


def replaced(server, before: int) -> bool:
    """Whether another engine has taken the place of that one."""
    return server.engine_pids not in ([], [before]) and server.call("/ready").status == 200


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_requests_go_on_with_another_engine(recovering, undisturbed, number):
    before = recovering.engine_pid
    wait = answers(recovering, BODIES)
    eventually(lambda: recovering.metric("num_requests_running") == 8)
    with request(recovering, max_tokens=3) as waiting:
        eventually(lambda: recovering.metric("num_requests_waiting") == 1)
        os.kill(before, number)
        assert waiting.getresponse().status == 200
    assert [tokens(reply) for reply in wait()] == undisturbed
    assert not is_alive(before)


def chunks(response) -> list[dict]:
    events = response.read().decode().strip().split("\n\n")
    assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events if event]


def test_a_stream_has_every_token_once(recovering):
    text = {"prompt": "the quick", "max_tokens": 600, "temperature": 0, "ignore_eos": True, "n": 2}
    whole = json.loads(recovering.complete(text).text)["choices"]
    with streaming(recovering, **text) as response:
        os.kill(recovering.engine_pid, signal.SIGKILL)
        found = ["", ""]
        for chunk in chunks(response):
            found[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    # The first chunk of one of them has been read before.
    assert [len(choice["text"]) - len(rest) < 20 for choice, rest in zip(whole, found, strict=True)] == [True, True]
    assert all(choice["text"].endswith(rest) for choice, rest in zip(whole, found, strict=True))


def test_an_idle_engine_that_is_stopped_or_killed_is_replaced_and_what_comes_meanwhile_waits(recovering):
    for number in (signal.SIGSTOP, signal.SIGKILL):
        before = recovering.engine_pid
        os.kill(before, number)
        if number == signal.SIGKILL:
            eventually(lambda: recovering.call("/ready").status == 503)
        assert recovering.complete(BRIEF).status == 200
        assert replaced(recovering, before)


def test_a_request_that_meets_a_second_crash_ends_with_a_clear_error_and_the_others_are_answered(recovering):
    wait = answers(recovering, [{**GREEDY[0], "max_tokens": 4000}])
    for _ in range(2):
        eventually(lambda: recovering.metric("num_requests_running") == 1)
        before = recovering.engine_pid
        os.kill(before, signal.SIGKILL)
        eventually(lambda before=before: replaced(recovering, before))
    (reply,) = wait()
    assert reply.status == 500
    assert "died more than once while this request was running" in reply.error["message"]
    assert recovering.complete(BRIEF).status == 200


def test_a_fork_server_that_dies_takes_the_engine_along_and_both_are_replaced(recovering):
    before = recovering.engine_pid
    with streaming(recovering, max_tokens=600, ignore_eos=True) as response:
        os.kill(recovering.fork_server_pid, signal.SIGKILL)
        assert len(chunks(response)) == 599
    assert not is_alive(before)


def test_engines_that_end_one_after_another_end_the_server_in_one_sentence(launch, tmp_path):
    log = tmp_path / "log"
    with launch(replan="off", log=log) as server:
        family = descendants(server.process.pid)
        for _ in range(3):
            before = server.engine_pid
            os.kill(before, signal.SIGKILL)
            eventually(lambda before=before: replaced(server, before))
        family += descendants(server.process.pid)
        os.kill(server.engine_pid, signal.SIGKILL)
        assert server.process.wait(PATIENCE) == 1
        eventually(lambda: not any(map(is_alive, family)))
    said = (
        "3 engines in a row ended before they ran a batch; the last: the engine process ended unexpectedly (signal 9)"
    )
    assert f"{said}; ending" in log.read_text()


@pytest.mark.parametrize("stopped", [False, True])
def test_nothing_outlives_a_server_that_is_killed(launch, stopped):
    with launch(replan="off") as server, streaming(server):
        family = descendants(server.process.pid)
        if stopped:
            os.kill(server.engine_pid, signal.SIGSTOP)
        os.kill(server.process.pid, signal.SIGKILL)
        eventually(lambda: not any(map(is_alive, family)))
