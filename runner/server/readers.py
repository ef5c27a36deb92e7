"""Readers: the front end's side of the processes that read requests; the event loop only passes bytes on.

There are two, so that a checkpoint's chat template that never ends cannot hold completions up; each carries out one
command at a time, in the order in which they came from a client, clients in turns. One that takes longer than
`READ_SECONDS` is killed and replaced. So is one that has ended or is stopped, whose command the next one gets.
"""

import asyncio
import contextlib
import logging
import socket
from dataclasses import dataclass, field
from typing import TypeAlias

from exeplan.runner.ipc.child_process import STOPPED_SECONDS, WATCH_SECONDS, is_stopped, start_child
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
from exeplan.runner.server.protocol import RequestError

READ_SECONDS = 5.0
"""For one body; the largest that is accepted takes a fraction of it."""
START_SECONDS = 60.0
"""For a process to load its tokenizer."""
MAX_STARTS = 3
"""Attempts in a row to start a process, before a request waits for the next."""
RETRY_SECONDS = 1
MAX_WAITING_BYTES = 256 * 1024 * 1024
"""Of all bodies that wait to be read."""
Command: TypeAlias = ReadGeneration | ReadTokenize | ReadDetokenize
_REPLACED = "a process that reads requests has ended; it is replaced"
log = logging.getLogger(__name__)


class _EndedError(Exception):
    """The process has ended before it answered."""


class Readers:
    """The reader processes of one server."""

    def __init__(self, setup: ReaderSetup) -> None:
        self._templates, self._texts = _Reader(setup), _Reader(setup)
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


@dataclass(frozen=True, slots=True)
class _Connection:
    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def end(self) -> None:
        self.writer.close()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


@dataclass(order=True, frozen=True, slots=True)
class _Turn:
    start: int
    """A tag in bytes; the lowest is next."""
    number: int
    asked: tuple[Command, asyncio.Future[ReaderAnswer]] | None = field(compare=False)
    """None where the process may have to be replaced."""


class _Reader:
    """One process, started again when it has ended; commands wait in a queue."""

    def __init__(self, setup: ReaderSetup) -> None:
        self._setup = setup
        self._queue: asyncio.PriorityQueue[_Turn] = asyncio.PriorityQueue()
        self._now = 0
        """The virtual time: the start tag of the command that was taken last."""
        self._due: dict[str, int] = {}
        """The finish tag of the last command of each client that has not had all its turns."""
        self._number = 0
        self._connection: _Connection | None = None
        self._process: asyncio.subprocess.Process | None = None
        """The latest one, also while it starts."""
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
        if self._connection:
            await self._connection.end()

    async def _run(self) -> None:
        while True:
            if self._connection and self._connection.process.returncode is not None:
                log.warning(_REPLACED)
                await self._connection.end()
                self._connection = None
            if self._connection is None:
                self._connection = await self._launch()
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
            if not (process := self._process) or process.returncode is not None:
                if self._connection and self._queue.empty():
                    self._queue.put_nowait(_Turn(self._now, 0, None))
                continue
            stopped = stopped + 1 if is_stopped(process.pid) else 0
            if stopped * WATCH_SECONDS > STOPPED_SECONDS:
                with contextlib.suppress(ProcessLookupError):
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
        connection = self._connection = self._connection or await self._launch()
        if connection is None:
            message = "requests cannot be read now; the server's log says why"
            raise RequestError(message, status=503, code="unavailable", retry_after=RETRY_SECONDS)
        try:
            async with asyncio.timeout(READ_SECONDS):
                connection.writer.write(frame(command))
                return await READER_ANSWERS.read_from(connection.reader)
        except TimeoutError:
            self._connection = None
            await connection.end()
            message = f"reading the request, template and tokenization included, takes longer than {READ_SECONDS:g} s"
            log.warning("%s; the process is replaced", message)
            raise RequestError(message, code="unreadable") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            self._connection = None
            await connection.end()
            raise _EndedError from None

    async def _launch(self) -> _Connection | None:
        """A new process; None where it does not come up, which the log tells."""
        for _ in range(MAX_STARTS):
            try:
                return await self._started()
            except (OSError, asyncio.IncompleteReadError) as error:
                log.error("the process that reads requests did not start: %s", error or type(error).__name__)
        return None

    async def _started(self) -> _Connection:
        """Raises OSError or asyncio.IncompleteReadError where it does not come up; nothing is left of it then."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = self._process = await start_child(
                "exeplan.runner.server.reader_process",
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
            )
        connection = _Connection(process, *await asyncio.open_unix_connection(sock=ours))
        try:
            async with asyncio.timeout(START_SECONDS):
                connection.writer.write(frame(self._setup))
                if not isinstance(answer := await READER_ANSWERS.read_from(connection.reader), ReaderReady):
                    raise MessageError(f"a reader sent {type(answer).__name__} before it was ready")
        except BaseException:
            await connection.end()
            raise
        return connection
