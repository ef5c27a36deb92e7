"""Node agent: the process that torchrun starts for a device; it forks that device's worker, again for each generation.

The engine, on the host of torchrun's rank 0, tells its node agents when to start and when to kill a worker
(`AgentCommand` in `exeplan.runner.ipc.messages`). A worker talks to the engine on a connection of its own, which its
agent has opened and authenticated, so that its death is noticed there at once.
An agent that loses the engine kills its worker and ends.
"""

import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import NoReturn, assert_never

from exeplan.errors import InputError
from exeplan.runner.distributed.launcher import ForkedWorker, LocalLauncher, start_fork_server
from exeplan.runner.ipc.frames import MessageError, frame
from exeplan.runner.ipc.handshake import dial
from exeplan.runner.ipc.messages import (
    AGENT_COMMANDS,
    AgentCommand,
    AgentEvent,
    AgentHello,
    AgentRefused,
    EndAgent,
    KillWorker,
    MemoryShared,
    Ping,
    Pong,
    ReleaseMemory,
    ShareMemory,
    StartWorker,
    WorkerHello,
)

START_SECONDS = 120.0
"""How long hosts wait for one another at the start."""


def run_agent(host: str, port: int, key: bytes, hello: Callable[..., AgentHello], *, on_engine_host: bool) -> int:
    """Serves the engine at that address until it ends; `hello` makes the first event of this host's `address`.

    Returns 0 when the engine has ended, 1 when it was lost. SIGTERM and SIGINT end this process, too, but not
    `on_engine_host`: there the server gets the signal as well, and lets running requests finish.
    Raises InputError when the engine cannot be reached or refuses this host.
    """
    _on_signals(signal.SIG_IGN)
    start_fork_server()
    _on_signals(_leave)
    with dial(host, port, key, patience=START_SECONDS) as connection:
        if on_engine_host:
            _on_signals(signal.SIG_IGN)
        first = hello(address=connection.getsockname()[0])
        agent = _NodeAgent(first.device, lambda: dial(host, port, key, patience=0.0))
        try:
            connection.sendall(frame(first))
            return agent.serve(connection)
        finally:
            agent.kill()


class _NodeAgent:
    def __init__(self, device: int, connect: Callable[[], socket.socket]) -> None:
        """`connect` opens another connection to the engine."""
        self._device, self._connect = device, connect
        self._worker: ForkedWorker | None = None
        self._launcher = LocalLauncher()

    def serve(self, connection: socket.socket) -> int:
        for command in _commands(connection):
            if isinstance(command, EndAgent):
                return 0
            if reply := self._take(command):
                connection.sendall(frame(reply))
        print("exeplan.runner: the engine is gone", file=sys.stderr)
        return 1

    def kill(self) -> None:
        if self._worker:
            self._worker.end()
            self._worker = None
        self._launcher.unshare()

    def _take(self, command: AgentCommand) -> AgentEvent | None:
        """Carries a command out. Returns the reply, if it has one."""
        match command:
            case AgentRefused():
                raise InputError(command.message)
            case Ping():
                return Pong(clock=time.perf_counter())
            case ShareMemory():
                return MemoryShared(path=self._launcher.share(self._device, command.num_bytes))
            case ReleaseMemory():
                self._launcher.unshare()
            case StartWorker():
                self._start(command.generation)
            case KillWorker():
                self.kill()
            case EndAgent():
                pass  # `serve` returns.
            case _:
                assert_never(command)
        return None

    def _start(self, generation: int) -> None:
        connection = self._connect()
        connection.sendall(frame(WorkerHello(device=self._device, generation=generation)))
        self._worker = ForkedWorker(connection)


def _commands(connection: socket.socket) -> Iterator[AgentCommand]:
    try:
        while (command := AGENT_COMMANDS.read(connection.recv)) is not None:
            yield command
    except MessageError as error:
        print(f"exeplan.runner: {error}", file=sys.stderr)
    except OSError:
        return


def _on_signals(action: signal.Handlers | Callable[..., object]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, action)


def _leave(*_: object) -> NoReturn:
    raise SystemExit(0)
