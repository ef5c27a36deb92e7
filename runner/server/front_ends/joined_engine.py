"""JoinedEngine: what a front end on another host has instead of an engine: a connection to the owner of the replicas.

The owner says several times a second how the replicas are, admits requests, and sends their tokens. When it is gone,
requests end with an error and the front end ends.
Not here: what the owner does (`owner.py`), and HTTP (`process.py`).
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import assert_never

from msgspec import Struct
from msgspec.structs import replace

from exeplan.runner.engine_process.job import EngineError, Job, job_of
from exeplan.runner.ipc.frames import MessageError, frame
from exeplan.runner.ipc.front_end_messages import (
    OWNER_MESSAGES,
    AskOwner,
    FrontEndListens,
    FrontEndSetup,
    FrontEndState,
    JobEnded,
    JobEvents,
    LeaveJob,
    OwnerAnswer,
    OwnerMessage,
    PlanRuns,
    ReadFilesAgain,
    ServiceState,
    SubmitJob,
)
from exeplan.runner.ipc.messages import Event, Loading, Prompt, Stats
from exeplan.runner.server.openai.errors import RequestError

_GONE = "the host of the replicas is gone"
_UNKNOWN = ServiceState(
    failure=None,
    pause=None,
    long_pause=None,
    unready="not ready: the host of the replicas has said nothing yet",
    stall=None,
    loading=None,
    draining=False,
    num_waiting=0,
    serving=None,
    num_blocks=0,
    request_tokens=0,
    stats=Stats(),
)


class JoinedEngine:
    """The members of `EngineClient` that a front end uses, on the replicas of another host."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Nothing is read before `start`."""
        self._reader, self._writer = reader, writer
        self._numbers, self._jobs = itertools.count(1), dict[str, Job]()
        self._asked: dict[int, asyncio.Future[OwnerAnswer]] = {}
        self._known, self._ready, self._lost = _UNKNOWN, asyncio.Event(), False
        self.ended = asyncio.Event()
        self.on_step: Callable[[list[Event], Stats], None] = lambda events, stats: None
        self.on_plan: Callable[[PlanRuns], None] = lambda message: None
        self.on_files: Callable[[], None] = lambda: None
        self.on_drain: Callable[[], None] = lambda: None
        self.state: Callable[[], FrontEndState] = lambda: FrontEndState(draining=False, num_pending=0, num_refused=0)
        """What the owner is told."""
        self._reading: asyncio.Task[None] | None = None

    def start(self, url: str) -> None:
        """Says that requests are answered at this URL, and reads from now on."""
        self._send(FrontEndListens(url=url))
        self._reading = asyncio.create_task(self._read())

    async def until_ready(self) -> None:
        """Returns when the replicas are ready. Raises EngineError where the owner is gone before."""
        await self._ready.wait()
        if self.failure:
            raise EngineError(self.failure)

    @property
    def failure(self) -> str | None:
        return self._known.failure or (_GONE if self._lost else None)

    @property
    def pause(self) -> str | None:
        return self._known.pause

    @property
    def long_pause(self) -> str | None:
        return self._known.long_pause

    @property
    def unready(self) -> str | None:
        return self._known.unready

    @property
    def stall(self) -> str | None:
        return self._known.stall

    @property
    def loading(self) -> Loading | None:
        return self._known.loading

    @property
    def stats(self) -> Stats:
        """Of all replicas."""
        return self._known.stats

    @property
    def num_blocks(self) -> int:
        return self._known.num_blocks

    @property
    def request_tokens(self) -> int:
        """Tokens of the longest request, with its output."""
        return self._known.request_tokens

    @property
    def guarded(self) -> bool:
        """Whether the owner is listened to."""
        return bool(self._reading) and not self.failure

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    @property
    def num_waiting(self) -> int:
        """Sequences of all front ends, as the owner said last; of this one as it is now."""
        return max(self._known.num_waiting, sum(len(job.waiting) for job in self._jobs.values()))

    @property
    def serving(self) -> Sequence[int] | None:
        """Numbers of the replicas that serve; None where the owner has one engine."""
        return self._known.serving

    def reserve(self, count: int) -> Job:
        """A job of `count` sequences, of which the owner learns when it is submitted."""
        job_id = str(next(self._numbers))
        request_ids = tuple(f"{job_id}-{index}" for index in range(count))
        self._jobs[job_id] = job = Job(job_id, request_ids, set(request_ids), set(request_ids))
        return job

    def submit(self, job: Job, prompts: Sequence[Prompt], *, stream: bool = True) -> None:
        """Asks the owner to admit it; a refusal is its first event."""
        if self.failure:
            raise EngineError(self.failure)
        if job.job_id not in self._jobs:  # It has been released meanwhile.
            return
        submission = job.submit(prompts, stream=stream)
        self._send(SubmitJob(job=job.job_id, client=job.client, prompts=submission.prompts, stream=stream))

    def release(self, job: Job) -> None:
        """Ends a job; the owner drops what has not finished of it."""
        if self._jobs.pop(job.job_id, None) is not None and job.open:
            self._send(LeaveJob(job=job.job_id))

    async def ask(self, method: str, path: str, body: bytes, client: str) -> OwnerAnswer:
        """The owner's response to an HTTP request. Raises EngineError where the owner is gone."""
        if self.failure:
            raise EngineError(self.failure)
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._send(AskOwner(number=number, method=method, path=path, body=body, client=client))
        try:
            return await answer
        finally:
            del self._asked[number]

    def fail_all(self, error: Exception) -> None:
        """Ends every job with this error."""
        for job in self._jobs.values():
            job.fail(error)
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(error)

    async def close(self) -> None:
        if self._reading:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        self._writer.close()

    def _send(self, message: Struct) -> None:
        """What cannot be sent any more is dropped: the end of the connection is seen by `_read`."""
        self._writer.write(frame(message))

    async def _read(self) -> None:
        try:
            while True:
                self._take(await OWNER_MESSAGES.read_from(self._reader))
        except (MessageError, asyncio.IncompleteReadError, OSError):
            self._lost = True
        finally:
            self.fail_all(EngineError(self.failure or _GONE))
            self._ready.set()
            self.ended.set()

    def _take(self, message: OwnerMessage) -> None:
        match message:
            case ServiceState():
                self._take_state(message)
            case JobEvents():
                # Some may have been on their way when the job was released.
                self.on_step([event for event in message.events if self._deliver(event)], self.stats)
            case JobEnded():
                if job := self._jobs.get(message.job):
                    job.open.clear()
                    job.fail(_as_error(message))
            case OwnerAnswer():
                if (answer := self._asked.get(message.number)) and not answer.done():
                    answer.set_result(message)
            case PlanRuns():
                self.on_plan(message)
            case ReadFilesAgain():
                self.on_files()
            case FrontEndSetup():
                raise MessageError("FrontEndSetup is the first message, and comes once")
            case _:
                assert_never(message)

    def _take_state(self, state: ServiceState) -> None:
        # What an iteration brought is told to the owner's metrics alone.
        self._known = replace(state, stats=state.stats.after())
        if state.draining:
            self.on_drain()
        if not state.unready:
            self._ready.set()
        self._send(self.state())

    def _deliver(self, event: Event) -> bool:
        """Whether there still is a job that the event belongs to."""
        job = self._jobs.get(job_of(event.request_id))
        if job is None or job.submission is None:
            return False
        job.take(event)
        if job.is_unread:
            job.fail(EngineError("the answer was not read as fast as it was generated, and is given up", status=408))
            self.release(job)
        return True


def _as_error(ended: JobEnded) -> RequestError:
    return RequestError(
        ended.message, status=ended.status, param=ended.param, code=ended.code, retry_after=ended.retry_after
    )
