"""ReplicaSet: the engine processes of a plan with several replicas, used like the client of one.

A request goes to one replica, with all its sequences, by the plan's router; a replica that restarts its workers or has
failed gets none while another is up. What a replica had when it failed goes on on the others, with its tokens so far.
So does what one had that has been paused for `MOVE_SECONDS` and may be for long: because it loads that long, or is on
other hosts and has to find room for its workers.
The set has failed when all replicas have, and none is starting: one that starts goes on with what the last had.
A replica that has lost devices may go on with a plan for those that are left, and back to its own (`fall_back`,
`switch_replica`).
Replicas may start and stop while it runs: one that stops drains first, and is used again if it is wanted before. One
that an operator has drained stays away until it is resumed.

Not here: one engine process (`client.py`), the router's law (`exeplan/scheduling/router.py`), and where workers are.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace as with_fields

from exeplan.errors import InputError
from exeplan.runner.engine_process.client import EngineClient
from exeplan.runner.engine_process.job import EngineError, Job
from exeplan.runner.engine_process.link import engine_forks
from exeplan.runner.ipc.child_process import WATCH_SECONDS
from exeplan.runner.ipc.messages import (
    DevicesLeft,
    EngineSetup,
    Event,
    LengthStatsReport,
    Loading,
    PlanSwitched,
    Prompt,
    RaySetup,
    Stats,
)
from exeplan.scheduling.router import Queues, Router
from exeplan.scheduling.scaling import to_drain

log = logging.getLogger(__name__)
MOVE_SECONDS = 0.5
"""A pause of a replica, where it may be a long one, after which its requests go on elsewhere. Most workers that only
crashed are back by then."""
AGAIN_SECONDS = 30.0
"""After a replica could not be started until its number is tried again."""
_DRAINED_SECONDS = 0.05
"""Between two looks whether a replica that drains has answered all."""

OnStep = Callable[[list[Event], Stats], None]


@dataclass(frozen=True, slots=True)
class _Replica:
    """An engine process and the setup that it runs."""

    client: EngineClient
    setup: EngineSetup
    number: int


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """What an operator sees of a replica."""

    number: int
    state: str
    """serving, paused, draining, drained, starting, failed, or stopped, of which scaling has no need."""
    num_requests: int
    """Sequences that it has."""
    reason: str | None
    """Why it is paused or has failed."""


class ReplicaSet:
    """Starts, feeds and ends the engine processes of several replicas (see `EngineClient`, whose members these are)."""

    def __init__(self, setups: Sequence[EngineSetup], router: str, *, num_first: int | None = None) -> None:
        """One replica for each setup, on its own devices, or for the first ones, until `scale_to` wants others; made
        within the running event loop. Nothing is started before `until_ready`."""
        self._numbers, self._forks = itertools.count(1), engine_forks()
        self._setups = list(setups)
        self._capacities = [setup.capacity for setup in setups]
        self._starting: dict[int, asyncio.Task[None]] = {}
        self._coming: dict[int, _Replica] = {}
        """What these tasks start."""
        self._draining: dict[int, asyncio.Task[None]] = {}
        self._failed_at: dict[int, float] = {}
        self._refusals: dict[int, str] = {}
        """Why replicas could not be started, until they are."""
        self._held: set[int] = set()
        """Replicas that an operator has drained."""
        self.on_devices: Callable[[int], None] = lambda number: None
        """As `EngineClient.on_devices`, with the number of the replica."""
        self.find_setup: Callable[[int, DevicesLeft], Awaitable[EngineSetup | None]] | None = None
        """As `EngineClient.find_setup`, with the number of the replica."""
        self.start_seconds = 0.0
        """What the latest replica that has started took for it."""
        self.num_reserved = 0
        """Sequences that have come since the beginning."""
        first = range(len(setups) if num_first is None else num_first)
        self._replicas = [self._replica(number) for number in first]
        self._router = Router(router)
        self._jobs: dict[str, EngineClient] = {}
        self._given_on_step: OnStep = lambda events, stats: None
        self._on_step: OnStep = self._given_on_step
        self.failure: str | None = None
        self.ended = asyncio.Event()
        self._watching = [asyncio.create_task(self._watch(replica)) for replica in self._replicas]
        self._watching.append(asyncio.create_task(self._relieve()))

    async def until_ready(self) -> None:
        """Starts an engine for each replica; they load at the same time. Raises what the first that fails raises."""
        began = time.monotonic()
        await asyncio.gather(*(client.until_ready() for client in self._clients))
        self.start_seconds = time.monotonic() - began

    def _replica(self, number: int) -> _Replica:
        client = EngineClient(self._setups[number], numbers=self._numbers, forks=self._forks)
        client.on_failure = partial(self._move, client)
        client.on_devices = lambda: self.on_devices(number)
        client.find_setup = partial(self._find_setup, number)
        return _Replica(client, self._setups[number], number)

    async def _find_setup(self, number: int, left: DevicesLeft) -> EngineSetup | None:
        setup = await self.find_setup(number, left) if self.find_setup else None
        if setup:
            self._take_setup(number, setup)
        return setup

    def client(self, number: int) -> EngineClient | None:
        """Of a replica that runs."""
        return next((one.client for one in self._replicas if one.number == number), None)

    def fall_back(self, number: int, setup: EngineSetup, *, reason: str) -> None:
        """See `EngineClient.fall_back`."""
        client = self.client(number)
        assert client
        self._take_setup(number, setup)
        client.fall_back(self._setups[number], reason=reason)

    async def switch_replica(self, number: int, setup: EngineSetup) -> PlanSwitched:
        """Switches one replica to a setup. Raises InputError where it cannot, EngineError when it is gone."""
        client = self.client(number)
        if client is None:
            raise EngineError(f"replica {number} does not run")
        switched = await client.switch_plan(with_fields(setup, timeline=self._setups[number].timeline))
        self._take_setup(number, setup)
        return switched

    def _take_setup(self, number: int, setup: EngineSetup) -> None:
        """What the replica runs from now on, also where it is started anew; the timeline stays its own."""
        setup = self._setups[number] = with_fields(setup, timeline=self._setups[number].timeline)
        self._replicas = [
            _Replica(one.client, setup, number) if one.number == number else one for one in self._replicas
        ]

    def set_capacities(self, capacities: Sequence[float | None]) -> None:
        """What each replica of the plan serves a second, for the router; the first one's is that of any others."""
        self._capacities = [capacities[n if n < len(capacities) else 0] for n in range(len(self._setups))]

    @property
    def serving(self) -> list[int]:
        """Replicas that get requests, or will when they have recovered."""
        return [one.number for one in self._replicas if not one.client.failure and one.number not in self._draining]

    @property
    def num_serving(self) -> int:
        return len(self.serving)

    @property
    def num_starting(self) -> int:
        return len(self._starting)

    @property
    def num_draining(self) -> int:
        return len(self._draining)

    def scale_to(self, wanted: int) -> None:
        """Starts what lacks, those that drain first, or drains what is too much; at least one stays.

        What fails to start is tried again after `AGAIN_SECONDS`.
        """
        own = sorted(one.number for one in self._replicas if one.number in set(self._draining) - self._held)
        for number in own[: max(wanted - self.num_serving - self.num_starting, 0)]:
            self._stop_draining(number)
        alive = {one.number for one in self._replicas if not one.client.failure}
        alive |= {*self._starting, *self._draining, *self._held}
        latest = time.monotonic() - AGAIN_SECONDS
        free = [n for n in range(len(self._setups)) if n not in alive and self._failed_at.get(n, latest) <= latest]
        for number in free[: max(wanted - self.num_serving - self.num_starting, 0)]:
            self._begin(number)
        staying = {
            one.number: one.client.num_sequences
            for one in self._replicas
            if not one.client.failure and one.number not in self._draining
        }
        for _ in range(min(len(staying) - wanted, len(staying) - 1)):  # What loads serves nothing yet.
            del staying[number := to_drain(staying)]
            self._end(number)

    def drain(self, number: int, *, move: bool = False) -> None:
        """Gives a replica no more requests, and ends it once it has answered what it has; until `resume`.

        With `move` others go on with what it has, from the tokens so far. Raises InputError for a replica that there is
        not, or without which none would serve.
        """
        self._check_number(number)
        others = [one for one in self._up if one.number != number]
        if number not in self._held and not others:
            raise InputError(f"replica {number} is the only one that serves; resume another one first")
        self._held.add(number)
        if number not in self._draining and self.client(number):  # One that starts drains then.
            self._end(number)
        if move and (client := self.client(number)) and others:
            self._move(client, crashed=False)
            # It may not have them back: what its engine still sends of them has been computed elsewhere, too.
            self._replicas = [one for one in self._replicas if one.number != number]

    def resume(self, number: int) -> None:
        """Has a replica that was drained, or has failed, serve again. Raises InputError for one that serves."""
        self._check_number(number)
        client = self.client(number)
        if number not in self._held and (number in self._starting or (client and not client.failure)):
            raise InputError(f"replica {number} serves, or will by itself")
        self._held.discard(number)
        if number in self._draining and client:
            self._stop_draining(number)
        elif number not in self._starting:
            self._begin(number)

    def _check_number(self, number: int) -> None:
        if not 0 <= number < len(self._setups):
            raise InputError(f"there are replicas 0 to {len(self._setups) - 1}, found {number}")

    def states(self) -> list[ReplicaState]:
        """Of all replicas that there may be, by number."""
        return [self._state(number) for number in range(len(self._setups))]

    def _state(self, number: int) -> ReplicaState:
        client, held = self.client(number), number in self._held
        if number in self._starting:
            return ReplicaState(number, "starting", num_requests=0, reason=None)
        if client is None and (held or number in self._draining):
            away = "draining" if number in self._draining else "drained"
            return ReplicaState(number, away, num_requests=0, reason=None)
        if failure := self._refusals.get(number) or (client and client.failure):
            return ReplicaState(number, "failed", num_requests=0, reason=failure)
        if client is None:
            return ReplicaState(number, "stopped", num_requests=0, reason=None)
        reason = client.pause or client.unready
        state = "draining" if number in self._draining else "paused" if reason else "serving"
        return ReplicaState(number, state, num_requests=client.num_sequences, reason=reason)

    def _begin(self, number: int) -> None:
        log.info("replica %d is started", number)
        self._starting[number] = asyncio.create_task(self._start(number))

    def _end(self, number: int) -> None:
        log.info("replica %d drains", number)
        replica = next(one for one in self._replicas if one.number == number)
        self._draining[number] = asyncio.create_task(self._drain(replica))

    def _stop_draining(self, number: int) -> None:
        self._held.discard(number)
        self._draining.pop(number).cancel()
        log.info("replica %d serves again", number)

    async def _start(self, number: int) -> None:
        if ending := self._draining.get(number):  # Its devices are not free before.
            await asyncio.wait([ending])
        replica = self._coming[number] = self._replica(number)
        began = time.monotonic()
        try:
            replica = await self._ready(replica)
        except (InputError, EngineError) as error:
            self._failed_at[number] = time.monotonic()
            self._refusals[number] = f"it could not be started: {error}"
            log.error("replica %d could not be started: %s", number, error)
            self._move(replica.client, crashed=False)
            replica.client.fail_all(EngineError(str(error)))
            await replica.client.close()
            return
        except asyncio.CancelledError:
            await replica.client.close()
            raise
        finally:
            del self._starting[number]
        self._refusals.pop(number, None)
        self.start_seconds = time.monotonic() - began
        log.info("replica %d serves after %.1f s", number, self.start_seconds)
        others = [one for one in self._replicas if one.number != number]
        self._replicas = sorted([*others, replica], key=lambda one: one.number)
        self.on_step = self._given_on_step  # Of the new one, too.
        self._watching.append(asyncio.create_task(self._watch(replica)))
        if number in self._held:
            self._end(number)

    async def _ready(self, replica: _Replica) -> _Replica:
        """Once its engine runs the plan that is active then."""
        try:
            await replica.client.until_ready()
            while replica.setup != (setup := self._setups[replica.number]):  # Another plan was adopted meanwhile.
                await replica.client.switch_plan(setup)
                replica = _Replica(replica.client, setup, replica.number)
            return replica
        finally:
            del self._coming[replica.number]

    async def _drain(self, replica: _Replica) -> None:
        while replica.client.num_jobs:
            await asyncio.sleep(_DRAINED_SECONDS)
        self._replicas = [one for one in self._replicas if one.client is not replica.client]
        await replica.client.close()
        del self._draining[replica.number]
        log.info("replica %d has ended", replica.number)

    @property
    def _clients(self) -> list[EngineClient]:
        return [replica.client for replica in self._replicas]

    @property
    def on_step(self) -> OnStep:
        return self._on_step

    @on_step.setter
    def on_step(self, on_step: OnStep) -> None:
        def all_together(events: list[Event], stats: Stats) -> None:
            on_step(events, self._summed(stats))

        self._given_on_step, self._on_step = on_step, on_step
        for client in self._clients:
            client.on_step = all_together

    @property
    def stats(self) -> Stats:
        """The sums over all replicas; of what an iteration brought, 0."""
        return self._summed(Stats())

    def _summed(self, ran: Stats) -> Stats:
        """With what the iteration of one brought: for every iteration, so the fields are written out."""
        every = [replica.client.stats for replica in self._replicas]
        return Stats(
            num_waiting=sum([stats.num_waiting for stats in every]),
            num_running=sum([stats.num_running for stats in every]),
            free_blocks=sum([stats.free_blocks for stats in every]),
            num_blocks=sum([stats.num_blocks for stats in every]),
            num_preemptions=ran.num_preemptions,
            iteration_tokens=ran.iteration_tokens,
            num_prefill=ran.num_prefill,
            num_decode=ran.num_decode,
            slowness=ran.slowness,
            reference_seconds=ran.reference_seconds,
        )

    @property
    def num_blocks(self) -> int:
        """KV blocks of the smallest replica."""
        return min(client.num_blocks for client in self._clients)

    def num_blocks_of(self, numbers: Collection[int]) -> int | None:
        """KV blocks of the smallest of these replicas; None where none of them runs."""
        running = (one.client.num_blocks for one in self._replicas if one.number in numbers)
        return min((blocks for blocks in running if blocks), default=None)

    @property
    def request_tokens(self) -> int:
        """Tokens of the longest request, with its output, that every replica takes."""
        return min(client.request_tokens for client in self._clients)

    @property
    def loading(self) -> Loading | None:
        return next((client.loading for client in self._clients if client.loading), None)

    @property
    def unready(self) -> str | None:
        return next((client.unready for client in self._clients if client.unready), None)

    @property
    def pause(self) -> str | None:
        """Why nothing runs: every replica that has not failed is paused."""
        return self._only_coming or self._common([client.pause for client in self._clients if not client.failure])

    @property
    def long_pause(self) -> str | None:
        """Why nothing will run for long: so it is in every replica that has not failed."""
        return self._only_coming or self._common([client.long_pause for client in self._clients if not client.failure])

    @property
    def _only_coming(self) -> str | None:
        """That all replicas have failed but one that starts; None otherwise."""
        failed = all(client.failure for client in self._clients)
        return "the replicas have failed, another one is being started" if failed and self._starting else None

    @staticmethod
    def _common(pauses: Sequence[str | None]) -> str | None:
        return pauses[0] if pauses and all(pauses) else None

    @property
    def stall(self) -> str | None:
        return next((client.stall for client in self._clients if not client.failure and client.stall), None)

    @property
    def guarded(self) -> bool:
        """Whether one that has not failed is watched, or starts, and each of them is."""
        clients = [client for client in self._clients if not client.failure]
        return bool(clients or self._starting) and all(client.guarded for client in clients)

    @property
    def num_jobs(self) -> int:
        return sum(one.client.num_jobs for one in (*self._replicas, *self._coming.values()))

    @property
    def num_waiting(self) -> int:
        return sum(one.client.num_waiting for one in (*self._replicas, *self._coming.values()))

    def reserve(self, count: int) -> Job:
        """A job of `count` sequences on the replica that the router chooses."""
        client = self._choose()
        self.num_reserved += count
        job = client.reserve(count)
        self._jobs[job.job_id] = client
        return job

    def submit(self, job: Job, prompts: Sequence[Prompt], *, stream: bool = True) -> None:
        if client := self._jobs.get(job.job_id):  # Otherwise it has been released.
            client.submit(job, prompts, stream=stream)

    def release(self, job: Job) -> None:
        if client := self._jobs.pop(job.job_id, None):
            client.release(job)

    @property
    def _up(self) -> list[_Replica]:
        """Those that work."""
        clients = ((one, one.client) for one in self._replicas if one.number not in self._draining)
        return [one for one, client in clients if not client.failure and not client.pause and not client.stall]

    def _choose(self) -> EngineClient:
        """By the router, among the replicas that work; where none does, those that may again, or start."""
        alive = [one for one in self._replicas if not one.client.failure]
        some = self._up or alive or list(self._coming.values()) or self._replicas
        queues = Queues((one.client.num_sequences for one in some), [self._capacities[one.number] for one in some])
        return some[self._router.choose(queues)].client

    def _move(self, failed: EngineClient, *, crashed: bool = True) -> None:
        """Others go on with the jobs of a replica that has failed or drains, as long as there are others."""
        if all(client.failure for client in self._clients) and not self._coming:
            return
        for job in failed.jobs:
            self._jobs[job.job_id] = other = self._choose()
            failed.hand_over(job, other, crashed=crashed)

    async def _relieve(self) -> None:
        """Moves the jobs of replicas that are paused for long, as long as others work."""
        paused: dict[EngineClient, float] = {}
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for replica in self._replicas:
                client = replica.client
                pause = client.pause if replica.setup.ray else client.long_pause
                paused[client] = paused.get(client, 0.0) + WATCH_SECONDS if pause else 0.0
                if paused[client] > MOVE_SECONDS and client.num_jobs and self._up:
                    log.warning("%d requests of a paused replica go on on others: %s", client.num_jobs, client.pause)
                    self._move(client)

    async def length_stats(self) -> LengthStatsReport:
        """Lengths of the requests of all replicas that work, also where another fails meanwhile.

        Raises EngineError when none works.
        """
        clients = [client for client in self._clients if not client.failure] or self._clients[:1]
        answers = await asyncio.gather(*(client.length_stats() for client in clients), return_exceptions=True)
        found = [one for one in answers if isinstance(one, LengthStatsReport)]
        for error in (one for one in answers if isinstance(one, BaseException)):
            if not found or not isinstance(error, EngineError):
                raise error
        return LengthStatsReport(
            number=found[0].number,
            now=max(report.now for report in found),
            left=tuple(one for report in found for one in report.left),
            running=tuple(one for report in found for one in report.running),
        )

    async def switch_plan(self, setups: Sequence[EngineSetup]) -> PlanSwitched:
        """Switches each replica to its setup, one after the other; all or none.

        Those that run theirs already are left alone, unless all do. What begins to serve meanwhile is switched, too.
        Raises InputError where a replica cannot, EngineError when one is gone.
        """
        switched: list[PlanSwitched] = []
        looked_at: set[EngineClient] = set()
        changed: list[_Replica] = []
        """As they were before."""
        if self.failure:
            raise EngineError(self.failure)
        given = [
            with_fields(setups[number if number < len(setups) else 0], ray=_whole(own.ray), timeline=own.timeline)
            for number, own in enumerate(self._setups)
        ]
        differs = any(replica.setup != given[replica.number] for replica in self._replicas)
        while replica := next((one for one in self._replicas if one.client not in looked_at), None):
            looked_at.add(replica.client)
            setup = given[replica.number]
            if replica.client.failure or (differs and replica.setup == setup):
                continue
            try:
                switched.append(await replica.client.switch_plan(setup))
                changed += [replica] if replica.setup != setup else []
            except InputError:
                await self._switch_back(changed)
                raise
            except EngineError:  # It has died, and is left out from now on.
                if not any(other.client.failure is None for other in self._replicas):
                    raise
        self._replicas = [_Replica(one.client, given[one.number], one.number) for one in self._replicas]
        self._setups = given
        self.set_capacities([setup.capacity for setup in given])
        return PlanSwitched(
            number=max((one.number for one in switched), default=0),
            num_blocks=self.num_blocks,
            request_tokens=self.request_tokens,
            seconds=max((one.seconds for one in switched), default=0.0),
            num_recomputed=sum(one.num_recomputed for one in switched),
            num_carried=sum(one.num_carried for one in switched),
        )

    async def _switch_back(self, replicas: Sequence[_Replica]) -> None:
        for replica in replicas:
            if not replica.client.failure:
                await replica.client.switch_plan(replica.setup)

    def fail_all(self, error: Exception) -> None:
        for one in (*self._replicas, *self._coming.values()):
            one.client.fail_all(error)

    async def close(self) -> None:
        """Ends all engine processes."""
        tasks = [*self._watching, *self._starting.values(), *self._draining.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in self._clients))
        await asyncio.to_thread(self._forks.close)

    async def _watch(self, replica: _Replica) -> None:
        """Says when a replica has failed; the set has failed with the last of them, where none comes up any more.

        Where only replicas that drain are left, one of them serves again.
        """
        client = replica.client
        await client.ended.wait()
        if not any(one.client is client for one in self._replicas):  # It has drained.
            return
        num_left, total = sum(not one.client.failure for one in self._replicas), len(self._replicas)
        log.error("replica %d: %s; %d of %d replicas go on", replica.number, client.failure, num_left, total)
        while self._only_coming:
            await asyncio.wait(list(self._starting.values()))
        left = [one.number for one in self._replicas if not one.client.failure]
        if not left:
            self.failure = client.failure
            self.ended.set()
        elif all(number in self._draining for number in left):
            self._stop_draining(left[0])


def _whole(ray: RaySetup | None) -> RaySetup | None:
    """Where a replica has all devices of its plan."""
    return with_fields(ray, away=0, silent=()) if ray else None
