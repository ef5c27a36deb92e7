"""Fork server: a process that has imported its modules once, and forks others from itself within milliseconds: with
torch engines and workers, without it the readers of requests.

`python -m exeplan.runner.ipc.fork_server FD NAME MODULE...` imports the modules and serves ForkCommand on its socket; a
forked process runs `main` of one of them, with the socket that it was given. An engine gets a channel of its own to the
server, which forks its workers. What was forked over a channel is killed when the channel closes, and all when the
server ends, also a process that is stopped: nothing outlives its owner, and nothing is left in a file system, where
multiprocessing's fork server keeps a folder.

Not here: what a forked process does, and whether to fork another one.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from exeplan.runner.ipc.child_process import child_command, is_stopped
from exeplan.runner.ipc.frames import MessageError, frame
from exeplan.runner.ipc.messages import (
    FORK_COMMANDS,
    FORK_REPLIES,
    EndProcess,
    Fork,
    ForkCommand,
    Forked,
    ForkReply,
    ProcessEnded,
)

REPLY_SECONDS = 60.0
"""How long a server may take to reply, its imports included; one that takes longer is replaced."""
_REAP_SECONDS = 10.0
"""How long a killed process may take to end; one that waits for a device may take longer, and is left to the system."""
_PAUSE_SECONDS = 0.002
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


class ForkChannel:
    """A client's end of a channel to a fork server; any thread may use it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._lock = connection, threading.Lock()
        connection.settimeout(REPLY_SECONDS)

    def fork(self, module: str, connection: socket.socket, *, name: str, forks: bool = False) -> int:
        """Forks a process that runs `main(connection)` of a module, and returns its pid; closes the connection here.

        With `forks` it is `main(connection, channel)`, with a channel of its own to this server.
        Raises ChildProcessError where the server is gone.
        """
        with connection:
            reply = self._ask(Fork(module=module, name=name, forks=forks), [connection.fileno()])
        if not isinstance(reply, Forked):
            raise ChildProcessError(f"the fork server answered Fork with {type(reply).__name__}")
        return reply.pid

    def end(self, pid: int, *, patience: float = 0.0) -> int | None:
        """Kills a process that was forked over this channel, unless it ends within `patience` seconds.

        Returns its status, negative for a signal; None where it is not known. Raises ChildProcessError as `fork`.
        """
        reply = self._ask(EndProcess(pid=pid, patience=patience))
        return reply.status if isinstance(reply, ProcessEnded) else None

    def close(self) -> None:
        """Ends the channel, and what was forked over it; a call that waits for a reply fails."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _ask(self, command: ForkCommand, descriptors: Sequence[int] = ()) -> ForkReply:
        try:
            with self._lock:
                socket.send_fds(self._connection, [frame(command)], descriptors)
                reply = FORK_REPLIES.read(self._connection.recv)
        except OSError as error:
            raise ChildProcessError(f"the fork server is gone: {error.strerror or error}") from None
        if reply is None:
            raise ChildProcessError("the fork server is gone")
        return reply


class ForkServer:
    """A fork server of this process: started with the first call, and again where it has ended."""

    def __init__(self, modules: Sequence[str], *, name: str = "exeplan-forks") -> None:
        """`modules` are imported by the server, which the system shows by its `name` of at most 15 characters."""
        self._modules, self._name = tuple(modules), name
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: ForkChannel | None = None
        self._closed = False
        self._replied = False
        """Whether its imports are done: one that imports may wait for a disk, and is not replaced."""

    def start(self) -> None:
        """Begins to start it, without waiting for its imports."""
        with self._lock:
            self._started()

    def fork(self, module: str, connection: socket.socket, *, name: str, forks: bool = False) -> int:
        """As `ForkChannel.fork`; a server that has ended or does not reply is replaced first."""
        with connection:
            with self._lock:
                channel = self._started()
            try:
                pid = channel.fork(module, connection.dup(), name=name, forks=forks)
                self._replied = True
                return pid
            except ChildProcessError:
                with self._lock:
                    if self._channel is channel:
                        self._stop()
                    channel = self._started()
            return channel.fork(module, connection.dup(), name=name, forks=forks)

    def end(self, pid: int, *, patience: float = 0.0) -> int | None:
        """As `ForkChannel.end`; without a server its processes have ended with it, and one that is stopped is ended."""
        with self._lock:
            if self._process and is_stopped(self._process.pid):
                self._stop()
        try:
            return self._channel.end(pid, patience=patience) if self._channel else None
        except ChildProcessError:
            return None

    def close(self) -> None:
        """Ends it and everything that it has forked."""
        with self._lock:
            self._closed = True
            self._stop()

    def _started(self) -> ForkChannel:
        if self._closed:
            raise ChildProcessError("the fork server is closed")
        if self._process and (self._process.poll() is not None or (self._replied and is_stopped(self._process.pid))):
            self._stop()
        if self._channel is None:
            ours, theirs = socket.socketpair()
            with theirs:
                command, environment = child_command(__name__, str(theirs.fileno()), self._name, *self._modules)
                self._process = subprocess.Popen(
                    command,
                    env=environment,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            self._channel = ForkChannel(ours)
            atexit.register(self.close)
        return self._channel

    def _stop(self) -> None:
        if self._channel and self._process:
            self._channel.close()
            self._process.kill()
            self._process.wait()
            atexit.unregister(self.close)
        self._channel = self._process = None
        self._replied = False


class _Server:
    """The server's own side: one thread, which waits for commands on all channels."""

    def __init__(self, modules: Sequence[ModuleType]) -> None:
        self._modules = {module.__name__: module for module in modules}
        self._forked: dict[socket.socket, set[int]] = {}
        """By channel: the processes that it owns and that have not been waited for."""
        self._selector = selectors.DefaultSelector()
        self._received: list[int] = []

    def run(self, first: socket.socket) -> None:
        """Until the first channel closes; all that was forked is killed then."""
        self._add(first)
        while first in self._forked:
            for key, _ in self._selector.select():
                assert isinstance(key.fileobj, socket.socket)
                self._serve(key.fileobj)
        for channel in list(self._forked):
            self._drop(channel)

    def _add(self, channel: socket.socket) -> None:
        self._forked[channel] = set()
        self._selector.register(channel, selectors.EVENT_READ)

    def _serve(self, channel: socket.socket) -> None:
        try:
            command = FORK_COMMANDS.read(lambda size: self._receive(channel, size))
            if command is not None:
                channel.sendall(frame(self._take(command, channel)))
                return
        except MessageError as error:
            print(f"exeplan.runner: {error}", file=sys.stderr)
        except OSError:
            pass
        finally:
            self._close_received()
        self._drop(channel)

    def _receive(self, channel: socket.socket, size: int) -> bytes:
        data, descriptors, _, _ = socket.recv_fds(channel, size, 1)
        self._received += descriptors
        return data

    def _close_received(self) -> None:
        """Sockets that came with no Fork, or with a wrong one: they are not the next one's."""
        while self._received:
            os.close(self._received.pop())

    def _take(self, command: ForkCommand, channel: socket.socket) -> ForkReply:
        match command:
            case Fork():
                return Forked(pid=self._fork(command, channel))
            case EndProcess():
                return ProcessEnded(status=self._end(command.pid, channel, command.patience))

    def _fork(self, command: Fork, channel: socket.socket) -> int:
        module = self._modules.get(command.module)
        if module is None or len(self._received) != 1:
            raise MessageError(f"Fork of {command.module} with {len(self._received)} sockets is no command")
        connection = socket.socket(fileno=self._received.pop())
        ours, theirs = socket.socketpair() if command.forks else (None, None)
        server = os.getpid()
        if (pid := os.fork()) == 0:
            _set_name(command.name)
            _die_with_parent()
            self._become(module, [connection, *([theirs] if theirs else [])], ours, server)
        connection.close()
        self._forked[channel].add(pid)
        if ours and theirs:
            theirs.close()
            self._add(ours)
        return pid

    def _become(
        self, module: ModuleType, connections: Sequence[socket.socket], ours: socket.socket | None, server: int
    ) -> NoReturn:
        """In the forked process: gives up all that is the server's, and runs `main`."""
        status = 1
        try:
            if os.getppid() != server:
                os._exit(status)
            self._selector.close()
            for channel in (*self._forked, *([ours] if ours else [])):
                channel.close()
            status = module.main(*connections) or 0
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _end(self, pid: int, channel: socket.socket, patience: float) -> int | None:
        if pid not in self._forked[channel]:
            return None
        status = _await_end(pid, patience)
        if status is None:
            os.kill(pid, signal.SIGKILL)  # It has not been waited for, so that the number is still its own.
            status = _await_end(pid, _REAP_SECONDS)
        if status is not None:
            self._forked[channel].discard(pid)
        return status

    def _drop(self, channel: socket.socket) -> None:
        """The owner is gone, and so is what it owned."""
        for pid in self._forked[channel]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self._forked.pop(channel):
            _await_end(pid, _REAP_SECONDS)
        self._selector.unregister(channel)
        channel.close()


def _set_name(name: str) -> None:
    """Names this process as the system shows it, where that is Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def _die_with_parent() -> None:
    """Has the system kill this process when its parent ends, where that is Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _await_end(pid: int, seconds: float) -> int | None:
    """The status of a child, as soon as it has ended; None where that takes longer."""
    deadline = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return None
        time.sleep(_PAUSE_SECONDS)


def main(descriptor: int, name: str, modules: Sequence[str]) -> NoReturn:
    """Imports the modules, and serves until the channel on the descriptor closes. Signals are for its client."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _set_name(name)
    server = _Server([importlib.import_module(module) for module in modules])
    gc.collect()
    gc.freeze()  # A collection in a forked process would write to pages that it shares with all others.
    server.run(socket.socket(fileno=descriptor))
    os._exit(0)  # To unload torch would take a moment.


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
