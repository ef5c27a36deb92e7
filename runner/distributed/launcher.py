"""Launcher: what starts the workers of a plan. LocalLauncher starts them on this host, RayLauncher on the nodes of a
Ray cluster.

Workers are forked from a process that has imported torch once (`exeplan.runner.ipc.fork_server`), so that a new
generation starts within a fraction of a second.
"""

import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from exeplan.core.schedule import Placement
from exeplan.runner.ipc.fork_server import ForkChannel, ForkServer

if TYPE_CHECKING:
    from exeplan.runner.ipc.collectives import SharedBuffer

OnLeft = Callable[[tuple[tuple[int, ...], ...], tuple[str, ...]], None]
"""Called with devices by node, and nodes, as `DevicesLeft` has them."""
LOOPBACK = "127.0.0.1"
WORKER = "exeplan.runner.distributed.worker"
_forks: ForkChannel | ForkServer | None = None
"""What forks the workers of this process; None before the first one is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAddress:
    """Where one device is."""

    host: int | str
    """Equal for devices that can share memory."""
    address: str
    """The address of its host among the hosts of the plan: its worker listens on no other one."""
    local_device: int
    """The device's number on its host."""
    model_directory: str | None = None
    """Where the model is on that host; None: the same directory as on the engine's."""
    clock_offset: float = 0.0
    """Seconds that `time.perf_counter` of the engine is ahead of the worker's."""


class WorkerHandle(Protocol):
    """A worker that has been started."""

    @property
    def pid(self) -> int | None:
        """None on another host."""

    def connect(self) -> socket.socket:
        """The engine's end of its channel. Raises ChildProcessError when the worker never came up."""

    def kill(self) -> None:
        """Ends it at once."""

    def join(self) -> None:
        """Waits until the process has ended, as far as this host knows."""


class Launcher(Protocol):
    """Starts workers on the devices of a plan."""

    address: str
    """Where the engine's host listens for the others."""

    def prepare(self, placement: Placement, *, num_threads: int) -> None:
        """Before a generation for this placement, of workers with `num_threads` each: waits for the hosts.

        Raises InputError where that is of no use.
        """

    def locate(self, device: int) -> DeviceAddress: ...

    def start(self, device: int, generation: int) -> WorkerHandle:
        """Starts a worker, without waiting until it is up."""

    def share(self, device: int, num_bytes: int) -> str | None:
        """Makes memory on the device's host for several workers, which can attach to it until `unshare`.

        Returns its path there; None where memory cannot be shared.
        """

    def unshare(self) -> None: ...

    def close(self) -> None:
        """Releases the other hosts; any thread may call it."""


class LocalLauncher:
    """Starts all workers on this host."""

    address = LOOPBACK

    def __init__(self) -> None:
        self._buffers: list[SharedBuffer] = []

    def prepare(self, placement: Placement, *, num_threads: int) -> None:
        """There is no other host."""

    def locate(self, device: int) -> DeviceAddress:
        return DeviceAddress(host=0, address=LOOPBACK, local_device=device)

    def start(self, device: int, generation: int) -> WorkerHandle:
        return _LocalWorker()

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
        """There is no other host."""


class ForkedWorker:
    """A worker on this host, forked for this process."""

    def __init__(self, connection: socket.socket) -> None:
        """Hands it its end of the connection to the engine. Raises ChildProcessError where that is not possible."""
        self._forks = _fork_server()
        self.pid: int = self._forks.fork(WORKER, connection, name="exeplan-worker")

    def end(self) -> None:
        """Kills it, and waits until it has ended."""
        with contextlib.suppress(ChildProcessError):  # The fork server has ended, and its processes with it.
            self._forks.end(self.pid)


class _LocalWorker:
    """A worker and the engine's end of its channel."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        try:
            self._process = ForkedWorker(theirs)
        except BaseException:
            self._channel.close()
            raise

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def connect(self) -> socket.socket:
        return self._channel

    def kill(self) -> None:
        """`join` does it: one request to the fork server ends it and waits."""

    def join(self) -> None:
        self._process.end()
        self._channel.close()


def disconnect(connection: socket.socket) -> None:
    """Ends a connection for the peer and for a thread that reads it here, which closing alone does not."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def start_fork_server() -> None:
    """Starts it, so that it imports torch before the first worker is needed."""
    forks = _fork_server()
    if isinstance(forks, ForkServer):
        forks.start()


def use_fork_server(channel: ForkChannel) -> None:
    """Workers of this process are forked over this channel, instead of by a fork server of its own."""
    global _forks
    _forks = channel


def _fork_server() -> ForkChannel | ForkServer:
    global _forks
    if _forks is None:
        _forks = ForkServer([WORKER])
    return _forks
