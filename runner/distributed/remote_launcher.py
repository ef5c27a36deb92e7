"""RemoteLauncher: the engine's side of several hosts, each with node agents that torchrun started (`node_agent.py`).

Device d is torchrun's rank d; device 0 is on the engine's own host, and its worker is forked here. Node agents and
workers connect to one port of the address that torchrun was given. A peer that has not completed the key challenge is
disconnected. A node agent that is lost never comes back, as torchrun restarts nothing: no generation follows then.
"""

import contextlib
import logging
import queue
import socket
import threading
import time
from collections import deque
from dataclasses import replace

from exeplan.core.schedule import Placement
from exeplan.errors import InputError
from exeplan.runner.distributed.launcher import DeviceAddress, LocalLauncher, WorkerHandle, disconnect
from exeplan.runner.distributed.node_agent import START_SECONDS
from exeplan.runner.engine.executor import WorkerError
from exeplan.runner.ipc.frames import MessageError, frame
from exeplan.runner.ipc.handshake import admit
from exeplan.runner.ipc.messages import (
    AGENT_EVENTS,
    AgentCommand,
    AgentEvent,
    AgentHello,
    AgentRefused,
    EndAgent,
    KillWorker,
    LauncherSetup,
    MemoryShared,
    Ping,
    Pong,
    ReleaseMemory,
    ShareMemory,
    StartWorker,
    WorkerHello,
)

log = logging.getLogger(__name__)
_REPLY_SECONDS = 30.0
_MAX_UNPROVEN = 32
"""Connections that may be in the key challenge at a time; a further one takes the place of the oldest. A host that has
the key proves that in milliseconds, strangers who say nothing cannot keep it out."""
_HELLO_SECONDS = 5.0
"""How long a peer that has proved the key may take to say which one it is."""
_PINGS = 8


class RemoteLauncher:
    """Starts workers on the hosts of one plan."""

    def __init__(self, setup: LauncherSetup, key: bytes) -> None:
        """Listens. Raises InputError when the address cannot be had."""
        self._setup, self._key, self._local = setup, key, LocalLauncher()
        try:
            self._listener = socket.create_server((setup.address, setup.port), backlog=_MAX_UNPROVEN)
        except OSError as error:
            raise InputError(
                f"cannot listen on {setup.address}:{setup.port} for the other hosts: {error.strerror or error}; "
                "give torchrun a --master-addr of this host, and a --master-port whose successor is free"
            ) from None
        self.address: str = self._listener.getsockname()[0]
        self._unproven: deque[socket.socket] = deque()
        """The oldest first; guarded by `_changed`."""
        self._changed = threading.Condition()
        self._agents: dict[int, _Agent] = {}
        self._mismatch: str | None = None
        threading.Thread(target=self._accept, daemon=True).start()

    def prepare(self, placement: Placement) -> None:
        self._await_all()
        for device, agent in sorted(self._agents.items()):
            if agent.gone:
                raise WorkerError(
                    f"the process of device {device} on host {agent.address.host} is gone, and torchrun starts no other"
                )
            agent.read_clock()

    def locate(self, device: int) -> DeviceAddress:
        if device:
            return self._agents[device].address
        return DeviceAddress(host=self._setup.host, address=self.address, local_device=self._setup.local_device)

    def start(self, device: int, generation: int) -> WorkerHandle:
        if not device:
            return self._local.start(device, generation)
        return _RemoteWorker(self._agents[device], generation)

    def share(self, device: int, num_bytes: int) -> str | None:
        if not device:
            return self._local.share(device, num_bytes)
        return self._agents[device].share(num_bytes)

    def unshare(self) -> None:
        self._local.unshare()
        for agent in list(self._agents.values()):
            agent.send(ReleaseMemory())

    def close(self) -> None:
        disconnect(self._listener)
        for agent in list(self._agents.values()):
            agent.send(EndAgent())

    def _await_all(self) -> None:
        wanted = set(range(1, self._setup.num_devices))
        with self._changed:
            self._changed.wait_for(lambda: self._mismatch or wanted <= set(self._agents), START_SECONDS)
            missing = wanted - set(self._agents)
        if self._mismatch:
            raise InputError(self._mismatch)
        if missing:
            raise InputError(
                f"torchrun's ranks {', '.join(map(str, sorted(missing)))} did not connect within {START_SECONDS:g} s; "
                "start the same command with their --node-rank on every host"
            )

    def _accept(self) -> None:
        while True:
            try:
                connection, (host, *_) = self._listener.accept()
            except OSError:  # It was closed.
                return
            with self._changed:
                if len(self._unproven) >= _MAX_UNPROVEN:
                    disconnect(self._unproven.popleft())
                self._unproven.append(connection)
            threading.Thread(target=self._admit, args=(connection, host), daemon=True).start()

    def _admit(self, connection: socket.socket, host: str) -> None:
        """The key challenge comes before anything else is read."""
        try:
            self._challenge(connection)
            connection.settimeout(_HELLO_SECONDS)
            hello = AGENT_EVENTS.read(connection.recv)
            connection.settimeout(None)
            self._take_hello(connection, host, hello)
        except OSError as error:
            log.warning("refused a connection from %s: %s", host, error)
            disconnect(connection)

    def _challenge(self, connection: socket.socket) -> None:
        try:
            admit(connection, self._key)
        finally:
            with self._changed, contextlib.suppress(ValueError):  # It was the oldest, and has lost its place.
                self._unproven.remove(connection)

    def _take_hello(self, connection: socket.socket, host: str, hello: AgentEvent | None) -> None:
        """Raises OSError where the peer has gone."""
        match hello:
            case AgentHello(device=device) if 0 < device < self._setup.num_devices:
                self._welcome(connection, hello)
            case WorkerHello(device=device, generation=generation) if device in self._agents:
                self._agents[device].worker_connected(connection, generation)
            case None:
                connection.close()
            case _:
                log.warning("refused a connection from %s: %s is no greeting of a known device", host, hello)
                connection.close()

    def _welcome(self, connection: socket.socket, hello: AgentHello) -> None:
        device = hello.device
        if hello.fingerprint != self._setup.fingerprint:
            refusal = (
                f"host {hello.host} has another plan, model or exeplan than host {self._setup.host}; give all "
                "hosts the same"
            )
            connection.sendall(frame(AgentRefused(message=refusal)))
            connection.close()
            with self._changed:
                self._mismatch = refusal
                self._changed.notify_all()
            return
        with self._changed:
            if device in self._agents:
                log.warning("closed a second connection for device %d", device)
                connection.close()
                return
            self._agents[device] = _Agent(connection, hello)
            self._changed.notify_all()


