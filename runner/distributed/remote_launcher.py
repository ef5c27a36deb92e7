"""Keepers: the engine's side of several hosts, each with processes that torchrun started (`keeper`).

Device d is torchrun's rank d; device 0 is on the engine's own host, and its worker is forked here. Keepers and workers
connect to one port of the address that torchrun was given, and nobody is listened to who has not proved that he knows
the key. A keeper that is gone never comes back, as torchrun starts nothing again: then there is no other generation.
"""

import logging
import queue
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from exeplan.errors import InputError
from exeplan.runner.distributed.launcher import Place, Started, ThisHost, disconnect
from exeplan.runner.distributed.node_agent import START_SECONDS
from exeplan.runner.engine.executor import WorkerError
from exeplan.runner.ipc.frames import frame, read_frame
from exeplan.runner.ipc.handshake import admit

log = logging.getLogger(__name__)
_REPLY_SECONDS = 30.0
_MAX_STRANGERS = 32
"""Connections that may be proving themselves at a time."""
_PINGS = 8


class Keepers:
    """The hosts of one plan, `setup` being what `python -m exeplan.runner` knows of them."""

    def __init__(self, setup: Mapping[str, Any], key: bytes) -> None:
        """Listens. Raises InputError when the address cannot be had."""
        self._setup, self._key, self._here = setup, key, ThisHost()
        try:
            self._listener = socket.create_server((setup["address"], setup["port"]), backlog=_MAX_STRANGERS)
        except OSError as error:
            raise InputError(
                f"cannot listen on {setup['address']}:{setup['port']} for the other hosts: {error.strerror or error}; "
                "give torchrun a --master-addr of this host, and a --master-port whose successor is free"
            ) from None
        self.address: str = self._listener.getsockname()[0]
        self._strangers = threading.BoundedSemaphore(_MAX_STRANGERS)
        self._changed = threading.Condition()
        self._keepers: dict[int, _Keeper] = {}
        self._mismatch: str | None = None
        threading.Thread(target=self._accept, daemon=True).start()

    def prepare(self) -> None:
        self._await_all()
        for device, keeper in sorted(self._keepers.items()):
            if keeper.gone:
                raise WorkerError(
                    f"the process of device {device} on host {keeper.place.host} is gone, and torchrun starts no other"
                )
            keeper.read_clock()

    def place(self, device: int) -> Place:
        if device:
            return self._keepers[device].place
        return Place(host=self._setup["host"], address=self.address, local_device=self._setup["local_device"])

    def start(self, device: int, generation: int) -> Started:
        if not device:
            return self._here.start(device, generation)
        return _Remote(self._keepers[device], generation)

    def share(self, device: int, num_bytes: int) -> str | None:
        if not device:
            return self._here.share(device, num_bytes)
        return self._keepers[device].ask({"kind": "share", "num_bytes": num_bytes})["path"]

    def unshare(self) -> None:
        self._here.unshare()
        for keeper in list(self._keepers.values()):
            keeper.send({"kind": "unshare"})

    def close(self) -> None:
        disconnect(self._listener)
        for keeper in list(self._keepers.values()):
            keeper.send({"kind": "end"})

    def _await_all(self) -> None:
        wanted = set(range(1, self._setup["num_devices"]))
        with self._changed:
            self._changed.wait_for(lambda: self._mismatch or wanted <= set(self._keepers), START_SECONDS)
            missing = wanted - set(self._keepers)
        if self._mismatch:
            raise InputError(self._mismatch)
        if missing:
            raise InputError(
                f"torchrun's ranks {', '.join(map(str, sorted(missing)))} did not come within {START_SECONDS:g} s; "
                "start the same command with their --node-rank on every host"
            )

    def _accept(self) -> None:
        while True:
            try:
                connection, (host, *_) = self._listener.accept()
            except OSError:  # It was closed.
                return
            if self._strangers.acquire(blocking=False):
                threading.Thread(target=self._admit, args=(connection, host), daemon=True).start()
            else:
                connection.close()

    def _admit(self, connection: socket.socket, host: str) -> None:
        try:
            admit(connection, self._key)
            hello = read_frame(connection)
        except OSError as error:
            log.warning("refused a connection from %s: %s", host, error)
            hello = None
        finally:
            self._strangers.release()
        if hello is None:
            connection.close()
        elif hello["kind"] == "keeper":
            self._welcome(connection, hello)
        else:
            self._keepers[hello["device"]].arrived(connection, hello["generation"])

    def _welcome(self, connection: socket.socket, hello: Mapping[str, Any]) -> None:
        device = hello["device"]
        if hello["fingerprint"] != self._setup["fingerprint"]:
            refusal = (
                f"host {hello['host']} has another plan, model or exeplan than host {self._setup['host']}; give all "
                "hosts the same"
            )
            connection.sendall(frame({"kind": "refused", "message": refusal}))
            connection.close()
            with self._changed:
                self._mismatch = refusal
                self._changed.notify_all()
            return
        with self._changed:
            if device in self._keepers:
                log.warning("closed a second connection for device %d", device)
                connection.close()
                return
            self._keepers[device] = _Keeper(connection, hello)
            self._changed.notify_all()


