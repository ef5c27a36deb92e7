"""Workers may die, hang, or lose their engine: requests continue or end with a clear error, and nothing is leaked."""

import json
import os
import signal
import threading

import pytest

from ..processes import PATIENCE, descendants, eventually, is_alive
from .conftest import ORCA, TWO_STAGES
from .test_lifecycle import streaming

BODIES = [
    {"prompt": [3 + n, 5, 7 * n % 100 + 1], "max_tokens": 300 + 40 * n, "ignore_eos": True, "temperature": 0}
    for n in range(8)
]


def answers(server, bodies):
    """The replies to requests sent at once, as soon as all are there; and a function that waits for them."""
    found = [None] * len(bodies)

    def ask(index):
        found[index] = server.complete({**bodies[index], "logprobs": 0})

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(bodies))]
    for thread in threads:
        thread.start()

    def wait():
        for thread in threads:
            thread.join(PATIENCE)
        return found

    return wait


def tokens(reply):
    assert reply.status == 200, reply.text
    return json.loads(reply.text)["choices"][0]["logprobs"]["tokens"]


@pytest.fixture(scope="module")
def undisturbed(pipeline):
    return [tokens(reply) for reply in answers(pipeline, BODIES)()]


def test_a_pipeline_gives_the_tokens_of_one_device(server, undisturbed):
    assert [tokens(reply) for reply in answers(server, BODIES)()] == undisturbed


@pytest.mark.parametrize("stage", [0, 1])
def test_requests_go_on_after_a_worker_was_killed(pipeline, undisturbed, stage):
    before = pipeline.worker_pids
    wait = answers(pipeline, BODIES)
    eventually(lambda: pipeline.metric("num_requests_running") > 3)
    os.kill(before[stage], signal.SIGKILL)
    assert [tokens(reply) for reply in wait()] == undisturbed
    assert pipeline.call("/ready").status == 200
    assert not set(before) & set(pipeline.worker_pids)
    assert not any(map(is_alive, before))


def kill_a_worker(pipeline):
    """Returns when others have taken the place of all; the server may be unready too shortly to be seen."""
    before = pipeline.worker_pids
    os.kill(before[0], signal.SIGKILL)
    eventually(lambda: len(pipeline.worker_pids) == 2 and not set(before) & set(pipeline.worker_pids))
    eventually(lambda: pipeline.call("/ready").status == 200)


def test_a_killed_worker_is_detected_while_idle(pipeline):
    kill_a_worker(pipeline)
    assert tokens(pipeline.complete({**BODIES[0], "max_tokens": 3, "logprobs": 0}))


def test_a_request_that_meets_a_second_crash_ends_with_a_clear_error(pipeline):
    wait = answers(pipeline, [{**BODIES[0], "max_tokens": 4000}])
    for _ in range(2):
        eventually(lambda: pipeline.metric("num_requests_running") == 1 and pipeline.call("/ready").status == 200)
        kill_a_worker(pipeline)
    (reply,) = wait()
    assert reply.status == 500
    assert "worker" in json.loads(reply.text)["error"]["message"]
    eventually(lambda: pipeline.call("/ready").status == 200)


def test_a_worker_that_is_stopped_is_detected_and_an_engine_that_dies_takes_its_workers_along(
    launch, undisturbed, tmp_path
):
    log = tmp_path / "log"
    with launch(ORCA, TWO_STAGES, log=log) as server:
        before = server.worker_pids
        wait = answers(server, BODIES[:3])
        eventually(lambda: server.metric("num_requests_running") > 0)
        os.kill(before[1], signal.SIGSTOP)
        assert [tokens(reply) for reply in wait()] == undisturbed[:3]
        assert not any(map(is_alive, before))
        before = [server.engine_pid, *server.worker_pids]
        wait = answers(server, BODIES[:3])
        eventually(lambda: server.metric("num_requests_running") > 0)
        os.kill(server.engine_pid, signal.SIGKILL)
        assert [tokens(reply) for reply in wait()] == undisturbed[:3]
        assert not any(map(is_alive, before))
    assert "local worker 1 was stopped by a signal, and is ended" in log.read_text()


def test_no_process_outlives_the_server(launch):
    with launch(ORCA, TWO_STAGES) as server, streaming(server):
        family = descendants(server.process.pid)
        assert len(family) >= 4
        os.kill(server.process.pid, signal.SIGKILL)
        eventually(lambda: not any(is_alive(pid) for pid in family))


def test_sigterm_finishes_what_runs_and_leaves_nothing(launch):
    with launch(ORCA, TWO_STAGES) as server:
        family = descendants(server.process.pid)
        wait = answers(server, BODIES[:2])
        eventually(lambda: server.metric("num_requests_running") == 2)
        server.process.send_signal(signal.SIGTERM)
        assert [len(tokens(reply)) for reply in wait()] == [300, 340]
        assert server.process.wait(PATIENCE) == 0
        eventually(lambda: not any(is_alive(pid) for pid in family))
