"""Operations: request ids, logs without prompts, probes that reflect the state, and a reported end."""

import contextlib
import json
import os
import re
import signal
import time

import pytest

from ..processes import PATIENCE, eventually
from .conftest import ONE_DEVICE, ORCA, TWO_STAGES, is_idle
from .test_bad_input import receive, send
from .test_lifecycle import streaming

SECRET = "xyzzy-a-user-secret"


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def logged(launch, tmp_path_factory):
    """The log records of one request of each kind, the ids of the answers, and the total seconds."""
    path, ids, began = tmp_path_factory.mktemp("logs") / "log", {}, time.monotonic()
    with launch(log=path, log_format="json", api_key=SECRET) as server:
        for name, body in {
            "answered": {"prompt": SECRET, "max_tokens": 3, "ignore_eos": True},
            "refused": {"prompt": SECRET, "max_tokens": -1},
            "unknown field": {SECRET: 1, "prompt": "a"},
        }.items():
            ids[name] = server.complete(body).headers["x-request-id"]
        ids["wrong key"] = server.call("/v1/models", authorization="Bearer wrong-key").headers["x-request-id"]
        ids["named"] = server.call("/v1/models", x_request_id="job-7.a_B").headers["x-request-id"]
        ids["forged"] = server.call("/v1/models", x_request_id='a"} forged').headers["x-request-id"]
        ids["probe"] = server.call("/health").headers["x-request-id"]
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %b\r\n" % SECRET.encode()
        with send(server, head + b"transfer-encoding: chunked\r\n\r\n") as connection:
            time.sleep(0.2)  # The request is being answered by now.
            connection.sendall(b"zz\r\nnonsense")
            assert receive(connection).startswith(b"HTTP/1.1 400")
        with streaming(server) as response:
            ids["left"] = response.headers["x-request-id"]
        eventually(lambda: is_idle(server))
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(PATIENCE)
    return records(path), ids, time.monotonic() - began


def of(logged, name):
    (found,) = [record for record in logged[0] if record.get("request_id") == logged[1][name]]
    return found


def test_every_line_is_one_object_with_time_and_level(logged):
    assert len(logged[0]) >= 8
    for record in logged[0]:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", record["time"])
        assert {"level", "logger", "message"} <= set(record)
    first, cache, then = (record["message"] for record in logged[0][:3])
    assert first.startswith("listening at http://127.0.0.1:")
    assert cache.startswith("allocating a KV cache of ")
    assert then.startswith("serving tiny with rra(")


@pytest.mark.parametrize(
    ("placement", "more", "number"),
    [
        (TWO_STAGES, {}, 2),
        (ONE_DEVICE, {"replicas": (0, 1)}, 2),
        ("[{layers: [0, 2], devices: [0, 1]}]", {}, 1),
    ],
    ids=["stages", "replicas", "ranks"],
)
def test_every_stage_and_replica_logs_its_kv_cache(launch, tmp_path, placement, more, number):
    """As a plan on one device does; of the ranks of a stage the first one."""
    with launch(ORCA, placement, log=tmp_path / "log", log_format="json", **more) as server:
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(PATIENCE)
    messages = [record["message"] for record in records(tmp_path / "log")]
    assert len([one for one in messages if one.startswith("allocating a KV cache of ")]) == number, messages


def test_an_answer_is_logged_with_its_counts(logged):
    record = of(logged, "answered")
    assert (record["message"], record["status"]) == ("POST /v1/completions", 200)
    assert (record["prompt_tokens"] > 3, record["completion_tokens"]) == (True, 3)
    assert 0 < record["seconds"] < logged[2]


def test_errors_and_disconnects_are_logged_as_such(logged):
    assert [of(logged, name)["status"] for name in ("refused", "unknown field", "wrong key")] == [400, 400, 401]
    assert of(logged, "left")["ended"] == "left"


def test_nothing_that_a_client_does_is_a_fault_of_the_server(logged):
    """Not even a body that breaks off in nonsense."""
    assert not {"warning", "error", "critical"} & {record["level"] for record in logged[0]}


def test_no_words_of_a_user_and_no_key_are_logged(logged):
    assert SECRET not in json.dumps(logged[0])


def test_a_client_may_name_its_request_but_not_forge_a_line(logged):
    assert logged[1]["named"] == "job-7.a_B"
    assert re.fullmatch("[0-9a-f]{32}", logged[1]["forged"])


def test_probes_are_not_logged(logged):
    assert logged[1]["probe"] not in json.dumps(logged[0])


def test_workers_that_keep_dying_end_the_server_with_status_1(launch):
    stages = "[{devices: [0], layers: [0, 1]}, {devices: [1], layers: [1, 2]}]"
    with launch("policy: orca, max_num_seqs: 4, micro_batches: 2", stages) as server:
        deadline, killed = time.monotonic() + PATIENCE, set()
        while server.process.poll() is None and time.monotonic() < deadline:
            for pid in set(server.worker_pids) - killed:
                killed.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        assert server.process.returncode == 1
