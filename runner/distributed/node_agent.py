"""Keeper: the process that torchrun starts for a device; it forks that device's worker, again for each generation.

The engine, where torchrun's rank 0 is, tells its keepers when to start and when to kill. A worker talks to the engine
on a connection of its own, which its keeper has opened and proved, so that its death is seen there at once.
A keeper that loses the engine kills its worker and ends.

    engine -> keeper   ping                    what is your clock?
                       share    {num_bytes}    memory for several workers that are all on this host
                       unshare                 all have attached
                       start    {generation}   a worker, instead of the one before
                       kill
                       end                     all is over
    keeper -> engine   keeper   {device, host, address, local_device, model_directory, fingerprint}: the first frame
                       pong     {clock}
                       shared   {path}
    engine -> keeper   refused  {message}: in reply to the first frame, of a keeper that cannot take part
"""

import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from exeplan.errors import InputError
from exeplan.runner.distributed.launcher import ThisHost, fork_worker, start_fork_server
from exeplan.runner.ipc.frames import frame, read_frame
from exeplan.runner.ipc.handshake import dial

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

START_SECONDS = 120.0
"""How long hosts wait for one another at the start."""


def keep(host: str, port: int, key: bytes, hello: Mapping[str, Any], *, beside_engine: bool) -> int:
    """Serves the engine at that address until it ends; `hello` are the fields of the first frame but the address.

    Returns 0 when the engine said that it was over, 1 when it was lost. SIGTERM and SIGINT end this process, too, but
    not `beside_engine`: on that host the server gets them as well, and lets running requests finish.
    Raises InputError when the engine cannot be reached or refuses this host.
    """
    _on_signals(signal.SIG_IGN)
    start_fork_server()  # It inherits that signals are ignored: a worker ends with the engine.
    _on_signals(_leave)
    with dial(host, port, key, patience=START_SECONDS) as connection:
        if beside_engine:
            _on_signals(signal.SIG_IGN)
        keeper = _Keeper(hello["device"], lambda: dial(host, port, key, patience=0.0))
        try:
            connection.sendall(frame({"kind": "keeper", **hello, "address": connection.getsockname()[0]}))
            return keeper.serve(connection)
        finally:
            keeper.kill()


class _Keeper:
    def __init__(self, device: int, connect: Callable[[], socket.socket]) -> None:
        """`connect` opens another connection to the engine."""
        self._device, self._connect = device, connect
        self._worker: BaseProcess | None = None
        self._memory = ThisHost()

    def serve(self, connection: socket.socket) -> int:
        for message in _messages(connection):
            if message["kind"] == "end":
                return 0
            if reply := self._take(message):
                connection.sendall(frame(reply))
        print("exeplan.runner: the engine is gone", file=sys.stderr)
        return 1

    def kill(self) -> None:
        if self._worker:
            self._worker.kill()
            self._worker.join()
            self._worker = None
        self._memory.unshare()

    def _take(self, message: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Does what a message says; returns the reply, if it wants one."""
        match message["kind"]:
            case "refused":
                raise InputError(message["message"])
            case "ping":
                return {"kind": "pong", "clock": time.perf_counter()}
            case "share":
                return {"kind": "shared", "path": self._memory.share(self._device, message["num_bytes"])}
            case "unshare":
                self._memory.unshare()
            case "start":
                self._start(message["generation"])
            case "kill":
                self.kill()
        return None

    def _start(self, generation: int) -> None:
        connection = self._connect()
        connection.sendall(frame({"kind": "worker", "device": self._device, "generation": generation}))
        self._worker = fork_worker(connection)


def _messages(connection: socket.socket) -> Iterator[dict[str, Any]]:
    try:
        while (message := read_frame(connection)) is not None:
            yield message
    except OSError:
        return


def _on_signals(action: signal.Handlers | Callable[..., object]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, action)


def _leave(*_: object) -> NoReturn:
    raise SystemExit(0)
