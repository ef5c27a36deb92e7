"""EngineClient: the front end's side of the engine process; asyncio, and no torch.

The engine runs in a process of its own, so that neither HTTP nor JSON ever delays an iteration. Events are read as fast
as they come and wait in the job that they belong to, so a slow HTTP client delays only its own tokens.

An engine that has loaded its model and then ends, is stopped, or makes no progress in time is killed and replaced. The
next one gets all jobs again with the tokens that they have, so that none is lost or repeated; what waits goes on
waiting, and what comes meanwhile waits as well unless loading takes long. A request that was running at `MAX_CRASHES`
such ends is given up, as `Engine.restart` does after crashes of workers; so is one that the engine was just adding, and
then only that one. Engines that end one after another before they ran a batch are a failure.

An engine that has lost devices says which are left; `fall_back` has another one go on with a plan for those. It gets
the jobs in the same way, without a crash being counted.

Not here: the sequences of one request (`job.py`), the process and its connection (`link.py`), and what forks it
(`exeplan.runner.ipc.fork_server`).
"""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, assert_never

from msgspec.structs import replace

from exeplan.errors import InputError
from exeplan.runner.engine_process.job import EngineError, Job, job_of
from exeplan.runner.engine_process.link import EngineLink, engine_forks
from exeplan.runner.ipc.child_process import STOPPED_SECONDS, WATCH_SECONDS
from exeplan.runner.ipc.fork_server import ForkServer
from exeplan.runner.ipc.frames import MessageError
from exeplan.runner.ipc.messages import (
    Abort,
    Alive,
    Begun,
    DevicesBack,
    DevicesLeft,
    EngineBroken,
    EngineCommand,
    EngineDown,
    EngineEvent,
    EngineReady,
    EngineSetup,
    EngineUp,
    Event,
    GetLengthStats,
    IterationDone,
    JobAdding,
    JobRefused,
    LengthStatsReport,
    Loading,
    PlanRefused,
    PlanSwitched,
    Prompt,
    SetupRefused,
    Stats,
    SwitchPlan,
)

Answer: TypeAlias = LengthStatsReport | PlanSwitched | PlanRefused
log = logging.getLogger(__name__)

STOP_SECONDS = 5.0
"""How long the engine process may take to end before it is killed."""
LOAD_SECONDS = 600.0
"""How long an engine that loads, restarts its workers or switches to another plan may report nothing."""
MAX_FAILED_STARTS = 3
"""Engines in a row that ended early and without having run a batch; after that no other is started."""
LONG_LIFE_SECONDS = 10.0
SHORT_LOAD_SECONDS = 3.0
"""New requests wait for an engine that is restarted if it last loaded within that time; else they are refused."""


@dataclass(frozen=True, slots=True)
class _End:
    """Why an engine cannot go on."""

    reason: str
    final: bool = False
    """Whether another one would not fare better."""
    left: DevicesLeft | None = None
    """On which devices it would."""


@dataclass(eq=False, slots=True)
class _Question:
    """A question to the engine, which the next one gets as well where the first ends before it answers."""

    message: GetLengthStats | SwitchPlan
    answer: asyncio.Future[Answer]
    repeated: bool = False

    def refuse(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)

    def refuse_twice_ended(self) -> None:
        """A plan may be the cause; lengths may be asked for again."""
        kind = InputError if isinstance(self.message, SwitchPlan) else EngineError
        self.refuse(kind("the engine ended twice before it had done this"))


