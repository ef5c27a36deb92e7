"""EngineClient: the front end's side of the engine process; asyncio, and no torch.

The engine runs in a process of its own, so that neither HTTP nor JSON ever delays an iteration. Events are read as fast
as they come and wait in the job they belong to, so a slow HTTP client holds nothing but its own tokens.
"""

import asyncio
import itertools
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from exeplan.errors import InputError
from exeplan.runner.ipc.frames import HEADER, Event, Loading, Stats, frame

_FAULTS = {
    "error": "the model gave no usable numbers for this request; the server's log says more",
    "lost": "workers died more than once while this request was running, so it is not tried again",
}
_EXPIRED = "the request had not begun by its deadline, so nothing of it was computed"
STOP_SECONDS = 5.0
"""How long the engine process may take to end before it is killed."""
MAX_UNREAD = 65536
"""Tokens and log-probabilities that wait for one streaming client; a reader who is further behind is given up."""


class EngineError(Exception):
    """The engine did not do what was asked: the message says why, `status` is the HTTP status that fits."""

    def __init__(self, message: str, *, status: int = 503, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(eq=False, slots=True)
class Job:
    """The sequences of one HTTP request, as far as they are unfinished, and what the engine said about them."""

    job_id: str
    request_ids: tuple[str, ...]
    open: set[str]
    """Sequences that have not finished."""
    waiting: set[str]
    """Those of them whose prefill has not begun."""
    events: asyncio.Queue[Event | Exception] = field(default_factory=asyncio.Queue)
    streamed: bool = False
    num_unread: int = 0
    """Tokens and log-probabilities of the events that wait."""

    def fail(self, error: Exception) -> None:
        """Whoever reads the events gets this error after those that are there."""
        self.events.put_nowait(error)

    async def next_events(self) -> list[Event]:
        """All events that are there, waiting for the first. Raises InputError or EngineError where one comes first."""
        events: list[Event] = []
        self.num_unread = 0  # All that wait are taken below.
        while not events or not self.events.empty():
            found = await self.events.get()
            if isinstance(found, Event):
                events.append(found)
                continue
            if not events:
                raise found
            self.events.put_nowait(found)  # For the next call; what came after an error is of no use.
            break
        return events


class EngineClient:
    """Starts, feeds and ends one engine process. `failure` says why it can no longer be used, None while it can."""

    def __init__(self, process: asyncio.subprocess.Process, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]):
        self.failure: str | None = None
        self.ended = asyncio.Event()
        """Set when there is a failure."""
        self.pause: str | None = None
        """Why nothing runs at the moment, though it soon will; None while all is well."""
        self.loading: Loading | None = Loading("starting the engine")
        """What is being done before anything can run, None once it is; again where workers begin again."""
        self.stats = Stats()
        self.num_blocks = 0
        self.on_step: Callable[[list[Event], Stats], None] = lambda events, stats: None
        self._process = process
        self._reader, self._writer = streams
        self._jobs: dict[str, Job] = {}
        self._numbers = itertools.count(1)
        self._reading: asyncio.Task[None] | None = None
        self._patience, self._progress = math.inf, time.monotonic()
        self._asked: asyncio.Future[dict[str, Any]] | None = None
        """The answer to a census or an adoption, of which one is under way at a time."""
        self._asking = asyncio.Lock()

    @classmethod
    async def start(cls, setup: Mapping[str, Any]) -> "EngineClient":
        """A client that is ready: `launch` and `until_ready`."""
        client = await cls.launch(setup)
        try:
            await client.until_ready()
        except BaseException:
            await client.close()
            raise
        return client

    @classmethod
    async def launch(cls, setup: Mapping[str, Any]) -> "EngineClient":
        """Starts the engine process, which begins to load; nothing may be asked of it before `until_ready`."""
        ours, theirs = socket.socketpair()
        # The child looks modules up exactly where this process does, and not in the working directory besides.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = (sys.executable, "-P", "-m", "exeplan.runner.engine_process.process", str(theirs.fileno()))
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *command,
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        client = cls(process, await asyncio.open_unix_connection(sock=ours))
        client._writer.write(frame(setup))
        client._patience = setup.get("deadline_seconds") or math.inf
        return client

    async def until_ready(self) -> None:
        """Waits until the model is loaded and warm; `loading` says how far it is.

        Raises InputError when the model cannot be loaded, EngineError when the process failed.
        """
        try:
            while (message := await self._read())["kind"] == "loading":
                self._take(message)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise EngineError(await self._how_it_ended()) from None
        if message["kind"] == "refused":
            raise InputError(message["message"])
        if message["kind"] == "broken":
            raise EngineError(message["message"])
        self.num_blocks, self.loading = message["num_blocks"], None
        self.stats = Stats(num_blocks=self.num_blocks, free_blocks=self.num_blocks)
        self._reading = asyncio.create_task(self._read_on())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def unready(self) -> str | None:
        """What it does before it can be asked anything; None from then on."""
        return f"not ready: {self.loading}" if self._reading is None else None

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    @property
    def num_waiting(self) -> int:
        """Sequences whose prefill has not begun, also those that are still being tokenized."""
        return sum(len(job.waiting) for job in self._jobs.values())

    @property
    def stall(self) -> str | None:
        """Since when there is work and no iteration, where that is longer than any iteration may take; else None."""
        silent = time.monotonic() - self._progress
        return f"no iteration for {silent:.0f} s" if self._jobs and silent > self._patience else None

    def reserve(self, count: int) -> Job:
        """A job of so many sequences, which has its places in the queue from now on."""
        if not self._jobs:
            self._progress = time.monotonic()
        job_id = str(next(self._numbers))
        request_ids = tuple(f"{job_id}-{index}" for index in range(count))
        self._jobs[job_id] = Job(job_id, request_ids, set(request_ids), set(request_ids))
        return self._jobs[job_id]

    def submit(self, job: Job, requests: Sequence[Mapping[str, Any]], *, stream: bool = True) -> None:
        """Hands the job's sequences over: `{prompt_token_ids, sampling}` each, in the order of `request_ids`.

        Streamed, each has an event a token; otherwise one for its first token and one for all the others.
        """
        if self.failure:
            raise EngineError(self.failure)
        job.streamed = stream
        rows = [{"request_id": name, **request} for name, request in zip(job.request_ids, requests, strict=True)]
        self._writer.write(frame({"kind": "submit", "job": job.job_id, "stream": stream, "requests": rows}))

    def release(self, job: Job) -> None:
        """Ends a job. What is unfinished of it is dropped and its blocks are free at the next iteration."""
        if self._jobs.pop(job.job_id, None) and job.open and not self.failure:
            self._writer.write(frame({"kind": "abort", "request_ids": sorted(job.open)}))

    async def census(self) -> dict[str, Any]:
        """Lengths of requests: `{now, left, running}`, as `wire` says. Raises EngineError when the engine is gone."""
        return await self._ask({"kind": "census"})

    async def adopt(self, setup: Mapping[str, Any]) -> dict[str, Any]:
        """Goes on with the plan of a setup: `{num_blocks, seconds, num_recomputed, num_carried}`.

        Raises InputError where that is not possible, and nothing has changed; EngineError when the engine is gone.
        """
        answer = await self._ask({"kind": "adopt", "number": next(self._numbers), "setup": setup})
        if answer["kind"] == "not-adopted":
            raise InputError(answer["message"])
        self.num_blocks = answer["num_blocks"]
        return answer

    async def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        async with self._asking:
            if reason := self.failure or self.unready:
                raise EngineError(reason)
            self._asked = asyncio.get_running_loop().create_future()
            self._writer.write(frame(message))
            try:
                return await self._asked
            finally:
                self._asked = None

    def fail_all(self, error: Exception) -> None:
        """Ends every job with this error."""
        for job in self._jobs.values():
            job.fail(error)
        if self._asked and not self._asked.done():
            self._asked.set_exception(error)

    async def close(self) -> int | None:
        """Ends the engine process; returns its exit status."""
        self.failure = self.failure or "the engine was closed"
        self._writer.close()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        if self._reading:
            await self._reading
        return self._process.returncode

    async def _read(self) -> dict[str, Any]:
        header = await self._reader.readexactly(HEADER.size)
        return json.loads(await self._reader.readexactly(HEADER.unpack(header)[0]))

    async def _read_on(self) -> None:
        reason = None
        try:
            while reason is None:
                message = await self._read()
                reason = self._take(message)
        except (asyncio.IncompleteReadError, ConnectionError):
            reason = await self._how_it_ended()
        self.failure = self.failure or reason
        self.fail_all(EngineError(self.failure))
        self.ended.set()

    def _take(self, message: Mapping[str, Any]) -> str | None:
        """Passes a message on; returns why the engine is ending, if it says so."""
        if message["kind"] == "broken":
            return message["message"]
        if message["kind"] in ("census", "adopted", "not-adopted"):
            if self._asked and not self._asked.done():
                self._asked.set_result(dict(message))
            return None
        if message["kind"] in ("down", "up"):
            self.pause, self.loading = message.get("message"), None
            return None
        if message["kind"] == "loading":
            self.loading = Loading(message["stage"], message["share"])
            return None
        if message["kind"] == "refused":
            if job := self._jobs.get(message["job"]):
                job.open.clear()
                job.fail(InputError(message["message"]))
            return None
        self.stats, self._progress = Stats(*message["stats"]), time.monotonic()
        events = [Event.of(values) for values in message["events"]]
        # An event may have been on its way when its job was released.
        self.on_step([event for event in events if self._deliver(event)], self.stats)
        return None

    def _deliver(self, event: Event) -> bool:
        """Whether there still is a job that the event belongs to."""
        job = self._jobs.get(event.request_id.partition("-")[0])
        if job is None:
            return False
        job.waiting.discard(event.request_id)
        if event.finish_reason:
            job.open.discard(event.request_id)
        if event.finish_reason == "expired":
            job.events.put_nowait(EngineError(_EXPIRED, status=408, code="deadline_exceeded"))
            return True
        fault = _FAULTS.get(event.finish_reason or "")
        job.events.put_nowait(EngineError(fault, status=500) if fault else event)
        job.num_unread += len(event.token_ids) + sum(1 + len(entry.top) for entry in event.logprobs)
        if job.streamed and job.num_unread > MAX_UNREAD and job.open:
            job.fail(EngineError("the answer was not read as fast as it was generated, and is given up", status=408))
            self.release(job)
        return True

    async def _how_it_ended(self) -> str:
        status = await self._process.wait()
        return f"the engine process ended unexpectedly ({f'signal {-status}' if status < 0 else f'status {status}'})"
