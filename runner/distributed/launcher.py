"""Hosts: where the workers of a plan run, and what starts them: here this very host, over several it is `keepers`.

Workers are forked from a server process that has imported torch once (`forkserver`), so that a new generation is there
within a fraction of a second. What is forked from the engine itself would hold the ends of its siblings' channels, and
outlive it.
"""

import contextlib
import multiprocessing
import socket
from dataclasses import dataclass
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from exeplan.runner.ipc.collectives import SharedBuffer

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the worker of one device is."""

    host: int
    """Equal for devices that can share memory."""
    address: str
    """Its host's own, among the hosts of the plan: nothing there listens on another one."""
    local_device: int
    """The device's number on its host."""
    model_directory: str | None = None
    """Where the model is on that host; None for where it is on the engine's."""
    clock_offset: float = 0.0
    """Seconds that `time.perf_counter` of the engine is ahead of the worker's."""


class Started(Protocol):
    """A worker that has been started."""

    @property
    def pid(self) -> int | None:
        """None on another host."""

    def connect(self) -> socket.socket:
        """The engine's end of its channel. Raises ChildProcessError when it never came up."""

    def kill(self) -> None:
        """Ends it at once."""

    def join(self) -> None:
        """Waits until nothing of it is left, as far as this host can tell."""


class Hosts(Protocol):
    """Starts workers on the devices of a plan."""

    address: str
    """Where the engine's host listens for the others."""

    def prepare(self) -> None:
        """Before a generation: waits until every host is there. Raises InputError when one does not come."""

    def place(self, device: int) -> Place: ...

    def start(self, device: int, generation: int) -> Started:
        """Starts a worker; several come up at the same time."""

    def share(self, device: int, num_bytes: int) -> str | None:
        """So much memory on the device's host for several workers, by its path there; None where that is impossible.

        It is there until `unshare`, and afterwards for those that have attached.
        """

    def unshare(self) -> None: ...

    def close(self) -> None:
        """Lets the other hosts go; any thread may call it."""


class ThisHost:
    """All devices are here."""

    address = LOOPBACK

    def __init__(self) -> None:
        self._buffers: list[SharedBuffer] = []

    def prepare(self) -> None:
        """There is nobody to wait for."""

    def place(self, device: int) -> Place:
        return Place(host=0, address=LOOPBACK, local_device=device)

    def start(self, device: int, generation: int) -> Started:
        return _Local()

    def share(self, device: int, num_bytes: int) -> str | None:
        from exeplan.runner.ipc.collectives import SharedBuffer, shared_memory_works

        if not shared_memory_works():
            return None
        self._buffers.append(SharedBuffer(num_bytes))
        return self._buffers[-1].path

    def unshare(self) -> None:
        while self._buffers:
            self._buffers.pop().close()

    def close(self) -> None:
        """There is nobody to let go."""


class _Local:
    """A worker that this process has forked."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        self._process = fork_worker(theirs)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def connect(self) -> socket.socket:
        return self._channel

    def kill(self) -> None:
        self._process.kill()

    def join(self) -> None:
        self._process.join()
        self._process.close()
        self._channel.close()


def disconnect(connection: socket.socket) -> None:
    """Ends a connection for both sides, and for a thread that waits on it here: closing alone would do neither."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def start_fork_server() -> None:
    """Lets it import torch while there is nothing to fork yet; `fork_worker` would start it, too."""
    _context()
    ensure_running()


def fork_worker(connection: socket.socket) -> BaseProcess:
    """A worker that hears of its engine over the connection, of which this process keeps nothing."""
    with connection:
        process = _context().Process(target=_work, args=(connection,), daemon=True, name="worker")
        process.start()
    return process


def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["exeplan.runner.distributed.worker"])
    return context


def _work(connection: socket.socket) -> None:
    from exeplan.runner.distributed.worker import main

    main(connection)
