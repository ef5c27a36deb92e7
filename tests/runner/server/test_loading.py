"""A server answers from the start: alive, the progress of loading, and 503 to everything else until it is ready."""

import contextlib
import json
import os
import shutil
import signal
import socket

import pytest

from ..processes import PATIENCE, descendants, eventually, is_alive
from .conftest import ORCA, TWO_STAGES


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


@contextlib.contextmanager
def held_up(launch, log, **options):
    """A server whose engine cannot start, as the process that forks it is stopped; it may go on afterwards."""
    with launch(loading=True, log=log, **options) as server:
        forks = server.fork_server_pid
        os.kill(forks, signal.SIGSTOP)
        try:
            yield server
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(forks, signal.SIGCONT)


@pytest.fixture(scope="module")
def loading(launch, tmp_path_factory):
    with held_up(launch, tmp_path_factory.mktemp("loading") / "log", api_key="the key") as server:
        yield server


def test_it_is_alive_and_says_how_far_it_is(loading):
    assert loading.call("/health", authorization="").status == 200
    ready = loading.call("/ready", authorization="")
    body = json.loads(ready.text)
    assert (ready.status, int(ready.headers["retry-after"])) == (503, 5)
    assert body == {"status": "not ready: starting the engine", "stage": "starting the engine", "share": 0.0}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/tiny", "/plan"])
def test_what_needs_the_engine_gets_503_and_when_to_come_again(loading, path):
    reply = loading.call(path, {} if path.endswith(("completions", "plan")) else None)
    assert (reply.status, reply.headers["retry-after"]) == (503, "5")
    assert (reply.error["code"], reply.error["message"]) == ("unavailable", "not ready: starting the engine")


def test_a_key_is_asked_for_all_the_same(loading):
    for path in ("/v1/models", "/dashboard", "/plan", "/metrics"):
        assert loading.call(path, authorization="").status == 401


def test_what_does_not_need_the_engine_is_there(loading):
    assert loading.call("/").text.startswith("<!doctype html>")
    assert json.loads(loading.call("/openapi.json").text)["openapi"] == "3.1.0"
    plan = json.loads(loading.call("/plan").text)
    assert (plan["schedule"]["policy"], plan["observed"]["num_requests"]) == ("rra", 0)
    assert (loading.metric("num_requests_running"), loading.metric("kv_cache_usage_perc")) == (0, 0)
    assert loading.metric("plan_predicted_throughput") == 0.5
    dashboard = json.loads(loading.call("/dashboard").text)
    assert dashboard["loading"] == {"stage": "starting the engine", "share": 0.0}
    assert dashboard["status"] == "not ready: starting the engine"


def test_systemd_is_notified_of_start_and_end_and_sighup_waits_for_the_engine(launch, log, tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(PATIENCE)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with held_up(launch, log) as server:
            assert systemd.recv(1000).startswith(b"STATUS=loading tiny; http://127.0.0.1:")
            plan = server.plan_file.read_text()
            server.plan_file.write_text(plan.replace("decode_steps: 4", "decode_steps: 7"))
            for _ in range(3):
                server.process.send_signal(signal.SIGHUP)
                assert server.call("/health").status == 200
            os.kill(server.fork_server_pid, signal.SIGCONT)
            assert systemd.recv(1000).startswith(b"READY=1\nSTATUS=serving tiny with rra(")
            assert server.process.stdout.readline().startswith("serving tiny with rra(")
            assert server.call("/ready").status == 200
            eventually(lambda: "re-plan 1 is active" in log.read_text())
            assert "re-plan 2" not in log.read_text()
            server.process.send_signal(signal.SIGTERM)
            assert systemd.recv(1000) == b"STOPPING=1"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_can_be_ended_before_it_is_ready(launch, log, number):
    with launch(loading=True, log=log) as server:
        family = descendants(server.process.pid)
        server.process.send_signal(number)
        assert server.process.wait(PATIENCE) == 0
        assert not any(is_alive(pid) for pid in family)
        assert server.process.stdout.read() == ""


def test_workers_that_load_end_with_the_server(launch, log):
    with launch(ORCA, TWO_STAGES, loading=True, log=log) as server:
        eventually(lambda: len(server.worker_pids) == 2)
        family = descendants(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0
        eventually(lambda: not any(is_alive(pid) for pid in family))


def test_an_engine_that_dies_while_it_loads_ends_the_server_with_1(launch, log, checkpoint, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(checkpoint, directory)
    os.mkfifo(directory / "model.safetensors")  # It waits for the weights.
    with launch(loading=True, log=log, directory=directory, dummy_weights=False) as server:
        eventually(lambda: len(server.engine_pids) == 1)
        os.kill(server.engine_pid, signal.SIGKILL)
        assert server.process.wait(PATIENCE) == 1
        assert "the engine process ended unexpectedly (signal 9)" in log.read_text()


def test_a_model_that_cannot_be_loaded_ends_the_server_with_2(launch, log):
    with launch(loading=True, log=log, dummy_weights=False) as server:
        assert server.process.wait(PATIENCE) == 2
        assert "safetensors" in log.read_text().splitlines()[-1]
        assert server.process.stdout.read() == ""


def test_its_port_is_in_use_though_it_is_not_ready(launch, loading, capfd):
    with pytest.raises(AssertionError), launch(port=loading.port) as second:
        pytest.fail(f"two servers on one port: {second.url}")
    assert capfd.readouterr().err.startswith(f"cannot serve on 127.0.0.1:{loading.port}: Address already in use")
