"""Readers: the front end's side of the processes that read requests; the event loop only passes bytes on.

There are two, so that a checkpoint's chat template that never ends cannot hold completions up; each carries out one
command at a time, in the order in which they came from a client, clients in turns. One that takes longer than
`READ_SECONDS` is killed and replaced. So is one that has ended or is stopped, whose command the next one gets.

They are forked by a server of their own, which has imported what they need once: a new one is ready at once, where a
fresh Python would import for most of a second. It is not the engine's, which imports torch first, and may wait for an
engine to end.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from dataclasses import dataclass, field
from typing import TypeAlias

from exeplan.runner.ipc.child_process import STOPPED_SECONDS, WATCH_SECONDS, is_stopped
from exeplan.runner.ipc.fork_server import ForkServer
from exeplan.runner.ipc.frames import MessageError, frame
from exeplan.runner.ipc.messages import (
    READER_ANSWERS,
    BodyRefused,
    ReadDetokenize,
    ReaderAnswer,
    ReaderReady,
    ReaderSetup,
    ReadGeneration,
    ReadTokenize,
)
from exeplan.runner.server.openai.errors import RequestError

READ_SECONDS = 5.0
"""For one body; the largest that is accepted takes a fraction of it."""
START_SECONDS = 60.0
"""For a process to load its tokenizer."""
MAX_STARTS = 3
"""Attempts in a row to start a process, before a request waits for the next."""
RETRY_SECONDS = 1
MAX_WAITING_BYTES = 256 * 1024 * 1024
"""Of all bodies that wait to be read."""
_READER = "exeplan.runner.server.network.reader_process"
_IMPORTED = (_READER, "llguidance")
Command: TypeAlias = ReadGeneration | ReadTokenize | ReadDetokenize
_REPLACED = "a process that reads requests has ended; it is replaced"
log = logging.getLogger(__name__)


class _EndedError(Exception):
    """The process has ended before it answered."""


class Readers:
    """The reader processes of one server."""

    def __init__(self, setup: ReaderSetup) -> None:
        self._forks = ForkServer(_IMPORTED, name="exeplan-rforks")
        self._templates, self._texts = _Reader(setup, self._forks), _Reader(setup, self._forks)
        self._num_bytes = 0

    def start(self) -> None:
        """Begins to start the processes; needs the running event loop."""
        for reader in (self._templates, self._texts):
            reader.start()

    @property
    def num_reading(self) -> int:
        """Commands that are carried out or wait for that."""
        return self._templates.num_commands + self._texts.num_commands

    async def read(self, command: Command, client: str = "") -> ReaderAnswer:
        """The answer. Raises RequestError for a body that is refused, or that cannot be read in time.

        Clients take turns, by the bytes of their bodies. 503 where the bodies that wait are too large together.
        """
        size = len(command.body)
        if self._num_bytes + size > MAX_WAITING_BYTES:
            raise RequestError("too many large requests at once", status=503, code="busy", retry_after=RETRY_SECONDS)
        self._num_bytes += size
        try:
            return await self._read(command, client)
        finally:
            self._num_bytes -= size

    async def _read(self, command: Command, client: str) -> ReaderAnswer:
        renders = isinstance(command, ReadTokenize) or (isinstance(command, ReadGeneration) and command.chat)
        answer = await (self._templates if renders else self._texts).read(command, client)
        if isinstance(answer, BodyRefused):
            raise RequestError(answer.message, status=answer.status, param=answer.param, code=answer.code)
        return answer

    async def close(self) -> None:
        """Ends the processes, whatever they do."""
        await asyncio.gather(self._templates.close(), self._texts.close())
        await asyncio.to_thread(self._forks.close)


@dataclass(frozen=True, slots=True)
class _Process:
    """A forked process and the connection to it."""

    forks: ForkServer
    pid: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def fork(cls, forks: ForkServer) -> "_Process":
        """Raises ChildProcessError where that is not possible."""
        ours, theirs = socket.socketpair()
        try:
            pid = await asyncio.to_thread(forks.fork, _READER, theirs, name="exeplan-reader")
        except BaseException:
            ours.close()
            raise
        return cls(forks, pid, *await asyncio.open_unix_connection(sock=ours))

    @property
    def has_ended(self) -> bool:
        return self.reader.at_eof() or self.reader.exception() is not None

    def kill(self) -> None:
        """Not after `end`: until then the number is its own."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    async def end(self) -> None:
        """Kills it, and waits until it has ended."""
        self.writer.close()
        await asyncio.to_thread(self.forks.end, self.pid)


