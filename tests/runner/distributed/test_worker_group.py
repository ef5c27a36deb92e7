"""A generation of workers starts whole, is reported when it dies, and leaves no process, socket, file or memory."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from exeplan.errors import InputError
from exeplan.files import read_yaml, shipped
from exeplan.runner.distributed import worker_group
from exeplan.runner.distributed.launcher import LocalLauncher, disconnect
from exeplan.runner.distributed.worker_group import Report
from exeplan.runner.ipc.frames import frame
from exeplan.runner.ipc.messages import ExpectKV, WorkerLoading, WorkerReady

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


class SlowWorker:
    """Reports that it loads, so many times a pause apart, and that it is ready after one more."""

    pid = None

    def __init__(self, num_reports: int, pause: float) -> None:
        self._channel, self._theirs = socket.socketpair()
        self._num_reports, self._pause, self._ended = num_reports, pause, threading.Event()
        self._thread = threading.Thread(target=self._load)
        self._thread.start()

    def connect(self) -> socket.socket:
        return self._channel

    def kill(self) -> None:
        self._ended.set()

    def join(self) -> None:
        self._thread.join()
        disconnect(self._theirs)

    def _load(self) -> None:
        for number in range(1, self._num_reports + 1):
            if self._ended.wait(self._pause):
                return
            self._theirs.sendall(frame(WorkerLoading(num_bytes=number)))
        if not self._ended.wait(self._pause):
            self._theirs.sendall(frame(WorkerReady(capacity=None)))


class SlowLauncher(LocalLauncher):
    def __init__(self, *loading: tuple[int, float]) -> None:
        """How often each worker reports, and at which pause."""
        super().__init__()
        self._loading = loading

    def start(self, device: int, generation: int) -> SlowWorker:
        return SlowWorker(*self._loading[device])


def test_workers_may_load_for_any_time_that_they_report_it(monkeypatch):
    monkeypatch.setattr(worker_group, "LOAD_SECONDS", 2.0)
    begin(PIPELINE, launcher=SlowLauncher((12, 0.25), (0, 0.0))).kill()


def test_workers_that_report_nothing_do_not_load_for_ever(monkeypatch):
    monkeypatch.setattr(worker_group, "LOAD_SECONDS", 0.5)
    with pytest.raises(ChildProcessError, match=r"workers \[1\] reported nothing for 0.5 s while"):
        begin(PIPELINE, launcher=SlowLauncher((0, 0.0), (1, PATIENCE)))


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
