"""systemd's watchdog hears of the server while its engine works or is being replaced, and it alone."""

import os
import signal
import socket

import pytest

from exeplan.runner.server.notify import watchdog_seconds

from ..processes import PATIENCE, eventually


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_whether_there_is_a_watchdog(environment, seconds, monkeypatch):
    for name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert watchdog_seconds() == seconds


def test_it_is_served_before_and_after_another_engine(launch, tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(PATIENCE)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "900000")
        with launch(replan="off") as server:
            await_message(systemd)
            before = server.engine_pid
            os.kill(before, signal.SIGKILL)
            eventually(lambda: server.engine_pids not in ([], [before]))
            discard(systemd)
            await_message(systemd)


def await_message(systemd):
    while systemd.recv(1000) != b"WATCHDOG=1":
        pass


def discard(systemd):
    """All that has come so far."""
    systemd.setblocking(False)
    try:
        while systemd.recv(1000):
            pass
    except BlockingIOError:
        systemd.settimeout(PATIENCE)
