"""EngineClient: the front end's side of the engine process; asyncio, and no torch.

The engine runs in a process of its own, so that neither HTTP nor JSON ever delays an iteration. Events are read as fast
as they come and wait in the job that they belong to, so a slow HTTP client delays only its own tokens.
"""

import asyncio
import itertools
import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, assert_never

from exeplan.errors import InputError
from exeplan.runner.ipc.child_process import start_child
from exeplan.runner.ipc.frames import MessageError, frame
from exeplan.runner.ipc.messages import (
    ENGINE_EVENTS,
    Abort,
    EngineBroken,
    EngineDown,
    EngineEvent,
    EngineReady,
    EngineSetup,
    EngineUp,
    Event,
    GetLengthStats,
    IterationDone,
    JobRefused,
    LengthStatsReport,
    Loading,
    PlanRefused,
    PlanSwitched,
    Prompt,
    SetupRefused,
    Stats,
    Submit,
    SwitchPlan,
)

Answer: TypeAlias = LengthStatsReport | PlanSwitched | PlanRefused

_FAULTS = {
    "error": "the model gave no usable numbers for this request; the server's log says more",
    "lost": "workers died more than once while this request was running, so it is not tried again",
}
_EXPIRED = "the request had not begun by its deadline, so nothing of it was computed"
STOP_SECONDS = 5.0
"""How long the engine process may take to end before it is killed."""
MAX_UNREAD = 16384
"""Tokens and log-probabilities that wait for one streaming client; the request of a slower reader is aborted."""


