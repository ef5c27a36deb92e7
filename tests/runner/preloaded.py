"""Programs that are forked from a process that has imported their modules once, and so are the fork servers that they
start.

A server takes a second to import its modules, its fork servers two and a half. Here a process of the tests does so
once, and what it forks has only those modules that it would have by itself at that point: torch is hidden from servers,
and shown to what forks their engines. A fork server is a child of its program, as ever, and another one that takes its
place is started as users' are. Programs whose start is tested are not started here.
"""

import atexit
import contextlib
import importlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import IO, Any, NoReturn

_MESSAGE = 1 << 20
_POLL_SECONDS = 0.005
_OF_SERVERS = (
    "exeplan.cli",
    "exeplan.commands.serve",
    "exeplan.planner.load_problem",
    "exeplan.runner.server.server",
    "tokenizers",
    "uvicorn",
)
_FORK_SERVERS = {
    "exeplan-rforks": ("exeplan.runner.server.network.readers", "_IMPORTED"),
    "exeplan-forks": ("exeplan.runner.engine_process.link", "_IMPORTED"),
}
"""By name: where the modules are listed that it imports; the last has those of the others, too."""


class Preloaded:
    """The process that forks; closing it leaves what it has forked to end by itself."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE)
            command = [sys.executable, "-P", __file__, str(theirs.fileno())]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            self._process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])

    def start(self, code: str, *arguments: str, stderr: IO[str] | None = None) -> "Program":
        """Runs code with these arguments, in this working directory and environment; its output is a pipe."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        read, write = os.pipe()
        asked = {"code": code, "arguments": arguments, "environment": dict(os.environ), "directory": os.getcwd()}
        with theirs:
            descriptors = [theirs.fileno(), write, 2 if stderr is None else stderr.fileno()]
            socket.send_fds(self._control, [json.dumps(asked).encode()], descriptors)
        os.close(write)
        return Program(ours, open(read, encoding="utf-8"))

    def close(self) -> None:
        self._control.close()
        self._process.wait()


class Program:
    """A program that runs, with the part of Popen that tests use."""

    def __init__(self, connection: socket.socket, stdout: IO[str]) -> None:
        self._connection, self.stdout = connection, stdout
        self.pid = int(connection.recv(_MESSAGE))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._status(0.0)

    def wait(self, timeout: float | None = None) -> int:
        if self._status(timeout) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.wait()
        self._connection.close()

    def _status(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], timeout)[0]:
            self.returncode = int(self._connection.recv(_MESSAGE))
        return self.returncode


def _receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """The next message, and what came with it. Raises EOFError at the end of the connection."""
    data, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE, 3)
    if not data:
        raise EOFError
    return json.loads(data), descriptors


def _keep_only(descriptors: Sequence[int]) -> None:
    """Closes all other descriptors but the standard ones."""
    kept = sorted({0, 1, 2, *descriptors})
    for before, after in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(before + 1, after)


def _end(run: Callable[[], object]) -> NoReturn:
    """Runs, and ends the process as the interpreter does, without the moment that it takes to unload torch."""
    status: Any = 1
    try:
        status = run()
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    threading._shutdown()
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))


class _Modules:
    """What has been imported, by the process that imports it."""

    def __init__(self) -> None:
        self.hidden: dict[str, dict[str, ModuleType]] = {}
        for name in _OF_SERVERS:
            importlib.import_module(name)
        for server, (where, listed) in _FORK_SERVERS.items():
            before = set(sys.modules)
            for name in getattr(importlib.import_module(where), listed):
                importlib.import_module(name)
            self.hidden[server] = {name: sys.modules[name] for name in set(sys.modules) - before}

    def hide(self) -> None:
        for modules in self.hidden.values():
            for name in modules:
                del sys.modules[name]

    def show(self, server: str) -> None:
        for name, modules in self.hidden.items():
            sys.modules.update(modules)
            if name == server:
                return


class _ForkServer:
    """A child that waits until it becomes a fork server."""

    def __init__(self, name: str, modules: _Modules) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _keep_only([theirs.fileno()])
            _end(partial(self._become, theirs, name, modules))
        theirs.close()

    def _become(self, connection: socket.socket, name: str, modules: _Modules) -> None:
        try:
            asked, descriptors = _receive(connection)
        except EOFError:
            os._exit(0)
        os.setsid()
        os.environ.clear()
        os.environ.update(asked["environment"])
        modules.show(name)
        connection.close()
        sys.modules["exeplan.runner.ipc.fork_server"].main(*descriptors, name, asked["modules"])

    def start(self, modules: Sequence[str], environment: dict[str, str], descriptor: int) -> "_ForkServer":
        asked = {"modules": modules, "environment": environment}
        socket.send_fds(self._connection, [json.dumps(asked).encode()], [descriptor])
        self._connection.close()
        return self

    def poll(self) -> int | None:
        if self._status is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if found else None
        return self._status

    def wait(self) -> int:
        while (status := self.poll()) is None:
            time.sleep(_POLL_SECONDS)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _run(asked: dict[str, Any], modules: _Modules) -> None:
    """The program itself, in a process of its own."""
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["directory"])
    random.seed()
    modules.hide()
    waiting = {name: _ForkServer(name, modules) for name in _FORK_SERVERS}

    def start(command: Sequence[str], *, env: dict[str, str], pass_fds: Sequence[int], **options: Any) -> Any:
        """In place of Popen: the first fork server of each name is the child that waits for that."""
        _, name, *imported = command[command.index("exeplan.runner.ipc.fork_server") + 1 :]
        if forks := waiting.pop(name, None):
            return forks.start(imported, env, *pass_fds)
        return subprocess.Popen(command, env=env, pass_fds=pass_fds, **options)

    forking: Any = sys.modules["exeplan.runner.ipc.fork_server"]
    forking.subprocess = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)
    sys.argv = ["-c", *asked["arguments"]]
    exec(compile(asked["code"], "<program>", "exec"), {"__name__": "__main__"})


def _keep(asked: dict[str, Any], descriptors: Sequence[int], modules: _Modules) -> None:
    """Forks the program, says its number, and waits for its status."""
    connection, stdout, stderr = descriptors
    pid = os.fork()
    if pid == 0:
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        _keep_only([])
        _end(partial(_run, asked, modules))
    os.close(stdout)
    os.close(stderr)
    asking = socket.socket(fileno=connection)
    asking.send(str(pid).encode())
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        asking.send(str(os.waitstatus_to_exitcode(status)).encode())


def main(descriptor: int) -> None:
    control = socket.socket(fileno=descriptor)
    modules = _Modules()
    with contextlib.suppress(EOFError):
        while True:
            asked, descriptors = _receive(control)
            if os.fork() == 0:
                _keep_only(descriptors)
                _end(partial(_keep, asked, descriptors, modules))
            for given in descriptors:
                os.close(given)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


if __name__ == "__main__":
    main(int(sys.argv[1]))