class EngineClient:
    """Starts, feeds, watches and ends the engine process. `failure` is why it can no longer be used; None while it can.

    What runs during `pause` is another engine that loads, or an engine whose workers are restarted.
    """

    def __init__(
        self,
        setup: EngineSetup,
        *,
        numbers: Iterator[int] | None = None,
        forks: ForkServer | None = None,
    ) -> None:
        """Nothing is started before `until_ready`.

        `numbers` count jobs and `forks` forks processes, where they are given together with those of other clients.
        """
        self.failure: str | None = None
        self.ended = asyncio.Event()
        """Set when there is a failure."""
        self._pause: str | None = None
        self.paused_since = 0.0
        """When the latest pause began, by `time.monotonic`."""
        self.loading: Loading | None = Loading("starting the engine")
        """What is loaded before anything can run; None once it is, until something is restarted."""
        self.stats = Stats()
        self.num_blocks = 0
        self.request_tokens = 0
        """Tokens of the longest request, with its output; 0 before the engine is ready."""
        self.num_waiting = 0
        """Sequences whose prefill has not begun, those included that are still being tokenized."""
        self.num_restarts = 0
        """How many engines have been replaced."""
        self.on_step: Callable[[list[Event], Stats], None] = lambda events, stats: None
        self.on_failure: Callable[[], None] = lambda: None
        """Called when there is a failure, before the jobs end with it: other clients may go on with them."""
        self.on_devices: Callable[[], None] = lambda: None
        """Called when `left` or `back` has changed."""
        self.find_setup: Callable[[DevicesLeft], Awaitable[EngineSetup | None]] | None = None
        """Asked, where devices of this host are lost for good, for the setup of a plan on the others."""
        self.left: DevicesLeft | None = None
        """The devices that are left to a pipeline that waits for those that it has lost; None where it has all."""
        self.back = False
        """Whether the devices that a pipeline on fewer of them had before are there again."""
        self._setup, self._numbers = setup, numbers or itertools.count(1)
        self._forks, self._own_forks = forks or engine_forks(), forks is None
        self._link: EngineLink | None = None
        self._jobs: dict[str, Job] = {}
        self._adding: Job | None = None
        """What the engine was adding at its latest event."""
        self._up = False
        """Whether the engine takes commands."""
        self._supervising: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._failed_starts = 0
        self._began = self._progress = time.monotonic()
        """When the engine was ready, and when it last had run an iteration."""
        self._load_seconds = math.inf
        """How long the engine took to load once it was forked; infinite before it has."""
        self._asked: _Question | None = None
        """The question that waits for its answer; there is one at a time."""
        self._asking = asyncio.Lock()
        self._switches: dict[int, EngineSetup] = {}
        """By number: what the engine was asked to switch to, and has not answered."""

    @classmethod
    async def start(cls, setup: EngineSetup) -> "EngineClient":
        """A client that is ready."""
        client = cls(setup)
        try:
            await client.until_ready()
        except BaseException:
            await client.close()
            raise
        return client

    async def until_ready(self) -> None:
        """Starts the engine, and returns when it is warm; `loading` is how far it is. From then on it is watched.

        Raises InputError when the model cannot be loaded, EngineError when the process failed.
        """
        await self._load()
        self._resume()  # It may have got jobs of another client.
        self._supervising = asyncio.create_task(self._supervise())
        self._watching = asyncio.create_task(self._watch())

    async def _load(self) -> None:
        """Another engine process, until it takes commands; none is left of one that does not come as far."""
        try:
            link = self._link = await EngineLink.open(self._forks)
        except OSError as error:
            raise EngineError(str(error)) from None
        started = time.monotonic()
        link.send(self._setup if self._supervising is None else _again(self._setup))
        event = await self._until_loaded(link)
        if not isinstance(event, EngineReady):
            await link.end()
            raise (InputError if isinstance(event, SetupRefused) else EngineError)(event.message)
        self.num_blocks, self.request_tokens = event.num_blocks, event.request_tokens
        self.loading, self._up = None, True
        self._note_devices()
        self.stats = Stats(num_blocks=self.num_blocks, free_blocks=self.num_blocks)
        self._began = self._progress = time.monotonic()
        self._load_seconds = self._began - started

    async def _until_loaded(self, link: EngineLink) -> EngineReady | SetupRefused | EngineBroken:
        """How loading ended. Raises EngineError where the process ended before that, or sent something else."""
        try:
            while isinstance(event := await link.read(), Loading | DevicesLeft):
                if isinstance(event, Loading):
                    self.loading = event
                else:
                    self._note_devices(left=event)
        except MessageError as error:
            await link.end(patience=0.0)
            raise EngineError(str(error)) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise EngineError((await link.end())[1]) from None
        if isinstance(event, EngineReady | SetupRefused | EngineBroken):
            return event
        await link.end(patience=0.0)
        raise EngineError(f"the engine process sent {type(event).__name__} before it was ready")

    @property
    def pause(self) -> str | None:
        """Why nothing runs while the engine or its workers are restarted; None otherwise."""
        return self._pause

    @pause.setter
    def pause(self, reason: str | None) -> None:
        if reason and not self._pause:
            self.paused_since = time.monotonic()
        self._pause = reason

    @property
    def pid(self) -> int | None:
        """Of the engine process; None before there is one."""
        return self._link.pid if self._link else None

    @property
    def unready(self) -> str | None:
        """What it does before it takes commands for the first time; None from then on."""
        return f"not ready: {self.loading}" if self._supervising is None else None

    @property
    def long_pause(self) -> str | None:
        """`pause` where what is restarted is expected to take long; None where a new request may wait for it."""
        return self.pause if self._load_seconds > SHORT_LOAD_SECONDS else None

    @property
    def guarded(self) -> bool:
        """Whether there is an engine, or one is being started, and each of them is watched."""
        tasks = (self._supervising, self._watching)
        return not self.failure and not any(task and task.done() for task in tasks)

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    @property
    def num_sequences(self) -> int:
        """Sequences that have not finished."""
        return sum(len(job.open) for job in self._jobs.values())

    @property
    def stall(self) -> str | None:
        """How long there has been work and no iteration, where that is longer than an iteration may take; else None."""
        silent = time.monotonic() - self._progress
        late = silent > self._setup.deadline_seconds and self._has_work
        return f"no iteration for {silent:.0f} s" if late else None

    @property
    def _has_work(self) -> bool:
        """Whether a sequence has not finished; jobs whose answers are still being read are none for the engine."""
        return any(job.open for job in self._jobs.values())

    def reserve(self, count: int) -> Job:
        """A job of `count` sequences, which has its places in the queue from now on."""
        if not self._has_work:
            self._progress = time.monotonic()
        job_id = str(next(self._numbers))
        request_ids = tuple(f"{job_id}-{index}" for index in range(count))
        self.num_waiting += count
        self._jobs[job_id] = Job(job_id, request_ids, set(request_ids), set(request_ids))
        return self._jobs[job_id]

    def submit(self, job: Job, prompts: Sequence[Prompt], *, stream: bool = True) -> None:
        """Sends the job's prompts to the engine; their sequences are in the order of `request_ids`.

        Streamed, each has an event a token; otherwise one for its first token and then one for many. A job that has
        been released meanwhile, with an error among its events, is not sent: nothing would end it in the engine.
        """
        if self.failure:
            raise EngineError(self.failure)
        if job.job_id not in self._jobs:
            return
        self._send(job.submit(prompts, stream=stream))

    def release(self, job: Job) -> None:
        """Ends a job. Its unfinished sequences are dropped, and their blocks are free at the next iteration."""
        if self._jobs.pop(job.job_id, None) is None:
            return
        self.num_waiting -= len(job.waiting)
        if job.open:
            self._send(Abort(request_ids=sorted(job.open)))

    @property
    def jobs(self) -> tuple[Job, ...]:
        return tuple(self._jobs.values())

    def hand_over(self, job: Job, other: "EngineClient", *, crashed: bool = True) -> None:
        """Another client goes on with a job of this one, which has failed or is paused, or drains."""
        if crashed:
            job.count_crash()
        else:
            job.leave()
        lost = [event for event in job.lost(time.perf_counter()) if self._deliver(event)]
        self.on_step(lost, self.stats.after())
        self.release(job)
        other._take_over(job)

    def _take_over(self, job: Job) -> None:
        if not self._has_work:
            self._progress = time.monotonic()
        self._jobs[job.job_id] = job
        self.num_waiting += len(job.waiting)
        if submission := job.resubmit():
            self._send(submission)

    def _send(self, command: EngineCommand) -> None:
        """An engine that comes later learns of it in another way: `_resume`."""
        if self._up and self._link:
            self._link.send(command)

    async def length_stats(self) -> LengthStatsReport:
        """Lengths of requests. Raises EngineError when the engine is gone."""
        answer = await self._ask(GetLengthStats(number=next(self._numbers)))
        assert isinstance(answer, LengthStatsReport)
        return answer

    async def switch_plan(self, setup: EngineSetup) -> PlanSwitched:
        """Switches to the plan of a setup.

        Raises InputError where that is not possible, and nothing has changed; EngineError when the engine is gone.
        """
        if self.left:
            raise InputError("the pipeline waits for devices that it has lost; accept the plan for those that are left")
        answer = await self._ask(SwitchPlan(number=next(self._numbers), setup=setup))
        if isinstance(answer, PlanRefused):
            raise InputError(answer.message)
        assert isinstance(answer, PlanSwitched)
        return answer

    async def _ask(self, message: GetLengthStats | SwitchPlan) -> Answer:
        async with self._asking:
            if reason := self.failure or self.unready:
                raise EngineError(reason)
            self._asked = _Question(message, asyncio.get_running_loop().create_future())
            if isinstance(message, SwitchPlan):
                self._switches[message.number] = message.setup
            self._send(message)
            try:
                return await self._asked.answer
            finally:
                self._asked = None

    def fall_back(self, setup: EngineSetup, *, reason: str) -> None:
        """Another engine goes on, with the setup of a plan for the devices that are left to this one, which waits."""
        assert self._link
        self._setup, self._failed_starts = setup, 0
        self._switches.clear()
        self._note_devices()
        self._link.kill(reason)

    def refuse_switch(self) -> None:
        """A change of plans that has not been answered ends with InputError: the engine waits for devices, and is to be
        replaced."""
        if self._asked and isinstance(self._asked.message, SwitchPlan):
            self._asked.refuse(InputError("devices were lost while the plan was changed"))

    def _note_devices(self, *, left: DevicesLeft | None = None, back: bool = False) -> None:
        if (left, back) != (self.left, self.back):
            self.left, self.back = left, back
            self.on_devices()

    def fail_all(self, error: Exception) -> None:
        """Ends every job with this error."""
        for job in self._jobs.values():
            job.fail(error)
        if self._asked:
            self._asked.refuse(error)

    async def close(self) -> int | None:
        """Ends the engine process; returns its exit status."""
        self.failure, self._up = self.failure or "the engine was closed", False
        tasks = [task for task in (self._supervising, self._watching) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        status = (await self._link.end(patience=STOP_SECONDS))[0] if self._link else None
        if self._own_forks:
            await asyncio.to_thread(self._forks.close)
        self.fail_all(EngineError(self.failure))
        self.ended.set()
        return status

    async def _supervise(self) -> None:
        """Reads what the engine sends, and starts another one when it has ended, until that is of no use."""
        failure: str | None = None
        try:
            while failure is None:
                end = await self._read_on()
                self._up = False
                failure = await self._replace(end)
        except Exception:
            log.exception("the engine could not be replaced")
            failure = "the engine could not be replaced; the server's log says more"
            if self._link:  # It may run on, with a device that is of no use to anything then.
                await self._link.end(patience=0.0)
        self.failure, self.loading, self.stats = failure, None, Stats()
        self.on_failure()
        self.fail_all(EngineError(failure))
        self.ended.set()

    async def _watch(self) -> None:
        """Sees to it that an engine that makes no progress ends."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if self._link:
                self._link.watch(WATCH_SECONDS, patience=self._patience, stopped=STOPPED_SECONDS)

    @property
    def _patience(self) -> float:
        """Seconds without an event after which the engine counts as hanging."""
        if self.loading or self.pause or self._switches:
            return LOAD_SECONDS
        num_devices = sum(stage.tensor_parallel_size for stage in self._setup.placement)
        # An engine with workers notices by itself that one of them hangs, after the deadline.
        alone = num_devices == 1 and not self._setup.ray
        return self._setup.deadline_seconds * (1 if alone else 2) + WATCH_SECONDS

    async def _read_on(self) -> _End:
        assert self._link
        try:
            while True:
                if end := self._take(await self._link.read()):
                    break
            await self._link.end()
        except MessageError as error:
            end = _End(f"the engine process sent something else than an event: {error}")
            await self._link.end(patience=0.0)
        except (asyncio.IncompleteReadError, ConnectionError):
            end = _End((await self._link.end())[1])
        return end

    async def _replace(self, end: _End) -> str | None:
        """Another engine takes over. Returns why none can."""
        self._count_crash()
        self._note_devices()
        if end.final and not (end.left and await self._has_setup_for(end.left, end.reason)):
            return end.reason
        if time.monotonic() - self._began > LONG_LIFE_SECONDS:
            self._failed_starts = 0
        reason = end.reason
        while self._failed_starts < MAX_FAILED_STARTS:
            self._failed_starts += 1
            self.num_restarts += 1
            log.error("%s; starting another one", reason)
            self.pause, self.loading = f"the engine is being restarted ({reason})", Loading("starting the engine")
            try:
                await self._load()
            except InputError as error:
                return str(error)
            except EngineError as error:
                reason = str(error)
                continue
            self._resume()
            return None
        return f"{self._failed_starts} engines in a row ended before they ran a batch; the last: {reason}"

    async def _has_setup_for(self, left: DevicesLeft, reason: str) -> bool:
        """Whether there is a plan for these devices, with which the next engine is to run."""
        self.pause, self.loading = f"a plan for the devices left is being made ({reason})", None
        setup = await self.find_setup(left) if self.find_setup else None
        self._setup = setup or self._setup
        return setup is not None

    def _count_crash(self) -> None:
        """What may be the cause was there at one crash more; at the last that is allowed it is given up."""
        lost: list[Event] = []
        adding, self._adding = self._adding, None
        for job in self._jobs.values():
            job.count_crash(adding=adding)
            lost += job.lost(time.perf_counter())
        self.on_step([event for event in lost if self._deliver(event)], self.stats.after())

    def _resume(self) -> None:
        """The engine gets everything that it must know to go on where the one before has ended."""
        self.pause = None
        again = self._asked if self._asked and not self._asked.repeated else None
        # What was asked for and is not waited for any more is not asked again, and never answered.
        self._switches = {n: setup for n, setup in self._switches.items() if again and n == again.message.number}
        if again:
            again.repeated = True
            self._send(again.message)
        elif self._asked:
            self._asked.refuse_twice_ended()
        for job in self._jobs.values():
            if submission := job.resubmit():
                self._send(submission)

    def _take(self, event: EngineEvent) -> _End | None:
        """Passes an event on. Returns why the engine process ends, if it does."""
        if self._adding and not isinstance(event, EngineBroken):
            self._adding = None
        match event:
            case IterationDone():
                self.stats, self._progress = event.stats, time.monotonic()
                if event.stats.iteration_tokens:
                    self._failed_starts = 0
                # An event may have been on its way when its job was released.
                self.on_step([one for one in event.events if self._deliver(one)], self.stats)
            case Begun():
                for request_id in event.request_ids:
                    if job := self._jobs.get(job_of(request_id)):
                        job.note_begun(request_id, event.start)
            case Alive():
                pass
            case JobAdding():
                self._adding = self._jobs.get(event.job)
            case JobRefused():
                if job := self._jobs.get(event.job):
                    job.refuse(event.message, internal=event.internal)
            case LengthStatsReport() | PlanSwitched() | PlanRefused():
                self._take_answer(event)
            case Loading():
                self.loading = event
            case EngineDown():
                self.pause, self.loading = event.message, None
                for job in self._jobs.values():  # Which of them are lost the engine says.
                    job.count_crash()
            case EngineUp():
                self.pause = self.loading = None
                self._note_devices(back=self.back)
            case DevicesLeft():
                self._note_devices(left=event)
            case DevicesBack():
                self._note_devices(back=event.there)
            case EngineBroken():
                return _End(event.message, final=event.final, left=event.left)
            case SetupRefused():  # Where it started its workers again.
                return _End(event.message)
            case EngineReady():
                return _End("the engine process sent EngineReady a second time")
            case _:
                assert_never(event)
        return None

    def _take_answer(self, answer: Answer) -> None:
        """An answer to a question that is not waited for any more has no effect but that of a switch."""
        setup = self._switches.pop(answer.number, None)
        if isinstance(answer, PlanSwitched) and setup:
            self.num_blocks, self.request_tokens, self._setup = answer.num_blocks, answer.request_tokens, setup
            self._note_devices()
        asked = self._asked
        if asked and asked.message.number == answer.number and not asked.answer.done():
            asked.answer.set_result(answer)

    def _deliver(self, event: Event) -> bool:
        """Whether there still is a job that the event belongs to."""
        job = self._jobs.get(job_of(event.request_id))
        if job is None or job.submission is None:
            return False
        self.num_waiting -= event.request_id in job.waiting
        job.take(event)
        if job.is_unread:
            job.fail(EngineError("the answer was not read as fast as it was generated, and is given up", status=408))
            self.release(job)
        return True


def _again(setup: EngineSetup) -> EngineSetup:
    """The setup for an engine that replaces another: nodes may have been lost with it, and come back."""
    return replace(setup, ray=replace(setup.ray, started=True)) if setup.ray else setup