@dataclass(order=True, frozen=True, slots=True)
class _Turn:
    start: int
    """A tag in bytes; the lowest is next."""
    number: int
    asked: tuple[Command, asyncio.Future[ReaderAnswer]] | None = field(compare=False)
    """None where the process may have to be replaced."""


class _Reader:
    """One process, started again when it has ended; commands wait in a queue."""

    def __init__(self, setup: ReaderSetup, forks: ForkServer) -> None:
        self._setup, self._forks = setup, forks
        self._queue: asyncio.PriorityQueue[_Turn] = asyncio.PriorityQueue()
        self._now = 0
        """The virtual time: the start tag of the command that was taken last."""
        self._due: dict[str, int] = {}
        """The finish tag of the last command of each client that has not had all its turns."""
        self._number = 0
        self._process: _Process | None = None
        """The latest one, also while it starts; None where it has been ended."""
        self._ready = False
        """Whether it takes commands."""
        self._tasks: list[asyncio.Task[None]] = []
        self.num_commands = 0

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._watch())]

    async def read(self, command: Command, client: str) -> ReaderAnswer:
        """By start-time fair queueing over bytes (Goyal et al., SIGCOMM 1996); of one client in order."""
        answer: asyncio.Future[ReaderAnswer] = asyncio.get_running_loop().create_future()
        self.num_commands += 1
        try:
            start = max(self._now, self._due.get(client, 0))
            self._due[client] = start + len(command.body) + 1
            self._number += 1
            self._queue.put_nowait(_Turn(start, self._number, (command, answer)))
            return await answer
        finally:
            self.num_commands -= 1

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._end()

    async def _run(self) -> None:
        while True:
            if self._process and self._process.has_ended:
                log.warning(_REPLACED)
                await self._end()
            await self._launch()
            turn = await self._queue.get()
            self._now = max(self._now, turn.start)
            self._due = {name: due for name, due in self._due.items() if due > self._now}
            if turn.asked is None:
                continue
            command, answer = turn.asked
            if answer.done():  # The client has left.
                continue
            try:
                said = await self._ask(command)
            except RequestError as error:
                if not answer.done():
                    answer.set_exception(error)
            else:
                if not answer.done():
                    answer.set_result(said)

    async def _watch(self) -> None:
        """Ends a process that is stopped, and has one that has ended replaced before it is needed."""
        stopped = 0
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            process = self._process
            if process and process.has_ended and self._ready and self._queue.empty():
                self._queue.put_nowait(_Turn(self._now, 0, None))
            stopped = stopped + 1 if process and is_stopped(process.pid) else 0
            if process and stopped * WATCH_SECONDS > STOPPED_SECONDS:
                process.kill()

    async def _ask(self, command: Command) -> ReaderAnswer:
        """Asks again where the process has ended, which need not be because of this command."""
        try:
            return await self._exchange(command)
        except _EndedError:
            log.warning(_REPLACED)
        try:
            return await self._exchange(command)
        except _EndedError:
            message = "the request cannot be read: it ends the process that reads requests"
            raise RequestError(message, code="unreadable") from None

    async def _exchange(self, command: Command) -> ReaderAnswer:
        process = await self._launch()
        if process is None:
            message = "requests cannot be read now; the server's log says why"
            raise RequestError(message, status=503, code="unavailable", retry_after=RETRY_SECONDS)
        try:
            async with asyncio.timeout(READ_SECONDS):
                process.writer.write(frame(command))
                return await READER_ANSWERS.read_from(process.reader)
        except TimeoutError:
            await self._end()
            message = f"reading the request, template and tokenization included, takes longer than {READ_SECONDS:g} s"
            log.warning("%s; the process is replaced", message)
            raise RequestError(message, code="unreadable") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            await self._end()
            raise _EndedError from None

    async def _launch(self) -> _Process | None:
        """The process, a new one where there is none; None where it does not come up, which the log tells."""
        for _ in range(MAX_STARTS):
            if self._process:
                break
            try:
                await self._start()
            except (OSError, asyncio.IncompleteReadError) as error:
                log.error("the process that reads requests did not start: %s", error or type(error).__name__)
        return self._process

    async def _start(self) -> None:
        """Raises OSError or asyncio.IncompleteReadError where it does not come up; nothing is left of it then."""
        process = self._process = await _Process.fork(self._forks)
        try:
            async with asyncio.timeout(START_SECONDS):
                process.writer.write(frame(self._setup))
                if not isinstance(answer := await READER_ANSWERS.read_from(process.reader), ReaderReady):
                    raise MessageError(f"a reader sent {type(answer).__name__} before it was ready")
        except BaseException:
            await self._end()
            raise
        self._ready = True

    async def _end(self) -> None:
        """Ends the process, where there is one."""
        process, self._process, self._ready = self._process, None, False
        if process:
            await process.end()