class EngineError(Exception):
    """The engine did not do what was asked: the message says why, `status` is the HTTP status that fits."""

    def __init__(self, message: str, *, status: int = 503, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(eq=False, slots=True)
class Job:
    """The sequences of one HTTP request, and the events that the engine sent of them."""

    job_id: str
    request_ids: tuple[str, ...]
    open: set[str]
    """Sequences that have not finished."""
    waiting: set[str]
    """Those whose prefill has not begun."""
    events: asyncio.Queue[Event | Exception] = field(default_factory=asyncio.Queue)
    streamed: bool = False
    num_unread: int = 0
    """Tokens and log-probabilities of the events that wait."""
    client: str = ""
    client_weight: float = 1.0
    """Which client it is from, and its share of the engine relative to others."""

    def fail(self, error: Exception) -> None:
        """The reader of the events gets this error after those that are there."""
        self.events.put_nowait(error)

    async def next_events(self) -> list[Event]:
        """All events so far, waiting for the first. Raises InputError or EngineError where that comes first."""
        events: list[Event] = []
        self.num_unread = 0  # All of them are taken below.
        while not events or not self.events.empty():
            found = await self.events.get()
            if isinstance(found, Event):
                events.append(found)
                continue
            if not events:
                raise found
            self.events.put_nowait(found)  # For the next call; what came after an error is dropped.
            break
        return events


class EngineClient:
    """Starts, feeds and ends one engine process. `failure` is why it can no longer be used; None while it can."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        numbers: Iterator[int],
    ) -> None:
        self.failure: str | None = None
        self.ended = asyncio.Event()
        """Set when there is a failure."""
        self.pause: str | None = None
        """Why nothing runs while workers are restarted; None otherwise."""
        self.loading: Loading | None = Loading("starting the engine")
        """What is loaded before anything can run; None once it is, until workers are restarted."""
        self.stats = Stats()
        self.num_blocks = 0
        self.on_step: Callable[[list[Event], Stats], None] = lambda events, stats: None
        self._process = process
        self._reader, self._writer = streams
        self._jobs: dict[str, Job] = {}
        self._numbers = numbers
        self._reading: asyncio.Task[None] | None = None
        self._patience, self._progress = math.inf, time.monotonic()
        self._asked: tuple[int, asyncio.Future[Answer]] | None = None
        """The number of the question that waits for its answer; there is one at a time."""
        self._asking = asyncio.Lock()

    @classmethod
    async def start(cls, setup: EngineSetup) -> "EngineClient":
        """A client that is ready: `launch` and `until_ready`."""
        client = await cls.launch(setup)
        try:
            await client.until_ready()
        except BaseException:
            await client.close()
            raise
        return client

    @classmethod
    async def launch(cls, setup: EngineSetup, *, numbers: Iterator[int] | None = None) -> "EngineClient":
        """Starts the engine process, which begins to load; it takes no other command before `until_ready`.

        `numbers` count jobs, together with those of other clients where there are any.
        """
        first = frame(setup)
        ours, theirs = socket.socketpair()
        with theirs:
            process = await start_child(
                "exeplan.runner.engine_process.process",
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
            )
        client = cls(process, await asyncio.open_unix_connection(sock=ours), numbers or itertools.count(1))
        client._writer.write(first)
        client._patience = setup.deadline_seconds
        return client

    async def until_ready(self) -> None:
        """Waits until the model is loaded and warm; `loading` is how far it is.

        Raises InputError when the model cannot be loaded, EngineError when the process failed.
        """
        try:
            while isinstance(event := await ENGINE_EVENTS.read_from(self._reader), Loading):
                self.loading = event
        except MessageError as error:
            raise EngineError(str(error)) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise EngineError(await self._how_it_ended()) from None
        if isinstance(event, SetupRefused):
            raise InputError(event.message)
        if isinstance(event, EngineBroken):
            raise EngineError(event.message)
        if not isinstance(event, EngineReady):
            raise EngineError(f"the engine process sent {type(event).__name__} before it was ready")
        self.num_blocks, self.loading = event.num_blocks, None
        self.stats = Stats(num_blocks=self.num_blocks, free_blocks=self.num_blocks)
        self._reading = asyncio.create_task(self._read_on())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def unready(self) -> str | None:
        """What it does before it takes commands; None from then on."""
        return f"not ready: {self.loading}" if self._reading is None else None

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    @property
    def num_sequences(self) -> int:
        """Sequences that have not finished."""
        return sum(len(job.open) for job in self._jobs.values())

    @property
    def num_waiting(self) -> int:
        """Sequences whose prefill has not begun, those included that are still being tokenized."""
        return sum(len(job.waiting) for job in self._jobs.values())

    @property
    def stall(self) -> str | None:
        """How long there has been work and no iteration, where that is longer than an iteration may take; else None."""
        silent = time.monotonic() - self._progress
        return f"no iteration for {silent:.0f} s" if self._jobs and silent > self._patience else None

    def reserve(self, count: int) -> Job:
        """A job of `count` sequences, which has its places in the queue from now on."""
        if not self._jobs:
            self._progress = time.monotonic()
        job_id = str(next(self._numbers))
        request_ids = tuple(f"{job_id}-{index}" for index in range(count))
        self._jobs[job_id] = Job(job_id, request_ids, set(request_ids), set(request_ids))
        return self._jobs[job_id]

    def submit(self, job: Job, prompts: Sequence[Prompt], *, stream: bool = True) -> None:
        """Sends the job's prompts to the engine; their sequences are in the order of `request_ids`.

        Streamed, each has an event a token; otherwise one for its first token and one for all the others.
        """
        if self.failure:
            raise EngineError(self.failure)
        job.streamed = stream
        assert sum(prompt.n for prompt in prompts) == len(job.request_ids)
        command = Submit(
            job=job.job_id,
            stream=stream,
            prompts=prompts,
            request_ids=job.request_ids,
            client=job.client,
            client_weight=job.client_weight,
        )
        self._writer.write(frame(command))

    def release(self, job: Job) -> None:
        """Ends a job. Its unfinished sequences are dropped, and their blocks are free at the next iteration."""
        if self._jobs.pop(job.job_id, None) and job.open and not self.failure:
            self._writer.write(frame(Abort(request_ids=sorted(job.open))))

    async def length_stats(self) -> LengthStatsReport:
        """Lengths of requests. Raises EngineError when the engine is gone."""
        answer = await self._ask(GetLengthStats(number=next(self._numbers)))
        assert isinstance(answer, LengthStatsReport)
        return answer

    async def switch_plan(self, setup: EngineSetup) -> PlanSwitched:
        """Switches to the plan of a setup.

        Raises InputError where that is not possible, and nothing has changed; EngineError when the engine is gone.
        """
        answer = await self._ask(SwitchPlan(number=next(self._numbers), setup=setup))
        if isinstance(answer, PlanRefused):
            raise InputError(answer.message)
        assert isinstance(answer, PlanSwitched)
        return answer

    async def _ask(self, question: GetLengthStats | SwitchPlan) -> Answer:
        async with self._asking:
            if reason := self.failure or self.unready:
                raise EngineError(reason)
            answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            self._asked = question.number, answer
            self._writer.write(frame(question))
            try:
                return await answer
            finally:
                self._asked = None

    def fail_all(self, error: Exception) -> None:
        """Ends every job with this error."""
        for job in self._jobs.values():
            job.fail(error)
        if self._asked and not self._asked[1].done():
            self._asked[1].set_exception(error)

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

    async def _read_on(self) -> None:
        reason = None
        try:
            while reason is None:
                reason = self._take(await ENGINE_EVENTS.read_from(self._reader))
        except MessageError as error:
            reason = f"the engine process sent something else than an event: {error}"
            self._writer.close()  # It ends the process.
        except (asyncio.IncompleteReadError, ConnectionError):
            reason = await self._how_it_ended()
        self.failure = self.failure or reason
        self.fail_all(EngineError(self.failure))
        self.ended.set()

    def _take(self, event: EngineEvent) -> str | None:
        """Passes an event on. Returns why the engine process ends, if it does."""
        match event:
            case IterationDone():
                self.stats, self._progress = event.stats, time.monotonic()
                # An event may have been on its way when its job was released.
                self.on_step([one for one in event.events if self._deliver(one)], self.stats)
            case JobRefused():
                if job := self._jobs.get(event.job):
                    job.open.clear()
                    job.fail(InputError(event.message))
            case LengthStatsReport() | PlanSwitched() | PlanRefused():
                self._take_answer(event)
            case Loading():
                self.loading = event
            case EngineDown():
                self.pause, self.loading = event.message, None
            case EngineUp():
                self.pause = self.loading = None
            case EngineBroken():
                return event.message
            case EngineReady() | SetupRefused():
                return f"the engine process sent {type(event).__name__} a second time"
            case _:
                assert_never(event)
        return None

    def _take_answer(self, answer: Answer) -> None:
        """An answer to a question that is not waited for any more has no effect but on `num_blocks`."""
        if isinstance(answer, PlanSwitched):
            self.num_blocks = answer.num_blocks
        if self._asked and self._asked[0] == answer.number and not self._asked[1].done():
            self._asked[1].set_result(answer)

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