class _Agent:
    """The engine's end of one node agent. `address` is where its device is."""

    def __init__(self, connection: socket.socket, hello: AgentHello) -> None:
        self.address = DeviceAddress(
            host=hello.host,
            address=hello.address,
            local_device=hello.local_device,
            model_directory=hello.model_directory,
        )
        self.gone = False
        self._connection, self._sending = connection, threading.Lock()
        self._replies: queue.SimpleQueue[AgentEvent | None] = queue.SimpleQueue()
        self._worker: socket.socket | None = None
        self._arrivals: queue.SimpleQueue[tuple[int, socket.socket] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, command: AgentCommand) -> None:
        """An agent that is gone raises nothing here: `gone` says it."""
        try:
            with self._sending:
                self._connection.sendall(frame(command))
        except OSError:
            pass

    def share(self, num_bytes: int) -> str | None:
        """Raises ChildProcessError when the agent does not answer."""
        reply = self._ask(ShareMemory(num_bytes=num_bytes))
        if isinstance(reply, MemoryShared):
            return reply.path
        raise self._lost(f"answered ShareMemory with {type(reply).__name__}")

    def _ask(self, command: AgentCommand) -> AgentEvent:
        """The reply. Raises ChildProcessError when none comes, and the agent counts as gone then."""
        self.send(command)
        try:
            reply = self._replies.get(timeout=_REPLY_SECONDS)
        except queue.Empty:
            reply = None
        if reply is None:
            raise self._lost("does not answer")
        return reply

    def read_clock(self) -> None:
        """Estimates how far the engine's clock is ahead of the host's, from the ping that was answered fastest."""
        readings = []
        for _ in range(_PINGS):
            sent = time.perf_counter()
            reply = self._ask(Ping())
            received = time.perf_counter()
            if not isinstance(reply, Pong):
                raise self._lost(f"answered Ping with {type(reply).__name__}")
            readings.append((received - sent, (sent + received) / 2 - reply.clock))
        self.address = replace(self.address, clock_offset=min(readings)[1])

    def worker_connected(self, connection: socket.socket, generation: int) -> None:
        self._arrivals.put((generation, connection))

    def await_worker(self, generation: int) -> socket.socket:
        """The channel of the worker of a generation. Raises ChildProcessError when it does not connect."""
        while True:
            try:
                arrival = self._arrivals.get(timeout=START_SECONDS)
            except queue.Empty:
                arrival = None
            if arrival is None:
                raise self._lost("started no worker")
            if arrival[0] == generation:
                self._worker = arrival[1]
                return arrival[1]
            arrival[1].close()  # Of a generation that was given up before it was complete.

    def _read(self) -> None:
        try:
            while (event := AGENT_EVENTS.read(self._connection.recv)) is not None:
                self._replies.put(event)
        except MessageError as error:
            log.error("host %d counts as lost: %s", self.address.host, error)
        except OSError:
            pass
        self._leave()

    def _lost(self, reason: str) -> ChildProcessError:
        self._leave()
        return ChildProcessError(f"host {self.address.host} {reason}")

    def _leave(self) -> None:
        """Without its agent a worker counts as lost, too."""
        self.gone = True
        self._replies.put(None)
        self._arrivals.put(None)
        for connection in (self._connection, self._worker):
            if connection is not None:
                disconnect(connection)


class _RemoteWorker:
    """A worker that a node agent has forked."""

    pid = None

    def __init__(self, agent: _Agent, generation: int) -> None:
        self._agent, self._generation = agent, generation
        agent.send(StartWorker(generation=generation))

    def connect(self) -> socket.socket:
        return self._agent.await_worker(self._generation)

    def kill(self) -> None:
        self._agent.send(KillWorker())

    def join(self) -> None:
        """The agent waits for the worker before it starts another."""
