"""A generation of workers starts whole, is reported when it dies, and leaves no process, socket, file or memory."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from exeplan.errors import InputError
from exeplan.files import read_yaml, shipped
from exeplan.runner.distributed.worker_group import Report
from exeplan.runner.ipc.messages import ExpectKV

from ..processes import PATIENCE, descendants, eventually, is_alive, listening, open_files
from . import supervisor
from .supervisor import MIXED, PIPELINE, WIDE, begin


def traces():
    """What a generation may leave in this process and on this machine, where other tests run as well."""
    return {*open_files(os.getpid()).items(), *os.listdir("/dev/shm"), *threading.enumerate()}


def test_workers_start_and_leave_nothing():
    threads = set(threading.enumerate())
    begin(WIDE).kill()  # It has started the fork server, which stays.
    eventually(lambda: set(threading.enumerate()) <= threads)
    before = traces()
    for generation, placement in enumerate((WIDE, PIPELINE, MIXED), 2):
        group = begin(placement, generation=generation)
        pids = group.pids
        assert len(pids) == sum(stage.tensor_parallel_size for stage in placement)
        assert all(map(is_alive, pids))
        group.kill()
        assert not any(map(is_alive, pids))
    eventually(lambda: traces() <= before)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_is_reported(rank):
    lost = threading.Event()
    group = begin(PIPELINE, on_loss=lost.set)
    try:
        os.kill(group.pids[rank], signal.SIGKILL)
        assert group.reports.get(timeout=PATIENCE) == Report(rank, None)
        assert lost.wait(PATIENCE)
        group.send([rank], ExpectKV(number=1, freed=[], new=[]))  # It is gone, and has been reported.
    finally:
        group.kill()


def test_a_worker_that_is_stopped_counts_as_lost():
    group = begin(PIPELINE)
    pids = group.pids
    os.kill(pids[1], signal.SIGSTOP)
    assert group.reports.get(timeout=PATIENCE) == Report(1, None)
    group.kill()
    assert not any(map(is_alive, pids))


def test_a_model_that_cannot_be_loaded_is_an_input_error(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(read_yaml(shipped("models", "demo"))))
    begin(PIPELINE, model=str(tmp_path)).kill()  # With random weights it can be loaded.
    before = set(descendants(os.getpid()))
    with pytest.raises(InputError, match="safetensors"):
        begin(PIPELINE, model=str(tmp_path), dummy_weights=False)
    eventually(lambda: {pid for pid in descendants(os.getpid()) if is_alive(pid)} <= before)


LOGGING = """
from exeplan.runner import logs
from exeplan.runner.distributed.launcher import start_fork_server
from tests.runner.distributed.supervisor import PIPELINE, begin
start_fork_server()  # As on another host, whose processes have not the server's environment.
logs.configure("json", "info")
begin(PIPELINE).kill()
"""


def test_workers_log_as_their_engine_though_they_have_another_environment():
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[3]), *sys.path]))
    found = subprocess.run(
        [sys.executable, "-P", "-c", LOGGING],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    messages = [json.loads(line)["message"] for line in found.stderr.splitlines()]
    assert len([one for one in messages if one.startswith("allocating a KV cache of ")]) == len(PIPELINE)


@pytest.fixture
def supervised():
    """The process ids of a supervisor and of all that it has started."""
    with subprocess.Popen([sys.executable, supervisor.__file__], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        yield [process.pid, *descendants(process.pid)]
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_listens_on_other_than_loopback_or_outlives_its_supervisor(supervised, number):
    assert len(supervised) >= 5
    assert listening(supervised) == {"127.0.0.1"}
    os.kill(supervised[-1], signal.SIGSTOP)  # A worker that cannot notice anything ends, too.
    os.kill(supervised[0], number)
    eventually(lambda: not any(map(is_alive, supervised)))