class _Keeper:
    """The engine's end of one. `place` is where its device is."""

    def __init__(self, connection: socket.socket, hello: Mapping[str, Any]) -> None:
        self.place = Place(
            host=hello["host"],
            address=hello["address"],
            local_device=hello["local_device"],
            model_directory=hello["model_directory"],
        )
        self.gone = False
        self._connection, self._sending = connection, threading.Lock()
        self._replies: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._worker: socket.socket | None = None
        self._arrivals: queue.SimpleQueue[tuple[int, socket.socket] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, message: Mapping[str, Any]) -> None:
        """Nothing is said when it is gone: `gone` says it."""
        try:
            with self._sending:
                self._connection.sendall(frame(message))
        except OSError:
            pass

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to a message. Raises ChildProcessError when none comes, and the keeper counts as gone then."""
        self.send(message)
        try:
            reply = self._replies.get(timeout=_REPLY_SECONDS)
        except queue.Empty:
            reply = None
        if reply is None:
            self._leave()
            raise ChildProcessError(f"host {self.place.host} does not answer")
        return reply

    def read_clock(self) -> None:
        """Estimates how far the engine's clock is ahead of the host's, from the ping that was answered soonest."""
        readings = []
        for _ in range(_PINGS):
            sent = time.perf_counter()
            clock = self.ask({"kind": "ping"})["clock"]
            received = time.perf_counter()
            readings.append((received - sent, (sent + received) / 2 - clock))
        self.place = replace(self.place, clock_offset=min(readings)[1])

    def arrived(self, connection: socket.socket, generation: int) -> None:
        """A worker has connected."""
        self._arrivals.put((generation, connection))

    def await_worker(self, generation: int) -> socket.socket:
        """The channel of the worker of a generation. Raises ChildProcessError when it does not come."""
        while True:
            try:
                arrival = self._arrivals.get(timeout=START_SECONDS)
            except queue.Empty:
                arrival = None
            if arrival is None:
                self._leave()
                raise ChildProcessError(f"host {self.place.host} started no worker")
            if arrival[0] == generation:
                self._worker = arrival[1]
                return arrival[1]
            arrival[1].close()  # Of a generation that was given up before it was complete.

    def _read(self) -> None:
        try:
            while (message := read_frame(self._connection)) is not None:
                self._replies.put(message)
        except OSError:
            pass
        self._leave()

    def _leave(self) -> None:
        """Without its keeper a worker counts as lost, too."""
        self.gone = True
        self._replies.put(None)
        self._arrivals.put(None)
        for connection in (self._connection, self._worker):
            if connection is not None:
                disconnect(connection)


class _Remote:
    """A worker that a keeper has forked."""

    pid = None

    def __init__(self, keeper: _Keeper, generation: int) -> None:
        self._keeper, self._generation = keeper, generation
        keeper.send({"kind": "start", "generation": generation})

    def connect(self) -> socket.socket:
        return self._keeper.await_worker(self._generation)

    def kill(self) -> None:
        self._keeper.send({"kind": "kill"})

    def join(self) -> None:
        """Its keeper waits for it before it starts another."""
