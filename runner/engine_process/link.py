"""EngineLink: one engine process and the connection to it; asyncio, and no torch.

Not here: what the events mean, and whether another engine follows (`client.py`).
"""

import asyncio
import contextlib
import os
import signal
import socket

import msgspec

from exeplan.runner.ipc.child_process import is_stopped
from exeplan.runner.ipc.fork_server import ForkServer
from exeplan.runner.ipc.frames import frame
from exeplan.runner.ipc.messages import ENGINE_EVENTS, EngineEvent

ENGINE = "exeplan.runner.engine_process.process"
_IMPORTED = (
    ENGINE,
    "exeplan.runner.engine_process.build",
    "exeplan.runner.engine.engine",
    "exeplan.runner.compute.model_runner",
    "exeplan.runner.compute.weights.loading_bar",
    "exeplan.runner.compute.warm_up",
    "exeplan.runner.distributed.multiprocess_executor",
    "exeplan.runner.distributed.worker",
)
_LAST_WORDS_SECONDS = 0.5
"""How long a process that has closed its connection may take to end by itself, so that its status is known."""


def engine_forks() -> ForkServer:
    """A server that forks engines, whose workers it forks as well; it starts with the first engine."""
    return ForkServer(_IMPORTED)


class EngineLink:
    """An engine process from its start to its end."""

    def __init__(self, forks: ForkServer, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._forks, self._pid, self._reader, self._writer = forks, pid, reader, writer
        self._silent_ticks = self._stopped_ticks = 0
        self._verdict: str | None = None
        """Why it was killed, if it was."""
        self._waited_for = False

    @classmethod
    async def open(cls, forks: ForkServer) -> "EngineLink":
        """Forks an engine, which waits for its setup. Raises ChildProcessError where that is not possible."""
        ours, theirs = socket.socketpair()
        try:
            pid = await asyncio.to_thread(forks.fork, ENGINE, theirs, name="exeplan-engine", forks=True)
        except BaseException:
            ours.close()
            raise
        return cls(forks, pid, *await asyncio.open_unix_connection(sock=ours))

    @property
    def pid(self) -> int:
        return self._pid

    def send(self, message: msgspec.Struct) -> None:
        """One that cannot be sent any more is dropped: the end of the process is seen by `read`."""
        self._writer.write(frame(message))

    async def read(self) -> EngineEvent:
        """The next event. Raises MessageError, or IncompleteReadError and OSError when the process has gone."""
        event = await ENGINE_EVENTS.read_from(self._reader)
        self._silent_ticks = 0
        return event

    def watch(self, seconds: float, *, patience: float, stopped: float) -> None:
        """Call it every `seconds`: kills a process that has sent nothing for `patience`, or is stopped for as long.

        Time counts by calls, each of which follows one in which events were read: where this process itself was stopped
        or the machine asleep, the engine is not to blame.
        """
        if self._verdict or self._waited_for:
            return
        self._silent_ticks += 1
        self._stopped_ticks = self._stopped_ticks + 1 if is_stopped(self._pid) else 0
        if self._stopped_ticks * seconds > stopped:
            self.kill("the engine process was stopped by a signal")
        elif self._silent_ticks * seconds > patience:
            self.kill(f"the engine process made no progress for {patience:g} s")

    def kill(self, verdict: str) -> None:
        self._verdict = verdict
        with contextlib.suppress(ProcessLookupError):  # It is waited for in `end`: until then the number is its own.
            os.kill(self._pid, signal.SIGKILL)

    async def end(self, *, patience: float = _LAST_WORDS_SECONDS) -> tuple[int | None, str]:
        """Closes the connection, which ends the process; one that takes longer than `patience` seconds is killed.

        Returns its status, None where it is not known, and a sentence on its end.
        """
        self._waited_for = True
        self._writer.close()
        status = await asyncio.to_thread(self._forks.end, self._pid, patience=patience)
        how = "" if status is None else f" (signal {-status})" if status < 0 else f" (status {status})"
        return status, self._verdict or f"the engine process ended unexpectedly{how}"
